"""The interpreter's tests of scheduling, on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_scheduling import *  # noqa: F403
