"""Modules with options and logs, their globals; libraries, which belong to no context."""

from __future__ import annotations

import os
import tempfile
import time

from .probe import ints, run_chapter

HEADER = b".version 7.0\n.target sm_75\n.address_size 64\n"
GOOD = HEADER + b".visible .entry k(){ ret; }\n\0"
BAD = HEADER + b".visible .entry k(){ bogus.u32 %r1; ret; }\n\0"
MANAGED = HEADER + b".visible .global .attribute(.managed) .align 4 .u32 shared = 5;\n" + GOOD[len(HEADER) :]


def probe_modules(driver, image, **how):
    """cuModuleLoadDataEx, globals, and cuLibrary*."""
    return run_chapter(
        (
            logs,
            options,
            count_and_names,
            global_variables,
            managed_variables,
            unload,
            load_library,
            library_kernels,
            library_in_two_contexts,
            launch_a_kernel_handle,
            library_globals,
            kernel_attributes,
            library_from_a_file,
            unload_library,
        ),
        driver,
        image,
        **how,
    )


def option(p, name):
    return getattr(p.d.CUjit_option, f"CU_JIT_{name}")


def _log(p, name, text, size=4096):
    """Load a text with both logs; the logs' words are not kept."""
    error, info = p.alive(bytes(size)), p.alive(bytes(size))  # the bindings let the driver write into them
    options = {
        "ERROR_LOG_BUFFER": error,
        "ERROR_LOG_BUFFER_SIZE_BYTES": size,
        "INFO_LOG_BUFFER": info,
        "INFO_LOG_BUFFER_SIZE_BYTES": size,
        "LOG_VERBOSE": 1,
    }
    kinds = [option(p, each) for each in options]
    text = b"// %d\n" % time.time_ns() + text  # else the driver's cache may answer, and write no log
    p.ask(name, p.d.cuModuleLoadDataEx, text, len(kinds), kinds, list(options.values()))
    p.note(f"{name}.error_log", len(error.rstrip(b"\0")) > 0)
    p.note(f"{name}.info_log", len(info.rstrip(b"\0")) > 0)
    p.note(f"{name}.names_the_line", b"line 5" in error)


def logs(p):
    _log(p, "good", GOOD)
    _log(p, "bad", BAD)
    _log(p, "garbage", b"this is not a module\0")
    _log(p, "future", b".version 99.0\n.target sm_75\n.address_size 64\n.visible .entry k(){ ret; }\n\0")
    _log(p, "bad.log_of_10_bytes", BAD, 10)
    _log(p, "bad.log_of_0_bytes", BAD, 0)


def options(p):
    d = p.d
    p.ask("none", d.cuModuleLoadDataEx, GOOD, 0, [], [])
    p.ask("max_registers", d.cuModuleLoadDataEx, GOOD, 1, [option(p, "MAX_REGISTERS")], [32])
    for level in (0, 4, 5):
        p.ask(
            f"optimization_{level}", d.cuModuleLoadDataEx, GOOD, 1, [option(p, "OPTIMIZATION_LEVEL")], [level]
        )
    p.ask("target_from_context", d.cuModuleLoadDataEx, GOOD, 1, [option(p, "TARGET_FROM_CUCONTEXT")], [0])
    p.ask("wall_time", d.cuModuleLoadDataEx, GOOD, 1, [option(p, "WALL_TIME")], [0.0])
    p.ask("line_info", d.cuModuleLoadDataEx, GOOD, 1, [option(p, "GENERATE_LINE_INFO")], [1])
    p.ask("text", d.cuModuleLoadData, GOOD)
    p.ask("text_without_a_zero_at_its_end", d.cuModuleLoadData, GOOD.rstrip(b"\0"))  # a bytes object has one


def count_and_names(p):
    d = p.d
    module = p.need(d.cuModuleLoadData, p.image)
    count = p.ask("count", d.cuModuleGetFunctionCount, module)
    p.note("count.value", None if count is None else int(count))
    found = p.ask("enumerate", d.cuModuleEnumerateFunctions, count, module)
    if found is not None:
        p.note("names", sorted(p.need(d.cuFuncGetName, each).decode() for each in found))
    p.ask("get.missing", d.cuModuleGetFunction, module, b"nope")
    p.ask("get.empty", d.cuModuleGetFunction, module, b"")
    p.ask("get.a_variable", d.cuModuleGetFunction, module, b"counter")
    one, two = (p.need(d.cuModuleGetFunction, module, b"fill") for _ in range(2))
    p.note("same_handle_again", int(one) == int(two))
    other = p.need(d.cuModuleLoadData, p.image)
    p.note("same_handle_in_a_second_module", int(p.need(d.cuModuleGetFunction, other, b"fill")) == int(one))


def global_variables(p):
    """Device and constant variables: an address that copies and kernels take."""
    d = p.d
    module = p.need(d.cuModuleLoadData, p.image)
    function = p.need(d.cuModuleGetFunction, module, b"lookup")
    target = p.device()
    found = {}
    for name in ("table", "counter"):
        found[name] = p.ask(name, d.cuModuleGetGlobal, module, name.encode())
        p.note(f"{name}.size", int(found[name][1]))
    counter, table = int(found["counter"][0]), int(found["table"][0])
    p.note("counter.at_first", p.read(counter)[0])
    p.write(counter, 100)
    p.write(table, *range(16))
    p.ask("launch", p.launch, "lookup", target, block=16, handle=function)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", p.read(target, 16))
    for name, address in (("counter", counter), ("table", table)):
        kind = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        value = p.ask(f"{name}.memory_type", d.cuPointerGetAttribute, kind, address)
        p.note(f"{name}.memory_type.value", None if value is None else int(value))
        p.ask(f"{name}.range", d.cuMemGetAddressRange, address)
        p.ask(f"{name}.free", d.cuMemFree, address)
        p.ask(f"{name}.memset", d.cuMemsetD8, address, 0, 4)
    p.ask("a_kernel", d.cuModuleGetGlobal, module, b"fill")
    again = p.need(d.cuModuleLoadData, p.image)
    p.note("each_module_has_its_own", int(p.need(d.cuModuleGetGlobal, again, b"counter")[0]) != counter)


def managed_variables(p):
    d = p.d
    module = p.ask("load", d.cuModuleLoadData, MANAGED)
    found = p.ask("global", d.cuModuleGetGlobal, module, b"shared")
    if found is not None:
        p.note("global.size", int(found[1]))
        kind = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
        p.note("is_managed", bool(p.need(d.cuPointerGetAttribute, kind, int(found[0]))))
        p.need(d.cuCtxSynchronize)
        p.note("value", ints(int(found[0]))[0])
    library = p.ask("library", d.cuLibraryLoadData, MANAGED, [], [], 0, [], [], 0)
    found = p.ask("library.managed", d.cuLibraryGetManaged, library, b"shared")
    p.note("library.managed.size", None if found is None else int(found[1]))
    p.ask("library.managed.missing", d.cuLibraryGetManaged, library, b"nope")
    p.ask("unload_library", d.cuLibraryUnload, library)
    p.ask("unload", d.cuModuleUnload, module)


def unload(p):
    d = p.d
    p.ask("null", d.cuModuleUnload, 0)
    module = p.need(d.cuModuleLoadData, p.image)
    p.ask("unload", d.cuModuleUnload, module)
    module = p.need(d.cuModuleLoadData, p.image)
    p.need(d.cuCtxPopCurrent)
    p.ask("without_a_context", d.cuModuleUnload, module)


def _library(p, text=None):
    return p.need(p.d.cuLibraryLoadData, p.image if text is None else text, [], [], 0, [], [], 0)


def load_library(p):
    """A library is compiled late: what is wrong with it shows when something in it is asked for."""
    d = p.d
    p.ask("with_a_context", d.cuLibraryLoadData, p.image, [], [], 0, [], [], 0)
    for name, text in (("bad", BAD), ("garbage", b"this is not a module\0"), ("empty", b"\0")):
        library = p.ask(name, d.cuLibraryLoadData, text, [], [], 0, [], [], 0)
        kernel = p.ask(f"{name}.kernel", d.cuLibraryGetKernel, library, b"k")
        p.ask(f"{name}.count", d.cuLibraryGetKernelCount, library)
        p.ask(f"{name}.module", d.cuLibraryGetModule, library)
        if kernel is not None:
            p.ask(f"{name}.function", d.cuKernelGetFunction, kernel)
        p.ask(f"{name}.unload", d.cuLibraryUnload, library)
    p.need(d.cuCtxPopCurrent)
    library = p.ask("without_a_context", d.cuLibraryLoadData, p.image, [], [], 0, [], [], 0)
    p.ask("without_a_context.kernel", d.cuLibraryGetKernel, library, b"fill")
    count = p.ask("without_a_context.count", d.cuLibraryGetKernelCount, library)
    p.note("without_a_context.count.value", None if count is None else int(count))
    p.ask("without_a_context.module", d.cuLibraryGetModule, library)
    p.ask("without_a_context.global", d.cuLibraryGetGlobal, library, b"counter")
    p.ask("without_a_context.bad", d.cuLibraryLoadData, BAD, [], [], 0, [], [], 0)
    p.ask("without_a_context.unload", d.cuLibraryUnload, library)


def library_kernels(p):
    d = p.d
    library = _library(p)
    kernel = p.ask("get", d.cuLibraryGetKernel, library, b"fill")
    p.ask("get.missing", d.cuLibraryGetKernel, library, b"nope")
    p.note("same_handle_again", int(p.need(d.cuLibraryGetKernel, library, b"fill")) == int(kernel))
    name = p.ask("name", d.cuKernelGetName, kernel)
    p.note("name.value", None if name is None else name.decode())
    owner = p.ask("library", d.cuKernelGetLibrary, kernel)
    p.note("library.is_it", owner is not None and int(owner) == int(library))
    found = [p.call(d.cuKernelGetParamInfo, kernel, index) for index in range(3)]
    p.note(
        "parameters",
        [answer if answer != "SUCCESS" else [int(each) for each in value] for answer, value in found],
    )
    count = p.need(d.cuLibraryGetKernelCount, library)
    handles = p.ask("enumerate", d.cuLibraryEnumerateKernels, int(count), library)
    if handles is not None:
        p.note("names", sorted(p.need(d.cuKernelGetName, each).decode() for each in handles))
    p.ask("null_library", d.cuLibraryGetKernel, 0, b"fill")
    p.need(d.cuLibraryUnload, library)


def library_in_two_contexts(p):
    """One kernel handle, a function and a module in each context."""
    d = p.d
    library = _library(p)
    kernel = p.need(d.cuLibraryGetKernel, library, b"fill")
    here = p.ask("function", d.cuKernelGetFunction, kernel)
    module = p.ask("module", d.cuLibraryGetModule, library)
    p.note("function_of_the_module_is_it", int(p.need(d.cuModuleGetFunction, module, b"fill")) == int(here))
    p.ask("unload_its_module", d.cuModuleUnload, module)
    other = p.new_context()
    there = p.ask("function_there", d.cuKernelGetFunction, kernel)
    p.note("functions_differ", there is not None and int(there) != int(here))
    memory = p.device()
    p.ask("launch_there", p.launch, "fill", memory, 5, handle=there)
    p.ask("synchronize_there", d.cuCtxSynchronize)
    p.note("value_there", p.read(memory)[0])
    p.need(d.cuCtxDestroy, other)
    p.need(d.cuLibraryUnload, library)


def launch_a_kernel_handle(p):
    """cuLaunchKernel takes a CUkernel and loads it where it is launched."""
    d = p.d
    library = _library(p)
    kernel = p.need(d.cuLibraryGetKernel, library, b"fill")
    memory = p.device()
    handle = d.CUfunction(int(kernel))
    p.ask("launch", p.launch, "fill", memory, 8, handle=handle)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", p.read(memory)[0])
    other = p.new_context()
    there = p.device()
    p.ask("launch_there", p.launch, "fill", there, 9, handle=handle)
    p.ask("synchronize_there", d.cuCtxSynchronize)
    p.note("value_there", p.read(there)[0])
    p.need(d.cuCtxDestroy, other)
    if p.device_count > 1:
        other = p.new_context(1)
        there = p.device()
        p.ask("launch_on_device_1", p.launch, "fill", there, 10, handle=handle)
        p.ask("synchronize_on_device_1", d.cuCtxSynchronize)
        p.note("value_on_device_1", p.read(there)[0])
        p.need(d.cuCtxDestroy, other)
    p.need(d.cuLibraryUnload, library)


def library_globals(p):
    d = p.d
    library = _library(p)
    found = p.ask("get", d.cuLibraryGetGlobal, library, b"counter")
    p.note("size", None if found is None else int(found[1]))
    p.ask("missing", d.cuLibraryGetGlobal, library, b"nope")
    p.write(int(found[0]), 41)
    other = p.new_context()
    theirs = p.ask("there", d.cuLibraryGetGlobal, library, b"counter")
    p.note("there.is_another", theirs is not None and int(theirs[0]) != int(found[0]))
    p.note("there.value", p.read(int(theirs[0]))[0])
    p.need(d.cuCtxDestroy, other)
    p.note("value", p.read(int(found[0]))[0])
    p.ask("unified_function.missing", d.cuLibraryGetUnifiedFunction, library, b"nope")
    p.need(d.cuLibraryUnload, library)


def kernel_attributes(p):
    d, kinds = p.d, p.d.CUfunction_attribute
    library = _library(p)
    kernel = p.need(d.cuLibraryGetKernel, library, b"reverse")
    dynamic = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    value = p.ask("get", d.cuKernelGetAttribute, dynamic, kernel, 0)
    p.note("get.value", None if value is None else int(value))
    p.ask("get.no_such_device", d.cuKernelGetAttribute, dynamic, kernel, 99)
    p.ask("set", d.cuKernelSetAttribute, dynamic, 65536, kernel, 0)
    p.note("set.value", int(p.need(d.cuKernelGetAttribute, dynamic, kernel, 0)))
    function = p.need(d.cuKernelGetFunction, kernel)
    p.note("set.of_the_function", int(p.need(d.cuFuncGetAttribute, dynamic, function)))
    p.ask("set.function_after", d.cuFuncSetAttribute, function, dynamic, 70000)
    p.note("set.function_after.of_the_kernel", int(p.need(d.cuKernelGetAttribute, dynamic, kernel, 0)))
    p.ask("set.too_much", d.cuKernelSetAttribute, dynamic, 1 << 20, kernel, 0)
    p.ask("set.read_only", d.cuKernelSetAttribute, kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, 1, kernel, 0)
    p.ask("cache_config", d.cuKernelSetCacheConfig, kernel, d.CUfunc_cache.CU_FUNC_CACHE_PREFER_L1, 0)
    p.need(d.cuLibraryUnload, library)


def library_from_a_file(p):
    d = p.d
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "image.ptx")
        with open(path, "wb") as file:
            file.write(p.image)
        library = p.ask("library", d.cuLibraryLoadFromFile, path.encode(), [], [], 0, [], [], 0)
        p.ask("library.kernel", d.cuLibraryGetKernel, library, b"fill")
        module = p.ask("module", d.cuModuleLoad, path.encode())
        p.ask("module.function", d.cuModuleGetFunction, module, b"fill")
        p.ask("missing", d.cuLibraryLoadFromFile, path.encode() + b".no", [], [], 0, [], [], 0)
        p.ask("folder", d.cuModuleLoad, folder.encode())


def unload_library(p):
    d = p.d
    p.ask("null", d.cuLibraryUnload, 0)
    library = _library(p)
    module = p.need(d.cuLibraryGetModule, library)
    p.note("module.given", int(module) != 0)
    p.ask("unload", d.cuLibraryUnload, library)
