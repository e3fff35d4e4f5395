"""Keep a stream busy for as long as a test says: no test sleeps to wait for something."""

from __future__ import annotations

from types import TracebackType

import gpufleet as gf

PTX = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry latch(.param .u64 state, .param .u64 ticks) {
    .reg .pred %p<3>; .reg .b32 %r<2>; .reg .b64 %rd<6>;
    ld.param.u64 %rd0, [state];
    ld.param.u64 %rd1, [ticks];
    mov.u64 %rd2, %clock64;
again:
    ld.volatile.global.u32 %r0, [%rd0];
    setp.ne.s32 %p0, %r0, 0;
    @%p0 bra done;
    mov.u64 %rd3, %clock64;
    sub.s64 %rd4, %rd3, %rd2;
    setp.lt.s64 %p1, %rd4, %rd1;
    @%p1 bra again;
    mov.u32 %r1, 1;
    st.volatile.global.u32 [%rd0+4], %r1;
done:
    ret;
}
"""
LONGEST = 30
"""Seconds after which a latch that nobody opens lets go, so that a failing test ends."""


class Latch:
    """A kernel that runs on a stream until `open`, or until the `with` block ends."""

    def __init__(self, stream: gf.Stream) -> None:
        context = stream.context
        self.stream = stream
        self._state = gf.pinned(8, context=context)
        self._state.array[:] = 0
        kernel = gf.Program.from_image(PTX, driver=context.driver).kernel("latch")
        kernel.load(context)  # a load after the launch might wait for it
        kernel.launch(1, 1, self._state, context.device.clock_rate * 1000 * LONGEST, stream=stream)

    def open(self) -> None:
        self._state.array[0] = 1

    @property
    def has_timed_out(self) -> bool:
        return bool(self._state.array[4])

    def __enter__(self) -> Latch:
        assert not self.stream.query()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()
        self.stream.synchronize()
        timed_out = self.has_timed_out
        self._state.close()
        assert kind is not None or not timed_out, "something waited for the latch, or nobody opened it"
