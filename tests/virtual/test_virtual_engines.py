"""Which engine executes kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpufleet.errors import GpufleetError
from gpufleet.virtual.engines import FallbackEngine, engine_from_environment
from gpufleet.virtual.ptx import Module, PtxError, parse

MODULE = parse((Path(__file__).parents[2] / "conformance" / "kernels.ptx").read_text())


class Knows:
    def __init__(self, name: str, code: str = "") -> None:
        self.name, self.code = name, code

    def load(self, module: Module, kernel: str, symbols: Mapping[str, int]) -> Any:
        if self.code:
            raise PtxError(self.code, "unsupported PTX")
        return self.name


@pytest.mark.parametrize(
    ("value", "name"), [("", "interpreter"), ("jit", "jit"), ("auto", "jit, else interpreter")]
)
def test_environment_names_the_engine(monkeypatch: pytest.MonkeyPatch, value: str, name: str) -> None:
    monkeypatch.setenv("GPUFLEET_ENGINE", value)
    assert engine_from_environment().name == name


def test_unknown_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLEET_ENGINE", "llvm")
    with pytest.raises(GpufleetError, match="is 'llvm': expected one of interpreter, jit, auto"):
        engine_from_environment()


def test_what_the_first_engine_does_not_know_the_second_runs() -> None:
    engine = FallbackEngine(Knows("first", "NOT_SUPPORTED"), Knows("second"))
    with pytest.warns(UserWarning, match="kernel 'fill' runs on the second"):
        assert engine.load(MODULE, "fill", {}) == "second"


def test_what_the_first_engine_knows_it_runs() -> None:
    assert FallbackEngine(Knows("first"), Knows("second")).load(MODULE, "fill", {}) == "first"


def test_invalid_ptx_is_not_tried_twice() -> None:
    engine = FallbackEngine(Knows("first", "INVALID_PTX"), Knows("second"))
    with pytest.raises(PtxError):
        engine.load(MODULE, "fill", {})
