"""Code that is right whatever lanes are active.

Each node of the flow graph has a mask of the lanes that wait for it. The lowest node that somebody
waits for runs, for all its lanes at once, and hands them to its successors' masks. So control flow of
any form, also irreducible, works, and lanes meet again where their paths join (nodes.py has the
order). LLVM sees the masks as ordinary values: a mask that is known to be empty costs nothing.

At a barrier the lanes are parked; when nobody waits for anything else, the warp gives up the CPU
(kernel.py) until the barrier is complete.
"""

from __future__ import annotations

from gpufleet.virtual.jit import barriers
from gpufleet.virtual.jit.abi import FAULT_CANCELLED, FAULT_TRAP, FAULT_WILD_BRANCH, Job, offset
from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.nodes import Node, is_barrier, is_wait
from gpufleet.virtual.jit.shapes import Shapes
from gpufleet.virtual.jit.text import constant, vector
from gpufleet.virtual.jit.unit import Unit
from gpufleet.virtual.ptx.flow import reads_and_writes
from gpufleet.virtual.ptx.syntax import Instruction, Label, Register, Targets


class Diverged(Lowering):
    """Emits every node under a mask."""

    converged = False

    def __init__(self, unit: Unit, shapes: Shapes, done: str) -> None:
        super().__init__(unit, shapes)
        nodes = unit.graph.nodes
        self.done = done
        """Label to go to when no lane waits for anything."""
        self.current = unit.code.slot(self.masks.type)
        self.pending = [unit.code.slot(self.masks.type) for _ in nodes]
        self.parked: dict[int, str] = {}
        """By the node that follows a barrier: the lanes that wait there."""
        for node in nodes:
            if (
                node.stop
                and is_barrier(unit.graph.body.instructions[node.stop - 1])
                and node.next is not None
            ):
                self.parked[node.next] = unit.code.slot(self.masks.type)
        self.ended: str | None = None
        """In a called function that may end threads: which lanes it ended, for its caller."""
        self.entries: set[tuple[int, int]] = set()
        """Places inside nodes at which converged code comes in (handover.py): (node, instruction)."""

    # ------------------------------------------------------------------------------------- masks

    def active(self) -> str | None:
        """The current node's lanes, less those that the guard excludes."""
        mask = self.code.let(f"load {self.masks.type}, ptr {self.current}")
        if self.guard is not None:
            mask = self.masks.both(self.code, mask, self.masks.make(self.code, self.guard))
        return mask

    def must_spare(self, register: int) -> bool:
        """Lanes that wait elsewhere need the old value if they may read it there."""
        if self.guard is not None:
            return True
        known, node = self.unit.facts, self.unit.graph.nodes[self.node]
        if register in known.returned:
            return True
        if known.only(register) is not None and not node.in_loop:
            return False
        live = self.unit.graph.live_in
        bit = 1 << register
        if any(live[n] & bit for n in self.parked):
            return True
        return any(live[n] & bit for n in range(self.node + 1, len(live)))

    def check_no_wrap(self, instruction: Instruction, register: Register) -> bool:
        """Without a proof the value is taken as varying."""
        return False

    def begin(self) -> None:
        """Forget the lanes of the warp before."""
        for slot in (*self.pending, *self.parked.values()):
            self.code.do(f"store {self.masks.type} {self.masks.none}, ptr {slot}")
        if self.ended is not None:
            self.code.do(f"store {self.masks.type} {self.masks.none}, ptr {self.ended}")

    def end_threads(self, ended: str) -> None:
        """Go on with the lanes that came back from a call; without one, where the next lanes wait.

        An empty mask must not go on: what is uniform is carried out whatever the mask.
        """
        c, masks = self.code, self.masks
        self._note_ended(ended)
        mask = c.let(f"load {masks.type}, ptr {self.current}")
        left = masks.without(c, mask, ended)
        c.do(f"store {masks.type} {left}, ptr {self.current}")
        some = c.name("back")
        c.branch(masks.any(c, left), some, self.test_label(self.node + 1))
        c.label(some)

    def _note_ended(self, ended: str) -> None:
        if self.ended is not None:
            before = self.code.let(f"load {self.masks.type}, ptr {self.ended}")
            after = self.masks.either(self.code, before, ended)
            self.code.do(f"store {self.masks.type} {after}, ptr {self.ended}")

    def wait_for(self, node: int, mask: str) -> None:
        """Let lanes wait for a node."""
        old = self.code.let(f"load {self.masks.type}, ptr {self.pending[node]}")
        new = self.masks.either(self.code, old, mask)
        self.code.do(f"store {self.masks.type} {new}, ptr {self.pending[node]}")

    # ---------------------------------------------------------------------------------- the nodes

    def test_label(self, node: int) -> str:
        """Where it is asked whether somebody waits for a node; past the last one, the end."""
        return f"test.{node}" if node < len(self.pending) else self.done

    def entry_label(self, node: int, position: int) -> str:
        """Label of a place inside a node."""
        return f"masked.{node}.{position}"

    def emit(self) -> None:
        """Emit all nodes."""
        for node in self.unit.graph.nodes:
            self._emit_node(node)

    def _emit_node(self, node: Node) -> None:
        c, masks = self.code, self.masks
        body = f"masked.{node.index}"
        c.label(self.test_label(node.index))
        mask = c.let(f"load {masks.type}, ptr {self.pending[node.index]}")
        c.branch(masks.any(c, mask), body, self.test_label(node.index + 1))
        c.label(body)
        mask = c.let(f"load {masks.type}, ptr {self.pending[node.index]}")
        c.do(f"store {masks.type} {mask}, ptr {self.current}")
        c.do(f"store {masks.type} {masks.none}, ptr {self.pending[node.index]}")
        self._emit_from(node, node.start)

    def emit_rest(self, node: int, position: int) -> None:
        """Emit a node once more, from an instruction on, for who comes from outside."""
        self._emit_from(self.unit.graph.nodes[node], position, again=True)

    def _emit_from(self, node: Node, first: int, again: bool = False) -> None:
        self.node = node.index
        self.checked.clear()
        self.known.clear()
        instructions = self.unit.graph.body.instructions
        last = instructions[node.stop - 1]
        ends_flow = last.opcode in _TERMINATORS or is_barrier(last)
        for position in range(first, node.stop):
            if not again:
                self._enter_here(node, position)
            self.position = position
            if position < node.stop - 1 or not ends_flow:
                self.emit_instruction(instructions[position])
        if ends_flow:
            self._emit_end(node, last)
        else:
            self._go_on(node, node.next)

    def _enter_here(self, node: Node, position: int) -> None:
        if (node.index, position) in self.entries:
            label = self.entry_label(node.index, position)
            self.code.jump(label)
            self.code.label(label)
            self.checked.clear()
            self.known.clear()

    def emit_instruction(self, instruction: Instruction) -> None:
        """Emit one instruction; a guard narrows the mask."""
        if instruction.guard is None:
            self.lower(instruction)
            return
        self.guard = self._guard_predicate(instruction)
        work, after = self.code.name("guarded"), self.code.name("after")
        mask = self.active()
        assert mask is not None
        self.code.branch(self.masks.any(self.code, mask), work, after)
        self.code.label(work)
        known = dict(self.known)
        self.lower(instruction)
        self.guard = None
        self.known = forgetting(known, instruction)
        self.code.jump(after)
        self.code.label(after)

    def _guard_predicate(self, instruction: Instruction) -> str:
        assert instruction.guard is not None
        value = self.fetch(instruction.guard, "pred", self.lanes)
        if instruction.guard_negated:
            value = self.code.let(f"xor {vector('i1', self.lanes)} {value}, {constant('i1', 1, self.lanes)}")
        return value

    # ----------------------------------------------------------------------------- ends of nodes

    def _emit_end(self, node: Node, instruction: Instruction) -> None:
        if is_barrier(instruction):
            self._park(node, instruction)
            return
        opcode = instruction.opcode
        if opcode == "bra" and instruction.guard is not None and self.stride(instruction.guard) == 0:
            self._branch_together(node, instruction)
            return
        everyone = self.active()
        assert everyone is not None
        taken = everyone
        if instruction.guard is not None:
            chosen = self.masks.make(self.code, self._guard_predicate(instruction))
            taken = self.masks.both(self.code, everyone, chosen)
            rest = self.masks.without(self.code, everyone, chosen)
            if node.next is not None:
                self.wait_for(node.next, rest)
        if opcode == "bra":
            self.wait_for(self._target(instruction), taken)
        elif opcode == "brx":
            self._branch_by_index(instruction, taken)
        elif opcode == "trap":
            self._trap(instruction, taken)
        elif opcode == "exit":
            self._note_ended(taken)
        self.after(node)

    def _target(self, instruction: Instruction) -> int:
        label = instruction.operands[0]
        assert isinstance(label, Label)
        return self.unit.graph.target_of[label.block]

    def _branch_together(self, node: Node, instruction: Instruction) -> None:
        """A uniform condition: all lanes of the node go the same way."""
        c = self.code
        assert instruction.guard is not None
        condition = self.fetch(instruction.guard, "pred", 1)
        if instruction.guard_negated:
            condition = c.let(f"xor i1 {condition}, true")
        yes, no = c.name("taken"), c.name("fallthrough")
        c.branch(condition, yes, no)
        c.label(yes)
        self._go_on(node, self._target(instruction))
        c.label(no)
        self._go_on(node, node.next)

    def _go_on(self, node: Node, target: int | None) -> None:
        mask = self.active()
        assert mask is not None
        assert target is not None
        self.wait_for(target, mask)
        self._continue(node, (target,))

    def _branch_by_index(self, instruction: Instruction, taken: str) -> None:
        c, n = self.code, self.lanes
        index, targets = instruction.operands
        assert isinstance(targets, Targets)
        value = self.fetch(index, "u32", n)
        left = taken
        for place, label in enumerate(targets.labels):
            here = c.let(f"icmp eq {vector('i32', n)} {value}, {constant('i32', place, n)}")
            chosen = self.masks.make(c, here)
            self.wait_for(self.unit.graph.target_of[label.block], self.masks.both(c, taken, chosen))
            left = self.masks.without(c, left, chosen)
        bad, good = c.name("wild"), c.name("ok")
        c.branch(self.masks.any(c, left), bad, good)
        with c.cold(bad):
            lane = c.intrinsic("cttz", "i32", ("i32", self.masks.number(c, left)), ("i1", "false"))
            entry = c.let(f"extractelement {vector('i32', n)} {value}, i32 {lane}")
            fault(self, FAULT_WILD_BRANCH, self.unit.site(instruction), lane, entry)
        c.label(good)

    def _trap(self, instruction: Instruction, taken: str) -> None:
        c = self.code
        bad, good = c.name("trap"), c.name("ok")
        c.branch(self.masks.any(c, taken), bad, good)
        with c.cold(bad):
            lane = c.intrinsic("cttz", "i32", ("i32", self.masks.number(c, taken)), ("i1", "false"))
            fault(self, FAULT_TRAP, self.unit.site(instruction), lane)
        c.label(good)

    def _park(self, node: Node, instruction: Instruction) -> None:
        """Lanes wait at a barrier; the rest go on."""
        c, masks = self.code, self.masks
        assert node.next is not None
        mask = self.active()
        assert mask is not None
        if instruction.guard is not None:
            chosen = masks.make(c, self._guard_predicate(instruction))
            self.wait_for(node.next, masks.without(c, mask, chosen))
            mask = masks.both(c, mask, chosen)
        if is_wait(instruction):
            mask = self._ask(instruction, node.next, mask)
        slot = self.parked[node.next]
        old = c.let(f"load {masks.type}, ptr {slot}")
        c.do(f"store {masks.type} {masks.either(c, old, mask)}, ptr {slot}")
        if not is_wait(instruction):
            barriers.note_arrival(self, instruction, masks.predicate(c, mask))
        self.after(node)

    def _ask(self, instruction: Instruction, following: int, mask: str) -> str:
        """Lanes that hear yes go on; the others, which are returned, let other warps run first."""
        c, masks = self.code, self.masks
        asked, went_on = c.name("ask"), c.name("asked")
        answers = c.slot(masks.type)
        c.do(f"store {masks.type} {masks.none}, ptr {answers}")
        c.branch(masks.any(c, mask), asked, went_on)
        c.label(asked)
        if instruction.guard is not None:
            self.guard = masks.predicate(c, mask)
        known = dict(self.known)
        self.lower(instruction)
        self.guard = None
        answer = masks.make(c, self.fetch(instruction.operands[0], "pred", self.lanes))
        c.do(f"store {masks.type} {answer}, ptr {answers}")
        self.known = forgetting(known, instruction)
        c.jump(went_on)
        c.label(went_on)
        answer = c.let(f"load {masks.type}, ptr {answers}")
        self.wait_for(following, masks.both(c, mask, answer))
        return masks.without(c, mask, answer)

    def after(self, node: Node) -> None:
        """Go where the lowest waiting lanes are."""
        self._continue(node, node.successors)

    def _continue(self, node: Node, targets: tuple[int, ...]) -> None:
        back = sorted({t for t in targets if t <= node.index})
        for target in back:
            last = self.unit.graph.body.instructions[node.stop - 1]
            if is_barrier(last) and not is_wait(last):
                break
            check_stop(self, self.unit.graph.body.instructions[node.stop - 1])
            mask = self.code.let(f"load {self.masks.type}, ptr {self.pending[target]}")
            onward = self.code.name("onward")
            self.code.branch(self.masks.any(self.code, mask), f"masked.{target}", onward)
            self.code.label(onward)
        self.code.jump(self.test_label(node.index + 1))


_TERMINATORS = frozenset({"bra", "brx", "ret", "exit", "trap"})


def forgetting(known: dict[int, str], instruction: Instruction) -> dict[int, str]:
    """What is known after an instruction that may not have been carried out."""
    for register in reads_and_writes(instruction)[1]:
        known.pop(register, None)
    return known


def fault(low: Lowering, kind: int, site: int, lane: str, detail: str = "0") -> None:
    """Stop the whole launch; `detail` is an i32 that the message needs."""
    c = low.code
    wide = c.let(f"zext i32 {detail} to i64") if detail != "0" else "0"
    c.function(
        "gf_fault",
        "void",
        *(("ptr", "%worker"), ("i32", str(kind)), ("i32", str(site)), ("i64", wide), ("i32", lane)),
        tail=" noreturn",
    )
    c.do("unreachable")


def check_stop(low: Lowering, instruction: Instruction) -> None:
    """At a back edge: has somebody asked the launch to stop? One load from the first-level cache."""
    c = low.code
    place = low.unit.once("stop", f"getelementptr i8, ptr %job, i64 {offset(Job, 'stop')}")
    stop = c.let(f"load volatile i32, ptr {place}")
    bad, good = c.name("stopped"), c.name("on")
    c.branch(c.let(f"icmp ne i32 {stop}, 0"), bad, good)
    with c.cold(bad):
        fault(low, FAULT_CANCELLED, low.unit.site(instruction), "0")
    c.label(good)
