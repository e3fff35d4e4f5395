"""Many threads do everything that may be done with pools, at random: nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks/pool.py"


@pytest.mark.parametrize("seed", [1, 2])
def test_stress_loses_no_lease_and_no_memory(seed: int) -> None:
    options = ["--stress", "10000", "--threads", "32", "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", PROGRAM, *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for outcome in ("closed pools", "collections", "exceptions", "forgotten", "timeouts"):
        assert outcome in done.stdout
