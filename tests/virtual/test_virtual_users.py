"""Who uses memory, and what the end of the memory waits for; what all streams of a context wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver as cu
from virtual_fakes import Latch, assert_waits_for, code, value

Run = Callable[..., str]


def box(target: Any, source: Any) -> Any:
    copy = cu.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = source, target
    copy.srcPitch = copy.dstPitch = copy.WidthInBytes = 64
    copy.srcHeight = copy.dstHeight = copy.Height = copy.Depth = 1
    return copy


def graph_of_a_copy(d: Any, target: Any, source: Any, stream: Any) -> Any:
    d.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    assert code(d.cuMemcpyDtoDAsync(target, source, 64, stream)) == "SUCCESS"
    return value(d.cuGraphInstantiate(value(d.cuStreamEndCapture(stream)), 0))


@pytest.mark.parametrize("ends", ["free", "destroy"])
@pytest.mark.parametrize("user", ["copy", "box", "graph", "write_value"])
def test_the_end_of_memory_waits_for_its_users_on_another_device(
    d: Any, kernel: Any, launch: Run, user: str, ends: str
) -> None:
    there = value(d.cuCtxCreate(None, 0, 0))
    pointer = value(d.cuMemAlloc(64))
    here = value(d.cuCtxCreate(None, 0, 1))
    latch, stream, target = Latch(), value(d.cuStreamCreate(1)), value(d.cuMemAlloc(64))
    graph = graph_of_a_copy(d, target, pointer, stream) if user == "graph" else None
    if user == "write_value":
        d.cuCtxEnablePeerAccess(there, 0)
    launch(kernel(latch), stream=stream)
    latch.wait_until_entered()
    if user == "copy":
        assert code(d.cuMemcpyPeerAsync(target, here, pointer, there, 64, stream)) == "SUCCESS"
    elif user == "box":
        assert code(d.cuMemcpy3DAsync(box(target, pointer), stream)) == "SUCCESS"
    elif user == "graph":
        assert code(d.cuGraphLaunch(graph, stream)) == "SUCCESS"
    else:
        assert code(d.cuStreamWriteValue32(stream, pointer, 1, 0)) == "SUCCESS"
        d.cuCtxDisablePeerAccess(there)  # so that it is not waited for as a peer's kernel would be

    def end() -> None:
        d.cuCtxSetCurrent(there)
        _ = d.cuMemFree(pointer) if ends == "free" else d.cuCtxDestroy(there)

    assert_waits_for(latch, end)
    assert code(d.cuStreamSynchronize(stream)) == "SUCCESS"


def test_free_does_not_wait_for_a_peer_of_another_context(d: Any, kernel: Any, launch: Run) -> None:
    peer, mine = value(d.cuCtxCreate(None, 0, 0)), value(d.cuCtxCreate(None, 0, 0))
    value(d.cuCtxCreate(None, 0, 1))
    d.cuCtxEnablePeerAccess(peer, 0)
    latch = Latch()
    launch(kernel(latch))
    latch.wait_until_entered()
    d.cuCtxSetCurrent(mine)
    assert code(d.cuMemFree(value(d.cuMemAlloc(64)))) == "SUCCESS"
    latch.open()


@pytest.mark.parametrize("is_late", [False, True])
def test_all_streams_of_a_context_wait_for_an_event(
    d: Any, context: Any, kernel: Any, launch: Run, is_late: bool
) -> None:
    event, after, latch = value(d.cuEventCreate(2)), value(d.cuEventCreate(2)), Latch()
    busy, early = value(d.cuStreamCreate(1)), value(d.cuStreamCreate(1))
    launch(kernel(latch), stream=busy)
    latch.wait_until_entered()
    assert code(d.cuCtxRecordEvent(context, event)) == "SUCCESS"
    assert code(d.cuEventQuery(event)) == "NOT_READY"
    assert code(d.cuCtxWaitEvent(context, event)) == "SUCCESS"
    d.cuEventRecord(after, value(d.cuStreamCreate(1)) if is_late else early)
    assert code(d.cuEventQuery(after)) == "NOT_READY"
    latch.open()
    assert code(d.cuEventSynchronize(after)) == "SUCCESS"
    assert code(d.cuEventQuery(event)) == "SUCCESS"
