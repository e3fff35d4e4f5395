"""Kernels about data: structs as parameters, 64-bit integers, constant memory, local arrays."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from machine import TARGETS, Device
from reference import divide, remainder, signed, unsigned

targets = pytest.mark.parametrize("target", TARGETS)
rng = np.random.default_rng(7)
F = np.float32


@targets
@pytest.mark.parametrize("k", [0, 5, 9])
def test_structs(target: int, k: int) -> None:
    device = Device.corpus("structs", target)
    block = 40
    ints = rng.integers(-100, 100, block, dtype=np.int32)
    out = device.memory.alloc(4 * (block + 1))
    p = struct.pack("<f4xdbx3hQii", 1.5, 2.25, -7, 10, -20, 30, device.memory.upload(ints), 3, 4)
    m = rng.standard_normal(12).astype(np.float32)
    device.launch("structs", (1, 1, 1), (block, 1, 1), p, m.tobytes(), out, k)
    first = [
        F(F(F(F(F(F(F(1.5 + 2.25) + F(-7)) + F(s)) + F(i)) + F(3)) + F(4)) + m[k & 7])
        for s, i in zip([10, -20, 30] * 14, ints, strict=False)
    ]
    result = device.memory.download(out, np.float32, block + 1)
    assert result[0] == first[0]
    assert np.array_equal(result[1:], [v * m[1] for v in first])


@targets
@pytest.mark.parametrize("n", [0, 1, 31, 32, 63, 64, 77])
def test_int64(target: int, n: int) -> None:
    device = Device.corpus("int64", target)
    block = 70
    edges = [0, 1, -1, 2**63 - 1, -(2**63), 2**31, -(2**31), 2**32, 10, -7]
    a = np.array(
        [edges[i % 10] if i % 3 else signed(int(rng.integers(2**62)) * 4, 64) for i in range(block + 3)]
    )
    b = rng.integers(0, 2**64, block + 3, dtype=np.uint64) >> rng.integers(0, 64, block + 3, dtype=np.uint64)
    e = rng.integers(-(2**31), 2**31, block + 4, dtype=np.int32)
    e[:12] = [2**31 - 1, -(2**31), -1, 0, 1, 7, -7, 3, 2**31 - 1, -(2**31), 5, 6]
    a[a == 0], b[b == 0], e[e == 0] = 12, 13, 14  # division by zero is not defined
    c, d = np.zeros(block, np.int64), np.zeros(block, np.uint64)
    addresses = [device.memory.upload(v) for v in (a, b, c, d, e)]
    device.launch("int64", (1, 1, 1), (block, 1, 1), *addresses, n)
    got_c = device.memory.download(addresses[2], np.int64, block).tolist()
    got_d = device.memory.download(addresses[3], np.uint64, block).tolist()
    got_e = device.memory.download(addresses[4], np.int32, block + 4).tolist()
    a, b, e = ([int(v) for v in values] for values in (a, b, e))
    assert got_c == [signed(divide(a[i], a[i + 1]) + remainder(a[i], a[i + 2]), 64) for i in range(block)]
    assert got_d == [unsigned_of(a, b, i, n) for i in range(block)]
    assert got_e == [int_of(a, b, e, i, n) for i in range(block)] + e[block:]


def unsigned_of(a: list[int], b: list[int], i: int, n: int) -> int:
    total = b[i] // b[i + 1] + b[i] % 10 + (b[i] * b[i + 1] >> 64) + (a[i] * a[i + 1] >> 64)
    total += b[i] >> 3
    total += (a[i] >> min(n, 63)) + (b[i] << n if n < 64 else 0)
    ua = unsigned(a[i], 64)
    total += b[i].bit_count() + 64 - ua.bit_length() + (ua & -ua).bit_length()
    total += int(f"{b[i]:064b}"[::-1], 2)
    wide = b[i] * b[i + 1] + a[i]
    return unsigned(total + (unsigned(wide >> 64, 64) ^ unsigned(wide, 64)), 64)


def int_of(a: list[int], b: list[int], e: list[int], i: int, n: int) -> int:
    x, y = e[i], e[i + 1]
    total = divide(y, e[i + 2]) + remainder(x, 7) + (x * y >> 32) + min(x, 3) + max(x, 4) + signed(abs(x), 32)
    funnel = unsigned(y, 32) << 32 | unsigned(x, 32)
    total += funnel << (n & 31) >> 32
    total += x  # byte_perm 0x3210
    total += abs(x - y)
    total += sum(signed(x >> s, 8) * signed(y >> s, 8) for s in (0, 8, 16, 24))
    total += x << 3 | unsigned(x, 32) >> 29
    total += signed(x, 16) + signed(x, 8) + signed(a[i] * b[i], 32)
    total += unsigned(x, 32) * unsigned(e[i + 3], 32) >> 32
    return signed(total, 32)


@targets
@pytest.mark.parametrize("n", [0, 3, 5])
def test_constant_and_global_variables(target: int, n: int) -> None:
    device = Device.corpus("constmem", target)
    block = 32
    x = rng.standard_normal(block).astype(np.float32)
    address = device.memory.upload(x)
    for symbol, expected in (("coef", [1, 2, 3]), ("gcount", [5])):
        dtype = np.float32 if symbol == "coef" else np.int32
        assert device.memory.download(device.symbols[symbol], dtype, len(expected)).tolist() == expected
    device.launch("constmem", (1, 1, 1), (block, 1, 1), address, n)
    coef = np.zeros(16, np.float32)
    coef[:3] = 1, 2, 3
    s = np.zeros(block, np.float32)
    for k in range(16):
        s = (s.astype(np.float64) * x + coef[k]).astype(np.float32)
    expected = (((s + coef[n]) + F(0)) + F(b"hello\0"[n])) + F(1) + F(2.5)
    assert np.array_equal(device.memory.download(address, np.float32, block), expected)
    assert device.memory.download(device.symbols["gcount"], np.int32, 1)[0] == n
    assert np.array_equal(device.memory.download(device.symbols["garr"], np.float32, block), s)


@targets
@pytest.mark.parametrize("n", [0, 1, 17, 40])
def test_local_arrays(target: int, n: int) -> None:
    device = Device.corpus("localarr", target)
    block = 48
    idx = rng.integers(-100, 100, n + block + 1, dtype=np.int32)
    start = rng.standard_normal(block + 32).astype(np.float32)
    out = device.memory.upload(start)
    device.launch("localarr", (1, 1, 1), (block, 1, 1), device.memory.upload(idx), out, n)
    assert np.array_equal(
        device.memory.download(out, np.float32, block), [local_of(idx, start, i, n) for i in range(block)]
    )


def local_of(idx: Any, start: Any, i: int, n: int) -> Any:
    array = [F(F(k) * F(0.5)) + start[k + i] for k in range(32)]
    for k in range(n):
        array[idx[k] & 31] = array[idx[k] & 31] + array[idx[k + 1] & 31]
    total = F(0)
    for k in range(n):
        total = total + array[idx[k + i] & 31]
    return total
