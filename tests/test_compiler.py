from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpufleet import compiler, fatbin
from gpufleet.compiler import UnknownArchitecture, compile_source
from gpufleet.errors import CompileError

FILL = 'extern "C" __global__ void fill(int *p, int value) { p[threadIdx.x] = value; }\n'


def compile_error(source: str, **arguments: Any) -> CompileError:
    """Compile what should not compile."""
    with pytest.raises(CompileError) as raised:
        compile_source(source, **{"arch": 90, "target": "cubin", **arguments})
    return raised.value


def test_a_cubin_comes_with_its_ptx() -> None:
    result = compile_source(FILL, arch=90, target="cubin")
    assert fatbin.identify(result.code) == "cubin"
    assert fatbin.cubin_arch(result.code) == 90
    assert fatbin.cubin_kernels(result.code) == ["fill"]
    assert result.ptx == compile_source(FILL, arch=90, target="ptx").code
    assert b".target sm_90\n" in result.ptx
    assert b"\0" not in result.ptx
    assert result.log == ""


def test_every_architecture_of_nvrtc_can_be_told_from_its_cubin() -> None:
    archs = compiler.supported_archs()
    assert [fatbin.cubin_arch(compile_source(FILL, arch=a, target="cubin").code) for a in archs] == list(
        archs
    )


@pytest.mark.parametrize("arch", [90, "90", "sm_90", "compute_90", " 90 "])
def test_an_architecture_may_be_written_as_cuda_users_do(arch: int | str) -> None:
    assert b".target sm_90\n" in compile_source(FILL, arch=arch, target="ptx").code


def test_an_architecture_may_have_a_suffix() -> None:
    assert b".target sm_90a" in compile_source(FILL, arch="90a", target="ptx").code


@pytest.mark.parametrize("arch", [70, "75a", "90f", "sm90", "9.0", "", "native", -90])
def test_an_unknown_architecture_names_the_known_ones(arch: int | str) -> None:
    error = compile_error(FILL, arch=arch)
    assert isinstance(error, UnknownArchitecture)
    assert repr(str(arch)) in str(error)
    assert "75, 80, 86" in str(error)


def test_an_error_shows_its_line_and_a_caret() -> None:
    error = compile_error(
        "__global__ void k(int *p)\n{\n    *p = nothing;\n    oops;\n}\n", name="folder/k.cu"
    )
    assert str(error) == (
        'k.cu does not compile for sm_90: line 3: identifier "nothing" is undefined (2 errors in all)\n'
        "      *p = nothing;\n"
        "           ^"
    )
    assert 'k.cu(4): error: identifier "oops" is undefined' in error.log
    assert pickle.loads(pickle.dumps(error)).log == error.log


def test_an_error_in_an_included_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "broken.h").write_text("\n\nint f( {\n")
    error = compile_error('#include "broken.h"\n', include_dirs=[tmp_path])
    assert f"line 3 of {tmp_path / 'broken.h'}: " in str(error)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('__global__ void k(int *p) { asm("frob %0, 1;" : "=r"(*p)); }', "any known instruction: 'frob'"),
        ("extern __device__ int f(); __global__ void k(int *p) { *p = f(); }", "Unresolved extern function"),
        ("#error not today\n", "line 1: #error directive: not today"),
        ("int main() { return 0; }", "A function without execution space annotations"),
        ("__device__ int", "expected an identifier"),
    ],
)
def test_errors_of_every_stage_are_in_the_first_line(source: str, message: str) -> None:
    assert message in str(compile_error(source)).splitlines()[0]


def test_an_unknown_option_is_named() -> None:
    assert "unrecognized option --frob" in str(compile_error(FILL, options=["--frob"]))


def test_warnings_are_in_the_log() -> None:
    result = compile_source("#warning mind the gap\n" + FILL, arch=90, target="ptx")
    assert "mind the gap" in result.log


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    error = compile_error('#include "helper.cuh"\n', include_dirs=[tmp_path])
    assert "included file helper.cuh was not found" in str(error)
    assert str(tmp_path) in str(error)


def test_without_cuda_headers_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "include_paths", list)
    error = compile_error("#include <cuda_fp16.h>\n")
    assert "searched: no folder at all" in str(error)
    assert "pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl" in str(error)


def test_cuda_headers_are_found_where_they_are_installed() -> None:
    if not compiler.include_paths():
        pytest.skip("no CUDA headers are installed")
    source = "#include <cuda_fp16.h>\n__global__ void k(__half *p) { *p = __float2half(2); }\n"
    assert b".b16" in compile_source(source, arch=75, target="ptx").code


def test_nothing_is_included_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper.cuh").write_text(FILL)
    monkeypatch.chdir(tmp_path)
    assert "was not found" in str(compile_error('#include "helper.cuh"\n'))
    result = compile_source('#include "helper.cuh"\n', arch=90, target="cubin", include_dirs=["."])
    assert fatbin.cubin_kernels(result.code) == ["fill"]


def test_headers_include_what_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "first.cuh").write_text('#include "second.cuh"\n')
    (tmp_path / "part" / "second.cuh").write_text(FILL)
    result = compile_source('#include "part/first.cuh"\n', arch=90, target="cubin", include_dirs=[tmp_path])
    assert fatbin.cubin_kernels(result.code) == ["fill"]


@pytest.mark.parametrize(
    ("header", "instead"),
    [("stdint.h", "<cuda/std/cstdint>"), ("cfloat", "<cuda/std/cfloat>"), ("array", "<cuda/std/array>")],
)
def test_a_header_of_the_host_names_the_devices(header: str, instead: str) -> None:
    error = compile_error(f"#include <{header}>\n")
    assert f"{header} belongs to the host's compiler" in str(error)
    assert f"{instead}, which comes with `pip install nvidia-cuda-cccl`" in str(error)


@pytest.mark.parametrize("header", ["math.h", "cstdio", "assert.h"])
def test_what_is_built_in_needs_no_header(header: str) -> None:
    source = (
        f'#include <{header}>\n__global__ void k(float *p) {{ printf("k"); assert(*p); *p = sinf(*p); }}\n'
    )
    assert "leave the #include out" in str(compile_error(source))
    assert compile_source(source.partition("\n")[2], arch=90, target="ptx").log == ""


def test_the_source_is_called_by_its_name_alone() -> None:
    source = '#warning mind the gap\nextern "C" __global__ void k(const char **name) { *name = __FILE__; }\n'
    result = compile_source(source, arch=90, target="ptx", name='/a folder/k "1".cu')
    assert result.log.startswith('k "1".cu(1): warning')
    assert ", ".join(str(byte) for byte in b'k "1".cu').encode() in result.code


def test_templates_are_instantiated_by_name() -> None:
    source = "template <typename T> __global__ void scale(T *p) { *p *= 2; }\n"
    result = compile_source(
        source, arch=90, target="cubin", name_expressions=["scale<float>", "scale<unsigned int>"]
    )
    assert result.names == {"scale<float>": "_Z5scaleIfEvPT_", "scale<unsigned int>": "_Z5scaleIjEvPT_"}
    assert sorted(fatbin.cubin_kernels(result.code)) == sorted(result.names.values())


def test_options_and_definitions_reach_the_compiler() -> None:
    source = '__constant__ int n = N;\nextern "C" __global__ void k(float *p) { *p = n / *p; }\n'
    result = compile_source(source, arch=90, target="ptx", options=["-DN=4711", "--use_fast_math"])
    assert b"= 4711" in result.code
    assert b"div.approx.ftz.f32" in result.code


def test_debug_and_line_information() -> None:
    plain = compile_source(FILL, arch=90, target="ptx").code
    assert b".loc" not in plain
    assert b".target sm_90, debug" in compile_source(FILL, arch=90, target="ptx", debug=True).code
    lines = compile_source(FILL, arch=90, target="ptx", line_info=True).code
    assert b".loc" in lines
    assert b"debug" not in lines.split(b".address_size")[0]


def test_the_result_depends_on_the_base_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "namespace { __device__ int hidden[4]; }\n__global__ void k(int *p) { *p = hidden[*p]; }\n"
    first = compile_source(source, arch=90, target="cubin", name="/here/k.cu").code
    monkeypatch.chdir(tmp_path)
    assert compile_source(source, arch=90, target="cubin", name="k.cu").code == first


def test_many_threads_compile_at_once() -> None:
    sources = [FILL + f"__global__ void k{i}(int *p) {{ *p = {i}; }}\n" for i in range(8)]

    def kernels(source: str) -> list[str]:
        return fatbin.cubin_kernels(compile_source(source, arch=90, target="cubin").code)

    with ThreadPoolExecutor(8) as executor:
        found = list(executor.map(kernels, sources))
    assert [sorted(names) for names in found] == [[f"_Z2k{i}Pi", "fill"] for i in range(8)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int a;\0int b;", "kernel.cu has a NUL character at byte 6"),
        ("// \udce9", "kernel.cu has a character that UTF-8 cannot express, at position 3"),
    ],
)
def test_what_nvrtc_would_misread_is_refused(source: str, message: str) -> None:
    assert message in str(compile_error(source))


def test_a_file_that_is_not_utf8_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_bytes("// caf\xe9\n".encode("latin1"))
    with pytest.raises(CompileError, match=r"k\.cu is not UTF-8 text \(byte 6 is 0xe9\).*iconv -f latin1"):
        compiler.read_source(path)


@pytest.mark.parametrize("target", ["ptx", "cubin"])
def test_what_is_compiled_already_is_no_source(tmp_path: Path, target: Any) -> None:
    path = tmp_path / "k.cu"
    path.write_bytes(compile_source(FILL, arch=90, target=target).code)
    with pytest.raises(CompileError, match=rf"k\.cu is no CUDA C\+\+: it is compiled already \({target}\)"):
        compiler.read_source(path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_bytes(b"\xef\xbb\xbf" + FILL.encode())
    assert compiler.read_source(path) == FILL


def test_without_nvrtc_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc
    from cuda.pathfinder import DynamicLibNotFoundError

    def not_found() -> None:
        raise DynamicLibNotFoundError("nvrtc")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", not_found)
    compiler._nvrtc.cache_clear()
    assert "pip install 'nvidia-cuda-nvrtc>=13,<14'" in str(compile_error(FILL))


def test_the_version_is_that_of_cuda_13() -> None:
    assert compiler.nvrtc_version()[0] == 13
