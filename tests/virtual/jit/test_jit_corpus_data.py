"""The kernels of the corpus (data) on the JIT engine; conftest.py chooses the engine."""

from __future__ import annotations

from test_corpus_data import *  # noqa: F403

del test_structs  # noqa: F821 - its lanes race with those of the next warp; see below


@targets  # noqa: F405
def test_structs_in_one_warp(target: int) -> None:
    device = Device.corpus("structs", target)  # noqa: F405
    ints = rng.integers(-100, 100, 32, dtype=np.int32)  # noqa: F405
    out = device.memory.alloc(4 * 33)
    p = struct.pack("<f4xdbx3hQii", 1.5, 2.25, -7, 10, -20, 30, device.memory.upload(ints), 3, 4)  # noqa: F405
    m = rng.standard_normal(12).astype(np.float32)  # noqa: F405
    device.launch("structs", (1, 1, 1), (32, 1, 1), p, m.tobytes(), out, 5)
    shorts = np.resize(np.array([10, -20, 30], np.float32), 32)  # noqa: F405
    first = np.float32(3.75) + np.float32(-7) + shorts + ints.astype(np.float32) + np.float32(3)  # noqa: F405
    first = first + np.float32(4) + m[5]  # noqa: F405
    result = device.memory.download(out, np.float32, 33)  # noqa: F405
    assert result[0] == first[0]
    assert np.array_equal(result[1:], first * m[1])  # noqa: F405
