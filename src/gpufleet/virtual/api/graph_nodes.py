"""The nodes of graphs: added, asked, changed, destroyed."""

from __future__ import annotations

import ctypes
from typing import Any

from gpufleet.virtual.api.boxes import copy_node
from gpufleet.virtual.api.fills import fill_node
from gpufleet.virtual.api.functions import function_of
from gpufleet.virtual.api.launches import kernel_node
from gpufleet.virtual.api.streams import host_action
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.graphs import Graph, Node, Work
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.state import State


@call(outputs=1)
def cuGraphAddKernelNode(
    state: State, hGraph: Any, dependencies: Any, numDependencies: int, nodeParams: Any
) -> Any:
    """Add a launch of a kernel; its arguments are read now."""
    return _add(state, hGraph, dependencies, numDependencies, lambda: kernel_work(state, nodeParams))


@call(outputs=1)
def cuGraphAddMemcpyNode(
    state: State, hGraph: Any, dependencies: Any, numDependencies: int, copyParams: Any, ctx: Any
) -> Any:
    """Add a copy of a box."""
    return _add(
        state,
        hGraph,
        dependencies,
        numDependencies,
        lambda: copy_node(state, _context(state, ctx), copyParams),
    )


@call(outputs=1)
def cuGraphAddMemsetNode(
    state: State, hGraph: Any, dependencies: Any, numDependencies: int, memsetParams: Any, ctx: Any
) -> Any:
    """Add the filling of memory."""
    return _add(
        state,
        hGraph,
        dependencies,
        numDependencies,
        lambda: fill_node(state, _context(state, ctx), memsetParams),
    )


@call(outputs=1)
def cuGraphAddHostNode(
    state: State, hGraph: Any, dependencies: Any, numDependencies: int, nodeParams: Any
) -> Any:
    """Add the call of a C function."""

    def work() -> Work:
        action = host_action(state, nodeParams.fn, nodeParams.userData)
        return Work("HOST", operation=Operation(0, action, on_worker=True))

    return _add(state, hGraph, dependencies, numDependencies, work)


@call(outputs=1)
def cuGraphAddEmptyNode(state: State, hGraph: Any, dependencies: Any, numDependencies: int) -> Any:
    """Add a node that does nothing."""
    return _add(state, hGraph, dependencies, numDependencies, lambda: Work("EMPTY"))


@call(outputs=1)
def cuGraphAddEventRecordNode(
    state: State, hGraph: Any, dependencies: Any, numDependencies: int, event: Any
) -> Any:
    """Add the recording of an event."""
    return _add(state, hGraph, dependencies, numDependencies, lambda: _event(state, "EVENT_RECORD", event))


@call(outputs=1)
def cuGraphAddEventWaitNode(
    state: State, hGraph: Any, dependencies: Any, numDependencies: int, event: Any
) -> Any:
    """Add the wait for an event."""
    return _add(state, hGraph, dependencies, numDependencies, lambda: _event(state, "WAIT_EVENT", event))


@call(outputs=1)
def cuGraphAddChildGraphNode(
    state: State, hGraph: Any, dependencies: Any, numDependencies: int, childGraph: Any
) -> Any:
    """Add a copy of a graph as one node; not of a graph that allocates or frees memory."""
    with state.lock:
        child = state.graphs.graph(childGraph)
        if child.has_memory():
            raise Refusal("NOT_SUPPORTED", "a graph that allocates or frees memory cannot be a node")
        copy = child.clone()
    return _add(state, hGraph, dependencies, numDependencies, lambda: Work("GRAPH"), copy)


@call()
def cuGraphDestroyNode(state: State, hNode: Any) -> None:
    """Take a node out of its graph."""
    with state.lock:
        node = state.graphs.node(hNode)
        node.graph.remove(node)
    state.scheduler.settle()


# ---- questions and changes


@call(outputs=1)
def cuGraphNodeGetType(state: State, hNode: Any) -> Any:
    """Return the kind of a node."""
    kind = state.graphs.node(hNode).work.kind
    return getattr(bindings().CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{kind}")


@call(outputs=1)
def cuGraphChildGraphNodeGetGraph(state: State, hNode: Any) -> Any:
    """Return the graph that a node runs, which is a copy of the one it was added with."""
    child = state.graphs.node(hNode).child
    if child is None:
        raise Refusal("INVALID_VALUE", "the node runs no graph")
    return bindings().CUgraph(child.handle)


@call(outputs=1)
def cuGraphKernelNodeGetParams(state: State, hNode: Any) -> Any:
    """Return kernel, grid, block and arguments of a node."""
    node = _kernel_node(state, hNode)
    function, launch = node.work.function, node.work.launch
    assert function is not None
    assert launch is not None
    found = bindings().CUDA_KERNEL_NODE_PARAMS()
    found.func = bindings().CUfunction(function.handle)
    found.gridDimX, found.gridDimY, found.gridDimZ = launch.grid
    found.blockDimX, found.blockDimY, found.blockDimZ = launch.block
    found.sharedMemBytes = launch.dynamic_shared
    node.kept = function.parameters.pointers(launch.parameters)
    found.kernelParams = ctypes.addressof(node.kept[0])
    return found


@call()
def cuGraphKernelNodeSetParams(state: State, hNode: Any, nodeParams: Any) -> None:
    """Change the launch of a node, for what is made executable from now on."""
    _kernel_node(state, hNode).work = kernel_work(state, nodeParams)


@call(outputs=1)
def cuGraphMemAllocNodeGetParams(state: State, hNode: Any) -> Any:
    """Return size and address of what a node allocates."""
    work = state.graphs.node(hNode).work
    if work.kind != "MEM_ALLOC" or work.memory is None:
        raise Refusal("INVALID_VALUE", "the node allocates nothing")
    found = bindings().CUDA_MEM_ALLOC_NODE_PARAMS()
    found.bytesize = work.memory.allocation.size
    found.dptr = bindings().CUdeviceptr(work.memory.allocation.start)
    return found


@call(outputs=1)
def cuGraphMemFreeNodeGetParams(state: State, hNode: Any) -> Any:
    """Return the address of what a node frees."""
    work = state.graphs.node(hNode).work
    if work.kind != "MEM_FREE" or work.memory is None:
        raise Refusal("INVALID_VALUE", "the node frees nothing")
    return bindings().CUdeviceptr(work.memory.allocation.start)


def _add(
    state: State, handle: Any, dependencies: Any, count: int, work: Any, child: Graph | None = None
) -> Any:
    with state.lock:
        graph = state.graphs.graph(handle)
        after = state.graphs.nodes(graph, dependencies, count)
        return bindings().CUgraphNode(graph.add(work(), after, child).handle)


def _kernel_node(state: State, handle: Any) -> Node:
    node = state.graphs.node(handle)
    if node.work.kind != "KERNEL":
        raise Refusal("INVALID_VALUE", "the node launches no kernel")
    return node


def kernel_work(state: State, parameters: Any) -> Work:
    """Return the work of a node that CUDA_KERNEL_NODE_PARAMS describe."""
    function = function_of(state, parameters.func)
    grid = (parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ)
    block = (parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ)
    shared = parameters.sharedMemBytes
    return kernel_node(state, function, grid, block, shared, parameters.kernelParams, parameters.extra)


def _event(state: State, kind: str, handle: Any) -> Work:
    if not number(handle):
        raise Refusal("INVALID_VALUE", "the event is NULL")
    return Work(kind, event=state.event(handle))


def _context(state: State, handle: Any) -> Context:
    return state.live_context(handle) if number(handle) else state.current()
