"""What is said when a kernel does what it must not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpufleet.virtual.engine import KernelFault

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group
    from gpufleet.virtual.ptx.syntax import Instruction


def fault(code: str, what: str, group: Group, instruction: Instruction | None, slot: int) -> KernelFault:
    """Make a fault that names kernel, PTX line, CUDA line, block and thread."""
    batch = group.batch
    lane = int(group.space.lanes[slot])
    block, thread = batch.locate(lane)
    where = f"kernel {batch.kernel_name}"
    if group.code.name != batch.kernel_name:
        where += f", function {group.code.name}"
    if instruction is not None:
        where += f", PTX line {instruction.line}"
        if instruction.source is not None:
            where += f" ({instruction.source})"
    where += f", block {block}, thread {thread}"
    if instruction is not None:
        where += f", in {instruction}"
    return KernelFault(code, f"{what}: {where}")


def access_fault(
    code: str, what: str, group: Group, instruction: Instruction, slot: int, address: int, note: str
) -> KernelFault:
    """Make a fault about a memory access."""
    return fault(code, f"{what} at address {address:#x} ({note})", group, instruction, slot)


def deadlock(group: Group, instruction: Instruction | None, why: str) -> KernelFault:
    """Make the fault for threads that wait for others that never come; a GPU hangs there."""
    return fault("LAUNCH_FAILED", f"deadlock: {why}", group, instruction, int(group.active[0]))
