"""What a lease costs, against the bindings' push + pop and `with context`, and a task against a plain one.

    python benchmarks/pool.py [--driver nvidia|virtual] [--json FILE]
    python benchmarks/pool.py --stress 1000000 [--threads 64]

Times are microseconds per call, the median of nine rounds that take turns. With `--stress`, threads lease
from pools over four virtual devices, with exceptions, timeouts, nested and forgotten leases, closed
contexts, closed pools and garbage collections, and the program fails if anything was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpufleet as gf
from gpufleet.entries import thread_entries

ROUNDS, CALLS, TASKS = 9, 10_000, 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--driver", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stress", type=int, metavar="LEASES")
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.stress:
        Stress(options.stress, options.threads, options.seed).run()
        return
    results = measure(options.driver)
    for name, value in results.items():
        print(f"{name:44} {value:7.2f} us")
    over = results["lease + release"] - results["bindings: push + pop"]
    print(f"a lease costs {over:.2f} us above push + pop through the bindings")
    over = results["FleetExecutor: task"] - results["ThreadPoolExecutor: task"]
    print(f"a task costs {over:.2f} us above one of ThreadPoolExecutor")
    if options.json:
        device = gf.devices(options.driver)[0]
        machine = {"device": device.name, "python": platform.python_version(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"machine": machine, "microseconds": results}, indent=1))


def measure(driver: str) -> dict[str, float]:
    """Time everything in turns, so that what else the machine does falls on all alike."""
    pool = gf.ContextPool(driver=driver)
    narrow = gf.ContextPool(max_threads_per_context=1, driver=driver)
    green = gf.ContextPool(kind="green", driver=driver)
    with pool.lease() as context, narrow.lease(), green.lease():
        pass
    plain = ThreadPoolExecutor(2 * len(pool.devices))
    fleet = gf.FleetExecutor(pool)
    measured: dict[str, tuple[Callable[[int], None], int]] = {
        "bindings: push + pop": (bare(context), CALLS),
        "with context": (with_block(context), CALLS),
        "lease + release": (leases(pool), CALLS),
        "lease + release, of a device": (leases(pool, device=0), CALLS),
        "lease + release, one thread per context": (leases(narrow), CALLS),
        "lease + release, green context": (leases(green), CALLS),
        "async with lease": (async_leases(pool), CALLS),
        "ThreadPoolExecutor: task": (tasks(plain), TASKS),
        "FleetExecutor: task": (tasks(fleet), TASKS),
        "ThreadPoolExecutor: task, one by one": (tasks_in_turn(plain), TASKS),
        "FleetExecutor: task, one by one": (tasks_in_turn(fleet), TASKS),
    }
    times: dict[str, list[float]] = {name: [] for name in measured}
    for work, calls in measured.values():
        work(calls // 10)
    for _ in range(ROUNDS):
        for name, (work, calls) in measured.items():
            start = time.perf_counter()
            work(calls)
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    for thing in (plain, fleet):
        thing.shutdown()
    pool.close()
    narrow.close()
    green.close()
    return {name: statistics.median(found) for name, found in times.items()}


def bare(context: gf.Context) -> Callable[[int], None]:
    raw, handle = context.driver.raw, context.handle
    push, pop = raw.cuCtxPushCurrent, raw.cuCtxPopCurrent

    def work(calls: int) -> None:
        for _ in range(calls):
            push(handle)
            pop()

    return work


def with_block(context: gf.Context) -> Callable[[int], None]:
    def work(calls: int) -> None:
        for _ in range(calls):
            with context:
                pass

    return work


def leases(pool: gf.ContextPool, **how: Any) -> Callable[[int], None]:
    def work(calls: int) -> None:
        for _ in range(calls):
            with pool.lease(**how):
                pass

    return work


def async_leases(pool: gf.ContextPool) -> Callable[[int], None]:
    async def loop(calls: int) -> None:
        for _ in range(calls):
            async with pool.lease():
                pass

    return lambda calls: asyncio.run(loop(calls))


def tasks(executor: Executor) -> Callable[[int], None]:
    def work(calls: int) -> None:
        for future in [executor.submit(nothing) for _ in range(calls)]:
            future.result()

    return work


def tasks_in_turn(executor: Executor) -> Callable[[int], None]:
    def work(calls: int) -> None:
        for _ in range(calls):
            executor.submit(nothing).result()

    return work


def nothing() -> None:
    """Be a task."""


class Stress:
    """Threads that do everything a user may do with pools, at random, and check what must hold."""

    def __init__(self, leases: int, threads: int, seed: int) -> None:
        from gpufleet.virtual import VirtualDriver

        self.driver = gf.get_driver(VirtualDriver(devices=4, visible_devices=None))
        self.left = itertools.count(leases, -1)
        self.wanted = leases
        self.seed = seed
        self.thread_count = threads
        self.kinds = itertools.cycle(
            [
                {"kind": "primary", "max_threads_per_context": 3},
                {"kind": "primary"},
                {"kind": "created", "per_device": 2, "max_threads_per_context": 2},
                {"kind": "green", "per_device": 3},
            ]
        )
        self.outcomes: dict[str, int] = {}
        self.errors: list[BaseException] = []
        self.retired: list[gf.ContextPool] = []
        self.pool = self.new_pool()
        self.lock = threading.Lock()

    def new_pool(self) -> gf.ContextPool:
        return gf.ContextPool(driver=self.driver, **next(self.kinds))  # type: ignore[arg-type]

    def run(self) -> None:
        warnings.simplefilter("ignore", ResourceWarning)  # of the leases that are forgotten on purpose
        before = self.free_memory()
        start = time.perf_counter()
        threads = [
            threading.Thread(target=self.thread, args=(number,), daemon=True)
            for number in range(self.thread_count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        gc.collect()
        self.check(before)
        print(f"{self.wanted} leases in {seconds:.1f} s by {self.thread_count} threads", end=": ")
        print(", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items())))

    def check(self, before: list[int]) -> None:
        if self.errors:
            raise self.errors[0]
        pools = [*self.retired, self.pool]
        forgotten = 0
        for pool in pools:
            pool.close(wait=True)
            count = pool.statistics()
            assert (count.leased, count.waiting, count.contexts) == (0, 0, 0), pool
            assert not any(count.leased_by_device.values()), pool
            forgotten += count.forgotten
        assert forgotten == self.outcomes.get("forgotten", 0), (forgotten, self.outcomes)
        assert self.free_memory() == before, "device memory leaked"

    def free_memory(self) -> list[int]:
        found = []
        for device in gf.devices(self.driver):
            with contextlib.closing(device.retain_primary_context()) as context:
                found.append(context.memory_info()[0])
        return found

    def thread(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        outcomes: dict[str, int] = {}
        mine = gf.devices(self.driver)[number % 4].create_context() if number % 2 else None
        try:
            with mine or contextlib.nullcontext():
                for name in self.actions(chance):
                    outcomes[name] = outcomes.get(name, 0) + 1
                    self.check_thread(mine)
        except BaseException as error:
            self.errors.append(error)
        finally:
            if mine is not None:
                mine.close()
            with self.lock:
                for name, count in outcomes.items():
                    self.outcomes[name] = self.outcomes.get(name, 0) + count

    def check_thread(self, mine: gf.Context | None) -> None:
        expected = 0 if mine is None else mine.address
        assert int(self.driver.cuCtxGetCurrent()) == expected, "another context is current"
        assert len(thread_entries()) == (mine is not None), "an entry is left"

    def actions(self, chance: random.Random) -> Iterator[str]:
        """Do something with a lease until enough were done; yield how each ended."""
        while next(self.left) > 0 and not self.errors:
            roll = chance.random()
            pool = self.pool
            device = chance.choice((None, None, 0, 1, 2, 3))
            timeout = chance.choice((None, 1.0, 0.001, 0))
            try:
                if roll < 0.001:
                    yield self.replace_pool(pool)
                elif roll < 0.002:
                    gc.collect(0)
                    yield "collections"
                elif roll < 0.01:
                    yield self.forget(pool.lease(device, timeout))
                elif roll < 0.02:
                    yield self.close_context(pool.lease(device, timeout))
                elif roll < 0.1:
                    yield self.hand_over(pool.lease(device, timeout))
                else:
                    yield self.use(pool, pool.lease(device, timeout), chance)
            except gf.PoolTimeout:
                yield "timeouts"
            except gf.PoolClosed:
                yield "of a closed pool"
            except ZeroDivisionError:
                yield "exceptions"

    def use(self, pool: gf.ContextPool, lease: gf.Lease, chance: random.Random) -> str:
        with lease as context:
            assert context.is_current
            roll = chance.random()
            if roll < 0.1:
                _ = 1 // 0
            if roll < 0.2:
                with pool.lease(timeout=0) as inner:
                    assert inner.is_current
                assert context.is_current
            if roll > 0.8:
                time.sleep(0)  # lets other threads find the pool as full as it is
        return "used"

    def hand_over(self, lease: gf.Lease) -> str:
        lease.acquire()
        with contextlib.suppress(gf.ContextClosed):  # another thread closes contexts
            with lease.context as context:
                assert context.is_current
        lease.release()
        return "acquired"

    def forget(self, lease: gf.Lease) -> str:
        lease.acquire()
        return "forgotten"

    def close_context(self, lease: gf.Lease) -> str:
        with lease as context:
            pass
        with contextlib.suppress(gf.ContextInUse):
            if context.kind in ("created", "green"):
                context.close()
        return "closed contexts"

    def replace_pool(self, pool: gf.ContextPool) -> str:
        with self.lock:
            if self.pool is pool:
                self.retired.append(pool)
                self.pool = self.new_pool()
        pool.close()
        return "closed pools"


if __name__ == "__main__":
    sys.exit(main())
