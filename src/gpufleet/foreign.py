"""How does another library's GPU array become gpufleet's?"""

from __future__ import annotations

from typing import Any

from gpufleet.array import DeviceArray
from gpufleet.context import Context
from gpufleet.current import context_of, current_context
from gpufleet.device import Device
from gpufleet.driver import Driver, get_driver
from gpufleet.errors import WrongContext
from gpufleet.heap import Block
from gpufleet.lent import Lent
from gpufleet.memory import DeviceBuffer
from gpufleet.protocols import ForeignMemory, foreign_memory, is_foreign
from gpufleet.sharing import active_primary
from gpufleet.stream import Stream, settle


def as_array(array: Any, *, context: Context | None = None, stream: Stream | None = None) -> DeviceArray:
    """View the GPU array of CuPy, PyTorch, Numba or cuda.core as a `DeviceArray`, without a copy.

    The result keeps the array alive, until it is dropped and the work of gpufleet that uses it is complete.
    Its `buffer` can be used wherever a `DeviceBuffer` can.

    Parameters
    ----------
    array : object with ``__cuda_array_interface__`` or ``__dlpack__``
    context : Context
        Whose buffer it becomes. None: the one that owns the memory; for memory of a pool, which belongs to
        the device, the stream's, the current one, or the primary one of that device.
    stream : Stream
        Work of this stream comes after what the array's own library is still writing into it; nobody waits.
        None: wait for that now, so that every stream may use it.

    Raises
    ------
    TypeError
        If it is no GPU array; `numpy.asarray` takes the ones of the host.
    WrongContext
        If there is no context for it, or the one given is of another device.
    ValueError
        If it has no memory, or a mask.
    """
    if isinstance(array, DeviceArray):
        return array
    if not is_foreign(array):
        raise TypeError(f"expected a GPU array of another library, got {type(array).__name__}")
    home = _home_of(array, context, stream)
    home.heap.drain()
    settle(home.driver)
    queue = home.main_stream if stream is None else stream
    memory = foreign_memory(array, queue)
    if memory is None or not memory.address:
        raise ValueError(f"the {type(array).__name__} has no memory: expected one element or more")
    if stream is None:
        queue.synchronize()
    lowest, nbytes = _extent(memory)
    block = Block(lowest, nbytes, Lent(memory.owner), is_lent=True)
    buffer = DeviceBuffer(home, block, is_read_only=memory.is_read_only)
    return DeviceArray(buffer, memory.dtype, memory.shape, memory.strides, memory.address - lowest)


def _home_of(array: Any, context: Context | None, stream: Stream | None) -> Context:
    """Return the context whose buffer an array becomes."""
    given = context if context is not None or stream is None else stream.context
    driver = get_driver() if given is None else given.driver
    ordinal = array.__dlpack_device__()[1] if hasattr(type(array), "__dlpack_device__") else None
    if context is None:
        owner = _owner_of(driver, array)
        if owner is not None:
            return owner
        for candidate in (given, current_context(driver)):
            if candidate is not None and ordinal in (None, candidate.device.ordinal):
                return candidate
        return _primary(Device(ordinal or 0, driver), array)
    if ordinal not in (None, context.device.ordinal):
        raise WrongContext(f"the {type(array).__name__} is of device {ordinal}, not of {context!r}")
    return context


def _owner_of(driver: Driver, array: Any) -> Context | None:
    """Return the context that an array's memory belongs to; None for memory of pools, or unknown."""
    from cuda.bindings.driver import CUpointer_attribute

    if not hasattr(type(array), "__cuda_array_interface__"):
        return None
    address = int(array.__cuda_array_interface__["data"][0] or 0)
    if not address:
        return None
    handle = driver.cuPointerGetAttribute(CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT, address)
    return context_of(driver, handle) if int(handle or 0) else None


def _primary(device: Device, array: Any) -> Context:
    """Return the primary context of a device, which another library has retained."""
    with active_primary(device) as primary:
        if primary is not None:
            return context_of(device.driver, primary)
    raise WrongContext(
        f"there is no context for the {type(array).__name__} on {device!r}: give context=, or enter one"
    )


def _extent(memory: ForeignMemory) -> tuple[int, int]:
    """Return the lowest address of an array, and the bytes from there to its end.

    A stride may be negative, and the first element then is not the lowest in memory.
    """
    if memory.strides is None:
        return memory.address, memory.nbytes
    pairs = zip(memory.shape, memory.strides, strict=True)
    steps = [(length - 1) * stride for length, stride in pairs if length > 1]
    before = sum(step for step in steps if step < 0)
    behind = sum(step for step in steps if step > 0)
    return memory.address + before, behind + memory.dtype.itemsize - before
