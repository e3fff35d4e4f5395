"""Code for a warp whose lanes all run together: no masks, real branches, scalars where shapes allow.

It is a bet. Where lanes part, or an affine value wraps around from lane to lane, the code hands over
to the diverged code (diverged.py) at exactly that instruction, with every register that is still
needed in the form that code expects (handover.py). There is no way back before the next barrier, so
this code is optimised as if divergence did not exist.
"""

from __future__ import annotations

from gpufleet.virtual.jit import barriers
from gpufleet.virtual.jit.abi import FAULT_TRAP, FAULT_WILD_BRANCH
from gpufleet.virtual.jit.arithmetic import comparison
from gpufleet.virtual.jit.diverged import check_stop, fault, forgetting
from gpufleet.virtual.jit.handover import Handover, Place
from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.nodes import Node, is_barrier, is_wait
from gpufleet.virtual.jit.shapes import Shapes
from gpufleet.virtual.jit.storage import scalar_type
from gpufleet.virtual.jit.text import constant
from gpufleet.virtual.jit.unit import Unit
from gpufleet.virtual.ptx.flow import reads_and_writes, sources_of
from gpufleet.virtual.ptx.scalars import SIZES, is_float, is_signed
from gpufleet.virtual.ptx.syntax import Instruction, Label, Negated, Operand, Pair, Register, Targets


class Converged(Lowering):
    """Emits every node for all lanes at once."""

    converged = True

    def __init__(self, unit: Unit, shapes: Shapes, handover: Handover, done: str) -> None:
        super().__init__(unit, shapes)
        self.handover = handover
        self.done = done
        self.quick = _quick_predicates(self)
        """Predicates kept also as (lane 0, all agree): comparisons of affine values."""
        self._quick_slots: dict[int, tuple[str, str]] = {}
        self.part: str | None = None
        """Mask of the lanes that carry out a short branch."""
        self.elsewhere = 0
        """Node that the other lanes go on with."""
        self.needed_elsewhere = 0
        """Registers that they may read."""

    def active(self) -> str | None:
        """All lanes, but for those that skip a short branch."""
        return self.part

    def must_spare(self, register: int) -> bool:
        """Only the lanes that skip a short branch, if they need the register afterwards."""
        return self.part is not None and bool(self.needed_elsewhere >> register & 1)

    def write(
        self,
        operand: Operand,
        value: str,
        element: str,
        n: int,
        stride: int | None = 0,
        signed: bool = False,
    ) -> None:
        """Put a result into a register, and into the frame if it is needed behind a barrier."""
        super().write(operand, value, element, n, stride, signed)
        if isinstance(operand, Register):
            barriers.save_at_once(self, operand.index)

    # ------------------------------------------------------------------------------ handing over

    def leave_at(self, position: int) -> str:
        """Label of code that hands over to the diverged code just before an instruction."""
        c, live = self.code, self._live_before(position)
        label = c.name("part")
        with c.cold(label):
            if self.part is None:
                self.handover.leave(self, Place(self.node, position), live, self.masks.full)
            else:
                place = Place(self.node, position, self.elsewhere)
                live |= self.unit.graph.live_in[self.elsewhere]
                others = self.masks.without(c, self.masks.full, self.part)
                self.handover.leave(self, place, live, self.part, others)
        return label

    def begin_with(self, mask: str) -> None:
        """Let a warp that is not whole begin in diverged code."""
        graph = self.unit.graph
        self.handover.leave(self, Place(0, graph.nodes[0].start), graph.live_in[0], mask)

    def end_threads(self, ended: str) -> None:
        """Where lanes ended in a call, hand the others over behind it."""
        c = self.code
        some, none = c.name("ended"), c.name("back")
        c.branch(self.masks.any(c, ended), some, none)
        with c.cold(some):
            left = self.masks.without(c, self.masks.full, ended)
            rest = c.name("rest")
            c.branch(self.masks.any(c, left), rest, self.done)
            c.label(rest)
            node, following = self.unit.graph.nodes[self.node], self.position + 1
            if following < node.stop:
                place, live = Place(self.node, following), self._live_before(following)
            else:
                assert node.next is not None
                place = Place(node.next, self.unit.graph.nodes[node.next].start)
                live = self.unit.graph.live_in[node.next]
            self.handover.leave(self, place, live, left)
        c.label(none)

    def _live_before(self, position: int) -> int:
        node = self.unit.graph.nodes[self.node]
        live = self.unit.graph.live_out(node)
        instructions = self.unit.graph.body.instructions
        for instruction in reversed(instructions[position : node.stop]):
            reads, writes = reads_and_writes(instruction)
            if instruction.guard is None:
                for register in writes:
                    live &= ~(1 << register)
            for register in reads:
                live |= 1 << register
        return live

    def check_no_wrap(self, instruction: Instruction, register: Register) -> bool:
        """Lane 0 and the last lane must be in order; if not, leave."""
        c = self.code
        stride = self.stride(register)
        assert stride is not None
        source = instruction.operation.types[-1]
        element = scalar_type(source)
        first = self.fetch(register, source, 1)
        good = c.name("straight")
        c.branch(
            self._in_order(first, element, stride, is_signed(source)), good, self.leave_at(self.position)
        )
        c.label(good)
        return True

    def _in_order(self, first: str, element: str, stride: int, signed: bool) -> str:
        """Whether an affine value does not wrap between lane 0 and the last one."""
        extent = stride * (self.lanes - 1)
        bits = int(element[1:])
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        relation, limit = ("le", high - extent) if extent > 0 else ("ge", low - extent)
        return self.code.let(
            f"icmp {'s' if signed else 'u'}{relation} {element} {first}, {constant(element, limit)}"
        )

    # ---------------------------------------------------------------------------------- the nodes

    def label(self, node: int) -> str:
        """Label of a node."""
        return f"node.{node}"

    def emit(self) -> None:
        """Emit all nodes."""
        for node in self.unit.graph.nodes:
            self._emit_node(node)

    def _emit_node(self, node: Node) -> None:
        c = self.code
        c.label(self.label(node.index))
        self.node = node.index
        self.checked.clear()
        self.known.clear()
        instructions = self.unit.graph.body.instructions
        last = instructions[node.stop - 1]
        ends_flow = last.opcode in ("bra", "brx", "ret", "exit", "trap") or is_barrier(last)
        for position in range(node.start, node.stop - 1 if ends_flow else node.stop):
            self.position = position
            self.emit_instruction(instructions[position])
        self.position = node.stop - 1
        if ends_flow:
            self._emit_end(node, last)
        else:
            self._go_to(node, node.next)

    def emit_instruction(self, instruction: Instruction) -> None:
        """Emit one instruction; its guard becomes a branch, once all lanes agree on it."""
        if instruction.guard is None:
            self.lower(instruction)
            if instruction.opcode in ("setp", "and", "or", "not", "xor", "mov"):
                self._keep_quick(instruction)
            return
        c = self.code
        condition = self._agreed(instruction)
        work, after = c.name("guarded"), c.name("skip")
        c.branch(condition, work, after)
        c.label(work)
        checked = {key: set(value) for key, value in self.checked.items()}
        known = dict(self.known)
        self.lower(instruction)
        self.checked = checked
        self.known = forgetting(known, instruction)
        for register in reads_and_writes(instruction)[1]:
            for key in [key for key in self.checked if key[0] == register]:
                del self.checked[key]
        c.jump(after)
        c.label(after)

    def _agreed(self, instruction: Instruction) -> str:
        """A guard that is the same in all lanes; where it is not, leave before the instruction."""
        c = self.code
        assert instruction.guard is not None
        together, value = self._unanimous(instruction.guard)
        if together is not None:
            good = c.name("agreed")
            c.branch(together, good, self.leave_at(self.position))
            c.label(good)
        return c.let(f"xor i1 {value}, true") if instruction.guard_negated else value

    def _unanimous(self, predicate: Register) -> tuple[str | None, str]:
        """Whether all lanes agree on a predicate (None: always), and lane 0's value."""
        c = self.code
        if self.stride(predicate) == 0:
            return None, self.fetch(predicate, "pred", 1)
        if predicate.index in self.quick:
            first, agreed = self._slots(predicate.index)
            return c.let(f"load i1, ptr {agreed}"), c.let(f"load i1, ptr {first}")
        value = self.fetch(predicate, "pred", self.lanes)
        bits = c.let(f"bitcast <{self.lanes} x i1> {value} to i{self.lanes}")
        some = c.let(f"icmp ne i{self.lanes} {bits}, 0")
        every = c.let(f"icmp eq i{self.lanes} {bits}, -1")
        none = c.let(f"xor i1 {some}, true")
        return c.let(f"or i1 {none}, {every}"), some

    # ----------------------------------------------------------------------------- ends of nodes

    def _emit_end(self, node: Node, instruction: Instruction) -> None:
        c = self.code
        condition = None
        if instruction.guard is not None:
            branch = self._short_branch(node, instruction)
            if branch is not None:
                self._emit_short_branch(node, instruction, branch)
                return
            condition = self._agreed(instruction)
        if is_barrier(instruction):
            if condition is not None:
                wait = c.name("wait")
                c.branch(condition, wait, self.label(node.next or 0))
                c.label(wait)
            assert node.next is not None
            if is_wait(instruction):
                self._pass_if_complete(instruction, node.next)
            barriers.suspend_converged(self, instruction, node.next)
            return
        if condition is not None:
            yes, no = c.name("taken"), c.name("fallthrough")
            c.branch(condition, yes, no)
            c.label(no)
            self._go_to(node, node.next)
            c.label(yes)
        opcode = instruction.opcode
        if opcode == "bra":
            label = instruction.operands[0]
            assert isinstance(label, Label)
            self._go_to(node, self.unit.graph.target_of[label.block])
        elif opcode == "brx":
            self._branch_by_index(node, instruction)
        elif opcode == "trap":
            fault(self, FAULT_TRAP, self.unit.site(instruction), "0")
        else:
            c.jump(self.done)

    def _pass_if_complete(self, instruction: Instruction, following: int) -> None:
        """Ask, and go on where every lane hears yes; the code behind this lets other warps run."""
        c = self.code
        self.lower(instruction)
        answer = self.fetch(instruction.operands[0], "pred", self.lanes)
        missing = self.masks.without(c, self.masks.full, self.masks.make(c, answer))
        ask = c.name("incomplete")
        c.branch(self.masks.any(c, missing), ask, self.label(following))
        c.label(ask)

    # ---------------------------------------------------------------------------- short branches

    def _short_branch(
        self, node: Node, instruction: Instruction
    ) -> tuple[list[tuple[int, bool]], int] | None:
        """The sides of an `if` that lanes may take apart and be together again behind it.

        Returns the nodes of the sides, each with the value of the condition that leads there, and the
        node where they meet; None if it is not as simple as that: a side is one node that nobody else
        enters, and leaves nothing behind that converged code takes for uniform.
        """
        graph = self.unit.graph
        assert instruction.guard is not None
        if instruction.opcode != "bra" or self.stride(instruction.guard) == 0 or node.next is None:
            return None
        label = instruction.operands[0]
        assert isinstance(label, Label)
        taken, fallen = graph.target_of[label.block], node.next
        truth = not instruction.guard_negated

        def is_side(side: int, meeting: int, needed: int) -> bool:
            return graph.nodes[side].successors == (meeting,) and self._may_split(side, needed)

        live = graph.live_in
        if is_side(fallen, taken, live[taken]) and taken > fallen > node.index:
            return [(fallen, not truth)], taken
        if is_side(taken, fallen, live[fallen]) and fallen > taken > node.index:
            return [(taken, truth)], fallen
        following = graph.nodes[taken].successors
        if len(following) == 1 and following[0] > max(taken, fallen) > min(taken, fallen) > node.index:
            meeting = following[0]
            if is_side(taken, meeting, live[meeting] | live[fallen]) and is_side(
                fallen, meeting, live[meeting] | live[taken]
            ):
                return [(fallen, not truth), (taken, truth)], meeting
        return None

    def _may_split(self, side: int, needed: int) -> bool:
        """Whether a node can run for some lanes while the others wait, who need some registers."""
        graph = self.unit.graph
        node = graph.nodes[side]
        if len(node.predecessors) != 1 or node.stop - node.start > _SHORT:
            return False
        for instruction in graph.body.instructions[node.start : node.stop]:
            if instruction.guard is not None or is_barrier(instruction):
                return False
            if instruction.opcode in ("call", "ret", "exit", "trap", "brx"):
                return False
            for register in reads_and_writes(instruction)[1]:
                scalar = self.shapes.strides[register] is not None or register in self.quick
                if scalar and needed >> register & 1:
                    return False
        return True

    def _emit_short_branch(
        self, node: Node, instruction: Instruction, branch: tuple[list[tuple[int, bool]], int]
    ) -> None:
        """All lanes one way, or all the other, or each side for its own lanes."""
        c = self.code
        sides, meeting = branch
        assert instruction.guard is not None
        together, value = self._unanimous(instruction.guard)
        assert together is not None
        agreed, apart = c.name("agreed"), c.name("apart")
        c.branch(together, agreed, apart)
        c.label(agreed)
        on_true = next((side for side, truth in sides if truth), meeting)
        on_false = next((side for side, truth in sides if not truth), meeting)
        c.branch(value, self.label(on_true), self.label(on_false))
        c.label(apart)
        chosen = self.masks.make(c, self.fetch(instruction.guard, "pred", self.lanes))
        checked = self.checked
        for place, (side, truth) in enumerate(sides):
            following = [meeting, *(later for later, _ in sides[place + 1 :])]
            self.elsewhere = following[-1]
            self.needed_elsewhere = 0
            for other in following:
                self.needed_elsewhere |= self.unit.graph.live_in[other]
            self.part = chosen if truth else self.masks.without(c, self.masks.full, chosen)
            self._emit_side(self.unit.graph.nodes[side])
        self.part = None
        self.checked = checked
        self.node = node.index
        c.jump(self.label(meeting))

    def _emit_side(self, node: Node) -> None:
        self.node = node.index
        self.checked = {}
        self.known = {}
        instructions = self.unit.graph.body.instructions
        for position in range(node.start, node.stop):
            if instructions[position].opcode != "bra":
                self.position = position
                self.emit_instruction(instructions[position])

    def _go_to(self, node: Node, target: int | None) -> None:
        if target is None:
            self.code.jump(self.done)
            return
        if target <= node.index:
            check_stop(self, self.unit.graph.body.instructions[node.stop - 1])
        self.code.jump(self.label(target))

    def _branch_by_index(self, node: Node, instruction: Instruction) -> None:
        c = self.code
        index, targets = instruction.operands
        assert isinstance(targets, Targets)
        if self.stride(index) != 0:
            c.jump(self.leave_at(self.position))
            return
        value = self.fetch(index, "u32", 1)
        if any(self.unit.graph.target_of[label.block] <= node.index for label in targets.labels):
            check_stop(self, instruction)
        cases = " ".join(
            f"i32 {place}, label %{self.label(self.unit.graph.target_of[label.block])}"
            for place, label in enumerate(targets.labels)
        )
        wild = c.name("wild")
        c.do(f"switch i32 {value}, label %{wild} [{cases}]")
        with c.cold(wild):
            fault(self, FAULT_WILD_BRANCH, self.unit.site(instruction), "0", value)

    # -------------------------------------------------------------------------- quick predicates

    def _slots(self, register: int) -> tuple[str, str]:
        if register not in self._quick_slots:
            self._quick_slots[register] = (self.code.slot("i1"), self.code.slot("i1"))
        return self._quick_slots[register]

    def _keep_quick(self, instruction: Instruction) -> None:
        for target in _targets(instruction):
            if target.index in self.quick:
                first, agreed = self._quick_value(instruction, target)
                slots = self._slots(target.index)
                self.code.do(f"store i1 {first}, ptr {slots[0]}")
                self.code.do(f"store i1 {agreed}, ptr {slots[1]}")

    def _quick_value(self, instruction: Instruction, target: Register) -> tuple[str, str]:
        c, operation = self.code, instruction.operation
        sources = sources_of(instruction)
        if operation.name != "setp":
            values = [self._quick_operand(s) for s in sources]
            if operation.name == "mov":
                return values[0]
            if operation.name == "not":
                return c.let(f"xor i1 {values[0][0]}, true"), values[0][1]
            first = c.let(f"{operation.name} i1 {values[0][0]}, {values[1][0]}")
            return first, c.let(f"and i1 {values[0][1]}, {values[1][1]}")
        element, signed = scalar_type(operation.type), is_signed(operation.type)
        firsts, lasts, agreed = [], [], "true"
        for source in sources[:2]:
            first = self.fetch(source, operation.type, 1)
            stride = self.stride(source) or 0
            last = first
            if stride:
                last = c.let(f"add {element} {first}, {constant(element, stride * (self.lanes - 1))}")
                straight = self._in_order(first, element, stride, signed)
                agreed = straight if agreed == "true" else c.let(f"and i1 {agreed}, {straight}")
            firsts.append(first)
            lasts.append(last)
        relation = comparison(operation, operation.type)
        a = c.let(f"{relation} {element} {firsts[0]}, {firsts[1]}")
        b = c.let(f"{relation} {element} {lasts[0]}, {lasts[1]}")
        same = c.let(f"icmp eq i1 {a}, {b}")
        agreed = c.let(f"and i1 {agreed}, {same}")
        if "boolean" in operation:
            other = self._quick_operand(sources[2])
            a = c.let(f"{operation.get('boolean')} i1 {a}, {other[0]}")
            agreed = c.let(f"and i1 {agreed}, {other[1]}")
        return a, agreed

    def _quick_operand(self, operand: Operand) -> tuple[str, str]:
        register = operand.register if isinstance(operand, Negated) else operand
        if isinstance(register, Register) and self.stride(register) != 0:
            slots = self._slots(register.index)
            first, agreed = (self.code.let(f"load i1, ptr {slot}") for slot in slots)
            if isinstance(operand, Negated):
                first = self.code.let(f"xor i1 {first}, true")
            return first, agreed
        return self.fetch(operand, "pred", 1), "true"


_SHORT = 64
"""Instructions of a side of a short branch: longer ones are not worth the code."""


def _targets(instruction: Instruction) -> list[Register]:
    destination = instruction.operands[0] if instruction.operands else None
    found = [destination.first, destination.second] if isinstance(destination, Pair) else [destination]
    return [r for r in found if isinstance(r, Register) and r.type == "pred"]


def _quick_predicates(low: Converged) -> set[int]:
    """Varying predicates all of whose definitions compare affine values, or combine such predicates.

    A predicate that outlives a barrier comes back from the frame as lanes only.
    """
    facts, body = low.unit.facts, low.unit.graph.body
    waiting = 0
    for node in barriers.resume_nodes(low.unit.graph):
        waiting |= low.unit.graph.live_in[node]
    quick = {
        index
        for index in facts.definitions
        if body.registers[index].type == "pred"
        and low.shapes.strides[index] is None
        and not waiting >> index & 1
    }
    changed = True
    while changed:
        changed = False
        for index in list(quick):
            if not all(_is_quick(low, i, index, quick) for i in facts.definitions[index]):
                quick.discard(index)
                changed = True
    return quick


def _is_quick(low: Converged, instruction: Instruction, target: int, quick: set[int]) -> bool:
    operation = instruction.operation
    if instruction.guard is not None:
        return False

    def is_known(operand: Operand) -> bool:
        register = operand.register if isinstance(operand, Negated) else operand
        return low.stride(operand) == 0 or (isinstance(register, Register) and register.index in quick)

    sources = sources_of(instruction)
    if operation.name in ("and", "or", "xor", "not", "mov"):
        return operation.type == "pred" and all(is_known(s) for s in sources)
    if operation.name != "setp" or is_float(operation.type) or SIZES[operation.type] < 4:
        return False
    if isinstance(instruction.operands[0], Pair) or operation.get("compare") in ("eq", "ne"):
        return False
    if any(low.stride(s) is None for s in sources[:2]):
        return False
    return all(is_known(s) for s in sources[2:])
