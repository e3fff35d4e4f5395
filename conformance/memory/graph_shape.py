"""What the chapters on capture and graphs ask of a graph."""

from __future__ import annotations


def status(p, stream):
    """Whether a stream is capturing: NONE, ACTIVE, INVALIDATED, or the code that the question met."""
    answer, value = p.call(p.d.cuStreamIsCapturing, stream)
    return value.name.removeprefix("CU_STREAM_CAPTURE_STATUS_") if answer == "SUCCESS" else answer


def shape(p, graph):
    """How many nodes of each type a graph has, how many roots and edges."""
    d = p.d
    count = int(p.need(d.cuGraphGetNodes, graph)[1])
    nodes = p.need(d.cuGraphGetNodes, graph, count)[0] if count else []
    types = [p.need(d.cuGraphNodeGetType, node).name.removeprefix("CU_GRAPH_NODE_TYPE_") for node in nodes]
    return {
        "nodes": count,
        "types": sorted(types),
        "roots": int(p.need(d.cuGraphGetRootNodes, graph)[1]),
        "edges": int(p.need(d.cuGraphGetEdges, graph)[3]),
    }


def nodes_of(p, graph):
    count = int(p.need(p.d.cuGraphGetNodes, graph)[1])
    return p.need(p.d.cuGraphGetNodes, graph, count)[0] if count else []


def run_graph(p, graph, stream, times=1):
    """Instantiate a graph, launch it, wait; all of it must succeed."""
    d = p.d
    executable = p.need(d.cuGraphInstantiate, graph, 0)
    for _ in range(times):
        p.need(d.cuGraphLaunch, executable, stream)
    p.need(d.cuStreamSynchronize, stream)
    p.need(d.cuGraphExecDestroy, executable)
