"""The two structures that Python, the native runtime and compiled kernels share.

`Job` describes one launch; `Worker` belongs to one CPU thread. LLVM IR reaches their fields by the
byte offsets that ctypes computes (`offset`), so the layout stands here alone.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

BARRIERS = 16
"""Named barriers of a block (PTX ISA 9.7.13.1)."""
SLACK = 64
"""Bytes behind every block's shared memory, so that an access that begins inside stays inside the arena."""

# Why a kernel stopped, as it stands in `Job.fault_kind`; positive values below 100 are signals.
FAULT_RANGE = 100
FAULT_ALIGNMENT = 101
FAULT_TRAP = 102
FAULT_CANCELLED = 103
FAULT_DEADLOCK = 104
FAULT_MIXED_BARRIERS = 105
FAULT_WILD_CALL = 106
FAULT_STACK = 107
FAULT_ASSERT = 108
FAULT_MEMORY = 109
FAULT_WILD_BRANCH = 110


class Job(c.Structure):
    """One launch, read by every worker that takes part."""

    _fields_ = [
        ("memory", c.c_void_p),
        ("memory_bytes", c.c_uint64),
        ("parameters", c.c_void_p),
        ("symbols", c.c_void_p),
        ("thread_ids", c.c_void_p),
        ("entry", c.c_void_p),
        ("diverged", c.c_void_p),
        ("grid", c.c_uint32 * 3),
        ("block", c.c_uint32 * 3),
        ("thread_id_stride", c.c_uint64),
        ("threads", c.c_uint32),
        ("warps", c.c_uint32),
        ("shared_bytes", c.c_uint64),
        ("dynamic_shared", c.c_uint32),
        ("multiprocessors", c.c_uint32),
        ("frames", c.c_uint64),
        ("locals", c.c_uint64),
        ("arena_bytes", c.c_uint64),
        ("clock_rate", c.c_uint64),
        ("grid_id", c.c_uint64),
        ("parameter_bytes", c.c_uint64),
        ("warps32", c.c_uint32),
        ("shared_total", c.c_uint32),
        ("lanes", c.c_uint32),
        # what changes while the job runs
        ("next", c.c_int64),
        ("total", c.c_int64),
        ("chunk", c.c_int64),
        ("stop", c.c_int32),
        ("queued", c.c_int32),
        ("running", c.c_int32),
        ("faulted", c.c_int32),
        ("fault_kind", c.c_int32),
        ("fault_site", c.c_int32),
        ("fault_lane", c.c_int32),
        ("fault_warp", c.c_int32),
        ("fault_address", c.c_uint64),
        ("fault_block", c.c_int64),
        ("fault_code", c.c_uint64),
        ("stack_low", c.c_uint64),
        ("token", c.c_uint64),
    ]


class Worker(c.Structure):
    """One CPU thread's part of the runtime."""

    _fields_ = [
        ("arena", c.c_void_p),
        ("arena_bytes", c.c_uint64),
        ("block", c.c_int64),
        ("warp", c.c_int32),
        ("kind", c.c_int32),
        ("site", c.c_int32),
        ("lane", c.c_int32),
        ("address", c.c_uint64),
        ("code", c.c_uint64),
        ("stack_low", c.c_uint64),
        ("stack_bytes", c.c_uint64),
        ("signal_stack", c.c_uint64 * 3),
        # sigsetjmp's buffer: 200 bytes on x86-64, 312 on arm64; 16-byte aligned by what precedes it
        ("jump", c.c_uint64 * 42),
    ]


def offset(structure: type[c.Structure], field: str) -> int:
    """Byte offset of a field."""
    descriptor: Any = getattr(structure, field)
    return int(descriptor.offset)
