"""Kernels whose threads work together: reductions, histogram, atomics, named barriers, warp operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine import TARGETS, Device
from reference import f32, signed, unsigned

targets = pytest.mark.parametrize("target", TARGETS)
rng = np.random.default_rng(6)


@targets
@pytest.mark.parametrize(("n", "grid", "block"), [(1, 1, 32), (1000, 3, 96), (50001, 40, 256), (5, 2, 1024)])
def test_reduce_shfl(target: int, n: int, grid: int, block: int) -> None:
    device = Device.corpus("reduce_shfl", target)
    x = rng.integers(-50, 50, n).astype(np.float32)
    out = device.memory.upload(np.array([3], np.float32))
    device.launch("reduce_shfl", (grid, 1, 1), (block, 1, 1), device.memory.upload(x), out, n)
    assert device.memory.download(out, np.float32, 1)[0] == x.sum() + 3


@targets
@pytest.mark.parametrize(("n", "block"), [(1, 2), (1000, 64), (777, 128), (100000, 256)])
def test_reduce_in_shared_memory(target: int, n: int, block: int) -> None:
    device = Device.corpus("reduce_shfl", target)
    x = rng.standard_normal(n).astype(np.float32)
    grid = -(-n // (2 * block))
    out = device.memory.alloc(4 * grid)
    device.launch("reduce_sh", (grid, 1, 1), (block, 1, 1), device.memory.upload(x), out, n, shared=4 * block)
    padded = np.zeros(grid * 2 * block, np.float32)
    padded[:n] = x
    sums = padded.reshape(grid, 2, block).sum(axis=1, dtype=np.float32)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    assert np.array_equal(device.memory.download(out, np.float32, grid), sums[:, 0])


@targets
@pytest.mark.parametrize(
    ("n", "grid", "block"), [(1, 1, 32), (10007, 5, 64), (65536, 300, 256), (999, 2, 300)]
)
def test_histogram(target: int, n: int, grid: int, block: int) -> None:
    device = Device.corpus("histogram", target)
    x = rng.integers(0, 256, n, dtype=np.uint8) & rng.integers(0, 256, n, dtype=np.uint8)
    out = device.memory.upload(np.ones(256, np.uint32))
    device.launch("histogram", (grid, 1, 1), (block, 1, 1), device.memory.upload(x), out, n)
    result = device.memory.download(out, np.uint32, 256)
    assert np.array_equal(result, np.bincount(x, minlength=256) + 1)


@targets
@pytest.mark.parametrize("block", [1, 32, 100, 1024])
def test_atomics_hand_out_old_values_in_the_order_of_the_lanes(target: int, block: int) -> None:
    device = Device.corpus("histogram", target)
    memory = device.memory
    p = rng.integers(-1000, 1000, 16 + block, dtype=np.int32)
    p[8] = 0
    q = np.array([5, 0, 3], np.uint64)
    u = np.array([3, 9], np.uint32)
    f, d = np.array([0.5], np.float32), np.array([0.25], np.float64)
    addresses = [memory.upload(v) for v in (p, q, f, d, u)]
    device.launch("atomics", (1, 1, 1), (block, 1, 1), *addresses)
    expect_atomics(p, q, f, d, u, block)
    assert np.array_equal(memory.download(addresses[0], np.int32, len(p)), p)
    assert np.array_equal(memory.download(addresses[1], np.uint64, 3), q)
    assert memory.download(addresses[2], np.float32, 1)[0] == f[0]
    assert memory.download(addresses[3], np.float64, 1)[0] == d[0]
    assert np.array_equal(memory.download(addresses[4], np.uint32, 2), u)


def expect_atomics(p: Any, q: Any, f: Any, d: Any, u: Any, block: int) -> None:
    """One atomic operation after the other, the lanes of each in order."""
    ints, longs, counters = [int(v) for v in p], [int(v) for v in q], [int(v) for v in u]
    old = [[0] * block for _ in range(8)]
    for t in range(block):
        ints[0] = signed(ints[0] + t, 32)
        for number, function in enumerate(
            (
                lambda v, t: signed(v - t, 32),
                max,
                min,
                lambda v, t: v & t,
                lambda v, t: v | t,
                lambda v, t: v ^ t,
                lambda v, t: t,
                lambda v, t: t if v == 0 else v,
            )
        ):
            old[number][t] = ints[1 + number]
            ints[1 + number] = function(ints[1 + number], t)
    for t in range(block):
        v = counters[0]
        counters[0] = 0 if v >= 7 else v + 1
        w = counters[1]
        counters[1] = 7 if w == 0 or w > 7 else w - 1
        longs[0] += t
        x = longs[1]
        longs[1] = t if x == 0 else x
        y = longs[2]
        longs[2] = max(y, t)
        ff, dd = float(f[0]), float(d[0])
        f[0] = f32(ff + 1.5)
        d[0] = dd + 2.5
        total = sum(o[t] for o in old) + signed(unsigned(v + w + x + y, 32), 32) + int(ff) + int(dd)
        ints[16 + t] = signed(total, 32)
    p[:], q[:], u[:] = ints, longs, counters


@targets
def test_the_last_block_sees_what_the_others_wrote(target: int) -> None:
    device = Device.corpus("histogram", target)
    blocks = 300
    counter = device.memory.upload(np.zeros(1, np.uint32))
    part, out = device.memory.alloc(4 * blocks), device.memory.alloc(4)
    device.launch("spin_last_block", (blocks, 1, 1), (64, 1, 1), counter, part, out, blocks)
    assert device.memory.download(out, np.float32, 1)[0] == sum(0.5 * i for i in range(blocks))
    assert device.memory.download(counter, np.uint32, 1)[0] == blocks


@targets
@pytest.mark.parametrize(("grid", "block"), [(1, 32), (3, 64), (300, 128)])
def test_warp_operations(target: int, grid: int, block: int) -> None:
    device = Device.corpus("warp_ops", target)
    x = rng.integers(-2, 9, grid * block, dtype=np.int32)
    x[:32] = 7
    y, z = device.memory.alloc(4 * len(x)), device.memory.alloc(4 * len(x))
    device.launch("warp_ops", (grid, 1, 1), (block, 1, 1), device.memory.upload(x), y, z)
    expected = [warp_of(list(map(int, x[i : i + 32])), target >= 80) for i in range(0, len(x), 32)]
    assert device.memory.download(y, np.int32, len(x)).tolist() == [v for ys, _ in expected for v in ys]
    assert device.memory.download(z, np.uint32, len(x)).tolist() == [v for _, zs in expected for v in zs]


def warp_of(v: list[int], has_redux: bool) -> tuple[list[int], list[int]]:
    ballot = sum(1 << i for i in range(32) if v[i] > 0)
    everyone = 0xFFFFFFFF
    same = len(set(v)) == 1
    ys, zs = [], []
    for i in range(32):
        y = v[3] + v[i ^ 1] * 3 + v[max(i - 1, 0)] * 5
        y += any(a == 7 for a in v) + 2 * all(a >= 0 for a in v) + same
        if has_redux:
            y += sum(v) + max(v)
        matches = sum(1 << j for j in range(32) if v[j] == v[i])
        match_all = everyone if same else 0
        z = ballot ^ matches ^ match_all ^ everyone ^ ballot.bit_count() ^ ((matches & -matches).bit_length())
        z ^= 32 - match_all.bit_length()
        z ^= int(f"{unsigned(v[i], 32):032b}"[::-1], 2)
        ys.append(signed(y, 32))
        zs.append(z)
    return ys, zs


@targets
@pytest.mark.parametrize(("n", "m"), [(64, 0), (64, 3), (64, 9), (50, 5)])
def test_barriers_in_branches_and_loops_and_with_counts(target: int, n: int, m: int) -> None:
    device = Device.corpus("coop_div", target)
    x = rng.integers(-20, 130, 64, dtype=np.int32)
    address = device.memory.upload(x)
    device.launch("coop", (1, 1, 1), (64, 1, 1), address, n, m)
    s = [int(v) for v in x[:n]]
    if m > 3:
        s = [v + 1 for v in s]
    for k in range(m):
        s = [s[(t + k) % n] + 1 for t in range(n)]
    extra = sum(v & 1 for v in s) + any(v > 100 for v in s) + all(v > 0 for v in s)
    assert device.memory.download(address, np.int32, 64).tolist() == [v + extra for v in s] + x[n:].tolist()
