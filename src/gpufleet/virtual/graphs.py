"""What is in a graph, and how does a launch become work? Graphs, their nodes, and executable graphs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.handles import new_handle
from gpufleet.virtual.interrupts import InterruptsDeferred
from gpufleet.virtual.operations import Operation

if TYPE_CHECKING:
    from gpufleet.virtual.contexts import Context
    from gpufleet.virtual.engine import Launch
    from gpufleet.virtual.graph_memory import GraphMemory
    from gpufleet.virtual.modules import Function
    from gpufleet.virtual.streams import Event, Stream
    from gpufleet.virtual.work import Scheduler

AUTO_FREE = 1
"""CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH."""


@dataclass(frozen=True)
class Work:
    """What a node does in each launch.

    Attributes
    ----------
    kind : str
        The name of its CUgraphNodeType, without the prefix.
    context : Context or None
        Where it does it; None where that does not matter.
    operation : Operation or None
        The pattern of each launch's operation; None for one that does nothing.
    function, launch : Function and Launch, or None
        Of a kernel.
    event : Event or None
        What it records or waits for.
    memory : GraphMemory or None
        What it allocates or frees.
    """

    kind: str
    context: Context | None = None
    operation: Operation | None = None
    function: Function | None = None
    launch: Launch | None = None
    event: Event | None = None
    memory: GraphMemory | None = None

    def new_operation(self, device: int) -> Operation:
        """Return one launch's operation; `device` carries out what is of no context."""
        if self.event is not None and self.kind == "EVENT_RECORD":
            return self.event.new_operation()
        if self.memory is not None:
            mark = self.memory.appear if self.kind == "MEM_ALLOC" else self.memory.vanish
            return Operation(device, mark=mark)
        pattern = self.operation
        if pattern is None:
            return Operation(device)
        brief = pattern.brief
        if self.function is not None and self.launch is not None:
            brief = self.function.is_brief(math.prod(self.launch.grid) * math.prod(self.launch.block))
        return Operation(
            pattern.device, pattern.action, on_worker=pattern.on_worker, brief=brief, uses=pattern.uses
        )


class Node:
    """A piece of work in a graph, and the nodes that it comes after.

    Attributes
    ----------
    child : Graph or None
        What a node of kind GRAPH runs.
    original : int
        The handle of the node that this one was cloned from, or 0.
    kept : object
        What its parameters, as they were answered, point into.
    """

    def __init__(self, graph: Graph, work: Work, dependencies: Iterable[Node], child: Graph | None = None):
        self.handle = new_handle()
        self.graph = graph
        self.work = work
        self.dependencies = list(dependencies)
        self.child = child
        self.original = 0
        self.kept: Any = None

    def is_behind(self, other: Node) -> bool:
        """Say whether it is `other`, or comes after it."""
        seen, pending = {self}, [self]
        while pending:
            node = pending.pop()
            if node is other:
                return True
            new = [each for each in node.dependencies if each not in seen]
            seen.update(new)
            pending.extend(new)
        return False


class Graph:
    """Nodes, in the order in which they were added.

    Attributes
    ----------
    executables : set of Executable
        Those that were made of it and not destroyed.
    """

    def __init__(self) -> None:
        self.handle = new_handle()
        self.nodes: dict[int, Node] = {}
        self.executables: set[Executable] = set()

    def add(self, work: Work, dependencies: Iterable[Node], child: Graph | None = None) -> Node:
        """Add a node behind others of this graph."""
        node = Node(self, work, dependencies, child)
        self.nodes[node.handle] = node
        if work.memory is not None:
            work.memory.hold()
        return node

    def remove(self, node: Node) -> None:
        """Take a node out; what came after it does not come after what it came after."""
        del self.nodes[node.handle]
        for other in self.nodes.values():
            if node in other.dependencies:
                other.dependencies.remove(node)
        if node.work.memory is not None:
            node.work.memory.drop()

    def clear(self) -> None:
        """Take all nodes out, which lets go of the memory that they allocate."""
        for node in list(self.nodes.values()):
            self.remove(node)

    @property
    def edges(self) -> list[tuple[Node, Node]]:
        """All pairs of a node and one that comes directly after it."""
        return [(before, node) for node in self.nodes.values() for before in node.dependencies]

    def frees(self, memory: GraphMemory) -> bool:
        """Say whether a node frees this memory."""
        works = (node.work for node in self.nodes.values())
        return any(work.kind == "MEM_FREE" and work.memory is memory for work in works)

    def has_memory(self) -> bool:
        """Say whether a node allocates or frees memory: there is one executable of such a graph at a time."""
        return any(node.work.memory is not None for node in self.nodes.values())

    def clone(self) -> Graph:
        """Return a copy with nodes of its own."""
        copy = Graph()
        copies: dict[Node, Node] = {}
        for node in self.in_order():
            child = None if node.child is None else node.child.clone()
            copies[node] = copy.add(node.work, [copies[each] for each in node.dependencies], child)
            copies[node].original = node.handle
        copy.nodes = {copies[node].handle: copies[node] for node in self.nodes.values()}
        return copy

    def in_order(self) -> list[Node]:
        """Return the nodes, each behind those that it comes after; refuse a graph with a cycle."""
        ordered: dict[Node, None] = {}
        waiting = list(self.nodes.values())
        while waiting:
            blocked = []
            for node in waiting:
                if all(each in ordered for each in node.dependencies):
                    ordered[node] = None
                else:
                    blocked.append(node)
            if len(blocked) == len(waiting):
                raise Refusal("INVALID_VALUE", "the graph has a cycle")
            waiting = blocked
        return list(ordered)


@dataclass
class Step:
    """A node of an executable graph; `after` are the steps before it, by their index."""

    work: Work
    after: list[int]
    node: int
    enabled: bool = True


class Executable:
    """A graph that can be launched. Its launches run one after the other, whatever streams they are in.

    Attributes
    ----------
    tail : Operation or None
        The end of the last launch.
    """

    def __init__(self, graph: Graph, flags: int) -> None:
        self.handle = new_handle()
        self.graph = graph
        self.flags = flags
        self.steps: list[Step] = []
        self.tail: Operation | None = None
        _flatten(graph, [], self.steps)
        for memory in self.memories:
            memory.hold()
        graph.executables.add(self)

    @property
    def memories(self) -> list[GraphMemory]:
        """What its nodes allocate or free."""
        found = (step.work.memory for step in self.steps)
        return list(dict.fromkeys(memory for memory in found if memory is not None))

    def step(self, node: Node) -> Step:
        """Return what became of a node of its graph."""
        for step in self.steps:
            if step.node == node.handle:
                return step
        raise Refusal("INVALID_VALUE", "the node is not of the graph that the executable was made of")

    def update(self, graph: Graph) -> bool:
        """Do from now on what another graph of the same shape does; False if its shape is another."""
        steps: list[Step] = []
        _flatten(graph, [], steps)
        if [(step.work.kind, step.after) for step in steps] != [
            (step.work.kind, step.after) for step in self.steps
        ]:
            return False
        for mine, theirs in zip(self.steps, steps, strict=True):
            mine.work = theirs.work
        return True

    def launch(self, scheduler: Scheduler, stream: Stream) -> None:
        """Put all of it into a stream."""
        with InterruptsDeferred():
            self._launch(scheduler, stream)
            scheduler.settle()

    def _launch(self, scheduler: Scheduler, stream: Stream) -> None:
        with scheduler.lock:
            before = stream.predecessors()
            if self.tail is not None and self.tail not in before:
                before.append(self.tail)
            self._check_contexts()
            self._account()
            device = stream.context.device.ordinal
            operations: list[Operation] = []
            for step in self.steps:
                operation = step.work.new_operation(device) if step.enabled else Operation(device)
                predecessors = [operations[index] for index in step.after] or list(before)
                event = step.work.event
                if step.work.kind == "WAIT_EVENT" and event is not None and event.operation is not None:
                    predecessors.append(event.operation)
                scheduler.submit(operation, predecessors)
                operations.append(operation)
            end = Operation(device, mark=functools.partial(_drop, self.memories))
            scheduler.submit(end, [*operations, *before])
            stream.tail = self.tail = end

    def close(self) -> None:
        """Let go of its memory; launches that are under way end as if nothing had happened."""
        self.graph.executables.discard(self)
        _drop(self.memories)

    def _check_contexts(self) -> None:
        for step in self.steps:
            context = step.work.context
            if context is not None and context.is_destroyed:
                raise Refusal("CONTEXT_IS_DESTROYED", f"context {context.handle:#x} of a node was destroyed")

    def _account(self) -> None:
        """See to it that what is allocated is free before, and what is freed allocated."""
        allocated = {step.work.memory for step in self.steps if step.work.kind == "MEM_ALLOC"}
        freed = {step.work.memory for step in self.steps if step.work.kind == "MEM_FREE"}
        for memory in self.memories:
            if memory in allocated and memory.is_live and not self.flags & AUTO_FREE:
                raise Refusal("INVALID_VALUE", f"the last launch's {memory} is not freed yet")
            if memory not in allocated and not memory.is_live:
                raise Refusal("INVALID_VALUE", f"{memory} is not allocated")
        for memory in self.memories:
            memory.hold()
            memory.is_live = memory in allocated and memory not in freed


def _drop(memories: Iterable[GraphMemory]) -> None:
    for memory in memories:
        memory.drop()


def _flatten(graph: Graph, before: list[int], steps: list[Step]) -> list[int]:
    """Append the steps of a graph that comes after others; return its last ones."""
    ends: dict[Node, list[int]] = {}
    for node in graph.in_order():
        after = [index for each in node.dependencies for index in ends[each]] or before
        if node.child is None:
            steps.append(Step(node.work, after, node.handle))
            ends[node] = [len(steps) - 1]
        else:
            ends[node] = _flatten(node.child, after, steps) or after
    inner = {each for node in ends for each in node.dependencies}
    return [index for node, last in ends.items() if node not in inner for index in last]
