"""Leases on the contexts of many devices: who gets which, in what order, and what ends them."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver, get_driver
from leasing import SECONDS, Holder, Worker, check, current, poison, until


@pytest.fixture
def pool(driver: Driver) -> Iterator[gf.ContextPool]:
    with gf.ContextPool(driver=driver) as made:
        yield made


@pytest.fixture
def narrow(driver: Driver) -> Iterator[gf.ContextPool]:
    """Return a pool of one context that one lease takes."""
    with gf.ContextPool([0], max_threads_per_context=1, driver=driver) as made:
        yield made


# Entering and leaving


def test_lease_enters_a_context_and_leaves_it(pool: gf.ContextPool, driver: Driver) -> None:
    with pool.lease() as context:
        assert gf.current_context(driver) is context
        assert pool.statistics().leased == 1
    assert current(driver) == 0
    assert pool.statistics().leased == 0


def test_lease_restores_what_was_current_also_after_an_exception(
    pool: gf.ContextPool, context: gf.Context
) -> None:
    with context:
        with pytest.raises(ZeroDivisionError), pool.lease() as leased:
            assert leased is not context
            _ = 1 // 0
        assert context.is_current
    assert pool.statistics().leased == 0


def test_leases_nest(pool: gf.ContextPool, driver: Driver) -> None:
    with pool.lease(device=0) as outer:
        with pool.lease(device=0) as inner:
            assert inner is outer
            assert pool.statistics().leased == 2
        assert outer.is_current
    assert current(driver) == 0


def test_lease_that_something_switched_inside_puts_it_right(
    pool: gf.ContextPool, context: gf.Context
) -> None:
    with pytest.warns(gf.ContextWarning), pool.lease():
        context.driver.cuCtxSetCurrent(context.handle)
    assert current(context.driver) == 0
    assert pool.statistics().leased == 0


def test_acquired_lease_enters_nothing_and_any_thread_gives_it_back(
    narrow: gf.ContextPool, driver: Driver
) -> None:
    lease = narrow.lease().acquire()
    assert current(driver) == 0
    with lease.context as context:
        assert context.is_current
    Worker(lease.release).result()
    lease.release()
    assert narrow.statistics().leased == 0


def test_lease_that_was_given_back_says_so(narrow: gf.ContextPool) -> None:
    lease = narrow.lease().acquire()
    lease.release()
    for use in (lambda: lease.context, lambda: lease.device, lease.acquire, lease.__enter__):
        with pytest.raises(gf.LeaseEnded, match="given back to the pool"):
            use()
    assert not lease.is_held


def test_lease_that_was_not_taken_says_so(narrow: gf.ContextPool) -> None:
    with pytest.raises(gf.LeaseEnded, match="holds nothing yet"):
        _ = narrow.lease().context


def test_two_threads_cannot_use_one_lease(pool: gf.ContextPool) -> None:
    lease = pool.lease()
    with lease:
        with pytest.raises(gf.LeaseEnded, match="is in use"):
            Worker(lease.__enter__).result()
        assert pool.statistics().leased == 1
        assert lease.is_held
    assert pool.statistics().leased == 0


# Green contexts


def test_green_contexts_of_a_pool_stand_side_by_side_for_one_thread_each(device: Device) -> None:
    with gf.ContextPool([device], kind="green", per_device=2) as pool:
        holders = [Holder(pool).entered() for _ in range(2)]
        contexts = [holder.context for holder in holders]
        assert contexts[0] is not contexts[1]
        for context in contexts:
            assert isinstance(context, gf.GreenContext)
            assert context.shared_sm_count == 0 or device.multiprocessor_count == 1
        with pytest.raises(gf.PoolTimeout, match="2 contexts, 2 of 2 leased"), pool.lease(timeout=0):
            pass
        waiting = Holder(pool)
        until(lambda: pool.statistics().waiting == 1)
        holders[1].leave()
        assert waiting.entered().context is contexts[1]
        for holder in (holders[0], waiting):
            holder.leave()


def test_green_contexts_of_a_pool_have_equal_parts_or_what_is_asked_for() -> None:
    from gpufleet.virtual import VirtualDriver

    driver = get_driver(VirtualDriver(devices=1, multiprocessors=132, visible_devices=None))
    for asked, got in ((None, [32, 32, 32, 32]), (20, [24, 24, 24, 24])):
        with gf.ContextPool(kind="green", per_device=4, sm_count=asked, driver=driver) as pool:
            leases = [pool.lease().acquire() for _ in range(4)]
            contexts = [lease.context for lease in leases]
            assert [context.sm_count for context in contexts if isinstance(context, gf.GreenContext)] == got
            assert not any(context.shared_sm_count for context in contexts)  # type: ignore[attr-defined]
            for lease in leases:
                lease.release()
    driver.reset()


def test_more_multiprocessors_than_a_device_has_are_refused_when_they_are_leased(device: Device) -> None:
    with gf.ContextPool([device], kind="green", sm_count=10_000) as pool:
        with pytest.raises(ValueError, match="sm_count is 10000: expected 1 to"), pool.lease():
            pass
        assert pool.statistics().leased == 0


def test_green_context_of_a_pool_may_move_from_thread_to_thread(device: Device) -> None:
    with gf.ContextPool([device], kind="green") as pool:

        def work() -> int:
            with pool.lease() as context, context.alloc(16) as buffer:
                buffer.fill(1)
                context.synchronize()
                return context.address

        assert len({Worker(work).result() for _ in range(4)}) == 1
        workers = [Worker(work) for _ in range(4)]  # at once: three wait
        assert len({worker.result() for worker in workers}) == 1
    assert pool.statistics().contexts == 0


def test_green_context_that_is_used_without_a_lease_is_not_entered(device: Device) -> None:
    with gf.ContextPool([device], kind="green") as pool:
        with pool.lease() as context:
            pass
        context.push()
        with pytest.raises(gf.ContextInUse, match="one thread at a time"):
            Worker(lambda: pool.lease().__enter__()).result()
        context.pop()
        assert pool.statistics().leased == 0


# Which one


def test_making_a_pool_calls_no_driver(virtual: Driver) -> None:
    made: list[str] = []

    class Watched:
        is_virtual = True

        def __getattr__(self, name: str) -> Any:
            made.append(name)
            return getattr(virtual.raw, name)

    pool = gf.ContextPool(driver=Watched())
    assert "not used yet" in repr(pool)
    pool.close()
    assert made == []


def test_a_device_that_nobody_asks_for_gets_no_context(virtual: Driver) -> None:
    with gf.ContextPool(driver=virtual) as pool:
        for _ in range(3):
            holder = Holder(pool, device=1).entered()
            assert holder.context is not None
            holder.context.alloc(16).close()
            holder.leave()
        states = [virtual.cuDevicePrimaryCtxGetState(device.handle)[1] for device in gf.devices(virtual)]
        assert states == [0, 1]


def test_lease_goes_to_the_least_loaded_device(virtual: Driver) -> None:
    with gf.ContextPool(driver=virtual) as pool:
        holders = [Holder(pool).entered() for _ in range(4)]
        assert pool.statistics().leased_by_device == {0: 2, 1: 2}
        for holder in holders:
            if holder.context is not None and holder.context.device.ordinal == 1:
                holder.leave()
        with pool.lease() as context:
            assert context.device.ordinal == 1
        for holder in holders:
            holder.leave()


@pytest.mark.parametrize("last", [0, 1])
def test_context_given_back_last_is_leased_first(device: Device, last: int) -> None:
    with gf.ContextPool([device], per_device=2, kind="created", max_threads_per_context=1) as pool:
        holders = [Holder(pool).entered(), Holder(pool).entered()]
        assert holders[0].context is not holders[1].context
        holders[1 - last].leave()
        holders[last].leave()
        with pool.lease() as leased:
            assert leased is holders[last].context


def test_contexts_are_made_when_they_are_needed(device: Device) -> None:
    with gf.ContextPool([device], per_device=2, kind="created", max_threads_per_context=1) as pool:
        for _ in range(3):
            with pool.lease():
                assert pool.statistics().contexts == 1
        with pool.lease(), pool.lease():
            assert pool.statistics().contexts == 2


def test_several_contexts_without_a_limit_share_the_threads(device: Device) -> None:
    with gf.ContextPool([device], per_device=2, kind="created") as pool:
        holders = [Holder(pool).entered() for _ in range(4)]
        contexts = [holder.context for holder in holders]
        assert [contexts.count(context) for context in set(contexts)] == [2, 2]
        for holder in holders:
            holder.leave()


def test_devices_are_given_as_objects_or_ordinals(device: Device) -> None:
    with gf.ContextPool([device]) as pool, pool.lease(device=device) as first, pool.lease(device=0) as second:
        assert first is second
        assert pool.devices == (device,)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "blue"}, "expected 'primary', 'created' or 'green'"),
        ({"kind": "green", "max_threads_per_context": 2}, "one thread at a time"),
        ({"kind": "green", "sm_count": 0}, "expected 1 or more, or None"),
        ({"sm_count": 8}, "have the whole device"),
        ({"per_device": 0}, "expected 1 or more"),
        ({"per_device": 2}, "one primary context"),
        ({"max_threads_per_context": 0}, "expected 1 or more, or None"),
        ({"devices": []}, "devices is empty"),
        ({"devices": [0, 0]}, "names one twice"),
    ],
)
def test_pool_that_cannot_be_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gf.ContextPool(**arguments)


def test_device_that_the_pool_does_not_have_is_refused(narrow: gf.ContextPool) -> None:
    with pytest.raises(ValueError, match="no device 7: expected one of 0"):
        narrow.lease(device=7).acquire()


def test_devices_of_two_drivers_are_refused(virtual: Driver) -> None:
    from gpufleet.virtual import VirtualDriver

    other = get_driver(VirtualDriver(devices=2, visible_devices=None))
    pool = gf.ContextPool([Device(0, virtual), Device(1, other)])
    with pytest.raises(ValueError, match="expected one of"):
        pool.lease().acquire()


# Waiting


def test_timeout_says_how_large_the_pool_is_and_how_long_it_took(narrow: gf.ContextPool) -> None:
    holder = Holder(narrow).entered()
    with pytest.raises(gf.PoolTimeout, match=r"within 0\.01 s: .*1 device: 1 context, 1 of 1 leased"):
        narrow.lease(timeout=0.01).acquire()
    with pytest.raises(TimeoutError, match="on device 0"), narrow.lease(device=0, timeout=0):
        pass
    assert narrow.statistics().timeouts == 2
    assert narrow.statistics().waiting == 0
    holder.leave()


def test_who_waits_longest_is_served_first(narrow: gf.ContextPool) -> None:
    first = Holder(narrow).entered()
    queue = []
    for number in range(5):
        queue.append(Holder(narrow))
        until(lambda count=number + 1: narrow.statistics().waiting == count)
    first.leave()
    for place, holder in enumerate(queue):
        holder.entered()
        assert [other.is_inside for other in queue] == [True] * (place + 1) + [False] * (4 - place)
        holder.leave()


def test_waiting_for_one_device_does_not_hold_up_another(virtual: Driver) -> None:
    with gf.ContextPool(max_threads_per_context=1, driver=virtual) as pool:
        first = Holder(pool, device=0).entered()
        waiting = Holder(pool, device=0)
        until(lambda: pool.statistics().waiting == 1)
        with pool.lease(timeout=0) as context:
            assert context.device.ordinal == 1
        assert not waiting.is_inside
        first.leave()
        waiting.entered().leave()


def test_interrupted_wait_leaves_the_queue(narrow: gf.ContextPool) -> None:
    holder = Holder(narrow).entered()
    main = threading.main_thread()

    def interrupt() -> None:
        until(lambda: narrow.statistics().waiting == 1)
        signal.pthread_kill(main.ident, signal.SIGINT)

    worker = Worker(interrupt)
    with pytest.raises(KeyboardInterrupt):
        narrow.lease().acquire()
    worker.result()
    assert narrow.statistics().waiting == 0
    holder.leave()
    assert narrow.statistics().leased == 0


def test_context_that_cannot_be_made_gives_the_place_back(virtual: Driver) -> None:
    with gf.ContextPool([0], kind="created", max_threads_per_context=1, driver=virtual) as pool:
        create = virtual.cuCtxCreate

        def fails(*_: Any) -> Any:
            raise gf.CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "cuCtxCreate")

        virtual.cuCtxCreate = fails
        with pytest.raises(gf.CudaError, match="OUT_OF_MEMORY"), pool.lease():
            pass
        assert current(virtual) == 0
        virtual.cuCtxCreate = create
        with pool.lease(timeout=0):
            assert pool.statistics().leased == 1


def test_a_context_is_made_without_holding_up_others(virtual: Driver) -> None:
    with gf.ContextPool(kind="created", driver=virtual) as pool:
        create, is_making, may_go_on = virtual.cuCtxCreate, threading.Event(), threading.Event()

        def slow(*arguments: Any) -> Any:
            if int(arguments[2]) == 0:
                is_making.set()
                assert may_go_on.wait(SECONDS)
            return create(*arguments)

        virtual.cuCtxCreate = slow
        first = Holder(pool, device=0)
        assert is_making.wait(SECONDS)
        with pool.lease(timeout=0) as context:
            assert context.device.ordinal == 1
        may_go_on.set()
        first.entered().leave()


def test_context_that_somebody_closed_is_made_anew(driver: Driver) -> None:
    with gf.ContextPool([0], kind="created", driver=driver) as pool:
        with pool.lease() as context:
            pass
        context.close()
        assert pool.statistics().contexts == 0
        with pool.lease() as another:
            assert another is not context
        another.close()
        lease = pool.lease().acquire()
        assert not lease.context.is_closed
        lease.release()


# Forgotten leases


def test_forgotten_lease_comes_back(narrow: gf.ContextPool) -> None:
    lease = narrow.lease().acquire()
    with pytest.warns(ResourceWarning, match="never given back"):
        del lease
        gc.collect()
    assert narrow.statistics().forgotten == 1
    with narrow.lease(timeout=0):
        pass


def test_forgotten_lease_serves_who_waits(narrow: gf.ContextPool) -> None:
    lease = narrow.lease().acquire()
    waiting = Holder(narrow)
    until(lambda: narrow.statistics().waiting == 1)
    with pytest.warns(ResourceWarning, match="never given back"):
        del lease
        gc.collect()
    waiting.entered().leave()


def test_lease_forgotten_while_its_thread_holds_the_lock_comes_back_afterwards(
    narrow: gf.ContextPool,
) -> None:
    lease = narrow.lease().acquire()
    with pytest.warns(ResourceWarning, match="never given back"):
        with narrow._ledger._lock:  # as when the garbage collector runs inside of the pool
            del lease
            gc.collect()
    with contextlib.suppress(gf.PoolTimeout):
        narrow.lease(timeout=0).acquire().release()
    assert narrow.statistics().leased == 0


def test_generator_inside_a_lease_that_dies_while_its_thread_holds_the_lock_gives_it_back(
    narrow: gf.ContextPool,
) -> None:
    def work() -> Iterator[None]:
        with narrow.lease():
            yield

    def forget() -> None:
        generator = work()
        next(generator)
        with narrow._ledger._lock:  # as when the garbage collector runs inside of the pool
            del generator
            gc.collect()

    Worker(forget).result()
    with narrow.lease(timeout=SECONDS):
        pass
    assert narrow.statistics().leased == 0


def test_lease_forgotten_while_another_thread_looks_at_the_pool_serves_who_waits(
    narrow: gf.ContextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(ledger: Any) -> Any:
        nonlocal lease
        with pytest.warns(ResourceWarning, match="never given back"):
            Worker(forget).result()
        return original(ledger)

    def forget() -> None:
        nonlocal lease
        del lease
        gc.collect()

    lease = narrow.lease().acquire()
    waiting = Holder(narrow)
    until(lambda: narrow.statistics().waiting == 1)
    original = type(narrow._ledger)._count
    monkeypatch.setattr(type(narrow._ledger), "_count", count)
    narrow.statistics()
    monkeypatch.undo()
    waiting.entered().leave()


# The end


def test_closed_pool_lends_nothing(pool: gf.ContextPool) -> None:
    with pool.lease():
        pass
    pool.close()
    pool.close()
    assert pool.is_closed
    assert pool.statistics().contexts == 0
    with pytest.raises(gf.PoolClosed, match=r"closed.*lends no context any more"), pool.lease():
        pass


def test_pool_closed_before_its_first_use_lends_nothing(driver: Driver) -> None:
    pool = gf.ContextPool(driver=driver)
    pool.close()
    for how in ({}, {"device": 0}):
        with pytest.raises(gf.PoolClosed):
            pool.lease(**how).acquire()


def test_closing_wakes_who_waits_and_lets_leases_end(device: Device) -> None:
    pool = gf.ContextPool([device], kind="created", max_threads_per_context=1)
    holder = Holder(pool).entered()
    waiting = [Worker(pool.lease().acquire) for _ in range(3)]
    until(lambda: pool.statistics().waiting == 3)
    pool.close()
    for worker in waiting:
        with pytest.raises(gf.PoolClosed):
            worker.result()
    assert holder.context is not None
    assert not holder.context.is_closed
    holder.leave()
    assert holder.context.is_closed


def test_closing_waits_for_leases_if_told_to(device: Device) -> None:
    pool = gf.ContextPool([device], kind="created")
    holders = [Holder(pool).entered() for _ in range(3)]
    closing = Worker(lambda: pool.close(wait=True))
    until(lambda: pool.is_closed)
    for holder in holders:
        assert closing.is_alive()
        holder.leave()
    closing.result()
    assert all(holder.context is not None and holder.context.is_closed for holder in holders)


def test_closing_does_not_wait_for_itself(pool: gf.ContextPool) -> None:
    with pool.lease():
        with pytest.raises(gf.ContextInUse, match="this thread is inside"):
            pool.close(wait=True)
    assert pool.statistics().contexts == 0


def test_context_that_cannot_be_closed_keeps_no_other_open(virtual: Driver) -> None:
    pool = gf.ContextPool(kind="created", driver=virtual)
    with pool.lease(device=0) as first, pool.lease(device=1):
        pass
    with first:
        with pytest.raises(gf.ContextInUse):
            pool.close()
        assert pool.statistics().contexts == 1
    pool.close()
    assert pool.statistics().contexts == 0


def test_two_threads_closing_destroy_each_context_once(virtual: Driver) -> None:
    destroyed: list[int] = []
    destroy = virtual.cuCtxDestroy
    pool = gf.ContextPool(kind="created", driver=virtual)
    with pool.lease(), pool.lease():
        pass
    virtual.cuCtxDestroy = lambda handle: destroyed.append(int(handle)) or destroy(handle)
    for worker in [Worker(pool.close) for _ in range(4)]:
        worker.result()
    assert len(destroyed) == len(set(destroyed)) == 2


@pytest.mark.parametrize("kind", ["primary", "created", "green"])
def test_fault_breaks_the_pool_for_those_inside_waiting_and_coming(virtual: Driver, kind: str) -> None:
    pool = gf.ContextPool([0], kind=kind, max_threads_per_context=1, driver=virtual)
    holder = Holder(pool).entered()
    waiting = Worker(pool.lease().acquire)
    until(lambda: pool.statistics().waiting == 1)
    with Device(1, virtual).retain_primary_context() as context:
        with pytest.raises(gf.StickyError):
            poison(virtual)
    with pytest.raises(gf.StickyError):
        context.close()
    assert pool.is_broken
    assert "broken" in repr(pool)
    holder.leave()
    for use in (waiting.result, pool.lease().__enter__, pool.lease(device=0).acquire):
        with pytest.raises(gf.PoolBroken, match="fault") as caught:
            use()
        assert isinstance(caught.value.__cause__, gf.StickyError)
        assert any("fault" in launch for launch in caught.value.launches)
    assert pool.statistics().leased == 0
    pool.close()


def test_error_types_travel_between_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(gf.PoolBroken("it is over", ("fault()",))))
    assert (str(error), error.launches) == ("it is over", ("fault()",))
    assert str(pickle.loads(pickle.dumps(gf.PoolTimeout("too late")))) == "too late"


def test_repr_shows_live_counts(narrow: gf.ContextPool) -> None:
    assert repr(narrow) == "<ContextPool primary, not used yet>"
    with narrow.lease():
        assert repr(narrow) == "<ContextPool primary, 1 device: 1 context, 1 of 1 leased, 0 waiting>"
    narrow.close()
    assert repr(narrow) == "<ContextPool primary, closed, 1 device: 0 contexts, 0 of 1 leased, 0 waiting>"


def test_statistics(narrow: gf.ContextPool) -> None:
    with narrow.lease():
        with pytest.raises(gf.PoolTimeout):
            narrow.lease(timeout=0).acquire()
    assert narrow.statistics()._asdict() == {
        "contexts": 1,
        "leased": 0,
        "waiting": 0,
        "capacity": 1,
        "served": 1,
        "timeouts": 1,
        "forgotten": 0,
        "leased_by_device": {0: 0},
    }


# The process


@pytest.mark.parametrize("kind", ["primary", "created", "green"])
def test_pool_may_be_a_global_when_the_interpreter_exits(kind: str) -> None:
    check(f"""
    pool = gf.ContextPool(kind={kind!r}, driver="virtual")
    with pool.lease() as context:
        stream = context.stream()
    kept = pool.lease().acquire()
    """)


def test_daemon_thread_may_wait_and_another_be_inside_when_the_interpreter_exits() -> None:
    check("""
    pool = gf.ContextPool([0], max_threads_per_context=1, driver="virtual")
    inside = threading.Event()
    def hold():
        with pool.lease():
            inside.set()
            threading.Event().wait()
    threading.Thread(target=hold, daemon=True).start()
    inside.wait()
    threading.Thread(target=lambda: pool.lease().acquire(), daemon=True).start()
    """)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no fork on this system")
def test_pool_made_before_a_fork_works_in_each_child() -> None:
    check(
        """
        pool = gf.ContextPool(driver="virtual")
        for _ in range(2):
            child = os.fork()
            if not child:
                with pool.lease() as context:
                    context.alloc(16).close()
                pool.close()
                sys.exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        "0\n0\n",
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no fork on this system")
def test_pool_used_before_a_fork_says_so_in_the_child_and_lives_on_in_the_parent() -> None:
    check(
        """
        pool = gf.ContextPool(driver="virtual")
        with pool.lease() as context:
            held = pool.lease().acquire()
            pool._ledger._lock.acquire()  # as another thread might have
            child = os.fork()
            if child:
                pool._ledger._lock.release()
            else:
                try:
                    pool.lease().acquire()
                except gf.ForkedProcess as error:
                    print("spawn" in str(error), flush=True)
                try:
                    held.context.alloc(16)
                except gf.ForkedProcess:
                    held.release()
        if not child:
            del held, context
            pool.close()
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        held.release()
        with pool.lease():
            print(pool.statistics().leased)
        pool.close()
        """,
        "True\n0\n1\n",
    )
