"""mbarrier, and copies from global to shared memory that would be asynchronous on a GPU.

Copies are done where they are asked for, so waiting for them is nothing, and the arrival that is to
follow a copy is counted at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter import accesses, atomics, mbarriers
from gpufleet.virtual.interpreter.binding import bind
from gpufleet.virtual.interpreter.code import Operation
from gpufleet.virtual.interpreter.decoder import Decoder, Handler
from gpufleet.virtual.interpreter.memory import Access
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.values import DTYPES, Array
from gpufleet.virtual.interpreter.warp import read
from gpufleet.virtual.ptx.errors import invalid
from gpufleet.virtual.ptx.syntax import Address, Discard, Immediate, Instruction, Negated, Operand, Register

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group


# ---------------------------------------------------------------------------------------- mbarrier


def _mbarrier(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    operation, operands = instruction.operation, instruction.operands
    if "pending_count" in operation:
        place = decoder.slots.destination(operands[0], "u32", instruction.line)
        state = decoder.source(operands[1], "b64", instruction)
        return [bind(lambda word: mbarriers.pending(word).astype(np.uint32), [place], [state])]
    if "init" in operation or "inval" in operation:
        return _initialize(decoder, instruction)
    if "test_wait" in operation or "try_wait" in operation:
        return _wait(decoder, instruction)
    if "expect_tx" in operation and "arrive" not in operation and "arrive_drop" not in operation:
        return _change(decoder, instruction, mbarriers.expect, Discard(), operands[0], operands[1])
    if "complete_tx" in operation:
        return _change(decoder, instruction, mbarriers.complete, Discard(), operands[0], operands[1])
    action = "arrive_drop" if "arrive_drop" in operation else "arrive"
    change = mbarriers.ARRIVALS[action, "expect_tx" in operation]
    count = operands[2] if len(operands) > 2 else Immediate(1, "u32")
    return _change(decoder, instruction, change, operands[0], operands[1], count)


def _initialize(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    """What an invalid object holds does not matter; 0 is as good as anything."""
    address, *count = instruction.operands
    access, base, before = _object(decoder, instruction, address, writes=True)
    slot = decoder.slots.add(np.zeros(1, np.uint64))
    if count:
        number = decoder.source(count[0], "u32", instruction)
        made = bind(lambda n: mbarriers.initialized(n.astype(np.uint64)), [(slot, None)], [number])
        before = [*before, made]
    return [*before, accesses.store(access, base, [(slot, None)])]


def _change(
    decoder: Decoder,
    instruction: Instruction,
    change: mbarriers.Change,
    destination: Operand,
    address: Operand,
    amount: Operand,
) -> list[Operation]:
    access, base, before = _object(decoder, instruction, address, writes=True)
    slot, cast = decoder.source(amount, "u32", instruction)
    wide = (slot, lambda value: (value if cast is None else cast(value)).astype(np.uint64))
    results = []
    if isinstance(destination, Register):
        results = [decoder.slots.destination(destination, "b64", instruction.line)]
    return [*before, atomics.atomic(access, change, base, [wide], None, results, decoder.linker.lock)]


def _wait(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    """Say whether a phase is complete; a thread that has to wait asks again."""
    destination, address, state = instruction.operands[:3]
    by_parity = "parity" in instruction.operation
    access, base, before = _object(decoder, instruction, address, writes=False)
    word = decoder.slots.add(np.zeros(1, np.uint64))
    before = [*before, accesses.load(access, base, [(word, None)])]
    place = decoder.slots.destination(destination, "pred", instruction.line)
    waited = decoder.source(state, "u32" if by_parity else "b64", instruction)

    def is_complete(now: Array, then: Array) -> Array:
        parity = then & then.dtype.type(1) if by_parity else mbarriers.phase(then)
        return mbarriers.phase(now) != parity

    return [*before, bind(is_complete, [place], [(word, None), waited])]


def _object(
    decoder: Decoder, instruction: Instruction, address: Operand, writes: bool
) -> tuple[Access, accesses.Base, list[Operation]]:
    assert isinstance(address, Address)
    base, before = decoder.address(address.base, instruction)
    access = Access(instruction, instruction.operation.space, DTYPES["b64"], 1, writes)
    return access, (base, address.offset), before


# ------------------------------------------------------------------------------------------ copies


def _copy(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    operation = instruction.operation
    if "mbarrier" in operation:
        if "noinc" not in operation:
            # One more arrival is expected, and it comes: as if nothing had happened.
            return []
        (address,) = instruction.operands
        return _change(decoder, instruction, mbarriers.arrive, Discard(), address, Immediate(1, "u32"))
    if "to" not in operation:
        return []  # groups of copies, and waiting for them
    target, source, size, *more = instruction.operands
    if not isinstance(size, Immediate) or size.bits not in (4, 8, 16):
        raise invalid(f"{instruction} of what is not 4, 8 or 16 bytes", instruction.line)
    if "hint" in operation:
        more = more[:-1]
    return _Copy(decoder, instruction, target, source, size.bits).operations(more[0] if more else None)


class _Copy:
    """One copy instruction."""

    def __init__(
        self, decoder: Decoder, instruction: Instruction, target: Operand, source: Operand, size: int
    ) -> None:
        assert isinstance(target, Address)
        assert isinstance(source, Address)
        self._decoder, self._instruction, self._size = decoder, instruction, size
        to, first = decoder.address(target.base, instruction)
        origin, second = decoder.address(source.base, instruction)
        self._to, self._from = (to, target.offset), (origin, source.offset)
        self._before = [*first, *second]
        self._parts: dict[int, Access] = {}

    def operations(self, part: Operand | None) -> list[Operation]:
        """Return the copy; `part` is how many bytes are read, or a predicate: none where it holds."""
        if part is None:
            return [*self._before, *self._whole()]
        type = "pred" if isinstance(part, Negated) or _is_predicate(part) else "u32"
        return [*self._before, self._some(self._decoder.source(part, type, self._instruction))]

    def _whole(self) -> list[Operation]:
        words, type = max(self._size // 8, 1), DTYPES["b32" if self._size == 4 else "b64"]
        slots = [(self._decoder.slots.add(np.zeros(1, type)), None) for _ in range(words)]
        read = Access(self._instruction, "global", type, words, writes=False)
        write = Access(self._instruction, "shared", type, words, writes=True)
        return [accesses.load(read, self._from, slots), accesses.store(write, self._to, slots)]

    def _some(self, part: Source) -> Operation:
        """Copy the first bytes of each lane, as many as it wants, and zeros behind them."""
        size = self._size
        write = self._bytes("shared", size, writes=True)

        def run(group: Group) -> None:
            wanted = read(part, group)
            counts = np.where(wanted, 0, size) if wanted.dtype == np.bool_ else np.minimum(wanted, size)
            data = np.zeros((size, group.count), np.uint8)
            whole = np.broadcast_to(counts, group.space.size)
            mine = group.picked(whole)
            for count in np.unique(mine):
                some = group.restricted(whole == count)
                if count and some is not None:
                    place = self._bytes("global", int(count), writes=False).locate(
                        some, read(self._from[0], group), self._from[1]
                    )
                    for byte in range(int(count)):
                        data[byte, mine == count] = place.load(byte)
            place = write.locate(group, read(self._to[0], group), self._to[1])
            for byte in range(size):
                place.store(data[byte], byte)

        return run

    def _bytes(self, space: str, count: int, writes: bool) -> Access:
        """An access to bytes that must be aligned as the whole copy."""
        access = Access(self._instruction, space, DTYPES["b8"], count, writes)
        access.align = self._size - 1
        return access


def _is_predicate(operand: Operand) -> bool:
    return isinstance(operand, Register) and operand.type == "pred"


HANDLERS: dict[str, Handler] = {"mbarrier": _mbarrier, "cp": _copy}
