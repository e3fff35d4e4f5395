"""The virtual driver needs a current context where the real one does (conformance/current_context.py)."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from gpufleet.virtual import VirtualDriver

FOLDER = Path(__file__).parents[2] / "conformance"
RECORDED: dict[str, Any] = json.loads((FOLDER / "h200-driver-580-current-context.json").read_text())


@functools.cache
def answers() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("current_context", FOLDER / "current_context.py")
    assert spec is not None
    assert spec.loader is not None
    probes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(probes)
    driver = VirtualDriver(devices=1, visible_devices=None)
    found: dict[str, Any] = probes.probe(driver, (FOLDER / "kernels.ptx").read_bytes() + b"\0")
    driver.reset()
    return found


@pytest.mark.parametrize("call", sorted(RECORDED))
def test_answer(call: str) -> None:
    assert answers()[call] == RECORDED[call]
