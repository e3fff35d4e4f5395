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
    _open_what_is_closed()
    try:
        from gpufleet.cli.app import run

        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return 1
    except OSError as error:  # a full disk, say: the output is what failed, so it cannot be told there
        _silence_stdout()
        sys.stderr.write(f"gpufleet: the output cannot be written: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _open_what_is_closed() -> None:
    """Let output go nowhere where the caller has closed it (``>&-``): Python has None for it then."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, for the process


def _silence_stdout() -> None:
    """Send what is still buffered nowhere: Python flushes at exit, and would complain of the pipe again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
