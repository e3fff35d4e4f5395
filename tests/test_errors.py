"""Errors carry what happened across process borders."""

from __future__ import annotations

import pickle

import pytest

from gpufleet import errors
from gpufleet.launchlog import LaunchLog

SAMPLES = [
    errors.CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc", "out of memory"),
    errors.StickyError(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "cuMemAlloc", "illegal", ("fill <<<1, 32>>>",)),
    errors.StickyError(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "cuMemAlloc", is_virtual=True),
    errors.CompileError("kernel.cu(3): error", "the log"),
    errors.KernelArgumentError("parameter 1"),
    errors.ContextClosed("closed"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: errors.GpufleetError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.__dict__ == error.__dict__


def test_sticky_error_names_the_launches_in_flight() -> None:
    assert "Launches in flight: fill <<<1, 32>>>." in str(SAMPLES[1])


def test_sticky_error_names_the_cure_of_its_driver() -> None:
    real = errors.StickyError(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "cuMemAlloc")
    virtual = errors.StickyError(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "cuMemAlloc", is_virtual=True)
    assert "every CUDA call of this process fails from now on; start a new process." in str(real)
    assert "every call of this virtual driver fails from now on; reset the driver, or use" in str(virtual)


def test_note_is_attached() -> None:
    error = ValueError("first")
    errors.add_note(error, "second")
    assert error.__notes__ == ["second"]  # type: ignore[attr-defined]


def test_launches_leave_the_log_when_known_complete() -> None:
    log = LaunchLog()
    log.add(1, 10, "a")
    mark = log.mark()
    log.add(1, 10, "b")
    log.add(1, 11, "c")
    log.add(2, 10, "d")
    assert log.suspects() == ("a", "b", "c", "d")
    log.finished(1, 10, mark)
    assert log.suspects() == ("b", "c", "d")
    log.finished(1)
    assert log.suspects() == ("d",)
