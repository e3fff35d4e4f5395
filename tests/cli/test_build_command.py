"""What `gpufleet build` prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpufleet import fatbin
from gpufleet.cli import main

FILL = 'extern "C" __global__ void fill(int *p, int value) { p[threadIdx.x] = value; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with one source the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fill.cu").write_text(FILL)
    return tmp_path


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["build", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def targets(path: Path) -> list[str]:
    return [f"{entry.kind} {entry.target}" for entry in fatbin.read_file(path)]


def test_success_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "fill.cu", "-o", "k.fatbin")
    archs = [75, 80, 86, 87, 89, 90, 100, 110, 120]
    size = (folder / "k.fatbin").stat().st_size
    listed = ", ".join(f"sm_{arch}" for arch in archs)
    line = f"k.fatbin  {size:,} bytes  machine code for {listed}; PTX for sm_75; kernels: fill\n"
    assert (code, out, err) == (0, line, "")
    assert targets(folder / "k.fatbin") == [f"cubin sm_{arch}" for arch in archs] + ["ptx sm_75"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--arch", "80,90a"], ["cubin sm_80", "cubin sm_90a", "ptx sm_75"]),
        (["--arch", "90", "--arch", "80", "--ptx", "90"], ["cubin sm_80", "cubin sm_90", "ptx sm_90"]),
        (["--arch=90", "--ptx=none"], ["cubin sm_90"]),
        (["--arch", "none", "--ptx", "75, 120"], ["ptx sm_75", "ptx sm_120"]),
    ],
)
def test_architectures_are_lists(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: list[str]
) -> None:
    code, _, err = outcome(capsys, "fill.cu", "-o", "k.fatbin", *arguments)
    assert (code, err) == (0, "")
    assert targets(folder / "k.fatbin") == expected


def test_the_suffix_says_what_to_build(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "fill.cu", "-o", "k.cubin", "--arch", "90")[0] == 0
    assert fatbin.identify((folder / "k.cubin").read_bytes()) == "cubin"
    assert outcome(capsys, "fill.cu", "-o", "k.ptx", "--ptx", "75")[0] == 0
    assert fatbin.identify((folder / "k.ptx").read_bytes()) == "ptx"


@pytest.mark.parametrize(
    ("arguments", "target"),
    [([], 75), (["--arch", "none"], 75), (["--arch", "90"], 90), (["--ptx", "120"], 120)],
)
def test_ptx_needs_no_option(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], target: int
) -> None:
    code, out, _ = outcome(capsys, "fill.cu", "-o", "k.ptx", *arguments)
    assert code == 0
    assert out.endswith(f"bytes  PTX for sm_{target}; kernels: fill\n")
    assert f".target sm_{target}\n" in (folder / "k.ptx").read_text()


def test_the_line_names_few_kernels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "fill.cu").write_text("\n".join(FILL.replace("fill", f"fill{number}") for number in range(20)))
    assert "fill7 and 12 more" in outcome(capsys, "fill.cu", "-o", "k.ptx")[1]


def test_macros_folders_and_debug(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "include").mkdir()
    (folder / "include" / "more.cuh").write_text("constexpr int more = MORE;\n")
    (folder / "k.cu").write_text(
        '#include "more.cuh"\nextern "C" __global__ void k(int *p) { *p = SAID + more; }\n'
    )
    arguments = ["k.cu", "-o", "k.ptx", "--ptx", "75", "-D", "SAID=4000", "-DMORE=711", "-Iinclude"]
    assert outcome(capsys, *arguments)[::2] == (0, "")
    assert "4711" in (folder / "k.ptx").read_text()
    assert outcome(capsys, *arguments, "-G")[::2] == (0, "")
    assert ".target sm_75, debug" in (folder / "k.ptx").read_text()


def test_verbose_says_what_the_file_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "fill.cu", "-o", "k.fatbin", "--arch", "90", "--verbose")
    assert (code, err) == (0, "")
    assert "machine code for sm_90, 3." in out
    assert "PTX for sm_75, " in out
    assert "built with NVRTC 13." in out
    assert out.splitlines()[-1].startswith("k.fatbin")
    assert out.splitlines()[-1].endswith("kernels: fill")


def test_json_is_one_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "fill.cu", "-o", "k.fatbin", "--arch", "90", "--json", "--verbose")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["output"] == str(folder / "k.fatbin")
    assert document["size"] == (folder / "k.fatbin").stat().st_size
    assert document["kernels"] == ["fill"]
    assert [(e["kind"], e["target"]) for e in document["entries"]] == [("cubin", "sm_90"), ("ptx", "sm_75")]


@pytest.mark.parametrize(
    ("stage", "tells"),
    [
        ("ptx", ".entry fill"),
        ("llvm", "define void @gf_"),
        ("optimized", "define void @gf_"),
        ("asm", ".section"),
    ],
)
def test_emit_prints_a_stage_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], stage: str, tells: str
) -> None:
    code, out, err = outcome(capsys, "fill.cu", "--emit", stage)
    assert (code, err) == (0, "")
    assert tells in out
    assert os.listdir(folder) == ["fill.cu"]


def test_warnings_go_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "fill.cu").write_text("#warning mind the gap\n" + FILL)
    code, out, err = outcome(capsys, "fill.cu", "-o", "k.fatbin", "--arch", "90")
    assert code == 0
    assert "mind the gap" not in out
    assert "mind the gap" in err


def test_a_source_without_kernels_is_built_with_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "fill.cu").write_text("template <typename T> __global__ void scale(T *p) { *p *= 2; }\n")
    code, out, err = outcome(capsys, "fill.cu", "-o", "k.ptx", "--ptx", "75")
    assert code == 0
    assert out.endswith("kernels: none\n")
    assert err == "gpufleet: fill.cu has no kernel: mark it __global__, and instantiate templates\n"


def test_names_may_have_spaces_and_letters_of_any_language(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "é è").mkdir()
    (folder / "é è" / "a b.h").write_text("")
    (folder / "é è" / "k ü.cu").write_text(
        '#include "a b.h"\n__constant__ char text[] = TEXT; __constant__ int n = TWICE(4);\n' + FILL
    )
    arguments = ["é è/k ü.cu", "-o", "é è/ö.fatbin", "-D", 'TEXT="a b"', "-D", "TWICE(x)=x * 2", "-I", "é è"]
    assert outcome(capsys, *arguments)[::2] == (0, "")
    assert {entry.name for entry in fatbin.read_file(folder / "é è" / "ö.fatbin")} == {"k ü.cu"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.cu", "-o", "k.fatbin"], "missing.cu: No such file or directory"),
        ([".", "-o", "k.fatbin"], ".: Is a directory"),
        (["fill.cu", "-o", "k.so"], "k.so must end in .fatbin, .cubin or .ptx"),
        (["fill.cu", "-o", "missing/k.fatbin"], "does not exist; make it first"),
        (["fill.cu", "-o", "k.fatbin", "--arch", "70"], "'70' is no architecture that NVRTC"),
        (["fill.cu", "-o", "k.fatbin", "--arch", "80,foo"], "'foo' is no architecture that NVRTC"),
        (["fill.cu", "-o", "k.fatbin", "--ptx", "75x"], "it knows 75, 80, 86"),
        (["fill.cu", "-o", "k.fatbin", "--arch", "75a"], "'75a' is no architecture"),
        (["fill.cu", "-o", "k.fatbin", "--arch", "none", "--ptx", "none"], "No architecture is named"),
        (["fill.cu", "-o", "k.fatbin", "-D", "1=2"], "'1=2' is no macro: write -D NAME or -D NAME=VALUE."),
        (["fill.cu", "-o", "k.fatbin", "-D", ""], "'' is no macro"),
        (["fill.cu", "-o", "k.cubin", "--arch", "80,90"], "asked for was --arch 80,90"),
        (["fill.cu", "-o", "k.ptx", "--ptx", "80,90"], "asked for was --ptx 80,90"),
        (["fill.cu"], "No output is named: write -o k.fatbin, k.cubin or k.ptx."),
        (["fill.cu", "--emit", "asm", "-o", "k.s"], "leave out --output and --json"),
        (["fill.cu", "--emit", "sass"], "expected one of ptx, llvm, optimized, asm"),
        (["fill.cu", "--emit", "asm", "--kernel", "other"], "there is no kernel 'other'"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = outcome(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("gpufleet: ")
    assert err.count("\n") == 1
    assert os.listdir(folder) == ["fill.cu"]


@pytest.mark.parametrize(
    "arguments",
    [[], ["fill.cu", "-o"], ["fill.cu", "-o", "k.fatbin", "--frob"], ["a", "b", "-o", "c"]],
)
def test_what_the_parser_refuses_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = outcome(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "Error" in err


def test_a_source_that_does_not_compile_prints_the_compilers_log(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "k.fatbin").write_bytes(b"the old one")
    (folder / "fill.cu").write_text("__global__ void k(int *p)\n{\n    *p = nothing;\n    oops;\n}\n")
    code, out, err = outcome(capsys, "fill.cu", "-o", "k.fatbin")
    assert (code, out) == (1, "")
    first, _, log = err.partition("\n\n")
    assert first == (
        "gpufleet: fill.cu does not compile for sm_75: line 3: "
        'identifier "nothing" is undefined (2 errors in all)'
    )
    assert log.count("      *p = nothing;\n           ^\n") == 1
    assert 'fill.cu(4): error: identifier "oops" is undefined' in log
    assert (folder / "k.fatbin").read_bytes() == b"the old one"
    assert sorted(os.listdir(folder)) == ["fill.cu", "k.fatbin"]


def test_failures_in_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "missing.cu", "-o", "k.fatbin", "--json")
    assert code == 2
    assert json.loads(out)["message"] == "missing.cu: No such file or directory"
    (folder / "fill.cu").write_text("oops\n")
    code, out, _ = outcome(capsys, "fill.cu", "-o", "k.fatbin", "--json")
    assert code == 1
    document = json.loads(out)
    assert document["error"] == "CompileError"
    assert "fill.cu(1): error" in document["log"]


def test_a_source_that_is_no_text_names_the_cure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "fill.cu").write_bytes(b"// caf\xe9\n")
    code, _, err = outcome(capsys, "fill.cu", "-o", "k.fatbin")
    assert code == 1
    assert "fill.cu is not UTF-8 text" in err
    assert "iconv" in err


@pytest.mark.parametrize("package", ["nvidia-cuda-nvrtc", "nvidia-nvfatbin"])
def test_a_missing_library_names_the_package(folder: Path, package: str) -> None:
    # In a process of its own, since a library that was found once stays found.
    library = package.removeprefix("nvidia-").removeprefix("cuda-")
    program = f"""
import sys
from cuda import pathfinder
from cuda.bindings import nvrtc, nvfatbin
def missing(*_):
    raise pathfinder.DynamicLibNotFoundError("{library}")
{library}.{"nvrtcVersion" if library == "nvrtc" else "version"} = missing
from gpufleet.cli import main
sys.exit(main(["build", "fill.cu", "-o", "k.fatbin", "--arch", "90"]))
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"pip install '{package}>=13,<14'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert os.listdir(folder) == ["fill.cu"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user who may not write everywhere")
def test_a_folder_that_cannot_be_written_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "locked").mkdir(mode=0o500)
    code, _, err = outcome(capsys, "fill.cu", "-o", "locked/k.fatbin")
    assert code == 2
    assert "cannot be written to" in err
