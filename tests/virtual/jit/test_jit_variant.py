"""A kernel that runs for long is compiled again, optimised, and its launches go on with that."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import Device

from gpufleet.virtual.jit import JitEngine, engine, variant
from gpufleet.virtual.jit.abi import Job
from gpufleet.virtual.jit.kernel import Generated
from gpufleet.virtual.jit.llvm import Compiler, Effort
from gpufleet.virtual.jit.optimiser import Optimiser, optimiser
from gpufleet.virtual.jit.variant import Code, Later, Variant


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Let these tests choose the engine themselves, in place of conftest.py."""


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLEET_CACHE_DIR", "")


def code(entry: int, lanes: int = 32, effort: Effort = Effort.QUICK) -> Code:
    return Code(
        Generated("", "", [], [], 0, 0, 0, 0, lanes, True, []),
        effort,
        entry,
        Later(lambda: (9, None)),
        None,
        None,
    )


def optimised_in_the_end() -> None:
    """Wait until the optimiser has done all that it was given so far."""
    done = threading.Event()
    optimiser().submit(done.set)
    assert done.wait(60)


class Vectors:
    """Launches of vectoradd on a device."""

    def __init__(self) -> None:
        self.device = Device.corpus("vectoradd", 90)
        self.device.engine = JitEngine()
        self.a = np.arange(1000, dtype=np.float32)
        self.address = self.device.memory.upload(self.a)
        self.out = self.device.memory.alloc(4000)
        self.executable: Any = None

    def launch(self, count: int = 1000, block: int = 128) -> None:
        values = (self.address, self.address, self.out, count)
        grid = (-(-count // block), 1, 1)
        self.executable, launch = self.device.prepare("vectoradd", grid, (block, 1, 1), *values)
        self.executable.run(launch)
        found = self.device.memory.download(self.out, np.float32, count)
        assert np.array_equal(found, 2 * self.a[:count])

    @property
    def efforts(self) -> list[Effort]:
        return [v.code.effort for v in self.executable._variants.values()]


def test_a_kernel_that_has_run_for_long_is_optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant, "PATIENCE", 0.0)
    vectors = Vectors()
    vectors.launch()
    optimised_in_the_end()
    assert vectors.efforts == [Effort.BEST]
    vectors.launch()


def test_a_kernel_that_runs_shortly_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant, "PATIENCE", 1e9)
    vectors = Vectors()
    vectors.launch()
    optimised_in_the_end()
    assert vectors.efforts == [Effort.QUICK]


def test_the_next_process_finds_the_best_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUFLEET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(variant, "PATIENCE", 0.0)
    Vectors().launch()
    optimised_in_the_end()

    def refuse(*ignored: Any) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(engine.compiler(), "compile", refuse, raising=False)
    again = Vectors()
    again.launch()
    assert again.efforts == [Effort.BEST]


def test_launches_that_run_go_on_with_better_code() -> None:
    asked: list[Variant] = []
    changing = Variant(code(1), asked.append)
    job, other = Job(entry=1), Job(entry=3)
    with changing.running(job, changing.code), changing.running(other, code(3, lanes=16)):
        changing.replace(code(2, effort=Effort.BEST))
    assert job.entry == 2
    assert other.entry == 3, "its registers lie otherwise"
    changing.replace(code(4, effort=Effort.BEST))
    assert job.entry == 2, "the launch had ended"


def test_better_code_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant, "PATIENCE", 0.0)
    asked: list[Variant] = []
    changing = Variant(code(1), asked.append)
    for _ in range(3):
        with changing.running(Job(), changing.code) as still_running:
            still_running()
            still_running()
    assert asked == [changing]


@pytest.fixture
def compiled_functions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of a kernel's two functions LLVM was given."""
    functions: list[str] = []
    compile = Compiler.compile

    def note(self: Compiler, source: str, effort: Effort = Effort.BEST) -> bytes:
        functions.append(re.findall(r"^define \w+ @(gf_\w+)", source, re.MULTILINE)[0])
        return compile(self, source, effort)

    monkeypatch.setattr(Compiler, "compile", note)
    return functions


def test_diverged_code_is_compiled_when_lanes_part(compiled_functions: list[str]) -> None:
    vectors = Vectors()
    vectors.launch(992)
    assert compiled_functions == ["gf_kernel"], "all warps are whole, or none of their lanes has work"
    vectors.launch(993, block=31)
    vectors.launch(993, block=31)
    assert compiled_functions == ["gf_kernel", "gf_diverged"]


def test_what_stops_its_compilation_stops_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = Vectors()
    vectors.launch(992)
    compile = Compiler.compile

    def interrupted(*ignored: Any) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(Compiler, "compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        vectors.launch(993, block=31)
    monkeypatch.setattr(Compiler, "compile", compile)
    vectors.launch(993, block=31)


def test_the_optimiser_survives_what_it_does() -> None:
    working = Optimiser()

    def fails() -> None:
        raise ValueError("no")

    done = threading.Event()
    with pytest.warns(UserWarning, match=r"stays as it was first compiled: ValueError\('no'\)"):
        working.submit(fails)
        working.submit(done.set)
        assert done.wait(60)
    working.close()
    working.close()


def test_a_process_may_end_while_it_optimises() -> None:
    text = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'interpreter')!r})\n"
        "import machine\n"
        "from gpufleet.virtual.jit import JitEngine, variant\n"
        "variant.PATIENCE = 0.0\n"
        "machine.InterpreterEngine = JitEngine\n"
        "d = machine.Device.corpus('switch_brx', 90)\n"
        "p = d.memory.alloc(1 << 16)\n"
        "d.launch('sw', (1, 1, 1), (32, 1, 1), p, p, 32)\n"
        "print('launched')\n"
    )
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "launched\n", "")
