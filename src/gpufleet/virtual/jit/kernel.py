"""A kernel as two LLVM functions. One runs a range of blocks:

    for each block
        for each warp of the block          (again and again, if there are barriers)
            converged code, if all its lanes exist
            else, or when lanes part, a call of the other function: diverged code

Everything that lives as long as a warp is a stack slot that LLVM turns into values; what outlives a
barrier waits in the warp's frame (barriers.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpufleet.virtual.jit import barriers, calls
from gpufleet.virtual.jit.abi import BARRIERS
from gpufleet.virtual.jit.callers import functions_that_end_threads, functions_with_barriers
from gpufleet.virtual.jit.converged import Converged
from gpufleet.virtual.jit.diverged import Diverged, check_stop
from gpufleet.virtual.jit.handover import ENDED, SUSPENDED, Handover, signature
from gpufleet.virtual.jit.inlining import inline
from gpufleet.virtual.jit.nodes import Graph, build_graph, is_barrier
from gpufleet.virtual.jit.runtime_ir import BARRIER_BYTES, FRAME_BARRIER, FRAME_STATE
from gpufleet.virtual.jit.shapes import Facts, converged, diverged, facts
from gpufleet.virtual.jit.text import vector
from gpufleet.virtual.jit.unit import Program, Unit
from gpufleet.virtual.ptx.syntax import Function

ENTRY = "gf_kernel"
_METADATA = """!0 = !{}
!1 = distinct !{!1, !2}
!2 = !{!"llvm.loop.unroll.disable"}
"""
BARRIERS_BYTES = BARRIERS * BARRIER_BYTES


@dataclass
class Generated:
    """LLVM IR of a kernel, and what running it needs to know."""

    source: str
    """Of the function that runs blocks."""
    diverged: str
    """Of the function that runs a warp whose lanes have parted: a module of its own."""
    symbols: list[str]
    sites: list[dict[str, Any]]
    frame_bytes: int
    """Per warp; 0 for a kernel without barriers."""
    local_bytes: int
    """Per thread."""
    static_shared: int
    dynamic_offset: int
    lanes: int
    loops: bool
    """Whether the kernel may run for long: it has loops or calls."""
    handover: list[list[int]]
    """How registers lie between the two functions."""

    def without_source(self) -> Generated:
        """What is needed once the code is compiled."""
        return replace(self, source="", diverged="")


def generate(program: Program, graph: Graph, known: Facts) -> Generated:
    """Generate a kernel, whose own body is analysed already.

    Raises `PtxError` for what this engine does not carry out.
    """
    function = program.kernel
    program.with_barriers = functions_with_barriers(program.module, program.functions)
    program.ending = functions_that_end_threads(program.module, program.functions)
    body = function.body
    owners: dict[str, tuple[str, str]] = {}
    if program.with_barriers - {function.name}:
        body, owners = inline(program.module, function, program.with_barriers - {function.name})
        graph = build_graph(body)
        known = facts(graph)
    straight_shapes = converged(graph, known, program.block)
    masked_shapes = diverged(graph, known, program.block)
    has_barriers = any(is_barrier(graph.body.instructions[n.stop - 1]) for n in graph.nodes)

    def unit_of(module: Program) -> Unit:
        unit = Unit(module, function, graph, known)
        unit.owners = owners
        unit.place_locals(body.variables)
        unit.plain_barriers = barriers.all_plain(graph)
        if has_barriers:
            unit.frame = barriers.frame_layout(unit, straight_shapes.strides, masked_shapes.strides)
        return unit

    unit = unit_of(program)
    handover = Handover(unit, masked_shapes)
    unit.place_in_state = handover.place_of_block
    _Skeleton(Converged(unit, straight_shapes, handover, "warp.done"), has_barriers).emit()
    text = unit.code.text(
        f"define void @{ENTRY}(ptr noalias %job, ptr noalias %worker, i64 %first, i64 %last)"
        f" {_attributes(program)}"
    )
    apart = unit_of(program.another_module())
    apart.place_in_state = handover.place_of_block
    masked = Diverged(apart, masked_shapes, "masked.end" if has_barriers else "warp.done")
    loops = any(s <= n.index for n in graph.nodes for s in n.successors)
    calls = any(i.opcode == "call" for i in graph.body.instructions)
    return Generated(
        _module(program, text),
        _module(apart.program, _diverged(masked, handover, has_barriers)),
        program.symbols,
        program.sites,
        unit.frame.bytes if has_barriers else 0,
        program.local_bytes,
        program.shared.static_bytes,
        program.shared.dynamic_offset,
        program.lanes,
        loops or calls,
        handover.layout(),
    )


def _module(program: Program, text: str) -> str:
    """A function, with all that it needs beside it."""
    functions = _functions(program)
    return "\n".join([text, *functions, *program.helpers.values(), *sorted(program.declarations), _METADATA])


def _diverged(masked: Diverged, handover: Handover, has_barriers: bool) -> str:
    """The function that runs one warp, from where its lanes part to its end or to a barrier."""
    c, unit = masked.code, masked.unit
    masked.begin()
    if has_barriers and not unit.plain_barriers:
        c.do(f"store i32 -1, ptr {unit.waiting_slot()}")
    handover.arrive(masked, "resume.masked")
    c.label("resume.masked")
    if has_barriers:
        barriers.resume_diverged(masked)
    else:
        c.do("unreachable")
    masked.emit()
    if has_barriers:
        c.label("masked.end")
        barriers.suspend_diverged(masked)
        c.label("warp.suspended")
        c.do(f"ret i32 {SUSPENDED}")
    c.label("warp.done")
    c.do(f"ret i32 {ENDED}")
    c.lines[:0] = unit.forget_registers()
    return c.text(f"{signature()} {_attributes(unit.program)}")


def _functions(program: Program) -> list[str]:
    """Generate the functions that are called, and those that they call."""
    done: dict[str, str] = {}
    while len(done) < len(program.called):
        for name, function in list(program.called.items()):
            if name not in done:
                done[name] = _function(program, function)
    return list(done.values())


def _function(program: Program, function: Function) -> str:
    """A device function: diverged code from its mask to its last `ret`."""
    graph = build_graph(function.body)
    known = facts(graph, is_kernel=False)
    known.given = calls.register_indices(function, function.parameters)
    known.returned = calls.register_indices(function, function.results)
    unit = Unit(program, function, graph, known)
    unit.local_top = "%top"
    inputs = {p.name: f"%in{i}" for i, p in enumerate(function.parameters)}
    outputs = {p.name: f"%out{i}" for i, p in enumerate(function.results)}
    unit.parameter_blocks = {**inputs, **outputs}
    masked = Diverged(unit, diverged(graph, known, program.block), "return")
    c = unit.code
    if function.name in program.ending:
        masked.ended = c.slot(unit.masks.type)
    beginning = len(c.lines)
    calls.check_local_stack(masked)
    for parameter in function.parameters:
        if parameter.register:
            calls.read_register_parameter(masked, parameter, inputs[parameter.name])
    masked.begin()
    masked.wait_for(0, "%mask")
    c.jump(masked.test_label(0))
    masked.emit()
    c.label("return")
    c.do(f"store {unit.masks.type} %mask, ptr {masked.current}")
    masked.known.clear()
    for result in function.results:
        if result.register:
            calls.write_register_result(masked, result, outputs[result.name])
    if masked.ended is not None:
        c.do(f"ret {unit.masks.type} {c.let(f'load {unit.masks.type}, ptr {masked.ended}')}")
    else:
        c.do("ret void")
    c.lines[beginning:beginning] = unit.forget_registers()
    returned = calls.result_type(unit, function)
    header = f"define internal {returned} @{calls.symbol_name(function)}({calls.signature(unit, function)})"
    return c.text(f"{header} {_attributes(program)}")


def _attributes(program: Program) -> str:
    width = 8 * program.target.vector_bytes
    return f'nounwind "probe-stack"="inline-asm" "prefer-vector-width"="{width}" "min-legal-vector-width"="0"'


class _Skeleton:
    """The loops over blocks and warps around converged code."""

    def __init__(self, straight: Converged, has_barriers: bool) -> None:
        self.unit = straight.unit
        self.code = straight.code
        self.straight = straight
        self.has_barriers = has_barriers

    def emit(self) -> None:
        """Emit the function's body."""
        c, unit = self.code, self.unit
        block_slot = c.slot("i64")
        warp_slot = c.slot("i32")
        c.do(f"store i64 %first, ptr {block_slot}")
        c.jump("block.test")
        c.label("block.test")
        c.do(f"%block = load i64, ptr {block_slot}")
        c.branch(c.let("icmp slt i64 %block, %last"), "block.run", "finished")
        c.label("finished")
        c.do("ret void")
        c.label("block.run")
        c.do(f"store i64 %block, ptr {unit.worker_field('block')}")
        self._block_indices()
        if self.has_barriers:
            self._begin_frames()
            self._run_passes(warp_slot)
        else:
            c.do(f"store i32 0, ptr {warp_slot}")
            c.jump("warp.test")
            self._warp_loop(warp_slot, "block.done")
        c.label("block.done")
        c.do(f"store i64 {c.let('add i64 %block, 1')}, ptr {block_slot}")
        c.jump("block.test")

    def _block_indices(self) -> None:
        c, unit = self.code, self.unit
        x = unit.once("grid.x.wide", f"zext i32 {unit.job('grid', 'i32', 0)} to i64")
        y = unit.once("grid.y.wide", f"zext i32 {unit.job('grid', 'i32', 1)} to i64")
        row = c.let(f"udiv i64 %block, {x}")
        c.do(f"%ctaid.x = trunc i64 {c.let(f'urem i64 %block, {x}')} to i32")
        c.do(f"%ctaid.y = trunc i64 {c.let(f'urem i64 {row}, {y}')} to i32")
        c.do(f"%ctaid.z = trunc i64 {c.let(f'udiv i64 {row}, {y}')} to i32")

    # ------------------------------------------------------------------------------------- warps

    def _warp_loop(self, warp_slot: str, after: str) -> None:
        """One turn for each warp."""
        c, unit = self.code, self.unit
        c.label("warp.test")
        c.do(f"%warp = load i32, ptr {warp_slot}")
        c.branch(c.let(f"icmp ult i32 %warp, {unit.job('warps', 'i32')}"), "warp.run", after)
        c.label("warp.run")
        c.do(f"store i32 %warp, ptr {unit.worker_field('warp')}")
        beginning = len(c.lines)
        first = c.let(f"mul i32 %warp, {unit.lanes}")
        distance = c.let(f"zext i32 {c.let(f'mul i32 {first}, 4')} to i64")
        c.do(f"%tid.table = getelementptr i8, ptr {unit.job('thread_ids', 'ptr')}, i64 {distance}")
        c.do(f"%rest = sub i32 {unit.job('threads', 'i32')}, {first}")
        if self.has_barriers:
            self._resume()
        c.branch(c.let(f"icmp sge i32 %rest, {unit.lanes}"), self.straight.label(0), "partial")
        c.label("partial")
        lanes = c.lanes("i32", 1, unit.lanes)
        t = vector("i32", unit.lanes)
        exists = c.let(f"icmp ult {t} {lanes}, {c.splat('i32', '%rest', unit.lanes)}")
        self.straight.begin_with(unit.masks.make(c, exists))
        self.straight.emit()
        self.straight.handover.emit_call(self.straight, self.has_barriers)
        if self.has_barriers:
            c.label("warp.suspended")
            c.do(f"store i1 true, ptr {self._again}")
            c.jump("warp.next")
        c.label("warp.done")
        if self.has_barriers:
            c.do(f"store i32 {barriers.DONE}, ptr {c.field('%frame', FRAME_STATE)}")
        c.jump("warp.next")
        c.lines[beginning:beginning] = unit.forget_registers()
        c.label("warp.next")
        c.do(f"store i32 {c.let('add i32 %warp, 1')}, ptr {warp_slot}")
        c.jump("warp.test")

    # ---------------------------------------------------------------------------------- barriers

    def _frames(self) -> str:
        start = self.unit.job("frames", "i64")
        return self.unit.once("frames", f"getelementptr i8, ptr {self.unit.arena()}, i64 {start}")

    def _begin_frames(self) -> None:
        """All warps of the block are new; no barrier has seen anybody."""
        c, unit = self.code, self.unit
        frames, size = self._frames(), unit.frame.bytes
        c.do(f"%barriers = getelementptr i8, ptr {frames}, i64 -{BARRIERS_BYTES}")
        if not unit.plain_barriers:
            for identity in range(BARRIERS):
                for place in range(8):
                    field = c.field("%barriers", identity * BARRIER_BYTES + 4 * place)
                    c.do(f"store i32 {1 if place == 3 else 0}, ptr {field}")
        slot = c.slot("i32")
        c.do(f"store i32 0, ptr {slot}")
        c.jump("frame.init")
        c.label("frame.init")
        warp = c.let(f"load i32, ptr {slot}")
        distance = c.let(f"mul i64 {c.let(f'zext i32 {warp} to i64')}, {size}")
        frame = c.let(f"getelementptr i8, ptr {frames}, i64 {distance}")
        c.do(f"store i32 {barriers.NEW}, ptr {c.field(frame, FRAME_STATE)}")
        c.do(f"store i32 -1, ptr {c.field(frame, FRAME_BARRIER)}")
        following = c.let(f"add i32 {warp}, 1")
        c.do(f"store i32 {following}, ptr {slot}")
        c.branch(c.let(f"icmp ult i32 {following}, {unit.job('warps', 'i32')}"), "frame.init", "pass.first")
        c.label("pass.first")

    def _run_passes(self, warp_slot: str) -> None:
        """Let every warp run up to its next barrier, until all are done."""
        c, unit = self.code, self.unit
        self._again = c.slot("i1")
        c.jump("pass")
        c.label("pass")
        c.do(f"store i1 false, ptr {self._again}")
        c.do(f"store i32 0, ptr {warp_slot}")
        c.jump("warp.test")
        self._warp_loop(warp_slot, "pass.done")
        c.label("pass.done")
        again = c.let(f"load i1, ptr {self._again}")
        if not unit.plain_barriers:
            again = self._release()
        c.branch(again, "pass.more", "block.done")
        c.label("pass.more")
        check_stop(self.straight, unit.graph.body.instructions[0])
        c.jump("pass")

    def _release(self) -> str:
        c, unit = self.code, self.unit
        result = c.function(
            "gf_release",
            "i32",
            ("ptr", "%worker"),
            ("ptr", self._frames()),
            ("i64", str(unit.frame.bytes)),
            ("i32", unit.job("warps", "i32")),
            ("ptr", "%barriers"),
        )
        return c.let(f"icmp ne i32 {result}, 0")

    def _resume(self) -> None:
        """Go where the warp left off."""
        c, unit = self.code, self.unit
        wide = c.let("zext i32 %warp to i64")
        distance = c.let(f"mul i64 {wide}, {unit.frame.bytes}")
        c.do(f"%frame = getelementptr i8, ptr {self._frames()}, i64 {distance}")
        if not unit.plain_barriers:
            waits = c.let(f"load i32, ptr {c.field('%frame', FRAME_BARRIER)}")
            c.branch(c.let(f"icmp ne i32 {waits}, -1"), "warp.next", "warp.free")
            c.label("warp.free")
        state = c.let(f"load i32, ptr {c.field('%frame', FRAME_STATE)}")
        resume = barriers.resume_nodes(unit.graph)
        cases = "".join(f" i32 {n + barriers.FIRST_RESUME}, label %resume.{n}" for n in resume)
        c.do(
            f"switch i32 {state}, label %warp.new "
            f"[ i32 {barriers.DONE}, label %warp.next i32 {barriers.MASKED}, label %resume.masked{cases} ]"
        )
        for node in resume:
            c.label(f"resume.{node}")
            self.straight.node = node
            barriers.resume_converged(self.straight, node, self._barrier_before(node))
        c.label("resume.masked")
        self.straight.handover.resume(self.straight)
        c.label("warp.new")

    def _barrier_before(self, node: int) -> Any:
        instructions = self.unit.graph.body.instructions
        for before in self.unit.graph.nodes[node].predecessors:
            last = instructions[self.unit.graph.nodes[before].stop - 1]
            if is_barrier(last) and self.unit.graph.nodes[before].next == node:
                return last
        raise AssertionError("a node to resume at follows a barrier")
