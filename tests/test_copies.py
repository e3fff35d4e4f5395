"""Copies: of rows, between devices, and which of them wait."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
import gpufleet.copies as copies
import gpufleet.peers as peers
from gpufleet.device import Device
from gpufleet.driver import Driver
from latches import Latch

NUMBERS = np.arange(64 * 48, dtype="i4").reshape(64, 48)


# Rows


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("columns", [slice(0, 48), slice(3, 20), slice(47, 48)])
def test_rows_with_gaps_in_the_host_array(context: gf.Context, columns: slice, staged: bool) -> None:
    part = NUMBERS[:, columns]
    with context.stream() as stream, context.alloc(part.nbytes) as buffer:
        chosen = stream if staged else None
        buffer.copy_from(part, stream=chosen)
        stream.synchronize()
        assert (buffer.to_numpy("i4", part.shape) == part).all()
        back = np.zeros_like(NUMBERS)
        buffer.copy_to(back[:, columns], stream=chosen)
        stream.synchronize()
        assert (back[:, columns] == part).all()
        assert np.count_nonzero(back) == np.count_nonzero(part), "nothing was written beside the rows"


@pytest.mark.parametrize("staged", [False, True])
def test_rows_with_gaps_on_the_device(context: gf.Context, staged: bool) -> None:
    pitch, width = 512, 48 * 4
    with context.stream() as stream, context.alloc(64 * pitch) as buffer:
        chosen = stream if staged else None
        buffer.fill(255)
        buffer.copy_from(NUMBERS, pitch=pitch, stream=chosen)
        stream.synchronize()
        there = buffer.to_numpy("u1", (64, pitch))
        assert there[:, :width].copy().view("i4").tolist() == NUMBERS.tolist()
        assert (there[:, width:] == 255).all()
        back = np.zeros_like(NUMBERS)
        buffer.copy_to(back, pitch=pitch, stream=chosen)
        stream.synchronize()
        assert (back == NUMBERS).all()


def test_rows_that_do_not_fit_are_refused(context: gf.Context) -> None:
    with context.alloc(64 * 200) as buffer:
        with pytest.raises(ValueError, match="do not fit into a pitch of 100"):
            buffer.copy_from(NUMBERS, pitch=100)
        with pytest.raises(ValueError, match="the buffer has 12800 bytes"):
            buffer.copy_from(NUMBERS, pitch=256)
        with pytest.raises(ValueError, match="arrays of two dimensions, this one has 1"):
            buffer.copy_from(NUMBERS.reshape(-1), pitch=512)
        with pytest.raises(ValueError, match="not C-contiguous"):
            buffer.copy_from(NUMBERS.T)
        with pytest.raises(ValueError, match="not C-contiguous"):
            buffer.copy_from(NUMBERS[:, ::2])


# Which copies wait


@pytest.mark.parametrize("nbytes", [4096, 1 << 20])
def test_copies_of_pageable_memory_do_not_wait_for_a_kernel(context: gf.Context, nbytes: int) -> None:
    source, target = np.full(nbytes, 5, "u1"), np.zeros(nbytes, "u1")
    with context.stream() as stream, context.alloc(nbytes) as buffer:
        with Latch(stream) as latch:
            copied_in = buffer.copy_from(source, stream=stream)
            copied_out = buffer.copy_to(target, stream=stream)
            assert copied_in is not None
            assert copied_out is not None
            assert not copied_in.query()
            assert not copied_out.query()
            latch.open()
            assert copied_out.result() is target
        assert (target == 5).all()
        copied_in.close()
        copied_out.close()


def test_copy_that_is_too_large_to_be_staged_warns_once_why_it_waited(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "STAGED_MOST", 1 << 20)
    data = np.zeros(2 << 20, "u1")
    with context.stream() as stream, context.alloc(data.nbytes) as buffer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                buffer.copy_from(data, stream=stream)
            for _ in range(3):
                buffer.copy_to(data, stream=stream)
        assert [each.category for each in caught] == [gf.BlockingCopyWarning] * 2, "once for each place"
        assert "2097152 bytes from pageable memory made its caller wait" in str(caught[0].message)
        assert "gf.pinned(...) memory, or `with gf.registered(array):`" in str(caught[0].message)
        assert caught[0].filename == __file__


def test_pinned_and_registered_memory_is_not_staged(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.ones(1 << 20, "u1")
    with (
        context.stream() as stream,
        context.alloc(1 << 20) as buffer,
        gf.pinned(array, context=context) as pinned,
        gf.registered(array, context=context),
    ):
        monkeypatch.setattr(copies, "pool_of", None)  # what stages would fail
        with Latch(stream) as latch:
            transfers = [
                buffer.copy_from(pinned, stream=stream),
                buffer.copy_from(array, stream=stream),
                buffer.copy_to(pinned.array, stream=stream),
                buffer.copy_to(array, stream=stream),
            ]
            assert not any(transfer is None or transfer.query() for transfer in transfers)
            latch.open()
        monkeypatch.undo()


def test_no_memory_is_locked_in_a_hot_loop(context: gf.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = context.driver
    calls: list[Any] = []
    original = driver.cuMemHostRegister
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda *given: calls.append(given) or original(*given))
    data = np.ones(1 << 20, "u1")
    with context.stream() as stream, context.alloc(data.nbytes) as buffer:
        for _ in range(20):
            buffer.copy_from(data, stream=stream)
            buffer.copy_to(data, stream=stream)
            stream.synchronize()
    assert len(calls) <= 2, "the first two copies lock the pool's blocks, and no other"


def test_memory_mapped_file_is_read_straight_into_the_staging_memory(
    context: gf.Context, tmp_path: Any
) -> None:
    path = tmp_path / "data"
    np.arange(1 << 18, dtype="i4").tofile(path)
    mapped = np.memmap(path, "i4", mode="r")
    with context.stream() as stream, context.alloc(mapped.nbytes) as buffer:
        buffer.copy_from(mapped, stream=stream)
        assert (buffer.to_numpy("i4", stream=stream).result() == np.arange(1 << 18)).all()
        buffer.copy_from(mapped[::-1][::-1])
        assert (buffer.to_numpy("i4") == np.arange(1 << 18)).all()
    del mapped


def test_target_of_a_copy_out_is_kept_until_it_is_complete(context: gf.Context) -> None:
    with context.stream() as stream, context.alloc(1 << 20) as buffer:
        buffer.fill(1)
        target = np.zeros(1 << 20, "u1")
        references = sys.getrefcount(target)
        with Latch(stream):
            buffer.copy_to(target, stream=stream)
            gc.collect()
            assert sys.getrefcount(target) > references
        assert target.all()
        gc.collect()
        assert sys.getrefcount(target) == references
        assert context.driver.unfinished == []


def test_fill_in_the_order_of_a_stream(context: gf.Context) -> None:
    with context.stream() as stream, context.alloc(4096) as buffer:
        buffer.fill(1)
        with Latch(stream) as latch:
            transfer = buffer.fill(2, stream=stream)
            assert transfer is not None
            assert not transfer.query()
            latch.open()
            transfer.synchronize()
        assert (buffer.to_numpy() == 2).all()


# Between device buffers


def test_copy_within_a_device(device: Device, context: gf.Context) -> None:
    other = device.create_context()
    with context.alloc(12) as target, other.alloc(4) as source, other.stream() as stream:
        target.fill(0)
        source.copy_from(b"abcd")
        target.copy_from(source, offset=4)
        assert target.to_numpy().tobytes() == b"\0\0\0\0abcd\0\0\0\0"
        transfer = target.copy_from(source, offset=8, stream=stream)
        assert transfer is not None
        assert transfer.result() is None
        assert target.to_numpy().tobytes() == b"\0\0\0\0abcdabcd"
        with pytest.raises(ValueError, match="the buffer has 4 bytes"):
            source.copy_from(target)
    other.close()


@pytest.mark.parametrize("allocator", [gf.PoolAllocator(), gf.PlainAllocator()])
def test_copy_between_devices_on_a_stream_of_either(both: list[gf.Context], allocator: Any) -> None:
    here, there = both
    data = np.random.default_rng(3).integers(0, 255, 1 << 20, "u1")
    with (
        here.alloc(data.nbytes, allocator=allocator) as source,
        there.alloc(data.nbytes, allocator=allocator) as target,
    ):
        source.copy_from(data)
        target.copy_from(source)
        assert (target.to_numpy() == data).all()
        for context in both:
            target.fill(0)
            with context.stream() as stream:
                with Latch(stream) as latch:
                    transfer = target.copy_from(source, stream=stream)
                    assert transfer is not None
                    assert not transfer.query()
                    latch.open()
                    transfer.synchronize()
                assert (target.to_numpy() == data).all()


def test_copy_between_devices_waits_for_what_produces_its_source(both: list[gf.Context]) -> None:
    here, there = both
    with (
        here.alloc(4096) as source,
        there.alloc(4096) as target,
        here.stream() as producer,
        there.stream() as consumer,
    ):
        source.fill(0)
        target.copy_from(source)  # the probe of the pair is over before the latch
        with Latch(producer) as latch:
            source.fill(8, stream=producer)
            consumer.wait(producer.record())
            target.copy_from(source, stream=consumer)
            assert not consumer.query()
            latch.open()
            consumer.synchronize()
        assert (target.to_numpy() == 8).all()


def test_copy_goes_through_the_host_where_copies_between_devices_do_not_arrive(
    both: list[gf.Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = both
    driver = here.driver
    others = {key: value for key, value in driver.belongings.items() if key != "peers"}
    monkeypatch.setattr(driver, "belongings", others)
    monkeypatch.setattr(peers, "copy_to_peer", lambda *given: None)  # claims success, and writes nothing
    monkeypatch.setattr(copies, "STAGED_MOST", 100_000)
    data = np.random.default_rng(4).integers(0, 255, 300_001, "u1")
    with here.alloc(data.nbytes) as source, there.alloc(data.nbytes) as target, there.stream() as stream:
        source.copy_from(data)
        target.copy_from(source)
        assert driver.belongings["peers"] == {("copies", 0, 1): False}
        assert (target.to_numpy() == data).all()
        target.fill(0)
        transfer = target.copy_from(source, stream=stream)
        assert transfer is not None
        transfer.synchronize()
        assert (target.to_numpy() == data).all()


def test_copy_between_two_drivers_goes_through_the_host(context: gf.Context, virtual: Driver) -> None:
    other = Device(0, virtual).create_context()
    with context.alloc(4096) as source, other.alloc(4096) as target:
        source.fill(3)
        target.copy_from(source)
        assert (target.to_numpy() == 3).all()
    other.close()


def test_pair_is_tried_once(both: list[gf.Context], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = both
    monkeypatch.setattr(here.driver, "belongings", {})
    tried: list[Any] = []
    original = peers._try_copy
    monkeypatch.setattr(peers, "_try_copy", lambda *pair: tried.append(pair) or original(*pair))
    with here.alloc(64) as source, there.alloc(64) as target:
        source.fill(1)
        for _ in range(3):
            target.copy_from(source)
    assert len(tried) == 1


def test_array_in_the_memory_of_another_device_is_copied(both: list[gf.Context]) -> None:
    here, there = both
    with here.alloc(64) as mine, there.alloc(64) as theirs:
        mine.fill(0)
        theirs.copy_from(np.arange(64, dtype="u1"))
        array = theirs.view("u1", (4, 8), offset=16)
        mine.copy_from(array, offset=8)
        assert mine.to_numpy().tolist() == [0] * 8 + list(range(16, 48)) + [0] * 24
        mine.fill(9)
        mine.copy_to(array)
        mine.view("u1", 32).copy_to(array)
        assert theirs.to_numpy().tolist() == [*range(16), *[9] * 32, *range(48, 64)]


def test_array_of_another_device_is_not_believed_to_arrive(
    both: list[gf.Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = both
    monkeypatch.setattr(
        here.driver, "belongings", {k: v for k, v in here.driver.belongings.items() if k != "peers"}
    )
    monkeypatch.setattr(peers, "copy_to_peer", lambda *given: None)  # claims success, and writes nothing
    with here.alloc(64) as mine, there.alloc(64) as theirs:
        theirs.fill(5)
        mine.copy_from(theirs.view("u1", 32))
        assert mine.to_numpy()[:32].tolist() == [5] * 32


def test_pitch_and_offset_that_make_no_sense_are_refused(context: gf.Context) -> None:
    with context.alloc(128) as buffer:
        for copy in (buffer.copy_from, buffer.copy_to):
            with pytest.raises(ValueError, match="pitch= is for host arrays"):
                copy(buffer.view("u1", (4, 8)), pitch=8)
            with pytest.raises(TypeError, match="integer"):
                copy(np.zeros((4, 8), "u1"), pitch=9.5)
            with pytest.raises(TypeError, match="integer"):
                copy(np.zeros(8, "u1"), offset=1.5)


def test_single_column_of_an_array_is_rows_of_one_element(context: gf.Context) -> None:
    array = np.arange(64, dtype="u1").reshape(8, 8)
    with context.alloc(8) as buffer:
        buffer.copy_from(array[:, ::2][:, 1:2])
        assert buffer.to_numpy().tolist() == array[:, 2].tolist()


@pytest.mark.parametrize("what", ["copy_from", "copy_to", "fill", "copy"])
def test_memory_of_a_copy_that_was_interrupted_is_kept_until_it_is_done(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    class Interrupt(BaseException):
        pass

    def interrupted(*given: Any) -> None:
        raise Interrupt

    main = context.main_stream
    buffer, other = context.alloc(4096), context.alloc(4096)
    host = gf.pinned(4096, context=context)
    addresses = {buffer.address, other.address}
    with Latch(main):
        with monkeypatch.context() as patch, pytest.raises(Interrupt):
            patch.setattr(main, "synchronize", interrupted)
            {
                "copy_from": lambda: buffer.copy_from(host),
                "copy_to": lambda: buffer.copy_to(host),
                "fill": lambda: buffer.fill(1),
                "copy": lambda: buffer.copy_from(other),
            }[what]()
        used = {
            "copy_from": {buffer, host},
            "copy_to": {buffer, host},
            "fill": {buffer},
            "copy": {buffer, other},
        }[what]
        taken = {each.address for each in used}
        for each in (buffer, other, host):
            each.close()
        with contextlib.ExitStack() as stack:
            again = {stack.enter_context(context.alloc(4096)).address for _ in range(4)}
            pinned = stack.enter_context(gf.pinned(4096, context=context)).address
            assert not (again & taken & addresses), "handed out under the copy"
            assert pinned not in taken, "handed out under the copy"


def test_memory_is_locked_by_the_thread_that_asks_for_it_and_in_no_callback(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, here = context.driver, threading.get_ident()
    threads: list[int] = []
    original = driver.cuMemHostRegister

    def register(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return original(*given)

    def refused(*given: Any) -> Any:
        raise AssertionError("a call of Python was put into a stream")

    monkeypatch.setattr(driver, "cuMemHostRegister", register)
    for call in ("cuLaunchHostFunc", "cuStreamAddCallback"):
        monkeypatch.setattr(driver, call, refused)
    gf.trim_pinned(driver)
    data = np.ones(3 << 20, "u1")
    with context.stream() as stream, context.alloc(data.nbytes) as buffer:
        with Latch(stream):
            buffer.copy_from(data, stream=stream)
            read = buffer.to_numpy(stream=stream)
        assert (read.result() == 1).all()
    assert set(threads) == {here}


def test_memory_mapped_file_is_not_copied_on_its_way_to_the_staging_memory(
    context: gf.Context, tmp_path: Any
) -> None:
    path = tmp_path / "data"
    np.ones(8 << 20, "u1").tofile(path)
    mapped = np.memmap(path, "u1", mode="r")
    with context.stream() as stream, context.alloc(mapped.nbytes) as buffer:
        tracemalloc.start()
        try:
            buffer.copy_from(mapped, stream=stream)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        stream.synchronize()
    del mapped
