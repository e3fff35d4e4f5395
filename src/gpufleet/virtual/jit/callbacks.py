"""The other end of what kernels ask of Python while they run: printf, assertions, malloc, more code.

Compiled code calls these through addresses; ctypes takes the GIL for the time of the call. The
fault guard is not in the way: nothing here touches memory that it has not checked.
"""

from __future__ import annotations

import ctypes as c
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from gpufleet.virtual.engine import Launch
from gpufleet.virtual.jit.abi import FAULT_ASSERT, Job, Worker
from gpufleet.virtual.jit.printing import format_text
from gpufleet.virtual.kernel_heap import KernelHeap
from gpufleet.virtual.ptx.parser import HEAP_BYTES

_launches: dict[int, Launch] = {}
_makers: dict[int, Callable[[], int]] = {}
_errors: dict[int, BaseException] = {}
_messages: dict[int, str] = {}
_tokens = itertools.count(1)
_lock = threading.Lock()


@contextmanager
def announced(job: Job, launch: Launch, diverged: Callable[[], int]) -> Iterator[None]:
    """Let kernels of this job reach its launch while the block runs, and get their diverged code."""
    token = job.token = next(_tokens)
    _launches[token], _makers[token] = launch, diverged
    try:
        yield
    finally:
        del _launches[token], _makers[token]
        error = _errors.pop(token, None)
    if error is not None:
        raise error


def assertion_message(job: Job) -> str:
    """What the assertion that ended a job said."""
    return _messages.pop(job.token, "assertion failed")


@cache
def _callbacks() -> dict[str, c._CFuncPtr]:  # type: ignore[name-defined]
    word = c.c_uint64
    pointer = c.c_void_p
    return {
        "gf_print": c.CFUNCTYPE(c.c_int, pointer, pointer, word, word)(_print),
        "gf_assert": c.CFUNCTYPE(None, pointer, pointer, c.c_int, c.c_int, word, word, word, word)(
            _assertion
        ),
        "gf_compile": c.CFUNCTYPE(pointer, pointer)(_compile),
        "gf_malloc": c.CFUNCTYPE(word, word, word)(_allocate),
        "gf_free": c.CFUNCTYPE(None, word, word)(_release),
    }


def imports() -> dict[str, int]:
    """Addresses of the functions, by the names that compiled code knows."""
    return {name: c.cast(callback, c.c_void_p).value or 0 for name, callback in _callbacks().items()}


def _allocate(heap: int, size: int) -> int:
    return KernelHeap(heap, HEAP_BYTES).allocate(size)


def _release(heap: int, address: int) -> None:
    KernelHeap(heap, HEAP_BYTES).release(address)


def _print(worker: int, job: int, template: int, arguments: int) -> int:
    try:
        memory = _Memory(worker, job)
        text, count = format_text(
            memory.string(template), memory.read(arguments, 32 * 8), lambda a: memory.string(a)
        )
        with _lock:
            memory.launch.output(text)
    except Exception:
        return -1
    return count


def _compile(address: int) -> int:
    """Address of the job's diverged code; 0, which ends the launch, after an error or Ctrl-C."""
    job = Job.from_address(address)
    try:
        job.diverged = _makers[job.token]()
    except BaseException as error:
        _errors[job.token] = error
        job.stop = 1
        return 0
    return job.diverged or 0


def _assertion(
    worker: int, job: int, site: int, lane: int, message: int, file: int, line: int, function: int
) -> None:
    """Record the failure and stop the launch at the next back edge; the first one wins."""
    memory = _Memory(worker, job)
    words = [memory.string(a).decode(errors="replace") for a in (message, file, function)]
    text = memory.assertion(words[0], words[1], line & 0xFFFFFFFF, words[2], lane)
    with _lock:
        memory.launch.output(text.encode())
        if memory.job.faulted:
            return
        memory.job.faulted = 1
        memory.job.fault_kind = FAULT_ASSERT
        memory.job.fault_site = site
        memory.job.fault_lane = lane
        memory.job.fault_warp = memory.worker.warp
        memory.job.fault_block = memory.worker.block
        _messages[memory.job.token] = text.strip()
        memory.job.stop = 1


class _Memory:
    """Memory that a kernel may name: the region, and its worker's arena."""

    def __init__(self, worker: int, job: int) -> None:
        self.job = Job.from_address(job)
        self.worker = Worker.from_address(worker)
        self.launch = _launches[self.job.token]

    def assertion(self, message: str, file: str, line: int, function: str, lane: int) -> str:
        """What the CUDA runtime prints of a failed assertion."""
        x, y, _ = self.launch.grid
        block = self.worker.block
        where = f"[{block % x},{block // x % y},{block // (x * y)}]"
        x, y, _ = self.launch.block
        thread = self.worker.warp * self.job.lanes + lane
        who = f"[{thread % x},{thread // x % y},{thread // (x * y)}]"
        return f"{file}:{line}: {function}: block: {where}, thread: {who} Assertion `{message}` failed.\n"

    def read(self, address: int, size: int) -> bytes:
        """Up to `size` bytes from an address; none where nothing may be read."""
        arena, end = self.worker.arena or 0, (self.worker.arena or 0) + self.job.arena_bytes
        if arena <= address < end:
            return c.string_at(address, min(size, end - address))
        starts, ends = self.launch.memory.spans()
        index = int(np.searchsorted(starts, np.uint64(address), side="right")) - 1
        if index < 0 or address >= int(ends[index]):
            return b""
        offset = address - self.launch.memory.base
        count = min(size, int(ends[index]) - address)
        return self.launch.memory.view(np.uint8)[offset : offset + count].tobytes()

    def string(self, address: int) -> bytes:
        """Text up to its final 0."""
        text = b""
        while True:
            piece = self.read(address + len(text), 256)
            end = piece.find(b"\0")
            if end >= 0 or not piece:
                return text + (piece[:end] if end >= 0 else b"")
            text += piece
