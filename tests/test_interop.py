"""Arrays and streams of other libraries, taken and handed out. See also test_interop_libraries.py."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver
from latches import Latch

VALUES = np.arange(24, dtype="f4").reshape(4, 6)


class ByDlpack:
    """An array that another library shows by DLPack alone."""

    def __init__(self, array: Any, versioned: bool = True) -> None:
        self.array, self.versioned = array, versioned
        self.owner: Any = None

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    def __dlpack__(self, **how: Any) -> Any:
        if not self.versioned and "max_version" in how:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**how)


class ByInterface:
    """An array that another library shows by `__cuda_array_interface__`."""

    def __init__(self, array: Any, **other: Any) -> None:
        self.array, self.other = array, other
        self.owner: Any = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.array.__cuda_array_interface__, **self.other}


class ForeignStream:
    """A stream as other libraries have them."""

    def __init__(self, stream: gf.Stream) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.stream.address)


WAYS: list[Any] = [ByDlpack, lambda array: ByDlpack(array, versioned=False), ByInterface]


@pytest.mark.parametrize("way", WAYS, ids=["dlpack 1", "dlpack 0", "interface"])
def test_an_array_goes_out_and_comes_back_as_the_same_memory(context: gf.Context, way: Any) -> None:
    with context.alloc(128) as buffer:
        array = buffer.view("f4", (4, 6), offset=16)
        array.copy_from(VALUES)

        back = gf.as_array(way(array), context=context)

        assert back.address == array.address == buffer.address + 16
        assert (back.shape, back.dtype, back.strides) == ((4, 6), np.dtype("f4"), (24, 4))
        assert back.buffer.context.device == context.device
        assert (back.to_numpy() == VALUES).all()
        back.buffer.close()


@pytest.mark.parametrize("way", WAYS, ids=["dlpack 1", "dlpack 0", "interface"])
def test_copies_take_arrays_of_other_libraries(context: gf.Context, way: Any) -> None:
    with context.alloc(96) as there, context.alloc(128) as here, context.stream() as stream:
        theirs = there.view("f4", (4, 6))
        theirs.copy_from(VALUES)

        here.copy_from(way(theirs), offset=32)
        assert (here.view("f4", offset=32).to_numpy().reshape(4, 6) == VALUES).all()

        here.fill(0, stream=stream)
        transfer = here.copy_to(way(theirs), offset=0, stream=stream)
        assert transfer is not None
        transfer.synchronize()
        assert not theirs.to_numpy().any()
        assert here.copy_to(there) is None


def test_a_view_is_an_argument_of_a_kernel(context: gf.Context) -> None:
    source = 'extern "C" __global__ void fill(float *to) { to[threadIdx.x] = threadIdx.x; }'
    kernel = gf.Program.from_source(source, driver=context.driver).kernel("fill")
    with context.alloc(256) as buffer, context.stream() as stream:
        array = buffer.view("f4", 32, offset=128)
        kernel.launch(1, 32, array, stream=stream)
        stream.synchronize()
        assert array.to_numpy().tolist() == list(range(32))
        assert list(buffer.uses) == [stream.key], "noted as a user, and not as shared with another library"


def test_managed_memory_goes_out(context: gf.Context) -> None:
    with context.alloc_managed(96) as managed:
        managed.array[:] = VALUES.view("u1").ravel()
        with context.alloc(96) as buffer:
            buffer.copy_from(managed)
            assert (buffer.to_numpy("f4", (4, 6)) == VALUES).all()


def test_strides_are_kept(context: gf.Context) -> None:
    with context.alloc(96) as buffer:
        array = buffer.view("f4", (4, 6))
        turned = gf.DeviceArray(buffer, array.dtype, (6, 4), (4, 24))

        for way in WAYS:
            back = gf.as_array(way(turned), context=context)
            assert (back.strides, back.is_contiguous, back.buffer.nbytes) == ((4, 24), False, 96)
            back.buffer.close()
        with pytest.raises(ValueError, match="not C-contiguous"):
            turned.to_numpy()
        with pytest.raises(ValueError, match="not C-contiguous"):
            buffer.copy_from(turned)


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "u8", "f2", "f8", "c8", "c16"])
def test_types_are_kept(context: gf.Context, dtype: str) -> None:
    with context.alloc(64) as buffer:
        for way in WAYS:
            back = gf.as_array(way(buffer.view(dtype)), context=context)
            assert back.dtype == np.dtype(dtype)
            back.buffer.close()


def test_memory_that_another_library_took_outlives_its_buffer(context: gf.Context) -> None:
    buffer = context.alloc(96)
    buffer.copy_from(VALUES)
    taken = gf.as_array(ByDlpack(buffer.view("f4")), context=context)
    address = buffer.address
    buffer.close()

    with context.alloc(96) as other:
        assert other.address != address, "the memory is in use"
        assert (taken.to_numpy() == VALUES.ravel()).all()

    assert address in context.heap.live
    del taken
    gc.collect()
    context.synchronize()
    context.trim_memory()
    assert address not in context.heap.live


def test_a_dropped_array_that_was_shared_is_no_leak(context: gf.Context) -> None:
    array = context.alloc(96).view("f4")
    taken = ByInterface(array)
    assert taken.__cuda_array_interface__["data"][0] == array.address

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del array, taken
        gc.collect()
    context.alloc(16).close()
    assert not context.heap.live


def test_shared_memory_is_freed_behind_work_of_other_streams(device: Device, context: gf.Context) -> None:
    with context.stream() as theirs, context.alloc(96) as keeper, Latch(theirs):
        keeper.fill(1, stream=theirs)  # a stream that the buffer below knows nothing of
        buffer = context.alloc(4096)
        address = buffer.address
        buffer.share()
        buffer.close()

        with context.alloc(4096) as next_one:
            assert next_one.address != address, "the memory of a shared buffer was reused under a kernel"


def test_shared_memory_that_is_closed_in_another_librarys_capture_is_freed_after_it(
    context: gf.Context,
) -> None:
    from cuda.bindings.driver import CUstreamCaptureMode

    driver, relaxed = context.driver, CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with context.stream() as theirs:
        buffer = context.alloc(96)
        address = buffer.address
        buffer.share()
        driver.cuStreamBeginCapture(theirs.handle, relaxed)
        buffer.close()
        with pytest.raises(gf.CudaError, match="STREAM_CAPTURE_INVALIDATED"):  # as docs/interop.md warns
            driver.cuStreamEndCapture(theirs.handle)
        assert address in context.heap.live
        context.trim_memory()
        assert address not in context.heap.live


def test_a_context_is_closed_while_a_dropped_array_waits_to_be_let_go(device: Device) -> None:
    context = device.create_context()
    with context.alloc(96) as buffer:
        array = gf.as_array(ByDlpack(buffer), context=context)
    del array
    context.close()


def test_memory_of_a_stream_that_was_closed_is_handed_out(context: gf.Context) -> None:
    with context.stream() as stream, Latch(stream):
        buffer = context.alloc(96, stream=stream)  # not ready before the latch is open
    assert stream.is_closed

    with buffer:
        assert gf.as_array(ByDlpack(buffer), context=context).address == buffer.address


def test_the_consumers_stream_waits_for_work_on_the_buffer(context: gf.Context) -> None:
    with context.stream() as mine, context.stream() as theirs, context.alloc(96) as buffer:
        with Latch(mine):
            buffer.fill(7, stream=mine)
            interface = buffer.__cuda_array_interface__
            capsule = buffer.__dlpack__(stream=theirs.address)
            assert interface["stream"] == mine.address
            assert not theirs.query(), "the consumer's stream has to wait"
        theirs.synchronize()
        del capsule


def test_a_producers_stream_is_waited_for(context: gf.Context) -> None:
    with context.stream() as theirs, context.stream() as mine, context.alloc(96) as buffer:
        with Latch(theirs):
            buffer.fill(9, stream=theirs)
            array = ByInterface(buffer.view(), stream=theirs.address)
            taken = gf.as_array(array, stream=mine)
            transfer = taken.to_numpy(stream=mine)
            assert not mine.query(), "the copy must come after the producer's fill"
        assert (transfer.result() == 9).all()
        taken.buffer.close()


def test_a_foreign_stream_is_taken_wherever_a_stream_is(context: gf.Context) -> None:
    with context.stream() as theirs, context.alloc(96) as buffer:
        foreign: Any = ForeignStream(theirs)
        with Latch(theirs):
            transfer = buffer.copy_from(VALUES, stream=foreign)
            read = buffer.to_numpy("f4", (4, 6), stream=foreign)
            assert transfer is not None
            assert not transfer.query()
        assert (read.result() == VALUES).all()
        with context.alloc(64, stream=foreign) as second:
            filled = second.fill(3, stream=foreign)
            assert filled is not None
            filled.synchronize()


def test_foreign_stream_whose_owner_dies_first_is_kept_alive_and_never_destroyed(context: gf.Context) -> None:
    with context.stream() as theirs:
        owner = ForeignStream(theirs)
        wrapped = gf.as_stream(owner, context.driver)
        del owner
        gc.collect()

        wrapped.close()
        assert wrapped.__cuda_stream__() == (0, theirs.address)
        assert wrapped.record().query() in (True, False)
        del wrapped
        gc.collect()
        theirs.synchronize()  # it is there still


def test_a_stream_of_another_context_is_refused_by_name(device: Device, context: gf.Context) -> None:
    other = device.create_context()
    with other.stream() as theirs, context.alloc(96) as buffer:
        foreign: Any = ForeignStream(theirs)
        with pytest.raises(gf.WrongContext, match=r"is of context .* wrap it with gpufleet\.as_stream"):
            buffer.fill(0, stream=foreign)
        filled = buffer.fill(0, stream=gf.as_stream(foreign, context.driver))
        assert filled is not None
        filled.synchronize()
    other.close()


def test_hosts_arrays_and_others_are_refused(context: gf.Context) -> None:
    with pytest.raises(TypeError, match="expected a GPU array of another library, got ndarray"):
        gf.as_array(VALUES, context=context)
    with pytest.raises(TypeError, match="got int"):
        gf.as_array(3, context=context)


def test_dlpack_refuses_what_it_does_not_allow(context: gf.Context) -> None:
    with context.alloc(96) as buffer:
        with pytest.raises(ValueError, match="stream=0 is not allowed"):
            buffer.__dlpack__(stream=0)
        with pytest.raises(BufferError, match=r"cannot be handed out as memory of DLPack device \(1, 0\)"):
            buffer.__dlpack__(dl_device=(1, 0))
    with pytest.raises(gf.ContextClosed):
        buffer.__dlpack__()


def test_a_copy_is_other_memory(context: gf.Context) -> None:
    class Copying(ByDlpack):
        def __dlpack__(self, **how: Any) -> Any:
            return super().__dlpack__(copy=True, **how)

    with context.alloc(96) as buffer:
        buffer.copy_from(VALUES)
        copied = gf.as_array(Copying(buffer.view("f4", (4, 6))), context=context)
        assert copied.address != buffer.address
        assert (copied.to_numpy() == VALUES).all()
        copied.buffer.close()


def test_shapes_that_do_not_fit_are_refused(context: gf.Context) -> None:
    with context.alloc(10) as buffer:
        assert buffer.view("u1", (2, -1)).shape == (2, 5)
        with pytest.raises(ValueError, match="no whole number"):
            buffer.view("f4")
        with pytest.raises(ValueError, match="do not fit"):
            buffer.view("f4", 3)
        with pytest.raises(ValueError, match="Python objects"):
            buffer.view(object)
        with pytest.raises(ValueError, match="the shape"):
            buffer.view("u1", (-2,))


def test_a_capsule_that_outlives_the_interpreter_is_harmless(virtual: Driver) -> None:
    code = """
import gpufleet as gf, sys
context = gf.devices("virtual")[0].create_context()
buffer = context.alloc(64)
sys.kept = [buffer.__dlpack__(stream=-1), gf.as_array(buffer.view())]   # dies with the interpreter
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("way", WAYS, ids=["dlpack 1", "dlpack 0", "interface"])
def test_a_dropped_source_is_kept_until_it_is_copied(context: gf.Context, way: Any) -> None:
    with context.stream() as stream, context.alloc(96) as there, context.alloc(96) as here:
        source = ByInterface(there.view(), stream=None)
        source.owner = Owner()
        gone = weakref.ref(source.owner)
        if way is not ByInterface:  # whoever has the capsule has the array, and that the owner
            source = way(gf.as_array(source, context=context))
        with Latch(stream):
            here.copy_from(source, stream=stream)
            del source
            gc.collect()
            assert gone() is not None, "its library may reuse the memory under the copy"
        context.synchronize()
        here.fill(0, stream=stream).synchronize()  # looks what is complete
        assert gone() is None


class Owner:
    pass


def test_memory_that_was_lent_to_a_closed_context_does_not_hold_up_others(device: Device) -> None:
    closed, context = device.create_context(), device.create_context()
    with context.alloc(96) as buffer:
        theirs = ByInterface(buffer.view(), stream=None)
        with closed.stream() as stream, Latch(stream):
            lent = gf.as_array(theirs, stream=stream)
            lent.copy_from(VALUES, stream=stream)
            lent.buffer.close()
        closed.close()
        gf.as_array(theirs, context=context).buffer.close()
    context.close()


def test_a_copy_waits_for_what_is_being_written(context: gf.Context) -> None:
    class Copying(ByDlpack):
        def __dlpack__(self, **how: Any) -> Any:
            return super().__dlpack__(copy=True, **how)

    with context.stream() as mine, context.stream() as theirs, context.alloc(96) as buffer:
        buffer.fill(0)
        with Latch(mine):
            buffer.fill(7, stream=mine)
            copied = gf.as_array(Copying(buffer), stream=theirs)
        theirs.synchronize()
        assert (copied.to_numpy() == 7).all()
        copied.buffer.close()


def test_a_copy_of_what_is_not_contiguous_is_refused(context: gf.Context) -> None:
    with context.alloc(96) as buffer, pytest.raises(BufferError, match="not C-contiguous"):
        gf.DeviceArray(buffer, np.dtype("f4"), (6, 4), (4, 24)).__dlpack__(copy=True)


def test_read_only_memory_stays_read_only(context: gf.Context) -> None:
    with context.alloc(96) as buffer:
        view = buffer.view("f4")
        array = gf.as_array(ByInterface(view, data=(view.address, True)), context=context)
        assert array.is_read_only
        for write in (
            lambda: array.copy_from(VALUES),
            lambda: array.buffer.fill(0),
            lambda: view.copy_to(array),
            lambda: buffer.copy_to(array.buffer),
        ):
            with pytest.raises(ValueError, match="is read-only memory of another library"):
                write()
        assert array.__cuda_array_interface__["data"] == (view.address, True)
        with pytest.raises(BufferError):
            array.__dlpack__()
        if np.lib.NumpyVersion(np.__version__) >= "2.1.0":  # from there on capsules can say so
            assert gf.as_array(ByDlpack(array), context=context).is_read_only
        array.buffer.close()


def test_part_of_a_buffer_is_copied_whole_and_alone(context: gf.Context) -> None:
    with context.alloc(64) as buffer, context.alloc(64) as other:
        buffer.fill(0)
        array = buffer.view("u1", 8, offset=8)
        nameless = ByDlpack(other.view("u1", 16))  # tells no size but in its capsule
        for wrong in (b"1" * 16, bytearray(7), [1, 2], nameless, other.view("u1", 7)):
            with pytest.raises(ValueError, match="bytes cannot be copied from or to"):
                array.copy_from(wrong)
        for small in (bytearray(16), nameless, other):
            with pytest.raises(ValueError, match="bytes cannot be copied from or to"):
                array.copy_to(small)
        assert not buffer.to_numpy().any()
        array.copy_from(b"\1" * 8)
        assert buffer.to_numpy().tolist() == [0] * 8 + [1] * 8 + [0] * 48


def test_host_tensor_of_a_library_that_has_gpu_ones_too_is_a_host_array(context: gf.Context) -> None:
    class HostTensor:
        """As PyTorch's: the type has the interface, this tensor has not, nor the buffer protocol."""

        def __init__(self, array: Any) -> None:
            self.array = array

        @property
        def __cuda_array_interface__(self) -> Any:
            raise AttributeError("Can't get __cuda_array_interface__ on non-CUDA tensor type")

        def __array__(self, *given: Any, **how: Any) -> Any:
            return self.array

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **how: Any) -> Any:
            return self.array.__dlpack__(**how)

    with context.alloc(96) as buffer:
        buffer.copy_from(HostTensor(VALUES))
        back = np.zeros_like(VALUES)
        buffer.copy_to(HostTensor(back))
        assert (back == VALUES).all()


@pytest.mark.parametrize(
    "nonsense",
    [
        {"shape": None},
        {"shape": (-3,)},
        {"shape": (1.5,)},
        {"strides": (4, 4)},
        {"typestr": "zz"},
        {"typestr": "|O8"},
        {"data": None},
        {"data": (0, False)},
        {"stream": 0},
        {"stream": "x"},
        {"mask": "nothing"},
    ],
    ids=str,
)
def test_nonsense_of_an_interface_is_refused(context: gf.Context, nonsense: dict[str, Any]) -> None:
    with context.alloc(64) as buffer:
        array = ByInterface(buffer.view(), **nonsense)
        why = "makes no sense|not allowed|has no memory|Python objects|mask"
        with pytest.raises(ValueError, match=why):
            gf.as_array(array, context=context)
        with pytest.raises(ValueError, match=why):
            buffer.copy_from(array)


def test_fields_are_kept(context: gf.Context) -> None:
    with context.alloc(64) as buffer:
        pairs = buffer.view([("a", "i4"), ("b", "f8")], 5)
        back = gf.as_array(ByInterface(pairs), context=context)
        assert (back.dtype, back.shape) == (pairs.dtype, (5,))
        back.buffer.close()
        with pytest.raises(BufferError):  # DLPack has no fields
            pairs.__dlpack__()


def test_lengths_are_integers_of_any_kind(context: gf.Context) -> None:
    with context.alloc(64) as buffer:
        assert buffer.view("f4", np.int64(4)).shape == (4,)
        assert all(type(each) is int for each in buffer.view("f4", (np.int64(4), -1)).shape)
        assert buffer.view("u1", 4, offset=np.int64(8)).address == buffer.address + 8
        with pytest.raises(TypeError, match="float"):
            buffer.view("f4", (2.0, 2))
        with pytest.raises(ValueError, match="from byte 68 on do not fit"):
            buffer.view("f4", offset=68)
        with pytest.raises(ValueError, match="have no bytes"):
            buffer.view("S0", 3)


def test_capsules_of_many_threads_share_one_loan(context: gf.Context) -> None:
    for _ in range(50):
        buffer = context.alloc(96)
        buffer.copy_from(VALUES)
        address, capsules = buffer.address, []
        go = threading.Barrier(4)

        def take(buffer: gf.DeviceBuffer = buffer, go: Any = go, capsules: Any = capsules) -> None:
            go.wait()
            capsules.append(buffer.__dlpack__(stream=-1))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        buffer.close()
        while capsules:
            assert address in context.heap.live, "freed while a capsule has it"
            capsules.pop()
        context.trim_memory()
        assert address not in context.heap.live


def test_exports_and_imports_in_a_loop_leave_nothing(context: gf.Context) -> None:
    with context.alloc(96) as buffer:
        for _ in range(1000):
            gf.as_array(ByDlpack(buffer), context=context)
            buffer.__dlpack__(stream=-1)  # never consumed
        context.synchronize()
    context.alloc(16).close()
    context.trim_memory()
    assert not context.heap.live


def test_dropped_arrays_are_let_go_without_more_ado(context: gf.Context) -> None:
    with context.alloc(96) as buffer, context.stream() as stream:
        theirs = ByInterface(buffer.view(), stream=None)
        theirs.owner = Owner()
        gone = weakref.ref(theirs.owner)
        array = gf.as_array(theirs, context=context)
        array.to_numpy()
        del array, theirs
        assert gone() is None, "no work uses it"

        theirs = ByInterface(buffer.view(), stream=None)
        theirs.owner = Owner()
        gone = weakref.ref(theirs.owner)
        array = gf.as_array(theirs, context=context)
        with Latch(stream):
            array.copy_from(VALUES, stream=stream)
            del array, theirs
            gf.as_array(ByInterface(buffer.view(), stream=None), context=context)
            assert gone() is not None
        context.synchronize()
        assert gone() is None


def test_memory_that_came_back_is_still_its_buffers(context: gf.Context) -> None:
    with context.alloc(96) as buffer, context.stream() as stream:
        back = gf.as_array(ByInterface(buffer.view(), stream=None), context=context)
        back.copy_from(VALUES, stream=stream)
        back.buffer.close()
        context.synchronize()
        assert buffer.address in context.heap.live


def test_a_default_stream_is_that_of_its_own_context_whatever_is_current(device: Device) -> None:
    class Default:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 0)

    context, other = device.create_context(), device.create_context()
    with context:
        stream = gf.as_stream(Default())
    with context.alloc(4096) as buffer, other.stream() as later:
        kernel = gf.Program.from_source(
            'extern "C" __global__ void fill(char *to) { to[threadIdx.x] = 2; }', driver=context.driver
        ).kernel("fill")
        kernel.load(context)
        with Latch(stream), other:
            transfer = buffer.fill(1, stream=stream)
            kernel.launch(1, 32, buffer, stream=stream)
            read = buffer.to_numpy(stream=stream)
            later.wait(stream.record())
            assert [each.query() for each in (stream, transfer, read, later)] == [False] * 4
        assert read.result().tolist() == [2] * 32 + [1] * 4064
        assert buffer.copy_from(b"1234", stream=Default()).result() is None
        with context.alloc(4, stream=Default()) as second:
            second.fill(0, stream=Default()).synchronize()
    context.close()
    other.close()


def test_an_array_that_is_dropped_after_a_launch_is_kept_until_the_kernel_is_done(
    context: gf.Context,
) -> None:
    kernel = gf.Program.from_source(
        'extern "C" __global__ void fill(char *to) { to[threadIdx.x] = 2; }', driver=context.driver
    ).kernel("fill")
    kernel.load(context)
    with context.stream() as stream, context.alloc(96) as buffer:
        theirs = ByInterface(buffer.view(), stream=None)
        theirs.owner = Owner()
        gone = weakref.ref(theirs.owner)
        with Latch(stream):
            kernel.launch(1, 32, theirs, stream=stream)
            del theirs
            gc.collect()
            assert gone() is not None, "its library may reuse the memory under the kernel"
        stream.synchronize()
        assert gone() is None
