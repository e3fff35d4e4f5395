"""The whole corpus parses: 19 CUDA sources, each for three targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.virtual.ptx import Kernel, Module, parse
from gpufleet.virtual.ptx.flow import live_in, reads_and_writes

CORPUS = Path(__file__).parents[2] / "data" / "ptx-corpus"
FILES = sorted(CORPUS.glob("*.ptx"))


def module(name: str, target: int = 90) -> Module:
    return parse((CORPUS / f"{name}.sm_{target}.ptx").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_parses(path: Path) -> None:
    found = parse(path.read_text())
    found.check()
    assert found.version == (9, 0)
    assert found.target == int(path.name.split("sm_")[1].split(".")[0])
    for function in (*found.kernels.values(), *found.functions.values()):
        if function.build is None:
            continue
        body = function.body
        assert [r.index for r in body.registers] == list(range(len(body.registers)))
        for instruction in body.instructions:
            assert instruction.operation.shapes is not None, f"{instruction} is not in the table"
            assert instruction.line > 0
        check_blocks(function)


def check_blocks(function: object) -> None:
    """Blocks cover the instructions, in order, and lead to blocks."""
    body = function.body  # type: ignore[attr-defined]
    assert [b.start for b in body.blocks[1:]] == [b.stop for b in body.blocks[:-1]]
    assert body.blocks[0].start == 0
    assert body.blocks[-1].stop == len(body.instructions)
    assert all(0 <= s < len(body.blocks) for b in body.blocks for s in b.successors)
    assert len(live_in(body)) == len(body.blocks)


def test_kernel_parameters_are_placed_as_in_c() -> None:
    kernel = module("structs").kernels["structs"]
    assert [(p.type, p.size, p.align, p.offset) for p in kernel.parameters] == [
        ("b8", 40, 8, 0),
        ("b8", 48, 16, 48),
        ("u64", 8, 8, 96),
        ("u32", 4, 4, 104),
    ]
    assert kernel.parameter_bytes == 108, "without tail padding"


def test_pointers_are_known_where_the_text_says_so() -> None:
    assert [p.pointer for p in module("saxpy", 120).kernels["saxpy"].parameters] == [False, True, True, False]
    assert not any(p.pointer for p in module("saxpy", 75).kernels["saxpy"].parameters)


@pytest.mark.parametrize("target", [75, 90, 120])
def test_memory_that_kernels_declare(target: int) -> None:
    assert module("matmul_tiled", target).kernels["matmul"].static_shared == 2048
    assert module("matmul_tiled", target).kernels["matmul_dyn"].static_shared == 0, (
        "extern: sized by the launch"
    )
    assert module("devcall", target).kernels["sync_call"].static_shared == 4096, "a callee's, at module scope"
    assert module("devcall", target).kernels["devcall"].static_shared == 0
    assert module("localarr", target).kernels["localarr"].local_bytes == 128


def test_variables_and_their_initial_values() -> None:
    found = module("constmem").variables
    assert found["coef"].space == "const"
    assert found["coef"].size == 64
    assert found["coef"].initial[:12] == bytes([0, 0, 128, 63, 0, 0, 0, 64, 0, 0, 64, 64])
    assert found["gcount"].initial == (5).to_bytes(4, "little")
    assert found["garr"].initial == b""
    table = module("devcall").variables["table"]
    assert [(offset, addend) for offset, _, addend in table.relocations] == [(0, 0), (8, 0)]
    names = [symbol for _, symbol, _ in table.relocations]
    assert names == ["_Z2p1f", "_Z2p2f"]
    addresses = module("devcall").code_addresses
    assert len({addresses[name] for name in names}) == 2


def test_every_instruction_reads_and_writes_what_its_operands_say() -> None:
    body = module("saxpy").kernels["saxpy"].body
    fma = next(i for i in body.instructions if i.opcode == "fma")
    reads, writes = reads_and_writes(fma)
    names = {r.index: r.name for r in body.registers}
    assert {names[i] for i in writes} == {"%f4"}
    assert {names[i] for i in reads} == {"%f1", "%f2", "%f3"}


def test_bodies_are_read_at_first_use() -> None:
    kernel = module("dmath").kernels["dmath"]
    assert isinstance(kernel, Kernel)
    assert "body" not in kernel.__dict__
    assert kernel.body is kernel.body
