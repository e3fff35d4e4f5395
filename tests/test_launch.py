"""Launches: parameter styles, sizes, streams, contexts, and what is refused before the driver sees it."""

from __future__ import annotations

import functools
import itertools
import random
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.compiler import compile_source
from gpufleet.device import Device
from gpufleet.driver import Driver
from gpufleet.signature import parse

STYLES = pytest.mark.parametrize("style", ["packed", "pointers"])

SOURCE = r"""
extern "C" __global__ void countdown(int *out, int n) { out[threadIdx.x] = n - threadIdx.x; }

extern "C" __global__ void pair(int *out, short value) { *out = value; }

extern "C" __global__ void nothing() {}

// Who ran: one mark per thread of the whole grid.
extern "C" __global__ void mark(int *out) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1;
}

extern "C" __global__ void reversed(int *out, int n) {
    extern __shared__ int dynamic[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) dynamic[i] = i;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = dynamic[n - 1 - i];
}

extern "C" __global__ void __launch_bounds__(64) bounded(int *out) { *out = 1; }

extern "C" __global__ void add(const int *a, const int *b, int *sum, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}

extern "C" __global__ void padded(double *out, double d, char c) { out[0] = d; out[1] = c; }

extern "C" __global__ void fault(int *p) { *(volatile int *)0 = 1; }
"""

PARTS = {
    "int i": "out[0] = i;",
    "double d": "out[1] = d;",
    "char c": "out[2] = c;",
    "float4 f": "out[3] = f.x; out[4] = f.y; out[5] = f.z; out[6] = f.w;",
    "double *out": "",
}
ORDERS = list(itertools.permutations(PARTS))
MIXED: dict[str, Any] = {
    "int i": -12345,
    "double d": 2.75,
    "char c": -7,
    "float4 f": struct.pack("<4f", 1.5, -2.5, 3.5, 0.125),
}
EXPECTED = [-12345, 2.75, -7, 1.5, -2.5, 3.5, 0.125]


def mixed_source() -> str:
    """Write a kernel for every order of the five parameters."""
    body = " ".join(PARTS.values())
    kernels = (
        f'extern "C" __global__ void mixed{index}({", ".join(order)}) {{ {body} }}'
        for index, order in enumerate(ORDERS)
    )
    # C's plain `char` has no sign of its own.
    return "\n".join(kernels).replace("char c", "signed char c")


@pytest.fixture(scope="module")
def image() -> bytes:
    return compile_source(SOURCE, arch=75, target="ptx").code


@pytest.fixture
def program(image: bytes, driver: Driver) -> gf.Program:
    return gf.Program.from_image(image, driver=driver)


@pytest.fixture(scope="module")
def mixed() -> gf.Program:
    return gf.Program.from_image(compile_source(mixed_source(), arch=75, target="ptx").code)


@pytest.fixture
def buffer(context: gf.Context) -> Iterator[gf.DeviceBuffer]:
    with context.alloc(4096) as made:
        made.fill(0)
        yield made


def ints(buffer: gf.DeviceBuffer, count: int) -> list[int]:
    return [int(value) for value in buffer.to_numpy("i4")[:count]]


def current(driver: Driver) -> int:
    return int(driver.cuCtxGetCurrent())


# Parameters


@STYLES
def test_integers_and_a_pointer(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer, style: str
) -> None:
    with context:
        program.kernel("countdown").launch(1, 32, buffer, 32, style=style)
        assert ints(buffer, 32) == list(range(32, 0, -1))


@STYLES
@pytest.mark.parametrize("value", [-32768, 32767, -1, np.int16(-5), np.uint16(7), True])
def test_pointer_and_short(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer, style: str, value: int
) -> None:
    program.kernel("pair").launch(1, 1, buffer, value, stream=context.main_stream, style=style)

    assert ints(buffer, 1) == [int(value)]


@STYLES
def test_every_order_of_parameters_of_all_sizes(mixed: gf.Program, context: gf.Context, style: str) -> None:
    with context, context.alloc(7 * 8) as out:
        for index, order in enumerate(ORDERS):
            out.fill(0xFF)
            arguments = [MIXED.get(name, out) for name in order]
            mixed.kernel(f"mixed{index}").launch(1, 1, *arguments, style=style)
            assert list(out.to_numpy("f8")) == EXPECTED, order


@STYLES
def test_error_in_any_order_names_the_parameter_that_is_wrong(
    mixed: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer, style: str
) -> None:
    for index in (0, 17, 59, 101, 119):
        order = ORDERS[index]
        wrong = {**MIXED, "char c": 128 * 2}
        with pytest.raises(gf.KernelArgumentError) as caught:
            mixed.kernel(f"mixed{index}").launch(
                1, 1, *(wrong.get(name, buffer) for name in order), stream=context.main_stream, style=style
            )
        assert str(caught.value) == (
            f"parameter {order.index('char c')} of kernel 'mixed{index}' (u8, 1 byte) got 256: expected an "
            "integer from -128 to 255"
        )


@STYLES
def test_kernel_without_parameters(program: gf.Program, context: gf.Context, style: str) -> None:
    program.kernel("nothing").launch(2, 32, stream=context.main_stream, style=style)
    context.synchronize()


def test_parameter_of_the_wrong_size(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer
) -> None:
    with pytest.raises(gf.KernelArgumentError, match=r"parameter 1 .*\(u32, 4 bytes\) got numpy\.int64 5"):
        program.kernel("countdown").launch(1, 1, buffer, np.int64(5), stream=context.main_stream)


def test_too_many_and_too_few_parameters(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer
) -> None:
    kernel = program.kernel("countdown")

    with pytest.raises(
        gf.KernelArgumentError, match="kernel 'countdown' takes 2 parameters, but 1 was given"
    ):
        kernel.launch(1, 1, buffer, stream=context.main_stream)
    with pytest.raises(
        gf.KernelArgumentError, match="kernel 'countdown' takes 2 parameters, but 3 were given"
    ):
        kernel.launch(1, 1, buffer, 1, 2, stream=context.main_stream)
    with pytest.raises(gf.KernelArgumentError, match="kernel 'nothing' takes 0 parameters, but 1 was given"):
        program.kernel("nothing").launch(1, 1, 5, stream=context.main_stream)


def test_unknown_style(program: gf.Program, context: gf.Context) -> None:
    with pytest.raises(gf.LaunchError, match="style is 'tuple': expected 'packed' or 'pointers'"):
        program.kernel("nothing").launch(1, 1, stream=context.main_stream, style="tuple")


def test_signature_instead_of_what_the_ptx_says(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer
) -> None:
    kernel = program.kernel("countdown", signature=["pointer", np.uint32])

    kernel.launch(1, 1, buffer, 2**32 - 1, stream=context.main_stream)
    assert ints(buffer, 1) == [-1]
    with pytest.raises(gf.KernelArgumentError, match="from 0 to 4294967295"):
        kernel.launch(1, 1, buffer, -1, stream=context.main_stream)


# A buffer packed by the caller


def test_packed_buffer(program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer) -> None:
    packed = struct.pack("<Qi", buffer.address, 32)

    for given in (packed, bytearray(packed), memoryview(packed), np.frombuffer(packed, "u4")):
        buffer.fill(0)
        program.kernel("countdown").launch_packed(1, 32, given, stream=context.main_stream)
        assert ints(buffer, 32) == list(range(32, 0, -1))


def test_short_or_long_packed_buffer_is_refused(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer
) -> None:
    kernel = program.kernel("countdown")

    for size in (0, 8, 11, 13, 16):
        with pytest.raises(
            gf.KernelArgumentError, match=f"has {size} bytes, but kernel 'countdown' takes exactly 12"
        ):
            kernel.launch_packed(1, 32, bytes(size), stream=context.main_stream)
    assert ints(buffer, 32) == [0] * 32


def test_packed_buffer_has_no_padding_at_its_end(program: gf.Program, context: gf.Context) -> None:
    with context.alloc(16) as out:
        kernel = program.kernel("padded")
        packed = struct.pack("<Qdb", out.address, 0.5, -3)

        kernel.launch_packed(1, 1, packed, stream=context.main_stream)

        assert list(out.to_numpy("f8")) == [0.5, -3.0]
        with pytest.raises(
            gf.KernelArgumentError, match=r"has 24 bytes, .* exactly 17: .* without padding behind it"
        ):
            kernel.launch_packed(1, 1, packed.ljust(24, b"\0"), stream=context.main_stream)


# Sizes


@STYLES
@pytest.mark.parametrize(
    ("grid", "block"),
    [
        (1, 1),
        (3, 32),
        ((3,), (32,)),
        ((2, 3), (4, 5)),
        ((2, 1, 3), (2, 3, 4)),
        ([2, 2], [8, 4]),
        (np.int64(2), 16),
    ],
)
def test_grid_and_block_reach_the_device(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer, grid: Any, block: Any, style: str
) -> None:
    program.kernel("mark").launch(grid, block, buffer, stream=context.main_stream, style=style)

    count = int(np.prod(grid) * np.prod(block))
    marks = ints(buffer, 1024)
    assert marks == [1] * count + [0] * (1024 - count)


def test_block_of_2048_threads(program: gf.Program, context: gf.Context) -> None:
    kernel = program.kernel("nothing")

    with pytest.raises(gf.LaunchError, match="the block's x is 2048: device 0 takes 1 to 1,024"):
        kernel.launch(1, 2048, stream=context.main_stream)
    with pytest.raises(
        gf.LaunchError, match=r"a block of \(64, 32\) has 2,048 threads: device 0 takes at most 1,024"
    ):
        kernel.launch(1, (64, 32), stream=context.main_stream)


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        (0, 1, "the grid's x is 0"),
        (1, 0, "the block's x is 0"),
        ((1, 0), 1, "the grid's y is 0"),
        (-1, 1, "the grid's x is -1"),
        ((1, 70000), 1, "the grid's y is 70000: device 0 takes 1 to 65,535"),
        (1, (1, 1, 65), "the block's z is 65: device 0 takes 1 to 64"),
        (1 << 31, 1, "the grid's x is 2147483648"),
        ((1, 1, 1, 1), 1, "expected an int or 1 to 3 ints"),
        ((), 1, "expected an int or 1 to 3 ints"),
        (1, 1.5, "the block is 1.5: expected an int or 1 to 3 ints"),
        ("1", 1, "the grid is '1': expected an int or 1 to 3 ints"),
    ],
)
def test_sizes_beyond_the_limits(
    program: gf.Program, context: gf.Context, grid: Any, block: Any, message: str
) -> None:
    with pytest.raises(gf.LaunchError, match=message):
        program.kernel("nothing").launch(grid, block, stream=context.main_stream)


def test_block_beyond_what_the_kernel_allows(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer
) -> None:
    kernel = program.kernel("bounded")

    kernel.launch(1, 64, buffer, stream=context.main_stream)
    with pytest.raises(gf.LaunchError, match="kernel 'bounded' takes at most 64"):
        kernel.launch(1, 65, buffer, stream=context.main_stream)


def test_shared_memory_up_to_what_the_device_has(program: gf.Program, context: gf.Context) -> None:
    kernel = program.kernel("reversed")
    usual = context.device.max_shared_memory_per_block
    most = context.device.attribute("max_shared_memory_per_block_optin")

    for size in (4096, usual, most, usual + 4, 64):
        count = size // 4
        with context.alloc(size) as out:
            kernel.launch(1, 256, out, count, stream=context.main_stream, shared=size)
            assert np.array_equal(out.to_numpy("i4"), np.arange(count, dtype="i4")[::-1])
    for wrong in (most + 1, -1, 1.5):
        with pytest.raises(
            gf.LaunchError, match=f"the shared memory is {wrong} bytes: .* takes 0 to {most:,}"
        ):
            kernel.launch(1, 256, 0, 1, stream=context.main_stream, shared=wrong)  # type: ignore[arg-type]


# Streams and contexts


def test_stream_is_that_of_the_current_context(program: gf.Program, two_devices: list[Device]) -> None:
    kernel = program.kernel("countdown")
    outer, inner = (device.create_context() for device in two_devices)

    with outer, outer.alloc(128) as of_outer:
        with inner, inner.alloc(128) as of_inner:
            kernel.launch(1, 32, of_inner, 32)
            assert ints(of_inner, 32) == list(range(32, 0, -1))
        kernel.launch(1, 32, of_outer, 33)
        assert ints(of_outer, 32) == list(range(33, 1, -1))
    outer.close()
    inner.close()


def test_driver_is_that_of_the_context_that_was_entered(image: bytes, context: gf.Context) -> None:
    kernel = gf.Program.from_image(image).kernel("countdown")

    with context, context.alloc(128) as buffer:
        kernel.launch(1, 32, buffer, 32)
        assert ints(buffer, 32) == list(range(32, 0, -1))


def test_no_stream_and_no_current_context(program: gf.Program, context: gf.Context) -> None:
    with pytest.raises(
        gf.WrongContext, match=r"kernel 'nothing' was launched without stream=, but no context"
    ):
        program.kernel("nothing").launch(1, 1)


@STYLES
def test_stream_decides_the_context_whatever_is_current(
    program: gf.Program, two_devices: list[Device], style: str
) -> None:
    kernel = program.kernel("countdown")
    driver = two_devices[0].driver
    context, other = (device.create_context() for device in two_devices)
    with context.stream() as stream, context.alloc(128) as buffer:
        kernel.launch(1, 32, buffer, 32, stream=stream, style=style)
        assert current(driver) == 0
        stream.synchronize()
        assert ints(buffer, 32) == list(range(32, 0, -1))
        with other:
            kernel.launch(1, 32, buffer, 40, stream=stream, style=style)
            assert current(driver) == other.address
            stream.synchronize()
        assert ints(buffer, 32) == list(range(40, 8, -1))
    context.close()
    other.close()


def test_one_kernel_in_two_contexts_and_on_two_devices(
    program: gf.Program, two_devices: list[Device]
) -> None:
    kernel = program.kernel("countdown")
    contexts = [device.create_context() for device in (*two_devices, two_devices[0])]
    buffers = [context.alloc(128) for context in contexts]

    for round_number in range(3):
        for index, (context, buffer) in enumerate(zip(contexts, buffers, strict=True)):
            kernel.launch(1, 32, buffer, 100 * round_number + index, stream=context.main_stream)
    for index, (context, buffer) in enumerate(zip(contexts, buffers, strict=True)):
        assert ints(buffer, 2) == [200 + index, 199 + index]
        buffer.close()
        context.close()


def test_threads_launch_one_kernel_at_once(program: gf.Program, context: gf.Context) -> None:
    kernel = program.kernel("add")
    count, failures = 1000, []

    def work(number: int) -> None:
        values = np.full(count, number, "i4")
        style = ("packed", "pointers")[number % 2]
        with (
            context,
            context.stream() as stream,
            context.alloc(4 * count) as a,
            context.alloc(4 * count) as total,
        ):
            a.copy_from(values)
            for step in range(1, 11):
                kernel.launch(4, 256, a, a, total, count, stream=stream, style=style)
                stream.synchronize()
                if not np.array_equal(total.to_numpy("i4"), 2 * values):
                    failures.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures


def test_borrowed_context_keeps_one_main_stream(program: gf.Program, device: Device) -> None:
    driver = device.driver
    handle = driver.cuCtxCreate(None, 0, device.handle)
    try:
        kernel = program.kernel("countdown")
        borrowed = gf.current_context(driver)
        assert borrowed is not None
        with borrowed.alloc(128) as buffer:
            for _ in range(3):
                kernel.launch(1, 32, buffer, 32)
            assert ints(buffer, 32) == list(range(32, 0, -1))
        assert gf.current_context(driver) is borrowed
        assert borrowed.kind == "borrowed"
        assert current(driver) == int(handle)
    finally:
        driver.cuCtxDestroy(handle)


def test_borrowed_context_is_a_new_one_where_another_took_its_place(
    program: gf.Program, device: Device
) -> None:
    driver = device.driver
    seen = []
    for _ in range(3):
        handle = driver.cuCtxCreate(None, 0, device.handle)
        borrowed = gf.current_context(driver)
        program.kernel("nothing").launch(1, 1)
        assert borrowed is not None
        borrowed.synchronize()
        seen.append(borrowed)
        driver.cuCtxDestroy(handle)

    assert len(set(map(id, seen))) == 3


class OtherLibrarysStream:
    """A stream as CuPy, PyTorch and cuda.core show theirs."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.address)


def test_another_librarys_stream(program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer) -> None:
    driver = context.driver
    with context:
        handle = driver.cuStreamCreate(1)
    stream = OtherLibrarysStream(int(handle))

    with context:
        program.kernel("countdown").launch(1, 32, buffer, 32, stream=stream)
        driver.cuStreamSynchronize(handle)
    assert ints(buffer, 32) == list(range(32, 0, -1))
    driver.cuStreamDestroy(handle)


def test_another_librarys_stream_decides_the_context(program: gf.Program, context: gf.Context) -> None:
    driver = context.driver
    with context:
        handle = driver.cuStreamCreate(1)

    with context.alloc(128) as buffer:
        program.kernel("countdown").launch(1, 32, buffer, 32, stream=OtherLibrarysStream(int(handle)))
        driver.cuStreamSynchronize(handle)
        assert ints(buffer, 32) == list(range(32, 0, -1))
    assert current(driver) == 0
    driver.cuStreamDestroy(handle)


def test_default_stream_of_another_library(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer
) -> None:
    kernel = program.kernel("countdown")

    with context:
        kernel.launch(1, 32, buffer, 32, stream=OtherLibrarysStream(0))
        context.synchronize()
    assert ints(buffer, 32) == list(range(32, 0, -1))
    with pytest.raises(gf.WrongContext, match="default stream of whatever context is current"):
        gf.Program(program._code, context.driver).kernel("nothing").launch(
            1, 1, stream=OtherLibrarysStream(0)
        )


def test_what_is_no_stream(program: gf.Program, context: gf.Context) -> None:
    with (
        context,
        pytest.raises(TypeError, match="expected a stream, or an object with __cuda_stream__, got int"),
    ):
        program.kernel("nothing").launch(1, 1, stream=5)


def test_current_context_stays_as_it_was_also_after_an_error(
    program: gf.Program, context: gf.Context, two_devices: list[Device]
) -> None:
    kernel = program.kernel("countdown")
    driver = context.driver
    other = two_devices[1].create_context()
    stream = context.main_stream
    with other.alloc(4) as wrong:
        with other:
            for arguments in ((), (wrong, 1), (None, "x"), (None, 1.5)):
                with pytest.raises(gf.GpufleetError):
                    kernel.launch(1, 1, *arguments, stream=stream)
                assert current(driver) == other.address
            with pytest.raises(gf.LaunchError):
                kernel.launch(0, 1, None, 1, stream=stream)
            assert current(driver) == other.address
        with pytest.raises(gf.GpufleetError):
            kernel.launch(1, 1, wrong, 1, stream=stream)
        assert current(driver) == 0
    other.close()


# Closed and faulty


def test_closed_context_stream_or_buffer(program: gf.Program, device: Device, context: gf.Context) -> None:
    kernel = program.kernel("countdown")
    closed = device.create_context()
    stream_of_closed, buffer_of_closed = closed.main_stream, closed.alloc(128)
    kernel.launch(1, 32, buffer_of_closed, 1, stream=stream_of_closed)
    closed.close()
    stream = context.stream()
    buffer = context.alloc(128)

    with pytest.raises(gf.ContextClosed):
        kernel.launch(1, 32, None, 1, stream=stream_of_closed)
    with pytest.raises(gf.ContextClosed):
        kernel.launch(1, 32, buffer_of_closed, 1, stream=stream)
    buffer.close()
    with pytest.raises(gf.ContextClosed, match="was closed; allocate another one"):
        kernel.launch(1, 32, buffer, 1, stream=stream)
    stream.close()
    with pytest.raises(gf.ContextClosed, match="was closed; create another stream"):
        kernel.launch(1, 32, None, 1, stream=stream)


def test_launch_is_known_until_its_stream_is_waited_for(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer
) -> None:
    stream = context.main_stream
    launches = context.driver.launches

    program.kernel("countdown").launch((1, 1, 1), (8, 4), buffer, 32, stream=stream)
    assert launches.suspects() == ("kernel 'countdown' with grid 1 and block (8, 4) on device 0",)
    stream.synchronize()

    assert launches.suspects() == ()


def test_refused_launch_is_no_suspect(program: gf.Program, context: gf.Context) -> None:
    with pytest.raises(gf.KernelArgumentError):
        program.kernel("countdown").launch(1, 1, None, "x", stream=context.main_stream)

    assert context.driver.launches.suspects() == ()


def test_fault_names_the_launch_and_refuses_the_next(image: bytes, virtual: Driver) -> None:
    program = gf.Program.from_image(image)
    context = Device(0, virtual).create_context()
    stream = context.main_stream

    program.kernel("fault").launch(3, 1, None, stream=stream)
    with pytest.raises(gf.StickyError) as caught:
        stream.synchronize()
    assert caught.value.launches == ("kernel 'fault' with grid 3 and block 1 on device 0",)
    with pytest.raises(gf.StickyError, match="kernel 'fault' with grid 3"):
        program.kernel("nothing").launch(1, 1, stream=stream)
    context.close()


def test_forked_child_is_told_so(image: bytes, virtual: Driver) -> None:
    program = gf.Program.from_image(image)
    context = Device(0, virtual).create_context()
    program.kernel("nothing").launch(1, 1, stream=context.main_stream)
    virtual.is_forked = virtual.is_lost = True
    try:
        with pytest.raises(gf.ForkedProcess, match="spawn"):
            program.kernel("nothing").launch(1, 1, stream=context.main_stream)
    finally:
        virtual.is_forked = virtual.is_lost = False
    context.close()


# Any signature


def copier(names: list[str]) -> tuple[str, list[int]]:
    """Return PTX that copies its parameters but the first to where that points, and their offsets."""
    types = parse(names)
    declarations, body, end = [".param .align 8 .u64 p0"], [], 8
    offsets = []
    for number, each in enumerate(types, 1):
        alignment = min(each.size & -each.size, 8)
        end = -(-end // alignment) * alignment
        offsets.append(end)
        declarations.append(f".param .align {alignment} .b8 p{number}[{each.size}]")
        for byte in range(each.size):
            body += [f"ld.param.u8 %r0, [p{number}+{byte}];", f"st.global.u8 [%rd0+{end + byte}], %r0;"]
        end += each.size
    text = "\n".join(
        [
            ".version 7.0\n.target sm_75\n.address_size 64",
            f".visible .entry copy({', '.join(declarations)}) {{",
            ".reg .b32 %r0; .reg .b64 %rd0;",
            "ld.param.u64 %rd0, [p0];",
            *body,
            "ret;\n}",
        ]
    )
    return text, offsets


@pytest.mark.parametrize("seed", range(12))
def test_any_signature_in_both_styles_and_bound(seed: int, context: gf.Context) -> None:
    chance = random.Random(seed)
    kinds = ["int8", "uint16", "int32", "uint64", "float32", "float64", "bytes[3]", "bytes[16]", "bytes[40]"]
    names = [chance.choice(kinds) for _ in range(chance.randint(1, 10))]
    values: list[Any] = []
    expected = bytearray(512)
    text, offsets = copier(names)
    for name, offset in zip(names, offsets, strict=True):
        size = parse(name)[0].size
        content = (
            chance.randbytes(size) if "float" not in name else struct.pack("<d", chance.random())[-size:]
        )
        expected[offset : offset + size] = content
        dtype = None if name.startswith("bytes") else np.dtype(name)
        values.append(content if dtype is None else np.frombuffer(content, dtype)[0])
    signature = ["pointer", *names]
    kernel = gf.Program.from_image(text, driver=context.driver).kernel("copy", signature=signature)
    as_python = [value.item() if isinstance(value, np.integer) else value for value in values]
    with context.alloc(512) as out, context.stream() as stream:
        for style in ("packed", "pointers"):
            bound = kernel.bind(1, 1, stream=stream, style=style)
            for launch in (bound, functools.partial(kernel.launch, 1, 1, stream=stream, style=style)):
                for given in (values, as_python):
                    out.fill(0, stream=stream)
                    launch(out, *given)
                    assert out.to_numpy("u1", stream=stream).result().tobytes() == expected, (style, names)


def test_bound_kernel_launches_and_refuses_as_launch_does(context: gf.Context, program: gf.Program) -> None:
    kernel = program.kernel("countdown")
    with context.alloc(128) as buffer:
        stream = context.stream()

        def first() -> int:
            return int(buffer.to_numpy("i4", stream=stream).result()[0])

        countdown = kernel.bind(1, 32, stream=stream)
        countdown(buffer, 7)
        assert first() == 7
        with pytest.raises(gf.KernelArgumentError, match="takes 2 parameters, but 1 was given"):
            countdown(buffer)
        with pytest.raises(gf.KernelArgumentError, match="parameter 1 of kernel 'countdown'"):
            countdown(buffer, 0.5)
        with pytest.raises(gf.LaunchError, match="style is 'other'"):
            kernel.bind(1, 32, stream=stream, style="other")
        with pytest.raises(gf.LaunchError, match="takes 1 to 1,024"):
            kernel.bind(1, 4096, stream=stream)
        with stream.capture() as graph:
            countdown(buffer, 9)
        stream.synchronize()
        assert first() == 7
        graph.launch(stream)
        assert first() == 9
        graph.close()
        stream.close()
        with pytest.raises(gf.ContextClosed):
            countdown(buffer, 7)
