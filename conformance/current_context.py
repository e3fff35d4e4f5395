"""Which calls need a current context when their objects name one?

`probe(driver, image)` makes one object of each kind in one context, and then asks what the driver
answers while no context is current ("none") and while another context of the same device is ("other").
The answers in h200-driver-580-current-context.json were recorded on a machine with two NVIDIA H200s,
driver 580.159.04, cuda-bindings 13.3.1. To record on another machine:

    python conformance/current_context.py > answers.json
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path


def probe(d, image):
    """Return {call: {"none": answer, "other": answer}}; `image` is PTX text with a kernel `fill`."""
    d.cuInit(0)
    answers = {}
    for current in ("none", "other"):
        context = d.cuCtxCreate(None, 0, 0)[1]
        calls = _calls(d, image, context)
        d.cuCtxSynchronize()
        d.cuCtxPopCurrent()
        other = d.cuCtxCreate(None, 0, 0)[1] if current == "other" else None
        for name, call in calls.items():
            answers.setdefault(name, {})[current] = _name(call())
        if other is not None:
            d.cuCtxDestroy(other)
        d.cuCtxDestroy(context)
    return answers


def _calls(d, image, context):
    module, unloaded = (d.cuModuleLoadData(image)[1] for _ in range(2))
    fill = d.cuModuleGetFunction(module, b"fill")[1]
    memory = int(d.cuMemAlloc(1 << 20)[1])
    stream, destroyed = (d.cuStreamCreate(1)[1] for _ in range(2))
    event, end, gone = (d.cuEventCreate(0)[1] for _ in range(3))
    pooled, also_pooled = (d.cuMemAllocAsync(1 << 20, stream)[1] for _ in range(2))
    pinned, freed = (d.cuMemHostAlloc(4096, 0)[1] for _ in range(2))
    host = (ctypes.c_char * (1 << 20))()
    at = ctypes.addressof(host)
    parameters = ((memory, 7), (ctypes.c_void_p, ctypes.c_int))
    attribute, pointer = d.CUfunction_attribute, d.CUpointer_attribute
    shared = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    return {
        "launch": lambda: d.cuLaunchKernel(fill, 1, 1, 1, 32, 1, 1, 0, stream, parameters, 0),
        "launch_null_stream": lambda: d.cuLaunchKernel(fill, 1, 1, 1, 32, 1, 1, 0, 0, parameters, 0),
        "htod_async": lambda: d.cuMemcpyHtoDAsync(memory, at, 4096, stream),
        "dtoh_async": lambda: d.cuMemcpyDtoHAsync(at, memory, 4096, stream),
        "dtod_async": lambda: d.cuMemcpyDtoDAsync(memory, memory + 4096, 4096, stream),
        "copy_async": lambda: d.cuMemcpyAsync(memory, at, 4096, stream),
        "memset_async": lambda: d.cuMemsetD8Async(memory, 0, 4096, stream),
        "memset_null": lambda: d.cuMemsetD8(memory, 0, 4096),
        "htod": lambda: d.cuMemcpyHtoD(memory, at, 4096),
        "dtoh": lambda: d.cuMemcpyDtoH(at, memory, 4096),
        "event_record": lambda: d.cuEventRecord(event, stream),
        "event_record2": lambda: d.cuEventRecord(end, stream),
        "event_sync": lambda: d.cuEventSynchronize(end),
        "event_query": lambda: d.cuEventQuery(event),
        "event_elapsed": lambda: d.cuEventElapsedTime(event, end),
        "stream_wait": lambda: d.cuStreamWaitEvent(stream, event, 0),
        "stream_sync": lambda: d.cuStreamSynchronize(stream),
        "stream_query": lambda: d.cuStreamQuery(stream),
        "stream_getctx": lambda: d.cuStreamGetCtx(stream),
        "stream_getdevice": lambda: d.cuStreamGetDevice(stream),
        "stream_getid": lambda: d.cuStreamGetId(stream),
        "stream_getflags": lambda: d.cuStreamGetFlags(stream),
        "stream_priority": lambda: d.cuStreamGetPriority(stream),
        "ctx_getid": lambda: d.cuCtxGetId(context),
        "get_function": lambda: d.cuModuleGetFunction(module, b"spin"),
        "get_global": lambda: d.cuModuleGetGlobal(module, b"x"),
        "param_info": lambda: d.cuFuncGetParamInfo(fill, 0),
        "func_attr": lambda: d.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, fill),
        "func_set_attr": lambda: d.cuFuncSetAttribute(fill, shared, 65536),
        "func_name": lambda: d.cuFuncGetName(fill),
        "occupancy": lambda: d.cuOccupancyMaxActiveBlocksPerMultiprocessor(fill, 128, 0),
        "pointer_attr": lambda: d.cuPointerGetAttribute(pointer.CU_POINTER_ATTRIBUTE_CONTEXT, memory),
        "pointer_ordinal": lambda: d.cuPointerGetAttribute(
            pointer.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory
        ),
        "address_range": lambda: d.cuMemGetAddressRange(memory),
        "mem_getinfo": lambda: d.cuMemGetInfo(),
        "alloc_async": lambda: d.cuMemAllocAsync(4096, stream),
        "free_async": lambda: d.cuMemFreeAsync(pooled, stream),
        "free_of_async": lambda: d.cuMemFree(also_pooled),
        "host_free": lambda: d.cuMemFreeHost(freed),
        "host_register": lambda: d.cuMemHostRegister(at, 4096, 0),
        "host_unregister": lambda: d.cuMemHostUnregister(at),
        "host_devptr": lambda: d.cuMemHostGetDevicePointer(pinned, 0),
        "event_destroy": lambda: d.cuEventDestroy(gone),
        "stream_destroy": lambda: d.cuStreamDestroy(destroyed),
        "module_unload": lambda: d.cuModuleUnload(unloaded),
        "mem_free": lambda: d.cuMemFree(memory),
    }


def _name(result):
    first = result[0] if isinstance(result, tuple) else result
    return first.name.replace("CUDA_", "")


if __name__ == "__main__":
    from cuda.bindings import driver

    ptx = (Path(__file__).parent / "kernels.ptx").read_bytes() + b"\0"
    json.dump(probe(driver, ptx), sys.stdout, indent=1)
