"""The kernels of the corpus (functions) on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_corpus_functions import *  # noqa: F403
