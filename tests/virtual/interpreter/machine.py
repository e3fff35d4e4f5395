"""A device reduced to what an engine needs: memory, loaded variables, launches."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpufleet.virtual.engine import Dim3, Launch
from gpufleet.virtual.interpreter import InterpreterEngine
from gpufleet.virtual.ptx import Module, parse
from gpufleet.virtual.ptx.scalars import SIZES

CORPUS = Path(__file__).parents[2] / "data" / "ptx-corpus"
TARGETS = (75, 90, 120)
GAP = 256


class Memory:
    """One region of zeroed memory; allocations never touch one another."""

    def __init__(self, size: int = 1 << 26) -> None:
        self._map = mmap.mmap(-1, size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.base = self._bytes.ctypes.data
        self._next = self.base + GAP
        self._spans: list[tuple[int, int]] = []
        self._arrays = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def alloc(self, size: int, align: int = 256) -> int:
        address = -(-self._next // align) * align
        self._next = address + size + GAP
        assert self._next <= self.base + len(self._bytes), "the test's memory is too small"
        self._spans.append((address, address + size))
        starts, ends = zip(*sorted(self._spans), strict=True)
        self._arrays = np.array(starts, np.uint64), np.array(ends, np.uint64)
        return address

    def free(self, address: int) -> None:
        self._spans = [span for span in self._spans if span[0] != address]
        starts, ends = zip(*sorted(self._spans), strict=True) if self._spans else ((), ())
        self._arrays = np.array(starts, np.uint64), np.array(ends, np.uint64)

    def upload(self, array: np.ndarray[Any, Any]) -> int:
        data = np.ascontiguousarray(array)
        address = self.alloc(max(data.nbytes, 1))
        self.write(address, data.tobytes())
        return address

    def download(self, address: int, dtype: Any, count: int) -> np.ndarray[Any, Any]:
        start = address - self.base
        return self._bytes[start : start + count * np.dtype(dtype).itemsize].copy().view(dtype)

    def write(self, address: int, data: bytes) -> None:
        start = address - self.base
        self._bytes[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def view(self, dtype: Any) -> np.ndarray[Any, Any]:
        return self._bytes.view(dtype)

    def spans(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return self._arrays

    def describe(self, address: int) -> str:
        nearest = min(self._spans, key=lambda s: min(abs(address - s[0]), abs(address - s[1])), default=None)
        return (
            "no allocation" if nearest is None else f"nearest allocation {nearest[0]:#x} to {nearest[1]:#x}"
        )


@dataclass
class Device:
    """A loaded module."""

    module: Module
    memory: Memory
    symbols: dict[str, int]
    engine: InterpreterEngine
    executables: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, text: str, size: int = 1 << 26) -> Device:
        module = parse(text)
        memory = Memory(size)
        symbols = {
            v.name: memory.alloc(max(v.size, 1), max(v.align, 16))
            for v in module.variables.values()
            if v.space in ("global", "const")
        }
        for variable in module.variables.values():
            if variable.name in symbols:
                memory.write(symbols[variable.name], variable.initial)
                for offset, symbol, addend in variable.relocations:
                    target = symbols.get(symbol) or module.code_addresses[symbol]
                    memory.write(symbols[variable.name] + offset, struct.pack("<Q", target + addend))
        return cls(module, memory, symbols, InterpreterEngine())

    @classmethod
    def corpus(cls, name: str, target: int, size: int = 1 << 26) -> Device:
        return cls.load((CORPUS / f"{name}.sm_{target}.ptx").read_text(), size)

    def launch(
        self, kernel: str, grid: Dim3, block: Dim3, *args: Any, shared: int = 0, **options: Any
    ) -> None:
        prepared = self.prepare(kernel, grid, block, *args, shared=shared, **options)
        prepared[0].run(prepared[1])

    def prepare(
        self, kernel: str, grid: Dim3, block: Dim3, *args: Any, shared: int = 0, **options: Any
    ) -> tuple[Any, Launch]:
        if kernel not in self.executables:
            self.executables[kernel] = self.engine.load(self.module, kernel, self.symbols)
        function = self.module.kernels[kernel]
        space = bytearray(function.parameter_bytes)
        for parameter, value in zip(function.parameters, args, strict=True):
            data = _encode(parameter.type, parameter.size, value)
            space[parameter.offset : parameter.offset + parameter.size] = data
        launch = Launch(
            grid=grid,
            block=block,
            dynamic_shared=shared,
            parameters=bytes(space),
            memory=self.memory,
            clock_rate=1_980_000,
            device_ordinal=0,
            multiprocessors=132,
            **options,
        )
        return self.executables[kernel], launch


def _encode(type: str, size: int, value: Any) -> bytes:
    if isinstance(value, bytes):
        assert len(value) == size
        return value
    if type in ("f32", "f64"):
        return struct.pack("<f" if type == "f32" else "<d", value)
    assert SIZES[type] == size
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
