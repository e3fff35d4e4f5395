"""What README.md and docs/ show is what happens: their examples run, on virtual devices.

A `python` block is run as a program, or by pytest where it has tests; one that says `gpu` too needs a real
one, and the libraries that it imports. In a `console` block each line that
starts with "$ " is run in a shell, and what it prints must be the lines below it, where "..." stands for
anything.
"""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import gpufleet as gf

PROJECT = Path(__file__).parents[1]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
PYTEST = ["-m", "pytest", "-q", "-m", "not gpu", "-o", "markers=gpu: needs a real GPU"]


class Block(NamedTuple):
    name: str
    language: str
    text: str


def blocks(language: str) -> list[Block]:
    fence = re.compile(r"^```(\w+(?: gpu)?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in fence.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            if match[1] == language:
                found.append(Block(f"{page.name}:{line}", language, match[2]))
    return found


def environment(**chosen: str) -> dict[str, str]:
    """Return one in which nothing but `chosen` chooses devices, and `gpufleet` is the one under test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUFLEET", "CUDA"))}
    programs = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return kept | {"PATH": programs} | chosen


@pytest.fixture
def _no_gpu() -> None:
    """Skip where there is a GPU: the sessions show a machine without one."""
    with contextlib.suppress(gf.NoDriver):
        gf.get_driver("nvidia")
        pytest.skip("this machine has a GPU")


def run(block: Block, folder: Path, driver: str) -> subprocess.CompletedProcess[str]:
    script = folder / "test_example.py"
    script.write_text(block.text, encoding="utf-8")
    options = PYTEST if "\ndef test_" in block.text else []
    return subprocess.run(
        [sys.executable, "-W", "error", *options, script],
        cwd=folder,
        env=environment(GPUFLEET_DRIVER=driver),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_example_runs(block: Block, tmp_path: Path) -> None:
    done = run(block, tmp_path, "virtual")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("block", blocks("python gpu"), ids=lambda block: block.name)
def test_example_runs_on_a_gpu(block: Block, tmp_path: Path) -> None:
    for library in re.findall(r"^import (\w+)", block.text, re.MULTILINE):
        pytest.importorskip(library)
    done = run(block, tmp_path, "nvidia")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.name)
def test_session_prints_what_it_shows(block: Block, tmp_path: Path) -> None:
    matches = doctest.OutputChecker().check_output
    sessions = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE)
    assert sessions, "a console block without a command"
    for command, expected in sessions:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
        )
        printed = done.stdout + done.stderr
        assert matches(expected, printed, doctest.ELLIPSIS), (
            f"{command}\nexpected\n{expected}\ngot\n{printed}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))

    assert [target for target in targets if not (page.parent / target).exists()] == []


SAFETY = (PROJECT / "docs/threads.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "sentence", re.findall(r"^\* .*$", SAFETY, re.MULTILINE), ids=lambda line: line[2:42]
)
def test_sentence_on_threads_names_tests_that_exist(sentence: str) -> None:
    found = re.search(r"<!-- (.+) -->$", sentence)
    assert found, "no test is named"
    for test in found[1].split():
        file, _, function = test.partition("::")
        text = (PROJECT / "tests" / file).read_text(encoding="utf-8")
        assert function == "*" or f"def {function}(" in text, f"there is no {test}"
