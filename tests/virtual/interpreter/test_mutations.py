"""Kernels that were damaged at random: they are refused, or they run, or they fault; nothing else."""

from __future__ import annotations

import random
import re
import threading
from typing import Any

import pytest
from machine import CORPUS, Device

from gpufleet.virtual.engine import KernelFault
from gpufleet.virtual.ptx import PtxError
from gpufleet.virtual.ptx.operations import operation

NAMES = (
    "switch_brx",
    "reduce_shfl",
    "histogram",
    "warp_ops",
    "coop_div",
    "devcall",
    "vec4",
    "int64",
    "structs",
)
TEXTS = [(CORPUS / f"{name}.sm_{target}.ptx").read_text() for name in NAMES for target in (75, 120)]
OPCODE = re.compile(r"(\s*(?:@!?%p\d+\s+)?)([a-z][\w.:]+)(\s.*)")
OPCODES = sorted(
    {
        match[2]
        for text in TEXTS
        for match in map(OPCODE.match, text.split("\n"))
        if match and "_" not in match[2]
    }
)
NUMBERS = (0, 1, 2, 3, 7, 31, 32, 63, 64, 255, 4096, -1, 2**31, 2**32 - 1)
KNOWN = {"INVALID_PTX", "NOT_SUPPORTED", "ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "LAUNCH_FAILED"}
KNOWN |= {"ILLEGAL_INSTRUCTION", "ASSERT", ""}


class Patience(threading.Event):
    """Cancels a launch after so many blocks of instructions, since a damaged loop may never end."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self._left = blocks

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def damaged(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    places = [i for i, line in enumerate(lines) if line.strip().endswith(";") and OPCODE.match(line)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.choice(places)
        lines[place] = changed(lines[place], lines[rng.choice(places)], rng)
    return "\n".join(lines)


def changed(line: str, other: str, rng: random.Random) -> str:
    match = OPCODE.match(line)
    registers = re.findall(r"%[a-z]+\d+", line)
    kind = rng.randrange(7)
    if kind == 0:
        return ""
    if kind == 1:
        return f"{line}\n{other}"
    if kind == 2 and match:
        alike = [name for name in OPCODES if name.split(".")[0] == match[2].split(".")[0]]
        return f"{match[1]}{rng.choice(alike)}{match[3]}"
    if kind == 3 and registers:
        register = rng.choice(registers)
        family = register.rstrip("0123456789")
        return line.replace(register, f"{family}{rng.randrange(1, 20)}", 1)
    if kind == 4:
        return re.sub(r"\b\d+\b", str(rng.choice(NUMBERS)), line, count=1)
    if kind == 5:
        return line.replace("@", "@!", 1) if "@" in line else f"\t@%p{rng.randrange(1, 4)} {line.strip()}"
    return other


@pytest.mark.parametrize("seed", range(60))
def test_damaged_kernels(seed: int) -> None:
    rng = random.Random(seed)
    text = damaged(rng.choice(TEXTS), rng)
    assert outcome(lambda: Device.load(text, 1 << 21)) in KNOWN
    if outcome(lambda: Device.load(text, 1 << 21)):
        return
    device = Device.load(text, 1 << 21)
    for kernel in device.module.kernels:
        arguments = [argument(device, p.type, p.size, rng) for p in device.module.kernels[kernel].parameters]
        grid, block = (rng.choice((1, 3)), 1, 1), (rng.choice((1, 33, 64)), 1, 1)

        def launch(name: str = kernel, given: Any = arguments, shape: Any = (grid, block)) -> None:
            device.launch(name, *shape, *given, shared=rng.choice((0, 1024)), cancelled=Patience(3000))

        assert outcome(launch) in KNOWN


def argument(device: Device, type: str, size: int, rng: random.Random) -> Any:
    if type in ("u64", "b64"):
        return rng.choice((device.memory.alloc(4096), device.memory.alloc(65536), 0, 7, rng.getrandbits(64)))
    if type in ("f32", "f64"):
        return rng.choice((0.0, 1.5, -2.0, float("nan")))
    return bytes(size) if size > 8 else rng.choice((0, 1, 5, 32, 100, -1))


def outcome(work: Any) -> str:
    try:
        work()
    except (PtxError, KernelFault) as error:
        return error.code
    return ""


def test_opcodes_of_the_corpus_are_known() -> None:
    assert len(OPCODES) > 100
    assert all(operation(name).shapes is not None for name in OPCODES)
