"""Whatever the text, the parser answers with a module or with PtxError."""

from __future__ import annotations

from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpufleet.virtual.ptx import PtxError, parse

CORPUS = Path(__file__).parents[2] / "data" / "ptx-corpus"
TEXTS = [
    (CORPUS / f"{name}.ptx").read_text() for name in ("switch_brx.sm_90", "devcall.sm_120", "structs.sm_75")
]
WORDS = sorted(
    {word for text in TEXTS for word in text.split()}
    | {"{", "}", ";", "(", ")", "[", "]", "1", "-", "0f00000000"}
)
HEADER = ".version 8.0\n.target sm_90\n.address_size 64\n"


def survives(text: str) -> None:
    error = outcome(text)
    if error is not None:
        assert error.code in ("INVALID_PTX", "UNSUPPORTED_PTX_VERSION", "NOT_SUPPORTED")
        assert error.line >= 0


def outcome(text: str) -> PtxError | None:
    try:
        parse(text).check()
    except PtxError as error:
        return error
    return None


@given(st.text())
@example("(" * 5000)
@example(HEADER + ".global .u32 x = " + "(" * 5000 + ";")
@example(HEADER + ".global .u32 x = " + "-" * 5000 + "1;")
@example(HEADER + ".entry k() " + "{" * 5000 + "}" * 5000)
@example(HEADER + ".global .u32 x[" + "9" * 5000 + "];")
@example(HEADER + ".entry k() { .reg .b32 %r<99999999999>; }")
@example(HEADER + ".entry k() { .loc 1 2 }")
@example(HEADER + ".entry k() .maxntid 99999999999999999999 { ret; }")
@example(HEADER + ".entry k(.param .align 0 .b8 x[4]) { ret; }")
@example(HEADER + ".global .u32 x = 1 << 99999999999;")
@example(HEADER + '.file 1 "unterminated')
@example(HEADER + "/* unterminated")
def test_any_text(text: str) -> None:
    survives(text)


@given(st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join))
def test_any_words(text: str) -> None:
    survives(HEADER + text)
    survives(f"{HEADER}.entry k(.param .u64 p) {{ .reg .b32 %r<9>; {text} }}")


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 40)))
        replacement = draw(st.one_of(st.just(""), st.sampled_from(WORDS), st.text(max_size=5)))
        text = text[:start] + replacement + text[stop:]
    return text


@settings(max_examples=60, deadline=None)
@given(mutated())
def test_mutations_of_the_corpus(text: str) -> None:
    survives(text)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(TEXTS), st.integers(0, 6000))
def test_truncations_of_the_corpus(text: str, length: int) -> None:
    survives(text[:length])
