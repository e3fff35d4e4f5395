"""Launches: what is checked, and how a grid becomes work in a stream."""

from __future__ import annotations

import sys
from typing import Any

from gpufleet.virtual.api.functions import function_of
from gpufleet.virtual.api.libraries import kernel_function
from gpufleet.virtual.api.occupancy import active_blocks
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.devices import CLOCK_KILOHERTZ
from gpufleet.virtual.engine import Dim3, Launch
from gpufleet.virtual.graphs import Work
from gpufleet.virtual.modules import Function
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import Stream, enqueue

LARGEST_GRID = (2**31 - 1, 65_535, 65_535)
LARGEST_BLOCK = (1024, 1024, 64)
MOST_THREADS = 1024


@call()
def cuLaunchKernel(
    state: State,
    f: Any,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: Any,
    kernelParams: Any,
    extra: Any,
) -> None:
    """Put a grid of a kernel into a stream."""
    grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
    _launch(state, f, grid, block, sharedMemBytes, hStream, kernelParams, extra, cooperative=False)


@call()
def cuLaunchCooperativeKernel(
    state: State,
    f: Any,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: Any,
    kernelParams: Any,
) -> None:
    """Put a grid into a stream whose blocks all run at once."""
    grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
    _launch(state, f, grid, block, sharedMemBytes, hStream, kernelParams, None, cooperative=True)


@call()
def cuLaunchKernelEx(state: State, config: Any, f: Any, kernelParams: Any, extra: Any) -> None:
    """Put a grid into a stream; of the attributes, COOPERATIVE has an effect."""
    grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
    block = (config.blockDimX, config.blockDimY, config.blockDimZ)
    cooperative = _is_cooperative(list(config.attrs)[: config.numAttrs])
    stream = config.hStream
    _launch(
        state, f, grid, block, config.sharedMemBytes, stream, kernelParams, extra, cooperative=cooperative
    )


def _launch(
    state: State,
    handle: Any,
    grid: Dim3,
    block: Dim3,
    shared: int,
    stream_handle: Any,
    kernel_params: Any,
    extra: Any,
    *,
    cooperative: bool,
) -> None:
    function, stream = _function_and_stream(state, handle, stream_handle)
    _check(function, grid, block, shared)
    if cooperative:
        _check_resident(function, stream.context, grid, block, shared)
    parameters = function.parameters.read(kernel_params, extra)
    launch = _new_launch(state, stream.context, grid, block, shared, parameters, cooperative)
    if stream.capture is not None:
        with state.lock:
            stream.capture.add(stream, _kernel_work(function, launch))
        return
    enqueue(state.scheduler, stream, _operation(function, launch))


def kernel_node(
    state: State, function: Function, grid: Dim3, block: Dim3, shared: int, kernel_params: Any, extra: Any
) -> Work:
    """Return the work of a kernel's node in a graph."""
    _check(function, grid, block, shared)
    parameters = function.parameters.read(kernel_params, extra)
    launch = _new_launch(state, function.context, grid, block, shared, parameters, cooperative=False)
    return _kernel_work(function, launch)


def _kernel_work(function: Function, launch: Launch) -> Work:
    """Return the work of a node that does this launch."""
    operation = _operation(function, launch)
    return Work("KERNEL", function.context, operation, function, launch)


def _operation(function: Function, launch: Launch) -> Operation:
    executable = function.load()
    threads = _product(launch.grid) * _product(launch.block)
    return Operation(
        launch.device_ordinal,
        lambda: function.run(executable, launch, threads),
        brief=function.is_brief(threads),
    )


def _new_launch(
    state: State,
    context: Context,
    grid: Dim3,
    block: Dim3,
    shared: int,
    parameters: bytes,
    cooperative: bool,
) -> Launch:
    device = context.device
    return Launch(
        grid=grid,
        block=block,
        dynamic_shared=shared,
        parameters=parameters,
        memory=context.memory(state.memory),
        clock_rate=CLOCK_KILOHERTZ,
        device_ordinal=device.ordinal,
        multiprocessors=context.multiprocessors,
        cooperative=cooperative,
        cancelled=state.cancelled,
        output=_print,
    )


def _function_and_stream(state: State, handle: Any, stream_handle: Any) -> tuple[Function, Stream]:
    """The kernel and the stream, which must be of the same context, whatever is current."""
    kernel = state.kernels.get(number(handle))
    stream = state.stream(stream_handle)
    if kernel is not None:
        return kernel_function(state, kernel, stream.context), stream
    function = function_of(state, handle)
    if function.context is not stream.context.home:
        raise Refusal(
            "INVALID_HANDLE",
            f"kernel {function.kernel.name!r} is of context {function.context.handle:#x}, the stream of "
            f"{stream.context.handle:#x}",
        )
    return function, stream


def _check(function: Function, grid: Dim3, block: Dim3, shared: int) -> None:
    if not _is_within(grid, LARGEST_GRID):
        raise Refusal("INVALID_VALUE", f"a grid of {grid}: expected 1 to {LARGEST_GRID}")
    if not _is_within(block, LARGEST_BLOCK):
        raise Refusal("INVALID_VALUE", f"a block of {block}: expected 1 to {LARGEST_BLOCK}")
    name, threads = function.kernel.name, _product(block)
    if threads > MOST_THREADS:
        raise Refusal("INVALID_VALUE", f"a block of {threads} threads: the most is {MOST_THREADS}")
    if threads > function.max_threads:
        raise Refusal(
            "INVALID_VALUE",
            f"a block of {threads} threads: {name!r} allows {function.max_threads} (.maxntid)",
        )
    required = function.kernel.required_block
    if required is not None and block != required:
        raise Refusal("INVALID_VALUE", f"a block of {block}: {name!r} requires {required} (.reqntid)")
    if not 0 <= shared <= function.max_dynamic_shared:
        raise Refusal(
            "INVALID_VALUE",
            f"{shared} bytes of dynamic shared memory: {name!r} may have {function.max_dynamic_shared}; "
            "cuFuncSetAttribute allows more",
        )


def _check_resident(function: Function, context: Context, grid: Dim3, block: Dim3, shared: int) -> None:
    """Refuse a grid whose blocks are not all on the context's multiprocessors at once."""
    if _product(grid) > active_blocks(function, _product(block), shared) * context.multiprocessors:
        raise Refusal("COOPERATIVE_LAUNCH_TOO_LARGE", f"{_product(grid)} blocks do not all run at once")


def _is_cooperative(attributes: list[Any]) -> bool:
    kinds = bindings().CUlaunchAttributeID
    cooperative = False
    for attribute in attributes:
        if attribute.id == kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            cooperative = bool(attribute.value.cooperative)
        elif attribute.id == kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            cluster = attribute.value.clusterDim
            if (cluster.x, cluster.y, cluster.z) != (1, 1, 1):
                raise Refusal("NOT_SUPPORTED", "virtual devices have no clusters of more than one block")
    return cooperative


def _is_within(dimensions: Dim3, largest: Dim3) -> bool:
    (x, y, z), (most_x, most_y, most_z) = dimensions, largest
    return 1 <= x <= most_x and 1 <= y <= most_y and 1 <= z <= most_z


def _product(dimensions: Dim3) -> int:
    x, y, z = dimensions
    return x * y * z


def _print(text: bytes) -> None:
    """Write what a kernel printed."""
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
