"""Executable graphs: made, launched, changed, destroyed."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.api.graph_nodes import kernel_work
from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.graphs import Executable
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import enqueue

FLAGS = (0, 1, 4, 8)
"""CUDA_GRAPH_INSTANTIATE_FLAG_*: none, AUTO_FREE_ON_LAUNCH, DEVICE_LAUNCH and USE_NODE_PRIORITY; the last
two have no effect. UPLOAD (2) is for cuGraphInstantiateWithParams."""
UPLOAD = 2


@call(outputs=1)
def cuGraphInstantiate(state: State, hGraph: Any, flags: int) -> Any:
    """Return what can be launched; the graph may be changed or destroyed then."""
    return _instantiate(state, hGraph, int(flags))


@call(outputs=1)
def cuGraphInstantiateWithParams(state: State, hGraph: Any, instantiateParams: Any) -> Any:
    """Do what cuGraphInstantiate does; write the outcome into the parameters."""
    executable = _instantiate(state, hGraph, int(instantiateParams.flags) & ~UPLOAD)
    instantiateParams.result_out = bindings().CUgraphInstantiateResult.CUDA_GRAPH_INSTANTIATE_SUCCESS
    return executable


@call(by_finalizers=True)
def cuGraphExecDestroy(state: State, hGraphExec: Any) -> None:
    """End an executable graph; its launches are not disturbed."""
    with state.lock:
        state.graphs.remove_executable(state.graphs.executable(hGraphExec))
    state.scheduler.settle()


@call()
def cuGraphLaunch(state: State, hGraphExec: Any, hStream: Any) -> None:
    """Put all of a graph into a stream."""
    state.graphs.executable(hGraphExec).launch(state.scheduler, state.stream(hStream))


@call()
def cuGraphUpload(state: State, hGraphExec: Any, hStream: Any) -> None:
    """Do nothing in the order of a stream: nothing needs to be prepared."""
    state.graphs.executable(hGraphExec)
    stream = state.stream(hStream)
    enqueue(state.scheduler, stream, Operation(stream.context.device.ordinal))


@call(outputs=1)
def cuGraphExecGetFlags(state: State, hGraphExec: Any) -> Any:
    """Return the flags that an executable graph was made with."""
    return bindings().cuuint64_t(state.graphs.executable(hGraphExec).flags)


@call(outputs=1)
def cuGraphExecUpdate(state: State, hGraphExec: Any, hGraph: Any) -> Any:
    """Let later launches do what a graph of the same shape does."""
    with state.lock:
        executable, graph = state.graphs.executable(hGraphExec), state.graphs.graph(hGraph)
        if graph.has_memory() or not executable.update(graph):
            raise Refusal("GRAPH_EXEC_UPDATE_FAILURE", "the graph has another shape, or allocates memory")
    found = bindings().CUgraphExecUpdateResultInfo()
    found.result = bindings().CUgraphExecUpdateResult.CU_GRAPH_EXEC_UPDATE_SUCCESS
    return found


@call()
def cuGraphExecKernelNodeSetParams(state: State, hGraphExec: Any, hNode: Any, nodeParams: Any) -> None:
    """Let later launches start a kernel otherwise."""
    step = state.graphs.executable(hGraphExec).step(state.graphs.node(hNode))
    if step.work.kind != "KERNEL":
        raise Refusal("INVALID_VALUE", "the node launches no kernel")
    step.work = kernel_work(state, nodeParams)


@call()
def cuGraphNodeSetEnabled(state: State, hGraphExec: Any, hNode: Any, isEnabled: int) -> None:
    """Let later launches leave out a kernel, copy or fill, or not."""
    step = state.graphs.executable(hGraphExec).step(state.graphs.node(hNode))
    if step.work.kind not in ("KERNEL", "MEMCPY", "MEMSET"):
        raise Refusal("INVALID_VALUE", "only kernels, copies and fills can be left out")
    step.enabled = bool(isEnabled)


@call(outputs=1)
def cuGraphNodeGetEnabled(state: State, hGraphExec: Any, hNode: Any) -> int:
    """Return whether launches carry out a node."""
    return int(state.graphs.executable(hGraphExec).step(state.graphs.node(hNode)).enabled)


def _instantiate(state: State, handle: Any, flags: int) -> Any:
    with state.lock:
        graph = state.graphs.graph(handle)
        if flags not in FLAGS:
            raise Refusal("INVALID_VALUE", f"the flags are {flags}: expected one of {FLAGS}")
        if graph.has_memory() and graph.executables:
            raise Refusal("NOT_SUPPORTED", "a graph that allocates or frees memory is executable only once")
        return bindings().CUgraphExec(state.graphs.add_executable(Executable(graph, flags)))
