"""The graphs of a driver, and what belongs to them, by handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpufleet.virtual.bindings import number
from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.graphs import Executable, Graph, Node
from gpufleet.virtual.pools import Pool

if TYPE_CHECKING:
    from gpufleet.virtual.devices import Device
    from gpufleet.virtual.graph_memory import GraphMemory


class Graphs:
    """Everything that `cuGraph*` calls may name.

    Attributes
    ----------
    memories : dict
        What graphs allocate, by address.
    """

    def __init__(self) -> None:
        self.memories: dict[int, GraphMemory] = {}
        self._graphs: dict[int, Graph] = {}
        self._executables: dict[int, Executable] = {}
        self._pools: dict[int, Pool] = {}

    def add(self, graph: Graph) -> int:
        """Enter a graph; return its handle."""
        self._graphs[graph.handle] = graph
        return graph.handle

    def remove(self, graph: Graph) -> None:
        """Forget a graph, with all its nodes."""
        del self._graphs[graph.handle]
        graph.clear()

    def graph(self, handle: Any) -> Graph:
        """Return the graph of a handle."""
        found = self._graphs.get(number(handle)) or self._child(number(handle))
        if found is None:
            raise Refusal("INVALID_VALUE", f"{number(handle):#x} is no graph")
        return found

    def node(self, handle: Any) -> Node:
        """Return the node of a handle."""
        for graph in self._all():
            if (node := graph.nodes.get(number(handle))) is not None:
                return node
        raise Refusal("INVALID_VALUE", f"{number(handle):#x} is no node of a graph")

    def nodes(self, graph: Graph, handles: Any, count: int) -> list[Node]:
        """Return nodes that must be of one graph, each named once."""
        numbers = [number(handle) for handle in list(handles or ())[:count]]
        if len(numbers) != count or len(set(numbers)) != count:
            raise Refusal("INVALID_VALUE", f"{len(set(numbers))} different nodes, where {count} were said")
        for each in numbers:
            if each not in graph.nodes:
                raise Refusal("INVALID_VALUE", f"{each:#x} is no node of the graph")
        return [graph.nodes[each] for each in numbers]

    def add_executable(self, executable: Executable) -> int:
        """Enter an executable graph; return its handle."""
        self._executables[executable.handle] = executable
        return executable.handle

    def remove_executable(self, executable: Executable) -> None:
        """Forget an executable graph."""
        del self._executables[executable.handle]
        executable.close()

    def executable(self, handle: Any) -> Executable:
        """Return the executable graph of a handle."""
        found = self._executables.get(number(handle))
        if found is None:
            raise Refusal("INVALID_VALUE", f"{number(handle):#x} is no executable graph")
        return found

    def pool(self, device: Device) -> Pool:
        """Return what stands for the graphs' memory of a device: a pool that callers cannot name."""
        pool = self._pools.get(device.ordinal)
        if pool is None:
            pool = self._pools[device.ordinal] = Pool(device)
            pool.handle = 0
        return pool

    def _all(self) -> list[Graph]:
        """All graphs, also those inside of others."""
        found = list(self._graphs.values())
        for graph in found:
            found.extend(node.child for node in graph.nodes.values() if node.child is not None)
        return found

    def _child(self, handle: int) -> Graph | None:
        return next((graph for graph in self._all() if graph.handle == handle), None)
