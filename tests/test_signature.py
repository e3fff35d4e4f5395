"""What a kernel's parameters are, read from PTX or from a signature in words."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.signature import parse, read_ptx


def kinds(types: object) -> list[tuple[str, int]]:
    return [(each.kind, each.size) for each in types]  # type: ignore[attr-defined]


def test_ptx_of_two_dialects_reads_alike() -> None:
    older = ".visible .entry k(\n\t.param .u64 k_param_0,\n\t.param .f32 k_param_1\n)\n{ ret; }"
    newer = ".visible .entry k(\n\t.param .u64 .ptr .align 1 k_param_0,\n\t.param .f32 k_param_1\n)\n{ ret; }"

    assert kinds(read_ptx(older)["k"]) == [("word", 8), ("float", 4)]
    assert kinds(read_ptx(newer)["k"]) == [("pointer", 8), ("float", 4)]


def test_ptx_structures_are_bytes_and_alignment_is_no_size() -> None:
    text = ".entry k(.param .align 16 .b8 k_param_0[48], .param .align 4 .u32 k_param_1)"

    assert kinds(read_ptx(text)["k"]) == [("bytes", 48), ("integer", 4)]


@pytest.mark.parametrize(
    ("declared", "kind"),
    [
        (".u8", ("integer", 1)),
        (".s16", ("signed", 2)),
        (".u32", ("integer", 4)),
        (".u64", ("word", 8)),
        (".s64", ("signed", 8)),
        (".b8", ("bits", 1)),
        (".b64", ("bits", 8)),
        (".f16", ("float", 2)),
        (".bf16", ("bfloat16", 2)),
        (".f64", ("float", 8)),
        (".u64 .ptr .global .align 16", ("pointer", 8)),
    ],
)
def test_ptx_type(declared: str, kind: tuple[str, int]) -> None:
    assert kinds(read_ptx(f".weak .entry k(.param {declared} x)")["k"]) == [kind]


def test_ptx_kernels_without_parameters() -> None:
    assert read_ptx(".visible .entry a()\n{ ret; }\n.visible .entry b\n{ ret; }") == {"a": (), "b": ()}


def test_ptx_comments_and_strings_declare_nothing() -> None:
    text = """
    // .entry commented(.param .u32 x)
    /* .entry also_commented(
       .param .u32 x) */
    .file 1 "/a/*.entry in_a_name(.param .u32 x)"
    .visible .entry real( // .param .u32 no,
        .param .u32 x /* , .param .u32 y */
    )
    """

    found = read_ptx(text)

    assert list(found) == ["real"]
    assert kinds(found["real"]) == [("integer", 4)]


def test_ptx_parameter_of_a_type_that_is_not_known_leaves_the_sizes_to_the_driver() -> None:
    assert read_ptx(".entry k(.param .u32 a, .param .texref t)") == {"k": None}


def test_names_in_a_signature() -> None:
    types = parse("int8, uint16,int32 , uint64, float16, bfloat16, float64, pointer, bytes[12]")

    assert [each.size for each in types] == [1, 2, 4, 8, 2, 2, 8, 8, 12]
    assert [str(each) for each in types][-2:] == ["pointer", "bytes[12]"]


def test_empty_signature_is_of_a_kernel_without_parameters() -> None:
    assert parse("") == () == parse([])


def test_signature_of_numpy_and_ctypes_types() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_double))

    structure = np.dtype([("a", "i4"), ("b", "f8")])

    types = parse(
        ["pointer", np.float32, np.dtype("i8"), ctypes.c_uint16, bool, structure, Pair, np.complex64]
    )

    assert kinds(types) == [
        ("pointer", 8),
        ("float", 4),
        ("signed", 8),
        ("unsigned", 2),
        ("unsigned", 1),
        ("bytes", 12),
        ("bytes", 16),
        ("bytes", 8),
    ]


@pytest.mark.parametrize("name", ["int", "float", "double", "int32*", "bytes[]", "int32,", ""])
def test_name_that_is_none_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(gf.KernelArgumentError, match=r"expected int8, .*pointer, or bytes\[N\]"):
        parse(f"int32, {name}")


def test_item_that_is_no_type_is_refused() -> None:
    with pytest.raises(gf.KernelArgumentError, match="expected a name such as 'int32', a NumPy dtype"):
        parse([object()])


@pytest.mark.parametrize("length", ["k_param_0", "0x", "010_0", "0"])
def test_ptx_array_without_a_readable_length_is_left_to_the_driver(length: str) -> None:
    assert read_ptx(f".entry k(.param .align 8 .b8 a[{length}])") == {"k": None}
