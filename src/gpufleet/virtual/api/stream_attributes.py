"""Attributes of streams: remembered, and but for the priority without effect."""

from __future__ import annotations

import ctypes
from typing import Any

from gpufleet.virtual.api.contexts import PRIORITIES
from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.host_pointers import read_bytes
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import Stream

VALUE_BYTES = 64
"""The size of a CUlaunchAttributeValue, a union (cuda.h)."""
KINDS = (
    "ACCESS_POLICY_WINDOW",
    "SYNCHRONIZATION_POLICY",
    "PRIORITY",
    "MEM_SYNC_DOMAIN",
    "MEM_SYNC_DOMAIN_MAP",
)


@call(outputs=1)
def cuStreamGetAttribute(state: State, hStream: Any, attr: Any) -> Any:
    """Return an attribute: what was set, or zero."""
    stream, name = state.stream(hStream), _name(attr)
    found = bindings().CUstreamAttrValue()
    if name == "PRIORITY":
        found.priority = stream.priority
    elif name in stream.settings:
        ctypes.memmove(int(found.getPtr()), stream.settings[name], VALUE_BYTES)
    return found


@call()
def cuStreamSetAttribute(state: State, hStream: Any, attr: Any, value: Any) -> None:
    """Remember an attribute."""
    stream, name = state.stream(hStream), _name(attr)
    if name == "PRIORITY":
        least, greatest = PRIORITIES
        stream.priority = min(max(int(value.priority), greatest), least)
        return
    if name == "SYNCHRONIZATION_POLICY":
        _check_policy(value)
    stream.settings[name] = read_bytes(int(value.getPtr()), VALUE_BYTES)


@call()
def cuStreamCopyAttributes(state: State, dst: Any, src: Any) -> None:
    """Give a stream the attributes of another one of its context."""
    to, source = state.stream(dst), state.stream(src)
    _check_same_context(to, source)
    to.settings = dict(source.settings)
    to.priority = source.priority


def _name(attribute: Any) -> str:
    name = str(attribute.name).removeprefix("CU_LAUNCH_ATTRIBUTE_")
    if name not in KINDS:
        raise Refusal("INVALID_VALUE", f"a stream has no attribute {name}")
    return name


def _check_policy(value: Any) -> None:
    try:
        value.syncPolicy  # noqa: B018 - the bindings raise for a number that is no policy
    except ValueError as error:
        raise Refusal("INVALID_VALUE", str(error)) from error


def _check_same_context(to: Stream, source: Stream) -> None:
    if to.context is not source.context:
        raise Refusal("INVALID_VALUE", "the streams are of different contexts")
