"""The kernels of the corpus (shared) on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_corpus_shared import *  # noqa: F403
