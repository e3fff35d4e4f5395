"""What a user of the commands meets: output, exit codes, and errors that are sentences."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gpufleet as gf

HELP_WORDS = ("devices", "migrate", "build", "--version")


def gpufleet(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command where no real GPU is visible and nothing else chooses devices."""
    return subprocess.run(
        [sys.executable, "-m", "gpufleet", *arguments],
        env=environment_for_commands() | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def environment_for_commands() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUFLEET", "CUDA"))}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def lines_of(text: str) -> list[str]:
    return text.splitlines()


# The program as a whole


def test_alone_it_prints_help() -> None:
    done = gpufleet()

    assert done.returncode == 0
    assert all(word in done.stdout for word in HELP_WORDS)
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["devices"], ["migrate"], ["build"]])
def test_help_has_a_short_form_and_shows_no_types_of_flags(arguments: list[str]) -> None:
    done = gpufleet(*arguments, "-h")

    assert done.returncode == 0
    assert "Usage: gpufleet" in done.stdout
    assert "bool" not in done.stdout


def test_a_mistyped_command_is_told_what_it_may_mean() -> None:
    done = gpufleet("migrat")

    assert done.returncode == 2
    assert "Did you mean 'migrate'?" in done.stderr


def test_an_unknown_option_is_not_taken_for_a_number() -> None:
    done = gpufleet("migrate", "-nope")

    assert done.returncode == 2
    assert "No such option" in done.stderr


def test_a_source_as_image_is_sent_to_build(tmp_path: Path) -> None:
    (tmp_path / "k.cu").touch()

    done = gpufleet(
        "migrate", "--driver", "virtual", "--image", str(tmp_path / "k.cu"), CUDA_VISIBLE_DEVICES="0"
    )

    assert done.returncode == 1
    assert f"compile it with `gpufleet build {tmp_path / 'k.cu'} -o {tmp_path / 'k.fatbin'}`" in done.stderr


def test_version() -> None:
    done = gpufleet("--version")

    assert (done.returncode, done.stdout) == (0, f"gpufleet {gf.__version__}\n")


def test_the_installed_command_is_the_module() -> None:
    installed = Path(sys.executable).with_name("gpufleet")

    done = subprocess.run([installed, "--version"], capture_output=True, text=True, check=False)

    assert done.stdout == gpufleet("--version").stdout


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["devices", "--nonsense"], ["devices", "--driver", "amd"]]
)
def test_wrong_usage_exits_2_and_prints_the_usage(arguments: list[str]) -> None:
    done = gpufleet(*arguments)

    assert done.returncode == 2
    assert "Usage: gpufleet" in done.stderr
    assert done.stdout == ""


def test_a_command_loads_only_its_own() -> None:
    script = textwrap.dedent("""
        import sys
        from gpufleet.cli import main
        code = main(["devices", "--driver", "virtual", "--json"])
        others = {"cuda.bindings.nvrtc", "cuda.bindings.nvfatbin", "gpufleet.build", "gpufleet.migrate"}
        sys.exit(f"exit code {code}, loaded {others & set(sys.modules)}")
        """)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment_for_commands() | {"CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == "exit code 0, loaded set()\n"


@pytest.mark.parametrize("command", ["devices", "migrate"])
def test_no_driver_is_one_sentence_and_exits_1(command: str) -> None:
    done = gpufleet(command, "--driver", "nvidia")

    assert done.returncode == 1
    assert done.stdout == ""
    assert len(lines_of(done.stderr)) == 1
    assert done.stderr.startswith("gpufleet: no ")


@pytest.mark.parametrize("command", ["devices", "migrate"])
def test_no_visible_device_exits_1(command: str) -> None:
    done = gpufleet(command, "--driver", "virtual", CUDA_VISIBLE_DEVICES="")

    assert done.returncode == 1
    assert done.stderr == "gpufleet: no virtual device is visible with CUDA_VISIBLE_DEVICES=''\n"


@pytest.mark.parametrize("command", ["devices", "migrate"])
def test_an_error_is_json_too_where_json_is_asked_for(command: str) -> None:
    done = gpufleet(command, "--driver", "nvidia", "--json")

    assert done.returncode == 1
    assert json.loads(done.stdout)["error"] == "NoDriver"
    assert json.loads(done.stdout)["message"] in done.stderr


@pytest.mark.parametrize("command", [["devices", "--all"], ["migrate", "-n15"], ["--help"]])
def test_a_closed_pipe_is_quiet(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "gpufleet", *command],
            env=environment_for_commands(),
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_ctrl_c_is_quiet_and_exits_130() -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "gpufleet", "migrate", "--rounds", "1000000"],
        env=environment_for_commands(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    while "starts" not in running.stdout.readline():
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)

    assert (running.returncode, errors) == (130, "")


# gpufleet devices


def test_devices_lists_every_property() -> None:
    done = gpufleet("devices")

    assert done.returncode == 0
    assert lines_of(done.stdout)[0].startswith("using 2 virtual devices: no ")
    device = gf.devices("virtual")[1]
    for label, value in {
        "UUID": device.uuid,
        "PCI id": device.pci_bus_id,
        "virtual": "yes",
        "compute capability": "{}.{}".format(*device.compute_capability),
        "memory": "iB",
        "shared memory per block": "48 KiB",
        "constant memory": "64 KiB",
        "registers per block": str(device.max_registers_per_block),
        "clock rate": "GHz",
        "multiprocessors": str(device.multiprocessor_count),
    }.items():
        listed = [line for line in lines_of(done.stdout) if line.strip().startswith(label)]
        assert len(listed) == 2, label
        assert value in listed[1], label


def test_devices_all_lists_every_attribute() -> None:
    words = [line.split() for line in lines_of(gpufleet("devices", "--all").stdout)]

    for device in gf.devices("virtual"):
        for name, value in device.attributes().items():
            assert [name, str(value)] in words


def test_devices_json_is_one_document() -> None:
    document = json.loads(gpufleet("devices", "--json", "--all").stdout)

    assert document["driver"] == "virtual"
    assert document["reason"].startswith("no ")
    assert [entry["ordinal"] for entry in document["devices"]] == [0, 1]
    device = gf.devices("virtual")[0]
    entry = document["devices"][0]
    assert entry["uuid"] == device.uuid
    assert entry["clock_rate"] == device.clock_rate
    assert entry["attributes"] == device.attributes()


# gpufleet migrate


def test_migrate_runs_on_virtual_devices_and_says_why() -> None:
    done = gpufleet("migrate")

    printed = lines_of(done.stdout)
    assert done.returncode == 0
    assert done.stderr == ""
    assert printed[0].startswith("using 2 virtual devices: no ")
    assert printed[-1] == "verified 4 of 4"


def test_each_thread_prints_a_line_at_its_start_and_its_end() -> None:
    printed = lines_of(gpufleet("migrate", "-n", "3").stdout)

    for device in (0, 1):
        for thread in (1, 2, 3):
            own = [line for line in printed if line.startswith(f"device {device}  context 0x")]
            own = [line for line in own if f"  thread {thread} " in line]
            assert [words.split()[6] for words in own] == ["starts", "ends"]


@pytest.mark.parametrize(
    "spelling",
    [
        "-n 3",
        "-n3",
        "-n=3",
        "-nthreads 3",
        "-numthreads 3",
        "--threads-per-device 3",
        "-n3 -qatest",
        "-n3 --qatest -noprompt",
        "--noprompt -n3",
    ],
)
def test_every_spelling_is_accepted(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = in_process(capsys, "migrate", *spelling.split())

    assert (code, lines_of(printed)[-1]) == (0, "verified 6 of 6")


@pytest.mark.parametrize(
    "count",
    ["-n 0", "-n 16", "-n -1", "-n x", "-n 2.5", "-n=", "-n", "-nthreads=16", "-numthreads 0", "-numthreads"],
)
def test_any_other_count_prints_the_usage_and_exits_2(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, errors = in_process(capsys, "migrate", *count.split())

    assert (code, printed) == (2, "")
    assert "Usage: gpufleet migrate" in errors


@pytest.mark.parametrize("wrong", ["--launch all", "--contexts green", "--rounds 0", "--rounds", "extra"])
def test_other_wrong_values_print_the_usage_and_exit_2(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, errors = in_process(capsys, "migrate", *wrong.split())

    assert (code, printed) == (2, "")
    assert "Usage: gpufleet migrate" in errors


def test_migrate_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, errors = in_process(
        capsys, "migrate", "--json", "-n4", "--contexts", "primary", "--rounds", "2"
    )

    document = json.loads(printed)
    assert (code, errors) == (0, "")
    assert document["ok"] is True
    assert (document["verified"], document["expected"]) == (8, 8)
    assert (document["launch"], document["contexts"], document["rounds"]) == ("both", "primary", 2)
    assert len(document["devices"]) == 2
    assert len(document["threads"]) == 8
    for thread in document["threads"]:
        assert thread["error"] is None
        assert [launch["device"] for launch in thread["launches"]] == [thread["device"]] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("contexts", ["created", "primary"])
@pytest.mark.parametrize("launch", ["pointers", "packed", "both"])
def test_migrate_on_every_real_gpu(launch: str, contexts: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gpufleet.cli import main

    code = main(["migrate", "--driver", "nvidia", "-n", "15", "--launch", launch, "--contexts", contexts])

    expected = 15 * len(gf.devices("nvidia"))
    assert (code, lines_of(capsys.readouterr().out)[-1]) == (0, f"verified {expected} of {expected}")


def test_a_missing_image_says_where_it_was_looked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    code, _, errors = in_process(capsys, "migrate", "--image", "none.fatbin")

    assert code == 1
    assert str(tmp_path / "none.fatbin") in errors
    assert len(lines_of(errors)) == 1


def test_a_missing_kernel_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = in_process(capsys, "migrate", "--kernel", "countup")

    assert code == 1
    assert "countup" in errors
    assert "countdown" in errors


def test_a_failed_thread_is_named_and_exits_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    image = tmp_path / "wrong.ptx"
    image.write_text(WRONG_KERNEL)

    code, printed, errors = in_process(
        capsys, "migrate", "--image", str(image), "--kernel", "wrong", "--launch", "packed"
    )

    assert code == 1
    assert lines_of(printed)[-1] == "verified 0 of 4"
    assert printed.count("ends  FAILED") == 4
    assert (
        "gpufleet: thread 2 of device 1 failed: launched with packed, 31 of 32 values are wrong: "
        "out[0] is 7, expected 32" in lines_of(errors)
    )


def in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command on virtual devices in this process, which is faster."""
    from gpufleet.cli import main

    code = main([arguments[0], "--driver", "virtual", *arguments[1:]])
    return code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def _nothing_else_chooses_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUFLEET_DRIVER", "GPUFLEET_VIRTUAL_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


WRONG_KERNEL = """
.version 7.0
.target sm_75
.address_size 64

.visible .entry wrong(.param .u64 out, .param .u32 n)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<5>;

    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;
    mov.u32 %r2, 7;
    st.global.u32 [%rd4], %r2;
    ret;
}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell that closes files")
@pytest.mark.parametrize("command", ["devices", "devices --json", "--help"])
def test_a_closed_stdout_is_quiet(command: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m gpufleet {command} >&-', sys.executable],
        env=environment_for_commands(),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["devices", "devices --json", "migrate --json", "--help"])
def test_a_full_disk_is_told_in_a_sentence(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gpufleet", *command.split()],
            env=environment_for_commands(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variable", ["GPUFLEET_VIRTUAL_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_a_number_beyond_all_bounds_is_told_in_a_sentence(variable: str) -> None:
    done = gpufleet("devices", **{"GPUFLEET_DRIVER": "virtual", variable: "9" * 5000})
    assert done.returncode == 1
    assert done.stderr.startswith("gpufleet: ")
    assert "Traceback" not in done.stderr
