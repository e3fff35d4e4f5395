"""Record what the real driver answers to the memory probes: `python conformance/record.py OUTPUT_DIR`.

Writes one JSON file, named after the GPU and the driver. Each chapter runs in a process of its own, so
that a crash or a hang costs one group of probes: the chapter is run again without that group.
Needs Python 3.12, numpy, cuda-bindings 13 and a GPU (two for the chapters on peers); not gpufleet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

HERE = pathlib.Path(__file__).parent
KERNELS = HERE / "memory_kernels.cu"
IMAGE = HERE / "memory_kernels.ptx"
ALONE_TIMEOUT = 20  # seconds for a process that asks a few probes only
SKIPS = 5  # groups of one chapter that may end its process before the chapter is given up


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", nargs="?", type=pathlib.Path, help="folder for the JSON file")
    parser.add_argument(
        "--only", nargs="+", metavar="CHAPTER", help="record these; keep what the file has else"
    )
    parser.add_argument("--repeat", type=int, default=1, help="run each chapter so often, and compare")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one process (default 60)")
    parser.add_argument("--limit", type=float, default=400, help="seconds after which no chapter is begun")
    parser.add_argument("--jobs", type=int, default=4, help="chapters at once, where that disturbs none")
    parser.add_argument("--list", action="store_true", help="print the names of the chapters")
    parser.add_argument(
        "--kernels", action="store_true", help="compile memory_kernels.ptx (needs NVRTC 13.0)"
    )
    parser.add_argument("--chapter", help=argparse.SUPPRESS)
    parser.add_argument("--journal", help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kernels:
        compile_kernels()
    elif options.hold:
        hold()
    elif options.chapter:
        run_here(options.chapter, options.journal, options.skip)
    elif options.list:
        print("\n".join(names()))
    elif options.output:
        record(options)
    else:
        parser.error("an output folder is needed")


def names():
    import memory_probes

    return [*memory_probes.CHAPTERS, *memory_probes.ALONE]


# The recorder's own process: it never calls the driver itself


def record(options):
    import memory_probes

    chosen = options.only or names()
    unknown = sorted(set(chosen) - set(names()))
    if unknown:
        sys.exit(f"no chapter is called {', '.join(unknown)}; --list names them")
    options.output.mkdir(parents=True, exist_ok=True)
    undisturbed = [each for each in memory_probes.UNDISTURBED if each in chosen]
    others = [each for each in chosen if each not in undisturbed]
    with held_gpus() as about:
        file = options.output / file_name(about)
        recording = Recording(file, about, kept=options.only is not None)
        runner = Runner(options)
        for some, jobs in ((others, options.jobs), (undisturbed, 1)):
            with ThreadPoolExecutor(jobs) as pool:
                for done in as_completed([pool.submit(runner.run, each) for each in some]):
                    recording.add(*done.result())
    print(f"{recording.count} answers of {len(recording.chapters)} chapters in {file}")


@contextlib.contextmanager
def held_gpus():
    """Keep the GPUs open, so that the kernel driver need not start them anew for each process."""
    holder = subprocess.Popen(command("--hold"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = holder.stdout.readline()
        if not line:
            sys.exit("nothing to record: the driver could not be initialised")
        yield json.loads(line)
    finally:
        holder.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            holder.wait(30)


class Recording:
    """The file, written anew after each chapter, so that what was recorded is never lost."""

    def __init__(self, file, about, kept):
        old = json.loads(file.read_text()) if kept and file.exists() else {}
        self.file = file
        self.about = about
        self.chapters = old.get("chapters", {})
        self.unstable = old.get("unstable", {})

    @property
    def count(self):
        return sum(map(len, self.chapters.values()))

    def add(self, name, answers, unstable, seconds):
        """Keep a chapter's answers and print a line about them; None: it was not run."""
        if answers is None:
            print(f"{name:<42} not run", flush=True)
            return
        self.chapters[name] = answers
        self.unstable.pop(name, None)
        if unstable:
            self.unstable[name] = unstable
        order = {each: place for place, each in enumerate(names())}
        chapters = dict(sorted(self.chapters.items(), key=lambda item: order.get(item[0], len(order))))
        content = {"about": self.about, "chapters": chapters, "unstable": self.unstable}
        self.file.write_text(json.dumps(content, indent=1) + "\n")
        remarks = [key for key in answers if key.endswith((".ended", ".poisoned"))]
        remarks += [f"{len(unstable)} unstable"] if unstable else []
        print(f"{name:<42} {len(answers):>5} {seconds:>6.1f} s  {', '.join(remarks)}".rstrip(), flush=True)


class Runner:
    """Runs chapters in processes of their own, until time is up or a process cannot be killed."""

    def __init__(self, options):
        self._options = options
        self._deadline = time.monotonic() + options.limit
        self._stuck = False

    def run(self, name):
        """Run one chapter as often as asked; return (name, answers, names of unstable answers, seconds)."""
        begin = time.monotonic()
        if self._stuck or begin > self._deadline:
            return name, None, [], 0.0
        timeout = min(self._options.timeout, ALONE_TIMEOUT) if "." in name else self._options.timeout
        runs = [ask_chapter(name, timeout) for _ in range(self._options.repeat)]
        answers = runs[0]
        unstable = sorted(
            key
            for key in {key for each in runs for key in each}
            if any(each.get(key, "no answer") != answers.get(key, "no answer") for each in runs)
        )
        ends = [value for each in runs for key, value in each.items() if key.endswith(".ended")]
        # A process that survives SIGKILL waits inside the kernel driver: the next one would too.
        self._stuck = self._stuck or any(end.get("killed") is False for end in ends)
        return name, answers, unstable, time.monotonic() - begin


def ask_chapter(name, timeout):
    """Run one chapter until it comes to its end, leaving out the groups in which it did not."""
    lost, skip = {}, []
    while True:
        answers, last, ending = run_process(name, skip, timeout)
        group = last.partition(".")[0]
        if ending is None:
            # A group that leaves the context unusable costs those behind it their answers.
            poisoned = [key.partition(".")[0] for key in answers if key.endswith(".poisoned")]
            if not poisoned:
                return {**lost, **answers}
            group = poisoned[0]
        else:
            lost[f"{group or 'setup'}.ended"] = {**ending, "after" if last in answers else "during": last}
        lost.update({key: value for key, value in answers.items() if key.partition(".")[0] == group})
        if "." in name or not group or group == "setup" or group in skip or len(skip) == SKIPS:
            return {**answers, **lost}
        skip.append(group)


def run_process(name, skip, timeout):
    """Run a chapter in a process; return (answers, where it was last, None or how the process ended)."""
    with tempfile.TemporaryDirectory() as folder:
        journal = pathlib.Path(folder) / "journal"
        errors = pathlib.Path(folder) / "errors"
        with errors.open("w") as stream:
            process = subprocess.Popen(
                command("--chapter", name, "--journal", str(journal), "--skip", *skip),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment(),
            )
            status, killed = wait(process, timeout)
        answers, last = read_journal(journal)
        said = errors.read_text(errors="replace").strip().splitlines()[-1:]
    if status == 0:
        return answers, last, None
    if status is None:
        return answers, last, {"timed_out": timeout, "killed": killed}
    if status < 0:
        return answers, last, {"crashed": signal.Signals(-status).name}
    return answers, last, {"exit": status, "said": "".join(said)}


def wait(process, timeout):
    """(exit status or None, whether a process that took too long is gone)."""
    try:
        return process.wait(timeout), True
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        return None, False
    return None, True


def environment():
    """More hardware queues than the 8 by default, which streams would share and then wait for one
    another; and a place for compiled kernels even where the home folder cannot be written."""
    cache = os.path.join(tempfile.gettempdir(), "memory-probes-cache")
    return {"CUDA_CACHE_PATH": cache, **os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def read_journal(path):
    answers, last = {}, ""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            break  # the process ended while it wrote
        last = entry[0]
        if len(entry) == 2:
            answers[entry[0]] = entry[1]
    return answers, last


def command(*arguments):
    return [sys.executable, str(pathlib.Path(__file__).resolve()), *arguments]


def file_name(about):
    gpu = re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower().replace("nvidia ", "")).strip("-")
    return f"{gpu}-driver-{about['driver'].split('.')[0]}-memory.json"


# A chapter's process


def run_here(chapter, journal, skip):
    import memory_probes
    from cuda.bindings import driver

    with open(journal, "w", buffering=1) as file:  # a line at a time: what is written survives a crash

        def write(*entry):
            file.write(json.dumps(entry) + "\n")

        answers = memory_probes.probe(chapter, driver, IMAGE.read_bytes() + b"\0", skip=skip, journal=write)
        for each in answers.items():
            write(*each)
    os._exit(0)  # leaves out the driver's own end, which a probe may have damaged


def hold():
    """Keep the GPUs open until standard input ends; say what they are."""
    from importlib.metadata import version

    from cuda.bindings import driver

    try:
        answer = driver.cuInit(0)[0]
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if answer != 0:
        sys.exit(f"cuInit answered {answer.name}")
    count = driver.cuDeviceGetCount()[1]
    for device in range(count):
        driver.cuDevicePrimaryCtxRetain(device)
    about = {
        "gpu": driver.cuDeviceGetName(128, 0)[1].split(b"\0")[0].decode(),
        "devices": count,
        "driver": kernel_driver_version(),
        "cuda": driver.cuDriverGetVersion()[1],
        "cuda-bindings": version("cuda-bindings"),
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
    }
    print(json.dumps(about), flush=True)
    sys.stdin.read()
    os._exit(0)


def kernel_driver_version():
    try:
        found = re.search(
            r"\b(\d{3,}\.\d+(\.\d+)?)\b", pathlib.Path("/proc/driver/nvidia/version").read_text()
        )
    except OSError:
        found = None
    return found.group(1) if found else "unknown"


# The kernels


def compile_kernels():
    from cuda.bindings import nvrtc

    program = nvrtc.nvrtcCreateProgram(KERNELS.read_bytes(), KERNELS.name.encode(), 0, [], [])[1]
    result = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"])[0]
    if result != 0:
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        sys.exit(log.decode())
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    IMAGE.write_bytes(text.rstrip(b"\0"))


if __name__ == "__main__":
    main()
