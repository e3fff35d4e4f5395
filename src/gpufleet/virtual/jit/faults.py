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
        code, what, site, lane = _access(job, launch, site, generated.lanes)
    elif kind == abi.FAULT_ASSERT:
        code, what = "ASSERT", callbacks.assertion_message(job)
    elif kind < abi.FAULT_RANGE:
        code, what = _signal(job, launch)
    else:
        code, text = _TEXTS.get(kind, ("LAUNCH_FAILED", "failed"))
        what = text.format(barrier=job.fault_address, address=job.fault_address)
    where = _where(job, launch, kernel, site, lane, generated.lanes)
    return KernelFault(code, f"{where}: {what}")


_TEXTS = {
    abi.FAULT_TRAP: ("LAUNCH_FAILED", "trap"),
    abi.FAULT_CANCELLED: ("LAUNCH_TIMEOUT", "stopped while it was running"),
    abi.FAULT_DEADLOCK: (
        "LAUNCH_TIMEOUT",
        "deadlock: threads wait at barrier {barrier} that the others of the block never reach",
    ),
    abi.FAULT_MIXED_BARRIERS: (
        "LAUNCH_FAILED",
        "lanes of one warp wait at different barriers, which gpufleet does not support",
    ),
    abi.FAULT_WILD_CALL: ("LAUNCH_FAILED", "call of {address:#x}, which is no function"),
    abi.FAULT_STACK: ("LAUNCH_FAILED", "stack overflow: the recursion is too deep"),
    abi.FAULT_MEMORY: ("OUT_OF_MEMORY", "no memory for the launch's shared and local memory"),
}


def _access(
    job: Job, launch: Launch, site: dict[str, Any], lanes: int
) -> tuple[str, str, dict[str, Any], int]:
    """Find which of the accesses that a check stands for is the culprit, and in which lane."""
    space = site.get("space", "global")
    stride = site.get("stride") or 0
    low, high = _bounds(job, launch, space)
    base = job.fault_address
    for offset, size, line, text in site["accesses"]:
        for lane in range(lanes if stride else 1):
            address = base + offset + lane * stride & (1 << 64) - 1
            culprit = {**site, "line": line, "text": text}
            who = lane if stride else job.fault_lane
            if not low <= address <= high - size:
                return "ILLEGAL_ADDRESS", _out_of_bounds(launch, space, address, size), culprit, who
            if address % size:
                return (
                    "MISALIGNED_ADDRESS",
                    f"access of {size} bytes at {address:#x} is not aligned to its size",
                    culprit,
                    who,
                )
    return "ILLEGAL_ADDRESS", f"access near {base:#x}", site, job.fault_lane


def _bounds(job: Job, launch: Launch, space: str) -> tuple[int, int]:
    if space == "shared":
        return 0, job.shared_bytes
    if space == "param":
        return 0, job.parameter_bytes
    if space == "local":
        return 0, 0
    return job.memory, job.memory + job.memory_bytes


def _out_of_bounds(launch: Launch, space: str, address: int, size: int) -> str:
    if space in ("shared", "param", "local"):
        return f"access of {size} bytes at offset {address:#x} is outside the block's {space} memory"
    return f"access of {size} bytes at {address:#x}: {launch.memory.describe(address)}"


def _signal(job: Job, launch: Launch) -> tuple[str, str]:
    number = job.fault_kind
    if number in (signal.SIGSEGV, signal.SIGBUS):
        address = job.fault_address
        return "ILLEGAL_ADDRESS", f"access at {address:#x}: {launch.memory.describe(address)}"
    return "LAUNCH_FAILED", f"the CPU raised {signal.Signals(number).name}"


def _where(
    job: Job, launch: Launch, kernel: str, site: dict[str, Any], lane: int, lanes: int
) -> str:
    text = f"kernel {kernel!r}"
    if "line" in site:
        text += f", PTX line {site['line']} ({site['text']})"
    if "source" in site:
        text += f", {site['source']}"
    x, y, _ = launch.grid
    block = job.fault_block
    text += f", block ({block % x}, {block // x % y}, {block // (x * y)})"
    x, y, _ = launch.block
    thread = job.fault_warp * lanes + lane
    return f"{text}, thread ({thread % x}, {thread // x % y}, {thread // (x * y)})"
