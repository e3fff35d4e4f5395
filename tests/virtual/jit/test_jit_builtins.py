"""The interpreter's tests of builtins, on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_builtins import *  # noqa: F403
