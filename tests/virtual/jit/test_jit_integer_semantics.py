"""The interpreter's tests of integer semantics, on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_integer_semantics import *  # noqa: F403
