"""What the CUDA driver answers about memory, streams, events, captures, graphs and contexts.

`probe(chapter, driver, image)` asks an object that has the functions of `cuda.bindings.driver` (same
names, same arguments, same result tuples) and returns {probe name: answer}, which JSON can hold. Each
chapter wants a driver that nothing has used yet; `image` is PTX text (bytes, NUL-terminated) of
memory_kernels.cu. `record.py` records all chapters on a GPU, each in a process of its own.

How to read the answers:

* a string is the name of a CUresult without `CUDA_`; {"missing": f} says that the driver or the
  bindings have no function f; {"exception": text} is an error of Python's;
* a name that ends in `.value.hardware` has a value of that machine (the GPU, or its operating system);
  every other answer should be the same for each driver;
* `.waits` says whether a call returned only when a stream was done that a latch kernel kept busy,
  `.waited` that such a latch ran out, so that the answers beside it are not worth much;
* `X.poisoned` says that the context was unusable after group X, `X.ended` that the process ended in it.

Recorded with cuda-bindings 13.3; CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL is never asked (memory/pointers.py).
"""

from __future__ import annotations

from memory.capture import probe_capture
from memory.capture_calls import probe_capture_calls
from memory.capture_streams import probe_capture_streams
from memory.contexts import probe_contexts
from memory.copies import probe_copies
from memory.events import probe_events
from memory.functions import probe_functions
from memory.graph_launches import probe_graph_launches
from memory.graph_memory import probe_graph_memory
from memory.graphs import probe_graphs
from memory.green import probe_green
from memory.hazards import GRAVE, HAZARDS, probe_hazard
from memory.managed import probe_managed
from memory.modules import probe_modules
from memory.peer_faults import FAULTS, probe_peer_fault
from memory.peer_pools import probe_peer_pools
from memory.peers import probe_peers
from memory.pinned import probe_pinned
from memory.pool_settings import probe_pool_settings
from memory.pools import probe_pools
from memory.registered import probe_registered
from memory.streams import probe_streams
from memory.waiting import probe_waiting

CHAPTERS = {
    "pinned": probe_pinned,
    "registered": probe_registered,
    "copies": probe_copies,
    "waiting": probe_waiting,
    "pools": probe_pools,
    "pool_settings": probe_pool_settings,
    "managed": probe_managed,
    "streams": probe_streams,
    "events": probe_events,
    "capture": probe_capture,
    "capture_streams": probe_capture_streams,
    "capture_calls": probe_capture_calls,
    "graph_memory": probe_graph_memory,
    "graphs": probe_graphs,
    "graph_launches": probe_graph_launches,
    "green": probe_green,
    "peers": probe_peers,
    "peer_pools": probe_peer_pools,
    "functions": probe_functions,
    "contexts": probe_contexts,
    "modules": probe_modules,
}
"""What any driver can be asked in one process."""

ALONE = (
    *(f"hazard.{each.__name__}" for each in HAZARDS),
    *(f"peer_fault.{each.__name__}" for each in FAULTS),
    *(f"hazard.{each.__name__}" for each in GRAVE),
)
"""What may end the process, or its use of CUDA: one process each."""

UNDISTURBED = (
    *("waiting", "streams", "peers", "contexts"),
    *(f"peer_fault.{each.__name__}" for each in FAULTS),
    *(f"hazard.{each.__name__}" for each in GRAVE),
)
"""What wants the GPUs for itself: it looks at who waits, or at free memory, or it faults."""


def probe(chapter, driver, image, **how):
    """Ask one chapter, by its name in CHAPTERS or ALONE."""
    kind, _, name = chapter.partition(".")
    if kind == "hazard":
        return probe_hazard(driver, image, name, **how)
    if kind == "peer_fault":
        return probe_peer_fault(driver, image, name, **how)
    return CHAPTERS[chapter](driver, image, **how)
