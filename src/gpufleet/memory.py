"""Where are the bytes? Device buffers."""

from __future__ import annotations

import operator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpufleet.allocators import Allocator
from gpufleet.copies import completed, copy_across, copy_in, copy_out
from gpufleet.errors import CaptureError, ContextClosed, WrongContext
from gpufleet.graph import refuse_blocking
from gpufleet.heap import Block, Queue, forget
from gpufleet.pinned_memory import PinnedBuffer
from gpufleet.stream import Stream
from gpufleet.transfer import Transfer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from gpufleet.context import Context


class DeviceBuffer:
    """Memory of one device, owned by one context.

    Kernels of every context of the device may use it. Made by `Context.alloc`.

    The buffer knows the streams that use it: those of the launches and copies it was given to. Closing or
    forgetting it frees the memory behind their work, and nobody waits. Work that uses its address in other
    ways is announced by `used_on`.

    Attributes
    ----------
    context : Context
    address : int
        The device address.
    nbytes : int
    uses : dict
        The streams that use it, by their key.
    usable_in : Context or None
        The context whose streams may use it with no more ado than an entry in `uses`; None if closed, or
        if its memory is not there for all streams yet.
    """

    def __init__(self, context: Context, block: Block) -> None:
        self.context = context
        self.address = block.address
        self.nbytes = block.nbytes
        self.uses = block.uses
        self.usable_in = context if block.origin is None else None
        self._block: Block | None = block

    @classmethod
    def allocate(
        cls, context: Context, nbytes: int, stream: Stream | None = None, allocator: Allocator | None = None
    ) -> DeviceBuffer:
        """Allocate `nbytes` (1 or more) in `context`."""
        nbytes = operator.index(nbytes)
        if nbytes < 1:
            raise ValueError(f"cannot allocate {nbytes} bytes: expected 1 or more")
        if stream is not None:
            stream.check_open()
            if stream.graph is not None:
                raise CaptureError(f"no memory is allocated on {stream!r} while it is captured: do it before")
            if stream.context.device.ordinal != context.device.ordinal:
                raise WrongContext(
                    f"memory of {context!r} cannot be allocated on {stream!r}, of another device"
                )
        return cls(context, context.heap.allocate(nbytes, allocator, stream))

    def copy_from(
        self, source: Any, *, offset: int = 0, pitch: int | None = None, stream: Stream | None = None
    ) -> Transfer | None:
        """Copy a host array, or another device buffer, into this buffer.

        Without `stream` the copy is complete on return. With one it runs in the stream's order, and the
        returned `Transfer` tells when it is complete. The array may be dropped at once. It may be
        overwritten at once too, unless it is page-locked (`pinned`, `registered`): the device then reads
        it later.

        Parameters
        ----------
        source : array, PinnedBuffer or DeviceBuffer
            What has the buffer protocol, and is C-contiguous or of two dimensions with each row in one
            piece. A device buffer may be of any device and driver; it is copied whole.
        offset : int
            Byte of this buffer at which the first byte goes.
        pitch : int
            Bytes from one row of a two-dimensional array to the next, in this buffer. None: no gaps.
        stream : Stream
            Of this buffer's device, or of the source's.

        Raises
        ------
        ValueError
            If the array does not fit, or its rows are in pieces.

        Warns
        -----
        BlockingCopyWarning
            If the stream made the caller wait: for more than 64 MiB of pageable memory.
        """
        if isinstance(source, DeviceBuffer):
            return copy_across(self, source, offset, stream)
        _note_user(source, stream)
        return copy_in(self, _host_array(source, writable=False), offset, pitch, stream)

    def copy_to(
        self, target: Any, *, offset: int = 0, pitch: int | None = None, stream: Stream | None = None
    ) -> Transfer | None:
        """Copy this buffer's bytes from `offset` on into a writable host array.

        The target's size says how many bytes. Parameters are as in `copy_from`. With `stream`, a host
        array must not be used before the transfer is complete, as `Transfer` says.

        Raises
        ------
        ValueError
            If the array is larger than what the buffer holds, its rows are in pieces, or it is read-only.

        Warns
        -----
        BlockingCopyWarning
            If the stream made the caller wait: for more than 64 MiB of pageable memory.
        """
        _note_user(target, stream)
        return copy_out(self, _host_array(target, writable=True), offset, pitch, stream)

    def to_numpy(
        self, dtype: DTypeLike = "u1", shape: int | tuple[int, ...] = -1, *, stream: Stream | None = None
    ) -> Any:
        """Return the buffer's content as a new NumPy array; `shape` as in `reshape`.

        With `stream`, return a `Transfer` whose `result()` waits and is the array: it cannot be read
        before it is complete.
        """
        import numpy as np

        array = np.empty(self.nbytes, "u1").view(dtype).reshape(shape)
        transfer = self.copy_to(array, stream=stream)
        return array if transfer is None else transfer

    def fill(self, byte: int = 0, *, stream: Stream | None = None) -> Transfer | None:
        """Set every byte to `byte`: complete on return, or in the order of `stream`."""
        queue = self.queue_for(stream)
        self.context.driver.cuMemsetD8Async(self.address, byte, self.nbytes, queue.handle)
        return completed(queue, stream, None, self)

    # Who uses it

    def used_on(self, queue: Queue) -> None:
        """Note that work which is put into `queue` next uses the buffer: it is freed behind that work.

        Launches and copies of gpufleet do this by themselves.
        """
        self.check_open()
        self._become_usable(queue)
        self.uses[queue.key] = queue
        if queue.graph is not None:
            queue.graph.keep(self)

    def _become_usable(self, queue: Queue) -> None:
        block = self._block
        if self.usable_in is None and block is not None and self.context.heap.become_usable(block, queue):
            self.usable_in = self.context

    def queue_for(self, stream: Stream | None, source: DeviceBuffer | None = None) -> Stream:
        """Return the stream for a copy: the one given, noted as a user, or the context's main stream.

        On the main stream the caller waits, after which nothing uses the buffer any more.
        """
        self.check_open()
        if stream is None:
            refuse_blocking(self.context, "a copy or fill without stream=")
        queue = self.context.main_stream if stream is None else stream
        queue.check_open()
        devices = {each.context.device.ordinal for each in (self, source) if each is not None}
        if queue.context.device.ordinal not in devices or queue.context.driver is not self.context.driver:
            raise WrongContext(
                f"{self!r} cannot be copied on {stream!r}: it is of device {queue.context.device.ordinal}, "
                f"the buffer of device {self.context.device.ordinal}"
            )
        for each in (self, source):
            if each is not None and stream is not None:
                each.used_on(queue)
            elif each is not None:
                each.check_open()
                each._become_usable(queue)
        return queue

    def check_range(self, offset: int, nbytes: int) -> None:
        """Raise `ValueError` if the buffer does not have these bytes."""
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"{nbytes} bytes from byte {offset} on do not fit: the buffer has {self.nbytes} bytes"
            )

    # Closing

    @property
    def is_closed(self) -> bool:
        """Whether this buffer or its context was closed."""
        return self._block is None or self.context.is_closed

    def check_open(self) -> None:
        """Raise `ContextClosed` if this buffer or its context was closed."""
        self.context.check_open()
        if self._block is None:
            raise ContextClosed(f"{self!r} was closed; allocate another one")

    def close(self) -> None:
        """Free the memory behind all work that uses it, without waiting. Closing twice is no error."""
        block = self._take_block()
        if block is not None:
            heap = self.context.heap
            self.context.if_alive(lambda: heap.free(block))

    def _take_block(self) -> Block | None:
        """Return the block to the one who asks first."""
        taken: Block | None = self.__dict__.pop("_block", None)
        self._block = self.usable_in = None
        return taken

    def __del__(self) -> None:
        # No weakref.finalize: it would keep the streams in `uses`, and with them their contexts, alive.
        block = self._take_block()
        if block is not None:
            forget(self.context, block)

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<DeviceBuffer {self.address:#x}, {self.nbytes} bytes, of {self.context!r}>"


def _host_array(array: Any, *, writable: bool) -> NDArray[Any]:
    """View a host array as what it is, or say why it cannot be copied."""
    import numpy as np

    if isinstance(array, (DeviceBuffer, Stream)) or hasattr(array, "__cuda_array_interface__"):
        raise TypeError(f"expected a host array, got {type(array).__name__}")
    if isinstance(array, PinnedBuffer):
        return array.array
    try:
        view: np.ndarray[Any, Any] = np.asarray(array) if not writable else _writable_view(array)
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected a host array, got {type(array).__name__}: {error}") from None
    if view.dtype.hasobject:
        raise TypeError("an array of Python objects cannot be copied to a GPU: give it a numeric dtype")
    if writable and not view.flags.writeable:
        raise ValueError("the array is read-only: copy into a writable one")
    return view


def _note_user(memory: Any, stream: Stream | None) -> None:
    if stream is not None and isinstance(memory, PinnedBuffer):
        memory.uses[stream.key] = stream


def _writable_view(array: Any) -> NDArray[Any]:
    import numpy as np

    return array if isinstance(array, np.ndarray) else np.frombuffer(array, "u1")
