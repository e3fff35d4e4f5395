"""What CUDA_VISIBLE_DEVICES says: which devices there are, and in which order.

Documented in the CUDA Programming Guide, "CUDA Environment Variables". What it does not say (text behind
a number, repeated devices) is as PyTorch found it in the driver: see `_parse_visible_devices` in
torch/cuda/__init__.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"[+-]?0*\d{1,9}(?!\d)")
"""No ordinal has more digits, and Python refuses to read very long numbers."""


def visible_devices(text: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the ordinals of the devices that a value of CUDA_VISIBLE_DEVICES leaves, in its order.

    Parameters
    ----------
    text : str or None
        None, if the variable is not set: all devices. Otherwise ordinals or beginnings of UUIDs
        ("GPU-8932f937"), separated by commas. The first entry that means no device, or several, ends the
        list; one that repeats a device leaves none.
    uuids : sequence of str
        The UUIDs of all devices, in the form "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6".
    """
    if text is None:
        return list(range(len(uuids)))
    visible: list[int] = []
    for entry in text.split(","):
        ordinal = _ordinal(entry.strip(), uuids)
        if ordinal is None:
            break
        if ordinal in visible:
            return []
        visible.append(ordinal)
    return visible


def _ordinal(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.upper().startswith("GPU-"):
        matching = [ordinal for ordinal, uuid in enumerate(uuids) if uuid.lower().startswith(entry.lower())]
        return matching[0] if len(matching) == 1 else None
    number = _NUMBER.match(entry)
    if number is None or not 0 <= int(number[0]) < len(uuids):
        return None
    return int(number[0])
