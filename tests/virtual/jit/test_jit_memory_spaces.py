"""The interpreter's tests of memory spaces, on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_memory_spaces import *  # noqa: F403

# Shared memory is not zeroed for every block, on a GPU as little as here.
del test_generic_atomics  # noqa: F821
