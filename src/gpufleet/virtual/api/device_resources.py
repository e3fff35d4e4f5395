"""Resources of devices: multiprocessors, split into parts and described for green contexts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.green_contexts import Share, part_size, split
from gpufleet.virtual.handles import new_handle
from gpufleet.virtual.state import State

NUMBER_AT = 8
"""Where in a CUdevResource, in the bytes that are the driver's own, its number lies."""


@call(outputs=1)
def cuDeviceGetDevResource(state: State, device: Any, typename: Any) -> Any:
    """Return the multiprocessors of a device."""
    return whole(state, Share(found := state.device(device), range(found.multiprocessors)), typename)


@call(outputs=1)
def cuCtxGetDevResource(state: State, hCtx: Any, typename: Any) -> Any:
    """Return the multiprocessors that a context has: all, or those of a green context."""
    context = state.live_context(hCtx)
    green = state.green_contexts.get(context.green_handle)
    share = green.share if green is not None else Share(context.device, range(context.multiprocessors))
    return whole(state, share, typename)


@call(outputs=1)
def cuStreamGetDevResource(state: State, hStream: Any, typename: Any) -> Any:
    """Return the multiprocessors that a stream's context has."""
    context = state.stream(hStream).context
    green = state.green_contexts.get(context.green_handle)
    share = green.share if green is not None else Share(context.device, range(context.multiprocessors))
    return whole(state, share, typename)


@call(outputs=3)
def cuDevSmResourceSplitByCount(
    state: State, nbGroups: int, input_: Any, flags: int, minCount: int
) -> tuple[list[Any], int, Any]:
    """Split multiprocessors into parts of one size and a rest; for no groups, say how many there could be."""
    share = _share(state, input_)
    parts, rest = split(share, nbGroups or len(share.multiprocessors), minCount, flags)
    results = [_resource(state, part) for part in parts] if nbGroups else []
    empty = [bindings().CUdevResource() for _ in range(nbGroups - len(results))]
    return [*results, *empty], len(parts), _resource(state, rest)


@call(outputs=1)
def cuDevResourceGenerateDesc(state: State, resources: Sequence[Any], nbResources: int) -> Any:
    """Describe resources together: parts of one split, or one resource."""
    shares = [_share(state, resource) for resource in list(resources or ())[:nbResources]]
    if not shares:
        raise Refusal("INVALID_VALUE", "no resources are given")
    device = shares[0].device
    if any(share.device is not device for share in shares):
        raise Refusal("INVALID_RESOURCE_CONFIGURATION", "the resources are of several devices")
    together = sorted({each for share in shares for each in share.multiprocessors})
    return bindings().CUdevResourceDesc(_enter(state, Share(device, tuple(together))))


def whole(state: State, share: Share, kind: Any) -> Any:
    """Return a resource that may be split, as the device, a context or a stream answers it."""
    if kind != bindings().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM:
        raise Refusal("INVALID_RESOURCE_TYPE", f"{kind} is no resource of virtual devices")
    return _resource(state, share)


def _resource(state: State, share: Share) -> Any:
    resource = bindings().CUdevResource()
    if not len(share.multiprocessors):
        return resource  # CU_DEV_RESOURCE_TYPE_INVALID, as the rest of a split that leaves none
    resource.type = bindings().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    resource.sm.smCount = len(share.multiprocessors)
    resource.sm.minSmPartitionSize, resource.sm.smCoscheduledAlignment = part_size(share.device)
    _number_in(resource).value = _enter(state, share)
    return resource


def _share(state: State, resource: Any) -> Share:
    share = None if resource is None else state.shares.get(_number_in(resource).value)
    if share is None:
        raise Refusal("INVALID_RESOURCE_TYPE", "the resource is none of multiprocessors")
    return share


def _enter(state: State, share: Share) -> int:
    with state.lock:
        found = state.share_numbers.get(share)
        if found is None:
            found = state.share_numbers[share] = new_handle()
            state.shares[found] = share
        return found


def _number_in(resource: Any) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(number(resource.getPtr()) + NUMBER_AT)
