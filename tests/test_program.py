"""Programs: where device code comes from, which kernels it has, and why a device does not take it."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
from gpufleet import compiler, fatbin
from gpufleet.build import build
from gpufleet.device import Device
from gpufleet.driver import Driver

FILL = 'extern "C" __global__ void fill(int *p, int value) { p[threadIdx.x] = value; }\n'
TWO = FILL + "__global__ void plain(int *p) { *p = 1; }\n"
DATA = Path(__file__).parent / "data"
FATBIN = DATA / "fatbins" / "default.fatbin"


def ptx(source: str = TWO, arch: int = 75) -> bytes:
    return compiler.compile_source(source, arch=arch, target="ptx").code


def cubin(arch: int, source: str = TWO) -> bytes:
    return compiler.compile_source(source, arch=arch, target="cubin").code


def filled(kernel: gf.Kernel, context: gf.Context, value: int) -> list[int]:
    """Run `fill` in a context and return what it wrote."""
    with context.alloc(32 * 4) as buffer:
        kernel.launch(1, 32, buffer, value, stream=context.main_stream)
        return list(buffer.to_numpy("i4"))


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Note the arguments of every call of a function."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, call)
    return calls


# Where code comes from


def test_source_text(context: gf.Context) -> None:
    assert filled(gf.Program.from_source(FILL).kernel("fill"), context, 7) == [7] * 32


@pytest.mark.parametrize("as_given", [Path, str, lambda path: f" {path} "])
def test_source_file(context: gf.Context, tmp_path: Path, as_given: Callable[[Path], Any]) -> None:
    path = tmp_path / "fill.cu"
    path.write_text(FILL)

    assert filled(gf.Program.from_source(as_given(path)).kernel("fill"), context, 7) == [7] * 32


def test_source_file_includes_what_lies_beside_it_and_in_named_folders(
    context: gf.Context, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "beside.h").write_text("#define BESIDE 40\n")
    (tmp_path / "elsewhere" / "named.h").write_text("#define NAMED 2\n")
    path = tmp_path / "sum.cu"
    path.write_text(
        '#include "beside.h"\n#include "named.h"\n' + FILL.replace("value;", "value * (BESIDE + NAMED);")
    )

    program = gf.Program.from_source(path, include_dirs=[tmp_path / "elsewhere"])

    assert filled(program.kernel("fill"), context, 1) == [42] * 32


def test_options_reach_the_compiler(context: gf.Context) -> None:
    program = gf.Program.from_source(FILL.replace("= value", "= value + N"), options=["-DN=5"])

    assert filled(program.kernel("fill"), context, 1) == [6] * 32


def test_making_a_program_of_source_compiles_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, compiler, "compile_source")

    gf.Program.from_source("this is not C++").kernel("fill")

    assert not calls


def test_source_that_does_not_compile_says_so_at_the_first_load(context: gf.Context) -> None:
    kernel = gf.Program.from_source(FILL.replace("value;", "valeu;")).kernel("fill")

    with pytest.raises(gf.CompileError, match='identifier "valeu" is undefined') as caught:
        kernel.load(context)
    assert "valeu" in caught.value.log


def test_source_is_compiled_once_for_all_threads_contexts_and_equal_devices(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, compiler, "compile_source")
    kernel = gf.Program.from_source(FILL).kernel("fill")
    contexts = [device.create_context() for device in gf.devices(driver)[:2]]
    results: list[list[int]] = []

    def work(index: int) -> None:
        results.append(filled(kernel, contexts[index % len(contexts)], 3))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in contexts:
        made.close()

    assert results == [[3] * 32] * 8
    assert len(calls) == 1


@pytest.mark.parametrize("suffix", [".ptx", ".fatbin", ".cubin"])
def test_file(context: gf.Context, tmp_path: Path, suffix: str) -> None:
    major, minor = context.device.compute_capability
    if suffix == ".cubin" and context.device.is_virtual:
        pytest.skip("virtual devices run PTX only")
    source = tmp_path / "fill.cu"
    source.write_text(FILL)
    path = tmp_path / f"fill{suffix}"
    archs = [10 * major + minor] if suffix == ".cubin" else [75]
    build(source, path, archs=archs if suffix != ".ptx" else [], ptx=[75] if suffix != ".cubin" else [])

    signature = "pointer, int32" if suffix == ".cubin" else None
    kernel = gf.Program.from_file(path).kernel("fill", signature=signature)

    assert filled(kernel, context, 9) == [9] * 32


def test_image_as_bytes_or_text(context: gf.Context) -> None:
    for image in (ptx(), ptx() + b"\0", bytearray(ptx()), ptx().decode()):
        assert filled(gf.Program.from_image(image).kernel("fill"), context, 4) == [4] * 32


def test_missing_file_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    for make in (gf.Program.from_file, gf.Program.from_source):
        with pytest.raises(
            gf.ImageError, match=r"there is no file 'nowhere\.cu': looked for /.*/nowhere\.cu"
        ):
            make("nowhere.cu")
    with pytest.raises(gf.ImageError, match=r"there is no file '/no/where\.fatbin'"):
        gf.Program.from_file("/no/where.fatbin")
    with pytest.raises(gf.ImageError, match="is not a file"):
        gf.Program.from_file(tmp_path)


def test_source_given_as_an_image_is_sent_to_the_right_place(tmp_path: Path) -> None:
    path = tmp_path / "fill.cu"
    path.write_text(FILL)

    with pytest.raises(gf.ImageError, match=r"use Program\.from_source"):
        gf.Program.from_file(path)


# What is no image


@pytest.mark.parametrize("content", [b"this is not a module", b"\x89PNG\r\n", bytes(100), FILL.encode()])
def test_garbage(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "garbage.fatbin"
    path.write_bytes(content)

    with pytest.raises(
        gf.ImageError, match=r"garbage\.fatbin is no image: it is neither PTX, a cubin nor a fatbin"
    ):
        gf.Program.from_file(path)


def test_empty_image() -> None:
    with pytest.raises(gf.ImageError, match="the image is no image: it is empty"):
        gf.Program.from_image(b"")


def test_host_program_is_no_image() -> None:
    with pytest.raises(gf.ImageError, match="ELF file without device code of its own"):
        gf.Program.from_file(Path(sys.executable).resolve())


@pytest.mark.parametrize("keep", [20, 100, 0.5, 0.99])
def test_truncated_fatbin(keep: float, tmp_path: Path) -> None:
    whole = FATBIN.read_bytes()
    path = tmp_path / "short.fatbin"
    path.write_bytes(whole[: int(keep if keep >= 1 else keep * len(whole))])

    with pytest.raises(gf.ImageError, match=r"short\.fatbin cannot be loaded\. The fatbin is cut short"):
        gf.Program.from_file(path)


def test_truncated_cubin() -> None:
    with pytest.raises(gf.ImageError, match="cut short"):
        gf.Program.from_image(cubin(75)[:-500])


def test_damaged_ptx() -> None:
    with pytest.raises(gf.ImageError, match="starts as PTX but has a NUL at byte 100: is it damaged"):
        gf.Program.from_image(ptx()[:100] + b"\0" + ptx()[100:])


def test_fatbin_whose_content_does_not_unpack() -> None:
    damaged = bytearray(FATBIN.read_bytes())
    for entry in fatbin.read(bytes(damaged)):
        at = damaged.find(entry.stored)
        damaged[at + 8 : at + len(entry.stored)] = bytes(len(entry.stored) - 8)

    with pytest.raises(gf.ImageError, match=r"the image cannot be loaded\. "):
        gf.Program.from_image(damaged).kernel("saxpy")


# What a device does not take


def test_cubin_for_another_architecture(context: gf.Context) -> None:
    other = 75 if context.device.compute_capability[0] != 7 else 80
    kernel = gf.Program.from_image(cubin(other)).kernel("fill", signature="pointer, int32")

    with pytest.raises(gf.ImageError) as caught:
        kernel.load(context)

    major, minor = context.device.compute_capability
    message = str(caught.value)
    assert f"has nothing that device 0 (sm_{major}{minor}) can run" in message
    assert f"it holds machine code for sm_{other}" in message
    assert "gpufleet build --ptx 75" in message or f"gpufleet build --arch {major}{minor}" in message


def test_fatbin_without_code_for_the_device(virtual: Driver, tmp_path: Path) -> None:
    source, path = tmp_path / "fill.cu", tmp_path / "fill.fatbin"
    source.write_text(FILL)
    build(source, path, archs=[90, 100], ptx=[])

    with Device(0, virtual).create_context() as context:
        kernel = gf.Program.from_file(path).kernel("fill", signature="pointer, int32")
        with pytest.raises(
            gf.ImageError, match=r"holds machine code for sm_90.*machine code for sm_100.*--ptx 75"
        ):
            kernel.load(context)
    context.close()


def test_ptx_newer_than_the_driver(context: gf.Context) -> None:
    image = b".version 99.0\n.target sm_75\n.address_size 64\n.visible .entry k() { ret; }\n"

    with pytest.raises(
        gf.ImageError, match=r"is of version 99\.0, newer than the .* driver takes .*: update the driver"
    ):
        gf.Program.from_image(image).kernel("k").load(context)


def test_ptx_for_a_newer_architecture(context: gf.Context) -> None:
    image = b".version 8.8\n.target sm_121\n.address_size 64\n.visible .entry k() { ret; }\n"
    if context.device.compute_capability >= (12, 1):
        pytest.skip("this device is new enough")

    with pytest.raises(gf.ImageError, match=r"does not assemble for device 0 .*it holds PTX for sm_121"):
        gf.Program.from_image(image).kernel("k").load(context)


def test_ptx_that_does_not_assemble_is_explained_by_the_drivers_log(context: gf.Context) -> None:
    image = b".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k() { bogus.u32 %r1; ret; }\n"

    with pytest.raises(gf.ImageError, match=r"does not assemble.*The driver says: .*(?s:bogus)"):
        gf.Program.from_image(image).kernel("k").load(context)


def test_ptx_that_virtual_devices_do_not_know_yet(virtual: Driver) -> None:
    image = """
    .version 8.0
    .target sm_90
    .address_size 64
    .visible .entry plain() { ret; }
    .visible .entry tensor() {
        .reg .b32 %r<3>;
        wgmma.fence.sync.aligned;
        ret;
    }
    """
    program = gf.Program.from_image(image)
    context = Device(0, virtual).create_context()

    program.kernel("plain").launch(1, 1, stream=context.main_stream)
    with pytest.raises(gf.UnsupportedPtx, match=r"kernel 'tensor' of the image cannot run: .*wgmma"):
        program.kernel("tensor").load(context)
    context.close()


def test_failed_load_leaves_nothing_behind(context: gf.Context) -> None:
    driver = context.driver
    bad = gf.Program.from_image(b".version 7.0\n.target sm_75\n.visible .entry k() { bogus; }").kernel("k")

    for _ in range(2):
        with pytest.raises(gf.ImageError):
            bad.load(context)
        assert int(driver.cuCtxGetCurrent()) == 0
    assert filled(gf.Program.from_image(ptx()).kernel("fill"), context, 1) == [1] * 32


# Kernels by name


def test_kernels_of_every_kind_of_image(driver: Driver, tmp_path: Path) -> None:
    names = ("fill", "_Z5plainPi")
    source, path = tmp_path / "two.cu", tmp_path / "two.fatbin"
    source.write_text(TWO)
    build(source, path, archs=[90], ptx=[75])

    assert sorted(gf.Program.from_image(ptx()).kernels) == sorted(names)
    assert sorted(gf.Program.from_image(cubin(90)).kernels) == sorted(names)
    assert sorted(gf.Program.from_file(path).kernels) == sorted(names)
    assert sorted(gf.Program.from_source(TWO, driver=driver).kernels) == sorted(names)


def test_missing_kernel_is_refused_at_once_with_the_names_that_exist() -> None:
    for image in (ptx(), cubin(90)):
        with pytest.raises(
            gf.ImageError, match=r"the image has no kernel 'fil'; it has fill.*\(did you mean 'fill'\?\)"
        ):
            gf.Program.from_image(image).kernel("fil")


def test_missing_kernel_of_source_is_refused_at_the_first_load(context: gf.Context) -> None:
    kernel = gf.Program.from_source(TWO).kernel("flll")

    with pytest.raises(gf.ImageError, match=r"kernel\.cu has no kernel 'flll'; it has fill"):
        kernel.load(context)


def test_cpp_kernel_is_found_by_its_plain_name(context: gf.Context) -> None:
    with context.alloc(4) as buffer:
        gf.Program.from_image(ptx()).kernel("plain").launch(1, 1, buffer, stream=context.main_stream)
        assert list(buffer.to_numpy("i4")) == [1]


# Loading


def test_program_is_loaded_once_into_each_context(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = counted(monkeypatch, device.driver, "cuModuleLoadDataEx")
    program = gf.Program.from_image(ptx())
    contexts = [device.create_context(), device.create_context()]

    for _ in range(3):
        for context in contexts:
            assert filled(program.kernel("fill"), context, 5) == [5] * 32
            program.kernel("plain").load(context)
    for context in contexts:
        context.close()

    assert len(loads) == 2


def test_forgotten_program_is_unloaded_by_the_next_load(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    unloads = counted(monkeypatch, context.driver, "cuModuleUnload")
    gf.Program.from_image(ptx()).kernel("fill").load(context)
    gc.collect()
    assert not unloads, "a finalizer must not do it"

    gf.Program.from_image(ptx()).kernel("fill").load(context)

    assert len(unloads) == 1


def test_forgotten_program_stays_loaded_while_its_kernel_may_run(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    unloads = counted(monkeypatch, context.driver, "cuModuleUnload")
    with context.alloc(128) as buffer:
        gf.Program.from_image(ptx()).kernel("fill").launch(1, 32, buffer, 6, stream=context.main_stream)
        gc.collect()
        program = gf.Program.from_image(ptx())
        program.kernel("fill").load(context)
        assert not unloads, "nobody knows yet that the kernel is done"

        assert list(buffer.to_numpy("i4")) == [6] * 32
        gf.Program.from_image(ptx()).kernel("fill").load(context)
    assert len(unloads) == 1


def test_kernel_keeps_its_program_loaded(context: gf.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    unloads = counted(monkeypatch, context.driver, "cuModuleUnload")
    kernel = gf.Program.from_image(ptx()).kernel("fill")
    assert filled(kernel, context, 1) == [1] * 32
    gc.collect()

    gf.Program.from_image(ptx()).kernel("fill").load(context)

    assert not unloads
    assert filled(kernel, context, 2) == [2] * 32


def test_closing_a_primary_context_unloads_its_modules(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    unloads = counted(monkeypatch, device.driver, "cuModuleUnload")
    program = gf.Program.from_image(ptx())
    context = device.retain_primary_context()
    program.kernel("fill").load(context)

    context.close()

    assert len(unloads) == 1


def test_kernel_does_not_keep_a_context_alive(device: Device) -> None:
    kernel = gf.Program.from_image(ptx()).kernel("fill")
    context = device.create_context()
    kernel.load(context)
    context.close()
    gone = id(context)
    del context
    gc.collect()

    assert gone not in kernel._plans


def test_loading_into_a_closed_context(device: Device) -> None:
    context = device.create_context()
    context.close()

    with pytest.raises(gf.ContextClosed):
        gf.Program.from_image(ptx()).kernel("fill").load(context)


def test_signature_must_agree_with_the_driver(context: gf.Context) -> None:
    program = gf.Program.from_image(ptx())

    with pytest.raises(
        gf.KernelArgumentError, match="takes 2 parameters by the driver's table, but its signature"
    ):
        program.kernel("fill", signature="pointer").load(context)
    with pytest.raises(
        gf.KernelArgumentError, match=r"parameter 1 of kernel 'fill' has 4 bytes .* int64, of 8 bytes"
    ):
        program.kernel("fill", signature="pointer, int64").load(context)


def test_cubin_takes_sizes_only_until_a_signature_says_more(context: gf.Context) -> None:
    if context.device.is_virtual:
        pytest.skip("virtual devices run PTX only")
    major, minor = context.device.compute_capability
    program = gf.Program.from_image(cubin(10 * major + minor))

    with pytest.raises(gf.KernelArgumentError, match="signature="):
        filled(program.kernel("fill"), context, 1)
    assert filled(program.kernel("fill"), context, np.int32(1)) == [1] * 32  # type: ignore[arg-type]
    assert filled(program.kernel("fill", signature="pointer, int32"), context, 1) == [1] * 32


def test_reprs_name_the_file(tmp_path: Path) -> None:
    program = gf.Program.from_file(FATBIN)

    assert repr(program) == f"<Program {FATBIN}>"
    assert repr(program.kernel(program.kernels[0])) == f"<Kernel {program.kernels[0]} of <Program {FATBIN}>>"
