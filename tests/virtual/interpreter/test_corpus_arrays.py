"""Kernels over arrays: vectoradd, saxpy, mandelbrot, the tiled matrix products, vec4."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine import TARGETS, Device
from reference import fma32

targets = pytest.mark.parametrize("target", TARGETS)
rng = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


@targets
@pytest.mark.parametrize(("n", "block"), [(1, 32), (31, 7), (1000, 128), (4097, 33), (70001, 256)])
def test_vectoradd(target: int, n: int, block: int) -> None:
    device = Device.corpus("vectoradd", target)
    a, b = normal(n), normal(n)
    out = device.memory.upload(np.full(n + 1, 7, np.float32))
    grid = (-(-n // block), 1, 1)
    device.launch("vectoradd", grid, (block, 1, 1), device.memory.upload(a), device.memory.upload(b), out, n)
    result = device.memory.download(out, np.float32, n + 1)
    assert np.array_equal(result[:n], a + b)
    assert result[n] == 7, "nothing is written past the end"


@targets
@pytest.mark.parametrize(("n", "grid", "block"), [(1, 1, 1), (777, 2, 33), (2000, 5, 96)])
def test_saxpy_rounds_once(target: int, n: int, grid: int, block: int) -> None:
    device = Device.corpus("saxpy", target)
    x, y = normal(n), normal(n)
    out = device.memory.upload(y)
    device.launch("saxpy", (grid, 1, 1), (block, 1, 1), 1.7, device.memory.upload(x), out, n)
    expected = fma32(np.float32(1.7), x, y)
    assert np.array_equal(device.memory.download(out, np.float32, n), expected)


@targets
@pytest.mark.parametrize(("width", "height", "limit"), [(7, 5, 20), (65, 130, 64), (200, 190, 100)])
def test_mandelbrot(target: int, width: int, height: int, limit: int) -> None:
    device = Device.corpus("mandelbrot", target)
    out = device.memory.upload(np.full(width * height, -1, np.int32))
    x0, y0, dx, dy = (np.float32(v) for v in (-2.0, -1.25, 2.5 / width, 2.5 / height))
    grid = (-(-width // 16), -(-height // 8), 1)
    device.launch("mandelbrot", grid, (16, 8, 1), out, width, height, x0, y0, dx, dy, limit)
    result = device.memory.download(out, np.int32, width * height).reshape(height, width)
    assert np.array_equal(result, mandelbrot(width, height, x0, y0, dx, dy, limit))


def mandelbrot(width: int, height: int, x0: Any, y0: Any, dx: Any, dy: Any, limit: int) -> Any:
    """In the order of operations that the compiler chose; a sum of doubles stands for each fma."""

    def fma(a: Any, b: Any, c: Any) -> Any:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    px, py = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    cx, cy = fma(px, dx, x0), fma(py, dy, y0)
    x, y, xx, yy = (np.zeros_like(cx) for _ in range(4))
    count = np.zeros(cx.shape, np.int32)
    going = np.ones(cx.shape, np.bool_)
    for _ in range(limit):
        with np.errstate(all="ignore"):
            next_x = cx + (xx - yy)
            y = np.where(going, fma(x + x, y, cy), y)
            x = np.where(going, next_x, x)
            xx, yy = x * x, y * y
        count += going
        going &= xx + yy <= np.float32(4)
    return count


@targets
@pytest.mark.parametrize("n", [16, 48, 80])
def test_matmul_tiled(target: int, n: int) -> None:
    device = Device.corpus("matmul_tiled", target)
    a, b = normal(n, n), normal(n, n)
    out = device.memory.alloc(4 * n * n)
    device.launch(
        "matmul", (n // 16, n // 16, 1), (16, 16, 1), device.memory.upload(a), device.memory.upload(b), out, n
    )
    result = device.memory.download(out, np.float32, n * n).reshape(n, n)
    assert np.array_equal(result, product(a, b))


@targets
@pytest.mark.parametrize(("n", "tile"), [(1, 2), (5, 4), (33, 8), (50, 16)])
def test_matmul_with_dynamic_shared_memory(target: int, n: int, tile: int) -> None:
    device = Device.corpus("matmul_tiled", target)
    a, b = normal(n, n), normal(n, n)
    out = device.memory.alloc(4 * n * n)
    blocks = -(-n // tile)
    device.launch(
        "matmul_dyn",
        (blocks, blocks, 1),
        (tile, tile, 1),
        device.memory.upload(a),
        device.memory.upload(b),
        out,
        n,
        shared=2 * 4 * tile * tile,
    )
    result = device.memory.download(out, np.float32, n * n).reshape(n, n)
    assert np.array_equal(result, product(a, b))


def product(a: Any, b: Any) -> Any:
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(len(b)):
        exact = a[:, k : k + 1].astype(np.float64) * b[k : k + 1].astype(np.float64)
        total = (exact + total).astype(np.float32)
    return total


@targets
@pytest.mark.parametrize(("n", "grid", "block"), [(1, 1, 32), (37, 2, 32), (3000, 24, 128)])
def test_vec4(target: int, n: int, grid: int, block: int) -> None:
    device = Device.corpus("vec4", target)
    memory = device.memory
    a, b = normal(n, 4), normal(n, 4)
    d = rng.standard_normal((n, 2))
    u = rng.integers(0, 256, (n, 4), dtype=np.uint8)
    s = rng.integers(-30000, 30000, (n, 2), dtype=np.int16)
    addresses = [memory.upload(v) for v in (a, b, np.zeros_like(a), d, u, s)]
    device.launch("vec4", (grid, 1, 1), (block, 1, 1), *addresses, n)
    c = memory.download(addresses[2], np.float32, 4 * n).reshape(n, 4)
    x, y = a.T, b.T
    expected = np.stack((x[0] + y[0], x[1] * y[1], x[2] - y[2], x[3] / y[3]), axis=1)
    assert np.array_equal(c, expected)
    assert np.array_equal(memory.download(addresses[3], np.float64, 2 * n).reshape(n, 2), d[:, ::-1])
    bytes_out = memory.download(addresses[4], np.uint8, 4 * n).reshape(n, 4)
    u[:, 0] += u[:, 1]
    u[:, 2] ^= u[:, 3]
    assert np.array_equal(bytes_out, u)
    assert np.array_equal(memory.download(addresses[5], np.int16, 2 * n).reshape(n, 2), s[:, ::-1])
