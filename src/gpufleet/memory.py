"""Where are the bytes? Device buffers and copies between them and host arrays."""

from __future__ import annotations

import operator
import sys
import warnings
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpufleet.errors import ContextClosed, WrongContext
from gpufleet.stream import Event, Stream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from gpufleet.context import Context
    from gpufleet.lifetime import Lifetime


class DeviceBuffer:
    """Memory of one device, owned by one context.

    Kernels of every context of the device may use it. Made by `Context.alloc`.

    Attributes
    ----------
    context : Context
    address : int
        The device address.
    nbytes : int
    """

    def __init__(self, context: Context, address: int, nbytes: int) -> None:
        self.context = context
        self.address = address
        self.nbytes = nbytes
        self._closed = False
        self._finalizer = weakref.finalize(self, _forgotten, context.life, address, nbytes)
        self._finalizer.atexit = False

    @classmethod
    def allocate(cls, context: Context, nbytes: int) -> DeviceBuffer:
        """Allocate `nbytes` (1 or more) in `context`."""
        nbytes = operator.index(nbytes)
        if nbytes < 1:
            raise ValueError(f"cannot allocate {nbytes} bytes: expected 1 or more")
        with context:
            address = int(context.driver.cuMemAlloc(nbytes))
        buffer = cls(context, address, nbytes)
        context.adopt(buffer)
        return buffer

    def copy_from(self, source: Any, *, offset: int = 0, stream: Stream | None = None) -> Event | None:
        """Copy a C-contiguous host array (anything with the buffer protocol) into this buffer.

        Without `stream` the copy is complete on return. With one it runs in the stream's order, the
        array is kept alive until then, and the returned event tells when it is done; from ordinary
        (pageable) memory the driver makes the caller wait even so, for more than 64 KiB.

        Parameters
        ----------
        source : array
        offset : int
            Byte of this buffer at which the array's first byte goes.
        stream : Stream
            Of this buffer's device.

        Raises
        ------
        ValueError
            If the array does not fit, or is not C-contiguous.
        """
        array = _contiguous(source, writable=False)
        self._check_range(offset, array.nbytes)
        return self._copy("cuMemcpyHtoDAsync", self.address + offset, array.ctypes.data, array, stream)

    def copy_to(self, target: Any, *, offset: int = 0, stream: Stream | None = None) -> Event | None:
        """Copy this buffer's bytes from `offset` on into a C-contiguous, writable host array.

        The array's size says how many bytes. See `copy_from` for `stream`.

        Raises
        ------
        ValueError
            If the array is larger than what the buffer holds, not C-contiguous, or read-only.
        """
        array = _contiguous(target, writable=True)
        self._check_range(offset, array.nbytes)
        return self._copy("cuMemcpyDtoHAsync", array.ctypes.data, self.address + offset, array, stream)

    def to_numpy(self, dtype: DTypeLike = "u1", shape: int | tuple[int, ...] = -1) -> NDArray[Any]:
        """Return the buffer's content as a new NumPy array; `shape` as in `reshape`."""
        import numpy as np

        array = np.empty(self.nbytes, "u1")
        self.copy_to(array)
        return array.view(dtype).reshape(shape)

    def fill(self, byte: int = 0) -> None:
        """Set every byte to `byte`, complete on return."""
        stream = self._stream(None)
        self.context.driver.cuMemsetD8Async(self.address, byte, self.nbytes, stream.handle)
        stream.synchronize()

    def _copy(
        self, call: str, target: int, source: int, array: NDArray[Any], stream: Stream | None
    ) -> Event | None:
        # cuMemcpyDtoH does not wait for a non-blocking stream, so a blocking copy goes through one too.
        queue = self._stream(stream)
        if array.nbytes:
            getattr(self.context.driver, call)(target, source, array.nbytes, queue.handle)
        if stream is not None:
            return queue.hold(array, self)
        queue.synchronize()
        return None

    def _stream(self, stream: Stream | None) -> Stream:
        self.check_open()
        if stream is None:
            return self.context.main_stream
        stream.check_open()
        if stream.context.device.ordinal != self.context.device.ordinal:
            raise WrongContext(
                f"{self!r} cannot be copied on {stream!r}: it is of device {stream.context.device.ordinal}, "
                f"the buffer of device {self.context.device.ordinal}"
            )
        return stream

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"{nbytes} bytes from byte {offset} on do not fit: the buffer has {self.nbytes} bytes"
            )

    @property
    def is_closed(self) -> bool:
        """Whether this buffer or its context was closed."""
        return self._closed or self.context.is_closed

    def check_open(self) -> None:
        """Raise `ContextClosed` if this buffer or its context was closed."""
        self.context.check_open()
        if self._closed:
            raise ContextClosed(f"{self!r} was closed; allocate another one")

    def close(self) -> None:
        """Free the memory, after all work of the device that may use it. Closing twice is no error."""
        if self._closed or self._finalizer.detach() is None:
            return
        self._closed = True
        self.context.free("cuMemFree", self.address)

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<DeviceBuffer {self.address:#x}, {self.nbytes} bytes, of {self.context!r}>"


def _contiguous(array: Any, *, writable: bool) -> NDArray[Any]:
    """View a host array as what it is, in bytes, or say why it cannot be copied."""
    import numpy as np

    if isinstance(array, (DeviceBuffer, Stream)) or hasattr(array, "__cuda_array_interface__"):
        raise TypeError(f"expected a host array, got {type(array).__name__}")
    try:
        view: np.ndarray[Any, Any] = np.asarray(array) if not writable else _writable_view(array)
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected a host array, got {type(array).__name__}: {error}") from None
    if view.dtype.hasobject:
        raise TypeError("an array of Python objects cannot be copied to a GPU: give it a numeric dtype")
    if not view.flags.c_contiguous:
        raise ValueError("the array is not C-contiguous: copy numpy.ascontiguousarray(array) instead")
    if writable and not view.flags.writeable:
        raise ValueError("the array is read-only: copy into a writable one")
    return view


def _writable_view(array: Any) -> NDArray[Any]:
    import numpy as np

    return array if isinstance(array, np.ndarray) else np.frombuffer(array, "u1")


def _forgotten(life: Lifetime, address: int, nbytes: int) -> None:
    if sys.is_finalizing() or life.is_gone or life.driver.is_forked:
        return
    warnings.warn(f"{nbytes} bytes of {life!r} were never freed", ResourceWarning, stacklevel=2)
    life.free_later(lambda: life.driver.cuMemFree(address))
