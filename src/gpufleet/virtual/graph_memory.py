"""Memory that a graph allocates when it is launched: its addresses are known as soon as it is captured.

The addresses and pages are set aside from the capture on, until nothing can allocate or use them any more;
the driver knows them as memory only between a launch's allocation and a free. So no two graphs share an
address, as they may on real devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.graphs import Work
from gpufleet.virtual.operations import Operation

if TYPE_CHECKING:
    from gpufleet.virtual.devices import Device
    from gpufleet.virtual.spans import Allocation
    from gpufleet.virtual.state import State
    from gpufleet.virtual.streams import Stream


class GraphMemory:
    """One allocation of a graph. All methods are called with the driver's lock held.

    Attributes
    ----------
    is_live : bool
        Whether, after all that was issued so far, it is allocated.
    """

    def __init__(self, state: State, allocation: Allocation) -> None:
        self.allocation = allocation
        self.is_live = False
        self._state = state
        self._index = state.memory.arenas[allocation.ordinal].index
        self._users = 0

    def hold(self) -> None:
        """Keep its addresses: a graph, an executable or a launch needs them."""
        self._users += 1

    def drop(self) -> None:
        """Take one `hold` back; give all back after the last, unless it is allocated."""
        self._users -= 1
        self._release_if_unused()

    def appear(self) -> None:
        """Become memory; what was freed automatically just stays."""
        if self._index.at(self.allocation.start) is None:
            self._index.add(self.allocation)

    def vanish(self) -> None:
        """Be no memory any more."""
        if self._index.at(self.allocation.start) is not None:
            self._index.remove(self.allocation)

    def _release_if_unused(self) -> None:
        memories = self._state.graphs.memories
        if self._users or self.is_live or memories.pop(self.allocation.start, None) is None:
            return
        self._state.memory.planned.remove(self.allocation)
        self.appear()
        self._state.scheduler.retire(self._state.memory.withdraw(self.allocation))

    def __str__(self) -> str:
        return str(self.allocation)


def capture_allocation(state: State, stream: Stream, device: Device, size: int) -> int:
    """Let each launch allocate; return the address, which is the same each time."""
    with state.lock:
        assert stream.capture is not None
        stream.capture.check()
        allocation = state.memory.allocate(device.arena, size, "device", stream.context)
        if allocation is None:
            raise Refusal("OUT_OF_MEMORY", f"{size} bytes do not fit on device {device.ordinal}")
        allocation.pool = state.graphs.pool(device)
        memory = GraphMemory(state, allocation)
        memory.vanish()
        state.memory.planned.add(allocation)
        state.graphs.memories[allocation.start] = memory
        stream.capture.add(stream, Work("MEM_ALLOC", memory=memory))
        return allocation.start


def free_graph_memory(state: State, address: int, stream: Stream) -> None:
    """Free what a graph has allocated, or let each launch do so; other memory a graph cannot free."""
    with state.lock:
        memory = state.graphs.memories.get(address)
        capture = stream.capture
        if capture is not None:
            capture.check()
            if memory is None or capture.graph.frees(memory):
                raise Refusal(
                    "INVALID_VALUE", f"no graph allocates {address:#x}, or this one frees it already"
                )
            capture.add(stream, Work("MEM_FREE", memory=memory))
            return
    assert memory is not None
    _free_in_order(state, memory, stream)


def free_now(state: State, memory: GraphMemory) -> None:
    """Free what a launch has allocated; all work that may use it has ended."""
    with state.lock:
        _check_live(memory)
        memory.is_live = False
        memory.vanish()
        memory.hold()
        memory.drop()
    state.scheduler.settle()


def _free_in_order(state: State, memory: GraphMemory, stream: Stream) -> None:
    """Free what a launch has allocated behind the work of a stream."""
    with state.lock:
        _check_live(memory)
        before = stream.predecessors()
        memory.hold()

        def mark() -> None:
            memory.vanish()
            memory.drop()

        operation = Operation(stream.context.device.ordinal, mark=mark)
        memory.is_live = False
        state.scheduler.submit(operation, before)
        stream.tail = operation
    state.scheduler.settle()


def _check_live(memory: GraphMemory) -> None:
    if not memory.is_live:
        raise Refusal("INVALID_VALUE", f"no launch has allocated {memory}")
