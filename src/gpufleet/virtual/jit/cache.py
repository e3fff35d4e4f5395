"""Compiled kernels on disk, shared by all processes of a user.

An entry is a file named by the hash of everything the code depends on: the PTX text, the kernel, the
class of block shapes, the CPU's name and features, the versions of LLVM and of this compiler's own
source. It is written under another name and renamed, so readers never see half of it; it carries a
checksum, and one that is damaged is as good as missing. The folder is kept below a size by deleting
what was not used for longest. Nothing here ever raises: without a cache kernels are just compiled.

The folder is $GPUFLEET_CACHE_DIR, else gpufleet/ in $XDG_CACHE_HOME or ~/.cache; an empty
GPUFLEET_CACHE_DIR turns the cache off.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

LIMIT_BYTES = 256 << 20
_MAGIC = b"gpufleet jit 1\n"
_CHECKSUM = 32


def folder() -> Path | None:
    """Where entries are kept; None if the cache is off."""
    chosen = os.environ.get("GPUFLEET_CACHE_DIR")
    if chosen == "":
        return None
    if chosen is not None:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "gpufleet"
    except RuntimeError:  # no home directory
        return None


def key(*parts: object) -> str:
    """Name of the entry for code that depends on all these."""
    hashed = sha256(_compiler_digest())
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()


def load(name: str) -> tuple[dict[str, Any], bytes] | None:
    """Return the description and the code of an entry, or None."""
    place = folder()
    if place is None:
        return None
    path = place / f"{name}.bin"
    try:
        data = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    body = data[len(_MAGIC) + _CHECKSUM :]
    if not data.startswith(_MAGIC) or data[len(_MAGIC) : len(_MAGIC) + _CHECKSUM] != sha256(body).digest():
        return None
    size = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + size]), body[8 + size :]


def store(name: str, description: dict[str, Any], code: bytes) -> None:
    """Write an entry; another process that writes the same one writes the same."""
    place = folder()
    if place is None:
        return
    text = json.dumps(description).encode()
    body = len(text).to_bytes(8, "little") + text + code
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=place, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + sha256(body).digest() + body)
            os.replace(temporary, place / f"{name}.bin")
        except BaseException:
            os.unlink(temporary)
            raise
        _prune(place)
    except OSError:
        return


def _prune(place: Path) -> None:
    """Delete the entries used longest ago until the folder is below its limit."""
    entries = []
    for entry in os.scandir(place):
        try:
            status = entry.stat()
        except OSError:  # another process deleted it
            continue
        entries.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= LIMIT_BYTES:
            return
        try:
            os.unlink(path)
        except OSError:
            continue
        total -= size


@cache
def _compiler_digest() -> bytes:
    """Hash of the versions of LLVM's binding and of the source that generates code."""
    import llvmlite

    hashed = sha256(llvmlite.__version__.encode())
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *(here.parent / "ptx").glob("*.py")]):
        hashed.update(source.read_bytes())
    return hashed.digest()
