"""Branches, calls, loops and barriers (PTX ISA 9.7.12 and 9.7.13)."""

from __future__ import annotations

from collections.abc import Iterator

from .kernel import Kernel, operands, program

_FUNCTIONS = """
.func (.param .b32 result) twice(.param .b32 value)
{ .reg .b32 %a; ld.param.b32 %a, [value]; add.u32 %a, %a, %a; st.param.b32 [result], %a; ret; }
.func (.param .b32 result) square(.param .b32 value)
{ .reg .b32 %a; ld.param.b32 %a, [value]; mul.lo.u32 %a, %a, %a; st.param.b32 [result], %a; ret; }
.func (.param .b32 result) less(.param .b32 value)
{ .reg .b32 %a; ld.param.b32 %a, [value]; sub.u32 %a, %a, 3; st.param.b32 [result], %a; ret; }
.global .align 8 .u64 table[3] = {twice, square, less};
.func (.param .b32 result) factorial(.param .b32 value)
{ .reg .b32 %a, %b; .reg .pred %p; ld.param.b32 %a, [value]; mov.u32 %b, 1; setp.le.u32 %p, %a, 1;
    @%p bra out;
  { .param .b32 r; .param .b32 v; sub.u32 %b, %a, 1; st.param.b32 [v], %b;
    call.uni (r), factorial, (v); ld.param.b32 %b, [r]; mul.lo.u32 %b, %b, %a; }
out: st.param.b32 [result], %b; ret; }
.func (.param .b32 result) total(.param .b32 value)
{ .reg .b32 %a, %b, %t; .reg .pred %p; .shared .align 4 .b32 sum;
  ld.param.b32 %a, [value]; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; @%p st.shared.b32 [sum], 0; bar.sync 0;
  red.shared.add.u32 [sum], %a; bar.sync 0; ld.shared.b32 %b, [sum]; bar.sync 0; st.param.b32 [result], %b;
    ret; }
.func (.param .b32 result) largest(.param .b32 value)
{ .reg .b32 %a, %b, %t; .reg .pred %p; .shared .align 4 .b32 most;
  ld.param.b32 %a, [value]; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; @%p st.shared.b32 [most], 0;
    bar.sync 0;
  red.shared.max.u32 [most], %a; bar.sync 0; ld.shared.b32 %b, [most]; bar.sync 0;
    st.param.b32 [result], %b; ret; }
.global .align 8 .u64 together[2] = {total, largest};
"""


def kernels() -> Iterator[Kernel]:
    yield from _branches()
    yield from _calls()
    yield from _barriers()
    yield from _mbarriers()


def _branches() -> Iterator[Kernel]:
    values = operands("branches", ("b32",), 128)
    yield program(
        "control/nested loops",
        """
  in0.b32 %r1; and.b32 %r2, %r1, 15; mov.u32 %r3, 0; mov.u32 %r4, 0;
outer: setp.ge.u32 %p1, %r4, %r2; @%p1 bra done; mov.u32 %r5, 0;
inner: add.u32 %r3, %r3, %r5; xor.b32 %r3, %r3, %r4; and.b32 %r6, %r3, 63; setp.eq.u32 %p2, %r6, 61;
    @%p2 bra leave;
  add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, %r4; @%p3 bra inner;
leave: add.u32 %r4, %r4, 1; setp.gt.u32 %p4, %r3, 5000; @%p4 bra done; bra outer;
done: out.b32 %r3; out.b32 %r4;
""",
        values,
        lanes=128,
    )
    yield program(
        "control/brx.idx",
        """
  in0.b32 %r1; and.b32 %r2, %i, 3; mov.u32 %r3, 7;
targets: .branchtargets a, b, c, d;
  brx.idx %r2, targets;
a: add.u32 %r3, %r1, 1; bra end;
b: mul.lo.u32 %r3, %r1, 3;
c: xor.b32 %r3, %r3, %r1; bra end;
d: not.b32 %r3, %r1;
end: out.b32 %r3;
""",
        values,
        lanes=128,
    )
    yield program(
        "control/irreducible",
        """
  in0.b32 %r1; and.b32 %r2, %r1, 7; mov.u32 %r3, 0; setp.gt.u32 %p1, %r2, 3; @%p1 bra second;
first: add.u32 %r3, %r3, 1; shl.b32 %r3, %r3, 1;
second: add.u32 %r3, %r3, 3; add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 9; @%p2 bra first;
  out.b32 %r3;
""",
        values,
        lanes=128,
    )
    yield program(
        "control/guards",
        """
  in0.b32 %r1; setp.gt.s32 %p1, %r1, 0; mov.u32 %r2, 5; mov.u64 %q2, 9; setp.eq.u32 %p2, %i, 3;
  @%p1 add.u32 %r2, %r2, %r1; @!%p1 mul.wide.u32 %q2, %r1, %r1; @%p2 mov.pred %p1, %p2;
    @!%p2 not.pred %p1, %p1;
  out.b32 %r2; out.b64 %q2; out.pred %p1; setp.lt.u32 %p3, %i, 70; @%p3 exit; out.b32 %r1;
""",
        values,
        lanes=128,
    )


def _calls() -> Iterator[Kernel]:
    values = operands("calls", ("b32",), 64)
    yield program(
        "control/calls",
        """
  in0.b32 %r1; { .param .b32 r; .param .b32 v; st.param.b32 [v], %r1; call (r), twice, (v);
    ld.param.b32 %r2, [r]; }
  out.b32 %r2; and.b32 %r3, %r1, 15;
  { .param .b32 r; .param .b32 v; st.param.b32 [v], %r3; call (r), factorial, (v); ld.param.b32 %r4, [r]; }
  out.b32 %r4;
  rem.u32 %r5, %i, 3; mov.u64 %q1, table; mad.wide.u32 %q1, %r5, 8, %q1; ld.global.u64 %q2, [%q1];
shape: .callprototype (.param .b32 _) _ (.param .b32 _);
  { .param .b32 r; .param .b32 v; st.param.b32 [v], %r1; call (r), %q2, (v), shape; ld.param.b32 %r6, [r]; }
  out.b32 %r6;
""",
        values,
        outside=_FUNCTIONS,
    )
    yield program(
        "control/barriers in functions",
        """
  in0.b32 %r1; and.b32 %r1, %r1, 0xffff;
  { .param .b32 r; .param .b32 v; st.param.b32 [v], %r1; call.uni (r), total, (v); ld.param.b32 %r2, [r]; }
  out.b32 %r2;
shape: .callprototype (.param .b32 _) _ (.param .b32 _);
  rem.u32 %r5, %cb, 2; mov.u64 %q1, together; mad.wide.u32 %q1, %r5, 8, %q1; ld.global.u64 %q2, [%q1];
  { .param .b32 r; .param .b32 v; st.param.b32 [v], %r1; call.uni (r), %q2, (v), shape;
    ld.param.b32 %r6, [r]; }
  out.b32 %r6;
  mov.u64 %q1, table; ld.global.u64 %q2, [%q1];
  { .param .b32 r; .param .b32 v; st.param.b32 [v], %r6; call.uni (r), %q2, (v), shape;
    ld.param.b32 %r6, [r]; }
  out.b32 %r6;
""",
        operands("barriers in functions", ("b32",), 256),
        lanes=256,
        block=64,
        outside=_FUNCTIONS,
    )

    yield program(
        "control/malloc and free",
        """
  .reg .b64 %size; and.b32 %r2, %i, 7; add.u32 %r2, %r2, 1; mul.wide.u32 %size, %r2, 16;
  { .param .b64 r; .param .b64 n; st.param.b64 [n], %size; call.uni (r), malloc, (n); ld.param.b64 %q1, [r]; }
  setp.ne.u64 %p1, %q1, 0; out.pred %p1; isspacep.global %p2, %q1; out.pred %p2;
  and.b64 %q2, %q1, 15; out.b64 %q2; in0.b32 %r3; mad.wide.u32 %q3, %r2, 16, %q1;
  st.u32 [%q1], %r3; st.u32 [%q3+-4], %i; bar.sync 0; ld.u32 %r4, [%q1]; out.b32 %r4; ld.u32 %r4, [%q3+-4];
  out.b32 %r4;
  { .param .b64 p; st.param.b64 [p], %q1; call.uni free, (p); }
  mov.u64 %size, 0x7fffffffffff;
  { .param .b64 r; .param .b64 n; st.param.b64 [n], %size; call.uni (r), malloc, (n); ld.param.b64 %q1, [r]; }
  setp.eq.u64 %p1, %q1, 0; out.pred %p1;
  { .param .b64 p; st.param.b64 [p], 0; call.uni free, (p); }
""",
        values,
        outside=".extern .func (.param .b64 r) malloc (.param .b64 n);\n.extern .func free (.param .b64 p);",
    )


def _barriers() -> Iterator[Kernel]:
    yield program(
        "control/bar.red",
        """
  in0.b32 %r1; setp.gt.s32 %p1, %r1, 0; setp.ge.u32 %p3, %cb, 1;
  bar.red.popc.u32 %r2, 0, %p1; out.b32 %r2; bar.red.and.pred %p2, 0, %p3; out.pred %p2;
  bar.red.or.pred %p2, 0, !%p3; out.pred %p2; barrier.sync 1, 64; barrier.red.popc.u32 %r2, 2, 64, !%p1;
    out.b32 %r2;
""",
        operands("bar.red", ("b32",), 192),
        lanes=192,
        block=64,
    )
    yield program(
        "control/producer and consumer",
        """
  .shared .align 4 .b32 room[32]; in0.b32 %r1; mov.u32 %r3, 0; mov.u32 %r5, room; and.b32 %r4, %t, 31;
  mad.lo.u32 %r5, %r4, 4, %r5; setp.lt.u32 %p1, %t, 32; @!%p1 bra consumer;
  st.shared.b32 [%r5], %r1; membar.cta; bar.arrive 3, 64; bra done;
consumer: bar.sync 3, 64; ld.shared.b32 %r3, [%r5];
done: bar.sync 0; out.b32 %r3;
""",
        operands("producer", ("b32",), 128),
        lanes=128,
        block=64,
    )
    yield program(
        "control/barrier.cluster",
        """
  .shared .align 4 .b32 room[64]; in0.b32 %r1; mov.u32 %r2, room; mad.lo.u32 %r3, %t, 4, %r2;
    st.shared.b32 [%r3], %r1;
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; xor.b32 %r4, %t, 63;
    mad.lo.u32 %r4, %r4, 4, %r2;
  mapa.shared::cluster.u32 %r5, %r4, 0; ld.shared::cluster.b32 %r6, [%r5]; out.b32 %r6;
  getctarank.shared::cluster.u32 %r7, %r5; out.b32 %r7;
  barrier.cluster.arrive.release; barrier.cluster.wait.acquire; fence.acq_rel.cluster; fence.sc.gpu;
    fence.proxy.async;
""",
        operands("cluster", ("b32",), 128),
        lanes=128,
        block=64,
    )


def _mbarriers() -> Iterator[Kernel]:
    start = """
  .shared .align 8 .b64 bar; .shared .align 4 .b32 room[64]; in0.b32 %r1; mov.u32 %r2, room;
  mad.lo.u32 %r3, %t, 4, %r2; xor.b32 %r4, %t, 63; mad.lo.u32 %r4, %r4, 4, %r2; setp.eq.u32 %p1, %t, 0;
"""
    yield program(
        "mbarrier/arrive and test_wait",
        start
        + """
  @%p1 mbarrier.init.shared.b64 [bar], 64; bar.sync 0;
  st.shared.b32 [%r3], %r1; mbarrier.arrive.shared.b64 %q1, [bar];
one: mbarrier.test_wait.shared.b64 %p2, [bar], %q1; @!%p2 bra one; ld.shared.b32 %r5, [%r4]; out.b32 %r5;
  mbarrier.arrive.shared::cta.b64 %q1, [bar];
two: mbarrier.try_wait.shared.b64 %p2, [bar], %q1; @!%p2 bra two; st.shared.b32 [%r3], %t;
  mbarrier.arrive.release.cta.shared::cta.b64 _, [bar];
three: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0, 1000; @!%p2 bra three; ld.shared.b32 %r5, [%r4];
  out.b32 %r5; mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0; out.pred %p2;
  mbarrier.test_wait.parity.shared.b64 %p2, [bar], 1; out.pred %p2;
  bar.sync 0; @%p1 mbarrier.inval.shared.b64 [bar];
""",
        operands("mbarrier", ("b32",), 128),
        lanes=128,
        block=64,
    )
    yield program(
        "mbarrier/counts",
        start
        + """
  @%p1 mbarrier.init.shared.b64 [bar], 64; bar.sync 0; mov.u64 %q1, 0;
  @%p1 mbarrier.arrive.shared.b64 %q1, [bar], 33; bar.warp.sync -1;
  setp.lt.u32 %p4, %t, 32; setp.gt.u32 %p5, %t, 0; and.pred %p4, %p4, %p5;
  bar.sync 0; mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0; out.pred %p2; bar.sync 0;
  @%p4 mbarrier.arrive.shared.b64 _, [bar]; bar.sync 0;
  mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0; out.pred %p2;
  mbarrier.pending_count.b64 %r6, %q1; @%p1 mov.u32 %r7, %r6; @!%p1 mov.u32 %r7, 0; out.b32 %r7; bar.sync 0;
  @%p4 mbarrier.arrive_drop.shared.b64 _, [bar]; @%p1 mbarrier.arrive.shared.b64 %q2, [bar], 33; bar.sync 0;
  mbarrier.test_wait.parity.shared.b64 %p2, [bar], 1; out.pred %p2;
  @%p1 mbarrier.arrive.shared.b64 %q2, [bar], 33; bar.sync 0;
  mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0; out.pred %p2;
""",
        operands("mbarrier", ("b32",), 128),
        lanes=128,
        block=64,
        races=frozenset({3}),  # thread 0 may complete the next phase before the other warp asks
    )
    yield program(
        "mbarrier/transactions",
        start
        + """
  @%p1 mbarrier.init.shared.b64 [bar], 1; bar.sync 0;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64; bar.sync 0;
  mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0; out.pred %p2; bar.sync 0;
  @%p1 mbarrier.complete_tx.shared.b64 [bar], 40; bar.sync 0;
  mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0; out.pred %p2; bar.sync 0;
  @%p1 mbarrier.complete_tx.shared.b64 [bar], 24; bar.sync 0;
  mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0; out.pred %p2; bar.sync 0;
  @%p1 mbarrier.expect_tx.relaxed.cta.shared.b64 [bar], 8; @%p1 mbarrier.arrive.shared.b64 %q1, [bar];
    bar.sync 0;
  mbarrier.test_wait.parity.shared.b64 %p2, [bar], 1; out.pred %p2; bar.sync 0;
  @%p1 mbarrier.complete_tx.relaxed.cta.shared.b64 [bar], 8; bar.sync 0;
  mbarrier.test_wait.parity.shared.b64 %p2, [bar], 1; out.pred %p2;
""",
        operands("mbarrier", ("b32",), 128),
        lanes=128,
        block=64,
    )
    yield program(
        "mbarrier/generic addresses and scopes",
        start
        + """
  .reg .b64 %gen; mov.u64 %gen, bar; cvta.shared.u64 %gen, %gen;
  @%p1 mbarrier.init.b64 [%gen], 64; fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;
  bar.sync 0; st.shared.b32 [%r3], %r1;
  mbarrier.arrive.b64 %q1, [%gen];
one: mbarrier.test_wait.b64 %p2, [%gen], %q1; @!%p2 bra one; ld.shared.b32 %r5, [%r4]; out.b32 %r5;
  @!%p1 mbarrier.arrive.release.cluster.shared::cta.b64 %q1, [bar], 1;
  @%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %q1, [bar], 16;
  @%p1 mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [bar], 16;
two: mbarrier.try_wait.acquire.cta.shared::cta.b64 %p2, [bar], %q1; @!%p2 bra two;
  @%p1 mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %q1, [bar], 7; bar.sync 0;
  mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p2, [bar], 0; out.pred %p2;
""",
        operands("mbarrier", ("b32",), 128),
        lanes=128,
        block=64,
    )
