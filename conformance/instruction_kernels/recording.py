"""What a GPU answered: one file with every kernel's inputs and outputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .kernel import Kernel


@dataclass
class Answer:
    """A kernel's inputs, and what the GPU made of them."""

    inputs: tuple[np.ndarray, ...]
    output: bytes


@dataclass
class Recording:
    """Answers by the kernels' names."""

    about: dict[str, Any]
    answers: dict[str, Answer] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """Of each kernel's PTX and launch, so that an answer to another kernel is not taken for one to this."""
    failures: dict[str, str] = field(default_factory=dict)
    """Kernels that the GPU did not run to their end, and why."""
    unstable: list[str] = field(default_factory=list)
    """Kernels whose second run answered otherwise."""

    def add(self, kernel: Kernel, output: bytes) -> None:
        self.answers[kernel.name] = Answer(kernel.inputs, output)
        self.digests[kernel.name] = digest(kernel)

    def save(self, path: Path) -> None:
        """Write the file; equal arrays are stored once."""
        pool: dict[bytes, int] = {}
        data = bytearray()

        def place(piece: bytes) -> int:
            if piece not in pool:
                pool[piece] = len(data)
                data.extend(piece)
            return pool[piece]

        index: dict[str, Any] = {
            "about": self.about,
            "failures": self.failures,
            "unstable": self.unstable,
            "kernels": {
                name: {
                    "digest": self.digests[name],
                    "inputs": [[place(a.tobytes()), a.nbytes, a.dtype.str] for a in answer.inputs],
                    "output": [place(answer.output), len(answer.output)],
                }
                for name, answer in self.answers.items()
            },
        }
        np.savez_compressed(
            path,
            index=np.frombuffer(json.dumps(index, separators=(",", ":")).encode(), np.uint8),
            data=np.frombuffer(bytes(data), np.uint8),
        )

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read the file."""
        with np.load(path) as file:
            index: Mapping[str, Any] = json.loads(file["index"].tobytes())
            data = file["data"].tobytes()
        found = cls(index["about"], failures=index["failures"], unstable=index["unstable"])
        for name, entry in index["kernels"].items():
            inputs = tuple(
                np.frombuffer(data[start : start + size], dtype) for start, size, dtype in entry["inputs"]
            )
            start, size = entry["output"]
            found.answers[name] = Answer(inputs, data[start : start + size])
            found.digests[name] = entry["digest"]
        return found


def digest(kernel: Kernel) -> str:
    """Tell kernels apart by what is launched; spaces and line breaks do not count."""
    text = (
        f"{' '.join(kernel.ptx.split())}{kernel.lanes},{kernel.block},{kernel.dynamic_shared},{kernel.rows}"
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]
