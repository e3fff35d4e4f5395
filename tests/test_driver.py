"""Which driver is used, and how its answers become errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver, get_driver


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new process whose only CUDA settings are `environment`."""
    import os

    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "GPUFLEET_"))}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def has_real_gpu() -> bool:
    try:
        return bool(gf.devices("nvidia"))
    except gf.NoDriver:
        return False


needs_no_gpu = pytest.mark.skipif("has_real_gpu()", reason="speaks of machines without a GPU")
LIST = """
    import gpufleet as gf
    found = gf.devices(DRIVER)
    print([d.ordinal for d in found], found[0].is_virtual, found[0].driver.reason)
    print([d.uuid[-4:] for d in found])
"""


@needs_no_gpu
def test_auto_falls_back_to_virtual_devices_and_says_why() -> None:
    done = run(LIST.replace("DRIVER", "None"))
    assert done.stdout.startswith("[0, 1] True no NVIDIA driver found"), done.stderr


def test_environment_names_the_driver_and_the_number_of_virtual_devices() -> None:
    done = run(LIST.replace("DRIVER", ""), GPUFLEET_DRIVER="virtual", GPUFLEET_VIRTUAL_DEVICES="3")
    assert done.stdout.startswith("[0, 1, 2] True \n"), done.stderr


@needs_no_gpu
def test_argument_wins_over_the_environment() -> None:
    done = run(LIST.replace("DRIVER", "'virtual'"), GPUFLEET_DRIVER="nvidia")
    assert done.stdout.startswith("[0, 1] True"), done.stderr


@needs_no_gpu
def test_nvidia_insists() -> None:
    done = run(LIST.replace("DRIVER", "'nvidia'"))
    assert "NoDriver: no NVIDIA driver found" in done.stderr


@pytest.mark.parametrize("value", ["0", "65", "two", "-1", "1.5"])
def test_bad_number_of_virtual_devices_is_refused(value: str) -> None:
    done = run(LIST.replace("DRIVER", "'virtual'"), GPUFLEET_VIRTUAL_DEVICES=value)
    assert f"GPUFLEET_VIRTUAL_DEVICES is '{value}': expected a number from 1 to 64" in done.stderr


def test_unknown_driver_is_refused() -> None:
    with pytest.raises(gf.NoDriver, match="there is no driver 'amd': expected one of auto, nvidia, virtual"):
        get_driver("amd")


def test_unknown_driver_in_the_environment_names_the_variable() -> None:
    done = run(LIST.replace("DRIVER", ""), GPUFLEET_DRIVER="amd")
    assert "GPUFLEET_DRIVER names no driver 'amd': expected one of auto, nvidia, virtual" in done.stderr


def test_visible_devices_choose_virtual_ones() -> None:
    both = run(LIST.replace("DRIVER", "'virtual'"))
    second = run(LIST.replace("DRIVER", "'virtual'"), CUDA_VISIBLE_DEVICES="1")
    assert second.stdout.startswith("[0] True")
    assert second.stdout.splitlines()[1][2:6] in both.stdout.splitlines()[1][8:]


def test_visible_devices_are_read_at_first_use() -> None:
    code = """
        import os, gpufleet as gf
        os.environ["CUDA_VISIBLE_DEVICES"] = "1,0"
        print(len(gf.devices("virtual")))
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        print(len(gf.devices("virtual")))
    """
    assert run(code).stdout.split() == ["2", "2"]


def test_empty_visible_devices_hide_virtual_ones_only_when_asked_for() -> None:
    hidden = run(LIST.replace("DRIVER", "'virtual'"), CUDA_VISIBLE_DEVICES="")
    assert "NoDriver: no virtual device is visible with CUDA_VISIBLE_DEVICES=''" in hidden.stderr
    fallback = run(LIST.replace("DRIVER", "'auto'"), CUDA_VISIBLE_DEVICES="")
    assert fallback.stdout.startswith("[0, 1] True"), fallback.stderr


def test_same_argument_gives_the_same_driver() -> None:
    assert get_driver("virtual") is get_driver("virtual")
    driver = get_driver("virtual")
    assert get_driver(driver) is driver
    assert get_driver(driver.raw).raw is driver.raw


def test_failing_call_names_call_code_and_meaning(driver: Driver) -> None:
    with pytest.raises(
        gf.CudaError, match=r"cuMemAlloc answered CUDA_ERROR_INVALID_CONTEXT \(201\)"
    ) as caught:
        driver.cuMemAlloc(16)
    assert (caught.value.code, caught.value.call) == (201, "cuMemAlloc")


def test_unknown_function_is_an_attribute_error(driver: Driver) -> None:
    with pytest.raises(AttributeError):
        driver.cuNoSuchThing(1)
    with pytest.raises(AttributeError):
        driver.no_such_thing()


FORKED = """
    import os, sys, gpufleet as gf
    device = gf.devices("virtual")[0]
    context = device.create_context()
    buffer = context.alloc(16)
    stream = context.stream()
    context.push()
    child = os.fork()
    if child == 0:
        failures = 0
        for use in (context.push, context.synchronize, stream.synchronize, device.create_context,
                    lambda: context.alloc(4), lambda: gf.devices("virtual"), lambda: buffer.copy_from(b"1")):
            try:
                use()
            except gf.ForkedProcess as error:
                failures += "spawn" in str(error)
        del buffer, stream, use
        context.close()
        sys.exit(failures)
    _, status = os.waitpid(child, 0)
    context.pop()
    buffer.close(); stream.close(); context.close()
    print(os.waitstatus_to_exitcode(status))
"""


def test_forked_child_gets_a_clear_error_from_every_entry_point() -> None:
    done = run(FORKED)
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_use_only_in_the_child_works() -> None:
    code = """
        import os, sys, gpufleet as gf
        child = os.fork()
        if child == 0:
            context = gf.devices("virtual")[0].create_context()
            context.close()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(code).stdout == "7\n"


def test_child_of_a_parent_that_has_only_counted_devices_is_told_so() -> None:
    code = """
        import multiprocessing, gpufleet as gf

        def work():
            try:
                gf.devices("virtual")[0].create_context()
            except gf.ForkedProcess as error:
                print("spawn" in str(error), flush=True)

        print(len(gf.devices("virtual")), flush=True)
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start(); child.join()
        print(child.exitcode)
    """
    done = run(code)
    assert (done.stdout, done.stderr) == ("2\nTrue\n0\n", "")


@pytest.mark.parametrize("ends", ["", "import sys; sys.exit(3)", "raise SystemExit(3)"])
def test_interpreter_exit_with_everything_open_is_silent(ends: str) -> None:
    code = f"""
        import gpufleet as gf
        context = gf.devices("virtual")[0].create_context()
        buffer, stream, event = context.alloc(16), context.stream(), context.event()
        buffer.copy_from(b"1234", stream=stream)
        context.push()
        {ends}
    """
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (3 if ends else 0, "", "")


def test_thread_that_pushes_and_raises_does_not_spoil_the_exit() -> None:
    code = """
        import threading, gpufleet as gf
        threading.excepthook = lambda arguments: None
        context = gf.devices("virtual")[0].create_context()
        def work():
            context.push()
            raise ValueError
        thread = threading.Thread(target=work); thread.start(); thread.join()
    """
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_poison_is_per_driver(virtual: Driver) -> None:
    from gpufleet.virtual import VirtualDriver

    other = get_driver(VirtualDriver(devices=1, visible_devices=None))
    virtual.failure(virtual.raw.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, "cuCtxSynchronize")
    with pytest.raises(gf.StickyError, match="reset the driver, or use a new one"):
        Device(0, virtual).create_context()
    Device(0, other).create_context().close()


def test_reset_ends_the_poison(virtual: Driver) -> None:
    virtual.failure(virtual.raw.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, "cuCtxSynchronize")
    virtual.reset()
    Device(0, virtual).create_context().close()
