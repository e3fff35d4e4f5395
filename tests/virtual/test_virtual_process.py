"""The end of the interpreter, forks, and Ctrl-C, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import ctypes
from virtual_fakes import FakeEngine, Latch, code, ptx, value
from gpufleet.virtual import VirtualDriver

engine = FakeEngine()
d = VirtualDriver(engine=engine, visible_devices=None)

def start():
    d.cuInit(0)
    return value(d.cuCtxCreate(None, 0, 0))

def function(body):
    name = f"kernel{{len(engine.bodies)}}"
    engine.bodies[name] = body
    return value(d.cuModuleGetFunction(value(d.cuModuleLoadData(ptx(name))), name.encode()))

def launch(f, stream=0):
    arguments = ((0, 0), (ctypes.c_void_p, ctypes.c_int))
    assert code(d.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)) == "SUCCESS"
"""


def python(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore::DeprecationWarning", "-c", PRELUDE + body],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def check(body: str, output: str = "") -> None:
    done = python(body)
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")


def test_exit_with_a_spinning_kernel_and_work_behind_it() -> None:
    check("""
start()
latch = Latch()
for _ in range(3):
    stream = value(d.cuStreamCreate(1))
    launch(function(latch), stream)
    launch(function(lambda launched: print("never")), stream)
latch.wait_until_entered()
""")


def test_exit_with_a_kernel_that_does_not_stop() -> None:
    check("""
start()
def deaf(launched):
    entered.set()
    while True:
        time.sleep(0.01)
entered = threading.Event()
launch(function(deaf))
entered.wait()
""")


def test_exit_with_a_context_pushed_and_a_thread_inside() -> None:
    check("""
context = start()
ready = threading.Event()
def stay():
    d.cuCtxPushCurrent(context)
    ready.set()
    threading.Event().wait()
threading.Thread(target=stay, daemon=True).start()
ready.wait()
""")


def test_calls_at_exit_work_until_the_driver_has_ended() -> None:
    body = """
start()
import atexit
atexit.register(lambda: print(code(d.cuCtxSynchronize())))  # runs before the driver's own, which is older
atexit._run_exitfuncs()
print(code(d.cuCtxSynchronize()))
"""
    check(body, "SUCCESS\nDEINITIALIZED\n")


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="needs os.fork")
def test_a_forked_child_is_told_so() -> None:
    check("""
start()
latch = Latch()
launch(function(latch))
latch.wait_until_entered()
child = os.fork()
if not child:
    answers = {
        code(answer) for answer in (
            d.cuInit(0), d.cuDeviceGetCount(), d.cuCtxGetCurrent(), d.cuCtxCreate(None, 0, 0), d.cuMemFree(0),
            d.cuCtxSynchronize(), d.cuDriverGetVersion(),
        )
    }
    print(answers, "forked" in d.last_error_log, flush=True)
    sys.exit(0)
print(os.waitpid(child, 0)[1], flush=True)
""", "{'NOT_INITIALIZED'} True\n0\n")  # fmt: skip


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="needs os.fork")
def test_a_child_may_begin_where_the_parent_did_not_and_may_reset() -> None:
    check("""
other = VirtualDriver(engine=engine, visible_devices=None)
start()
child = os.fork()
if not child:
    print(code(other.cuInit(0)), code(other.cuCtxCreate(None, 0, 0)), flush=True)
    d.reset()
    start()
    launch(function(lambda launched: None))
    print(code(d.cuCtxSynchronize()), flush=True)
    sys.exit(0)
print(os.waitpid(child, 0)[1], flush=True)
""", "SUCCESS SUCCESS\nSUCCESS\n0\n")  # fmt: skip


def test_ctrl_c_ends_a_wait_and_not_the_work() -> None:
    check("""
start()
latch = Latch()
launch(function(latch))
latch.wait_until_entered()
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    d.cuCtxSynchronize()
except KeyboardInterrupt:
    print("interrupted", code(d.cuStreamQuery(0)))
latch.open()
print(code(d.cuCtxSynchronize()), d.fault)
""", "interrupted NOT_READY\nSUCCESS None\n")  # fmt: skip


def test_an_interrupted_copy_does_not_touch_the_array_any_more() -> None:
    check("""
import numpy as np
start()
latch, array = Latch(), np.zeros(1 << 20, np.uint8)
pointer = value(d.cuMemAlloc(array.nbytes))
launch(function(latch))
d.cuMemsetD8(pointer, 7, array.nbytes)
latch.wait_until_entered()
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    d.cuMemcpyDtoH(array.ctypes.data, pointer, array.nbytes)
except KeyboardInterrupt:
    print("interrupted")
latch.open()
print(code(d.cuCtxSynchronize()), array.any())
d.cuMemcpyDtoH(array.ctypes.data, pointer, array.nbytes)
print(array.all())
""", "interrupted\nSUCCESS False\nTrue\n")  # fmt: skip


def test_ctrl_c_during_work_on_the_main_thread_comes_when_it_is_done() -> None:
    check("""
start()
steps = []
def brief(launched):
    steps.append("begun")
    if len(steps) > 2:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10000):
            pass  # signal handlers run between instructions
    steps.append("done")
f = function(brief)
launch(f); d.cuCtxSynchronize()
d._state.scheduler._call_worker = lambda queue: None  # only this thread is left to run it
launch(f)
try:
    d.cuCtxSynchronize()
    print("not interrupted")
except KeyboardInterrupt:
    print(steps, d.fault, code(d.cuStreamQuery(0)))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
""", "['begun', 'done', 'begun', 'done'] None SUCCESS\nTrue\n")  # fmt: skip


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    program = "import sys, gpufleet.virtual; print([m for m in sys.modules if m.startswith('cuda')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
