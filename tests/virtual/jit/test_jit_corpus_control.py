"""The kernels of the corpus (control) on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_corpus_control import *  # noqa: F403
