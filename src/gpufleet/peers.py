"""Which devices may use each other's memory? Tried with data before it is believed, and opened at first use.

A driver may offer access where nothing comes of it: behind some bridges (with an IOMMU) writes are lost.
So each ordered pair of devices is tried once for each driver: kernels that use the other's memory, and
copies from one to the other, each for itself.

Access has two locks: of a context's plain memory (`cuCtxEnablePeerAccess`) and of its pool
(`cuMemPoolSetAccess`); neither opens the other (driver 580, two H200s). `open_access` opens both.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpufleet.allocators import PoolAllocator
from gpufleet.errors import CudaError, StickyError, WrongContext

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpufleet.context import Context
    from gpufleet.device import Device
    from gpufleet.memory import DeviceBuffer
    from gpufleet.stream import Stream


def enable(user: Context, owner: Context) -> None:
    """Let kernels of `user` use the memory of `owner`: `Context.enable_peer_access`."""
    if owner.driver is not user.driver:
        raise WrongContext(
            f"kernels of {user!r} cannot use memory of {owner!r}: one is of the {user.driver.name} driver, "
            f"the other of the {owner.driver.name} driver; copy it over with buffer.copy_from"
        )
    user.check_open()
    owner.check_open()
    if user.device.ordinal == owner.device.ordinal:  # the driver lets them, unasked
        return
    if not kernels_reach(user, owner):
        is_offered = _is_offered(user, owner)
        why = "tried, the data did not arrive" if is_offered else "the driver offers none"
        raise WrongContext(
            f"kernels of {user!r} cannot use memory of {owner!r}: device {user.device.ordinal} has no access "
            f"to memory of device {owner.device.ordinal} ({why}); copy it over with buffer.copy_from, which "
            "goes through the host"
        )
    open_access(user, owner)


def known_access(user: Device, owner: Device) -> bool | None:
    """Return whether kernels of a device may use another's memory, or None if that must be tried."""
    if owner.driver is not user.driver:
        return False
    if owner.ordinal == user.ordinal:
        return True
    if not int(user.driver.cuDeviceCanAccessPeer(user.handle, owner.handle)):
        return False
    known: bool | None = _tried(user.driver).get(("kernels", user.ordinal, owner.ordinal))
    return known


def kernels_reach(user: Context, owner: Context) -> bool:
    """Whether kernels of one context's device may use memory of the other's, tried once for each pair.

    The trial loads a kernel, which waits for kernels that run in `user` (driver 580).
    """
    known = known_access(user.device, owner.device)
    return _once("kernels", user, owner, _try_kernel) if known is None else known


def copies_arrive(source: Context, target: Context) -> bool:
    """Whether copies from one context's device to the other's arrive, tried once for each pair."""
    return _once("copies", source, target, _try_copy)


def copy_to_peer(here: Context, target: int, there: Context, source: int, nbytes: int, queue: Stream) -> None:
    """Copy memory of `there` to an address of `here`, of another device, with access open if there is any.

    Without it the driver carries plain memory through the host, and refuses memory of a pool.
    """
    if not _is_open(here, there) or not _is_open(there, here):
        _open_both(here, there)
    here.driver.cuMemcpyPeerAsync(target, here.handle, source, there.handle, nbytes, queue.handle)


# Opening


def open_access(user: Context, owner: Context) -> None:
    """Open the memory of `owner`, plain and of its pool, to `user`, if the driver offers that.

    Opening twice, also from two threads, is no error.
    """
    if _is_open(user, owner):
        return
    owner.heap.open_to(user.device)
    if _is_offered(user, owner):
        try:
            with user:
                user.driver.cuCtxEnablePeerAccess(owner.handle, 0)
        except CudaError as error:  # also by another thread or library
            if error.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise
    with _lock:
        _opened.setdefault(user, weakref.WeakSet()).add(owner)


def _open_both(one: Context, other: Context) -> None:
    for user, owner in ((one, other), (other, one)):
        try:
            open_access(user, owner)
        except CudaError as error:
            if error.name not in UNAVAILABLE:
                raise


UNAVAILABLE = ("CUDA_ERROR_TOO_MANY_PEERS", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")


def _is_open(user: Context, owner: Context) -> bool:
    opened = _opened.get(user)
    return opened is not None and owner in opened


def _close_access(user: Context, owner: Context) -> None:
    """Undo `open_access` for a pair that has failed its trial."""
    with _lock:
        _opened.get(user, weakref.WeakSet()).discard(owner)
    owner.heap.close_to(user.device)
    try:
        with user:
            user.driver.cuCtxDisablePeerAccess(owner.handle)
    except CudaError as error:
        if error.name != "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED":
            raise


def _is_offered(user: Context, owner: Context) -> bool:
    return bool(int(user.driver.cuDeviceCanAccessPeer(user.device.handle, owner.device.handle)))


_opened: weakref.WeakKeyDictionary[Context, weakref.WeakSet[Context]] = weakref.WeakKeyDictionary()
"""Whose memory is open to a context. By object, not by address: the driver uses addresses again."""
_lock = threading.Lock()


# Trying

_trying = threading.Lock()
"""Held during a trial, so that a pair is tried once."""


def _once(what: str, first: Context, second: Context, trial: Callable[[Context, Context], bool]) -> bool:
    tried = _tried(first.driver)
    key = what, first.device.ordinal, second.device.ordinal
    if key not in tried:
        first.driver.cuDeviceGetCount()  # raises in a forked child, where the lock may be held for ever
        with _trying:
            if key not in tried:
                tried[key] = _passes(trial, first, second)
                if not tried[key]:
                    _close_access(first, second)
                    if what == "copies":  # which open both directions
                        _close_access(second, first)
    return tried[key]


def _tried(driver: Any) -> dict[tuple[str, int, int], bool]:
    """Return what was found, by what was tried and the two devices."""
    found: dict[tuple[str, int, int], bool] = driver.belongings.setdefault("peers", {})
    return found


def _passes(trial: Callable[[Context, Context], bool], first: Context, second: Context) -> bool:
    """Carry out a trial; what the driver refuses to do is not there."""
    try:
        return trial(first, second)
    except StickyError:
        raise
    except CudaError as error:
        if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        return False


def _try_copy(source: Context, target: Context) -> bool:
    pattern = _pattern()
    with source.alloc(pattern.nbytes) as there, target.alloc(pattern.nbytes) as here:
        there.copy_from(pattern)
        here.fill(0)
        queue = here.queue_for(target.main_stream, there)  # noted as a user: Ctrl-C may end the wait
        copy_to_peer(target, here.address, source, there.address, pattern.nbytes, queue)
        queue.synchronize()
        return bool((here.to_numpy("u4") == pattern).all())


def _try_kernel(user: Context, owner: Context) -> bool:
    """Let a kernel of one device read a pattern in the other's memory, and write a changed one there."""
    pattern = _pattern()
    owner.heap.open_to(user.device)
    with owner.alloc(2 * pattern.nbytes, allocator=PoolAllocator()) as memory:
        memory.fill(0)
        memory.copy_from(pattern)
        _run_probe(user, memory)
        found = memory.to_numpy("u4", (2, pattern.size))
    has_arrived = bool((found[0] == pattern).all() and (found[1] == pattern ^ CHANGE).all())
    if not has_arrived:  # nor are copies to be trusted, that would open the access again
        pair = user.device.ordinal, owner.device.ordinal
        _tried(user.driver).update({("copies", *pair): False, ("copies", *pair[::-1]): False})
    return has_arrived


def _run_probe(user: Context, memory: DeviceBuffer) -> None:
    driver, stream = user.driver, user.main_stream
    memory.used_on(stream)  # Ctrl-C may end the wait
    with user:
        module = driver.cuModuleLoadData(PROBE)
        try:
            kernel = driver.cuModuleGetFunction(module, b"probe")
            parameters = ((memory.address,), (ctypes.c_uint64,))
            blocks = WORDS // THREADS
            driver.cuLaunchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream.handle, parameters, 0)
            stream.synchronize()
        finally:
            driver.cuModuleUnload(module)


def _pattern() -> NDArray[Any]:
    """Return words that are all different, and none of which is 0."""
    import numpy as np

    words: NDArray[Any] = np.arange(1, WORDS + 1, dtype="u4") * np.uint32(2654435761)
    return words


WORDS, THREADS = 1024, 256
CHANGE = 0x5BD1E995
PROBE = f"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry probe(.param .u64 memory) {{
    .reg .b32 %r<6>; .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [memory];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mad.lo.u32 %r3, %r1, %r2, %r0;
    mul.wide.u32 %rd1, %r3, 4;
    add.u64 %rd2, %rd0, %rd1;
    ld.volatile.global.u32 %r4, [%rd2];
    xor.b32 %r5, %r4, {CHANGE};
    st.volatile.global.u32 [%rd2+{4 * WORDS}], %r5;
    ret;
}}
\0""".encode()
