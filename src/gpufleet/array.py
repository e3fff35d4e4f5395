"""Which elements are in this memory? Typed arrays in device memory, for other libraries to take over."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpufleet.dlpack import CUDA, capsule_of
from gpufleet.host_view import array_over

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike

    from gpufleet.memory import DeviceBuffer
    from gpufleet.stream import Stream
    from gpufleet.transfer import Transfer


class DeviceArray:
    """Elements of one type in a device buffer. Made by `DeviceBuffer.view` and `as_array`.

    It computes nothing: it says where which elements are. CuPy, PyTorch, Numba and cuda.core take it for
    one of their arrays without a copy, by ``__cuda_array_interface__`` (``cupy.asarray(array)``) or DLPack
    (``torch.from_dlpack(array)``), and it fits the pointer parameters of kernels.

    What was taken by DLPack stays valid when the buffer is closed: its memory is then freed when the other
    library drops it. What was taken by ``__cuda_array_interface__`` is not; it keeps this object, so do
    not close the buffer before it is done. In both cases the memory is freed behind all work that the
    device has been given by then, since gpufleet does not know the other library's streams.

    Attributes
    ----------
    buffer : DeviceBuffer
    dtype : numpy.dtype
    shape : tuple of int
    strides : tuple of int
        Bytes from one element to the next, for each axis.
    address : int
        Of the first element.
    """

    def __init__(
        self,
        buffer: DeviceBuffer,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> None:
        self.buffer = buffer
        self.dtype = dtype
        self.shape = shape
        self.strides = _c_strides(shape, dtype.itemsize) if strides is None else strides
        self.address = buffer.address + offset

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one behind the other, in C's order."""
        return lies_in_order(self.shape, self.strides, self.dtype.itemsize)

    @property
    def is_read_only(self) -> bool:
        """Whether its library forbids to write it. Kernels are the caller's business."""
        return self.buffer.is_read_only

    def copy_from(self, source: Any, *, stream: Stream | None = None) -> Transfer | None:
        """Copy an array of the same size in bytes into this one, as `DeviceBuffer.copy_from` does."""
        return self.buffer.copy_into(self, source, stream)

    def copy_to(self, target: Any, *, stream: Stream | None = None) -> Transfer | None:
        """Copy this array into one of the same size in bytes, as `DeviceBuffer.copy_to` does."""
        return self.buffer.copy_out_of(self, target, stream)

    def to_numpy(self, *, stream: Stream | None = None) -> Any:
        """Return the elements as a new NumPy array, or, with `stream`, a `Transfer` whose result it is."""
        import numpy as np

        array = np.empty(self.shape, self.dtype)
        transfer = self.copy_to(array, stream=stream)
        return array if transfer is None else transfer

    @property
    def offset(self) -> int:
        """The byte of the buffer at which the elements begin, one behind the other.

        Raises
        ------
        ValueError
            If they are not C-contiguous.
        """
        if not self.is_contiguous:
            raise ValueError(f"{self!r} is not C-contiguous: copy its buffer, or one row after the other")
        return self.address - self.buffer.address

    def check_size(self, nbytes: int) -> None:
        """Raise `ValueError` if the array does not have exactly so many bytes."""
        if nbytes != self.nbytes:
            raise ValueError(f"{nbytes} bytes cannot be copied from or to {self!r}, of {self.nbytes} bytes")

    # For other libraries

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.address, self.is_read_only),
            "strides": None if self.is_contiguous else self.strides,
            "stream": self.buffer.share(),
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (kDLCUDA, ordinal)."""
        return (CUDA, self.buffer.context.device.ordinal)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule, https://data-apis.org/array-api/latest/API_specification/generated/array_api.array.__dlpack__.html.

        Parameters
        ----------
        stream : int
            The consumer's stream, which then waits for the work that uses the buffer now: None or 1 is the
            legacy default stream, 2 the per-thread one, -1 means that nothing waits.
        max_version : tuple of int
            The newest version of DLPack that the consumer knows. None: one before 1.0.
        dl_device : tuple of int
            Must be this one's.
        copy : bool
            True: of a copy.

        Raises
        ------
        ValueError
            If `stream` is 0, which is not allowed, or no stream at all.
        BufferError
            If it is to be of another device, or a copy of what is not C-contiguous; if its elements are of a
            type that DLPack does not have; or if it is read-only, and `max_version` is before 1.0.
        """
        consumer = _consumer(stream)
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"{self!r} cannot be handed out as memory of DLPack device {dl_device}")
        if copy:
            return self._copy().__dlpack__(stream=consumer, max_version=max_version)
        self.buffer.share_in(consumer)
        return capsule_of(_stand_in(self), self.__dlpack_device__(), max_version)

    def _copy(self) -> DeviceArray:
        if not self.is_contiguous:
            raise BufferError(f"{self!r} is not C-contiguous, so no copy of it is handed out")
        context = self.buffer.context
        made = DeviceArray(context.alloc(max(self.nbytes, 1)), self.dtype, self.shape)
        self.buffer.precede(context.main_stream.handle)
        self.copy_to(made, stream=context.main_stream)
        return made

    def __repr__(self) -> str:
        return f"<DeviceArray {self.shape} {self.dtype} at {self.address:#x} of {self.buffer.context!r}>"


def _consumer(stream: Any) -> int:
    """Return the stream that DLPack's argument means, -1 for none."""
    number = 1 if stream is None else operator.index(stream)
    if number == 0:
        raise ValueError("stream=0 is not allowed by DLPack: give 1 for the default stream")
    if not -1 <= number < 1 << 64:
        raise ValueError(f"stream={number} is no stream of DLPack: expected a stream's address, 1, 2 or -1")
    return number


def _stand_in(array: DeviceArray) -> np.ndarray[Any, Any]:
    """Return a NumPy array at the device's address, which nobody ever touches."""
    interface = {
        "shape": array.shape,
        "typestr": array.dtype.str,
        "data": (array.address, array.is_read_only),
        "strides": array.strides,
        "version": 3,
    }
    return array_over(array.buffer.lend(), interface)


def lies_in_order(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether elements lie one behind the other, in C's order; the stride of an axis of length 1 is moot."""
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return not math.prod(shape)
        expected *= length
    return True


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, stride = [], itemsize
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    return tuple(reversed(strides))


def view(buffer: DeviceBuffer, dtype: DTypeLike, shape: int | tuple[int, ...], offset: int) -> DeviceArray:
    """Return the elements of `dtype` from byte `offset` on; one length of `shape` may be -1.

    Raises
    ------
    ValueError
        If the buffer does not have so many elements, or they are Python objects.
    """
    import numpy as np

    kind = np.dtype(dtype)
    if kind.hasobject:
        raise ValueError(f"{kind} has Python objects, which no device memory holds: give a numeric dtype")
    if not kind.itemsize:
        raise ValueError(f"elements of {kind} have no bytes: give a type with a size")
    offset = operator.index(offset)
    lengths = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    rest = buffer.nbytes - offset
    if lengths.count(-1) == 1:
        buffer.check_range(offset, 0)
        known = math.prod(length for length in lengths if length != -1) * kind.itemsize
        if not known or rest % known:
            raise ValueError(f"{rest} bytes of {buffer!r} are no whole number of {lengths} of {kind}")
        lengths = tuple(rest // known if length == -1 else length for length in lengths)
    if any(length < 0 for length in lengths):
        raise ValueError(f"the shape {lengths} is none: expected lengths of 0 or more, or one -1")
    buffer.check_range(offset, math.prod(lengths) * kind.itemsize)
    return DeviceArray(buffer, kind, lengths, None, offset)
