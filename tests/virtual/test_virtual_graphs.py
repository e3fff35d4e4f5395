"""Graphs and captures of virtual devices, beyond what an H200 was asked (conformance/)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import c_int, c_void_p
from typing import Any

import pytest
from virtual_fakes import code, ptx, value


@pytest.fixture
def stream(d: Any, context: Any) -> Any:
    return value(d.cuStreamCreate(1))


def begin(d: Any, stream: Any) -> None:
    assert (
        code(d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)) == "SUCCESS"
    )


def free_bytes(d: Any) -> int:
    return int(d.cuMemGetInfo()[1])


def read(d: Any, address: Any) -> int:
    target = bytearray(4)
    assert code(d.cuMemcpyDtoH(target, address, 4)) == "SUCCESS"
    return int.from_bytes(target, "little")


def captured_allocation(d: Any, stream: Any, *, free: bool) -> tuple[Any, Any]:
    begin(d, stream)
    memory = value(d.cuMemAllocAsync(1 << 20, stream))
    assert code(d.cuMemsetD32Async(memory, 7, 4, stream)) == "SUCCESS"
    if free:
        assert code(d.cuMemFreeAsync(memory, stream)) == "SUCCESS"
    return value(d.cuStreamEndCapture(stream)), memory


def test_memory_of_a_graph_is_given_back_with_its_last_user(d: Any, stream: Any) -> None:
    before = free_bytes(d)
    graph, memory = captured_allocation(d, stream, free=False)
    executable = value(d.cuGraphInstantiate(graph, 0))
    assert code(d.cuGraphLaunch(executable, stream)) == "SUCCESS"
    assert code(d.cuStreamSynchronize(stream)) == "SUCCESS"
    assert code(d.cuGraphDestroy(graph)) == "SUCCESS"
    assert code(d.cuGraphExecDestroy(executable)) == "SUCCESS"
    assert read(d, memory) == 7
    assert free_bytes(d) < before
    assert code(d.cuMemFree(memory)) == "SUCCESS"
    assert free_bytes(d) == before


def test_memory_of_a_graph_that_is_never_launched_is_given_back(d: Any, stream: Any) -> None:
    before = free_bytes(d)
    graph, _ = captured_allocation(d, stream, free=True)
    assert code(d.cuGraphDestroy(graph)) == "SUCCESS"
    assert free_bytes(d) == before


@pytest.mark.parametrize("how", ["broken", "stream destroyed"])
def test_memory_of_a_capture_without_a_graph_is_given_back(d: Any, stream: Any, how: str) -> None:
    before = free_bytes(d)
    begin(d, stream)
    value(d.cuMemAllocAsync(1 << 20, stream))
    if how == "broken":
        assert code(d.cuStreamSynchronize(stream)) == "STREAM_CAPTURE_UNSUPPORTED"
        assert code(d.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
    else:
        assert code(d.cuStreamDestroy(stream)) == "SUCCESS"
    assert free_bytes(d) == before
    assert code(d.cuMemFree(value(d.cuMemAlloc(16)))) == "SUCCESS", "a capture is still active"


def test_a_capture_ends_with_the_context_of_its_stream(d: Any, context: Any, stream: Any) -> None:
    begin(d, stream)
    assert code(d.cuCtxDestroy(context)) == "SUCCESS"
    value(d.cuCtxCreate(None, 0, 0))
    assert code(d.cuMemAlloc(16)) == "SUCCESS"


def test_a_graph_of_a_destroyed_context_is_not_launched(
    d: Any, context: Any, stream: Any, kernel: Callable[..., Any], launch: Callable[..., str]
) -> None:
    function = kernel(lambda launch: None)
    begin(d, stream)
    assert launch(function, stream=stream) == "SUCCESS"
    executable = value(d.cuGraphInstantiate(value(d.cuStreamEndCapture(stream)), 0))
    assert code(d.cuCtxDestroy(context)) == "SUCCESS"
    value(d.cuCtxCreate(None, 0, 0))
    assert code(d.cuGraphLaunch(executable, 0)) == "CONTEXT_IS_DESTROYED"


def test_branches_of_a_graph_run_side_by_side(d: Any, stream: Any, kernel: Callable[..., Any]) -> None:
    meeting = threading.Barrier(2, timeout=10)
    function = kernel(lambda launch: meeting.wait())
    parameters = d.CUDA_KERNEL_NODE_PARAMS()
    parameters.func = function
    parameters.gridDimX = parameters.gridDimY = parameters.gridDimZ = 1
    parameters.blockDimX = parameters.blockDimY = parameters.blockDimZ = 1
    parameters.kernelParams = ((0, 0), (c_void_p, c_int))
    graph = value(d.cuGraphCreate(0))
    for _ in range(2):
        assert code(d.cuGraphAddKernelNode(graph, [], 0, parameters)) == "SUCCESS"
    executable = value(d.cuGraphInstantiate(graph, 0))
    assert code(d.cuGraphLaunch(executable, stream)) == "SUCCESS"
    assert code(d.cuStreamSynchronize(stream)) == "SUCCESS"


def test_parameters_of_a_captured_launch_can_be_asked_and_set(d: Any, stream: Any) -> None:
    function = value(d.cuModuleGetFunction(value(d.cuModuleLoadData(ptx("asked"))), b"asked"))
    begin(d, stream)
    arguments = ((0x1000, 5), (c_void_p, c_int))
    assert code(d.cuLaunchKernel(function, 3, 1, 1, 32, 2, 1, 0, stream, arguments, 0)) == "SUCCESS"
    graph = value(d.cuStreamEndCapture(stream))
    (node,), _ = d.cuGraphGetNodes(graph, 1)[1:]
    found = value(d.cuGraphKernelNodeGetParams(node))
    assert int(found.func) == int(function)
    assert (found.gridDimX, found.blockDimX, found.blockDimY) == (3, 32, 2)
    pointers = (c_void_p * 2).from_address(found.kernelParams)
    assert c_int.from_address(pointers[1] or 0).value == 5
    found.gridDimX = 4
    assert code(d.cuGraphKernelNodeSetParams(node, found)) == "SUCCESS"
    assert value(d.cuGraphKernelNodeGetParams(node)).gridDimX == 4


def test_a_cycle_is_refused_when_the_graph_is_made_executable(d: Any, context: Any) -> None:
    graph = value(d.cuGraphCreate(0))
    first, second = (value(d.cuGraphAddEmptyNode(graph, [], 0)) for _ in range(2))
    assert code(d.cuGraphAddDependencies(graph, [first, second], [second, first], None, 2)) == "SUCCESS"
    assert code(d.cuGraphInstantiate(graph, 0)) == "INVALID_VALUE"
    assert "cycle" in d.last_error_log


def test_a_child_graph_runs_between_what_is_before_and_after_it(d: Any, stream: Any) -> None:
    memory = value(d.cuMemAlloc(16))
    child, parent = value(d.cuGraphCreate(0)), value(d.cuGraphCreate(0))
    fill = d.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.elementSize, fill.width, fill.height = memory, 4, 1, 1
    context = value(d.cuCtxGetCurrent())

    def add(graph: Any, number: int, after: list[Any]) -> Any:
        fill.value = number
        return value(d.cuGraphAddMemsetNode(graph, after, len(after), fill, context))

    add(child, 2, [])
    first = add(parent, 1, [])
    middle = value(d.cuGraphAddChildGraphNode(parent, [first], 1, child))
    executable = value(d.cuGraphInstantiate(parent, 0))
    assert code(d.cuGraphLaunch(executable, stream)) == "SUCCESS"
    assert code(d.cuStreamSynchronize(stream)) == "SUCCESS"
    assert read(d, memory) == 2
    add(parent, 3, [middle])
    executable = value(d.cuGraphInstantiate(parent, 0))
    assert code(d.cuGraphLaunch(executable, stream)) == "SUCCESS"
    assert code(d.cuStreamSynchronize(stream)) == "SUCCESS"
    assert read(d, memory) == 3
