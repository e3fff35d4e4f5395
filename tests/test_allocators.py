"""Where memory comes from: the pool, the plain allocator, and wrappers that limit and count."""

from __future__ import annotations

from typing import Any

import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.errors import CudaError


def test_pool_keeps_what_is_freed_until_it_is_trimmed(context: gf.Context) -> None:
    buffers = [context.alloc(1 << 20) for _ in range(4)]
    used, reserved = context.heap.pool_bytes()
    assert 4 << 20 <= used <= reserved
    for buffer in buffers:
        buffer.close()
    context.trim_memory()
    assert context.heap.pool_bytes() == (0, 0)


def test_pools_of_two_contexts_are_apart(device: Device, context: gf.Context) -> None:
    other = device.create_context()
    with context.alloc(1 << 20):
        assert other.heap.pool_bytes() == (0, 0)
    other.close()


def test_no_pool_of_other_libraries_is_touched(context: gf.Context) -> None:
    from cuda.bindings.driver import CUmemPool_attribute as Attribute

    driver, device = context.driver, context.device
    pool = driver.cuDeviceGetDefaultMemPool(device.handle)
    asked = (Attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, Attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    before = [int(driver.cuMemPoolGetAttribute(pool, each)) for each in asked]
    with context.alloc(1 << 20):
        assert [int(driver.cuMemPoolGetAttribute(pool, each)) for each in asked] == before


def test_plain_memory_is_given_back_at_once(context: gf.Context) -> None:
    plain = gf.PlainAllocator()
    context.alloc(4, allocator=plain).close()
    before = context.memory_info()[0]
    with context.alloc(8 << 20, allocator=plain) as buffer:
        assert context.memory_info()[0] < before
        buffer.fill(7)
        assert (buffer.to_numpy() == 7).all()
    assert context.memory_info()[0] == before


def test_allocator_of_a_context_is_what_its_buffers_use(context: gf.Context) -> None:
    assert isinstance(context.allocator, gf.PoolAllocator)
    counting = gf.StatisticsAllocator(context.allocator)
    context.allocator = counting
    with context.alloc(1000), context.alloc(24):
        assert counting.statistics()[:2] == (2, 1024)
    context.allocator = counting.inner
    with context.alloc(1000):
        assert counting.statistics() == (0, 0, 2, 1024, 2, 1024)


def test_limit_refuses_what_is_beyond_it_and_says_so(context: gf.Context) -> None:
    limited = gf.LimitedAllocator(gf.PoolAllocator(), limit=1 << 20)
    with context.alloc(1 << 20, allocator=limited):
        assert limited.used == 1 << 20
        with pytest.raises(CudaError, match="1048576 of the limit of 1048576 bytes are in use") as caught:
            context.alloc(1, allocator=limited)
        assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    with context.alloc(1 << 19, allocator=limited):
        assert limited.used == 1 << 19
    assert limited.used == 0


def test_allocation_that_fails_below_a_limit_does_not_count(context: gf.Context) -> None:
    limited = gf.LimitedAllocator(gf.StatisticsAllocator(gf.PoolAllocator()), limit=1 << 60)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        context.alloc(1 << 45, allocator=limited)
    assert limited.used == 0
    assert limited.inner.statistics().total_allocations == 0  # type: ignore[attr-defined]


def test_allocator_without_room_is_asked_again_when_frees_are_done(context: gf.Context) -> None:
    class Reluctant(gf.PoolAllocator):
        asked = 0

        def allocate(self, context: gf.Context, nbytes: int, stream: Any) -> int:
            self.asked += 1
            if self.asked == 1:
                raise CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "test")
            return super().allocate(context, nbytes, stream)

    reluctant = Reluctant()
    context.alloc(1 << 20).close()
    with context.alloc(4096, allocator=reluctant) as buffer:
        assert reluctant.asked == 2
        assert buffer.nbytes == 4096


def test_borrowed_context_uses_plain_memory(device: Device) -> None:
    driver = device.driver
    handle = driver.cuCtxCreate(None, 0, device.handle)
    borrowed = gf.current_context(driver)
    assert borrowed is not None
    assert isinstance(borrowed.allocator, gf.PlainAllocator)
    with borrowed.alloc(128) as buffer:
        buffer.fill(1)
        assert (buffer.to_numpy() == 1).all()
    driver.cuCtxDestroy(handle)


@pytest.mark.parametrize("allocator", [gf.PoolAllocator(), gf.PlainAllocator()])
def test_memory_of_every_kind_is_freed_with_its_context(device: Device, allocator: Any) -> None:
    context = device.create_context()
    buffer = context.alloc(1 << 20, allocator=allocator)
    context.close()
    buffer.close()
    assert buffer.is_closed
