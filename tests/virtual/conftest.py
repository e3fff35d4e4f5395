"""A fresh virtual driver with a fake engine for each test, and a check that it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_int, c_void_p
from typing import Any

import pytest
from virtual_fakes import Body, FakeEngine, code, is_mapped, ptx, value, workers

from gpufleet.virtual import VirtualDriver


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def make_driver(engine: FakeEngine) -> Iterator[Callable[..., Any]]:
    """Make initialised drivers that are reset, and checked, after the test."""
    made: list[Any] = []

    def make(**options: Any) -> Any:
        options = {"engine": engine, "visible_devices": None, "memory": 64 << 20, **options}
        driver = VirtualDriver(**options)
        made.append(driver)
        assert driver.cuInit(0)[0] == 0
        return driver

    yield make
    for driver in made:
        base = driver._state.memory.space.base if driver._state.is_initialized else None
        driver.reset()
        if base is not None:
            assert not is_mapped(base), "reset left memory mapped"
    assert workers() == [], "reset left a worker"


@pytest.fixture
def d(make_driver: Callable[..., Any]) -> Any:
    """An initialised driver with two devices."""
    return make_driver()


@pytest.fixture
def context(d: Any) -> Any:
    """A context of device 0, which is current."""
    return value(d.cuCtxCreate(None, 0, 0))


@pytest.fixture
def kernel(d: Any, engine: FakeEngine) -> Callable[[Body], Any]:
    """Make functions of the current context that run a Python body."""

    def make(body: Body) -> Any:
        name = f"kernel{len(engine.bodies)}"
        engine.bodies[name] = body
        return value(d.cuModuleGetFunction(value(d.cuModuleLoadData(ptx(name))), name.encode()))

    return make


@pytest.fixture
def launch(d: Any) -> Callable[..., str]:
    """Launch a function with (pointer, value) in a stream."""

    def run(function: Any, pointer: Any = 0, number: int = 0, stream: Any = 0, threads: int = 1) -> str:
        arguments = ((int(pointer), number), (c_void_p, c_int))
        return code(d.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, arguments, 0))

    return run
