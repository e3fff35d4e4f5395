"""What does another library's GPU array say of itself? `__cuda_array_interface__` and DLPack, read."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from gpufleet.array import lies_in_order
from gpufleet.dlpack import ON_GPU, VERSION, dtype_of, managed_tensor
from gpufleet.heap import Queue
from gpufleet.stream import passing_event

if TYPE_CHECKING:
    import numpy as np


class ForeignMemory(NamedTuple):
    """Another library's GPU array.

    Attributes
    ----------
    address : int
        Of its first element.
    shape, strides : tuple of int
        In elements and in bytes; strides None where it is C-contiguous.
    dtype : numpy.dtype
    owner : object
        What keeps the memory alive.
    ordinal : int or None
        Its device, where the protocol tells.
    is_read_only : bool
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    owner: Any
    ordinal: int | None
    is_read_only: bool

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one behind the other, in C's order."""
        return self.strides is None or lies_in_order(self.shape, self.strides, self.dtype.itemsize)


def is_foreign(value: Any) -> bool:
    """Whether `value` says that it is GPU memory."""
    if hasattr(type(value), "__dlpack_device__"):  # PyTorch's type has the interface, its host tensors do not
        return value.__dlpack_device__()[0] in ON_GPU
    return hasattr(type(value), "__cuda_array_interface__")


def foreign_memory(value: Any, queue: Queue) -> ForeignMemory | None:
    """Read what `value` says of its GPU memory, or return None if it is no GPU array.

    Work that is put into `queue` from now on comes after what the array's own library has queued to write
    it, as far as that library says.

    Raises
    ------
    TypeError
        If its library does not hand it out, as PyTorch with a tensor that requires grad.
    ValueError
        If it has a mask, or what it says makes no sense.
    """
    interface = _array_interface(value)
    # PyTorch's says nothing of streams (it is of version 2), while its DLPack orders.
    if interface is None or ("stream" not in interface and hasattr(value, "__dlpack__")):
        return _by_dlpack(value, queue)
    return _by_array_interface(value, interface, queue)


def _array_interface(value: Any) -> dict[str, Any] | None:
    try:
        interface: dict[str, Any] = value.__cuda_array_interface__
    except AttributeError:
        return None
    except RuntimeError as error:  # PyTorch's, for a tensor that requires grad
        raise TypeError(str(error)) from error
    return interface


def _by_array_interface(value: Any, interface: dict[str, Any], queue: Queue) -> ForeignMemory:
    """Read `__cuda_array_interface__`, https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""
    if interface.get("mask") is not None:
        raise ValueError("it has a mask, which a kernel would not see")
    try:
        address, is_read_only = interface["data"]
        strides = interface.get("strides")
        memory = ForeignMemory(
            operator.index(address or 0),
            _lengths(interface["shape"]),
            None if strides is None else _lengths(strides),
            _dtype(interface),
            value,
            _ordinal(value),
            bool(is_read_only),
        )
        producer = interface.get("stream")
        producer = None if producer is None else operator.index(producer)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its __cuda_array_interface__ makes no sense: {error!r}") from error
    _check_sense(memory)
    if producer == 0:
        raise ValueError("its __cuda_array_interface__ names stream 0, which is not allowed")
    if producer is not None and producer != queue.key:
        wait_for(producer, queue)
    return memory


def _lengths(numbers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(operator.index(number) for number in numbers)


def _dtype(interface: dict[str, Any]) -> np.dtype[Any]:
    import numpy as np

    raw = np.dtype(interface["typestr"])
    fields = np.dtype(interface["descr"]) if raw.kind == "V" and interface.get("descr") else raw
    chosen: np.dtype[Any] = fields if fields.itemsize == raw.itemsize else raw
    return chosen


def _check_sense(memory: ForeignMemory) -> None:
    """Refuse what no array is, before the driver is given its size."""
    shape, strides = memory.shape, memory.strides
    if any(length < 0 for length in shape) or (strides is not None and len(strides) != len(shape)):
        raise ValueError(f"its shape {shape} with strides {strides} makes no sense")
    if memory.dtype.hasobject:
        raise ValueError("it has Python objects, which no device memory holds")


def _ordinal(value: Any) -> int | None:
    """Return the device that DLPack names: the other protocol does not."""
    return int(value.__dlpack_device__()[1]) if hasattr(type(value), "__dlpack_device__") else None


LEGACY_AND_PER_THREAD = (1, 2)
"""CU_STREAM_LEGACY and CU_STREAM_PER_THREAD: special values, not handles."""


def wait_for(producer: int, queue: Queue) -> None:
    """Let `queue` wait for what is queued on another library's stream so far."""
    driver = queue.context.driver
    if producer in LEGACY_AND_PER_THREAD:
        current = driver.cuCtxGetCurrent()
        owner = current if int(current) else queue.context.handle
    else:
        owner = driver.cuStreamGetCtx(producer)
    with passing_event(driver, owner) as event:
        driver.cuEventRecord(event, producer)
        driver.cuStreamWaitEvent(queue.handle, event, 0)


def _by_dlpack(value: Any, queue: Queue) -> ForeignMemory | None:
    if not hasattr(value, "__dlpack_device__") or value.__dlpack_device__()[0] not in ON_GPU:
        return None
    # The producer orders its own work before this stream. 0 is not allowed, 1 is the default stream.
    stream = int(queue.handle) or 1
    try:
        capsule = value.__dlpack__(stream=stream, max_version=VERSION)
    except TypeError:  # from before versions (DLPack 1.0)
        capsule = value.__dlpack__(stream=stream)
    managed = managed_tensor(capsule)
    tensor = managed.tensor
    dtype = dtype_of(tensor)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = (
        tuple(each * dtype.itemsize for each in tensor.strides[: tensor.ndim]) if tensor.strides else None
    )
    memory = ForeignMemory(
        int(tensor.data or 0) + int(tensor.byte_offset) if tensor.data else 0,
        shape,
        strides,
        dtype,
        managed,
        int(tensor.device_id),
        managed.is_read_only,
    )
    _check_sense(memory)
    return memory
