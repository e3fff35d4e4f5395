"""What a driver says of one pointer: an answer that several chapters ask for."""

from __future__ import annotations

# CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL is left out: cuda-bindings 13.1 to 13.4 answer 0 for every
# pointer (they read it from another field than the driver wrote; fixed in 13.5).
ADDRESSES = ("DEVICE_POINTER", "HOST_POINTER", "RANGE_START_ADDR")
NUMBERS = ("MEMORY_TYPE", "RANGE_SIZE", "ALLOWED_HANDLE_TYPES", "ACCESS_FLAGS")
TRUTHS = ("SYNC_MEMOPS", "IS_MANAGED", "MAPPED", "IS_LEGACY_CUDA_IPC_CAPABLE")


def describe_pointer(p, name, pointer, base=None):
    """Keep {attribute: value or code}; addresses count from `base` (the pointer itself if None)."""
    pointer = int(pointer)
    base = pointer if base is None else int(base)
    answers = {}
    for each in ("CONTEXT", *NUMBERS, *ADDRESSES, *TRUTHS, "BUFFER_ID", "MEMPOOL_HANDLE"):
        attribute = getattr(p.d.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{each}")
        answer, value = p.call(p.d.cuPointerGetAttribute, attribute, pointer)
        answers[each] = answer if answer != "SUCCESS" else _say(p, each, value, base)
    p.keep(name, answers)


def _say(p, attribute, value, base):
    if attribute == "CONTEXT":
        return {0: "none", int(p.context): "the first"}.get(int(value), "another")
    if attribute == "MEMPOOL_HANDLE":
        return "none" if not int(value) else "a pool"
    if attribute == "BUFFER_ID":
        return int(value) != 0
    if attribute in ADDRESSES:
        return "null" if not int(value) else int(value) - base
    if attribute in TRUTHS:
        return bool(value)
    return int(value)
