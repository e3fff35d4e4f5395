"""Which kernel a name means."""

from __future__ import annotations

import pytest

import gpufleet as gf
from gpufleet.names import base_name, find_kernel

NAMES = ["saxpy", "_Z5plainPi", "_Z4tmplIiEvPT_S0_", "_Z4tmplIfEvPT_S0_", "_ZN2ns5innerEi"]


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("saxpy", "saxpy"),
        ("_Z5saxpyifPKfPf", "saxpy"),
        ("_ZN2ns5innerEi", "inner"),
        ("_ZN1a1b4deepEPf", "deep"),
        ("_ZL6hiddenPi", "hidden"),
        ("_ZN12_GLOBAL__N_16hiddenEPi", "hidden"),
        ("_Z4tmplIiEvPT_S0_", "tmpl"),
        ("_ZN2ns4tmplIfLi3EEEvPT_", "tmpl"),
        ("_Z", "_Z"),
    ],
)
def test_base_name(mangled: str, name: str) -> None:
    assert base_name(mangled) == name


def test_exact_name_wins() -> None:
    assert find_kernel("k", ["_Z1ki", "k"], "the image") == "k"


@pytest.mark.parametrize(("name", "symbol"), [("plain", "_Z5plainPi"), ("inner", "_ZN2ns5innerEi")])
def test_plain_name_finds_the_only_kernel_of_that_name(name: str, symbol: str) -> None:
    assert find_kernel(name, NAMES, "the image") == symbol


def test_plain_name_of_several_kernels_is_refused_with_their_names() -> None:
    with pytest.raises(gf.ImageError, match=r"2 kernels called 'tmpl'.*_Z4tmplIfEvPT_S0_, _Z4tmplIiEvPT_S0_"):
        find_kernel("tmpl", NAMES, "the image")


def test_unknown_name_is_refused_with_the_names_that_exist_and_the_closest_one() -> None:
    with pytest.raises(gf.ImageError) as caught:
        find_kernel("saxpi", NAMES, "k.fatbin")

    assert str(caught.value).startswith("k.fatbin has no kernel 'saxpi'; it has saxpy, ")
    assert str(caught.value).endswith("(did you mean 'saxpy'?)")
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("name", ["plain<int>", "ns::plain", "plain(int *)", "plian<int>(int *)"])
def test_a_name_as_cpp_writes_it_leads_to_the_plain_one(name: str) -> None:
    with pytest.raises(gf.ImageError, match=r"did you mean 'plain'\?"):
        find_kernel(name, NAMES, "the image")


def test_long_list_of_names_is_cut() -> None:
    with pytest.raises(gf.ImageError, match="and 80 more"):
        find_kernel("zzz", [f"kernel{index}" for index in range(100)], "the image")


def test_image_without_kernels() -> None:
    with pytest.raises(gf.ImageError, match="and no other: is it __global__"):
        find_kernel("k", [], "the image")
