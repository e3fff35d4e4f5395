"""Copies between host and devices, in a stream or at once."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.host_pointers import host_address, read_bytes
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import Stream, enqueue, enqueue_and_wait
from gpufleet.virtual.transfers import Side, locate, move, transfer

STAGED = 2 << 20
"""A copy to a device from so much pageable memory returns at once; one of 4 MiB waits (driver 580, H200:
conformance/memory/waiting.py, `pageable_copies_by_size`). 64 copies of 64 KiB wait there too, not here."""


@call(context=True)
def cuMemcpyHtoD(state: State, current: Context, dstDevice: Any, srcHost: Any, ByteCount: int) -> None:
    """Copy from the host to a device."""
    _copy(state, current.legacy, _device(dstDevice, ByteCount), _host(srcHost, ByteCount), srcHost)


@call(context=True)
def cuMemcpyDtoH(state: State, current: Context, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
    """Copy from a device to the host."""
    _copy(state, current.legacy, _host(dstHost, ByteCount), _device(srcDevice, ByteCount), dstHost)


@call(context=True)
def cuMemcpyDtoD(state: State, current: Context, dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
    """Copy between devices or within one; the caller does not wait."""
    _copy(state, current.legacy, _device(dstDevice, ByteCount), _device(srcDevice, ByteCount))


@call(context=True)
def cuMemcpy(state: State, current: Context, dst: Any, src: Any, ByteCount: int) -> None:
    """Copy between any two places."""
    _copy(state, current.legacy, _host(dst, ByteCount), _host(src, ByteCount))


@call()
def cuMemcpyHtoDAsync(state: State, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> None:
    """Copy from the host to a device in the order of a stream."""
    stream = state.stream(hStream)
    _copy_async(state, stream, _device(dstDevice, ByteCount), _host(srcHost, ByteCount), srcHost)


@call()
def cuMemcpyDtoHAsync(state: State, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    """Copy from a device to the host in the order of a stream."""
    stream = state.stream(hStream)
    _copy_async(state, stream, _host(dstHost, ByteCount), _device(srcDevice, ByteCount), dstHost)


@call()
def cuMemcpyDtoDAsync(state: State, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    """Copy between devices or within one in the order of a stream."""
    stream = state.stream(hStream)
    _copy_async(state, stream, _device(dstDevice, ByteCount), _device(srcDevice, ByteCount))


@call()
def cuMemcpyAsync(state: State, dst: Any, src: Any, ByteCount: int, hStream: Any) -> None:
    """Copy between any two places in the order of a stream."""
    _copy_async(state, state.stream(hStream), _host(dst, ByteCount), _host(src, ByteCount))


@call(context=True)
def cuMemcpyPeer(
    state: State,
    current: Context,
    dstDevice: Any,
    dstContext: Any,
    srcDevice: Any,
    srcContext: Any,
    ByteCount: int,
) -> None:
    """Copy between two contexts, NULL for the current one. Peer access need not be enabled.

    The caller does not wait, nor does the copy for other streams than the legacy default one's.
    """
    _check_contexts(state, dstContext, srcContext)
    _copy(state, current.legacy, _device(dstDevice, ByteCount), _device(srcDevice, ByteCount))


@call()
def cuMemcpyPeerAsync(
    state: State,
    dstDevice: Any,
    dstContext: Any,
    srcDevice: Any,
    srcContext: Any,
    ByteCount: int,
    hStream: Any,
) -> None:
    """Copy between two contexts in the order of a stream. Peer access need not be enabled."""
    _check_contexts(state, dstContext, srcContext)
    stream = state.stream(hStream)
    _copy_async(state, stream, _device(dstDevice, ByteCount), _device(srcDevice, ByteCount))


@call(context=True)
def cuMemcpy2D(state: State, current: Context, pCopy: Any) -> None:
    """Copy a rectangle."""
    _copy(state, current.legacy, *_rectangles(pCopy), pCopy)


@call(context=True)
def cuMemcpy2DUnaligned(state: State, current: Context, pCopy: Any) -> None:
    """Copy a rectangle, whatever its pitch."""
    _copy(state, current.legacy, *_rectangles(pCopy), pCopy)


@call()
def cuMemcpy2DAsync(state: State, pCopy: Any, hStream: Any) -> None:
    """Copy a rectangle in the order of a stream."""
    _copy_async(state, state.stream(hStream), *_rectangles(pCopy), pCopy)


def _device(pointer: Any, size: int) -> Side:
    return Side(number(pointer), size, 1, size, must_be_known=True)


def _host(pointer: Any, size: int) -> Side:
    return Side(host_address(pointer), size, 1, size)


def _check_contexts(state: State, *handles: Any) -> None:
    for handle in handles:
        if number(handle):
            state.live_context(handle)


def _copy(state: State, stream: Stream, to: Side, source: Side, keep: object = None) -> None:
    """Copy in the order of a stream, and wait unless both sides are device memory.

    (Driver API, "API synchronization behavior".)
    """
    if not to.width or not to.rows:
        return
    locate(state.memory, stream.context, to, source)
    operation = _operation(state, stream, to, source, keep)
    if not (to.is_device and source.is_device):
        enqueue_and_wait(state.scheduler, stream, operation)
        state.check_fault()
    else:
        enqueue(state.scheduler, stream, operation)


def _copy_async(state: State, stream: Stream, to: Side, source: Side, keep: object = None) -> None:
    """Copy in the order of a stream, and wait only where pageable memory makes the driver do so."""
    if not to.width or not to.rows:
        return
    is_captured = stream.capture is not None
    locate(state.memory, stream.context, to, source, for_graph=is_captured)
    if is_captured:  # also pageable memory is read and written by each launch
        enqueue(state.scheduler, stream, _operation(state, stream, to, source, keep), kind="MEMCPY")
        return
    may_wait = to.is_pageable or source.is_pageable
    if to.is_device and source.is_pageable and source.rows == 1 and source.width <= STAGED:
        keep = staged = read_bytes(source.address, source.width)
        source = Side(host_address(staged), source.width)
        may_wait = False
    operation = _operation(state, stream, to, source, keep)
    if may_wait:
        enqueue_and_wait(state.scheduler, stream, operation)
        state.check_fault()
    else:
        enqueue(state.scheduler, stream, operation)


def _operation(state: State, stream: Stream, to: Side, source: Side, keep: object) -> Operation:
    memory = state.memory

    def run() -> None:
        move(memory, to, source)
        _ = keep  # a caller's buffer lives until the copy is done

    return transfer(stream.context, run, to, source)


def _rectangles(copy: Any) -> tuple[Side, Side]:
    if copy is None:
        raise Refusal("INVALID_VALUE", "the description of the copy is NULL")
    width, rows = int(copy.WidthInBytes), int(copy.Height)
    if not width or not rows:
        return Side(0, 0, 0), Side(0, 0, 0)
    to, to_host, to_device = copy.dstMemoryType, copy.dstHost, copy.dstDevice
    source, from_host, from_device = copy.srcMemoryType, copy.srcHost, copy.srcDevice
    return (
        rectangle(to, to_host, to_device, copy.dstPitch, copy.dstXInBytes, copy.dstY, width, rows),
        rectangle(source, from_host, from_device, copy.srcPitch, copy.srcXInBytes, copy.srcY, width, rows),
    )


def rectangle(kind: Any, host: Any, device: Any, pitch: int, x: int, y: int, width: int, rows: int) -> Side:
    """Return one side, which begins `x` bytes and `y` rows into what its pointer points to.

    A pitch of 0 means rows without gaps.
    """
    kinds = bindings().CUmemorytype
    if kind == kinds.CU_MEMORYTYPE_ARRAY:
        raise Refusal("NOT_SUPPORTED", "virtual devices have no CUDA arrays")
    pitch = pitch or x + width
    if x + width > pitch:
        raise Refusal("INVALID_VALUE", f"rows of {width} bytes from byte {x} on are {pitch} bytes apart")
    base = host_address(host) if kind == kinds.CU_MEMORYTYPE_HOST else number(device)
    must_be_known = bool(kind == kinds.CU_MEMORYTYPE_DEVICE)
    return Side(base + y * pitch + x, width, rows, pitch, must_be_known=must_be_known)
