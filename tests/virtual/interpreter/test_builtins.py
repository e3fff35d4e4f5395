"""printf and assertions in kernels."""

from __future__ import annotations

import struct

import pytest
from machine import TARGETS, Device

from gpufleet.virtual.engine import KernelFault
from gpufleet.virtual.interpreter.formatting import format_message

targets = pytest.mark.parametrize("target", TARGETS)


@targets
def test_printf(target: int) -> None:
    device = Device.corpus("printf", target)
    written: list[bytes] = []
    device.launch("hello", (2, 1, 1), (3, 1, 1), -5, 2.5, 0, output=written.append)
    lines = b"".join(written).decode().splitlines()
    assert len(lines) == 6
    lines.sort(key=lambda line: line.partition("of block ")[2][:1])  # blocks run in any order
    for number, line in enumerate(lines):
        start = f"thread {number % 3} of block {number // 3}: n=-5 d=2.500000 lit "
        assert line.startswith(start)
        assert int(line[len(start) :]) > 0, "the clock"


@targets
def test_an_assertion_that_holds_and_one_that_fails(target: int) -> None:
    device = Device.corpus("printf", target)
    import numpy as np

    x = device.memory.upload(np.array([1, 2, 9, 3, 8], np.int32))
    device.launch("checks", (1, 1, 1), (2, 1, 1), x, 5)
    written: list[bytes] = []
    with pytest.raises(KernelFault) as caught:
        device.launch("checks", (1, 1, 1), (5, 1, 1), x, 5, output=written.append)
    assert caught.value.code == "ASSERT"
    text = b"".join(written).decode()
    for thread in (2, 4):
        assert f"block: [0,0,0], thread: [{thread},0,0] Assertion `x[i]<n` failed." in text
    assert "thread: [3,0,0]" not in text
    assert "printf.cu:7" in str(caught.value)


@targets
def test_a_trap_after_an_assertion(target: int) -> None:
    device = Device.corpus("printf", target)
    import numpy as np

    x = device.memory.upload(np.array([1, -2], np.int32))
    with pytest.raises(KernelFault) as caught:
        device.launch("checks", (1, 1, 1), (2, 1, 1), x, 5)
    assert caught.value.code == "LAUNCH_FAILED"
    assert "trap" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        ("plain", "", b"plain"),
        ("100%%", "", b"100%"),
        ("%d|%5d|%-5d|%05d|%+d|% d", "iiiiii 1 2 3 4 5 6", b"1|    2|3    |00004|+5| 6"),
        ("%d %i", "ii -7 -2147483648", b"-7 -2147483648"),
        ("%u %x %X %#x %o %#o", "IIIIII 4294967295 255 255 255 8 8", b"4294967295 ff FF 0xff 10 010"),
        ("%lld %llu %llx", "qQQ -5 18446744073709551615 16", b"-5 18446744073709551615 10"),
        ("%d %lld %d", "i4xqi 1 2 3", b"1 2 3"),
        (
            "%f %.2f %8.3f %-8.1f| %+f",
            "ddddd 1.5 2.345 3.14159 2.25 1",
            b"1.500000 2.35    3.142 2.2     | +1.000000",
        ),
        (
            "%e %E %g %G %g",
            "ddddd 12345.678 0.5 0.0001 1e-10 100000000",
            b"1.234568e+04 5.000000E-01 0.0001 1E-10 1e+08",
        ),
        ("%f %F %d", "ddi inf nan 3", b"inf NAN 3"),
        ("%c%c", "ii 72 105", b"Hi"),
        ("%.3d|%.0d|%8.3d", "iii 5 0 7", b"005||     007"),
        ("%*d|%-*d|%.*f", "iiiii4xd 4 7 4 7 1 2.55", b"   7|7   |2.5"),
        ("%p", "Q 4096", b"0x1000"),
        ("%a", "d 1.5", b"0x1.8p+0"),
    ],
)
def test_conversions(template: str, arguments: str, expected: bytes) -> None:
    layout, *values = arguments.split() or [""]
    numbers = [
        float(v) if c == "d" else int(v) for c, v in zip(layout.replace("4x", ""), values, strict=True)
    ]
    data = struct.pack("<" + layout, *numbers)
    text, count = format_message(template.encode(), 64, lambda a, n: data[a - 64 : a - 64 + n], lambda a: b"")
    assert text == expected
    assert count == len(values)


def test_strings() -> None:
    data = struct.pack("<QQQ", 1, 2, 3)
    strings = {1: b"abc", 2: b"defg", 3: b"xy"}
    text, _ = format_message(b"%s|%6.2s|%-4s|", 0, lambda a, n: data[a : a + n], strings.__getitem__)
    assert text == b"abc|    de|xy  |"
