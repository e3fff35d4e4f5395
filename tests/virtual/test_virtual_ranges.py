"""Placement of allocations, against a simple model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.virtual.ranges import QUARANTINE, Ranges
from gpufleet.virtual.spans import Allocation, SpanIndex

STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=300)


@given(STEPS)
def test_blocks_never_overlap_and_everything_comes_back(steps: list[tuple[bool, int]]) -> None:
    ranges = Ranges(1000, 2000)
    blocks: dict[int, int] = {}
    for is_take, number in steps:
        if is_take or not blocks:
            start = ranges.take(number)
            if start is None:
                continue
            assert start >= 1000
            assert start + number <= 2000
            assert all(start + number <= other or other + size <= start for other, size in blocks.items())
            blocks[start] = number
        else:
            start = sorted(blocks)[number % len(blocks)]
            ranges.give(start, blocks.pop(start))
    for start, size in blocks.items():
        ranges.give(start, size)
    assert ranges.take(1000) == 1000


def test_freed_addresses_rest() -> None:
    ranges = Ranges(0, 10_000)
    first = ranges.take(10)
    assert first == 0
    ranges.give(first, 10)
    assert [ranges.take(10) for _ in range(3)] == [10, 20, 30]
    for start in range(40, 40 + QUARANTINE):
        ranges.give(start * 100, 1)
    assert ranges.take(10) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), max_size=40), st.integers(0, 320))
def test_an_index_finds_what_contains_an_address(pieces: list[tuple[int, int]], address: int) -> None:
    index, entered = SpanIndex(), []
    context: Any = None
    for slot, size in dict(pieces).items():
        entered.append(Allocation(6 * slot, size, "device", context, 0))
        index.add(entered[-1])
    expected = next((each for each in entered if each.start <= address < each.end), None)
    assert index.find(address) is expected
    starts, ends = index.snapshot()
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == sorted((e.start, e.end) for e in entered)
    nearest = index.nearest(address)
    if entered:
        assert nearest is not None
        assert nearest[0] == min(max(e.start - address, address - e.end + 1, 0) for e in entered)
    for each in entered:
        index.remove(each)
    assert len(index) == 0
    assert expected is None or index.freed(address) == (expected.start, expected.end)


@pytest.mark.parametrize(
    ("address", "size", "expected"), [(95, 6, True), (95, 5, False), (199, 1, True), (200, 1, False)]
)
def test_overlaps(address: int, size: int, expected: bool) -> None:
    index = SpanIndex()
    context: Any = None
    index.add(Allocation(100, 100, "device", context, 0))
    assert index.overlaps(address, size) is expected
