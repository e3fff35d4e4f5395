"""The virtual driver with the JIT engine: recorded answers, faults, and a process that survives them."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import Device
from snippet import kernel_text

from gpufleet.virtual import VirtualDriver
from gpufleet.virtual.engine import KernelFault
from gpufleet.virtual.jit import JitEngine

FOLDER = Path(__file__).parents[3] / "conformance"
RECORDED: dict[str, Any] = json.loads((FOLDER / "h200-driver-580.json").read_text())
RECORDED_FAULTS: dict[str, Any] = json.loads((FOLDER / "h200-driver-580-faults.json").read_text())


def load_probes() -> Any:
    spec = importlib.util.spec_from_file_location("conformance_probes_jit", FOLDER / "probes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["conformance_probes_jit"] = module
    spec.loader.exec_module(module)
    return module


PROBES = load_probes()


def test_every_recorded_answer_is_given() -> None:
    driver = VirtualDriver(devices=2, visible_devices=None, engine=JitEngine())
    found = json.loads(json.dumps(PROBES.probe(driver, PROBES.stored_kernels())))
    driver.reset()
    assert {k: v for k, v in found.items() if v != RECORDED[k]} == {}


@pytest.mark.parametrize("kernel", PROBES.FAULTING)
def test_answers_after_a_fault(kernel: str) -> None:
    driver = VirtualDriver(devices=2, visible_devices=None, engine=JitEngine())
    found = json.loads(json.dumps(PROBES.fault(driver, PROBES.stored_kernels(), kernel)))
    driver.reset()
    assert found == RECORDED_FAULTS[kernel]


class Holey:
    """A region with a page in its middle that is not mapped."""

    def __init__(self) -> None:
        import ctypes
        import mmap

        self._map = mmap.mmap(-1, 1 << 20)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.base = self._bytes.ctypes.data
        self.hole = self.base + (1 << 19)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(self.hole), 4096, 0) == 0

    def view(self, dtype: Any) -> Any:
        return self._bytes.view(dtype)

    def spans(self) -> Any:
        return np.array([self.base], np.uint64), np.array([self.hole], np.uint64)

    def describe(self, address: int) -> str:
        return f"near {address:#x}"


def store_at(address: int, memory: Any) -> None:
    device = Device.load(kernel_text("ld.param.u64 %rd1, [p0]; st.global.u32 [%rd1], 1;"))
    device.memory = memory
    device.launch("k", (1, 1, 1), (32, 1, 1), address)


def test_a_hole_in_the_region_is_an_illegal_address_with_faulthandler_on() -> None:
    assert faulthandler.is_enabled(), "pytest enables it"
    memory = Holey()
    for _ in range(3):
        with pytest.raises(KernelFault) as caught:
            store_at(memory.hole + 64, memory)
        assert caught.value.code == "ILLEGAL_ADDRESS"
        assert f"{memory.hole + 64:#x}" in str(caught.value)
        faulthandler.disable()
        faulthandler.enable()
        store_at(memory.base, memory)


def test_many_threads_may_fault_at_once() -> None:
    memory = Holey()
    device = Device.load(kernel_text("ld.param.u64 %rd1, [p0]; st.global.u32 [%rd1], 1;"))
    device.memory = memory  # type: ignore[assignment]
    outcomes: list[str] = []

    def work(address: int) -> None:
        for _ in range(50):
            try:
                device.launch("k", (1, 1, 1), (32, 1, 1), address)
                outcomes.append("fine")
            except KernelFault as fault:
                outcomes.append(fault.code)

    device.launch("k", (1, 1, 1), (32, 1, 1), memory.base)
    threads = [threading.Thread(target=work, args=(a,)) for a in (memory.hole, memory.base) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(outcomes)) == ["ILLEGAL_ADDRESS", "fine"]
    assert outcomes.count("fine") == outcomes.count("ILLEGAL_ADDRESS") == 200


def test_a_fault_that_is_not_a_kernels_still_ends_the_process() -> None:
    text = (
        "from gpufleet.virtual.jit.runtime import runtime\n"
        "runtime()._install_handlers()\n"
        "import ctypes; ctypes.string_at(0)\n"
    )
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", text], capture_output=True, timeout=60)
    assert done.returncode == -11
    assert b"Segmentation fault" in done.stderr


@pytest.mark.parametrize(("a", "b"), [(7, 0), (-(1 << 31), -1), (-(1 << 31), 0)])
@pytest.mark.parametrize("type", ["s32", "u32", "s64", "u64"])
def test_division_never_traps(type: str, a: int, b: int) -> None:
    size = type[1:]
    register = "%r" if size == "32" else "%rd"
    a = a if size == "32" or a > 0 else -(1 << 63)
    text = kernel_text(
        f"ld.param.u64 %rd1, [p0]; ld.param.{type} {register}2, [a]; ld.param.{type} {register}3, [b]; "
        f"div.{type} {register}4, {register}2, {register}3; st.global.b{size} [%rd1], {register}4;",
        parameters=f".param .u64 p0, .param .{type} a, .param .{type} b",
    )
    device = Device.load(text)
    out = device.memory.alloc(8)
    device.launch("k", (1, 1, 1), (32, 1, 1), out, a, b)
    if b == 0:
        found = device.memory.download(out, np.uint32 if size == "32" else np.uint64, 1)[0]
        assert found == (1 << int(size)) - 1


@pytest.mark.parametrize(("share", "workers"), [(4, 4), (1, 2)])
def test_green_context_has_as_many_cpu_threads_as_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, share: int, workers: int
) -> None:
    import gpufleet as gf
    from gpufleet.virtual.jit.runtime import Runtime, runtime

    monkeypatch.setattr(Runtime, "parallelism", 4)
    taking_part: list[int] = []
    submit = runtime()._submit

    def watch(queue: Any, job: int, count: int) -> int:
        taking_part.append(count)
        return int(submit(queue, job, count))

    monkeypatch.setattr(runtime(), "_submit", watch)
    driver = VirtualDriver(devices=1, multiprocessors=4, engine=JitEngine(), visible_devices=None)
    loop = gf.Program.from_image(LOOP, driver=driver).kernel("loop")
    green = gf.Device(0, driver).create_green_context(sm_count=share)
    with green:
        loop.launch(1000, 32, 10)
        green.synchronize()
    green.close()
    driver.reset()
    assert taking_part == [workers]


LOOP = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry loop(.param .u32 count) {
    .reg .pred %p0; .reg .b32 %r0;
    ld.param.u32 %r0, [count];
again:
    sub.u32 %r0, %r0, 1;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra again;
    ret;
}
"""
