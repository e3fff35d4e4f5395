from __future__ import annotations

import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gpufleet import fatbin
from gpufleet.build import DEFAULT_ARCHS, DEFAULT_PTX, BuildError, build
from gpufleet.errors import CompileError

FILL = 'extern "C" __global__ void fill(int *p, int value) { p[threadIdx.x] = value; }\n'
KERNELS = Path(__file__).parents[1] / "src" / "gpufleet" / "kernels"

# What made the shipped image; another version writes other bytes.
SHIPPED_WITH = {"nvidia-cuda-nvrtc": "13.0.88", "nvidia-nvfatbin": "13.0.85"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "fill.cu"
    path.write_text(FILL)
    return path


def test_a_fatbin_has_code_for_every_architecture_and_ptx(source: Path, tmp_path: Path) -> None:
    result = build(source, tmp_path / "fill.fatbin")
    assert result.output == tmp_path / "fill.fatbin"
    assert result.size == result.output.stat().st_size
    entries = fatbin.read_file(result.output)
    assert tuple(entries) == result.entries
    cubins = [entry for entry in entries if entry.kind == "cubin"]
    assert tuple(entry.arch for entry in cubins) == DEFAULT_ARCHS
    for entry in cubins:
        assert fatbin.cubin_arch(entry.data()) == entry.arch
        assert fatbin.cubin_kernels(entry.data()) == ["fill"]
    texts = [entry for entry in entries if entry.kind == "ptx"]
    assert tuple(entry.arch for entry in texts) == DEFAULT_PTX
    assert ".visible .entry fill(" in texts[0].text()


def test_architectures_and_ptx_can_be_chosen(source: Path, tmp_path: Path) -> None:
    result = build(source, tmp_path / "k.fatbin", archs=[90, "90a", "sm_75"], ptx=[120, "80"])
    assert [(e.kind, e.target) for e in result.entries] == [
        ("cubin", "sm_75"),
        ("cubin", "sm_90"),
        ("cubin", "sm_90a"),
        ("ptx", "sm_80"),
        ("ptx", "sm_120"),
    ]


def test_ptx_alone_and_code_alone(source: Path, tmp_path: Path) -> None:
    assert [e.kind for e in build(source, tmp_path / "p.fatbin", archs=[], ptx=[75]).entries] == ["ptx"]
    assert [e.kind for e in build(source, tmp_path / "c.fatbin", archs=[75], ptx=[]).entries] == ["cubin"]


def test_a_cubin_or_ptx_file_for_one_architecture(source: Path, tmp_path: Path) -> None:
    cubin = build(source, tmp_path / "fill.cubin", archs=[90]).output.read_bytes()
    assert (fatbin.identify(cubin), fatbin.cubin_arch(cubin)) == ("cubin", 90)
    ptx = build(source, tmp_path / "fill.ptx", ptx=[80]).output.read_bytes()
    assert fatbin.identify(ptx) == "ptx"
    assert b".target sm_80\n" in ptx
    assert build(source, tmp_path / "same.ptx", archs=[80]).output.read_bytes() == ptx


def test_the_same_source_gives_the_same_bytes_everywhere(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(source, tmp_path / "a.fatbin", archs=[75, 90, 100]).output.read_bytes()
    elsewhere = tmp_path / "another folder"
    elsewhere.mkdir()
    (elsewhere / "fill.cu").write_text(FILL)
    monkeypatch.chdir(elsewhere)
    second = build("fill.cu", "b.fatbin", archs=["sm_100", 90, 75, 90]).output.read_bytes()
    assert second == first
    assert str(tmp_path).encode() not in first


def test_the_shipped_image_is_what_its_source_builds(tmp_path: Path) -> None:
    installed = {package: version(package) for package in SHIPPED_WITH}
    if installed != SHIPPED_WITH:
        pytest.skip(f"the shipped image was made with {SHIPPED_WITH}, installed is {installed}")
    result = build(KERNELS / "migrate.cu", tmp_path / "migrate.fatbin")
    assert result.output.read_bytes() == (KERNELS / "migrate.fatbin").read_bytes()


def test_the_shipped_image_fits_every_gpu_and_driver_580() -> None:
    entries = fatbin.read_file(KERNELS / "migrate.fatbin")
    assert [entry.arch for entry in entries if entry.kind == "cubin"] == [
        75,
        80,
        86,
        87,
        89,
        90,
        100,
        110,
        120,
    ]
    (text,) = [entry.text() for entry in entries if entry.kind == "ptx"]
    # Driver 580 refuses PTX that is newer than its own 9.0.
    assert ".version 9.0\n.target sm_75\n" in text
    assert ".entry countdown(" in text
    assert ".loc" not in text


def test_files_beside_the_source_can_be_included(source: Path, tmp_path: Path) -> None:
    (tmp_path / "value.cuh").write_text("constexpr int value = 4711;\n")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "more.cuh").write_text("constexpr int more = 1;\n")
    source.write_text(
        '#include "value.cuh"\n#include "more.cuh"\n'
        'extern "C" __global__ void k(int *p) { *p = value + more; }\n'
    )
    result = build(source, tmp_path / "k.ptx", ptx=[75], include_dirs=[tmp_path / "shared"])
    assert b"4712" in result.output.read_bytes()


def test_options_reach_the_compiler(source: Path, tmp_path: Path) -> None:
    source.write_text('extern "C" __global__ void k(int *p) { *p = N; }\n')
    result = build(source, tmp_path / "k.ptx", ptx=[75], options=["-DN=4711"])
    assert b"4711" in result.output.read_bytes()


def test_a_debug_build_says_so(source: Path, tmp_path: Path) -> None:
    result = build(source, tmp_path / "k.fatbin", archs=[90], ptx=[75], debug=True)
    assert ".target sm_75, debug" in result.entries[1].text()
    assert "-g" in result.entries[1].options


def test_warnings_come_once(source: Path, tmp_path: Path) -> None:
    source.write_text("#warning mind the gap\n" + FILL)
    result = build(source, tmp_path / "k.fatbin", archs=[75, 80, 90])
    assert result.log.count("warning directive: mind the gap") == 1


def test_the_kernels_of_every_architecture_are_named(source: Path, tmp_path: Path) -> None:
    source.write_text(
        "template <typename T> __global__ void scale(T *p) { *p *= 2; }\n"
        "template __global__ void scale<float>(float *);\n"
        "#if __CUDA_ARCH__ >= 900\n" + FILL + "#endif\n"
    )
    result = build(source, tmp_path / "k.fatbin", archs=[75, 90])
    assert result.kernels == ("_Z5scaleIfEvPT_", "fill")
    source.write_text("template <typename T> __global__ void scale(T *p) { *p *= 2; }\n")
    assert build(source, tmp_path / "k.fatbin").kernels == ()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems allow Unicode names only")
def test_a_file_name_that_is_no_unicode_is_built_all_the_same(source: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9.cu"))
    source.rename(odd)
    assert {entry.name for entry in build(odd, tmp_path / "k.fatbin").entries} == {"?.cu"}


def test_an_interrupted_build_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpufleet.build.compile_source", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(source, tmp_path / "k.fatbin")
    assert os.listdir(tmp_path) == ["fill.cu"]


def test_many_builds_of_one_file_leave_one_whole_file(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "k.fatbin"
    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(lambda arch: build(source, output, [arch]), [75, 80, 90, 100]))
    assert tuple(fatbin.read_file(output)) in [result.entries for result in results]
    assert sorted(os.listdir(tmp_path)) == ["fill.cu", "k.fatbin"]


@pytest.mark.parametrize(
    ("output", "archs", "ptx", "message"),
    [
        ("k.so", None, None, r"k\.so must end in \.fatbin, \.cubin or \.ptx"),
        ("k", [90], None, r"k must end in"),
        (
            "k.cubin",
            None,
            None,
            r"No architecture is named to build k\.cubin for; name one with --arch, such as",
        ),
        ("k.ptx", None, [], r"No architecture is named to build k\.ptx for; name one with --ptx, such as"),
        ("k.fatbin", [], [], r"No architecture is named"),
        ("k.cubin", [80, 90], None, r"exactly one architecture and no PTX.* asked for was --arch 80,90"),
        ("k.cubin", [80], [75], r"asked for was --arch 80 --ptx 75"),
        ("k.cubin", None, [75], r"asked for was --ptx 75"),
        ("k.ptx", None, [75, 80], r"PTX for exactly one architecture.* asked for was --ptx 75,80"),
        ("k.ptx", [80], [75], r"asked for was --arch 80 --ptx 75"),
        ("missing/k.fatbin", None, None, r"The folder .*missing does not exist"),
        ("folder.fatbin", None, None, r"folder\.fatbin is a folder"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    source: Path, tmp_path: Path, output: str, archs: list[int] | None, ptx: list[int] | None, message: str
) -> None:
    (tmp_path / "folder.fatbin").mkdir()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(BuildError, match=message):
        build(source, tmp_path / output, archs, ptx)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_source_that_does_not_compile_leaves_the_old_file(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "k.fatbin"
    output.write_bytes(b"the old one")
    source.write_text("#if __CUDA_ARCH__ >= 900\n#error too new\n#endif\n" + FILL)
    with pytest.raises(CompileError, match=r"fill\.cu does not compile for sm_90: line 2: .* too new"):
        build(source, output)
    assert output.read_bytes() == b"the old one"
    assert sorted(os.listdir(tmp_path)) == ["fill.cu", "k.fatbin"]


def test_a_failure_while_writing_leaves_the_old_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "k.fatbin"
    output.write_bytes(b"the old one")

    def full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"cannot be written \(No space left on device\): '.*k\.fatbin'"):
        build(source, output, archs=[90])
    assert output.read_bytes() == b"the old one"
    assert sorted(os.listdir(tmp_path)) == ["fill.cu", "k.fatbin"]


def test_the_file_is_readable_as_the_umask_says(source: Path, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        output = build(source, tmp_path / "k.fatbin", archs=[90]).output
    finally:
        os.umask(old)
    assert stat.S_IMODE(output.stat().st_mode) == 0o640


def test_a_link_to_the_output_stays_a_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "real.fatbin").touch()
    (tmp_path / "link.fatbin").symlink_to("real.fatbin")
    build(source, tmp_path / "link.fatbin", archs=[90])
    assert (tmp_path / "link.fatbin").is_symlink()
    assert fatbin.read_file(tmp_path / "real.fatbin")


def test_without_nvfatbin_the_cure_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import nvfatbin
    from cuda.pathfinder import DynamicLibNotFoundError

    def not_found() -> None:
        raise DynamicLibNotFoundError("nvfatbin")

    monkeypatch.setattr(nvfatbin, "version", not_found)
    with pytest.raises(CompileError, match="pip install 'nvidia-nvfatbin>=13,<14'"):
        build(source, tmp_path / "k.fatbin")


def test_bindings_without_nvfatbin_name_the_cure(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda.bindings

    # As cuda-bindings 13.0 and 13.1 are.
    monkeypatch.delattr(cuda.bindings, "nvfatbin", raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvfatbin", None)
    with pytest.raises(CompileError, match=r"pip install 'cuda-bindings>=13\.2,<14'"):
        build(source, tmp_path / "k.fatbin")
