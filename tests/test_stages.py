"""What a kernel becomes on its way to a virtual GPU can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpufleet as gf
from gpufleet.stages import STAGES, emit

SOURCE = """
extern "C" __global__ void twice(int n, float *x) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }
"""
TELLS = {
    "ptx": ".entry twice",
    "llvm": "define void @gf_",
    "optimized": "define void @gf_",
    "asm": ".section",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "twice.cu"
    path.write_text(SOURCE, encoding="utf-8")
    return path


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_can_be_read(source: Path, stage: str) -> None:
    text = emit(source, stage)
    assert TELLS[stage] in text
    assert "\0" not in text
    if stage != "ptx":
        assert "twice: threads that stay together" in text
        assert "twice: threads that have parted" in text


def test_optimised_is_shorter_than_generated(source: Path) -> None:
    assert len(emit(source, "optimized")) < len(emit(source, "llvm"))


def test_ptx_is_taken_as_it_is(source: Path, tmp_path: Path) -> None:
    ptx = tmp_path / "twice.ptx"
    ptx.write_text(emit(source, "ptx"), encoding="utf-8")
    assert emit(ptx, "asm") == emit(source, "asm")


def test_kernel_is_named_where_there_are_several(tmp_path: Path) -> None:
    path = tmp_path / "two.cu"
    path.write_text(SOURCE + SOURCE.replace("twice", "other"), encoding="utf-8")
    with pytest.raises(gf.ImageError, match=r"must be named .* there are .*twice"):
        emit(path, "llvm")
    assert "other: threads" in emit(path, "llvm", kernel="other")
    with pytest.raises(gf.ImageError, match="there is no kernel 'third': expected one of"):
        emit(path, "llvm", kernel="third")


def test_nonsense_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stage is 'nothing': expected one of ptx, llvm, optimized, asm"):
        emit(source, "nothing")
    bad = tmp_path / "bad.ptx"
    bad.write_text("nothing", encoding="utf-8")
    with pytest.raises(gf.ImageError):
        emit(bad, "llvm")
    tensor = tmp_path / "tensor.ptx"
    tensor.write_text(
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k() { .reg .b64 %rd<2>; "
        ".reg .b32 %r<2>; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%rd1]; ret; }",
        encoding="utf-8",
    )
    with pytest.raises(gf.UnsupportedPtx, match="ldmatrix"):
        emit(tensor, "llvm")
