"""Each part imports only what stands above it in the table of docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src/gpufleet").rglob("*.py"))


def table() -> list[str]:
    """Return the parts in the order of the table, lowest first."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = text.split("## The parts, lowest first")[1].split("Inside `virtual/`")[0]
    parts = [row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")]
    names = [name for text in parts for name in re.findall(r"`([^`]+)`", text)]
    return [name.removesuffix(".py").rstrip("/") for name in names]


def part(path: Path) -> str:
    return path.relative_to(ROOT / "src/gpufleet").parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Yield the gpufleet parts that a file imports, also inside functions, but not for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpufleet."):
            yield str(node.module).split(".")[1]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src/gpufleet")))
def test_imports_only_what_stands_above_it(path: Path) -> None:
    order = table()
    here = part(path)
    if here in ("__init__", "__main__"):
        return
    assert here in order, f"{here} is not in the table of docs/architecture.md"
    above = order[: order.index(here) + 1]
    wrong = [name for name in imported(path) if name not in above]
    assert not wrong, f"{here} imports {wrong}"
