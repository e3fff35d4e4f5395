"""Kernels about control flow: a large switch, function calls direct and through tables, recursion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine import TARGETS, Device
from reference import divide, signed

targets = pytest.mark.parametrize("target", TARGETS)
rng = np.random.default_rng(8)
F = np.float32


@targets
def test_every_case_of_a_switch(target: int) -> None:
    device = Device.corpus("switch_brx", target)
    executed = 0
    for _ in range(60):
        op = rng.integers(0, 20, 9, dtype=np.int32)
        v = rng.integers(-(2**31), 2**31, 20, dtype=np.int32)
        ops, values = device.memory.upload(op), device.memory.upload(v)
        device.launch("sw", (1, 1, 1), (1, 1, 1), ops, values, 1)
        expected = [int(x) for x in v]
        executed |= switch([int(o) for o in op], [int(o) for o in op], expected, 0)
        assert device.memory.download(values, np.int32, 20).tolist() == expected
    assert executed == (1 << 18) - 1, "every case was taken"


@targets
@pytest.mark.parametrize("n", [1, 50, 3000])
def test_lanes_part_at_a_switch_and_meet_again(target: int, n: int) -> None:
    """Only cases that touch the lane's own element, so that lanes do not race."""
    device = Device.corpus("switch_brx", target, 1 << 24)
    op = rng.choice([0, 3, 4, 9, 15, 18], n + 8, p=[0.3, 0.3, 0.2, 0.05, 0.05, 0.1]).astype(np.int32)
    op[:8] = 0
    v = rng.integers(-(2**31), 2**31, n + 20, dtype=np.int32)
    op[op == 15] = 0
    values = device.memory.upload(v)
    device.launch("sw", (-(-n // 96), 1, 1), (96, 1, 1), device.memory.upload(op), values, n)
    result = device.memory.download(values, np.int32, len(v)).tolist()
    ops = [int(o) for o in op]
    for i in range(n):
        own = [int(x) for x in v[i : i + 1]] + [0] * 20
        switch(ops[:8], ops[i : i + 8], own, i)
        assert result[i] == own[0]


def switch(first: list[int], own: list[int], v: list[int], i: int) -> int:
    """Run thread i; returns which cases were taken, as bits.

    It sees `first` at op[0] and `own` at op[i]; v begins with its own element.
    """
    x, taken = v[0], 0

    def f0(value: int) -> int:
        return signed(value * value + 1, 32)

    for k in range(8):
        case = own[k] if own[k] <= 16 else 17
        taken |= 1 << case
        if case == 0:
            x = signed(x + i, 32)
        elif case == 1:
            x = v[1] = signed(x * 3, 32)
        elif case == 2:
            x = v[2] = x ^ k << 3
        elif case == 3:
            x = f0(x)
        elif case == 4:
            x = signed(x - first[k], 32)
        elif case == 5:
            x |= k
            v[k] = 1
        elif case == 6:
            x = ~x
            v[9] = divide(x, 3)
        elif case == 7:
            x >>= 1
            v[0] = k
        elif case == 8:
            x = signed(x + first[0] * 7, 32)
            v[3] = 2
        elif case == 9:
            return taken
        elif case in (10, 11, 12):
            v[case] = signed(x * 5 if case == 12 else x + (case == 11), 32)
        elif case == 13:
            x = v[13]
        elif case == 14:
            v[14] = f0(k)
        elif case == 15:
            x = v[x & 3]
        elif case == 16:
            v[2] = x
            x = 1
        else:
            x = 0
    v[0] = x
    return taken


@targets
@pytest.mark.parametrize(("depth", "which"), [(0, 0), (1, 1), (7, 0), (20, 1)])
def test_calls_recursion_tables_and_virtual_functions(target: int, depth: int, which: int) -> None:
    device = Device.corpus("devcall", target)
    block = 33
    x = rng.standard_normal(block + 1).astype(np.float32)
    address = device.memory.upload(x)
    device.launch("devcall", (1, 1, 1), (block, 1, 1), address, depth, which)
    # The second write adds the result of a virtual call of class B, which returns its argument.
    expected = [called(x, i, depth, which) for i in range(block)]
    result = device.memory.download(address, np.float32, block)
    assert np.array_equal(result, [F(v + v) for v in expected])


def called(x: Any, i: int, depth: int, which: int) -> Any:
    def g(value: Any, d: int) -> Any:
        return value if d == 0 else F(g(F(value * F(0.5)), d - 1) + F(d))

    total = F(F(F(g(x[i], depth) + F(x[i] * F(depth))) + F(depth)) + x[i])
    entry = F(x[i + 1] + F(1)) if which == 0 else F(x[i + 1] * F(2))
    return F(total + entry)


@targets
@pytest.mark.parametrize("block", [1, 64, 96])
def test_a_barrier_inside_a_function(target: int, block: int) -> None:
    device = Device.corpus("devcall", target)
    x = rng.standard_normal(block).astype(np.float32)
    address = device.memory.upload(x)
    device.launch("sync_call", (1, 1, 1), (block, 1, 1), address)
    s = x + F(1)
    expected = np.roll(s, -1) + s
    assert np.array_equal(device.memory.download(address, np.float32, block), expected)
