"""Where are the bytes? Device buffers."""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpufleet.allocators import Allocator
from gpufleet.array import DeviceArray, view
from gpufleet.copies import Part, completed, copy_across, copy_in, copy_out
from gpufleet.errors import CaptureError, ContextClosed, GpufleetError, StickyError, WrongContext
from gpufleet.graph import refuse_blocking
from gpufleet.heap import Block, Queue, forget, forget_quietly
from gpufleet.host_view import owner_of
from gpufleet.pinned_memory import PinnedBuffer
from gpufleet.protocols import LEGACY_AND_PER_THREAD, ForeignMemory, foreign_memory, is_foreign
from gpufleet.sharing import AllWork, Loan
from gpufleet.stream import Stream, wait
from gpufleet.transfer import Transfer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from gpufleet.context import Context


REFUSALS = (TypeError, ValueError, CaptureError, ContextClosed, WrongContext, StickyError)
"""Errors of copies that have not begun, or never go on."""
CheckSize = Callable[[int], None]
"""Raises `ValueError` if a copy has not the right number of bytes."""


def any_size(nbytes: int) -> None:
    """Take copies of any size."""


PITCH_OF_DEVICE_MEMORY = "pitch= is for host arrays of two dimensions: device memory is copied whole"


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
    is_read_only : bool
        Whether it is another library's memory that is not to be written.
    uses : dict
        The streams that use it, by their key.
    usable_in : Context or None
        The context whose streams may use it with no more ado than an entry in `uses`; None if closed, or
        if its memory is not there for all streams yet.
    """

    def __init__(self, context: Context, block: Block, *, is_read_only: bool = False) -> None:
        self.context = context
        self.address = block.address
        self.nbytes = block.nbytes
        self.uses = block.uses
        self.usable_in = context if block.origin is None else None
        self._block: Block | None = block
        self._loan: weakref.ref[Loan] | None = None
        self._is_shared = False
        self.is_read_only = is_read_only

    @classmethod
    def allocate(
        cls, context: Context, nbytes: int, stream: Stream | None = None, allocator: Allocator | None = None
    ) -> DeviceBuffer:
        """Allocate `nbytes` (1 or more) in `context`."""
        nbytes = operator.index(nbytes)
        if nbytes < 1:
            raise ValueError(f"cannot allocate {nbytes} bytes: expected 1 or more")
        if stream is not None:
            stream = context.as_stream(stream)
            stream.check_open()
            if stream.graph is not None:
                raise CaptureError(f"no memory is allocated on {stream!r} while it is captured: do it before")
            if stream.context.device != context.device:
                raise WrongContext(
                    f"memory of {context!r} cannot be allocated on {stream!r}, of another device"
                )
            if stream.is_foreign:  # its owner may end it before the memory is there
                stream = None
        return cls(context, context.heap.allocate(nbytes, allocator, stream))

    def copy_from(
        self, source: Any, *, offset: int = 0, pitch: int | None = None, stream: Stream | None = None
    ) -> Transfer | None:
        """Copy a host array, another device buffer, or another library's GPU array, into this buffer.

        Without `stream` the copy is complete on return. With one it runs in the stream's order, and the
        returned `Transfer` tells when it is complete. The array may be dropped at once. It may be
        overwritten at once too, unless it is page-locked (`pinned`, `registered`): the device then reads
        it later.

        Parameters
        ----------
        source : array, PinnedBuffer, DeviceBuffer, DeviceArray, or another library's GPU array
            A host array has the buffer protocol, and is C-contiguous or of two dimensions with each row in
            one piece. A device buffer may be of any device and driver; it is copied whole. GPU arrays are
            C-contiguous; the copy waits for what their own library is still writing into them.
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
        return self._copy_from(source, offset, pitch, stream)

    def copy_to(
        self, target: Any, *, offset: int = 0, pitch: int | None = None, stream: Stream | None = None
    ) -> Transfer | None:
        """Copy this buffer's bytes from `offset` on into a writable host array, or a GPU array.

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
        return self._copy_to(target, offset, pitch, stream)

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
        byte = operator.index(byte)
        if not 0 <= byte <= 255:
            raise ValueError(f"{byte} is no byte: expected 0 to 255")
        self.check_writable()
        stream = self._stream(stream)
        if stream is not None and stream.must_enter:
            with stream.context:
                return self.fill(byte, stream=stream)
        queue = self.queue_for(stream)
        try:
            self.context.driver.cuMemsetD8Async(self.address, byte, self.nbytes, queue.handle)
            return completed(queue, stream)
        except REFUSALS:
            raise
        except BaseException:
            self._outlast(queue, None)
            raise

    def copy_into(self, array: DeviceArray, source: Any, stream: Stream | None) -> Transfer | None:
        """Do as `copy_from`, for all of an array that lies in this buffer."""
        return self._copy_from(source, array.offset, None, stream, array.check_size)

    def copy_out_of(self, array: DeviceArray, target: Any, stream: Stream | None) -> Transfer | None:
        """Do as `copy_to`, for all of an array that lies in this buffer."""
        return self._copy_to(target, array.offset, None, stream, array.check_size)

    def _copy_from(
        self, source: Any, offset: int, pitch: int | None, stream: Any, check_size: CheckSize = any_size
    ) -> Transfer | None:
        self.check_writable()
        stream, offset = self._stream(stream), operator.index(offset)
        if stream is not None and stream.must_enter:
            with stream.context:
                return self._copy_from(source, offset, pitch, stream, check_size)
        part = _part_of(source)
        if pitch is not None and (part is not None or is_foreign(source)):
            raise ValueError(PITCH_OF_DEVICE_MEMORY)
        try:
            if part is not None:
                check_size(part.nbytes)
                return copy_across(Part(self, offset, part.nbytes), part, stream)
            if is_foreign(source):
                return self._copy_array(source, offset, stream, check_size, is_source=True)
            view = _host_array(source, writable=False)
            check_size(view.nbytes)
            _note_user(view, stream)
            return copy_in(self, view, offset, pitch, stream)
        except REFUSALS:
            raise
        except BaseException:
            self._outlast(stream or self.context.main_stream, source)
            raise

    def _copy_to(
        self, target: Any, offset: int, pitch: int | None, stream: Any, check_size: CheckSize = any_size
    ) -> Transfer | None:
        stream, offset = self._stream(stream), operator.index(offset)
        if stream is not None and stream.must_enter:
            with stream.context:
                return self._copy_to(target, offset, pitch, stream, check_size)
        part = _part_of(target)
        if pitch is not None and (part is not None or is_foreign(target)):
            raise ValueError(PITCH_OF_DEVICE_MEMORY)
        try:
            if part is not None:
                check_size(part.nbytes)
                part.buffer.check_writable()
                return copy_across(part, Part(self, offset, part.nbytes), stream)
            if is_foreign(target):
                return self._copy_array(target, offset, stream, check_size, is_source=False)
            view = _host_array(target, writable=True)
            check_size(view.nbytes)
            _note_user(view, stream)
            return copy_out(self, view, offset, pitch, stream)
        except REFUSALS:
            raise
        except BaseException:
            owner = self if part is None else part.buffer
            self._outlast(stream or owner.context.main_stream, target)
            raise

    def _outlast(self, queue: Stream, other: Any) -> None:
        """Keep both sides of a copy that Ctrl-C or a failure of the driver ended: it may be under way."""
        part = _part_of(other)
        for buffer in (self, None if part is None else part.buffer):
            if buffer is not None:
                buffer.uses[queue.key] = queue
        if queue.graph is None:
            with contextlib.suppress(GpufleetError):
                if isinstance(other, PinnedBuffer):
                    other.note_user(queue)
                queue.hold(other)

    def _copy_array(
        self, array: Any, offset: int, stream: Stream | None, check_size: CheckSize, *, is_source: bool
    ) -> Transfer | None:
        queue = self.queue_for(stream)
        memory = _memory_of(array, queue)
        check_size(memory.nbytes)
        if not is_source and memory.is_read_only:
            raise ValueError(f"the {type(array).__name__} is read-only: copy into a writable one")
        self.check_range(offset, memory.nbytes)
        here, there = self.address + offset, memory.address
        target, source = (here, there) if is_source else (there, here)
        if memory.nbytes:
            self.context.driver.cuMemcpyDtoDAsync(target, source, memory.nbytes, queue.handle)
        return completed(queue, stream, keep=(memory.owner, array), value=None if is_source else array)

    # Who uses it

    def used_on(self, queue: Queue) -> None:
        """Note that work which is put into `queue` next uses the buffer: it is freed behind that work.

        Launches and copies of gpufleet do this by themselves.
        """
        self.check_open()
        if queue.context.driver is not self.context.driver:
            raise WrongContext(f"{self!r} cannot be used on {queue!r}, of another driver")
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

    def check_writable(self) -> None:
        """Raise `ValueError` if it is another library's memory that is not to be written."""
        if self.is_read_only:
            raise ValueError(f"{self!r} is read-only memory of another library: copy into a writable one")

    def _stream(self, stream: Any) -> Stream | None:
        """Return the stream to use for what was given, another library's too."""
        return stream if stream is None or type(stream) is Stream else self.context.as_stream(stream)

    # For other libraries

    def view(
        self, dtype: DTypeLike = "u1", shape: int | tuple[int, ...] = -1, offset: int = 0
    ) -> DeviceArray:
        """Return the elements of `dtype` from byte `offset` on, as an array that other libraries take.

        Raises
        ------
        ValueError
            If the buffer does not have so many, or they do not fill it where a length is -1.
        """
        self.check_open()
        return view(self, dtype, shape, offset)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes of the buffer, as an array of one dimension; see `DeviceArray`."""
        return self.view().__cuda_array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (kDLCUDA, ordinal)."""
        return self.view().__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        """Return a capsule with the bytes of the buffer; see `DeviceArray.__dlpack__`."""
        return self.view().__dlpack__(**how)

    def share(self) -> int | None:
        """Note that another library gets the address; return the stream that it has to wait for, if any.

        The memory is freed behind all work that the device has been given by then.
        """
        users = self._share()
        if len(users) == 1:
            return users[0].address
        if not users:
            return None
        main = self.context.main_stream
        for queue in users:
            queue.precede(main.handle)
        return main.address

    def share_in(self, stream: int) -> None:
        """As `share`, and let another library's stream (1 or 2: a default one; -1: none) wait by itself."""
        users, driver = self._share(), self.context.driver
        if stream == -1:
            return
        # A default stream is the current context's; where none is current there is none that could wait.
        can_wait = stream not in LEGACY_AND_PER_THREAD or int(driver.cuCtxGetCurrent())
        for queue in users:
            if can_wait:
                queue.precede(stream)
            elif not queue.is_foreign:
                wait(driver, "cuStreamQuery", "cuStreamSynchronize", queue.handle)

    def _share(self) -> list[Queue]:
        """Note that another library gets the address; return the streams whose work it has to wait for."""
        self.check_open()
        block = self._block
        if block is not None:
            self.context.heap.make_usable(block)
        users = self._users()
        if not self._is_shared:
            everything = AllWork(self.context)
            self.uses[everything.key] = everything
            self._is_shared, self.usable_in = True, self.context
        return users

    def precede(self, later: Any) -> None:
        """Let later work of a stream (a CUstream) wait for the work that uses the buffer now."""
        for queue in self._users():
            queue.precede(later)

    def _users(self) -> list[Queue]:
        """Return the streams whose work uses the buffer, but for what other libraries do with it."""
        return [
            queue
            for queue in tuple(self.uses.values())
            if not (queue.is_closed or queue.graph is not None or queue.address is None)
        ]

    def lend(self) -> Loan:
        """Return what keeps the memory when the buffer is closed before another library is done."""
        with _lending:
            loan = self._living_loan()
            if loan is None:
                loan = Loan()
                self._loan = weakref.ref(loan)
        self.check_open()  # after it, so that a `close` of another thread finds the loan, or this the close
        return loan

    def _living_loan(self) -> Loan | None:
        return None if self._loan is None else self._loan()

    def _leave_to_borrowers(self, block: Block) -> bool:
        """Leave the block to other libraries; say False, and do nothing, if none has it."""
        loan = self._living_loan()
        if loan is None:
            return False
        context = self.context
        loan.outlive(lambda: forget_quietly(context, block))
        return True

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
        """Free the memory behind all work that uses it, without waiting. Closing twice is no error.

        Memory that another library has taken by DLPack is freed when that drops it.
        """
        block = self._take_block()
        if block is not None and not self._leave_to_borrowers(block):
            heap = self.context.heap
            self.context.if_alive(lambda: heap.free(block))

    def _take_block(self) -> Block | None:
        """Return the block to the one who asks first."""
        taken: Block | None = self.__dict__.pop("_block", None)
        self._block = self.usable_in = None
        return taken

    def __del__(self) -> None:
        if self.__dict__.get("_block") is None:  # closed, or never made
            return
        # No weakref.finalize: it would keep the streams in `uses`, and with them their contexts, alive.
        block = self._take_block()
        if block is None or self._leave_to_borrowers(block):
            return
        # The last reference to what is shared may be the other library's, which knows of no `close`.
        if self._is_shared or block.is_lent:
            forget_quietly(self.context, block)
        else:
            forget(self.context, block)

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<DeviceBuffer {self.address:#x}, {self.nbytes} bytes, of {self.context!r}>"


_lending = threading.RLock()
"""Held while a loan is made, so that a buffer has one at a time. Reentrant: a finalizer may come here."""


def _host_array(array: Any, *, writable: bool) -> NDArray[Any]:
    """View a host array as what it is, or say why it cannot be copied."""
    import numpy as np

    if isinstance(array, (DeviceBuffer, Stream)):
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


def _part_of(array: Any) -> Part | None:
    """Return where gpufleet's own device memory is; None if it is something else."""
    if isinstance(array, DeviceBuffer):
        return Part(array, 0, array.nbytes)
    if isinstance(array, DeviceArray):
        return Part(array.buffer, array.offset, array.nbytes)
    return None


def _memory_of(array: Any, queue: Queue) -> ForeignMemory:
    """Return where a GPU array of another library is; work of `queue` may use it then."""
    memory = foreign_memory(array, queue)
    if memory is None:
        raise TypeError(f"expected an array, got {type(array).__name__}")
    if not memory.is_contiguous:
        raise ValueError(f"the {type(array).__name__} is not C-contiguous: copy a contiguous one of it")
    if memory.nbytes and not memory.address:
        raise ValueError(f"the {type(array).__name__} has no memory, but claims {memory.nbytes} bytes")
    return memory


def _note_user(view: NDArray[Any], stream: Stream | None) -> None:
    """Note that pinned memory, of which an array may be any view, is used by a copy."""
    if stream is not None:
        owner = owner_of(view)
        if isinstance(owner, PinnedBuffer):
            owner.note_user(stream)


def _writable_view(array: Any) -> NDArray[Any]:
    import numpy as np

    if isinstance(array, np.ndarray):
        return array
    if hasattr(type(array), "__dlpack__"):  # host tensors of PyTorch have no buffer protocol
        view = np.from_dlpack(array)
        if not view.flags.writeable:  # NumPy before 2.1 makes all of them so
            shown = np.asarray(array)
            return shown if shown.ctypes.data == view.ctypes.data else view
        return view
    return np.frombuffer(array, "u1")
