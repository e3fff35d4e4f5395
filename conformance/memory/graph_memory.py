"""Memory that a graph allocates and frees when it is launched."""

from __future__ import annotations

from .graph_shape import nodes_of, run_graph, shape
from .places import get, new_pool
from .pointers import describe_pointer
from .probe import run_chapter

AUTO_FREE = 1
RELAXED = 2


def probe_graph_memory(driver, image, **how):
    """cuMemAllocAsync and cuMemFreeAsync in a capture."""
    return run_chapter(
        (
            allocate_and_free,
            without_a_free,
            freed_by_another_graph,
            freed_outside,
            auto_free,
            double_free,
            attributes,
            from_a_pool,
            several_executables,
            device_attributes,
        ),
        driver,
        image,
        **how,
    )


def _allocating(p, stream, result=None, free=True):
    """Capture allocate, fill, and perhaps a copy to `result` and the free; return (graph, address)."""
    d = p.d
    p.begin_capture(stream)
    memory = p.need(d.cuMemAllocAsync, 4096, stream)
    p.need(p.launch, "fill", int(memory), 7, stream=stream)
    if result is not None:
        p.need(d.cuMemcpyDtoDAsync, result, int(memory), 4, stream)
    if free:
        p.need(d.cuMemFreeAsync, memory, stream)
    return p.end_capture(stream), int(memory)


def allocate_and_free(p):
    d = p.d
    stream, result = p.stream(), p.device()
    p.write(result, 0)
    graph, _ = _allocating(p, stream, result)
    p.note("shape", shape(p, graph))
    executable = p.ask("instantiate", d.cuGraphInstantiate, graph, 0)
    for name in ("first", "second"):
        p.ask(f"{name}.launch", d.cuGraphLaunch, executable, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("value", p.read(result)[0])
    p.ask("second_executable", d.cuGraphInstantiate, graph, 0)
    p.ask("clone", d.cuGraphClone, graph)
    p.ask("destroy_executable", d.cuGraphExecDestroy, executable)
    p.ask("instantiate_after", d.cuGraphInstantiate, graph, 0)
    p.ask("destroy_graph", d.cuGraphDestroy, graph)


def without_a_free(p):
    """What the graph allocates stays; it must be freed before the next launch."""
    d = p.d
    stream = p.stream()
    graph, memory = _allocating(p, stream, free=False)
    executable = p.need(d.cuGraphInstantiate, graph, 0)
    p.need(d.cuGraphLaunch, executable, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("value", p.read(memory)[0])
    p.ask("launch_again", d.cuGraphLaunch, executable, stream)
    p.ask("free", d.cuMemFreeAsync, memory, stream)
    p.need(d.cuGraphLaunch, executable, stream)
    p.ask("synchronize_again", d.cuStreamSynchronize, stream)
    p.note("value_again", p.read(memory)[0])
    p.ask("free_by_cuMemFree", d.cuMemFree, memory)
    p.ask("free_twice", d.cuMemFree, memory)
    p.need(d.cuGraphLaunch, executable, stream)
    p.ask("destroy_executable_with_memory_in_use", d.cuGraphExecDestroy, executable)
    p.ask("synchronize_at_last", d.cuStreamSynchronize, stream)
    p.note("value_at_last", p.read(memory)[0])
    p.ask("free_at_last", d.cuMemFreeAsync, memory, stream)


def freed_by_another_graph(p):
    d = p.d
    stream = p.stream()
    graph, memory = _allocating(p, stream, free=False)
    p.begin_capture(stream)
    p.ask("capture_the_free", d.cuMemFreeAsync, memory, stream)
    freeing = p.end_capture(stream)
    p.note("shape", shape(p, freeing))
    one = p.need(d.cuGraphInstantiate, graph, 0)
    two = p.ask("instantiate", d.cuGraphInstantiate, freeing, 0)
    p.ask("free_before_the_allocation", d.cuGraphLaunch, two, stream)
    for name in ("first", "second"):
        p.ask(f"{name}.allocate", d.cuGraphLaunch, one, stream)
        p.ask(f"{name}.free", d.cuGraphLaunch, two, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)


def freed_outside(p):
    """Freeing a graph's memory that no launch has allocated yet."""
    d = p.d
    stream = p.stream()
    _, memory = _allocating(p, stream, free=False)
    p.ask("cuMemFreeAsync", d.cuMemFreeAsync, memory, stream)
    p.ask("cuMemFree", d.cuMemFree, memory)
    p.ask("synchronize", d.cuStreamSynchronize, stream)


def auto_free(p):
    """CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH frees what the last launch left."""
    d = p.d
    stream = p.stream()
    graph, memory = _allocating(p, stream, free=False)
    executable = p.ask("instantiate", d.cuGraphInstantiate, graph, AUTO_FREE)
    for name in ("first", "second", "third"):
        p.ask(name, d.cuGraphLaunch, executable, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("value", p.read(memory)[0])
    p.ask("destroy", d.cuGraphExecDestroy, executable)
    p.ask("free", d.cuMemFreeAsync, memory, stream)
    graph, _ = _allocating(p, stream)
    p.ask("with_a_free_of_its_own", d.cuGraphInstantiate, graph, AUTO_FREE)


def double_free(p):
    d = p.d
    stream = p.stream()
    p.begin_capture(stream)
    memory = p.need(d.cuMemAllocAsync, 4096, stream)
    p.ask("interior", d.cuMemFreeAsync, int(memory) + 256, stream)
    graph = p.end_capture(stream)
    p.note("interior.gives_a_graph", graph is not None)
    p.begin_capture(stream)
    memory = p.need(d.cuMemAllocAsync, 4096, stream)
    p.ask("first", d.cuMemFreeAsync, memory, stream)
    p.ask("second", d.cuMemFreeAsync, memory, stream)
    graph = p.end_capture(stream)
    p.note("gives_a_graph", graph is not None)
    p.begin_capture(stream)
    p.ask("zero_bytes", d.cuMemAllocAsync, 0, stream)
    p.note("zero_bytes.gives_a_graph", p.end_capture(stream) is not None)


def attributes(p):
    d = p.d
    stream = p.stream()
    graph, memory = _allocating(p, stream, free=False)
    describe_pointer(p, "captured", memory)
    p.ask("captured.range", d.cuMemGetAddressRange, memory)
    run_graph(p, graph, stream)
    describe_pointer(p, "launched", memory)
    found = p.ask("launched.range", d.cuMemGetAddressRange, memory)
    p.note("launched.range.value", None if found is None else [int(found[0]) - memory, int(found[1])])
    p.need(d.cuMemFreeAsync, memory, stream)
    p.need(d.cuStreamSynchronize, stream)
    describe_pointer(p, "freed", memory)
    kinds = {d.cuGraphNodeGetType(node)[1].name: node for node in nodes_of(p, graph)}
    node = kinds.get("CU_GRAPH_NODE_TYPE_MEM_ALLOC")
    if node is not None:
        found = p.ask("node", d.cuGraphMemAllocNodeGetParams, node)
        p.note("node.value", None if found is None else [int(found.bytesize), int(found.dptr) == memory])


def from_a_pool(p):
    """A captured allocation takes the pool's properties but none of its memory."""
    d = p.d
    stream, pool = p.stream(), new_pool(p)
    p.begin_capture(stream)
    memory = p.ask("allocate", d.cuMemAllocFromPoolAsync, 4096, pool, stream)
    p.ask("free", d.cuMemFreeAsync, memory, stream)
    graph = p.end_capture(stream)
    p.note("used", get(p, pool, "USED_MEM_CURRENT"))
    run_graph(p, graph, stream)
    p.note("used_after", get(p, pool, "USED_MEM_CURRENT"))
    p.note("reserved_after", get(p, pool, "RESERVED_MEM_CURRENT"))


def several_executables(p):
    """Two graphs with allocations run at once."""
    d = p.d
    first, second, one, two = p.stream(), p.stream(), p.device(), p.device()
    executables = [
        p.need(d.cuGraphInstantiate, _allocating(p, stream, result)[0], 0)
        for stream, result in ((first, one), (second, two))
    ]
    latch = p.latch(first)
    p.ask("first", d.cuGraphLaunch, executables[0], first)
    p.ask("second", d.cuGraphLaunch, executables[1], second)
    p.ask("second.synchronize", d.cuStreamSynchronize, second)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", [p.read(one)[0], p.read(two)[0]])


def device_attributes(p):
    """How much graphs hold on a device."""
    d = p.d
    kinds = d.CUgraphMem_attribute
    for each in ("USED_MEM_CURRENT", "USED_MEM_HIGH", "RESERVED_MEM_CURRENT", "RESERVED_MEM_HIGH"):
        found = p.ask(each, d.cuDeviceGetGraphMemAttribute, 0, getattr(kinds, f"CU_GRAPH_MEM_ATTR_{each}"))
        p.hardware(each, None if found is None else int(found))
    p.ask("trim", d.cuDeviceGraphMemTrim, 0)
    p.ask("trim.no_such_device", d.cuDeviceGraphMemTrim, 99)
    high = kinds.CU_GRAPH_MEM_ATTR_USED_MEM_HIGH
    p.ask("reset_high", d.cuDeviceSetGraphMemAttribute, 0, high, d.cuuint64_t(0))
    p.ask("set_high_to_1", d.cuDeviceSetGraphMemAttribute, 0, high, d.cuuint64_t(1))
    current = kinds.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT
    p.ask("set_current", d.cuDeviceSetGraphMemAttribute, 0, current, d.cuuint64_t(0))
