"""The interpreter's tests of whole kernels, run by the JIT engine: two engines, one meaning."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))


@pytest.fixture(autouse=True, params=["quick", "best"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make devices of the tests compile their kernels, with little and with all optimisation."""
    import machine

    from gpufleet.virtual.jit import JitEngine
    from gpufleet.virtual.jit.llvm import Effort

    monkeypatch.setattr(machine, "InterpreterEngine", partial(JitEngine, Effort(request.param)))
