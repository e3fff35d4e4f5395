"""The interpreter's tests of mbarriers, copies, stacks and heaps, on the JIT engine (conftest.py)."""

from __future__ import annotations

from test_async_copies import *  # noqa: F403
