"""The interpreter's tests of divergence, on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_divergence import *  # noqa: F403

# Every example is a kernel to compile: fewer of them.
del test_small_launches  # noqa: F821
del test_launches_large_enough_to_leave_idle_lanes_behind  # noqa: F821


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs, st.integers(0, 1000))  # noqa: F405
def test_any_program(statements: Any, seed: int) -> None:
    check(statements, 96, 48, seed)  # noqa: F405
