"""What the lanes of a warp do together (PTX ISA 9.7.9.6, 9.7.13.9 and following), and special registers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .kernel import Kernel, each, operands, program, rng


def kernels() -> Iterator[Kernel]:
    yield from _shuffles()
    yield from _votes()
    yield from _matches()
    yield from _reductions()
    yield from _specials()


def _shuffles() -> Iterator[Kernel]:
    for mode in ("up", "down", "bfly", "idx"):
        fixed = [
            f"shfl.sync.{mode}.b32 %d|%e, %a, {b}, {c:#x}, -1;"
            for b, c in (
                (1, 0 if mode == "up" else 31),
                (3, 0x1800 if mode == "up" else 0x181F),
                (16, 0x1C07),
                (33, 31),
            )
        ]
        yield each(f"warps/shfl.{mode}", "b32|pred", "b32", *fixed, lanes=64)
        yield each(
            f"warps/shfl.{mode} by operands",
            "b32|pred",
            "b32 b32=amounts b32=amounts",
            f"shfl.sync.{mode}.b32 %d|%e, %a, %b, 31, -1;",
            f"and.b32 %r1, %c, 0x1f1f; shfl.sync.{mode}.b32 %d|%e, %a, %b, %r1, -1;",
            lanes=128,
        )
    yield program(
        "warps/shfl of some lanes",
        """
  in0.b32 %r1; mov.u32 %r2, 0; setp.lt.u32 %p1, %t, 20; @!%p1 bra skip;
  shfl.sync.idx.b32 %r2|%p2, %r1, 7, 31, 0xfffff; out.b32 %r2; out.pred %p2;
  shfl.sync.bfly.b32 %r3, %r1, 1, 31, 0xfffff; out.b32 %r3;
skip:
""",
        operands("some lanes", ("b32",), 64),
    )


def _votes() -> Iterator[Kernel]:
    yield program(
        "warps/vote",
        "  in0.b32 %r1; setp.gt.s32 %p1, %r1, 0; setp.ne.s32 %p4, %i, -1; setp.ge.u32 %p5, %i, 32;\n"
        + "\n".join(
            f"  vote.sync.{mode}.pred %p2, {no}{p}, -1; out.pred %p2;"
            for mode in ("all", "any", "uni")
            for p in ("%p1", "%p4", "%p5")
            for no in ("", "!")
        )
        + "\n".join(f"  vote.sync.ballot.b32 %r2, {p}, -1; out.b32 %r2;" for p in ("%p1", "%p4", "!%p5"))
        + "\n  activemask.b32 %r3; out.b32 %r3;",
        operands("vote", ("b32",), 96),
        lanes=96,
    )
    yield program(
        "warps/vote of some lanes",
        """
  in0.b32 %r1; setp.gt.s32 %p1, %r1, 0; and.b32 %r5, %t, 3; setp.eq.u32 %p3, %r5, 1; @!%p3 bra skip;
  vote.sync.ballot.b32 %r2, %p1, 0x22222222; out.b32 %r2; vote.sync.all.pred %p2, %p1, 0x22222222;
    out.pred %p2;
  vote.sync.any.pred %p2, %p1, 0x22222222; out.pred %p2; bar.warp.sync 0x22222222;
skip: bar.warp.sync -1;
""",
        operands("vote some", ("b32",), 64),
    )
    yield program(
        "warps/elect",
        """
  elect.sync %r1|%p1, -1; out.b32 %r1; out.pred %p1; elect.sync _|%p1, -1; out.pred %p1;
  setp.gt.u32 %p2, %t, 4; @!%p2 bra skip;
  elect.sync %r1|%p1, 0xffffffe0; out.b32 %r1; out.pred %p1;
skip:
""",
    )


def _matches() -> Iterator[Kernel]:
    small = rng("match").integers(0, 5, 96).astype(np.uint64)
    small[32:64] = 3
    yield program(
        "warps/match",
        """
  in0.b64 %q1; cvt.u32.u64 %r1, %q1; shl.b64 %q2, %q1, 40;
  match.any.sync.b32 %r2, %r1, -1; out.b32 %r2; match.any.sync.b64 %r2, %q2, -1; out.b32 %r2;
  match.all.sync.b32 %r2|%p1, %r1, -1; out.b32 %r2; out.pred %p1;
  match.all.sync.b64 %r2|%p1, %q2, -1; out.b32 %r2; out.pred %p1;
""",
        (small,),
        lanes=96,
    )


def _reductions() -> Iterator[Kernel]:
    kinds = [
        *(f"{name}.{type}" for type in ("u32", "s32") for name in ("add", "min", "max")),
        *(f"{name}.b32" for name in ("and", "or", "xor")),
    ]
    yield program(
        "warps/redux",
        "  in0.b32 %r1; setp.lt.u32 %p1, %t, 20;\n"
        + "\n".join(f"  redux.sync.{kind} %r2, %r1, -1; out.b32 %r2;" for kind in kinds)
        + "\n  @!%p1 bra skip;\n"
        + "\n".join(f"  redux.sync.{kind} %r2, %r1, 0xfffff; out.b32 %r2;" for kind in kinds)
        + "\nskip:\n",
        operands("redux", ("b32",), 96),
        lanes=96,
    )


def _specials() -> Iterator[Kernel]:
    names = (
        "laneid",
        "tid.x",
        "tid.y",
        "ntid.x",
        "ntid.y",
        "ctaid.x",
        "nctaid.x",
        "nctaid.z",
        "lanemask_eq",
        "lanemask_lt",
        "lanemask_le",
        "lanemask_gt",
        "lanemask_ge",
        "cluster_ctarank",
        "cluster_nctarank",
        "clusterid.x",
        "nclusterid.x",
        "cluster_ctaid.x",
        "cluster_nctaid.x",
    )
    yield program(
        "warps/special registers",
        "\n".join(f"  mov.u32 %r1, %{name}; out.b32 %r1;" for name in names)
        + "\n  mov.pred %p1, %is_explicit_cluster; out.pred %p1; mov.u32 %r1, WARP_SZ; out.b32 %r1;",
        lanes=128,
        block=64,
    )
