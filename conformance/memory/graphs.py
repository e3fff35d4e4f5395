"""Graphs that are built node by node, and what may be done with an executable graph."""

from __future__ import annotations

import ctypes

from .graph_shape import nodes_of, run_graph, shape
from .probe import PARAMETERS, ints, run_chapter

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def probe_graphs(driver, image, **how):
    """cuGraphCreate, nodes, edges, instantiation, launches, updates, destruction."""
    return run_chapter(
        (
            create,
            kernel_nodes,
            other_nodes,
            dependencies,
            cycles,
            instantiate,
            two_branches,
            clone,
            child_graphs,
            destroy_nodes,
            null_handles,
            after_its_context,
        ),
        driver,
        image,
        **how,
    )


def kernel_parameters(p, name, arguments, block=1, function=None):
    """CUDA_KERNEL_NODE_PARAMS for one of the probes' kernels."""
    node = p.d.CUDA_KERNEL_NODE_PARAMS()
    node.func = p.kernel(name) if function is None else function
    node.gridDimX = node.gridDimY = node.gridDimZ = 1
    node.blockDimX, node.blockDimY, node.blockDimZ = block, 1, 1
    node.sharedMemBytes = 0
    node.kernelParams = (tuple(arguments), PARAMETERS[name])
    return p.alive(node)


def add_kernel(p, graph, name, *arguments, after=(), block=1):
    node = kernel_parameters(p, name, arguments, block)
    return p.need(p.d.cuGraphAddKernelNode, graph, list(after), len(after), node)


def new_graph(p):
    return p.need(p.d.cuGraphCreate, 0)


def adding(p, memory, value=1):
    """A graph of one kernel that adds `value`."""
    graph = new_graph(p)
    add_kernel(p, graph, "add", memory, value)
    return graph


def create(p):
    d = p.d
    p.each("flags", d.cuGraphCreate, {each: (each,) for each in (0, 1)})
    graph = new_graph(p)
    p.note("shape", shape(p, graph))
    p.ask("instantiate", d.cuGraphInstantiate, graph, 0)
    p.ask("destroy", d.cuGraphDestroy, graph)


def kernel_nodes(p):
    d = p.d
    stream, memory = p.stream(), p.device()
    graph = new_graph(p)
    first = p.ask("add", d.cuGraphAddKernelNode, graph, [], 0, kernel_parameters(p, "fill", (memory, 5), 32))
    p.ask(
        "add_behind", d.cuGraphAddKernelNode, graph, [first], 1, kernel_parameters(p, "add", (memory, 2), 32)
    )
    p.ask(
        "same_dependency_twice",
        d.cuGraphAddKernelNode,
        graph,
        [first, first],
        2,
        kernel_parameters(p, "add", (memory + 1024, 2)),
    )
    p.ask("no_block", d.cuGraphAddKernelNode, graph, [], 0, kernel_parameters(p, "fill", (memory, 5), 0))
    p.ask(
        "block_of_2048", d.cuGraphAddKernelNode, graph, [], 0, kernel_parameters(p, "fill", (memory, 5), 2048)
    )
    p.ask("no_parameters", d.cuGraphAddKernelNode, graph, [], 0, d.CUDA_KERNEL_NODE_PARAMS())
    other = new_graph(p)
    p.ask(
        "dependency_of_another_graph",
        d.cuGraphAddKernelNode,
        other,
        [first],
        1,
        kernel_parameters(p, "add", (memory, 2)),
    )
    p.note("shape", shape(p, graph))
    run_graph(p, graph, stream)
    p.note("value", p.read(memory, 32)[31])


def other_nodes(p):
    d = p.d
    stream, memory, host, event = p.stream(), p.device(), p.pinned(), p.event()
    graph = new_graph(p)
    fill = d.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = d.CUdeviceptr(memory), 9, 4, 8, 1
    one = p.ask("memset", d.cuGraphAddMemsetNode, graph, [], 0, fill, p.context)
    copy = d.CUDA_MEMCPY3D()
    copy.srcMemoryType, copy.srcDevice = d.CUmemorytype.CU_MEMORYTYPE_DEVICE, d.CUdeviceptr(memory)
    copy.dstMemoryType, copy.dstHost = d.CUmemorytype.CU_MEMORYTYPE_HOST, host
    copy.WidthInBytes, copy.Height, copy.Depth = 32, 1, 1
    two = p.ask("memcpy", d.cuGraphAddMemcpyNode, graph, [one], 1, copy, p.context)
    seen = []
    function = p.alive(HostFunction(lambda data: seen.append(ints(host)[0])))
    call = d.CUDA_HOST_NODE_PARAMS()
    call.fn, call.userData = d.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0
    three = p.ask("host", d.cuGraphAddHostNode, graph, [two], 1, call)
    four = p.ask("empty", d.cuGraphAddEmptyNode, graph, [three], 1)
    five = p.ask("record", d.cuGraphAddEventRecordNode, graph, [four], 1, event)
    p.ask("wait", d.cuGraphAddEventWaitNode, graph, [five], 1, event)
    p.note("shape", shape(p, graph))
    run_graph(p, graph, stream)
    p.note("value", list(ints(host, 8)))
    p.note("seen", seen)
    fill.elementSize = 3
    p.ask("memset.element_3", d.cuGraphAddMemsetNode, graph, [], 0, fill, p.context)
    fill.elementSize, fill.width = 4, 0
    p.ask("memset.width_0", d.cuGraphAddMemsetNode, graph, [], 0, fill, p.context)
    fill.width = 1 << 22
    p.ask("memset.past_the_end", d.cuGraphAddMemsetNode, graph, [], 0, fill, p.context)
    fill.width = 8
    p.ask("memset.null_context", d.cuGraphAddMemsetNode, graph, [], 0, fill, 0)
    copy.WidthInBytes = 0
    p.ask("memcpy.nothing", d.cuGraphAddMemcpyNode, graph, [], 0, copy, p.context)
    p.ask("record.null_event", d.cuGraphAddEventRecordNode, graph, [], 0, 0)


def dependencies(p):
    d = p.d
    graph = new_graph(p)
    a, b, c = (p.need(d.cuGraphAddEmptyNode, graph, [], 0) for _ in range(3))
    p.ask("add", d.cuGraphAddDependencies, graph, [a, b], [b, c], None, 2)
    p.note("shape", shape(p, graph))
    p.note("of_c", int(p.need(d.cuGraphNodeGetDependencies, c)[2]))
    p.note("on_a", int(p.need(d.cuGraphNodeGetDependentNodes, a)[2]))
    p.ask("add_again", d.cuGraphAddDependencies, graph, [a], [b], None, 1)
    p.ask("remove", d.cuGraphRemoveDependencies, graph, [a], [b], None, 1)
    p.ask("remove_again", d.cuGraphRemoveDependencies, graph, [a], [b], None, 1)
    p.ask("on_itself", d.cuGraphAddDependencies, graph, [a], [a], None, 1)
    other = p.need(d.cuGraphAddEmptyNode, new_graph(p), [], 0)
    p.ask("across_graphs", d.cuGraphAddDependencies, graph, [a], [other], None, 1)
    p.note("shape_at_last", shape(p, graph))


def cycles(p):
    d = p.d
    graph = new_graph(p)
    a, b = (p.need(d.cuGraphAddEmptyNode, graph, [], 0) for _ in range(2))
    p.need(d.cuGraphAddDependencies, graph, [a], [b], None, 1)
    p.ask("close", d.cuGraphAddDependencies, graph, [b], [a], None, 1)
    p.ask("instantiate", d.cuGraphInstantiate, graph, 0)


def instantiate(p):
    d = p.d
    graph = adding(p, p.device())
    p.each("flags", d.cuGraphInstantiate, {each: (graph, each) for each in (0, 1, 2, 4, 8, 16, 32)})
    executable = p.need(d.cuGraphInstantiate, graph, 0)
    p.note("get_flags", int(p.need(d.cuGraphExecGetFlags, executable)))
    parameters = d.CUDA_GRAPH_INSTANTIATE_PARAMS()
    p.ask("with_params", d.cuGraphInstantiateWithParams, graph, parameters)
    p.note("with_params.result", parameters.result_out)
    p.ask("change_after", d.cuGraphAddEmptyNode, graph, [], 0)
    p.ask("again", d.cuGraphInstantiate, graph, 0)


def two_branches(p):
    """Branches of a graph may run side by side: what joins them sees both."""
    memory, stream = p.device(), p.stream()
    p.write(memory, 0, 0)
    graph = new_graph(p)
    one = add_kernel(p, graph, "add", memory, 1)
    two = add_kernel(p, graph, "add", memory + 4, 2)
    add_kernel(p, graph, "add", memory, 10, after=(one, two), block=2)
    p.note("shape", shape(p, graph))
    run_graph(p, graph, stream, times=2)
    p.note("value", p.read(memory, 2))


def clone(p):
    d = p.d
    memory, stream = p.device(), p.stream()
    p.write(memory, 0)
    graph = adding(p, memory)
    copy = p.ask("clone", d.cuGraphClone, graph)
    p.note("shape", shape(p, copy))
    found = p.ask("find", d.cuGraphNodeFindInClone, nodes_of(p, graph)[0], copy)
    p.note("find.is_the_clones", found is not None and int(found) == int(nodes_of(p, copy)[0]))
    p.need(d.cuGraphDestroy, graph)
    run_graph(p, copy, stream)
    p.note("value", p.read(memory)[0])


def child_graphs(p):
    """A graph as a node of another; of itself: hazards.py."""
    d = p.d
    memory, stream = p.device(), p.stream()
    p.write(memory, 0)
    child, parent = adding(p, memory), new_graph(p)
    first = p.ask("add", d.cuGraphAddChildGraphNode, parent, [], 0, child)
    p.ask("add_again", d.cuGraphAddChildGraphNode, parent, [first], 1, child)
    p.note("shape", shape(p, parent))
    inside = p.ask("get", d.cuGraphChildGraphNodeGetGraph, first)
    p.note("get.is_a_copy", inside is not None and int(inside) != int(child))
    p.need(d.cuGraphDestroy, child)
    run_graph(p, parent, stream)
    p.note("value", p.read(memory)[0])


def destroy_nodes(p):
    d = p.d
    graph = new_graph(p)
    a = p.need(d.cuGraphAddEmptyNode, graph, [], 0)
    b = p.need(d.cuGraphAddEmptyNode, graph, [a], 1)
    p.need(d.cuGraphAddEmptyNode, graph, [b], 1)
    p.note("before", shape(p, graph))
    p.ask("middle", d.cuGraphDestroyNode, b)
    p.note("after", shape(p, graph))
    p.ask("instantiate", d.cuGraphInstantiate, graph, 0)


def null_handles(p):
    d = p.d
    stream = p.stream()
    p.ask("cuGraphDestroy", d.cuGraphDestroy, 0)
    p.ask("cuGraphInstantiate", d.cuGraphInstantiate, 0, 0)
    p.ask("cuGraphExecDestroy", d.cuGraphExecDestroy, 0)
    p.ask("cuGraphLaunch", d.cuGraphLaunch, 0, stream)
    p.ask("cuGraphGetNodes", d.cuGraphGetNodes, 0)
    p.ask("cuGraphClone", d.cuGraphClone, 0)
    p.ask("cuGraphAddEmptyNode", d.cuGraphAddEmptyNode, 0, [], 0)
    p.ask("cuGraphDestroyNode", d.cuGraphDestroyNode, 0)


def after_its_context(p):
    """A graph belongs to no context; its kernel does."""
    d = p.d
    other = p.new_context()
    graph = adding(p, p.device())
    empty = new_graph(p)
    p.need(d.cuGraphAddEmptyNode, empty, [], 0)
    p.need(d.cuCtxDestroy, other)
    p.note("shape", shape(p, graph))
    stream = p.stream()
    executable = p.ask("instantiate_empty", d.cuGraphInstantiate, empty, 0)
    p.ask("launch_empty", d.cuGraphLaunch, executable, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.ask("destroy", d.cuGraphDestroy, graph)
