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
from gpufleet.virtual.transfers import Side, locate, move

STAGED = 64 << 10
"""Up to so many bytes of pageable memory are read at once and copied later (measured on driver 580)."""


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
    """Copy between two contexts, after all work of both, and wait. Peer access need not be enabled."""
    for context in (state.live_context(dstContext), state.live_context(srcContext)):
        state.wait(context)
    _copy(state, current.legacy, _device(dstDevice, ByteCount), _device(srcDevice, ByteCount), wait=True)


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
    state.live_context(dstContext)
    state.live_context(srcContext)
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


def _copy(
    state: State, stream: Stream, to: Side, source: Side, keep: object = None, *, wait: bool = False
) -> None:
    """Copy in the order of a stream, and wait unless both sides are device memory.

    (Driver API, "API synchronization behavior".)
    """
    if not to.width or not to.rows:
        return
    locate(state.memory, to, source)
    operation = _operation(state, stream, to, source, keep)
    if wait or not (to.is_device and source.is_device):
        enqueue_and_wait(state.scheduler, stream, operation)
        state.check_fault()
    else:
        enqueue(state.scheduler, stream, operation)


def _copy_async(state: State, stream: Stream, to: Side, source: Side, keep: object = None) -> None:
    """Copy in the order of a stream, and wait only where pageable memory makes the driver do so."""
    if not to.width or not to.rows:
        return
    locate(state.memory, to, source)
    if source.is_pageable and not to.is_pageable and source.rows == 1 and source.width <= STAGED:
        keep = staged = read_bytes(source.address, source.width)
        source = Side(host_address(staged), source.width)
        may_wait = False
    else:
        may_wait = to.is_pageable or source.is_pageable
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

    return Operation(stream.context.device.ordinal, run)


def _rectangles(copy: Any) -> tuple[Side, Side]:
    size = int(copy.WidthInBytes), int(copy.Height)
    to_host, to_device = copy.dstHost, copy.dstDevice
    from_host, from_device = copy.srcHost, copy.srcDevice
    return (
        _rectangle(copy.dstMemoryType, to_host, to_device, copy.dstPitch, copy.dstXInBytes, copy.dstY, *size),
        _rectangle(
            copy.srcMemoryType, from_host, from_device, copy.srcPitch, copy.srcXInBytes, copy.srcY, *size
        ),
    )


def _rectangle(kind: Any, host: Any, device: Any, pitch: int, x: int, y: int, width: int, rows: int) -> Side:
    """One side, which begins `x` bytes and `y` rows into what its pointer points to."""
    kinds = bindings().CUmemorytype
    if kind == kinds.CU_MEMORYTYPE_ARRAY:
        raise Refusal("NOT_SUPPORTED", "virtual devices have no CUDA arrays")
    if width > pitch:
        raise Refusal("INVALID_VALUE", f"rows of {width} bytes are {pitch} bytes apart")
    base = host_address(host) if kind == kinds.CU_MEMORYTYPE_HOST else number(device)
    must_be_known = bool(kind == kinds.CU_MEMORYTYPE_DEVICE)
    return Side(base + y * pitch + x, width, rows, pitch, must_be_known=must_be_known)
