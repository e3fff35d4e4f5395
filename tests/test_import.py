"""`import gpufleet` defines names and does nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

NEVER_AT_IMPORT = (
    "cuda.bindings",
    "llvmlite",
    "rich",
    "typer",
    "zstandard",
    "gpufleet.virtual",
)
LIMIT_SECONDS = 0.1

IMPORT = "import gpufleet"
IMPORT_ALL = "import gpufleet; [getattr(gpufleet, name) for name in gpufleet.__all__]"


@pytest.mark.parametrize("statement", [IMPORT, IMPORT_ALL], ids=["import", "every name"])
def test_import_takes_little_time_beyond_numpy(statement: str, tmp_path: Path) -> None:
    script = f"""
        import json, time
        import numpy, numpy.typing
        began = time.process_time()  # unlike the wall's, it does not count what else the machine does
        {statement}
        print(json.dumps(time.process_time() - began))
        """
    compiled = compiled_once(tmp_path)
    answer(script, compiled)  # compiles

    best = min(answer(script, compiled) for _ in range(5))

    assert best < LIMIT_SECONDS


@pytest.mark.parametrize("statement", [IMPORT, IMPORT_ALL], ids=["import", "every name"])
def test_import_loads_nothing_heavy(statement: str) -> None:
    script = f"""
        import json, sys
        {statement}
        print(json.dumps(sorted(sys.modules)))
        """
    loaded = answer(script)

    heavy = [name for name in loaded if any(f"{name}.".startswith(f"{never}.") for never in NEVER_AT_IMPORT)]
    assert heavy == []


@pytest.mark.parametrize("statement", [IMPORT, IMPORT_ALL], ids=["import", "every name"])
def test_import_starts_no_thread(statement: str) -> None:
    script = f"""
        import json, threading
        import numpy
        before = threading.active_count()
        {statement}
        print(json.dumps(threading.active_count() - before))
        """
    assert answer(script) == 0


@pytest.mark.parametrize("statement", [IMPORT, IMPORT_ALL], ids=["import", "every name"])
def test_import_reads_no_environment_variable(statement: str) -> None:
    script = f"""
        import json, os
        import numpy, numpy.typing
        read = []

        class Watched(type(os.environ)):
            def __init__(self, watched):
                self.__dict__.update(watched.__dict__)

            def __getitem__(self, key):
                read.append(key)
                return super().__getitem__(key)

            def __iter__(self):
                read.append("all of them")
                return super().__iter__()

        os.environ = Watched(os.environ)
        os.environ.get("HOME"), os.getenv("HOME")
        assert read == ["HOME", "HOME"], "the watch does not work"
        read.clear()
        {statement}
        print(json.dumps(read))
        """
    assert answer(script) == []


def compiled_once(folder: Path) -> dict[str, str]:
    """Return an environment whose interpreters keep their bytecode in `folder`.

    A test machine may forbid bytecode, or hold an editable install that has none: then
    every import would count the compiling of all source, which users never see.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return environment | {"PYTHONPYCACHEPREFIX": str(folder)}


def answer(script: str, environment: dict[str, str] | None = None) -> Any:
    """Run `script` in a new interpreter; return the JSON that it prints."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
