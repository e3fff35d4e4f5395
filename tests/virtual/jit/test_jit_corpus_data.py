"""The kernels of the corpus (data) on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_corpus_data import *  # noqa: F403
