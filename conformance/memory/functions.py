"""Functions: attributes, launches that do not fit, occupancy."""

from __future__ import annotations

from .probe import PARAMETERS, run_chapter

SIMPLE = ("fill", "reverse", "reverse_static", "bounded", "lookup", "mixed")


def probe_functions(driver, image, **how):
    """cuFuncGetAttribute, cuFuncSetAttribute, shared memory, launch limits, occupancy."""
    return run_chapter(
        (
            attributes,
            set_dynamic_shared,
            launch_with_shared,
            set_others,
            read_only_attributes,
            cache_config,
            launch_limits,
            parameters,
            names,
            loading,
            occupancy,
            occupancy_limits,
            best_block,
            clusters,
        ),
        driver,
        image,
        **how,
    )


def attribute(p, name):
    return getattr(p.d.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")


def attributes(p):
    """Registers, versions and local memory are the compiler's and the device's; the rest is the kernel's."""
    d = p.d
    for kernel in SIMPLE:
        function = p.kernel(kernel)
        found = {}
        for each in (
            "MAX_THREADS_PER_BLOCK",
            "SHARED_SIZE_BYTES",
            "PTX_VERSION",
            "CACHE_MODE_CA",
            "MAX_DYNAMIC_SHARED_SIZE_BYTES",
            "PREFERRED_SHARED_MEMORY_CARVEOUT",
            "CLUSTER_SIZE_MUST_BE_SET",
            "REQUIRED_CLUSTER_WIDTH",
            "NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
            "CLUSTER_SCHEDULING_POLICY_PREFERENCE",
        ):
            answer, value = p.call(d.cuFuncGetAttribute, attribute(p, each), function)
            found[each] = answer if answer != "SUCCESS" else int(value)
        p.note(kernel, found)
        for each in ("NUM_REGS", "LOCAL_SIZE_BYTES", "CONST_SIZE_BYTES", "BINARY_VERSION"):
            value = p.ask(f"{kernel}.{each}", d.cuFuncGetAttribute, attribute(p, each), function)
            p.hardware(f"{kernel}.{each}", None if value is None else int(value))
    p.ask("unknown", d.cuFuncGetAttribute, attribute(p, "MAX"), p.kernel("fill"))
    p.ask("null", d.cuFuncGetAttribute, attribute(p, "NUM_REGS"), 0)


def set_dynamic_shared(p):
    d = p.d
    kinds = d.CUdevice_attribute
    limit = p.need(d.cuDeviceGetAttribute, kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0)
    p.hardware("opt_in", limit)
    plain = p.need(d.cuDeviceGetAttribute, kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 0)
    p.hardware("without_opt_in", plain)
    kind = attribute(p, "MAX_DYNAMIC_SHARED_SIZE_BYTES")
    for kernel in ("reverse", "reverse_static"):
        function = p.kernel(kernel)
        for name, size in (
            ("0", 0),
            ("49152", 49152),
            ("opt_in", limit),
            ("opt_in_less_1024", limit - 1024),
            ("opt_in_and_1", limit + 1),
            ("negative", -1),
            ("1", 1),
        ):
            p.ask(f"{kernel}.{name}", d.cuFuncSetAttribute, function, kind, size)
            value = int(p.need(d.cuFuncGetAttribute, kind, function))
            p.note(f"{kernel}.{name}.taken", value == size)
    p.ask("null", d.cuFuncSetAttribute, 0, kind, 0)


def launch_with_shared(p):
    """More than 48 KiB needs the attribute, in each context for itself."""
    d = p.d
    memory = p.device(1 << 16)
    kind = attribute(p, "MAX_DYNAMIC_SHARED_SIZE_BYTES")
    other = p.new_context()
    p.ask("4096", p.launch, "reverse", memory, block=32, shared=4096)
    p.ask("49152", p.launch, "reverse", memory, block=32, shared=49152)
    p.ask("49153", p.launch, "reverse", memory, block=32, shared=49153)
    p.ask("65536", p.launch, "reverse", memory, block=32, shared=65536)
    p.ask("static_and_48_kib", p.launch, "reverse_static", memory, block=32, shared=49152)
    p.ask("static_fits", p.launch, "reverse_static", memory, block=32, shared=49152 - 1024)
    p.ask("set", d.cuFuncSetAttribute, p.kernel("reverse"), kind, 65536)
    p.ask("65536_then", p.launch, "reverse", memory, block=32, shared=65536)
    p.ask("65537_then", p.launch, "reverse", memory, block=32, shared=65537)
    p.ask("lower", d.cuFuncSetAttribute, p.kernel("reverse"), kind, 1024)
    p.ask("4096_when_lowered", p.launch, "reverse", memory, block=32, shared=4096)
    p.ask("1024_when_lowered", p.launch, "reverse", memory, block=32, shared=1024)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", p.read(memory, 32))
    p.need(d.cuCtxDestroy, other)


def set_others(p):
    """Of a kernel that is not launched afterwards: some values forbid it."""
    d = p.d
    function = p.kernel("lookup")
    for name, choices in {
        "PREFERRED_SHARED_MEMORY_CARVEOUT": (-2, -1, 0, 50, 100, 101),
        "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": (0, 1, 2),
        "CLUSTER_SCHEDULING_POLICY_PREFERENCE": (0, 1, 2, 99),
        "REQUIRED_CLUSTER_WIDTH": (0, 1, 2),
    }.items():
        kind = attribute(p, name)
        for value in choices:
            p.ask(f"{name}.{value}", d.cuFuncSetAttribute, function, kind, value)
            p.note(f"{name}.{value}.value", int(p.need(d.cuFuncGetAttribute, kind, function)))


def read_only_attributes(p):
    for each in (
        "MAX_THREADS_PER_BLOCK",
        "SHARED_SIZE_BYTES",
        "CONST_SIZE_BYTES",
        "LOCAL_SIZE_BYTES",
        "NUM_REGS",
        "PTX_VERSION",
        "BINARY_VERSION",
        "CACHE_MODE_CA",
        "CLUSTER_SIZE_MUST_BE_SET",
    ):
        p.ask(each, p.d.cuFuncSetAttribute, p.kernel("fill"), attribute(p, each), 1)


def cache_config(p):
    d = p.d
    function = p.kernel("fill")
    for each in d.CUfunc_cache:
        p.ask(each.name, d.cuFuncSetCacheConfig, function, each)
    p.ask("null", d.cuFuncSetCacheConfig, 0, d.CUfunc_cache.CU_FUNC_CACHE_PREFER_L1)
    for each in d.CUsharedconfig:
        p.ask(each.name, d.cuFuncSetSharedMemConfig, function, each)


def launch_limits(p):
    d = p.d
    memory = p.device(1 << 16)
    p.ask("bounded.128", p.launch, "bounded", memory, block=128)
    p.ask("bounded.129", p.launch, "bounded", memory, block=129)
    p.ask("bounded.256", p.launch, "bounded", memory, block=256)
    p.ask("fill.1024", p.launch, "fill", memory, 1, block=1024)
    p.ask("fill.1025", p.launch, "fill", memory, 1, block=1025)
    p.ask("synchronize", d.cuCtxSynchronize)
    parameters = ((memory, 1), PARAMETERS["fill"])
    p.ask("grid_x_too_great", d.cuLaunchKernel, p.kernel("fill"), 1 << 31, 1, 1, 1, 1, 1, 0, 0, parameters, 0)
    p.ask("grid_z_too_great", d.cuLaunchKernel, p.kernel("fill"), 1, 1, 65536, 1, 1, 1, 0, 0, parameters, 0)
    p.ask("threads_too_many", d.cuLaunchKernel, p.kernel("fill"), 1, 1, 1, 64, 32, 1, 0, 0, parameters, 0)
    p.ask("cooperative", d.cuLaunchCooperativeKernel, p.kernel("fill"), 1, 1, 1, 32, 1, 1, 0, 0, parameters)
    p.ask(
        "cooperative_too_many",
        d.cuLaunchCooperativeKernel,
        p.kernel("fill"),
        1 << 20,
        1,
        1,
        1024,
        1,
        1,
        0,
        0,
        parameters,
    )
    config = d.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX = 32
    p.ask(
        "cuLaunchKernelEx", d.cuLaunchKernelEx, config, p.kernel("fill"), ((memory, 6), PARAMETERS["fill"]), 0
    )
    p.ask("synchronize_at_last", d.cuCtxSynchronize)
    p.note("value", p.read(memory, 32)[31])


def parameters(p):
    d = p.d
    for kernel in ("fill", "mixed", "latch"):
        function = p.kernel(kernel)
        count = p.ask(f"{kernel}.count", d.cuFuncGetParamCount, function)
        p.note(f"{kernel}.count.value", None if count is None else int(count))
        found = [p.call(d.cuFuncGetParamInfo, function, index) for index in range(4)]
        p.note(
            f"{kernel}.info",
            [answer if answer != "SUCCESS" else [int(each) for each in value] for answer, value in found],
        )
    p.ask("null", d.cuFuncGetParamInfo, 0, 0)


def names(p):
    d = p.d
    for kernel in ("fill", "mixed"):
        found = p.ask(kernel, d.cuFuncGetName, p.kernel(kernel))
        p.note(f"{kernel}.value", None if found is None else found.decode())
    first, second = (
        p.ask("module", d.cuFuncGetModule, p.kernel("fill")),
        p.need(d.cuFuncGetModule, p.kernel("add")),
    )
    p.note("same_module", int(first) == int(second))
    p.ask("null", d.cuFuncGetName, 0)


def loading(p):
    d = p.d
    module = p.need(d.cuModuleLoadData, p.image)
    function = p.need(d.cuModuleGetFunction, module, b"fill")
    p.hardware("loaded_at_first", p.need(d.cuFuncIsLoaded, function))
    p.ask("load", d.cuFuncLoad, function)
    p.note("loaded_then", p.need(d.cuFuncIsLoaded, function))
    p.ask("load_again", d.cuFuncLoad, function)
    p.ask("unload_module", d.cuModuleUnload, module)
    p.hardware("mode", p.need(d.cuModuleGetLoadingMode))


def occupancy(p):
    d = p.d
    for kernel in ("fill", "reverse", "reverse_static", "bounded"):
        function = p.kernel(kernel)
        found = {}
        for block in (1, 32, 33, 64, 128, 256, 512, 1024):
            for shared in (0, 1024, 16384, 49152):
                answer, value = p.call(d.cuOccupancyMaxActiveBlocksPerMultiprocessor, function, block, shared)
                found[f"{block}.{shared}"] = int(value) if answer == "SUCCESS" else answer
        p.hardware(kernel, found)


def occupancy_limits(p):
    d = p.d
    function, question = p.kernel("fill"), d.cuOccupancyMaxActiveBlocksPerMultiprocessor
    for name, arguments in {
        "block_0": (function, 0, 0),
        "block_negative": (function, -1, 0),
        "block_1025": (function, 1025, 0),
        "shared_49153": (function, 32, 49153),
        "shared_300000": (function, 32, 300000),
        "bounded_129": (p.kernel("bounded"), 129, 0),
        "null": (0, 32, 0),
    }.items():
        value = p.ask(name, question, *arguments)
        p.hardware(name, None if value is None else int(value))
    flagged = d.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
    p.each("flags", flagged, {each: (function, 32, 0, each) for each in (0, 1, 2)})
    for name, arguments in {
        "one_block": (function, 1, 32),
        "two_blocks": (function, 2, 32),
        "no_block": (function, 0, 32),
        "many_blocks": (function, 1000, 32),
        "no_thread": (function, 1, 0),
    }.items():
        value = p.ask(f"available.{name}", d.cuOccupancyAvailableDynamicSMemPerBlock, *arguments)
        p.hardware(f"available.{name}", None if value is None else int(value))


def best_block(p):
    d = p.d
    question, flagged = d.cuOccupancyMaxPotentialBlockSize, d.cuOccupancyMaxPotentialBlockSizeWithFlags
    for kernel in ("fill", "reverse", "bounded"):
        function = p.kernel(kernel)
        for shared, limit in ((0, 0), (0, 100), (16384, 0), (0, 5000), (300000, 0)):
            found = p.ask(f"{kernel}.{shared}.{limit}", question, function, None, shared, limit)
            p.hardware(f"{kernel}.{shared}.{limit}", None if found is None else [int(each) for each in found])
    p.ask("negative_limit", question, p.kernel("fill"), None, 0, -1)
    p.each("flags", flagged, {each: (p.kernel("fill"), None, 0, 0, each) for each in (0, 1, 2)})


def clusters(p):
    """Thread block clusters: devices of capability 9.0 have them."""
    d = p.d
    config = d.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 8, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 128, 1, 1
    answer, value = p.call(d.cuOccupancyMaxPotentialClusterSize, p.kernel("fill"), config)
    p.hardware("largest", int(value) if answer == "SUCCESS" else answer)
    answer, value = p.call(d.cuOccupancyMaxActiveClusters, p.kernel("fill"), config)
    p.hardware("active_without_a_cluster", int(value) if answer == "SUCCESS" else answer)
