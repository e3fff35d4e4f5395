"""Executable graphs: launches, changes, destruction."""

from __future__ import annotations

import ctypes

from .graph_shape import nodes_of, run_graph
from .graphs import add_kernel, adding, kernel_parameters, new_graph
from .probe import run_chapter


def probe_graph_launches(driver, image, **how):
    """What may be done with an executable graph, and in which order it runs."""
    return run_chapter(
        (
            launch,
            launch_elsewhere,
            launch_twice_in_a_row,
            arguments_are_copied,
            upload,
            update,
            update_of_another_shape,
            set_kernel_parameters,
            disable_a_node,
            destroy_while_running,
        ),
        driver,
        image,
        **how,
    )


def launch(p):
    """On each kind of stream; the null stream's order with blocking streams holds."""
    d = p.d
    memory = p.device()
    p.write(memory, 0)
    executable = p.need(d.cuGraphInstantiate, adding(p, memory), 0)
    streams = {"null": 0, "legacy": 1, "per_thread": 2, "blocking": p.stream(0), "non_blocking": p.stream(1)}
    for count, (name, stream) in enumerate(streams.items(), 1):
        p.ask(name, d.cuGraphLaunch, executable, stream)
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, stream)
        p.note(f"{name}.ran", p.read(memory)[0] == count)
    latch = p.latch(streams["blocking"])
    p.need(d.cuGraphLaunch, executable, 0)
    p.ask("null.query_behind_a_blocking_stream", d.cuStreamQuery, 0)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.need(d.cuCtxSynchronize)


def launch_elsewhere(p):
    """In another context of the device, on another device, with no context."""
    d = p.d
    memory, stream = p.device(), p.stream()
    p.write(memory, 0)
    executable = p.need(d.cuGraphInstantiate, adding(p, memory), 0)
    other = p.new_context()
    theirs = p.stream()
    p.ask("other_context.its_stream", d.cuGraphLaunch, executable, theirs)
    p.ask("other_context.synchronize", d.cuStreamSynchronize, theirs)
    p.ask("other_context.our_stream", d.cuGraphLaunch, executable, stream)
    p.ask("other_context.our_stream.synchronize", d.cuStreamSynchronize, stream)
    p.note("other_context.value", p.read(memory)[0])
    p.need(d.cuCtxDestroy, other)
    if p.device_count > 1:
        other = p.new_context(1)
        theirs = p.stream()
        p.ask("other_device.its_stream", d.cuGraphLaunch, executable, theirs)
        p.ask("other_device.synchronize", d.cuStreamSynchronize, theirs)
        p.need(d.cuCtxDestroy, other)
        p.note("other_device.value", p.read(memory)[0])
    p.need(d.cuCtxPopCurrent)
    p.ask("no_context", d.cuGraphLaunch, executable, stream)
    p.ask("no_context.synchronize", d.cuStreamSynchronize, stream)
    p.ask("no_context.null_stream", d.cuGraphLaunch, executable, 0)
    p.ask("no_context.create", d.cuGraphCreate, 0)


def launch_twice_in_a_row(p):
    """Launches of one executable do not overlap, whatever streams they are on."""
    d = p.d
    memory, first, second = p.device(), p.stream(), p.stream()
    p.write(memory, 0)
    executable = p.need(d.cuGraphInstantiate, adding(p, memory), 0)
    for _ in range(20):
        p.need(d.cuGraphLaunch, executable, first)
    p.ask("synchronize", d.cuStreamSynchronize, first)
    p.note("value", p.read(memory)[0])
    latch = p.latch(first)
    p.need(d.cuGraphLaunch, executable, first)
    p.ask("on_another_stream", d.cuGraphLaunch, executable, second)
    p.ask("on_another_stream.query", d.cuStreamQuery, second)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize_both", d.cuCtxSynchronize)
    p.note("value_then", p.read(memory)[0])


def arguments_are_copied(p):
    """A node keeps the arguments' values as they were when it was added."""
    d = p.d
    memory, stream = p.device(), p.stream()
    address, value = ctypes.c_void_p(memory), ctypes.c_int(5)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(value))
    node = d.CUDA_KERNEL_NODE_PARAMS()
    node.func = p.kernel("fill")
    node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1
    node.kernelParams = ctypes.addressof(pointers)
    graph = new_graph(p)
    p.ask("add", d.cuGraphAddKernelNode, graph, [], 0, node)
    value.value = 6
    run_graph(p, graph, stream)
    p.note("value", p.read(memory)[0])


def upload(p):
    d = p.d
    memory, stream = p.device(), p.stream()
    p.write(memory, 0)
    executable = p.need(d.cuGraphInstantiate, adding(p, memory), 0)
    p.ask("upload", d.cuGraphUpload, executable, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("value", p.read(memory)[0])
    p.ask("launch", d.cuGraphLaunch, executable, stream)
    p.need(d.cuStreamSynchronize, stream)
    p.note("value_then", p.read(memory)[0])


def update(p):
    """cuGraphExecUpdate takes a graph of the same shape."""
    d = p.d
    memory, stream = p.device(), p.stream()
    p.write(memory, 0)
    executable = p.need(d.cuGraphInstantiate, adding(p, memory, 1), 0)
    other = adding(p, memory, 10)
    found = p.ask("update", d.cuGraphExecUpdate, executable, other)
    p.note("update.result", None if found is None else found.result)
    p.need(d.cuGraphDestroy, other)
    p.ask("launch", d.cuGraphLaunch, executable, stream)
    p.need(d.cuStreamSynchronize, stream)
    p.note("value", p.read(memory)[0])
    latch = p.latch(stream)
    p.need(d.cuGraphLaunch, executable, stream)
    p.ask("while_a_launch_waits", d.cuGraphExecUpdate, executable, adding(p, memory, 100))
    p.note("waited", latch.has_timed_out)
    p.need(d.cuGraphLaunch, executable, stream)
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("value_then", p.read(memory)[0])


def update_of_another_shape(p):
    """The bindings give no reason where the driver refuses."""
    d = p.d
    memory, stream = p.device(), p.stream()
    p.write(memory, 0)
    executable = p.need(d.cuGraphInstantiate, adding(p, memory), 0)
    two = adding(p, memory)
    add_kernel(p, two, "add", memory, 1)
    p.ask("more_nodes", d.cuGraphExecUpdate, executable, two)
    nothing = new_graph(p)
    p.ask("no_nodes", d.cuGraphExecUpdate, executable, nothing)
    empty = new_graph(p)
    p.need(d.cuGraphAddEmptyNode, empty, [], 0)
    p.ask("other_type", d.cuGraphExecUpdate, executable, empty)
    filling = new_graph(p)
    add_kernel(p, filling, "fill", memory, 50)
    p.ask("other_kernel", d.cuGraphExecUpdate, executable, filling)
    wide = new_graph(p)
    add_kernel(p, wide, "add", memory, 1, block=64)
    p.ask("other_block", d.cuGraphExecUpdate, executable, wide)
    p.ask("launch", d.cuGraphLaunch, executable, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("value", p.read(memory)[0])


def set_kernel_parameters(p):
    d = p.d
    memory, stream = p.device(), p.stream()
    p.write(memory, 0)
    graph = adding(p, memory, 1)
    node = nodes_of(p, graph)[0]
    executable = p.need(d.cuGraphInstantiate, graph, 0)
    changed = kernel_parameters(p, "add", (memory, 10))
    p.ask("of_the_executable", d.cuGraphExecKernelNodeSetParams, executable, node, changed)
    p.ask("launch", d.cuGraphLaunch, executable, stream)
    p.need(d.cuStreamSynchronize, stream)
    p.note("value", p.read(memory)[0])
    p.ask("of_the_graph", d.cuGraphKernelNodeSetParams, node, kernel_parameters(p, "add", (memory, 100)))
    p.ask("launch_again", d.cuGraphLaunch, executable, stream)
    p.need(d.cuStreamSynchronize, stream)
    p.note("value_again", p.read(memory)[0])
    p.ask("get", d.cuGraphKernelNodeGetParams, node)
    foreign = nodes_of(p, adding(p, memory))[0]
    p.ask("node_of_another_graph", d.cuGraphExecKernelNodeSetParams, executable, foreign, changed)


def disable_a_node(p):
    d = p.d
    memory, stream = p.device(), p.stream()
    p.write(memory, 0)
    graph = adding(p, memory, 1)
    first = nodes_of(p, graph)[0]
    add_kernel(p, graph, "add", memory, 10, after=(first,))
    executable = p.need(d.cuGraphInstantiate, graph, 0)
    p.note("enabled", p.need(d.cuGraphNodeGetEnabled, executable, first))
    p.ask("disable", d.cuGraphNodeSetEnabled, executable, first, 0)
    p.note("enabled_then", p.need(d.cuGraphNodeGetEnabled, executable, first))
    p.ask("launch", d.cuGraphLaunch, executable, stream)
    p.need(d.cuStreamSynchronize, stream)
    p.note("value", p.read(memory)[0])


def destroy_while_running(p):
    d = p.d
    memory, stream = p.device(), p.stream()
    p.write(memory, 0)
    graph = adding(p, memory)
    executable = p.need(d.cuGraphInstantiate, graph, 0)
    latch = p.latch(stream)
    p.need(d.cuGraphLaunch, executable, stream)
    p.ask("executable", d.cuGraphExecDestroy, executable)
    p.ask("graph", d.cuGraphDestroy, graph)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("value", p.read(memory)[0])
