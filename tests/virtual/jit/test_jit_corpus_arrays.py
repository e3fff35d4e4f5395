"""The kernels of the corpus (arrays) on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_corpus_arrays import *  # noqa: F403
