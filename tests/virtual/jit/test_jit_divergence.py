"""The interpreter's tests of divergence, on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_divergence import *  # noqa: F403
