"""How much memory graphs hold on a device."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.state import State


@call(outputs=1)
def cuDeviceGetGraphMemAttribute(state: State, device: Any, attr: Any) -> Any:
    """Return how much is allocated, or set aside, or was at most."""
    found, kinds = state.graphs.pool(state.device(device)), bindings().CUgraphMem_attribute
    amounts = {
        kinds.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: found.used,
        kinds.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: found.used,
        kinds.CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: found.used_high,
        kinds.CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: found.used_high,
    }
    if attr not in amounts:
        raise Refusal("INVALID_VALUE", f"{attr} is no attribute of graphs' memory")
    return bindings().cuuint64_t(amounts[attr])


@call()
def cuDeviceSetGraphMemAttribute(state: State, device: Any, attr: Any, value: Any) -> None:
    """Set a high-water mark back to 0, which means: to what is in use."""
    found, kinds = state.graphs.pool(state.device(device)), bindings().CUgraphMem_attribute
    high = (kinds.CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, kinds.CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
    if attr not in high or int(value):
        raise Refusal("INVALID_VALUE", f"{attr} cannot be set to {int(value)}")
    found.used_high = found.used


@call()
def cuDeviceGraphMemTrim(state: State, device: Any) -> None:
    """Do nothing: graphs keep no memory that they do not need."""
    state.device(device)
