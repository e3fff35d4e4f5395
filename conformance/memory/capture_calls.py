"""What every other call answers while a stream is being captured, and what it does to the capture."""

from __future__ import annotations

import ctypes

from .capture import MODES
from .graph_shape import status
from .places import location
from .probe import run_chapter

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@HostFunction
def _do_nothing(data):
    pass


def probe_capture_calls(driver, image, **how):
    """{call: [its code, the capture's status afterwards, the code of ending it]} for each mode."""
    return run_chapter(
        (on_the_captured_stream, on_other_streams, on_default_streams, memory_calls, other_calls),
        driver,
        image,
        **how,
    )


class Things:
    """What the calls are about, made before any capture begins."""

    def __init__(self, p):
        d = p.d
        self.device, self.pinned, self.pageable = p.device(1 << 20), p.pinned(1 << 20), p.pageable(1 << 20)
        self.area = p.pages()
        self.other = p.stream()
        self.event, self.done = p.event(2), p.event(2)
        p.need(d.cuEventRecord, self.done, self.other)
        p.need(d.cuCtxSynchronize)
        self.module = p.need(d.cuModuleLoadData, p.image)
        self.queued = p.need(d.cuMemAllocAsync, 4096, self.other)
        p.need(d.cuStreamSynchronize, self.other)
        self.graph = p.need(d.cuGraphCreate, 0)
        p.need(d.cuGraphAddEmptyNode, self.graph, [], 0)
        self.executable = p.need(d.cuGraphInstantiate, self.graph, 0)
        self.rows = d.CUDA_MEMCPY2D()
        self.rows.srcMemoryType = self.rows.dstMemoryType = d.CUmemorytype.CU_MEMORYTYPE_DEVICE
        self.rows.srcDevice, self.rows.dstDevice = (
            d.CUdeviceptr(self.device),
            d.CUdeviceptr(self.device + 4096),
        )
        self.rows.srcPitch = self.rows.dstPitch = 64
        self.rows.WidthInBytes, self.rows.Height = 32, 2
        self.managed = int(p.need(d.cuMemAllocManaged, 1 << 20, 1))


def _each(p, calls):
    """`calls` maps a name to a function of (things, captured stream) that gives a call's arguments."""
    things = Things(p)
    for name, mode in MODES.items():
        answers = {}
        for call, make in calls.items():
            stream = p.stream()
            arguments = make(things, stream)
            p.begin_capture(stream, mode)
            p.journal(f"{name}.{call}")
            answer = p.code(*arguments)
            p.need(p.d.cuCtxSetCurrent, p.context)  # one of the calls pops it
            answers[call] = [answer, status(p, stream), p.code(p.d.cuStreamEndCapture, stream)]
            for left in (things.other, 0):
                if status(p, left) not in ("NONE", "ERROR_STREAM_CAPTURE_IMPLICIT"):
                    p.code(p.d.cuStreamEndCapture, left)
            p.need(p.d.cuStreamDestroy, stream)
            p.need(p.d.cuCtxSynchronize)
        p.keep(name, answers)
    p.need(p.d.cuMemFree, things.managed)


def _fill(p, things, stream):
    return (lambda: p.launch("fill", things.device, 1, stream=stream),)


def on_the_captured_stream(p):
    d = p.d
    function = d.CUhostFn(ctypes.cast(_do_nothing, ctypes.c_void_p).value)
    modes = d.CUstreamCaptureMode
    priority = d.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    value = d.CUstreamAttrValue()
    value.priority = 0
    _each(
        p,
        {
            "nothing": lambda t, s: (d.cuDriverGetVersion,),
            "cuStreamQuery": lambda t, s: (d.cuStreamQuery, s),
            "cuStreamSynchronize": lambda t, s: (d.cuStreamSynchronize, s),
            "cuStreamWaitEvent.recorded_before": lambda t, s: (d.cuStreamWaitEvent, s, t.done, 0),
            "cuEventRecord": lambda t, s: (d.cuEventRecord, t.event, s),
            "launch": lambda t, s: _fill(p, t, s),
            "cuMemsetD8Async": lambda t, s: (d.cuMemsetD8Async, t.device, 0, 64, s),
            "cuMemcpyDtoDAsync": lambda t, s: (d.cuMemcpyDtoDAsync, t.device, t.device + 4096, 64, s),
            "cuMemcpyHtoDAsync.pinned": lambda t, s: (d.cuMemcpyHtoDAsync, t.device, t.pinned, 64, s),
            "cuMemcpyHtoDAsync.pageable": lambda t, s: (d.cuMemcpyHtoDAsync, t.device, t.pageable, 64, s),
            "cuMemcpyHtoDAsync.pageable_1_mib": lambda t, s: (
                d.cuMemcpyHtoDAsync,
                t.device,
                t.pageable,
                1 << 20,
                s,
            ),
            "cuMemcpyDtoHAsync.pinned": lambda t, s: (d.cuMemcpyDtoHAsync, t.pinned, t.device, 64, s),
            "cuMemcpyDtoHAsync.pageable": lambda t, s: (d.cuMemcpyDtoHAsync, t.pageable, t.device, 64, s),
            "cuMemcpyAsync.host_to_host": lambda t, s: (d.cuMemcpyAsync, t.pinned, t.pageable, 64, s),
            "cuMemcpyAsync.zero_bytes": lambda t, s: (d.cuMemcpyAsync, t.device, t.device, 0, s),
            "cuMemcpyAsync.wild": lambda t, s: (d.cuMemcpyAsync, 0x1234, t.device, 64, s),
            "cuMemcpy2DAsync": lambda t, s: (d.cuMemcpy2DAsync, t.rows, s),
            "cuMemcpyPeerAsync.same_context": lambda t, s: (
                d.cuMemcpyPeerAsync,
                t.device,
                p.context,
                t.device + 4096,
                p.context,
                64,
                s,
            ),
            "cuLaunchHostFunc": lambda t, s: (d.cuLaunchHostFunc, s, function, 0),
            "cuStreamAddCallback": lambda t, s: (
                d.cuStreamAddCallback,
                s,
                d.CUstreamCallback(int(function)),
                0,
                0,
            ),
            "cuMemAllocAsync": lambda t, s: (d.cuMemAllocAsync, 4096, s),
            "cuMemFreeAsync.allocated_before": lambda t, s: (d.cuMemFreeAsync, t.queued, s),
            "cuMemPrefetchAsync": lambda t, s: (
                d.cuMemPrefetchAsync,
                t.managed,
                4096,
                location(p, "DEVICE", 0),
                0,
                s,
            ),
            "cuStreamAttachMemAsync": lambda t, s: (d.cuStreamAttachMemAsync, s, t.managed, 0, 1),
            "cuStreamWriteValue32": lambda t, s: (d.cuStreamWriteValue32, s, t.device, 1, 0),
            "cuStreamBeginCapture": lambda t, s: (d.cuStreamBeginCapture, s, modes(0)),
            "cuStreamGetFlags": lambda t, s: (d.cuStreamGetFlags, s),
            "cuStreamGetPriority": lambda t, s: (d.cuStreamGetPriority, s),
            "cuStreamGetId": lambda t, s: (d.cuStreamGetId, s),
            "cuStreamGetCtx": lambda t, s: (d.cuStreamGetCtx, s),
            "cuStreamSetAttribute": lambda t, s: (d.cuStreamSetAttribute, s, priority, value),
            "cuStreamCopyAttributes": lambda t, s: (d.cuStreamCopyAttributes, s, t.other),
            "cuGraphLaunch": lambda t, s: (d.cuGraphLaunch, t.executable, s),
            "cuGraphUpload": lambda t, s: (d.cuGraphUpload, t.executable, s),
        },
    )


def on_other_streams(p):
    d = p.d
    modes = d.CUstreamCaptureMode
    _each(
        p,
        {
            "cuStreamQuery": lambda t, s: (d.cuStreamQuery, t.other),
            "cuStreamSynchronize": lambda t, s: (d.cuStreamSynchronize, t.other),
            "launch": lambda t, s: _fill(p, t, t.other),
            "cuMemcpyHtoDAsync.pinned": lambda t, s: (d.cuMemcpyHtoDAsync, t.device, t.pinned, 64, t.other),
            "cuMemcpyHtoDAsync.pageable": lambda t, s: (
                d.cuMemcpyHtoDAsync,
                t.device,
                t.pageable,
                64,
                t.other,
            ),
            "cuMemcpyDtoHAsync.pageable_1_mib": lambda t, s: (
                d.cuMemcpyDtoHAsync,
                t.pageable,
                t.device,
                1 << 20,
                t.other,
            ),
            "cuMemAllocAsync": lambda t, s: (d.cuMemAllocAsync, 4096, t.other),
            "cuEventRecord": lambda t, s: (d.cuEventRecord, t.event, t.other),
            "cuEventQuery": lambda t, s: (d.cuEventQuery, t.done),
            "cuEventSynchronize": lambda t, s: (d.cuEventSynchronize, t.done),
            "cuStreamWaitEvent": lambda t, s: (d.cuStreamWaitEvent, t.other, t.done, 0),
            "cuStreamBeginCapture": lambda t, s: (d.cuStreamBeginCapture, t.other, modes(0)),
            "cuStreamIsCapturing": lambda t, s: (d.cuStreamIsCapturing, t.other),
            "cuGraphLaunch": lambda t, s: (d.cuGraphLaunch, t.executable, t.other),
            "cuStreamDestroy": lambda t, s: (d.cuStreamDestroy, p.stream()),
            "cuStreamCreate": lambda t, s: (d.cuStreamCreate, 1),
            "cuEventCreate": lambda t, s: (d.cuEventCreate, 0),
            "cuEventDestroy": lambda t, s: (d.cuEventDestroy, p.event()),
        },
    )


def on_default_streams(p):
    """The captured stream is non-blocking, so the null stream does not depend on it."""
    d = p.d
    _each(
        p,
        {
            "null.cuStreamQuery": lambda t, s: (d.cuStreamQuery, 0),
            "null.cuStreamSynchronize": lambda t, s: (d.cuStreamSynchronize, 0),
            "null.launch": lambda t, s: _fill(p, t, 0),
            "null.cuMemAllocAsync": lambda t, s: (d.cuMemAllocAsync, 4096, 0),
            "per_thread.launch": lambda t, s: _fill(p, t, 2),
            "per_thread.cuStreamSynchronize": lambda t, s: (d.cuStreamSynchronize, 2),
            "cuMemcpyHtoD": lambda t, s: (d.cuMemcpyHtoD, t.device, t.pinned, 64),
            "cuMemcpyDtoH": lambda t, s: (d.cuMemcpyDtoH, t.pinned, t.device, 64),
            "cuMemcpyDtoD": lambda t, s: (d.cuMemcpyDtoD, t.device, t.device + 4096, 64),
            "cuMemcpy2D": lambda t, s: (d.cuMemcpy2D, t.rows),
            "cuMemsetD8": lambda t, s: (d.cuMemsetD8, t.device, 0, 64),
            "cuCtxSynchronize": lambda t, s: (d.cuCtxSynchronize,),
        },
    )


def memory_calls(p):
    d = p.d
    pool = p.need(d.cuDeviceGetDefaultMemPool, 0)
    memory_type = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    _each(
        p,
        {
            "cuMemAlloc": lambda t, s: (d.cuMemAlloc, 4096),
            "cuMemFree": lambda t, s: (d.cuMemFree, p.device()),
            "cuMemFree.null": lambda t, s: (d.cuMemFree, 0),
            "cuMemHostAlloc": lambda t, s: (d.cuMemHostAlloc, 4096, 0),
            "cuMemFreeHost": lambda t, s: (d.cuMemFreeHost, p.pinned()),
            "cuMemHostRegister": lambda t, s: (d.cuMemHostRegister, p.pages(), 4096, 0),
            "cuMemHostUnregister": lambda t, s: (d.cuMemHostUnregister, _registered(p)),
            "cuMemHostGetFlags": lambda t, s: (d.cuMemHostGetFlags, t.pinned),
            "cuMemAllocManaged": lambda t, s: (d.cuMemAllocManaged, 4096, 1),
            "cuMemAdvise": lambda t, s: (
                d.cuMemAdvise,
                t.managed,
                4096,
                d.CUmem_advise.CU_MEM_ADVISE_SET_READ_MOSTLY,
                location(p, "DEVICE", 0),
            ),
            "cuMemGetInfo": lambda t, s: (d.cuMemGetInfo,),
            "cuMemGetAddressRange": lambda t, s: (d.cuMemGetAddressRange, t.device),
            "cuPointerGetAttribute": lambda t, s: (d.cuPointerGetAttribute, memory_type, t.device),
            "cuMemPoolTrimTo": lambda t, s: (d.cuMemPoolTrimTo, pool, 0),
            "cuDeviceGetMemPool": lambda t, s: (d.cuDeviceGetMemPool, 0),
        },
    )


def _registered(p):
    area = p.pages()
    p.need(p.d.cuMemHostRegister, area, 4096, 0)
    return area


def other_calls(p):
    d = p.d
    registers = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    dynamic = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    stack = d.CUlimit.CU_LIMIT_STACK_SIZE
    occupancy = d.cuOccupancyMaxActiveBlocksPerMultiprocessor
    reverse = p.kernel("reverse")
    _each(
        p,
        {
            "cuModuleLoadData": lambda t, s: (d.cuModuleLoadData, p.image),
            "cuModuleGetFunction": lambda t, s: (d.cuModuleGetFunction, t.module, b"fill"),
            "cuModuleGetGlobal": lambda t, s: (d.cuModuleGetGlobal, t.module, b"counter"),
            "cuModuleUnload": lambda t, s: (d.cuModuleUnload, p.need(d.cuModuleLoadData, p.image)),
            "cuLibraryLoadData": lambda t, s: (d.cuLibraryLoadData, p.image, [], [], 0, [], [], 0),
            "cuFuncGetAttribute": lambda t, s: (d.cuFuncGetAttribute, registers, reverse),
            "cuFuncSetAttribute": lambda t, s: (d.cuFuncSetAttribute, reverse, dynamic, 65536),
            "occupancy": lambda t, s: (occupancy, reverse, 32, 0),
            "cuCtxGetLimit": lambda t, s: (d.cuCtxGetLimit, stack),
            "cuCtxSetLimit": lambda t, s: (d.cuCtxSetLimit, stack, 2048),
            "cuCtxGetCurrent": lambda t, s: (d.cuCtxGetCurrent,),
            "cuCtxPushCurrent": lambda t, s: (d.cuCtxPushCurrent, p.context),
            "cuCtxPopCurrent": lambda t, s: (d.cuCtxPopCurrent,),
            "cuCtxGetStreamPriorityRange": lambda t, s: (d.cuCtxGetStreamPriorityRange,),
            "cuGraphCreate": lambda t, s: (d.cuGraphCreate, 0),
            "cuGraphInstantiate": lambda t, s: (d.cuGraphInstantiate, t.graph, 0),
            "cuGraphExecDestroy": lambda t, s: (
                d.cuGraphExecDestroy,
                p.need(d.cuGraphInstantiate, t.graph, 0),
            ),
            "cuDeviceGetAttribute": lambda t, s: (
                d.cuDeviceGetAttribute,
                d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE,
                0,
            ),
            "cuDevicePrimaryCtxGetState": lambda t, s: (d.cuDevicePrimaryCtxGetState, 0),
        },
    )
