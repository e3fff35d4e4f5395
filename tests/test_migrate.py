"""The migration proof counts what it verified, and leaves nothing behind whatever fails."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gpufleet as gf
from gpufleet.driver import Driver, get_driver
from gpufleet.entries import thread_entries
from gpufleet.migrate import MOST_THREADS, SHIPPED_IMAGE, Migration, ThreadRecord, find_image, run_migration

# The proof itself


@pytest.mark.parametrize("contexts", ["created", "primary"])
@pytest.mark.parametrize("launch", ["pointers", "packed", "both"])
def test_every_thread_on_every_device_is_verified(driver: Driver, launch: str, contexts: str) -> None:
    devices = gf.devices(driver)

    result = run_migration(devices, 3, launch, contexts, rounds=2)

    assert result.ok
    assert result.verified == result.expected == 3 * len(devices)
    assert result.failures == ()
    styles = ["pointers", "packed"] if launch == "both" else [launch]
    for record in result.threads:
        assert [(done.round, done.style) for done in record.launches] == [
            (r, s) for r in (1, 2) for s in styles
        ]


def test_each_launch_ran_on_its_own_device(driver: Driver) -> None:
    devices = gf.devices(driver)

    result = run_migration(devices)

    where = {
        (record.device.ordinal, done.device, done.buffer_device)
        for record in result.threads
        for done in record.launches
    }
    assert where == {(device.ordinal,) * 3 for device in devices}


def test_threads_of_a_device_share_its_one_context(driver: Driver) -> None:
    devices = gf.devices(driver)

    result = run_migration(devices, 4)

    contexts = {(record.device.ordinal, record.context) for record in result.threads}
    assert len(contexts) == len({context for _, context in contexts}) == len(devices)


def test_fifteen_threads_per_device(driver: Driver) -> None:
    devices = gf.devices(driver)

    assert run_migration(devices, MOST_THREADS).verified == MOST_THREADS * len(devices)


def test_the_callers_current_context_stays(context: gf.Context) -> None:
    with context:
        assert run_migration([context.device]).ok
        assert context.is_current


def test_events_come_on_the_calling_thread_start_before_end(driver: Driver) -> None:
    seen: list[tuple[str, str]] = []
    threads = set()

    def on_event(kind: str, record: ThreadRecord) -> None:
        seen.append((str(record), kind))
        threads.add(threading.current_thread())

    result = run_migration(gf.devices(driver), on_event=on_event)

    assert threads == {threading.current_thread()}
    for record in result.threads:
        assert [kind for name, kind in seen if name == str(record)] == ["starts", "ends"]


def test_an_image_of_ones_own(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.fatbin").write_bytes(SHIPPED_IMAGE.read_bytes())

    assert run_migration(gf.devices(driver), image="mine.fatbin", kernel="countdown").ok


# What is found out


class Meddling:
    """A virtual driver of which one function is carried out by `answer(function, *arguments)` instead."""

    def __init__(self, raw: Any, name: str, answer: Any) -> None:
        self.raw = raw
        function = getattr(raw, name)
        setattr(self, name, lambda *arguments: answer(function, *arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def test_a_wrong_value_is_found_and_the_thread_named(virtual: Driver) -> None:
    def spoil(function: Any, target: Any, source: Any, count: int, stream: Any) -> Any:
        answer = function(target, source, count, stream)
        virtual.cuStreamSynchronize(stream)
        if threading.current_thread().name == "thread 2 of device 1":
            import ctypes

            ctypes.memset(int(target) + 12, 0, 4)
        return answer

    driver = get_driver(Meddling(virtual.raw, "cuMemcpyDtoHAsync", spoil))

    result = run_migration(gf.devices(driver))

    assert not result.ok
    assert (result.verified, result.expected) == (3, 4)
    assert result.failures == (
        "thread 2 of device 1 failed: launched with pointers, 1 of 32 values are wrong: "
        "out[3] is 0, expected 29",
    )


def test_a_kernel_that_writes_nothing_is_found(virtual: Driver) -> None:
    def skip(function: Any, *arguments: Any) -> Any:
        return (type(virtual.raw.cuInit(0)[0])(0),)

    driver = get_driver(Meddling(virtual.raw, "cuLaunchKernel", skip))

    result = run_migration(gf.devices(driver))

    assert result.verified == 0
    assert all(
        "32 of 32 values are wrong: out[0] is -1, expected 32" in failure for failure in result.failures
    )


def on_another_device(result: Migration) -> bool:
    said = ["the driver says that the context is of device" in failure for failure in result.failures]
    return result.verified == 0 and said == [True] * 4


def test_a_launch_on_another_device_is_found(virtual: Driver) -> None:
    def other(function: Any, *arguments: Any) -> Any:
        error, device = function(*arguments)
        return error, 1 - int(device)

    driver = get_driver(Meddling(virtual.raw, "cuCtxGetDevice", other))

    assert on_another_device(run_migration(gf.devices(driver)))


def test_memory_of_another_device_is_found(virtual: Driver) -> None:
    contexts = [device.create_context() for device in gf.devices(virtual)]

    def other(function: Any, *arguments: Any) -> Any:
        error, here = virtual.raw.cuCtxGetDevice()
        return error, contexts[1 - int(here)].handle

    driver = get_driver(Meddling(virtual.raw, "cuPointerGetAttribute", other))

    assert on_another_device(run_migration(gf.devices(driver)))
    for context in contexts:
        context.close()


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads_per_device": 0}, "threads_per_device is 0: expected 1 to 15"),
        ({"threads_per_device": 16}, "threads_per_device is 16: expected 1 to 15"),
        ({"launch": "both ways"}, "launch is 'both ways': expected one of pointers, packed, both"),
        ({"contexts": "green"}, "contexts is 'green': expected one of created, primary"),
        ({"rounds": 0}, "rounds is 0: expected 1 or more"),
    ],
)
def test_settings_out_of_range_are_refused(virtual: Driver, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_migration(gf.devices(virtual), **settings)


def test_no_device_is_an_error() -> None:
    with pytest.raises(gf.NoDriver, match="there is no device to run on"):
        run_migration([])


def test_a_kernel_that_is_not_there_is_refused_and_nothing_left(virtual: Driver) -> None:
    with pytest.raises(gf.ImageError, match=r"countup.*countdown"):
        run_migration(gf.devices(virtual), kernel="countup")


def test_an_image_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.ptx").touch()

    assert find_image("own.ptx") == tmp_path / "own.ptx"


def test_an_image_is_found_beside_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "program.py")])
    (tmp_path / "own.ptx").touch()

    assert find_image("own.ptx") == tmp_path / "own.ptx"


def test_a_missing_image_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "program.py")])

    with pytest.raises(gf.ImageError) as caught:
        find_image("none.ptx")

    assert "'none.ptx'" in str(caught.value)
    for folder in ("here", "bin"):
        assert str(tmp_path / folder / "none.ptx") in str(caught.value)


def test_an_absolute_path_is_one_place(tmp_path: Path) -> None:
    path = tmp_path / "none.ptx"

    with pytest.raises(gf.ImageError, match="looked for") as caught:
        find_image(path)

    assert str(caught.value).count(str(path)) == 2


# Nothing is left behind


class Failing:
    """A virtual driver whose function `name` answers `error` at its `at`-th call, and which takes notes.

    With `after`, the call is carried out nevertheless: the driver may report an error of earlier,
    asynchronous work by any call.
    """

    def __init__(self, raw: Any, name: str = "", at: int = 0, error: int = 0, *, after: bool = False) -> None:
        self.raw = raw
        self.name = name
        self.at = at
        self.error = error
        self.after = after
        self.lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.shapes: dict[str, int] = {}
        self.living: Counter[str] = Counter()
        self.current: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.raw, name)
        if not name.startswith("cu"):
            return function

        def call(*arguments: Any) -> Any:
            with self.lock:
                self.calls[name] += 1
                fails = name == self.name and self.calls[name] == self.at
            if fails and not self.after:
                return self._failure(name)
            answer = function(*arguments)
            self._note(name, answer)
            return self._failure(name) if fails else answer

        setattr(self, name, call)
        return call

    def _failure(self, name: str) -> tuple[Any, ...]:
        from cuda.bindings.driver import CUresult

        return (CUresult(self.error), *[None] * (SHAPES[name] - 1))

    def _note(self, name: str, answer: tuple[Any, ...]) -> None:
        with self.lock:
            self.shapes[name] = len(answer)
            if name in MADE_AND_ENDED and not answer[0]:
                self.living[MADE_AND_ENDED[name][0]] += MADE_AND_ENDED[name][1]
            self.current[threading.current_thread().name] = int(self.raw.cuCtxGetCurrent()[1])


MADE_AND_ENDED = {
    "cuCtxCreate": ("created", 1),
    "cuCtxDestroy": ("created", -1),
    "cuDevicePrimaryCtxRetain": ("primary", 1),
    "cuDevicePrimaryCtxRelease": ("primary", -1),
}
SHAPES: dict[str, int] = {}
"""Values in the answer of each function, from the rehearsal."""

MAKES_SOMETHING = {
    "cuCtxCreate",
    "cuCtxPushCurrent",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuLibraryLoadData",
    "cuMemAlloc",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuStreamCreate",
}
"""A driver that did these and answers an error instead of the handle has itself leaked."""

PUT_RIGHT = {"cuCtxGetCurrent", "cuCtxPopCurrent"}
"""When they fail while a context is left, the stack is put right and a `ContextWarning` says so."""

RECOVERED = {"cuMemAlloc"}
"""Where there is no memory, gpufleet lets pending frees end and asks once more."""

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
"""Sticky: gpufleet then gives every object up but the created contexts, as the driver does."""


@pytest.mark.filterwarnings("ignore::gpufleet.ContextWarning")
@pytest.mark.parametrize(
    ("error", "after"),
    [(OUT_OF_MEMORY, False), (OUT_OF_MEMORY, True), (ILLEGAL_ADDRESS, False)],
    ids=["instead", "after", "sticky"],
)
@pytest.mark.parametrize("contexts", ["created", "primary"])
def test_no_failing_call_leaves_anything_behind(
    virtual: Driver, contexts: str, error: int, after: bool
) -> None:
    calls = rehearse(virtual, contexts)
    free = free_memory(virtual)
    for name, count in calls.items():
        if after and name in MAKES_SOMETHING:
            continue
        for at in range(1, count + 1):
            raw = Failing(virtual.raw, name, at, error, after=after)
            case = f"call {at} of {name}"
            outcome = run(raw, contexts)

            assert raw.calls[name] >= at, f"{case} never came"
            put_right = PUT_RIGHT | (RECOVERED if error == OUT_OF_MEMORY else set())
            assert failed(outcome) or name in put_right, f"{case} failed, and nobody noticed"
            assert thread_entries() == [], case
            assert set(raw.current.values()) == {0}, f"{case} left a context current"
            if cannot_be_undone(name, contexts, error, after):
                virtual.reset()
                virtual.initialize()
                continue
            assert not any(raw.living.values()), f"{case} left contexts: {dict(raw.living)}"
            assert free_memory(virtual) == free, f"{case} left memory allocated"


def rehearse(virtual: Driver, contexts: str) -> dict[str, int]:
    """Count the calls of each function in a run in which nothing fails."""
    raw = Failing(virtual.raw)
    result = run(raw, contexts)
    assert isinstance(result, Migration)
    assert result.ok
    assert not any(raw.living.values())
    SHAPES.update(raw.shapes)
    return dict(raw.calls)


def run(raw: Failing, contexts: str) -> Migration | gf.GpufleetError:
    devices = gf.devices(get_driver(raw))
    raw.calls.clear()
    try:
        return run_migration(devices, 1, "packed", contexts)
    except gf.GpufleetError as error:
        return error


def failed(outcome: Migration | gf.GpufleetError) -> bool:
    return isinstance(outcome, gf.GpufleetError) or not outcome.ok


def cannot_be_undone(name: str, contexts: str, error: int, after: bool) -> bool:
    """Say whether the driver itself refused the clean-up."""
    refused_to_close = name in ("cuCtxDestroy", "cuDevicePrimaryCtxRelease") and not after
    return refused_to_close or (contexts == "primary" and error == ILLEGAL_ADDRESS)


def free_memory(virtual: Driver) -> list[tuple[int, int]]:
    free = []
    for device in gf.devices(virtual):
        context = device.retain_primary_context()
        free.append(context.memory_info())
        context.close()
    return free


def test_a_kernel_that_faults_leaves_no_context(virtual: Driver, tmp_path: Path) -> None:
    image = tmp_path / "faulty.ptx"
    image.write_text(STORES_TO_NULL)
    raw = Failing(virtual.raw)

    result = run_migration(gf.devices(get_driver(raw)), image=image, kernel="faulty")

    assert result.verified == 0
    assert len([failure for failure in result.failures if failure.startswith("thread ")]) == 4
    assert all("ILLEGAL_ADDRESS" in failure for failure in result.failures)
    assert result.failures[-1].startswith("a kernel has faulted: ")
    assert set(raw.current.values()) == {0}
    assert not any(raw.living.values())
    virtual.reset()
    virtual.initialize()


STORES_TO_NULL = """
.version 7.0
.target sm_75
.address_size 64

.visible .entry faulty(.param .u64 out, .param .u32 n)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;

    mov.u64 %rd1, 0;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


def test_an_interrupt_stops_the_threads_and_leaves_nothing(virtual: Driver) -> None:
    raw = Failing(virtual.raw)
    devices = gf.devices(get_driver(raw))
    free = free_memory(virtual)

    def interrupt(kind: str, record: ThreadRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_migration(devices, rounds=1_000_000, on_event=interrupt)

    assert set(raw.current.values()) == {0}
    assert not any(raw.living.values())
    assert free_memory(virtual) == free
    assert [thread for thread in threading.enumerate() if " of device " in thread.name] == []


def test_threads_that_cannot_start_are_an_error_and_leave_nothing(
    virtual: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_memory(virtual)
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if thread.name == "thread 2 of device 0":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)

    with pytest.raises(gf.GpufleetError, match="only 2 of 4 threads could be started: can't start"):
        run_migration(gf.devices(virtual))

    assert free_memory(virtual) == free
