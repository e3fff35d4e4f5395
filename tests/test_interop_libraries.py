"""Round trips with the libraries themselves, on a real GPU: same memory, right values, right order.

Order is proven by a latch: a kernel that runs until the test opens it keeps the producer's stream busy, so
that a consumer which did not wait would read what was there before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.driver import Driver, get_driver
from latches import Latch

pytestmark = pytest.mark.gpu
COUNT = 1 << 20
VALUES = np.arange(COUNT, dtype="f4")


@pytest.fixture
def nvidia() -> Driver:
    return get_driver("nvidia")


@pytest.fixture(params=["primary", "created"])
def home(request: pytest.FixtureRequest, nvidia: Driver) -> Iterator[gf.Context]:
    """Return a context whose buffers are handed out; other libraries work in the primary one."""
    device = gf.devices(nvidia)[0]
    made = device.retain_primary_context() if request.param == "primary" else device.create_context()
    yield made
    made.close()


class Torch:
    """What the tests ask of a library."""

    def __init__(self) -> None:
        self.lib: Any = pytest.importorskip("torch")
        self.lib.cuda.init()
        self.lib.zeros(8, device="cuda")

    def take(self, array: Any) -> Any:
        return self.lib.from_dlpack(array)

    def zeros(self) -> Any:
        return self.lib.zeros(COUNT, dtype=self.lib.float32, device="cuda:0")

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def add(self, array: Any, other: Any, out: Any) -> None:
        self.lib.add(array, other, out=out)

    def numbers(self, array: Any) -> Any:
        return array.cpu().numpy()

    def stream(self) -> Any:
        return self.lib.cuda.Stream()

    def inside(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        found: contextlib.AbstractContextManager[Any] = self.lib.cuda.stream(stream)
        return found

    def wait(self) -> None:
        self.lib.cuda.synchronize()


class Cupy:
    def __init__(self) -> None:
        self.lib: Any = pytest.importorskip("cupy")
        self.lib.zeros(8)

    def take(self, array: Any) -> Any:
        return self.lib.asarray(array)

    def zeros(self) -> Any:
        return self.lib.zeros(COUNT, "f4")

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def add(self, array: Any, other: Any, out: Any) -> None:
        self.lib.add(array, other, out)

    def numbers(self, array: Any) -> Any:
        return self.lib.asnumpy(array)

    def stream(self) -> Any:
        return self.lib.cuda.Stream(non_blocking=True)

    def inside(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        found: contextlib.AbstractContextManager[Any] = stream
        return found

    def wait(self) -> None:
        self.lib.cuda.Device(0).synchronize()


class CupyByDlpack(Cupy):
    def take(self, array: Any) -> Any:
        return self.lib.from_dlpack(array)


LIBRARIES = [Torch, Cupy, CupyByDlpack]
ORDERING = [Torch, CupyByDlpack]
"""Those that let their stream wait; by the array interface, CuPy waits on the host."""


@pytest.fixture(params=LIBRARIES, ids=lambda each: each.__name__)
def library(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_out_and_back_is_the_same_memory(home: gf.Context, library: Any) -> None:
    with home.alloc(VALUES.nbytes) as buffer:
        array = buffer.view("f4")
        array.copy_from(VALUES)

        theirs = library.take(array)
        assert library.address(theirs) == array.address
        library.add(theirs, 1, theirs)
        back = gf.as_array(theirs)

        assert back.address == array.address
        assert back.buffer.context.device == home.device
        library.wait()
        assert (back.to_numpy() == VALUES + 1).all()
        assert (library.numbers(theirs) == VALUES + 1).all()
        back.buffer.close()
        del theirs, back


def test_in_and_out_is_the_same_memory(home: gf.Context, library: Any) -> None:
    theirs = library.zeros()
    mine = gf.as_array(theirs)
    assert mine.address == library.address(theirs)

    mine.copy_from(VALUES)
    again = library.take(mine)

    assert library.address(again) == library.address(theirs)
    assert (library.numbers(again) == VALUES).all()
    assert (library.numbers(theirs) == VALUES).all()
    with home.alloc(VALUES.nbytes) as buffer:
        buffer.copy_from(theirs)
        assert (buffer.to_numpy("f4") == VALUES).all()
        buffer.fill(0)
        buffer.copy_to(theirs)
    assert not library.numbers(theirs).any()
    mine.buffer.close()


@pytest.mark.parametrize("library", ORDERING, indirect=True, ids=lambda each: each.__name__)
def test_its_stream_waits_for_our_work(home: gf.Context, library: Any) -> None:
    with (
        home.alloc(VALUES.nbytes) as buffer,
        home.stream() as mine,
        gf.pinned(VALUES, context=home) as source,
    ):
        buffer.fill(0)
        out = library.zeros()
        library.add(library.take(buffer.view("f4")), 1, out)  # what is made at first use is made
        library.wait()
        stream = library.stream()

        with Latch(mine), library.inside(stream):
            buffer.copy_from(source, stream=mine)
            theirs = library.take(buffer.view("f4"))
            library.add(theirs, 1, out)

        library.wait()
        assert (library.numbers(out) == VALUES + 1).all()
        del theirs


def test_cupy_waits_for_our_work_on_the_host(home: gf.Context) -> None:
    cupy = Cupy()
    with (
        home.alloc(VALUES.nbytes) as buffer,
        home.stream() as mine,
        gf.pinned(VALUES, context=home) as source,
    ):
        buffer.fill(0)
        with Latch(mine) as latch:
            buffer.copy_from(source, stream=mine)
            opener = threading.Timer(0.2, latch.open)
            opener.start()
            theirs = cupy.take(buffer.view("f4"))
            assert mine.query(), "the latch was still closed: it did not wait"
            opener.join()
        assert (cupy.numbers(theirs) == VALUES).all()
        del theirs


def test_we_wait_for_its_work(home: gf.Context, library: Any) -> None:
    theirs, ones = library.zeros(), library.zeros()
    library.add(ones, 1, ones)
    library.add(theirs, theirs, theirs)  # what is made at first use is made
    library.wait()
    stream = library.stream()
    gf.as_array(theirs).buffer.close()
    wrapped = gf.as_stream(stream)

    with home.stream() as mine, home.alloc(VALUES.nbytes) as buffer, home.stream() as other:
        with Latch(wrapped), library.inside(stream):
            library.add(theirs, ones, theirs)
            array = gf.as_array(theirs, stream=mine)
            transfer = array.to_numpy(stream=mine)
            buffer.copy_from(theirs, stream=other)
            assert not transfer.query()
        assert (transfer.result() == 1).all()
        other.synchronize()
        assert (buffer.to_numpy("f4") == 1).all()
        array.buffer.close()


def test_its_stream_is_taken(home: gf.Context, library: Any) -> None:
    if home.kind != "primary":
        pytest.skip("its streams are of the primary context")
    stream = library.stream()
    with home.alloc(64) as buffer:
        filled = buffer.fill(1, stream=stream)
        assert filled is not None
        filled.synchronize()
        assert (buffer.to_numpy() == 1).all()


def test_memory_outlives_its_buffer(home: gf.Context) -> None:
    torch = Torch()
    buffer = home.alloc(VALUES.nbytes)
    buffer.copy_from(VALUES)
    theirs = torch.take(buffer.view("f4"))
    buffer.close()
    with home.alloc(VALUES.nbytes) as other:
        other.fill(0)
        assert (torch.numbers(theirs) == VALUES).all()
    del theirs


def test_on_the_second_device(nvidia: Driver, library: Any) -> None:
    if len(gf.devices(nvidia)) < 2:
        pytest.skip("needs two devices")
    context = gf.devices(nvidia)[1].retain_primary_context()
    with context.alloc(VALUES.nbytes) as buffer:
        buffer.copy_from(VALUES)
        theirs = library.take(buffer.view("f4"))
        assert (str(getattr(theirs, "device", "")).find("1")) >= 0
        assert (library.numbers(theirs) == VALUES).all()
        back = gf.as_array(theirs)
        assert back.buffer.context.device.ordinal == 1
        back.buffer.close()
        del theirs, back
    context.close()


def test_numba(home: gf.Context) -> None:
    cuda: Any = pytest.importorskip("numba.cuda")
    with home.alloc(VALUES.nbytes) as buffer:
        buffer.copy_from(VALUES)
        theirs = cuda.as_cuda_array(buffer.view("f4"))
        assert theirs.__cuda_array_interface__["data"][0] == buffer.address
        assert (theirs.copy_to_host() == VALUES).all()

        made = cuda.to_device(VALUES * 2)
        mine = gf.as_array(made)
        assert mine.address == made.__cuda_array_interface__["data"][0]
        assert (mine.to_numpy() == VALUES * 2).all()
        mine.buffer.close()
        del theirs


def test_numba_waits_for_our_work_and_we_for_its(home: gf.Context) -> None:
    cuda: Any = pytest.importorskip("numba.cuda")
    made = cuda.device_array(COUNT, "f4")
    stream = cuda.stream()
    made.copy_to_device(VALUES)
    with (
        home.alloc(VALUES.nbytes) as buffer,
        home.stream() as mine,
        gf.pinned(VALUES, context=home) as source,
    ):
        buffer.fill(0)
        with Latch(mine):
            buffer.copy_from(source, stream=mine)
            interface = buffer.view("f4").__cuda_array_interface__
            assert interface["stream"] == mine.address  # by which numba waits
        theirs = cuda.as_cuda_array(buffer.view("f4"))
        assert (theirs.copy_to_host() == VALUES).all()
        with Latch(gf.as_stream(stream)):
            made.copy_to_device(theirs, stream=stream)
        del theirs


def test_cuda_core(home: gf.Context) -> None:
    core: Any = pytest.importorskip("cuda.core")
    utils: Any = pytest.importorskip("cuda.core.utils")
    device = core.Device(0)
    device.set_current()
    try:
        stream = device.create_stream()
        with home.alloc(VALUES.nbytes) as buffer:
            array = buffer.view("f4")
            array.copy_from(VALUES)
            seen = utils.StridedMemoryView.from_any_interface(array, stream_ptr=int(stream.handle))
            assert (seen.ptr, seen.shape, seen.device_id) == (array.address, (COUNT,), 0)

            theirs = device.allocate(VALUES.nbytes, stream=stream)
            mine = gf.as_array(theirs)
            assert mine.address == int(theirs.handle)
            buffer.copy_to(mine)
            assert (mine.to_numpy().view("f4") == VALUES).all()
            mine.buffer.close()
            if home.kind == "primary":
                filled = buffer.fill(0, stream=stream)
                assert filled is not None
                filled.synchronize()
            del seen
            theirs.close(stream)
        stream.close()
    finally:
        nvidia = home.driver
        nvidia.cuCtxSetCurrent(0)


@pytest.fixture(autouse=True)
def nothing_stays_current(nvidia: Driver) -> Iterator[None]:
    """Other libraries leave the primary context current."""
    yield
    nvidia.cuCtxSetCurrent(0)
