"""CPU threads that run kernels, and the guard that turns their faults into errors.

One `Runtime` per process. `Runtime.run` executes a `Job`: on the calling thread where the kernel is
known to end soon, else on worker threads, while the caller waits in short steps, so that Ctrl-C and
`Launch.cancelled` reach a kernel that never ends.
"""

from __future__ import annotations

import ctypes as c
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from gpufleet.virtual.jit.abi import Job, Worker
from gpufleet.virtual.jit.llvm import Effort, compiler
from gpufleet.virtual.jit.runtime_ir import EXPORTS, QUEUE_BYTES, runtime_ir

_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_SA_SIGINFO, _SA_ONSTACK, _SA_NODEFER = 4, 0x08000000, 0x40000000
_SIGNAL_STACK = 64 * 1024
_THREAD_STACK = 64 * 1024 * 1024
_POLL_NANOSECONDS = 20_000_000


def is_supported() -> bool:
    """Say whether faults can be caught here: Linux on x86-64 or arm64."""
    return sys.platform == "linux" and sys.maxsize > 2**32


class _Action(c.Structure):
    """`struct sigaction` of 64-bit Linux, glibc and musl alike."""

    _fields_ = [
        ("handler", c.c_void_p),
        ("mask", c.c_byte * 128),
        ("flags", c.c_int),
        ("restorer", c.c_void_p),
    ]


class Runtime:
    """The native runtime of this process."""

    def __init__(self) -> None:
        self._libc = c.CDLL(None, use_errno=True)
        key = c.c_uint()
        if self._libc.pthread_key_create(c.byref(key), None):
            raise OSError("no thread-specific key is left for the fault guard of the virtual GPU")
        self._code = compiler().link(compiler().compile(runtime_ir(key.value), Effort.QUICK), EXPORTS, {})
        pointer = c.c_void_p
        self._run_here = c.CFUNCTYPE(None, pointer, pointer)(self._code["run_here"])
        self._worker_loop = c.CFUNCTYPE(None, pointer, pointer)(self._code["worker_loop"])
        self._submit = c.CFUNCTYPE(c.c_int, pointer, pointer, c.c_int)(self._code["submit"])
        self._wait = c.CFUNCTYPE(c.c_int, pointer, pointer, c.c_int64)(self._code["wait"])
        self._queue = c.create_string_buffer(QUEUE_BYTES)
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._local = threading.local()

    @property
    def imports(self) -> dict[str, int]:
        """Addresses of what compiled kernels call."""
        return {name: self._code[name] for name in ("gf_fault", "gf_release", "gf_clock")}

    @property
    def parallelism(self) -> int:
        """Number of CPU threads that share out the blocks of a launch."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def run(self, job: Job, ends: bool, cancelled: Callable[[], bool]) -> None:
        """Execute all blocks of a job; faults are left in the job.

        Parameters
        ----------
        job : Job
            Filled in, with `next` = 0.
        ends : bool
            Whether every thread of the kernel is known to end soon: no loops, no recursion.
        cancelled : callable
            Asked about fifty times a second; true makes the job stop at the next back edge.
        """
        self._install_handlers()
        address = c.addressof(job)
        threads = self.parallelism
        workers = min(threads, job.multiprocessors)  # fewer in a green context
        job.chunk = max(1, job.total // (workers * 16))
        if ends:
            if job.total > 64 and workers > 1:
                self._start_workers(threads)
                self._submit(self._queue, address, min(workers - 1, job.total - 1))
            self._run_here(address, c.addressof(self._caller()))
        else:
            self._start_workers(threads)
            self._submit(self._queue, address, min(workers, job.total))
        self._await(job, cancelled)

    def _await(self, job: Job, cancelled: Callable[[], bool]) -> None:
        """Wait for the workers; an exception here (Ctrl-C) stops the job before it goes on."""
        address = c.addressof(job)
        try:
            while self._wait(self._queue, address, _POLL_NANOSECONDS):
                if cancelled():
                    job.stop = 1
        except BaseException:
            job.stop = 1
            while self._wait(self._queue, address, _POLL_NANOSECONDS):
                pass
            raise

    def _caller(self) -> Worker:
        worker: Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = Worker()
            self._local.arena = _FreeArena(worker, self._libc)
        return worker

    def _start_workers(self, count: int) -> None:
        if len(self._workers) >= count:
            return
        with self._lock:
            previous = threading.stack_size(_THREAD_STACK)
            try:
                while len(self._workers) < count:
                    name = f"gpufleet-virtual-{len(self._workers)}"
                    thread = threading.Thread(target=self._work, name=name, daemon=True)
                    thread.start()
                    self._workers.append(thread)
            finally:
                threading.stack_size(previous)

    def _work(self) -> None:
        """Serve jobs for ever; the GIL is only taken to start, and by `printf` of a kernel."""
        worker = Worker()
        stack = c.create_string_buffer(_SIGNAL_STACK)
        worker.signal_stack[0] = c.addressof(stack)
        worker.signal_stack[1] = 0
        worker.signal_stack[2] = _SIGNAL_STACK
        self._libc.sigaltstack(c.byref(worker, Worker.signal_stack.offset), None)
        worker.stack_low, worker.stack_bytes = self._stack_bounds()
        self._worker_loop(self._queue, c.addressof(worker))

    def _stack_bounds(self) -> tuple[int, int]:
        attributes = c.create_string_buffer(64)
        low, size = c.c_size_t(), c.c_size_t()
        self._libc.pthread_self.restype = c.c_void_p
        if self._libc.pthread_getattr_np(c.c_void_p(self._libc.pthread_self()), attributes):
            return 0, 0
        self._libc.pthread_attr_getstack(attributes, c.byref(low), c.byref(size))
        self._libc.pthread_attr_destroy(attributes)
        return low.value, size.value

    def _install_handlers(self) -> None:
        """Put our handlers in place, also again: faulthandler (pytest enables it) may displace them."""
        current = _Action()
        for number in _SIGNALS:
            self._libc.sigaction(int(number), None, c.byref(current))
            if current.handler == self._code["handler"]:
                continue
            old = _Action.from_address(self._code["old_actions"] + c.sizeof(_Action) * int(number))
            with self._lock:
                c.memmove(c.byref(old), c.byref(current), c.sizeof(_Action))
                ours = _Action(handler=self._code["handler"], flags=_SA_SIGINFO | _SA_ONSTACK | _SA_NODEFER)
                if self._libc.sigaction(int(number), c.byref(ours), None):
                    raise OSError(
                        c.get_errno(), f"cannot install a handler for {signal.Signals(number).name}"
                    )


class _FreeArena:
    """Frees the arena of a calling thread when the thread ends."""

    def __init__(self, worker: Worker, libc: Any) -> None:
        self._worker = worker
        self._free = libc.free

    def __del__(self) -> None:
        self._free(c.c_void_p(self._worker.arena))


_runtime: Runtime | None = None
_runtime_lock = threading.Lock()


def runtime() -> Runtime:
    """Return the process's runtime."""
    global _runtime
    with _runtime_lock:
        if _runtime is None:
            _runtime = Runtime()
        return _runtime


def _forget() -> None:
    """A forked child has no workers; it starts its own."""
    global _runtime, _runtime_lock
    _runtime = None
    _runtime_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
