"""Graphs: made, asked, cloned, destroyed; the order of their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.graphs import Graph, Node
from gpufleet.virtual.state import State


@call(outputs=1)
def cuGraphCreate(state: State, flags: int) -> Any:
    """Create a graph without nodes. No context is needed."""
    if flags:
        raise Refusal("INVALID_VALUE", f"the flags are {flags}: expected 0")
    return bindings().CUgraph(state.graphs.add(Graph()))


@call(by_finalizers=True)
def cuGraphDestroy(state: State, hGraph: Any) -> None:
    """End a graph; what was made executable of it can still be launched."""
    with state.lock:
        state.graphs.remove(state.graphs.graph(hGraph))
    state.scheduler.settle()


@call(outputs=1)
def cuGraphClone(state: State, originalGraph: Any) -> Any:
    """Return a copy of a graph; refuse one that allocates or frees memory."""
    with state.lock:
        graph = state.graphs.graph(originalGraph)
        if graph.has_memory():
            raise Refusal("NOT_SUPPORTED", "a graph that allocates or frees memory cannot be cloned")
        return bindings().CUgraph(state.graphs.add(graph.clone()))


@call(outputs=1)
def cuGraphNodeFindInClone(state: State, hOriginalNode: Any, hClonedGraph: Any) -> Any:
    """Return what became of a node in a clone of its graph."""
    for node in state.graphs.graph(hClonedGraph).nodes.values():
        if node.original == number(hOriginalNode):
            return bindings().CUgraphNode(node.handle)
    raise Refusal("INVALID_VALUE", "no node of the clone comes from this node")


# ---- questions


@call(outputs=2)
def cuGraphGetNodes(state: State, hGraph: Any, numNodes: int = 0) -> tuple[list[Any], int]:
    """Return the first nodes, and how many there are if none is asked for."""
    return _listed(list(state.graphs.graph(hGraph).nodes.values()), numNodes)


@call(outputs=2)
def cuGraphGetRootNodes(state: State, hGraph: Any, numRootNodes: int = 0) -> tuple[list[Any], int]:
    """Return the nodes that come after no other."""
    nodes = state.graphs.graph(hGraph).nodes.values()
    return _listed([node for node in nodes if not node.dependencies], numRootNodes)


@call(outputs=4)
def cuGraphGetEdges(
    state: State, hGraph: Any, numEdges: int = 0
) -> tuple[list[Any], list[Any], list[Any], int]:
    """Return the pairs of nodes of which one comes directly after the other."""
    edges = state.graphs.graph(hGraph).edges
    before, count = _listed([edge[0] for edge in edges], numEdges)
    behind, _ = _listed([edge[1] for edge in edges], numEdges)
    return before, behind, _edge_data(before), count


@call(outputs=3)
def cuGraphNodeGetDependencies(
    state: State, hNode: Any, numDependencies: int = 0
) -> tuple[list[Any], list[Any], int]:
    """Return the nodes that a node comes directly after."""
    nodes, count = _listed(state.graphs.node(hNode).dependencies, numDependencies)
    return nodes, _edge_data(nodes), count


@call(outputs=3)
def cuGraphNodeGetDependentNodes(
    state: State, hNode: Any, numDependentNodes: int = 0
) -> tuple[list[Any], list[Any], int]:
    """Return the nodes that come directly after a node."""
    node = state.graphs.node(hNode)
    dependent = [behind for before, behind in node.graph.edges if before is node]
    nodes, count = _listed(dependent, numDependentNodes)
    return nodes, _edge_data(nodes), count


# ---- order


@call()
def cuGraphAddDependencies(
    state: State, hGraph: Any, from_: Any, to: Any, edgeData: Any, numDependencies: int
) -> None:
    """Let nodes come after others; a cycle is refused only when the graph is made executable."""
    with state.lock:
        edges = _pairs(state, hGraph, from_, to, numDependencies)
        for before, behind in edges:
            if before is behind or before in behind.dependencies:
                raise Refusal("INVALID_VALUE", "the node comes after that one already, or is the same")
        for before, behind in edges:
            behind.dependencies.append(before)


@call()
def cuGraphRemoveDependencies(
    state: State, hGraph: Any, from_: Any, to: Any, edgeData: Any, numDependencies: int
) -> None:
    """Let nodes not come after others any more."""
    with state.lock:
        edges = _pairs(state, hGraph, from_, to, numDependencies)
        if any(before not in behind.dependencies for before, behind in edges):
            raise Refusal("INVALID_VALUE", "the node does not come directly after that one")
        for before, behind in edges:
            behind.dependencies.remove(before)


def _pairs(state: State, handle: Any, before: Any, behind: Any, count: int) -> list[tuple[Node, Node]]:
    graph = state.graphs.graph(handle)
    firsts = [_node_of(graph, each) for each in list(before or ())[:count]]
    seconds = [_node_of(graph, each) for each in list(behind or ())[:count]]
    if len(firsts) != count or len(seconds) != count:
        raise Refusal("INVALID_VALUE", f"{len(firsts)} and {len(seconds)} nodes, where {count} were said")
    return list(zip(firsts, seconds, strict=True))


def _node_of(graph: Graph, handle: Any) -> Node:
    node = graph.nodes.get(number(handle))
    if node is None:
        raise Refusal("INVALID_VALUE", f"{number(handle):#x} is no node of the graph")
    return node


def _listed(nodes: Sequence[Node], wanted: int) -> tuple[list[Any], int]:
    """Handles of the first `wanted` nodes; their number, or that of all if none is wanted."""
    chosen = list(nodes)[:wanted]
    handles = [bindings().CUgraphNode(node.handle) for node in chosen]
    return handles, len(chosen) if wanted else len(nodes)


def _edge_data(nodes: Sequence[Any]) -> list[Any]:
    return [bindings().CUgraphEdgeData() for _ in nodes]
