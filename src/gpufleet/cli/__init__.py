"""The command line: `gpufleet devices`, `gpufleet migrate`, `gpufleet build`.

Each command is one file with one function of its name; `app.py` loads it when it is asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    Parameters
    ----------
    arguments : sequence of str
        Without the program's name; `sys.argv[1:]` if None.

    Returns
    -------
    int
        0: done. 1: the check failed, there is no device, or the output was closed. 2: wrong usage.
        130: Ctrl-C.
    """
    try:
        from gpufleet.cli.app import run

        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _silence_stdout() -> None:
    """Send what is still buffered nowhere: Python flushes at exit, and would complain of the pipe again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
