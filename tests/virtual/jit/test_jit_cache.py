"""Compiled code on disk: found again, never trusted blindly, bounded, and optional."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from machine import Device

from gpufleet.virtual.jit import cache
from gpufleet.virtual.jit.llvm import Compiler, Effort


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUFLEET_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run_vectoradd() -> None:
    device = Device.corpus("vectoradd", 90)
    a = np.arange(100, dtype=np.float32)
    address = device.memory.upload(a)
    out = device.memory.alloc(400)
    device.launch("vectoradd", (1, 1, 1), (128, 1, 1), address, address, out, 100)
    assert np.array_equal(device.memory.download(out, np.float32, 100), 2 * a)


@pytest.fixture
def compiled_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is given to LLVM from now on."""
    texts: list[str] = []
    compile = Compiler.compile

    def note(self: Compiler, source: str, effort: Effort = Effort.BEST) -> bytes:
        if "@gf_kernel" in source:
            texts.append(source)
        return compile(self, source, effort)

    monkeypatch.setattr(Compiler, "compile", note)
    return texts


def test_a_kernel_is_compiled_once(compiled_texts: list[str], folder: Path) -> None:
    run_vectoradd()
    assert len(compiled_texts) == 1
    run_vectoradd()
    assert len(compiled_texts) == 1
    assert not list(folder.glob("*.part"))


def test_a_damaged_entry_is_compiled_again(compiled_texts: list[str], folder: Path) -> None:
    run_vectoradd()
    for path in folder.glob("*.bin"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    run_vectoradd()
    assert len(compiled_texts) == 2
    for path in folder.glob("*.bin"):
        path.write_bytes(b"")
    run_vectoradd()
    assert len(compiled_texts) == 3


def test_the_cache_can_be_turned_off(compiled_texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLEET_CACHE_DIR", "")
    run_vectoradd()
    run_vectoradd()
    assert len(compiled_texts) == 2


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUFLEET_CACHE_DIR", str(tmp_path / "file" / "below"))
    run_vectoradd()


def test_what_was_not_used_for_longest_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(cache, "LIMIT_BYTES", 3000)
    for age, name in enumerate(("c", "b", "a")):
        cache.store(name, {}, bytes(1000))
        os.utime(folder / f"{name}.bin", (1000 - age, 1000 - age))
    cache.store("d", {}, bytes(1000))
    assert sorted(p.stem for p in folder.glob("*.bin")) == ["c", "d"]


def test_many_processes_may_share_it(folder: Path) -> None:
    text = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'interpreter')!r})\n"
        "import machine\n"
        "from gpufleet.virtual.jit import JitEngine\n"
        "machine.InterpreterEngine = JitEngine\n"
        "d = machine.Device.corpus('vectoradd', 90)\n"
        "p = d.memory.alloc(512)\n"
        "d.launch('vectoradd', (1, 1, 1), (128, 1, 1), p, p, p, 128)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", text]) for _ in range(3)]
    assert [process.wait(100) for process in running] == [0, 0, 0]
