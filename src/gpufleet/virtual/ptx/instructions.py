"""The table of PTX instructions: every opcode once, with its forms and what it means.

forms.py says how to read an entry. What threads do together stands in synchronization.py, the video
instructions in video.py.
"""

from __future__ import annotations

from gpufleet.virtual.ptx.forms import Form, Spec
from gpufleet.virtual.ptx.forms import instruction as _spec
from gpufleet.virtual.ptx.synchronization import SYNCHRONIZATION
from gpufleet.virtual.ptx.video import VIDEO

_INTEGERS = "u16 u32 u64 s16 s32 s64"
_EVERYTHING = "b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64"
_CONVERTIBLE = "u8 u16 u32 u64 s8 s16 s32 s64 f16 bf16 f32 f64"
_ACCESS = "mmio? semantics? scope? cache? evict? evict2? prefetch? hint? vector?"
_MEMORY = f"space? {_ACCESS}"
_WRITTEN = f"space=global|local|shared|param|shared::cta|shared::cluster|param::func? {_ACCESS}"
_HALVES = "f16 f16x2 bf16 bf16x2"
_PRIMARY = "L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged"
_SECONDARY = "L2::evict_first|L2::evict_unchanged"


def _comparisons(results: str, operands: str) -> tuple[Form, ...]:
    """Give the forms of a comparison, alone and combined with a predicate; relations depend on the type."""
    prefix = f"{results}, " if results else ""
    return tuple(
        Form(prefix + types, f"{operands} !c:pred" if combined else operands, modifiers + combined)
        for types, modifiers in (
            ("b16 b32 b64", "compare=eq|ne"),
            ("u16 u32 u64", "compare=eq|ne|lt|le|gt|ge|lo|ls|hi|hs"),
            ("s16 s32 s64", "compare=eq|ne|lt|le|gt|ge"),
            ("f32 f64", f"compare={_FLOAT_RELATIONS} ftz?"),
        )
        for combined in ("", " boolean")
    )


_FLOAT_RELATIONS = "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan"


_ARITHMETIC = (
    Form("f32", "d a b", "rounding? ftz? sat?"),
    Form("f64", "d a b", "rounding?"),
    Form("f16 f16x2", "d a b", "rounding=rn? ftz? sat?"),
    Form("bf16 bf16x2", "d a b", "rounding=rn?"),
    Form("f32x2", "d a b", "rounding? ftz?"),
    Form("f32, f16 bf16", "d a:2 c", "rounding? sat?"),
)
_FUSED = (
    Form("f32", "d a b c", "rounding ftz? sat?"),
    Form("f64", "d a b c", "rounding"),
)
_WRAPPING = (Form("s32", "d a b", "sat"), Form("u32 s32 u64 s64", "d a b", "cc"))
_BITWISE = (Form("b16 b32 b64 pred", "d a b"),)

_INTEGER_ARITHMETIC = (
    _spec("add", "d = a + b", Form(f"{_INTEGERS} u16x2 s16x2", "d a b"), *_WRAPPING, *_ARITHMETIC),
    _spec("addc", "d = a + b + carry", Form("u32 s32 u64 s64", "d a b", "cc?")),
    _spec("sub", "d = a - b", Form(_INTEGERS, "d a b"), *_WRAPPING, *_ARITHMETIC),
    _spec("subc", "d = a - (b + borrow)", Form("u32 s32 u64 s64", "d a b", "cc?")),
    _spec(
        "mul",
        "d = a * b: its low half, its high half, or all of it",
        Form(_INTEGERS, "d a b", "part=lo|hi"),
        Form("u16 u32 s16 s32", "d:wide a b", "part=wide"),
        *_ARITHMETIC[:5],
    ),
    _spec(
        "mad",
        "d = a * b + c",
        Form(_INTEGERS, "d a b c", "part=lo|hi"),
        Form("s32", "d a b c", "part=hi sat"),
        Form("u32 s32 u64 s64", "d a b c", "part=lo|hi cc"),
        Form("u16 u32 s16 s32", "d:wide a b c:wide", "part=wide"),
        *_FUSED,
    ),
    _spec("madc", "d = a * b + c + carry", Form("u32 s32 u64 s64", "d a b c", "part=lo|hi cc?")),
    _spec(
        "mul24", "d = a * b of the low 24 bits: bits 0-31 or 16-47", Form("u32 s32", "d a b", "part=lo|hi")
    ),
    _spec(
        "mad24",
        "d = a * b + c of 24-bit a and b",
        Form("u32 s32", "d a b c", "part=lo|hi"),
        Form("s32", "d a b c", "part=hi sat"),
    ),
    _spec("sad", "d = c + |a - b|", Form(_INTEGERS, "d a b c")),
    _spec(
        "div",
        "d = a / b",
        Form(_INTEGERS, "d a b"),
        Form("f32", "d a b", "approx ftz?"),
        Form("f32", "d a b", "full ftz?"),
        Form("f32", "d a b", "rounding ftz?"),
        Form("f64", "d a b", "rounding"),
    ),
    _spec("rem", "d = a % b, with the sign of a", Form(_INTEGERS, "d a b")),
    _spec(
        "abs",
        "d = |a|",
        Form("s16 s32 s64", "d a"),
        Form("f32", "d a", "ftz?"),
        Form("f64", "d a"),
        Form(_HALVES, "d a", "ftz?"),
    ),
    _spec(
        "neg",
        "d = -a",
        Form("s16 s32 s64", "d a"),
        Form("f32", "d a", "ftz?"),
        Form("f64", "d a"),
        Form(_HALVES, "d a", "ftz?"),
    ),
    *(
        _spec(
            name,
            meaning,
            Form(f"{_INTEGERS} u16x2 s16x2", "d a b", "relu?"),
            Form("f32", "d a b c?", "ftz? NaN? xorsign? abs?"),
            Form("f64", "d a b"),
            Form(_HALVES, "d a b", "ftz? NaN? xorsign? abs?"),
        )
        for name, meaning in (
            ("min", "d = the smaller; a number beats a NaN unless .NaN"),
            ("max", "d = the larger; a number beats a NaN unless .NaN"),
        )
    ),
    _spec("popc", "d = number of 1 bits", Form("b32 b64", "d:u32 a")),
    _spec("clz", "d = number of leading 0 bits", Form("b32 b64", "d:u32 a")),
    _spec(
        "bfind",
        "d = position of the highest bit that is not the sign, or the shift that brings it to the top",
        Form("u32 u64 s32 s64", "d:u32 a", "shiftamt?"),
    ),
    _spec("fns", "d = position of the c-th 1 bit of a from bit b", Form("b32", "d a b c:s32")),
    _spec("brev", "d = a with its bits in reverse order", Form("b32 b64", "d a")),
    _spec(
        "bfe", "d = c bits of a from bit b, zero or sign extended", Form("u32 u64 s32 s64", "d a b:u32 c:u32")
    ),
    _spec("bfi", "d = b with the low d bits of a inserted at bit c", Form("b32 b64", "f a b c:u32 d:u32")),
    _spec(
        "szext", "d = the low b bits of a, zero or sign extended", Form("u32 s32", "d a b:u32", "wrapping")
    ),
    _spec("bmsk", "d = a mask of b bits from bit a", Form("b32", "d a b", "wrapping")),
    _spec("dp4a", "d = c + dot product of four bytes", Form("u32 s32, u32 s32", "d:b32 a:b32 b:b32 c:b32")),
    _spec(
        "dp2a",
        "d = c + dot product of two 16-bit halves with two bytes",
        Form("u32 s32, u32 s32", "d:b32 a:b32 b:b32 c:b32", "part=lo|hi"),
    ),
)

_FLOATING_POINT = (
    _spec("testp", "p = a has the property", Form("f32 f64", "d:pred a", "property")),
    _spec("copysign", "d = |b| with the sign of a", Form("f32 f64", "d a b")),
    _spec(
        "fma",
        "d = a * b + c, rounded once",
        *_FUSED,
        Form("f16 f16x2", "d a b c", "rounding=rn ftz? sat? relu?"),
        Form("bf16 bf16x2", "d a b c", "rounding=rn relu?"),
        Form(_HALVES, "d a b c", "rounding=rn oob relu?"),
        Form("f32x2", "d a b c", "rounding ftz?"),
        Form("f32, f16 bf16", "d a:2 b:2 c", "rounding sat?"),
    ),
    _spec(
        "rcp",
        "d = 1 / a",
        Form("f32", "d a", "approx ftz?"),
        Form("f64", "d a", "approx ftz"),
        Form("f32", "d a", "rounding ftz?"),
        Form("f64", "d a", "rounding"),
    ),
    _spec(
        "sqrt",
        "d = square root of a",
        Form("f32", "d a", "approx ftz?"),
        Form("f32", "d a", "rounding ftz?"),
        Form("f64", "d a", "rounding"),
    ),
    _spec(
        "rsqrt",
        "d = 1 / square root of a",
        Form("f32", "d a", "approx ftz?"),
        Form("f64", "d a", "approx ftz?"),
    ),
    _spec("sin", "d = sine of a", Form("f32", "d a", "approx ftz?")),
    _spec("cos", "d = cosine of a", Form("f32", "d a", "approx ftz?")),
    _spec("lg2", "d = log2 of a", Form("f32", "d a", "approx ftz?")),
    _spec(
        "ex2",
        "d = 2 to the power of a",
        Form("f32", "d a", "approx ftz?"),
        Form(_HALVES, "d a", "approx ftz?"),
    ),
    _spec("tanh", "d = hyperbolic tangent of a", Form(f"f32 {_HALVES}", "d a", "approx")),
)

_COMPARISON = (
    _spec(
        "setp",
        "p = a compared with b, combined with c; q = the opposite, combined with c",
        *_comparisons("", "d|q:pred a b"),
        Form(_HALVES, "d|q:pred a b", f"compare={_FLOAT_RELATIONS} ftz?"),
        Form(_HALVES, "d|q:pred a b !c:pred", f"compare={_FLOAT_RELATIONS} boolean ftz?"),
    ),
    _spec(
        "set",
        "d = all ones (1.0 as a float) where the comparison holds, else 0",
        *_comparisons("u32 s32 f32", "d a:2 b:2"),
        Form(f"{_HALVES} u16 s16 u32 s32, {_HALVES}", "d a:2 b:2", f"compare={_FLOAT_RELATIONS} ftz?"),
        Form(
            f"{_HALVES} u16 s16 u32 s32, {_HALVES}",
            "d a:2 b:2 !c:pred",
            f"compare={_FLOAT_RELATIONS} boolean ftz?",
        ),
    ),
    _spec("selp", "d = c ? a : b", Form(f"b16 b32 b64 {_INTEGERS} f32 f64", "d a b !c:pred")),
    _spec(
        "slct",
        "d = c >= 0 ? a : b",
        Form(f"b16 b32 b64 {_INTEGERS} f32 f64, s32 f32", "d a b c:2", "ftz?"),
    ),
)

_LOGIC = (
    _spec("and", "d = a & b", *_BITWISE),
    _spec("or", "d = a | b", *_BITWISE),
    _spec("xor", "d = a ^ b", *_BITWISE),
    _spec("not", "d = ~a", Form("b16 b32 b64 pred", "d a")),
    _spec("cnot", "d = a == 0", Form("b16 b32 b64", "d a")),
    _spec(
        "lop3",
        "d = any function of three bits, as a table of eight",
        Form("b32", "d a b c e:u32"),
        Form("b32", "d|q a b c e:u32 !g:pred", "boolean=and|or"),
    ),
    _spec(
        "shf",
        "d = 32 bits out of the 64 of (b, a), shifted by c",
        Form("b32", "d a b c:u32", "direction wrapping"),
    ),
    _spec("shl", "d = a << b; 0 past the width", Form("b16 b32 b64", "d a b:u32")),
    _spec(
        "shr",
        "d = a >> b; the sign past the width for signed types",
        Form(f"b16 b32 b64 {_INTEGERS}", "d a b:u32"),
    ),
)

_MOVEMENT = (
    _spec(
        "mov",
        "d = a: a register, constant, address or special register; packs and unpacks vectors",
        Form(f"b16 b32 b64 b128 {_INTEGERS} f32 f64 pred", "d* a*", "vector=v2|v4?"),
    ),
    _spec("prmt", "d = four bytes picked from the eight of (b, a)", Form("b32", "d a b c", "permute?")),
    _spec(
        "ld",
        "d = memory at a",
        Form(f"{_EVERYTHING} b128", "d* [a] p:b64?", f"{_MEMORY} nc? unified?", wider=True),
    ),
    _spec(
        "ldu",
        "d = memory at a, the same for all lanes",
        Form(_EVERYTHING, "d* [a]", "space=global? vector=v2|v4?", wider=True),
    ),
    _spec("st", "memory at a = b", Form(f"{_EVERYTHING} b128", "[a] b* p:b64?", _WRITTEN, wider=True)),
    _spec(
        "prefetch",
        "bring the line at a into a cache",
        Form("", "[a]", "space=global|local? level=L1|L2"),
        Form("", "[a]", "space=global evict2"),
    ),
    _spec("prefetchu", "bring the line at a into the uniform cache", Form("", "[a]", "level=L1")),
    _spec("isspacep", "p = the generic address a lies in the space", Form("", "d:pred a:u64", "space")),
    _spec(
        "cvta",
        "d = a, from the space's address to a generic one, or with .to the reverse",
        Form("u64 u32", "d a", "space to?"),
    ),
    _spec(
        "cvt",
        "d = a, converted",
        Form(
            f"{_CONVERTIBLE}, {_CONVERTIBLE}",
            "d a:2",
            "rounding? integral? ftz? sat? relu?",
            wider=True,
        ),
        Form("f16x2 bf16x2, f32", "d a:2 b:2", "rounding=rn|rz relu? ftz? sat?"),
        Form("e4m3x2 e5m2x2, f32", "d:b16 a:2 b:2", "rounding=rn satfinite relu?"),
        Form("e4m3x2 e5m2x2, f16x2", "d:b16 a:2", "rounding=rn satfinite relu?"),
        Form("f16x2, e4m3x2 e5m2x2", "d a:b16", "rounding=rn relu?"),
        Form("tf32, f32", "d:b32 a:2", "rounding=rn|rz|rna relu?"),
        Form("u16 s16, s32", "d:b32 a:2 b:2", "pack sat"),
        Form("u8 s8 u4 s4 u2 s2, s32, b32", "d:b32 a:2 b:2 c:3", "pack sat"),
    ),
    _spec(
        "createpolicy",
        "d = how to cache, for instructions with .L2::cache_hint",
        Form("b64", "d f:f32?", f"fractional primary={_PRIMARY} secondary={_SECONDARY}?"),
        Form("b64", "d [a] s:u32 t:u32", f"range space=global? primary={_PRIMARY} secondary={_SECONDARY}?"),
        Form("b64", "d a", "cvt L2"),
    ),
    _spec(
        "applypriority", "change how the line at a is cached", Form("", "[a] n:u32", "space=global? evict2")
    ),
    _spec("discard", "the line at a need not be kept", Form("", "[a] n:u32", "space=global? level=L2")),
)

_STACK = (
    _spec("alloca", "d = a bytes of local memory, until the function returns", Form("u32 u64", "d a b:u32?")),
    _spec("stacksave", "d = where alloca goes on", Form("u32 u64", "d")),
    _spec("stackrestore", "give back what alloca gave since", Form("u32 u64", "a")),
)

_CONTROL = (
    _spec("bra", "go to the label", Form("", "label", "uni?")),
    _spec("brx", "go to the a-th label of the table", Form("", "a:u32 table", "idx uni?")),
    _spec("call", "call a function", Form("", "call", "uni?")),
    _spec("ret", "return from the function; from a kernel, end the thread", Form("", "", "uni?")),
    _spec("exit", "end the thread", Form("", "")),
    _spec("trap", "abort the grid with an error", Form("", "")),
    _spec("brkpt", "stop for a debugger", Form("", "")),
    _spec("nanosleep", "wait about so many nanoseconds", Form("u32", "a")),
    _spec("pmevent", "trigger performance monitor events", Form("", "a:u32", "mask?")),
)

_OTHER = " ".join(
    (
        "ldmatrix stmatrix movmatrix mma wmma wgmma tcgen05",  # matrices
        "tex tld4 txq istypep suld sust sured suq",  # textures and surfaces
        "tensormap multimem clusterlaunchcontrol setmaxnreg",  # bulk copies, and grids that change
    )
)

INSTRUCTIONS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        *_INTEGER_ARITHMETIC,
        *_FLOATING_POINT,
        *_COMPARISON,
        *_LOGIC,
        *_MOVEMENT,
        *_CONTROL,
        *_STACK,
        *SYNCHRONIZATION,
        *VIDEO,
        *(_spec(name, "known, not carried out by any engine") for name in _OTHER.split()),
    )
}
"""Every opcode of PTX ISA 9, by name."""
