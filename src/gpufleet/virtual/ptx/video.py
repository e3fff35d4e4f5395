"""The video instructions (PTX ISA 9.7.17): arithmetic on bytes and halves of 32-bit registers.

Part of the table of instructions; forms.py says how to read it. CUDA's SIMD intrinsics (`__vabsdiffu4`)
are made of them.
"""

from __future__ import annotations

from gpufleet.virtual.ptx.forms import Form, Spec
from gpufleet.virtual.ptx.forms import instruction as _spec

_TWO = "u32 s32, u32 s32"
_THREE = "u32 s32, u32 s32, u32 s32"
_SECOND = "second=add|min|max"
_RELATION = "compare=eq|ne|lt|le|gt|ge"


def _scalar(name: str, meaning: str) -> Spec:
    """One byte, half or word of each source; the result may go on into a second operation, or be merged."""
    return _spec(
        name,
        meaning,
        Form(_THREE, "~d:b32 ~a:2 ~b:3 c:b32?", f"sat? {_SECOND}?"),
    )


def _packed(name: str, meaning: str) -> tuple[Spec, Spec]:
    """Two halves or four bytes of each source; their results may be summed up."""
    two, four = (
        _spec(
            f"{name}{n}", f"{meaning}, in {n} lanes", Form(_THREE, "~d:b32 ~a:b32 ~b:b32 c:b32", "sat? add?")
        )
        for n in (2, 4)
    )
    return two, four


VIDEO = (
    _scalar("vadd", "d = a + b"),
    _scalar("vsub", "d = a - b"),
    _scalar("vabsdiff", "d = |a - b|"),
    _scalar("vmin", "d = the smaller"),
    _scalar("vmax", "d = the larger"),
    *(
        _spec(
            name,
            meaning,
            Form("u32 s32, u32 s32, u32", "~d:b32 ~a:2 ~b:3 c:b32?", f"sat? wrapping {_SECOND}?"),
        )
        for name, meaning in (("vshl", "d = a << b"), ("vshr", "d = a >> b"))
    ),
    _spec(
        "vmad",
        "d = (a * b + c) >> scale",
        Form(_THREE, "d:b32 ~a:2 ~b:3 c:b32", "po? sat? scale=shr7|shr15?"),
    ),
    _spec(
        "vset",
        "d = 1 where the comparison holds",
        Form(_TWO, "~d:b32 ~a:1 ~b:2 c:b32?", f"{_RELATION} {_SECOND}?"),
    ),
    *_packed("vadd", "d = a + b"),
    *_packed("vsub", "d = a - b"),
    *_packed("vavrg", "d = (a + b + 1) / 2"),
    *_packed("vabsdiff", "d = |a - b|"),
    *_packed("vmin", "d = the smaller"),
    *_packed("vmax", "d = the larger"),
    *(
        _spec(
            f"vset{n}",
            f"d = 1 where the comparison holds, in {n} lanes",
            Form(_TWO, "~d:b32 ~a:b32 ~b:b32 c:b32", f"{_RELATION} add?"),
        )
        for n in (2, 4)
    ),
)


# --------------------------------------------------------------------------------------- selectors


def picks(selector: str, count: int, default: int) -> list[int]:
    """Return which of the parts of (b, a), a's first, the lanes of a source are taken from.

    A selector names the highest lane first: `.b7501`. Without one they are the source's own.
    """
    if not selector:
        return list(range(default, default + count))
    return [int(digit) for digit in reversed(selector[1:])]


def mask_of(selector: str, count: int) -> list[bool]:
    """Return which lanes of the result are written, rather than taken from c: `.b20` names two."""
    return [not selector or str(lane) in selector[1:] for lane in range(count)]


def places_of(count: int) -> list[str]:
    """Return the selectors of a word's parts, lowest first."""
    return [f"{'h' if count == 2 else 'b'}{lane}" for lane in range(count)]
