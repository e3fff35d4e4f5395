"""The virtual driver answers call sequences as the real one did (conformance/)."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpufleet.virtual import VirtualDriver

FOLDER = Path(__file__).parents[2] / "conformance"
RECORDED: dict[str, Any] = json.loads((FOLDER / "h200-driver-580.json").read_text())
RECORDED_FAULTS: dict[str, Any] = json.loads((FOLDER / "h200-driver-580-faults.json").read_text())
EXPLAINED: dict[str, str] = {}
"""Probes whose answer depends on the hardware's own limits, and why. There are none."""


def load_probes() -> Any:
    spec = importlib.util.spec_from_file_location("conformance_probes", FOLDER / "probes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["conformance_probes"] = module
    spec.loader.exec_module(module)
    return module


PROBES = load_probes()


@functools.cache
def answers() -> dict[str, Any]:
    driver = VirtualDriver(devices=2, visible_devices=None)
    found: dict[str, Any] = json.loads(json.dumps(PROBES.probe(driver, PROBES.stored_kernels())))
    driver.reset()
    return found


def test_there_are_149_recorded_answers() -> None:
    assert len(RECORDED) == 149


def test_the_same_probes_are_answered() -> None:
    assert answers().keys() == RECORDED.keys()


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_answer(name: str) -> None:
    if name in EXPLAINED:
        pytest.skip(EXPLAINED[name])
    assert answers()[name] == RECORDED[name]


@pytest.mark.parametrize("kernel", PROBES.FAULTING)
def test_answers_after_a_fault(kernel: str) -> None:
    driver = VirtualDriver(devices=2, visible_devices=None)
    found = json.loads(json.dumps(PROBES.fault(driver, PROBES.stored_kernels(), kernel)))
    driver.reset()
    assert found == RECORDED_FAULTS[kernel]


def test_the_stored_kernels_are_what_nvrtc_makes_of_the_source() -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    if nvrtc.nvrtcVersion()[1:] != (13, 0):
        pytest.skip("the stored kernels were made by NVRTC 13.0")
    assert PROBES.compile_kernels().rstrip(b"\0") == PROBES.stored_kernels().rstrip(b"\0")
