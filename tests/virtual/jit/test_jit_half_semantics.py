"""The interpreter's tests of half semantics, on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_half_semantics import *  # noqa: F403
