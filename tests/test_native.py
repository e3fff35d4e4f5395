"""The launch in C gives the kernel what the one in Python does, and leaves to it what is not usual."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpufleet as gf
from gpufleet import native
from gpufleet.frame import Frame, Layout
from gpufleet.memory import DeviceBuffer
from gpufleet.signature import parse
from test_arguments import layout_of

extension = native.extension()
pytestmark = pytest.mark.skipif(extension is None, reason="the C extension was not built")

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_void_p),
)


class Recorder:
    """Stands for the driver's `cuLaunchKernel`: remembers what the last call was given."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.answer = 0
        self.calls: list[dict[str, Any]] = []
        self._callback = LAUNCH(self._launch)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value

    def _launch(self, function: int, *rest: Any) -> int:
        *sizes, stream, pointers, extra = rest
        seen = {"function": function, "sizes": tuple(sizes), "stream": stream}
        if pointers:
            table = zip(pointers, self.layout.table, strict=False)
            seen["values"] = [ctypes.string_at(pointer, size) for pointer, (_, size) in table]
        if extra:
            assert (extra[0], extra[2], extra[4]) == (1, 2, None)
            (size,) = ctypes.cast(extra[3], ctypes.POINTER(ctypes.c_size_t))[:1]
            seen["packed"] = ctypes.string_at(extra[1], size)
        self.calls.append(seen)
        return self.answer

    def launcher(self) -> Any:
        parameters = tuple(
            native._parameter(offset, size, each)
            for (offset, size), each in zip(self.layout.table, self.layout.conversions, strict=True)
        )
        return extension.Launcher(self.address, 0x123456789A, (1, 2, 3, 4, 5, 6, 7), parameters, DeviceBuffer)


def queue() -> Any:
    driver = SimpleNamespace(is_lost=False)
    context = SimpleNamespace(_closed=False, driver=driver, address=0x77)
    return SimpleNamespace(context=context, key=0x9900, address=0x9900, graph=None, _closed=False)


def in_python(layout: Layout, values: tuple[Any, ...], on: Any) -> bytes:
    frame = Frame(layout)
    layout.pack(frame.memory, on, values)
    return bytes(frame.memory[: layout.size])


INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Make values that fit a parameter: the usual ones, and those that only Python converts."""
    if "int" in name and name != "pointer":
        information = np.iinfo(name)
        numbers = st.integers(int(information.min), int(information.max))
        return numbers | numbers.map(np.dtype(name).type)
    if name.startswith("float"):
        width = int(name[5:])
        floats = st.floats(width=width)  # type: ignore[arg-type]
        return floats | floats.map(np.dtype(name).type) | st.integers(-2048, 2048)
    if name == "bfloat16":
        return st.floats(-1e30, 1e30)
    if name == "pointer":
        return st.none() | st.integers(0, (1 << 64) - 1)
    size = int(name[6:-1])
    return st.binary(min_size=size, max_size=size)


KINDS = [*INTEGERS, "float16", "float32", "float64", "bfloat16", "pointer", "bytes[3]", "bytes[16]"]


@st.composite
def launches(draw: st.DrawFn) -> tuple[list[str], tuple[Any, ...]]:
    names = draw(st.lists(st.sampled_from(KINDS), max_size=12))
    return names, tuple(draw(values_of(name)) for name in names)


@given(launches())
def test_any_signature_gives_the_same_bytes_in_both_styles(case: tuple[list[str], tuple[Any, ...]]) -> None:
    names, values = case
    layout = layout_of(parse(names))
    recorder, on = Recorder(layout), queue()
    launcher = recorder.launcher()

    assert launcher.launch(on, True, values) == 0
    assert launcher.launch(on, False, values) == 0

    packed, pointers = recorder.calls
    expected = in_python(layout, values, on)
    # Between the parameters nothing is promised.
    parts = [expected[offset : offset + size] for offset, size in layout.table]
    if names:
        got = [packed["packed"][offset : offset + size] for offset, size in layout.table]
        assert len(packed["packed"]) == layout.size
        assert (got, pointers["values"]) == (parts, parts)
    assert "values" not in packed
    assert "packed" not in pointers
    for call in recorder.calls:
        assert call["function"] == 0x123456789A
        assert call["sizes"] == (1, 2, 3, 4, 5, 6, 7)
        assert call["stream"] == 0x9900


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("int8", 128),
        ("uint32", -1),
        ("int64", 1 << 63),
        ("float32", 1e39),
        ("int32", 1.0),
        ("bytes[3]", b"1234"),
    ],
)
def test_value_that_does_not_fit_is_refused_as_in_python(name: str, value: Any) -> None:
    layout = layout_of(parse(name))
    recorder = Recorder(layout)
    with pytest.raises(gf.KernelArgumentError) as in_c:
        recorder.launcher().launch(queue(), True, (value,))
    with pytest.raises(gf.KernelArgumentError) as expected:
        in_python(layout, (value,), queue())
    assert str(in_c.value) == str(expected.value)
    assert recorder.calls == []


def test_nan_and_infinity_arrive() -> None:
    layout = layout_of(parse("float32, float64"))
    recorder = Recorder(layout)
    recorder.launcher().launch(queue(), True, (math.nan, -math.inf))
    assert recorder.calls[0]["packed"][:4] == np.float32(math.nan).tobytes()
    assert recorder.calls[0]["packed"][8:] == np.float64(-math.inf).tobytes()


def test_buffer_is_known_to_be_in_use(virtual: Any) -> None:
    context = gf.Device(0, virtual).create_context()
    with context.alloc(64) as buffer, context.stream() as stream:
        buffer.fill(0)
        layout = layout_of(parse("pointer"))
        recorder = Recorder(layout)
        recorder.launcher().launch(stream, True, (buffer,))
        assert recorder.calls[0]["packed"] == buffer.address.to_bytes(8, "little")
        assert recorder.calls[0]["stream"] == stream.address
        assert stream in buffer.uses.values()
    context.close()


class Twin:
    """Stands for the launch in Python."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> str:
        self.calls.append(arguments)
        return "in Python"


def bind(recorder: Recorder, on: Any) -> tuple[Any, Twin, deque[Any]]:
    twin, log = Twin(), deque[Any]()
    context = on.context
    kept = (itertools.count(5), log.append, "configuration")
    made = extension.Bound(
        recorder.launcher(), on, context, on.key, context.driver, on.address, True, *kept, twin
    )
    return made, twin, log


def test_bound_launch_is_noted() -> None:
    recorder = Recorder(layout_of(parse("int32, float32")))
    bound, twin, log = bind(recorder, queue())

    assert bound(1, 2.0) is None
    assert bound(2, 3) is None

    assert [call["packed"][:4] for call in recorder.calls] == [b"\1\0\0\0", b"\2\0\0\0"]
    assert list(log) == [(5, "configuration"), (6, "configuration")]
    assert twin.calls == []


@pytest.mark.parametrize(
    "change",
    [
        lambda on: setattr(on, "_closed", True),
        lambda on: setattr(on, "graph", object()),
        lambda on: setattr(on.context, "_closed", True),
        lambda on: setattr(on.context.driver, "is_lost", True),
    ],
    ids=["closed stream", "capture", "closed context", "lost driver"],
)
def test_bound_launch_that_is_not_usual_is_left_to_python(change: Any) -> None:
    recorder, on = Recorder(layout_of(parse("int32"))), queue()
    bound, twin, log = bind(recorder, on)
    change(on)
    assert bound(1) == "in Python"
    assert (twin.calls, recorder.calls, list(log)) == ([(1,)], [], [])


def test_bound_launch_that_fails_or_has_too_few_values_is_left_to_python() -> None:
    recorder = Recorder(layout_of(parse("int32")))
    bound, twin, log = bind(recorder, queue())
    recorder.answer = 1
    assert bound(1) == "in Python"
    assert bound() == "in Python"
    assert (twin.calls, len(recorder.calls), list(log)) == ([(1,), ()], 1, [])


def test_bound_launch_takes_no_keywords() -> None:
    bound, twin, _ = bind(Recorder(layout_of(parse("int32"))), queue())
    with pytest.raises(TypeError, match="keyword"):
        bound(1, stream=None)
    assert twin.calls == []


def test_bound_kernel_in_a_cycle_is_collected() -> None:
    on = queue()
    on.fast, _, _ = bind(Recorder(layout_of(parse("int32"))), on)
    on.witness = Twin()
    gone = weakref.ref(on.witness)
    del on
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("code", "offset", "size"), [("s", 2**31 - 1, 8), ("Q", 0, 16), ("s", 4090, 8)])
def test_parameter_beyond_the_buffer_is_refused(code: str, offset: int, size: int) -> None:
    parameter = (code, "-", offset, size, 0, 0, 0.0, int)
    with pytest.raises(ValueError, match=r"parameter beyond|more than 8"):
        extension.Launcher(1, 1, (1,) * 7, (parameter,), DeviceBuffer)


def test_kernel_with_more_parameters_than_c_takes_is_launched_in_python() -> None:
    layout = layout_of(parse(["int8"] * 257))
    driver: Any = SimpleNamespace(
        belongings={}, raw=SimpleNamespace(cuGetProcAddress=lambda *_: (0, 0x1234, 0))
    )
    assert (
        native.launcher(driver, layout, 1, SimpleNamespace(grid=(1,) * 3, block=(1,) * 3, shared=0)) is None
    )  # type: ignore[arg-type]


def test_driver_without_addresses_has_no_launcher(virtual: Any) -> None:
    assert native.address_of(virtual, "cuLaunchKernel") is None
