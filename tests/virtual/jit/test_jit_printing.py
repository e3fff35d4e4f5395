"""printf and assert of kernels, and the formats that printf knows."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from machine import TARGETS, Device

from gpufleet.virtual.engine import KernelFault
from gpufleet.virtual.jit.printing import format_text


@pytest.mark.parametrize("target", TARGETS)
def test_printf_says_what_each_thread_says(target: int) -> None:
    device = Device.corpus("printf", target)
    said: list[bytes] = []
    device.launch("hello", (1, 1, 1), (3, 1, 1), 42, 1.5, 0, output=said.append)
    lines = b"".join(said).decode().splitlines()
    assert [line.rsplit(" ", 1)[0] for line in lines] == [
        f"thread {i} of block 0: n=42 d=1.500000 lit" for i in range(3)
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_a_failed_assertion_is_named(target: int) -> None:
    device = Device.corpus("printf", target)
    x = device.memory.upload(np.array([1, 2, 300, 4], np.int32))
    with pytest.raises(KernelFault) as caught:
        device.launch("checks", (1, 1, 1), (4, 1, 1), x, 100)
    assert caught.value.code == "ASSERT"
    assert "printf.cu:7: void checks(const int *, int): block: [0,0,0], thread: [2,0,0] Assertion" in str(
        caught.value
    )
    assert "thread (2, 0, 0)" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        (b"%d|%u|%x|%c", struct.pack("<iIIi", -1, 4294967295, 255, 65), b"-1|4294967295|ff|A"),
        (b"%5d|%-5d|%05d|%+d", struct.pack("<4i", 7, 7, 7, 7), b"    7|7    |00007|+7"),
        (b"%d %f %d", struct.pack("<i4xdi", 1, 2.5, 3), b"1 2.500000 3"),
        (b"%lld %llu %p", struct.pack("<qQQ", -5, 1 << 63, 4096), b"-5 9223372036854775808 0x1000"),
        (b"%.2f %e %g", struct.pack("<3d", 3.14159, 1e10, 0.5), b"3.14 1.000000e+10 0.5"),
        (b"%s and %%", struct.pack("<Q", 16), b"text and %"),
        (b"%*d", struct.pack("<2i", 4, 9), b"   9"),
    ],
)
def test_formats(template: bytes, arguments: bytes, expected: bytes) -> None:
    assert format_text(template, arguments, lambda address: b"text")[0] == expected
