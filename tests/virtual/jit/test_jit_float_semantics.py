"""The interpreter's tests of float semantics, on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_float_semantics import *  # noqa: F403
