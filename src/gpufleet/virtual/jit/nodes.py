"""The flow graph that code is generated from: basic blocks cut at barriers, in an order that keeps
lanes together.

Order is everything for divergent code: the lanes of a warp always run the lowest node that some
lane waits for (see divergent.py). In a weak topological order (Bourdoncle 1993: nested strongly
connected components, each with its head first) that makes lanes meet again where their paths join,
runs a loop until its last lane has left, and runs a node outside every loop only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpufleet.virtual.ptx.flow import continues, live_in
from gpufleet.virtual.ptx.syntax import BasicBlock, Body, Instruction


@dataclass
class Node:
    """Straight-line instructions `start` to `stop`; after the last, control goes to a successor."""

    index: int
    start: int
    stop: int
    successors: tuple[int, ...] = ()
    next: int | None = None
    """The successor in the text, if control can fall through to it."""
    in_loop: bool = False
    predecessors: list[int] = field(default_factory=list)


@dataclass
class Graph:
    """A function's nodes in the order they are run in; `live_in[i]` is a bit mask of registers."""

    body: Body
    nodes: list[Node]
    target_of: dict[int, int]
    """Node at which each basic block of the text begins."""
    live_in: list[int]

    def live_out(self, node: Node) -> int:
        """Registers whose values a successor may read."""
        live = 0
        for successor in node.successors:
            live |= self.live_in[successor]
        return live

    def is_back_edge(self, source: int, target: int) -> bool:
        """Say whether going from one node to the other repeats something."""
        return target <= source


def is_barrier(instruction: Instruction) -> bool:
    """Say whether a thread stops here until others arrive, or at least lets them run."""
    operation = instruction.operation
    if operation.name == "mbarrier":
        return is_wait(instruction)
    return operation.name in ("bar", "barrier") and "warp" not in operation and "arrive" not in operation


def is_wait(instruction: Instruction) -> bool:
    """Say whether a thread asks here whether others have arrived: it goes on in any case."""
    operation = instruction.operation
    return operation.name == "mbarrier" and ("test_wait" in operation or "try_wait" in operation)


def build_graph(body: Body) -> Graph:
    """Cut blocks at barriers and order what results."""
    pieces, first_piece = _cut(body)
    order = _weak_topological_order([piece.successors for piece in pieces])
    place = {old: new for new, old in enumerate(order)}
    nodes: list[Node] = []
    for new, old in enumerate(order):
        piece = pieces[old]
        following = None if piece.next is None else place[piece.next]
        nodes.append(Node(new, piece.start, piece.stop, tuple(place[s] for s in piece.successors), following))
    for node in nodes:
        for successor in node.successors:
            nodes[successor].predecessors.append(node.index)
    _mark_loops(nodes)
    target_of = {block: place[piece] for block, piece in first_piece.items() if piece in place}
    blocks = [BasicBlock(n.index, n.start, n.stop, (), n.successors) for n in nodes]
    live = live_in(Body(body.instructions, body.registers, body.variables, blocks))
    return Graph(body, nodes, target_of, live)


def _cut(body: Body) -> tuple[list[Node], dict[int, int]]:
    pieces: list[Node] = []
    first_piece: dict[int, int] = {}
    for block in body.blocks:
        first_piece[block.index] = len(pieces)
        start = block.start
        for index in range(block.start, block.stop):
            if is_barrier(body.instructions[index]) and index + 1 < block.stop:
                pieces.append(Node(len(pieces), start, index + 1))
                start = index + 1
        pieces.append(Node(len(pieces), start, block.stop))
    for block in body.blocks:
        last = first_piece.get(block.index + 1, len(pieces)) - 1
        for piece in pieces[first_piece[block.index] : last]:
            piece.next = piece.index + 1
            piece.successors = (piece.next,)
        piece = pieces[last]
        if continues(body.instructions[piece.stop - 1]) and last + 1 < len(pieces):
            piece.next = last + 1
        piece.successors = tuple(first_piece[s] for s in block.successors)
    return pieces, first_piece


def _weak_topological_order(successors: list[tuple[int, ...]]) -> list[int]:
    """Order the nodes that the entry (node 0) reaches; ties keep the order of the text."""
    return _order(_reachable(0, successors), successors)


def _order(members: set[int], successors: list[tuple[int, ...]]) -> list[int]:
    result: list[int] = []
    for component in _components(members, successors):
        head = min(component)
        result.append(head)
        if len(component) > 1:
            result += _order(set(component) - {head}, successors)
    return result


def _components(members: set[int], successors: list[tuple[int, ...]]) -> list[list[int]]:
    """Strongly connected components in topological order (Tarjan, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in sorted(members, reverse=True):
        if root in index:
            continue
        work = [(root, _edges(root, members, successors))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, edges = work[-1]
            for target in edges:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, _edges(target, members, successors)))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.remove(member)
                        component.append(member)
                        if member == node:
                            break
                    found.append(component)
    return found[::-1]


def _edges(node: int, members: set[int], successors: list[tuple[int, ...]]) -> Iterator[int]:
    """Late in the text first: components come out reversed, so the text's order stays."""
    return iter(sorted((s for s in successors[node] if s in members), reverse=True))


def _reachable(start: int, successors: list[tuple[int, ...]]) -> set[int]:
    seen = {start}
    waiting = [start]
    while waiting:
        for target in successors[waiting.pop()]:
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return seen


def _mark_loops(nodes: list[Node]) -> None:
    """A node is in a loop if it reaches itself."""
    successors = [node.successors for node in nodes]
    for component in _components(set(range(len(nodes))), successors):
        looping = len(component) > 1 or component[0] in successors[component[0]]
        for member in component:
            nodes[member].in_loop = looping
