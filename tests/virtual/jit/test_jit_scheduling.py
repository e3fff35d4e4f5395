"""The interpreter's tests of scheduling, on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_scheduling import *  # noqa: F403

# Lanes of a compiled warp run in step: one that spins on a lock which its neighbour holds never ends.
del test_a_spin_lock_between_all_threads  # noqa: F821
