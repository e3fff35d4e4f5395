"""atom and red (PTX ISA 9.7.13.6 and following): every operation, type and space."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .kernel import Kernel, edges, operands, program

OPERATIONS = (
    *(("add", type) for type in ("u32", "s32", "u64", "f32", "f64")),
    *(("add.noftz", type) for type in ("f16", "f16x2", "bf16", "bf16x2")),
    *((name, type) for name in ("min", "max") for type in ("u32", "s32", "u64", "s64")),
    *((name, type) for name in ("and", "or", "xor", "exch") for type in ("b32", "b64")),
    ("inc", "u32"),
    ("dec", "u32"),
)
_PREFIX = {"b16": "%h", "b32": "%r", "b64": "%q", "f32": "%f", "f64": "%g"}
_SIZE = {"f16": 2, "bf16": 2, "f64": 8}


def kernels() -> Iterator[Kernel]:
    for operation, type in OPERATIONS:
        yield _alone(operation, type)
        if operation != "exch":
            yield _together(operation, type)
    yield from _swaps()
    yield from _wide()
    yield from _vectors()
    yield from _scopes()


def _size(type: str) -> int:
    return _SIZE.get(type) or int(type.rstrip("x2")[1:] if type.endswith("x2") else type[1:]) // 8


def _bits(type: str) -> str:
    return f"b{8 * (4 if type.endswith('x2') else _size(type))}"


def _name(type: str, number: int) -> str:
    kind = type if type in ("f32", "f64") else _bits(type)
    return f"{_PREFIX[kind]}{number}"


def _alone(operation: str, type: str) -> Kernel:
    """Every lane at an address of its own, in global and in shared memory: old and new values."""
    bits = _bits(type)
    size = int(bits[1:]) // 8
    a, b, d = (_name(type, n) for n in (1, 2, 3))
    head, _, tail = operation.partition(".")
    op = f"{head}.{tail}.{type}" if tail else f"{head}.{type}"
    return program(
        f"atomics/{operation}.{type}",
        f"""
  .shared .align 8 .b8 room[{32 * size}];
  in0.{bits} {a}; in1.{bits} {b};
  mov.u32 %r9, room; mad.lo.u32 %r9, %t, {size}, %r9; st.shared.{bits} [%r9], {a};
  atom.shared.{op} {d}, [%r9], {b}; out.{bits} {d}; ld.shared.{bits} {d}, [%r9]; out.{bits} {d};
  mad.wide.u32 %q9, %i, {size}, %in0;
  atom.global.{op} {d}, [%q9], {b}; out.{bits} {d}; ld.global.{bits} {d}, [%q9]; out.{bits} {d};
  {"" if head == "exch" else f"red.global.{op} [%q9], {b}; ld.global.{bits} {d}, [%q9]; out.{bits} {d};"}
""",
        operands(f"atomics {operation} {type}", (type, type), 128),
        lanes=128,
    )


def _together(operation: str, type: str) -> Kernel:
    """Many lanes at one address; what remains does not depend on their order."""
    bits = _bits(type)
    size = int(bits[1:]) // 8
    b, d = _name(type, 2), _name(type, 3)
    head, _, tail = operation.partition(".")
    op = f"{head}.{tail}.{type}" if tail else f"{head}.{type}"
    values: np.ndarray
    if type in ("f32", "f64"):
        values = (np.arange(128) - 60).astype(f"f{size}").view(f"u{size}")
    elif type in ("f16", "f16x2", "bf16", "bf16x2"):
        values = np.resize(
            np.array(
                [0x3F80, 0xBF80, 0, 0x4000] if "b" in type[0] else [0x3C00, 0xBC00, 0, 0x4000], f"u{size}"
            ),
            128,
        )
        if size == 4:
            values = values | np.roll(values, 1) << np.uint32(16)
    elif head in ("inc", "dec"):
        values = np.full(128, 9, np.uint32)
    else:
        values = operands(f"together {operation} {type}", (type,), 128)[0]
    return program(
        f"atomics/together {operation}.{type}",
        f"""
  .shared .align 8 .b8 cell[8];
  setp.eq.u32 %p1, %t, 0; @%p1 st.shared.b64 [cell], {-1 if head in ("and", "min") else 0}; bar.sync 0;
  in0.{bits} {b};
  red.shared.{op} [cell], {b}; atom.shared.{op} {d}, [cell], {b};
  setp.gt.u32 %p2, %t, 11; @%p2 red.shared.{op} [cell], {b};
  bar.sync 0; ld.shared.{bits} {d}, [cell]; out.{bits} {d};
""",
        (values,),
        lanes=128,
        block=64,
    )


def _swaps() -> Iterator[Kernel]:
    for bits in ("b16", "b32", "b64"):
        size = int(bits[1:]) // 8
        a, b, c, d = (f"{_PREFIX[bits]}{n}" for n in (1, 2, 3, 4))
        first = operands(f"cas {bits}", (bits, bits), 128)
        compare = np.where(np.arange(128) % 3 == 0, first[0], first[1])
        yield program(
            f"atomics/cas.{bits}",
            f"""
  .shared .align 8 .b8 room[{32 * size}];
  in0.{bits} {a}; in1.{bits} {b}; in2.{bits} {c};
  mov.u32 %r9, room; mad.lo.u32 %r9, %t, {size}, %r9; st.shared.{bits} [%r9], {a};
  atom.shared.cas.{bits} {d}, [%r9], {b}, {c}; out.{bits} {d}; ld.shared.{bits} {d}, [%r9]; out.{bits} {d};
  mad.wide.u32 %q9, %i, {size}, %in0;
  atom.acq_rel.gpu.global.cas.{bits} {d}, [%q9], {b}, {c}; out.{bits} {d}; ld.global.{bits} {d}, [%q9];
  out.{bits} {d};
""",
            (first[0], compare, first[1]),
            lanes=128,
        )
    values = np.resize(edges("f32"), 64).astype(np.uint32)
    yield program(
        "atomics/maximum of floats by compare and swap",
        """
  .shared .align 4 .b32 cell; setp.eq.u32 %p1, %t, 0; @%p1 st.shared.b32 [cell], 0xff800000; bar.sync 0;
  in0.b32 %r1; mov.b32 %f1, %r1; ld.volatile.shared.b32 %r2, [cell];
again: mov.b32 %f2, %r2; setp.gt.f32 %p2, %f1, %f2; @!%p2 bra done;
  atom.shared.cas.b32 %r3, [cell], %r2, %r1; setp.ne.b32 %p3, %r3, %r2; mov.b32 %r2, %r3; @%p3 bra again;
done: bar.sync 0; ld.shared.b32 %r4, [cell]; out.b32 %r4;
""",
        (values,),
    )


def _wide() -> Iterator[Kernel]:
    first = operands("b128", ("b64", "b64", "b64", "b64"), 64)
    memory = np.stack((first[0], first[1]), axis=1).reshape(-1)
    compare = np.where(np.arange(64) % 2 == 0, first[1], first[3])
    yield program(
        "atomics/b128",
        """
  in1.b64 %q1; in2.b64 %q2; in3.b64 %q3; in4.b64 %q4;
  .reg .b128 %old, %compare, %new; mov.b128 %compare, {%q1, %q2}; mov.b128 %new, {%q3, %q4};
  mad.wide.u32 %q9, %i, 16, %in0;
  atom.global.cas.b128 %old, [%q9], %compare, %new; mov.b128 {%q5, %q6}, %old; out.b64 %q5; out.b64 %q6;
  ld.global.v2.b64 {%q5, %q6}, [%q9]; out.b64 %q5; out.b64 %q6;
  atom.global.exch.b128 %old, [%q9], %compare; mov.b128 {%q5, %q6}, %old; out.b64 %q5; out.b64 %q6;
  ld.global.v2.b64 {%q5, %q6}, [%q9]; out.b64 %q5; out.b64 %q6;
""",
        (memory, first[0], compare, first[2], first[3]),
    )


_VECTORS = (
    *(("add", "f32", 2), ("add", "f32", 4), ("add", "f16", 2), ("add", "f16", 4), ("add", "bf16", 8)),
    *(("add", "f16x2", 2), ("add", "bf16x2", 4), ("min", "f16", 8), ("max", "bf16x2", 2), ("min", "bf16", 2)),
    ("max", "f16x2", 4),
)


def _vectors() -> Iterator[Kernel]:
    for operation, type, count in _VECTORS:
        bits = _bits(type)
        size = int(bits[1:]) // 8
        values = operands(f"vector atomics {type} {count}", (type, type), 64 * count)
        old, new = ([f"%{letter}{n}" for n in range(count)] for letter in "vw")
        op = f"{operation}.{type}" if type == "f32" else f"{operation}.noftz.{type}"
        lines = [
            f"  .reg .{type if type == 'f32' else bits} %v<8>, %w<8>;",
            f"  mad.wide.u32 %q9, %i, {size * count}, %in0; mad.wide.u32 %q8, %i, {size * count}, %in1;",
            *(f"  ld.global.{bits} {name}, [%q8+{size * n}];" for n, name in enumerate(new)),
            f"  atom.global.v{count}.{op} {{{', '.join(old)}}}, [%q9], {{{', '.join(new)}}};",
            *(f"  out.{bits} {name};" for name in old),
            f"  red.global.v{count}.{op} [%q9], {{{', '.join(new)}}};",
            *(f"  ld.global.{bits} {old[0]}, [%q9+{size * n}]; out.{bits} {old[0]};" for n in range(count)),
        ]
        yield program(f"atomics/v{count} {operation} {type}", "\n".join(lines), values)


def _scopes() -> Iterator[Kernel]:
    values = operands("scopes", ("u32", "u32"), 64)
    forms = [
        f"atom.{semantics}.{scope}.{space}.add.u32 %r3, [{address}], %r2; out.b32 %r3;"
        for semantics in ("relaxed", "acquire", "release", "acq_rel")
        for scope in ("cta", "gpu", "sys", "cluster")
        for space, address in (("global", "%q9"), ("shared", "%r9"))
    ]
    yield program(
        "atomics/scopes",
        """
  .shared .align 8 .b8 room[128];
  in0.b32 %r1; in1.b32 %r2; mov.u32 %r9, room; mad.lo.u32 %r9, %t, 4, %r9; st.shared.b32 [%r9], %r1;
  mad.wide.u32 %q9, %i, 4, %in0;
"""
        + "\n".join(forms)
        + """
  cvta.global.u64 %q9, %q9; atom.add.u32 %r3, [%q9], %r2; out.b32 %r3;
  red.release.gpu.add.u32 [%q9], %r2; ld.acquire.gpu.u32 %r3, [%q9]; out.b32 %r3;
  cvt.u64.u32 %q8, %r9; cvta.shared.u64 %q8, %q8; atom.xor.b32 %r3, [%q8], %r2; out.b32 %r3;
  red.and.b32 [%q8], %r1; ld.u32 %r3, [%q8]; out.b32 %r3;
""",
        values,
    )
