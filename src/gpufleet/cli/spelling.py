"""The option spellings of NVIDIA's own samples, for scripts that already use them."""

from __future__ import annotations

import re
from collections.abc import Sequence

THREADS = "--threads-per-device"

_THREADS_GIVEN = re.compile(r"-n(?:=|(?=[-+]?\d))(.*)|--?(?:nthreads|numthreads)=(.*)")
_UNKNOWN = re.compile(r"-n-?[A-Za-z][\w-]*(=.*)?")
_REPLACED = {
    "-n": THREADS,
    "-nthreads": THREADS,
    "--nthreads": THREADS,
    "-numthreads": THREADS,
    "--numthreads": THREADS,
    "-qatest": "--qatest",
    "-noprompt": "--noprompt",
}


def normalize(arguments: Sequence[str]) -> list[str]:
    """Write the options of `gpufleet migrate` the one way that the parser knows.

    ``-n N``, ``-nN``, ``-n=N``, ``-nthreads N``, ``-nthreads=N`` (and so for ``-numthreads``) become
    ``--threads-per-device N``; ``-qatest`` and ``-noprompt`` get their second dash, and so does any other
    word that begins with n, which the parser would take for a value of ``-n``. No arguments at all ask
    for help. Nothing is judged here: a value that is no number reaches the parser as it is.
    """
    if not arguments:
        return ["--help"]
    if arguments[0] != "migrate":
        return list(arguments)
    return ["migrate", *map(_normalized, arguments[1:])]


def _normalized(argument: str) -> str:
    given = _THREADS_GIVEN.fullmatch(argument)
    if given:
        return f"{THREADS}={given[1] if given[1] is not None else given[2]}"
    if argument in _REPLACED:
        return _REPLACED[argument]
    return f"-{argument}" if _UNKNOWN.fullmatch(argument) else argument
