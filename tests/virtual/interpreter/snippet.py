"""Runs one instruction for many lanes: the shortest way to ask the interpreter what it means."""

from __future__ import annotations

from typing import Any

import numpy as np
from machine import Device

from gpufleet.virtual.interpreter.values import DTYPES

Array = np.ndarray[Any, Any]
BITS = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}


def kernel_text(
    body: str,
    declarations: str = "",
    parameters: str = ".param .u64 p0",
    target: str = "sm_90",
    outside: str = "",
) -> str:
    return f"""
.version 8.5
.target {target}
.address_size 64
{outside}
.visible .entry k({parameters})
{{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>;
    .reg .f32 %f<9>; .reg .f64 %fd<9>;
    {declarations}
    {body}
    ret;
}}
"""


def run(instruction: str, result: str, *sources: tuple[str, Any], extra: str = "") -> Array:
    """Execute an instruction with operands %d (of type `result`) and %a, %b, %c, %e, ... per lane.

    Predicates are loaded as bytes. `extra` is executed after the instruction, before %d is stored.
    """
    names = "abcefgh"
    count = max(len(np.atleast_1d(values)) for _, values in sources)
    declarations = [_declare("d", result)]
    parameters = [".param .u64 out"]
    lines = [
        "mov.u32 %r0, %tid.x;",
        "mov.u32 %r1, %ctaid.x;",
        "mov.u32 %r2, %ntid.x;",
        "mad.lo.u32 %r0, %r1, %r2, %r0;",
    ]
    arrays: list[Array] = []
    for name, (type, values) in zip(names, sources, strict=False):
        dtype = np.dtype(np.uint8) if type == "pred" else DTYPES[type]
        arrays.append(np.ascontiguousarray(np.broadcast_to(np.asarray(values, dtype), count)))
        declarations.append(_declare(name, type))
        parameters.append(f".param .u64 in_{name}")
        lines += _load(name, type, dtype.itemsize)
    store = _store(result)
    text = kernel_text(
        "\n".join([*lines, instruction, extra, *store]), "\n".join(declarations), ", ".join(parameters)
    )
    device = Device.load(text, 1 << 22)
    dtype = np.dtype(np.uint8) if result == "pred" else DTYPES[result]
    out = device.memory.alloc(dtype.itemsize * count)
    block = min(count, 64)
    padded = [np.resize(array, -(-count // block) * block) for array in arrays]
    out = device.memory.alloc(dtype.itemsize * len(padded[0])) if padded else out
    device.launch("k", (-(-count // block), 1, 1), (block, 1, 1), out, *map(device.memory.upload, padded))
    values = device.memory.download(out, dtype, count)
    return values.astype(np.bool_) if result == "pred" else values


def _declare(name: str, type: str) -> str:
    if type == "pred":
        return f".reg .pred %{name}; .reg .b16 %{name}_byte;"
    size = DTYPES[type].itemsize
    return f".reg .{type if type in ('f32', 'f64') else BITS[max(size, 2)]} %{name};"


def _load(name: str, type: str, size: int) -> list[str]:
    lines = [
        f"ld.param.u64 %rd0, [in_{name}];",
        f"mad.wide.u32 %rd0, %r0, {size}, %rd0;",
    ]
    if type == "pred":
        return [*lines, f"ld.global.u8 %{name}_byte, [%rd0];", f"setp.ne.u16 %{name}, %{name}_byte, 0;"]
    return [*lines, f"ld.global.{BITS[size]} %{name}, [%rd0];"]


def _store(type: str) -> list[str]:
    if type == "pred":
        size, value = 1, "%d_byte"
        before = ["selp.u16 %d_byte, 1, 0, %d;"]
    else:
        size, value = DTYPES[type].itemsize, "%d"
        before = []
    address = ["ld.param.u64 %rd0, [out];", f"mad.wide.u32 %rd0, %r0, {size}, %rd0;"]
    return [*before, *address, f"st.global.{BITS[size]} [%rd0], {value};"]
