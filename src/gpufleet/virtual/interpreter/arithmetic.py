"""Which computation carries out an instruction that only turns values into values."""

from __future__ import annotations

from collections.abc import Callable

from gpufleet.virtual.interpreter import bits, comparisons, conversions, floats, halves, integers, pairs
from gpufleet.virtual.interpreter.binding import Compute
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.operations import Operation

Maker = Callable[[Operation], Compute]

_INTEGER: dict[str, Maker] = {
    "add": integers.add,
    "sub": integers.sub,
    "mul": integers.mul,
    "mad": integers.mad,
    "mul24": integers.mul24,
    "mad24": integers.mad24,
    "sad": integers.sad,
    "div": integers.div,
    "rem": integers.rem,
    "abs": integers.absolute,
    "neg": integers.negative,
    "min": integers.minimum,
    "max": integers.maximum,
}
_FLOAT: dict[str, Maker] = {
    "add": floats.add,
    "sub": floats.sub,
    "mul": floats.mul,
    "mad": floats.fma,
    "fma": floats.fma,
    "div": floats.div,
    "abs": floats.absolute,
    "neg": floats.negative,
    "min": floats.minimum,
    "max": floats.maximum,
    "rcp": floats.rcp,
    "sqrt": floats.sqrt,
    "rsqrt": floats.rsqrt,
    "sin": floats.sin,
    "cos": floats.cos,
    "lg2": floats.lg2,
    "ex2": floats.ex2,
    "tanh": floats.tanh,
    "testp": floats.testp,
    "copysign": floats.copysign,
}
_HALF: dict[str, Maker] = {
    "add": halves.add,
    "sub": halves.sub,
    "mul": halves.mul,
    "fma": halves.fma,
    "abs": halves.absolute,
    "neg": halves.negative,
    "min": halves.minimum,
    "max": halves.maximum,
    "ex2": halves.ex2,
    "tanh": halves.tanh,
}
_PREDICATE: dict[str, Maker] = {
    "and": comparisons.pred_and,
    "or": comparisons.pred_or,
    "xor": comparisons.pred_xor,
    "not": comparisons.pred_not,
}
_ANY: dict[str, Maker] = {
    "and": bits.bit_and,
    "or": bits.bit_or,
    "xor": bits.bit_xor,
    "not": bits.bit_not,
    "cnot": bits.cnot,
    "shl": bits.shl,
    "shr": bits.shr,
    "shf": bits.shf,
    "popc": bits.popc,
    "clz": bits.clz,
    "bfind": bits.bfind,
    "brev": bits.brev,
    "bfe": bits.bfe,
    "bfi": bits.bfi,
    "bmsk": bits.bmsk,
    "szext": bits.szext,
    "fns": bits.fns,
    "lop3": bits.lop3,
    "prmt": bits.prmt,
    "dp4a": integers.dp4a,
    "dp2a": integers.dp2a,
    "set": comparisons.set_value,
    "selp": comparisons.selp,
    "slct": comparisons.slct,
    "cvt": conversions.cvt,
}
"""Those whose computation does not depend on the kind of the first type, or looks at it itself."""


def computation(operation: Operation, pair: bool) -> Compute:
    """Return the computation; `pair` says that there are two destinations.

    Raises `PtxError` for what is not carried out.
    """
    name, type = operation.name, operation.type
    if name == "setp":
        return comparisons.setp(operation, pair)
    if type in pairs.PACKED and name != "cvt":
        return pairs.packed(operation)
    if name in _FLOAT and type == "f32" and len(operation.types) == 2:
        return pairs.mixed(operation)
    if name == "lop3" and pair != ("boolean" in operation):
        raise unsupported(f"{operation.text} with these destinations")
    maker = _ANY.get(name)
    if type == "pred":
        maker = _PREDICATE.get(name)
    elif name in _INTEGER and type in integers.INTEGER_TYPES:
        maker = _INTEGER[name]
    elif name in _FLOAT and type in floats.FLOAT_TYPES:
        maker = _FLOAT[name]
    elif name in _HALF and type in halves.HALF_TYPES:
        maker = _HALF[name]
    if maker is None:
        raise unsupported(operation.text)
    return maker(operation)
