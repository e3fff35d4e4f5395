"""Sequences that may end the process: handles after their object is gone, and memory misread as host memory.

Each runs in a process of its own, so that whatever happens there costs nothing else. A driver of ours
should answer with an error wherever the recording has a code or a signal.
"""

from __future__ import annotations

import ctypes
import mmap

from .green import green_context
from .places import new_pool
from .probe import ints, run_alone

PAGE = 4096
READ_ONLY = 8
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def destroyed_stream(p):
    d = p.d
    stream, memory = p.stream(), p.device()
    p.need(d.cuStreamDestroy, stream)
    p.ask("query", d.cuStreamQuery, stream)
    p.ask("launch", p.launch, "fill", memory, 1, stream=stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.ask("memset", d.cuMemsetD8Async, memory, 1, 16, stream)
    p.ask("allocate", d.cuMemAllocAsync, 4096, stream)
    p.ask("destroy", d.cuStreamDestroy, stream)


def free_on_destroyed_stream(p):
    d = p.d
    stream = p.stream()
    memory = p.need(d.cuMemAllocAsync, 4096, stream)
    p.need(d.cuStreamSynchronize, stream)
    p.need(d.cuStreamDestroy, stream)
    p.ask("free", d.cuMemFreeAsync, memory, stream)
    p.ask("free_properly", d.cuMemFree, memory)


def destroyed_event(p):
    d = p.d
    stream, event = p.stream(), p.event()
    p.need(d.cuEventDestroy, event)
    p.ask("query", d.cuEventQuery, event)
    p.ask("record", d.cuEventRecord, event, stream)
    p.ask("wait", d.cuStreamWaitEvent, stream, event, 0)
    p.ask("destroy", d.cuEventDestroy, event)


def stream_of_a_destroyed_context(p):
    d = p.d
    other = p.new_context()
    stream, event = p.stream(), p.event()
    p.need(d.cuCtxDestroy, other)
    p.ask("query", d.cuStreamQuery, stream)
    p.ask("destroy", d.cuStreamDestroy, stream)
    p.ask("event.query", d.cuEventQuery, event)
    p.ask("event.destroy", d.cuEventDestroy, event)


def destroyed_pool(p):
    d = p.d
    pool, stream = new_pool(p), p.stream()
    p.need(d.cuMemPoolDestroy, pool)
    p.ask("attribute", d.cuMemPoolGetAttribute, pool, d.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
    p.ask("allocate", d.cuMemAllocFromPoolAsync, 4096, pool, stream)
    p.ask("trim", d.cuMemPoolTrimTo, pool, 0)
    p.ask("destroy", d.cuMemPoolDestroy, pool)


def destroyed_graph(p):
    d = p.d
    graph, stream = p.need(d.cuGraphCreate, 0), p.stream()
    node = p.need(d.cuGraphAddEmptyNode, graph, [], 0)
    executable = p.need(d.cuGraphInstantiate, graph, 0)
    p.need(d.cuGraphDestroy, graph)
    p.ask("nodes", d.cuGraphGetNodes, graph)
    p.ask("instantiate", d.cuGraphInstantiate, graph, 0)
    p.ask("node_type", d.cuGraphNodeGetType, node)
    p.need(d.cuGraphExecDestroy, executable)
    p.ask("launch", d.cuGraphLaunch, executable, stream)
    p.ask("destroy_executable", d.cuGraphExecDestroy, executable)
    p.ask("destroy", d.cuGraphDestroy, graph)


def unloaded_module(p):
    d = p.d
    module = p.need(d.cuModuleLoadData, p.image)
    function = p.need(d.cuModuleGetFunction, module, b"fill")
    p.need(d.cuModuleUnload, module)
    p.ask("get", d.cuModuleGetFunction, module, b"fill")
    p.ask("launch", p.launch, "fill", p.device(), 1, handle=function)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.ask("unload", d.cuModuleUnload, module)


def _unloaded_library(p):
    d = p.d
    library = p.need(d.cuLibraryLoadData, p.image, [], [], 0, [], [], 0)
    kernel = p.need(d.cuLibraryGetKernel, library, b"fill")
    function = p.need(d.cuKernelGetFunction, kernel)
    p.need(d.cuLibraryUnload, library)
    return library, kernel, function


def unloaded_library(p):
    library, _, _ = _unloaded_library(p)
    p.ask("kernel", p.d.cuLibraryGetKernel, library, b"fill")


def unloaded_library_again(p):
    library, _, _ = _unloaded_library(p)
    p.ask("unload", p.d.cuLibraryUnload, library)


def kernel_of_an_unloaded_library(p):
    _, kernel, _ = _unloaded_library(p)
    p.ask("function", p.d.cuKernelGetFunction, kernel)


def function_of_an_unloaded_library(p):
    _, _, function = _unloaded_library(p)
    p.ask("launch", p.launch, "fill", p.device(), 1, handle=function)
    p.ask("synchronize", p.d.cuCtxSynchronize)


def graph_in_itself(p):
    d = p.d
    graph = p.need(d.cuGraphCreate, 0)
    p.need(d.cuGraphAddEmptyNode, graph, [], 0)
    p.ask("add", d.cuGraphAddChildGraphNode, graph, [], 0, graph)


def attached_without_a_flag(p):
    memory = p.need(p.d.cuMemAllocManaged, PAGE, 1)
    p.ask("attach", p.d.cuStreamAttachMemAsync, p.stream(), memory, 0, 0)


def attached_with_two_flags(p):
    memory = p.need(p.d.cuMemAllocManaged, PAGE, 1)
    p.ask("attach", p.d.cuStreamAttachMemAsync, p.stream(), memory, 0, 3)


def green_destroyed_while_current(p):
    d = p.d
    p.need(d.cuDevicePrimaryCtxRetain, 0)
    green = green_context(p)
    context = p.need(d.cuCtxFromGreenCtx, green)
    p.need(d.cuCtxPushCurrent, context)
    p.ask("destroy", d.cuGreenCtxDestroy, green)
    p.note("still_current", p.is_current(context))
    p.ask("synchronize", d.cuCtxSynchronize)
    p.ask("allocate", d.cuMemAlloc, 4096)
    p.ask("stream", d.cuStreamCreate, 1)
    p.ask("pop", d.cuCtxPopCurrent)
    p.ask("push", d.cuCtxPushCurrent, context)
    p.ask("destroy_again", d.cuGreenCtxDestroy, green)


def green_destroyed_before_its_stream(p):
    d = p.d
    p.need(d.cuDevicePrimaryCtxRetain, 0)
    green = green_context(p)
    stream = p.need(d.cuGreenCtxStreamCreate, green, 1, 0)
    p.need(d.cuGreenCtxDestroy, green)
    p.ask("query", d.cuStreamQuery, stream)
    p.ask("memset", d.cuMemsetD8Async, p.device(), 1, 16, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.ask("destroy", d.cuStreamDestroy, stream)


def green_destroyed_as_a_context(p):
    d = p.d
    green = green_context(p)
    context = p.need(d.cuCtxFromGreenCtx, green)
    p.ask("destroy_as_a_context", d.cuCtxDestroy, context)
    p.ask("destroy", d.cuGreenCtxDestroy, green)


def unmapped_while_registered(p):
    """A registered array dies: its pages are unmapped before they are unregistered."""
    d = p.d
    area = mmap.mmap(-1, 4 * PAGE)
    view = (ctypes.c_char * (4 * PAGE)).from_buffer(area)
    address = ctypes.addressof(view)
    p.need(d.cuMemHostRegister, address, 4 * PAGE, 0)
    p.need(d.cuMemcpyHtoD, p.device(4 * PAGE), address, 4 * PAGE)
    del view
    area.close()
    p.ask("flags", d.cuMemHostGetFlags, address)
    p.ask("unregister", d.cuMemHostUnregister, address)
    p.ask("unregister_again", d.cuMemHostUnregister, address)
    p.ask("register_what_is_not_there", d.cuMemHostRegister, address, 4 * PAGE, 0)


def mapped_anew_while_registered(p):
    """The same addresses hold another array, while the driver still knows the old pages."""
    d = p.d
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    anywhere, fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x10
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, PAGE, access, anywhere, -1, 0)
    ints(address)[0] = 1
    p.need(d.cuMemHostRegister, address, PAGE, 0)
    again = libc.mmap(address, PAGE, access, anywhere | fixed, -1, 0)
    p.note("same_address", again == address)
    ints(address)[0] = 2
    target = p.device()
    p.ask("copy", d.cuMemcpyHtoD, target, address, 4)
    p.note("copy.value", p.read(target)[0])
    p.ask("register", d.cuMemHostRegister, address, PAGE, 0)
    p.ask("unregister", d.cuMemHostUnregister, address)
    p.ask("register_then", d.cuMemHostRegister, address, PAGE, 0)
    p.ask("copy_then", d.cuMemcpyHtoD, target, address, 4)
    p.note("copy_then.value", p.read(target)[0])
    p.ask("unregister_then", d.cuMemHostUnregister, address)


def write_to_read_only_registration(p):
    """The pages are writeable; only the registration says read-only."""
    d = p.d
    area, source = p.pages(), p.device()
    p.write(source, 7)
    p.need(d.cuMemHostRegister, area, PAGE, READ_ONLY)
    p.ask("copy_in", d.cuMemcpyHtoD, p.device(), area, 4)
    p.ask("copy_out", d.cuMemcpyDtoH, area, source, 4)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", ints(area)[0])
    p.ask("kernel", p.launch, "fill", area, 8)
    p.ask("kernel.synchronize", d.cuCtxSynchronize)
    p.note("kernel.value", ints(area)[0])
    p.ask("unregister", d.cuMemHostUnregister, area)


def device_as_host_source(p):
    d = p.d
    source, target = p.device(), p.device()
    p.write(source, 7)
    p.ask("cuMemcpyHtoD", d.cuMemcpyHtoD, target, source, 4)
    p.note("value", p.read(target)[0])
    p.ask("cuMemcpyHtoDAsync", d.cuMemcpyHtoDAsync, target, source, 4, p.stream())
    p.ask("synchronize", d.cuCtxSynchronize)


def device_as_host_target(p):
    d = p.d
    source, target = p.device(), p.device()
    p.write(source, 7)
    p.ask("cuMemcpyDtoH", d.cuMemcpyDtoH, target, source, 4)
    p.note("value", p.read(target)[0])
    p.ask("cuMemcpyDtoHAsync", d.cuMemcpyDtoHAsync, target, source, 4, p.stream())
    p.ask("synchronize", d.cuCtxSynchronize)


def _in_a_host_function(p, calls):
    """Make calls in a function that a stream calls; {name: (function, arguments)}."""
    d = p.d
    stream = p.stream()

    @p.alive
    @HostFunction
    def run(data):
        for name, (call, *arguments) in calls.items():
            p.ask(name, call, *arguments)

    p.ask("launch", d.cuLaunchHostFunc, stream, d.CUhostFn(ctypes.cast(run, ctypes.c_void_p).value), 0)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.ask("synchronize_all", d.cuCtxSynchronize)


def questions_in_a_host_function(p):
    """NVIDIA forbids calls there; these wait for nothing."""
    d = p.d
    other, event = p.stream(), p.event()
    _in_a_host_function(
        p,
        {
            "cuCtxGetCurrent": (d.cuCtxGetCurrent,),
            "cuDeviceGetCount": (d.cuDeviceGetCount,),
            "cuCtxGetDevice": (d.cuCtxGetDevice,),
            "cuStreamQuery": (d.cuStreamQuery, other),
            "cuEventQuery": (d.cuEventQuery, event),
        },
    )


def work_in_a_host_function(p):
    d = p.d
    other, event, memory, function = p.stream(), p.event(), p.device(), p.kernel("fill")
    _in_a_host_function(
        p,
        {
            "cuEventRecord": (d.cuEventRecord, event, other),
            "launch": (lambda: p.launch("fill", memory, 1, stream=other, handle=function),),
            "cuMemAlloc": (d.cuMemAlloc, 4096),
        },
    )


HAZARDS = (
    destroyed_stream,
    free_on_destroyed_stream,
    destroyed_event,
    stream_of_a_destroyed_context,
    destroyed_pool,
    destroyed_graph,
    graph_in_itself,
    unloaded_module,
    unloaded_library,
    unloaded_library_again,
    kernel_of_an_unloaded_library,
    function_of_an_unloaded_library,
    green_destroyed_while_current,
    green_destroyed_before_its_stream,
    green_destroyed_as_a_context,
    unmapped_while_registered,
    mapped_anew_while_registered,
    attached_without_a_flag,
    attached_with_two_flags,
    device_as_host_source,
)

GRAVE = (
    write_to_read_only_registration,
    questions_in_a_host_function,
    device_as_host_target,
    work_in_a_host_function,
)
"""What may fault or hang, least first."""


def probe_hazard(driver, image, name, **how):
    """One of HAZARDS or GRAVE, by its name."""
    hazards = {each.__name__: each for each in (*HAZARDS, *GRAVE)}
    return run_alone(hazards[name], driver, image, **how)
