"""PTX of NVRTC 13.5, which has 32-bit addresses of shared memory where 13.0 has 64-bit ones."""

from __future__ import annotations

import numpy as np
import pytest
from machine import Device

rng = np.random.default_rng(135)


def corpus(name: str) -> Device:
    return Device.corpus(f"nvrtc-13.5/{name}", 90)


def test_histogram_in_static_shared_memory() -> None:
    device = corpus("histogram")
    x = rng.integers(0, 256, 10_007, dtype=np.uint8)
    out = device.memory.upload(np.zeros(256, np.uint32))
    device.launch("histogram", (5, 1, 1), (64, 1, 1), device.memory.upload(x), out, x.size)
    assert np.array_equal(device.memory.download(out, np.uint32, 256), np.bincount(x, minlength=256))


@pytest.mark.parametrize(("kernel", "shared"), [("matmul", 0), ("matmul_dyn", 2 * 4 * 256)])
def test_matmul_in_static_and_dynamic_shared_memory(kernel: str, shared: int) -> None:
    n = 48
    device = corpus("matmul_tiled")
    a, b = (rng.integers(-8, 8, (n, n)).astype(np.float32) for _ in range(2))
    memory, c = device.memory, device.memory.alloc(4 * n * n)
    grid, block = (n // 16, n // 16, 1), (16, 16, 1)
    device.launch(kernel, grid, block, memory.upload(a), memory.upload(b), c, n, shared=shared)
    assert np.array_equal(memory.download(c, np.float32, n * n).reshape(n, n), a @ b)


def test_reduction_in_dynamic_shared_memory() -> None:
    device = corpus("reduce_shfl")
    x = rng.integers(-50, 50, 1000).astype(np.float32)
    out = device.memory.alloc(4 * 8)
    device.launch("reduce_sh", (8, 1, 1), (64, 1, 1), device.memory.upload(x), out, x.size, shared=4 * 64)
    assert device.memory.download(out, np.float32, 8).sum() == x.sum()
