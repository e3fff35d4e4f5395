"""From what the runtime recorded to a `KernelFault` that says what happened, where, and to whom."""

from __future__ import annotations

import signal
from typing import Any

from gpufleet.virtual.engine import KernelFault, Launch
from gpufleet.virtual.jit import abi, callbacks
from gpufleet.virtual.jit.abi import Job
from gpufleet.virtual.jit.kernel import Generated


def describe(job: Job, launch: Launch, kernel: str, generated: Generated) -> KernelFault:
    """Make the exception for a job that faulted."""
    kind = job.fault_kind
    site = generated.sites[job.fault_site] if kind >= abi.FAULT_RANGE and generated.sites else {}
    lane = job.fault_lane
    if kind == abi.FAULT_RANGE:
        code, what, site, lane = _access(job, launch, site, generated)
    elif kind == abi.FAULT_ASSERT:
        code, what = "ASSERT", callbacks.assertion_message(job)
    elif kind < abi.FAULT_RANGE:
        code, what = _signal(job, launch)
    else:
        code, text = _TEXTS[kind]
        what = text.format(address=job.fault_address)
    return KernelFault(code, f"{what}: {_where(job, launch, kernel, site, lane, generated.lanes)}")


_TEXTS = {
    abi.FAULT_TRAP: ("LAUNCH_FAILED", "trap"),
    abi.FAULT_CANCELLED: ("LAUNCH_TIMEOUT", "cancelled while it was running"),
    abi.FAULT_DEADLOCK: (
        "LAUNCH_FAILED",
        "deadlock: threads of the block wait at barrier {address} for others that never come",
    ),
    abi.FAULT_MIXED_BARRIERS: (
        "LAUNCH_FAILED",
        "deadlock: lanes of one warp wait at different barriers",
    ),
    abi.FAULT_WILD_CALL: (
        "ILLEGAL_INSTRUCTION",
        "call of address {address:#x}, where no function of this type is",
    ),
    abi.FAULT_WILD_BRANCH: ("ILLEGAL_INSTRUCTION", "branch to entry {address} of a shorter table"),
    abi.FAULT_STACK: ("LAUNCH_FAILED", "stack overflow"),
    abi.FAULT_MEMORY: ("OUT_OF_MEMORY", "no memory for the launch's shared and local memory"),
}

_OWNER = {"shared": "the block", "local": "the thread", "param": "the launch"}


def _access(
    job: Job, launch: Launch, site: dict[str, Any], generated: Generated
) -> tuple[str, str, dict[str, Any], int]:
    """Find which of the accesses that a check stands for is the culprit, and in which lane."""
    space, stride = site.get("space", "global"), site.get("stride") or 0
    low, high = _bounds(job, generated, space)
    base = job.fault_address
    for offset, size, line, text in site["accesses"]:
        for lane in range(job.fault_lane, generated.lanes if stride else job.fault_lane + 1):
            address = base + offset + lane * stride & (1 << 64) - 1
            culprit = {**site, "line": line, "text": text}
            what = f"{space or 'global'} {_KINDS.get(text.split('.')[0], 'access')} of {_bytes(size)}"
            if address % size:
                found = "MISALIGNED_ADDRESS", f"{what} at address {address:#x} (not a multiple of {size})"
            elif not low <= address <= high - size:
                if space in _OWNER:
                    note = f"{_OWNER[space]} has {high} bytes of {space} memory"
                else:
                    note = launch.memory.describe(address)
                found = "ILLEGAL_ADDRESS", f"{what} out of bounds at address {address:#x} ({note})"
            else:
                continue
            return *found, culprit, lane
    return "ILLEGAL_ADDRESS", f"access near address {base:#x}", site, job.fault_lane


_KINDS = {"ld": "load", "ldu": "load", "st": "store", "atom": "atomic operation", "red": "atomic operation"}


def _bytes(count: int) -> str:
    return "1 byte" if count == 1 else f"{count} bytes"


def _bounds(job: Job, generated: Generated, space: str) -> tuple[int, int]:
    if space == "shared":
        return 0, job.shared_bytes
    if space == "param":
        return 0, job.parameter_bytes
    if space == "local":
        return 0, generated.local_bytes
    return job.memory, job.memory + job.memory_bytes


def _signal(job: Job, launch: Launch) -> tuple[str, str]:
    """The CPU noticed: an unmapped page inside the region, or the end of the thread's stack."""
    number, address = job.fault_kind, job.fault_address
    if job.stack_low - _GUARD <= address < job.stack_low + _GUARD:
        return "LAUNCH_FAILED", "stack overflow"
    if number in (signal.SIGSEGV, signal.SIGBUS):
        return (
            "ILLEGAL_ADDRESS",
            f"access out of bounds at address {address:#x} ({launch.memory.describe(address)})",
        )
    return "LAUNCH_FAILED", f"the CPU raised {signal.Signals(number).name}"


_GUARD = 1 << 16
"""Bytes around a stack's end that nothing but its overflow touches."""


def _where(job: Job, launch: Launch, kernel: str, site: dict[str, Any], lane: int, lanes: int) -> str:
    """The same words as the interpreter's."""
    text = f"kernel {kernel}"
    if "function" in site:
        text += f", function {site['function']}"
    if "line" in site:
        text += f", PTX line {site['line']}"
    if "source" in site:
        text += f" ({site['source']})"
    x, y, _ = launch.grid
    block = job.fault_block
    text += f", block ({block % x}, {block // x % y}, {block // (x * y)})"
    x, y, _ = launch.block
    thread = job.fault_warp * lanes + lane
    text += f", thread ({thread % x}, {thread // x % y}, {thread // (x * y)})"
    return f"{text}, in {site['text']}" if "text" in site else text
