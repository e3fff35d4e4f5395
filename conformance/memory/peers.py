"""Memory of one device in copies and kernels of another. Accesses that fault: peer_faults.py."""

from __future__ import annotations

from .pointers import describe_pointer
from .probe import BRIEF, ints, run_chapter

PORTABLE = 1


def probe_peers(driver, image, **how):
    """Needs two devices; a driver with one answers nothing."""
    return run_chapter(
        (
            ask,
            enable,
            copies_without_access,
            copies_with_access,
            copies_by_context_and_stream,
            copies_wait_for_streams,
            fills,
            kernels,
            kernels_use_pinned_memory,
            direction,
            primary_contexts,
            pointers,
            release,
        ),
        driver,
        image,
        devices=2,
        **how,
    )


class Pair:
    """Context `here` on device 0 (the probe's), `there` on device 1 (new), and memory of each."""

    def __init__(self, p, size=4096):
        self.p = p
        self.here = p.context
        self.mine = p.device(size)
        p.write(self.mine, 1, 2)
        self.there = p.new_context(1)
        p.kernel("fill")
        self.theirs = p.device(size)
        p.write(self.theirs, 3, 4)
        self.leave()

    def enter(self):
        """Make `there` current, above `here`."""
        self.p.need(self.p.d.cuCtxPushCurrent, self.there)

    def leave(self):
        self.p.need(self.p.d.cuCtxPopCurrent)

    def close(self):
        self.p.need(self.p.d.cuCtxDestroy, self.there)


def ask(p):
    Pair(p).close()
    d, kinds = p.d, p.d.CUdevice_P2PAttribute
    for first, second in ((0, 1), (1, 0), (0, 0), (0, 99)):
        found = p.ask(f"can.{first}.{second}", d.cuDeviceCanAccessPeer, first, second)
        p.hardware(f"can.{first}.{second}", None if found is None else int(found))
        for each in ("ACCESS_SUPPORTED", "NATIVE_ATOMIC_SUPPORTED", "CUDA_ARRAY_ACCESS_SUPPORTED"):
            kind = getattr(kinds, f"CU_DEVICE_P2P_ATTRIBUTE_{each}")
            found = p.ask(f"{each}.{first}.{second}", d.cuDeviceGetP2PAttribute, kind, first, second)
            p.hardware(f"{each}.{first}.{second}", None if found is None else int(found))


def enable(p):
    d = p.d
    pair = Pair(p)
    p.ask("null", d.cuCtxEnablePeerAccess, 0, 0)
    p.ask("itself", d.cuCtxEnablePeerAccess, p.context, 0)
    p.ask("disable_before", d.cuCtxDisablePeerAccess, pair.there)
    p.ask("flags_1", d.cuCtxEnablePeerAccess, pair.there, 1)
    p.ask("first", d.cuCtxEnablePeerAccess, pair.there, 0)
    p.ask("again", d.cuCtxEnablePeerAccess, pair.there, 0)
    other = p.new_context()
    p.ask("context_of_the_same_device", d.cuCtxEnablePeerAccess, p.context, 0)
    p.ask("from_a_second_context_here", d.cuCtxEnablePeerAccess, pair.there, 0)
    p.need(d.cuCtxDestroy, other)
    p.ask("disable", d.cuCtxDisablePeerAccess, pair.there)
    p.ask("disable_again", d.cuCtxDisablePeerAccess, pair.there)
    p.need(d.cuCtxEnablePeerAccess, pair.there, 0)
    pair.close()
    again = p.new_context(1)
    p.need(d.cuCtxPopCurrent)
    p.ask("after_the_other_context_was_replaced", d.cuCtxEnablePeerAccess, again, 0)
    p.need(d.cuCtxDestroy, again)
    p.need(d.cuCtxPopCurrent)
    p.ask("no_context", d.cuCtxEnablePeerAccess, p.context, 0)


def _copies(p, pair):
    d = p.d
    stream = p.stream()
    for name, to, origin in (("out", pair.theirs, pair.mine), ("in", pair.mine, pair.theirs)):
        for call, function, arguments in (
            ("cuMemcpy", d.cuMemcpy, ()),
            ("cuMemcpyDtoD", d.cuMemcpyDtoD, ()),
            ("cuMemcpyAsync", d.cuMemcpyAsync, (stream,)),
            ("cuMemcpyDtoDAsync", d.cuMemcpyDtoDAsync, (stream,)),
        ):
            p.write(origin, 11, 12)
            p.write(to, 0, 0)
            p.ask(f"{name}.{call}", function, to, origin, 8, *arguments)
            p.ask(f"{name}.{call}.synchronize", d.cuCtxSynchronize)
            p.note(f"{name}.{call}.value", p.read(to, 2))
    p.ask("to_host", d.cuMemcpyDtoH, p.pageable(), pair.theirs, 8)
    p.ask("from_host", d.cuMemcpyHtoD, pair.theirs, p.pageable(), 8)
    p.ask("past_the_end", d.cuMemcpyDtoD, pair.mine, pair.theirs, 8 << 20)


def copies_without_access(p):
    pair = Pair(p)
    _copies(p, pair)
    pair.close()


def copies_with_access(p):
    pair = Pair(p)
    p.need(p.d.cuCtxEnablePeerAccess, pair.there, 0)
    _copies(p, pair)
    pair.close()


def copies_by_context_and_stream(p):
    """cuMemcpyPeer names the contexts; the stream may be of either device, or of a third context."""
    d = p.d
    pair = Pair(p)
    mine = p.stream()
    pair.enter()
    theirs = p.stream()
    pair.leave()
    there, here = (pair.theirs, pair.there), (pair.mine, pair.here)
    for name, to, origin in (("out", there, here), ("in", here, there), ("within", here, here)):
        p.write(origin[0], 21, 22)
        if to is not origin:
            p.write(to[0], 0, 0)
        p.ask(f"{name}.cuMemcpyPeer", d.cuMemcpyPeer, *to, *origin, 8)
        p.ask(f"{name}.cuMemcpyPeer.synchronize", d.cuCtxSynchronize)
        p.note(f"{name}.cuMemcpyPeer.value", p.read(to[0], 2))
        for label, stream in (("my_stream", mine), ("their_stream", theirs), ("null_stream", 0)):
            p.write(to[0] + 16, 0)
            p.ask(
                f"{name}.cuMemcpyPeerAsync.{label}",
                d.cuMemcpyPeerAsync,
                to[0] + 16,
                to[1],
                *origin,
                4,
                stream,
            )
            p.ask(f"{name}.cuMemcpyPeerAsync.{label}.synchronize", d.cuStreamSynchronize, stream)
            p.note(f"{name}.cuMemcpyPeerAsync.{label}.value", p.read(to[0] + 16)[0])
    p.ask("contexts_swapped", d.cuMemcpyPeer, pair.theirs, pair.here, pair.mine, pair.there, 8)
    p.ask("null_context", d.cuMemcpyPeer, pair.theirs, 0, pair.mine, 0, 8)
    p.ask("nothing", d.cuMemcpyPeer, *there, *here, 0)
    p.ask("past_the_end", d.cuMemcpyPeer, *there, *here, 8 << 20)
    p.need(d.cuCtxPopCurrent)
    p.ask("no_context", d.cuMemcpyPeer, *there, *here, 8)
    p.ask("no_context.async", d.cuMemcpyPeerAsync, *there, *here, 8, mine)
    p.ask("no_context.plain_async", d.cuMemcpyDtoDAsync, pair.theirs, pair.mine, 8, mine)
    p.ask("no_context.synchronize", d.cuStreamSynchronize, mine)
    pair.close()


def copies_wait_for_streams(p):
    """Does a copy between devices wait for streams of the other device?"""
    d = p.d
    pair = Pair(p)
    mine = p.stream()
    for flags, kind in ((0, "blocking"), (1, "non_blocking")):
        pair.enter()
        busy = p.stream(flags)
        latch = p.latch(busy, BRIEF)
        pair.leave()
        p.ask(
            f"{kind}.cuMemcpyPeerAsync",
            d.cuMemcpyPeerAsync,
            pair.mine,
            pair.here,
            pair.theirs,
            pair.there,
            8,
            mine,
        )
        p.ask(f"{kind}.cuMemcpyPeerAsync.synchronize", d.cuStreamSynchronize, mine)
        p.note(f"{kind}.cuMemcpyPeerAsync.waits", latch.has_timed_out)
        latch.open()
        pair.enter()
        p.need(d.cuCtxSynchronize)
        latch = p.latch(busy, BRIEF)
        pair.leave()
        p.ask(f"{kind}.cuMemcpyPeer", d.cuMemcpyPeer, pair.mine, pair.here, pair.theirs, pair.there, 8)
        p.note(f"{kind}.cuMemcpyPeer.waits", latch.has_timed_out)
        latch.open()
        pair.enter()
        p.need(d.cuCtxSynchronize)
        pair.leave()
    pair.close()


def fills(p):
    d = p.d
    pair = Pair(p)
    stream = p.stream()
    for name in ("without_access", "with_access"):
        if name == "with_access":
            p.need(d.cuCtxEnablePeerAccess, pair.there, 0)
        p.ask(f"{name}.cuMemsetD32", d.cuMemsetD32, pair.theirs, 5, 2)
        p.ask(f"{name}.cuMemsetD32.synchronize", d.cuCtxSynchronize)
        p.note(f"{name}.cuMemsetD32.value", p.read(pair.theirs, 2))
        p.ask(f"{name}.cuMemsetD32Async", d.cuMemsetD32Async, pair.theirs, 6, 2, stream)
        p.ask(f"{name}.cuMemsetD32Async.synchronize", d.cuStreamSynchronize, stream)
        p.note(f"{name}.cuMemsetD32Async.value", p.read(pair.theirs, 2))
    pair.close()


def kernels(p):
    """With peer access a kernel reads and writes the other device's memory at its own address."""
    d = p.d
    pair = Pair(p)
    p.need(d.cuCtxEnablePeerAccess, pair.there, 0)
    p.ask("read", p.launch, "copy", pair.theirs, pair.mine, block=2)
    p.ask("read.synchronize", d.cuCtxSynchronize)
    p.note("read.value", p.read(pair.mine, 2))
    p.ask("write", p.launch, "fill", pair.theirs, 9, block=2)
    p.ask("write.synchronize", d.cuCtxSynchronize)
    p.note("write.value", p.read(pair.theirs, 2))
    pair.enter()
    later = p.device()
    pair.leave()
    p.ask("allocated_after", p.launch, "fill", later, 8, block=2)
    p.ask("allocated_after.synchronize", d.cuCtxSynchronize)
    p.note("allocated_after.value", p.read(later, 2))
    pair.enter()
    theirs = p.stream()
    pair.leave()
    p.ask("on_a_stream_of_theirs", p.launch, "fill", pair.mine, 7, stream=theirs)
    pair.close()


def kernels_use_pinned_memory(p):
    """Memory pinned or registered in one context is every device's."""
    d = p.d
    plain, portable, registered = p.pinned(), p.pinned(4096, PORTABLE), p.pages()
    p.need(d.cuMemHostRegister, registered, 4096, 0)
    pair = Pair(p)
    pair.enter()
    for name, address in (("pinned", plain), ("portable", portable), ("registered", registered)):
        describe_pointer(p, f"{name}.attributes", address)
        p.ask(f"{name}.device_pointer", d.cuMemHostGetDevicePointer, address, 0)
        p.ask(f"{name}.launch", p.launch, "fill", address, 4, block=2)
        p.ask(f"{name}.synchronize", d.cuCtxSynchronize)
        p.note(f"{name}.value", ints(address)[0])
        p.ask(f"{name}.copy", d.cuMemcpyHtoD, pair.theirs, address, 8)
    p.ask("free_from_the_other_device", d.cuMemFreeHost, plain)
    p.ask("unregister_from_the_other_device", d.cuMemHostUnregister, registered)
    pair.leave()
    pair.close()


def direction(p):
    """Access is enabled for one direction only; copies know both."""
    d = p.d
    pair = Pair(p)
    p.need(d.cuCtxEnablePeerAccess, pair.there, 0)
    pair.enter()
    p.ask("disable_the_other", d.cuCtxDisablePeerAccess, p.context)
    p.ask("enable_the_other", d.cuCtxEnablePeerAccess, p.context, 0)
    p.ask("read", p.launch, "copy", pair.mine, pair.theirs, block=2)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", p.read(pair.theirs, 2))
    pair.leave()
    pair.close()


def primary_contexts(p):
    d = p.d
    Pair(p).close()
    zero, one = p.need(d.cuDevicePrimaryCtxRetain, 0), p.need(d.cuDevicePrimaryCtxRetain, 1)
    p.need(d.cuCtxPushCurrent, one)
    theirs = p.device()
    p.write(theirs, 31)
    p.need(d.cuCtxPushCurrent, zero)
    mine = p.device()
    p.ask("enable", d.cuCtxEnablePeerAccess, one, 0)
    p.ask("read", p.launch, "copy", theirs, mine)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", p.read(mine)[0])
    p.need(d.cuCtxPopCurrent)
    p.need(d.cuCtxPopCurrent)
    p.ask("created_context_to_primary", d.cuCtxEnablePeerAccess, one, 0)
    p.ask("created_context_to_primary.read", p.launch, "copy", theirs, mine)
    p.ask("created_context_to_primary.synchronize", d.cuCtxSynchronize)
    p.forget_kernels(zero)
    p.need(d.cuDevicePrimaryCtxRelease, 0)
    p.need(d.cuDevicePrimaryCtxRelease, 1)


def pointers(p):
    """What a context says of the other device's memory, before and after access is enabled."""
    d = p.d
    pair = Pair(p)
    describe_pointer(p, "without_access", pair.theirs)
    found = p.ask("range", d.cuMemGetAddressRange, pair.theirs + 100)
    p.note("range.value", None if found is None else [int(found[0]) - pair.theirs, int(found[1])])
    owner = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
    p.note("owner_is_there", int(p.need(d.cuPointerGetAttribute, owner, pair.theirs)) == int(pair.there))
    p.need(d.cuCtxEnablePeerAccess, pair.there, 0)
    describe_pointer(p, "with_access", pair.theirs)
    pair.close()


def release(p):
    """Freeing the other device's memory; its context goes away; disabling access that is in use by nobody."""
    d = p.d
    pair = Pair(p)
    p.ask("free", d.cuMemFree, pair.theirs)
    p.ask("free_again", d.cuMemFree, pair.theirs)
    p.need(d.cuCtxEnablePeerAccess, pair.there, 0)
    p.ask("destroy", d.cuCtxDestroy, pair.there)
    p.ask("launch_after", p.launch, "fill", pair.mine, 2)
    p.ask("synchronize_after", d.cuCtxSynchronize)
    p.note("value", p.read(pair.mine)[0])
