"""The virtual driver answers what the real one did about memory, streams, captures, graphs (conformance/).

Each chapter is asked of a fresh driver. What is not reproduced yet stands, with the reason, in
not_reproduced.json, which may only shrink: `python tests/virtual/test_memory_conformance.py` takes out
what has come right.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpufleet.virtual import VirtualDriver

FOLDER = Path(__file__).parents[2] / "conformance"
RECORDED: dict[str, dict[str, Any]] = json.loads((FOLDER / "h200-driver-580-memory.json").read_text())[
    "chapters"
]
KERNELS = (FOLDER / "memory_kernels.ptx").read_bytes() + b"\0"
LIST = Path(__file__).with_name("not_reproduced.json")
NOT_REPRODUCED: dict[str, dict[str, list[str]]] = json.loads(LIST.read_text())
"""{chapter: {reason: probes}}"""
RACES = {
    ("events", "default_streams.per_thread.wait.query_blocking"),
    ("streams", "without_a_context.event.query"),
}
"""Answers that depend on whether a moment's work is done before the next call: READY or NOT_READY."""
HAZARDS = [
    "hazard.green_destroyed_while_current",
    "hazard.green_destroyed_before_its_stream",
    "hazard.green_destroyed_as_a_context",
]
"""Chapters that each had a process of their own, since the driver might have crashed: it answered."""
DEVICE_AS_RECORDED = {"green"}
"""Chapters of which even the answers that depend on the device are the same, with as many multiprocessors."""

sys.path.append(str(FOLDER))
import memory_probes  # noqa: E402

PROBES = [
    (chapter, name)
    for chapter in (*memory_probes.CHAPTERS, *HAZARDS)
    for name in RECORDED[chapter]
    if chapter in DEVICE_AS_RECORDED or not name.endswith(".value.hardware")
]


@functools.cache
def answers(chapter: str) -> dict[str, Any]:
    driver = VirtualDriver(devices=2, multiprocessors=132, visible_devices=None)
    found: dict[str, Any] = json.loads(json.dumps(memory_probes.probe(chapter, driver, KERNELS)))
    driver.reset()
    return found


@functools.cache
def reasons(chapter: str) -> dict[str, str]:
    """Why the answers of a chapter that are not reproduced are not."""
    return {name: why for why, names in NOT_REPRODUCED.get(chapter, {}).items() for name in names}


def is_right(chapter: str, name: str) -> bool:
    return name in answers(chapter) and bool(answers(chapter)[name] == RECORDED[chapter][name])


@pytest.mark.parametrize(("chapter", "name"), PROBES)
def test_answer(chapter: str, name: str) -> None:
    why = reasons(chapter).get(name)
    if (chapter, name) in RACES:
        assert answers(chapter)[name] in ("SUCCESS", "ERROR_NOT_READY")
    elif why is None:
        assert answers(chapter).get(name, "not asked") == RECORDED[chapter][name]
    else:
        assert not is_right(chapter, name), f"reproduced now: take it out of {LIST.name} (it said: {why})"
        pytest.skip(why)


def test_only_recorded_answers_are_listed() -> None:
    listed = {(chapter, name) for chapter in NOT_REPRODUCED for name in reasons(chapter)}
    assert listed <= set(PROBES)


def shrink() -> None:
    """Take out of the list what has come right."""
    for chapter, groups in NOT_REPRODUCED.items():
        for why, names in groups.items():
            groups[why] = [name for name in names if not is_right(chapter, name)]
    left = {
        chapter: {why: names for why, names in groups.items() if names}
        for chapter, groups in NOT_REPRODUCED.items()
    }
    LIST.write_text(
        json.dumps({chapter: groups for chapter, groups in left.items() if groups}, indent=1) + "\n"
    )


if __name__ == "__main__":
    shrink()
