"""How do bytes get from here to there? Copies between host arrays and device memory, and between devices.

What is asked for is always done in the order of one stream. What differs is what the host's side needs:
the driver makes the caller wait for pageable memory, so that is staged through pinned memory.
"""

from __future__ import annotations

import operator
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from gpufleet.errors import CaptureError
from gpufleet.peers import copies_arrive, copy_to_peer
from gpufleet.pinned_memory import PinnedBlock, pool_of
from gpufleet.registration import is_known, split
from gpufleet.transfer import BlockingCopyWarning, Transfer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpufleet.driver import Driver
    from gpufleet.memory import DeviceBuffer
    from gpufleet.stream import Stream

RETURNS_EARLY = 64 << 10
"""Copies in of so many bytes of pageable memory are left to the driver, which takes them without waiting.

It has room for 2 to 4 MiB in all, then it waits for the stream: 64 copies of 64 KiB waited, and one of 4 MiB,
while one of 2 MiB did not (driver 580, H200). So larger copies, of which few would fit, are staged here.
"""
STAGED_MOST = 64 << 20
"""Larger copies of pageable memory are not staged: their pinned memory would stay in the pool."""


class Rows(NamedTuple):
    """A host array as rows of bytes: `height` times `width`, `pitch` bytes from one to the next."""

    address: int
    width: int
    height: int
    pitch: int

    @property
    def nbytes(self) -> int:
        """How many bytes there are to be copied."""
        return self.width * self.height

    @property
    def extent(self) -> int:
        """Bytes from the first to the last."""
        return (self.height - 1) * self.pitch + self.width if self.nbytes else 0


def copy_in(
    buffer: DeviceBuffer, view: NDArray[Any], offset: int, pitch: int | None, stream: Stream | None
) -> Transfer | None:
    """Copy a host array into device memory, rows `pitch` bytes apart there."""
    rows, pitch = _placed(buffer, view, offset, pitch)
    queue, driver = buffer.queue_for(stream), buffer.context.driver
    place = buffer.address + offset
    if stream is None or not rows.nbytes:
        _host_to_device(driver, place, pitch, rows, queue)
        return completed(queue, stream, keep=view)
    small = rows.nbytes <= RETURNS_EARLY and rows.height == 1
    is_direct = queue.graph is not None or small or is_known(driver, rows.address, rows.extent)
    if is_direct or not _can_stage(rows, "from", buffer):
        _host_to_device(driver, place, pitch, rows, queue)
        return Transfer(queue.hold(view))
    block = pool_of(driver).take(rows.nbytes, buffer.context)
    try:
        _strided(block.bytes, rows)[...] = _bytes_of(view, rows)
        _host_to_device(driver, place, pitch, _packed(block, rows), queue)
        return Transfer(queue.record())
    finally:
        pool_of(driver).give_back(block, [queue])


def copy_out(
    buffer: DeviceBuffer, view: NDArray[Any], offset: int, pitch: int | None, stream: Stream | None
) -> Transfer | None:
    """Copy device memory, rows `pitch` bytes apart there, into a host array."""
    rows, pitch = _placed(buffer, view, offset, pitch)
    queue, driver = buffer.queue_for(stream), buffer.context.driver
    place = buffer.address + offset
    if stream is None or not rows.nbytes:
        _device_to_host(driver, rows, place, pitch, queue)
        return completed(queue, stream, keep=view, value=view)
    is_direct = queue.graph is not None or is_known(driver, rows.address, rows.extent)
    if is_direct or not _can_stage(rows, "to", buffer):
        _device_to_host(driver, rows, place, pitch, queue)
        return Transfer(queue.hold(view), view)
    pool = pool_of(driver)
    block = pool.take(rows.nbytes, buffer.context)
    try:
        _device_to_host(driver, _packed(block, rows), place, pitch, queue)
        event = queue.record()
    except BaseException:
        pool.give_back(block, [queue])
        raise

    def finish() -> None:
        _bytes_of(view, rows)[...] = _strided(block.bytes, rows)
        pool.give_back(block)

    return Transfer(event, view, finish)


class Part(NamedTuple):
    """A part of a device buffer."""

    buffer: DeviceBuffer
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.buffer.address + self.offset


def copy_across(target: Part, source: Part, stream: Stream | None) -> Transfer | None:
    """Copy device memory to as much of it: of the same device, of a peer, or through the host."""
    for part in (target, source):
        part.buffer.check_range(part.offset, part.nbytes)
        part.buffer.check_open()
    there, here = source.buffer.context, target.buffer.context
    driver = here.driver
    is_within = driver is there.driver and there.device.ordinal == here.device.ordinal
    if stream is not None and stream.graph is not None and not is_within:
        raise CaptureError(
            f"a copy from {source.buffer!r} to {target.buffer!r}, of another device, cannot be captured: "
            "capture a graph for each device, and copy between their launches"
        )
    if driver is not there.driver:
        return _through_the_host(target, source, stream)
    queue = target.buffer.queue_for(stream, source.buffer)
    if not source.nbytes:
        pass
    elif is_within:
        driver.cuMemcpyDtoDAsync(target.address, source.address, source.nbytes, queue.handle)
    elif copies_arrive(there, here):
        copy_to_peer(here, target.address, there, source.address, source.nbytes, queue)
    else:
        return _through_the_host(target, source, stream)
    return completed(queue, stream)


def _through_the_host(target: Part, source: Part, stream: Stream | None) -> Transfer | None:
    """Copy in two steps, in pieces; the caller waits for both, since no stream spans two drivers."""
    pool = pool_of(source.buffer.context.driver)
    if stream is not None:
        stream.synchronize()
    piece = max(1, min(source.nbytes, STAGED_MOST))
    block = pool.take(piece, source.buffer.context)
    try:
        for start in range(0, source.nbytes, piece):
            part = block.bytes[: min(piece, source.nbytes - start)]
            source.buffer.copy_to(part, offset=source.offset + start)
            target.buffer.copy_from(part, offset=target.offset + start)
    finally:
        pool.give_back(block)
    return None if stream is None else Transfer(stream.record())


# The host's side


def rows_of(view: NDArray[Any]) -> Rows:
    """Describe an array whose rows are each in one piece.

    Raises
    ------
    ValueError
        If it is no such array.
    """
    if view.flags.c_contiguous:
        return Rows(int(view.ctypes.data), view.nbytes, 1, view.nbytes)
    if (
        view.ndim == 2
        and (view.strides[1] == view.itemsize or view.shape[1] == 1)
        and view.strides[0] >= view.shape[1] * view.itemsize
    ):
        return Rows(int(view.ctypes.data), view.shape[1] * view.itemsize, view.shape[0], view.strides[0])
    raise ValueError(
        "the array is not C-contiguous, nor of two dimensions with each row in one piece: copy "
        "numpy.ascontiguousarray(array) instead"
    )


def _placed(buffer: DeviceBuffer, view: NDArray[Any], offset: int, pitch: int | None) -> tuple[Rows, int]:
    """Return an array's rows, and the pitch of the device's side, where it all fits."""
    rows = rows_of(view)
    if pitch is None:
        pitch = rows.width
    elif view.ndim != 2:
        raise ValueError(f"pitch= is for arrays of two dimensions, this one has {view.ndim}")
    else:
        pitch, width = operator.index(pitch), view.shape[1] * view.itemsize
        if pitch < width:
            raise ValueError(f"rows of {width} bytes do not fit into a pitch of {pitch}")
        if rows.height == 1:
            rows = Rows(rows.address, width, view.shape[0], width)
    buffer.check_range(offset, (rows.height - 1) * pitch + rows.width if rows.nbytes else 0)
    return rows, pitch


def _packed(block: PinnedBlock, rows: Rows) -> Rows:
    return Rows(block.address, rows.width, rows.height, rows.width)


def _strided(data: NDArray[Any], rows: Rows) -> NDArray[Any]:
    return data[: rows.nbytes].reshape(rows.height, rows.width)


def _bytes_of(view: NDArray[Any], rows: Rows) -> NDArray[Any]:
    import ctypes

    import numpy as np

    flat = np.frombuffer(memoryview((ctypes.c_uint8 * rows.extent).from_address(rows.address)), "u1")
    return np.lib.stride_tricks.as_strided(flat, (rows.height, rows.width), (rows.pitch, 1))


def _can_stage(rows: Rows, way: str, buffer: DeviceBuffer) -> bool:
    """Whether a copy is small enough to be staged; if not, say what that means."""
    if rows.nbytes <= STAGED_MOST:
        return True
    warnings.warn(
        f"a copy of {rows.nbytes} bytes {way} pageable memory made its caller wait for the stream, since the "
        f"driver does not copy pageable memory asynchronously and gpufleet stages only up to {STAGED_MOST} "
        "bytes: use gf.pinned(...) memory, or `with gf.registered(array):`",
        BlockingCopyWarning,
        stacklevel=_depth_of_caller(),
    )
    return False


def _depth_of_caller() -> int:
    """Return the stacklevel of the code outside of this package, so that each place is warned about once."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("gpufleet."):
        frame, depth = frame.f_back, depth + 1
    return depth


def completed(
    queue: Stream, stream: Stream | None, *, keep: object = None, value: object = None
) -> Transfer | None:
    """Wait for what was queued, if no stream was given; else return what tells when it is complete.

    `keep` lives until then, and `value` is the transfer's result.
    """
    if stream is not None:
        return Transfer(queue.record() if keep is None else queue.hold(keep), value)
    queue.synchronize()
    return None


# The driver's calls


def _host_to_device(driver: Driver, place: int, pitch: int, rows: Rows, queue: Stream) -> None:
    for at, width, height in _parts(driver, rows, pitch):
        host, device = rows.address + at * rows.pitch, place + at * pitch
        if height > 1:
            driver.cuMemcpy2DAsync(
                _plane("src", host, rows.pitch, device, pitch, width, height), queue.handle
            )
            continue
        for start, size in split(driver, host, width):
            driver.cuMemcpyHtoDAsync(device + start, host + start, size, queue.handle)


def _device_to_host(driver: Driver, rows: Rows, place: int, pitch: int, queue: Stream) -> None:
    for at, width, height in _parts(driver, rows, pitch):
        host, device = rows.address + at * rows.pitch, place + at * pitch
        if height > 1:
            driver.cuMemcpy2DAsync(
                _plane("dst", host, rows.pitch, device, pitch, width, height), queue.handle
            )
            continue
        for start, size in split(driver, host, width):
            driver.cuMemcpyDtoHAsync(host + start, device + start, size, queue.handle)


def _parts(driver: Driver, rows: Rows, pitch: int) -> list[tuple[int, int, int]]:
    """Return (first row, width, height) of the calls: one for all, if page-locks do not cut them up."""
    if not rows.nbytes:
        return []
    if rows.width == rows.pitch == pitch:
        return [(0, rows.nbytes, 1)]
    if len(list(split(driver, rows.address, rows.extent))) == 1:
        return [(0, rows.width, rows.height)]
    return [(row, rows.width, 1) for row in range(rows.height)]


def _plane(host_is: str, host: int, host_pitch: int, device: int, pitch: int, width: int, height: int) -> Any:
    from cuda.bindings import driver as types

    device_is = "dst" if host_is == "src" else "src"
    plane = types.CUDA_MEMCPY2D()
    setattr(plane, f"{host_is}MemoryType", types.CUmemorytype.CU_MEMORYTYPE_HOST)
    setattr(plane, f"{host_is}Host", host)
    setattr(plane, f"{host_is}Pitch", host_pitch)
    setattr(plane, f"{device_is}MemoryType", types.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    setattr(plane, f"{device_is}Device", types.CUdeviceptr(device))
    setattr(plane, f"{device_is}Pitch", pitch)
    plane.WidthInBytes, plane.Height = width, height
    return plane
