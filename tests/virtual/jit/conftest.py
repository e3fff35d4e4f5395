"""The interpreter's tests of whole kernels, run by the JIT engine: two engines, one meaning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make devices of the tests compile their kernels."""
    import machine

    from gpufleet.virtual.jit import JitEngine

    monkeypatch.setattr(machine, "InterpreterEngine", JitEngine)
