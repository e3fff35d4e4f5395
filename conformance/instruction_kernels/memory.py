"""Moves, loads, stores, addresses, copies (PTX ISA 9.7.9), and the stack (9.7.16)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .kernel import SIZES, Kernel, each, operands, program, rng


def kernels() -> Iterator[Kernel]:
    yield from _moves()
    yield from _widths()
    yield from _vectors()
    yield from _spaces()
    yield from _copies()
    yield from _stack()


def _moves() -> Iterator[Kernel]:
    yield each(
        "memory/pack and unpack",
        "b64",
        "b32 b32",
        "mov.b64 %d, {%a, %b};",
        "mov.b64 {%r1, %r2}, %q1; mov.b64 %d, {%b, %a};",
        "mov.b32 {%h1, %h2}, %a; mov.b32 {%h3, %h4}, %b; mov.b64 %d, {%h4, %h1, %h3, %h2};",
    )
    yield each(
        "memory/128 bits",
        "b64",
        "b64 b64",
        ".reg .b128 %w; mov.b128 %w, {%a, %b}; mov.b128 {%q1, %q2}, %w; sub.u64 %d, %q1, %q2;",
        "mov.b128 %w, {%b, %a}; .reg .b128 %v; mov.b128 %v, %w; mov.b128 {%d, _}, %v;",
    )
    yield program(
        "memory/128 bits in memory",
        """
  .shared .align 16 .b8 room[1024];
  in0.b64 %q1; in1.b64 %q2;
  .reg .b128 %w; mov.b128 %w, {%q1, %q2};
  mov.u32 %r1, room; mad.lo.u32 %r1, %t, 16, %r1;
  st.shared.b128 [%r1], %w; bar.sync 0;
  xor.b32 %r2, %t, 1; mov.u32 %r3, room; mad.lo.u32 %r3, %r2, 16, %r3;
  .reg .b128 %v; ld.shared.b128 %v, [%r3];
  mov.b128 {%q3, %q4}, %v;
  out.b64 %q3; out.b64 %q4;
  ld.shared.v2.b64 {%q5, %q6}, [%r1]; out.b64 %q5; out.b64 %q6;
""",
        inputs=operands("128 bits", ("b64", "b64"), 64),
    )


def _widths() -> Iterator[Kernel]:
    """A register may be wider than what is loaded: filled with the sign or with zeros."""
    data = rng("bytes").integers(0, 256, 64 * 8, np.uint8)
    address = "mad.wide.u32 %q1, %i, 8, %in0;"
    for size in (8, 16, 32):
        wider = [w for w in (16, 32, 64) if w > size or (w == 16 and size == 8)]
        for width in wider:
            name = {16: "%h1", 32: "%r1", 64: "%q2"}[width]
            kinds = [f"u{size}", f"s{size}", f"b{size}"]
            lines = [f"{address} ld.global.{kind} {name}, [%q1]; out.b{width} {name};" for kind in kinds]
            lines.append(
                f".local .align 8 .b8 place{size}[8]; st.local.b64 [place{size}], 0x1122334455667788; "
                f"st.local.u{size} [place{size}], {name}; ld.local.b64 %q3, [place{size}]; out.b64 %q3;"
            )
            yield program(f"memory/{size} bits in {width}", "\n".join(lines), (data,))
    yield program(
        "memory/cached loads and stores",
        "\n".join(
            [
                address,
                *(
                    f"ld.global.{how}.u32 %r1, [%q1]; out.b32 %r1;"
                    for how in (
                        "ca",
                        "cg",
                        "cs",
                        "lu",
                        "cv",
                        "nc",
                        "relaxed.gpu",
                        "acquire.gpu",
                        "volatile",
                        "nc.L1::no_allocate",
                        "L1::evict_first",
                        "L2::128B",
                        "relaxed.sys",
                        "weak",
                    )
                ),
                "ldu.global.u32 %r1, [%q1]; out.b32 %r1;",
                "mad.wide.u32 %q2, %i, 4, %out; st.global.wb.u32 [%q2+4096], %i;"
                "st.global.cg.u32 [%q2+4096], %i; st.global.cs.u32 [%q2+4096], %i;"
                "st.global.wt.u32 [%q2+4096], %i; st.global.L1::no_allocate.u32 [%q2+4096], %i;",
                "mov.u32 %r2, 0; out.b32 %r2; mov.u32 %r2, %i; out.b32 %r2;",
            ]
        ),
        (data,),
    )
    yield program(
        "memory/cache hints",
        f"""{address}
  .reg .b64 %policy;
  createpolicy.fractional.L2::evict_last.b64 %policy, 1.0;
  ld.global.L2::cache_hint.u32 %r1, [%q1], %policy; out.b32 %r1;
  createpolicy.fractional.L2::evict_first.b64 %policy;
  ld.global.L1::evict_last.L2::cache_hint.v2.u32 {{%r1, %r2}}, [%q1], %policy; out.b32 %r1; out.b32 %r2;
  createpolicy.range.L2::evict_last.L2::evict_unchanged.b64 %policy, [%in0], 512, 512;
  ld.global.L2::cache_hint.u32 %r1, [%q1], %policy; out.b32 %r1;
  prefetch.global.L1 [%q1]; prefetch.global.L2 [%q1]; prefetch.global.L2::evict_last [%q1];
  prefetchu.L1 [%q1]; applypriority.global.L2::evict_normal [%in0], 128;
""",
        (data,),
    )


def _vectors() -> Iterator[Kernel]:
    data = rng("vectors").integers(0, 256, 64 * 32, np.uint8)
    for type, count in (
        ("u8", 2),
        ("u8", 4),
        ("b16", 2),
        ("b16", 4),
        ("b32", 2),
        ("b32", 4),
        ("b64", 2),
        ("f32", 2),
        ("f32", 4),
        ("f64", 2),
        ("s8", 4),
    ):
        size = SIZES[type]
        kind = {"f32": "%f", "f64": "%g"}.get(type) or {1: "%h", 2: "%h", 4: "%r", 8: "%q"}[size]
        names = [f"{kind}{n + 2}" for n in range(count)]
        turned = names[1:] + names[:1]
        yield program(
            f"memory/v{count} {type}",
            f"""
  .shared .align 32 .b8 room[1024];
  mad.wide.u32 %q1, %i, {size * count}, %in0;
  ld.global.v{count}.{type} {{{", ".join(names)}}}, [%q1];
  mov.u32 %r1, room; mad.lo.u32 %r1, %t, {size * count}, %r1;
  st.shared.v{count}.{type} [%r1], {{{", ".join(turned)}}};
  bar.sync 0;
  ld.shared.v{count}.{type} {{{", ".join(names)}}}, [%r1];
  """
            + "\n".join(f"  out.b{8 * max(size, 2)} {name};" for name in names),
            (data,),
        )


def _spaces() -> Iterator[Kernel]:
    data = rng("spaces").integers(0, 256, 64 * 4, np.uint8)
    outside = """
.const .align 4 .b32 table[8] = {1, 2, 3, 4, 0x80000000, 0xFFFFFFFF, 7, 8};
.global .align 4 .b32 initial[4] = {11, 22, 33, 44};
.extern .shared .align 16 .b8 dynamic[];
"""
    yield program(
        "memory/spaces",
        """
  .shared .align 4 .b32 cell; .local .align 4 .b32 mine[4];
  mov.u64 %q1, cell; cvta.shared.u64 %q2, %q1; mov.u64 %q3, mine; cvta.local.u64 %q4, %q3;
  mov.u64 %q5, initial; cvta.global.u64 %q6, %q5; mov.u64 %q7, table; cvta.const.u64 %q8, %q7;
"""
        + "\n".join(
            f"  isspacep.{space} %p1, {register}; out.pred %p1;"
            for register in ("%q2", "%q4", "%q6", "%q8")
            for space in ("global", "shared", "local", "const", "shared::cta", "shared::cluster")
        )
        + """
  cvta.to.shared.u64 %q9, %q2; sub.u64 %q9, %q9, %q1; out.b64 %q9;
  cvta.to.local.u64 %q9, %q4; sub.u64 %q9, %q9, %q3; out.b64 %q9;
  and.b32 %r1, %i, 7; mul.wide.u32 %q10, %r1, 4; add.u64 %q11, %q10, %q8; ld.u32 %r2, [%q11]; out.b32 %r2;
  add.u64 %q11, %q10, %q7; ld.const.u32 %r2, [%q11]; out.b32 %r2;
  and.b32 %r1, %i, 3; mul.wide.u32 %q10, %r1, 4; add.u64 %q11, %q10, %q6; ld.u32 %r2, [%q11]; out.b32 %r2;
  in0.b32 %r3; add.u64 %q11, %q10, %q4; st.u32 [%q11], %r3; add.u64 %q11, %q10, %q3; ld.local.u32 %r4, [%q11];
  out.b32 %r4;
  st.shared.u32 [cell], 5; ld.u32 %r5, [%q2]; out.b32 %r5;
  mov.u32 %r6, dynamic; mad.lo.u32 %r6, %t, 4, %r6; st.shared.u32 [%r6], %r3; bar.sync 0;
    ld.shared.u32 %r7, [%r6];
  out.b32 %r7; mov.u32 %r8, %dynamic_smem_size; out.b32 %r8;
""",
        (data,),
        outside=outside,
        dynamic_shared=256,
    )
    yield program(
        "memory/generic addresses of different spaces",
        """
  .shared .align 4 .b32 cells[32]; .local .align 4 .b32 mine;
  in0.b32 %r3;
  mov.u64 %q1, cells; cvta.shared.u64 %q2, %q1; mul.wide.u32 %q3, %t, 4; add.u64 %q2, %q2, %q3;
  mov.u64 %q4, mine; cvta.local.u64 %q5, %q4; mad.wide.u32 %q6, %i, 4, %in0; cvta.global.u64 %q6, %q6;
  st.u32 [%q2], 100; st.u32 [%q5], 200;
  rem.u32 %r1, %i, 3; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 1;
  selp.b64 %q7, %q5, %q6, %p2; selp.b64 %q7, %q2, %q7, %p1;
  ld.u32 %r2, [%q7]; out.b32 %r2; add.u32 %r2, %r2, %i; st.u32 [%q7], %r2; ld.u32 %r4, [%q7]; out.b32 %r4;
""",
        (data,),
    )


def _copies() -> Iterator[Kernel]:
    data = rng("copies").integers(0, 256, 64 * 16, np.uint8)
    start = """
  .shared .align 16 .b8 room[1024];
  mov.u32 %r1, room; mad.lo.u32 %r1, %t, 16, %r1; mad.wide.u32 %q1, %i, 16, %in0;
  st.shared.v4.u32 [%r1], {1, 2, 3, 4};
"""
    ends = "\n".join(f"  ld.shared.u32 %r2, [%r1+{4 * n}]; out.b32 %r2;" for n in range(4))
    waits = "  cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;\n"
    for name, copies in {
        "4 and 8 bytes": "cp.async.ca.shared.global [%r1], [%q1], 4; "
        "cp.async.ca.shared.global [%r1+8], [%q1+8], 8;",
        "16 bytes": "cp.async.cg.shared.global [%r1], [%q1], 16;",
        "16 bytes ca": "cp.async.ca.shared.global.L2::128B [%r1], [%q1], 16;",
        "a part": "and.b32 %r3, %i, 15; cp.async.cg.shared.global [%r1], [%q1], 16, %r3;",
        "a part of 8": "and.b32 %r3, %i, 7; cp.async.ca.shared.global [%r1], [%q1], 8, %r3;",
        "ignored": "setp.gt.u32 %p1, %i, 40; cp.async.ca.shared.global [%r1], [%q1], 8, %p1;",
        "guarded": "setp.gt.u32 %p1, %i, 9; @%p1 cp.async.cg.shared.global [%r1], [%q1], 16;",
    }.items():
        yield program(f"copies/{name}", f"{start}  {copies}\n{waits}{ends}", (data,))
    yield program(
        "copies/groups",
        f"""{start}
  cp.async.ca.shared.global [%r1], [%q1], 4; cp.async.commit_group;
  cp.async.ca.shared.global [%r1+4], [%q1+4], 4; cp.async.commit_group;
  cp.async.wait_group 1; ld.shared.u32 %r2, [%r1]; out.b32 %r2;
  cp.async.wait_all;
{ends}""",
        (data,),
    )
    yield program(
        "copies/mbarrier",
        f"""{start}
  .shared .align 8 .b64 bar;
  setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [bar], 32; bar.sync 0;
  cp.async.ca.shared.global [%r1], [%q1], 8; cp.async.mbarrier.arrive.noinc.shared.b64 [bar];
spin: mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0; @!%p2 bra spin;
  xor.b32 %r4, %t, 1; mov.u32 %r1, room; mad.lo.u32 %r1, %r4, 16, %r1;
{ends}""",
        (data,),
    )


def _stack() -> Iterator[Kernel]:
    yield program(
        "memory/alloca",
        """
  .reg .b64 %top, %place, %more; .reg .b64 %n;
  stacksave.u64 %top;
  and.b32 %r1, %i, 7; add.u32 %r1, %r1, 1; mul.wide.u32 %n, %r1, 16;
  alloca.u64 %place, %n; cvta.local.u64 %q1, %place;
  mov.u32 %r2, 0;
fill: mad.wide.u32 %q2, %r2, 4, %place; mad.lo.u32 %r3, %r2, 3, %i; st.local.u32 [%q2], %r3;
  add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r1; @%p1 bra fill;
  alloca.u64 %more, 64, 32; st.local.u32 [%more], 77; and.b64 %q3, %more, 31; out.b64 %q3;
  mov.u32 %r2, 0; mov.u32 %r4, 0;
sum: mad.wide.u32 %q2, %r2, 4, %q1; ld.u32 %r3, [%q2]; add.u32 %r4, %r4, %r3;
  add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r1; @%p1 bra sum;
  out.b32 %r4; ld.local.u32 %r5, [%more]; out.b32 %r5;
  stackrestore.u64 %top;
  alloca.u64 %more, 16; st.local.u32 [%more], %i; ld.local.u32 %r5, [%more]; out.b32 %r5;
""",
    )
