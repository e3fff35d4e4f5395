from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet import fatbin
from gpufleet.errors import GpufleetError
from gpufleet.fatbin import FatbinError
from gpufleet.fatbin.decompress import decompress_lz4, decompress_zstd

DATA = Path(__file__).parent / "data" / "fatbins"
EXPECTED = json.loads((DATA / "expected.json").read_text())
FATBINS = sorted(name for name in EXPECTED if name.endswith(".fatbin"))

# Where the fields of the first entry stand in a file.
HEADER_LENGTH, STORED_LENGTH, COMPRESSED_LENGTH, OPTIONS = 16 + 4, 16 + 8, 16 + 16, 16 + 20
NAME_OFFSET, NAME_LENGTH, FLAGS, RAW_LENGTH = 16 + 32, 16 + 36, 16 + 40, 16 + 56


def load(name: str) -> bytes:
    return (DATA / name).read_bytes()


def patched(data: bytes, offset: int, form: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, offset, value)
    return bytes(changed)


@contextlib.contextmanager
def only_fatbin_errors() -> Iterator[None]:
    """Let the body succeed, or raise a FatbinError of one sentence; nothing else."""
    message = "."
    try:
        yield
    except FatbinError as error:
        message = str(error)
    assert message.endswith(".")
    assert "\n" not in message


def unpack(entry: fatbin.Entry) -> None:
    """Do all that can be done with an entry."""
    with only_fatbin_errors():
        str(entry)
        content = entry.data()
        if entry.kind == "ptx":
            entry.text()
        if entry.kind == "cubin":
            fatbin.cubin_arch(content)
            fatbin.cubin_kernels(content)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_form_reads_as_cuobjdump_says(name: str) -> None:
    entries = fatbin.read_file(DATA / name)
    assert len(entries) == len(EXPECTED[name])
    for entry, expected in zip(entries, EXPECTED[name], strict=True):
        assert entry.kind == expected["kind"]
        assert entry.target == expected["target"]
        assert list(entry.version) == expected["version"]
        assert entry.name == expected["name"]
        assert entry.options == expected["options"]
        if entry.kind == "ptx":
            assert hashlib.sha256(entry.text().encode()).hexdigest() == expected["sha256"]
        if entry.kind == "cubin":
            assert hashlib.sha256(entry.data()).hexdigest() == expected["sha256"]
            assert entry.compression != "none" or not expected["compressed"]
            assert f"sm_{fatbin.cubin_arch(entry.data())}" == entry.target.rstrip("af")


def test_all_compression_modes_hold_the_same_content() -> None:
    modes = {"default.fatbin": "zstd", "size.fatbin": "zstd", "speed.fatbin": "lz4", "none.fatbin": "none"}
    texts = set()
    for name, compression in modes.items():
        ptx = next(entry for entry in fatbin.read(load(name)) if entry.kind == "ptx")
        assert ptx.compression == compression
        texts.add(ptx.text())
    assert len(texts) == 1
    assert ".visible .entry saxpy(" in texts.pop()


def test_an_entry_says_in_one_line_what_it_is() -> None:
    assert fatbin.summary(load("speed.fatbin")) == [
        "machine code for sm_75, 4.4 KiB, lz4",
        "PTX for sm_75, 1.2 KiB, lz4",
        "machine code for sm_90a, 5.3 KiB, lz4",
    ]


def test_fatbins_one_after_another_are_all_read() -> None:
    first, second = load("size.fatbin"), load("none.fatbin")
    entries = fatbin.read(first + second)
    assert entries == fatbin.read(first) + fatbin.read(second)
    assert fatbin.read(first + bytes(5000) + second + bytes(3)) == entries
    assert fatbin.length(first + second) == len(first)


def test_a_library_of_two_sources_holds_two_fatbins() -> None:
    entries = fatbin.read_file(DATA / "library.elf")
    kernels = [fatbin.cubin_kernels(entry.data()) for entry in entries if entry.kind == "cubin"]
    assert kernels == [["_Z5twiceIfEvPT_", "saxpy"], ["squares"]]
    with pytest.raises(FatbinError, match="no fatbin: it starts with 0x464c457f"):
        fatbin.read(load("library.elf"))


def test_device_functions_are_no_kernels() -> None:
    cubin = next(e.data() for e in fatbin.read_file(DATA / "relocatable.obj") if e.kind == "cubin")
    assert fatbin.cubin_kernels(cubin) == ["squares"]


def test_a_cubin_of_cuda_12_is_understood() -> None:
    cubin = load("abi7.cubin")
    assert cubin[8] == 7, "the ABI version that CUDA 12 writes"
    assert fatbin.cubin_arch(cubin) == 80
    assert fatbin.cubin_kernels(cubin) == ["probe"]


def test_lto_code_says_that_it_is_scrambled() -> None:
    lto = next(entry for entry in fatbin.read(load("family.fatbin")) if entry.kind == "lto")
    with pytest.raises(FatbinError, match="LTO code is scrambled"):
        lto.data()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (load("size.fatbin"), "fatbin"),
        (load("abi7.cubin"), "cubin"),
        (load("abi7.ptx"), "ptx"),
        (b"//\n// Generated by NVIDIA NVVM Compiler\n/* x ** y */\n\n.version 9.0\n", "ptx"),
        (load("library.elf"), "unknown"),
        (load("saxpy.cu"), "unknown"),
        (b"", "unknown"),
        (b"\x7fELF", "unknown"),
        (b"/*" * 100_000, "unknown"),
        (b"/**/" * 100_000, "unknown"),
        (b"// .version 9.0", "unknown"),
        (b".versions", "unknown"),
    ],
)
def test_images_are_told_apart_by_content(data: bytes, kind: str) -> None:
    assert fatbin.identify(data) == kind


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no fatbin: it is empty"),
        (b"P\xedU\xba", "no fatbin: 4 bytes are left"),
        (b"not a fatbin, just some text", "no fatbin: it starts with 0x20746f6e"),
        (load("none.fatbin")[:-1], "cut short: its header announces 5808 bytes, 5807 are there"),
        (load("none.fatbin")[:16], "cut short"),
        (load("none.fatbin") + b"tail of the file", "no fatbin at byte 5808"),
        (patched(load("none.fatbin"), 4, "<H", 2), "version 2 and 16 bytes"),
        (patched(load("none.fatbin"), 6, "<H", 8), "version 1 and 8 bytes"),
        (patched(load("none.fatbin"), 8, "<Q", 2**64 - 1), "cut short"),
        (patched(load("none.fatbin"), 8, "<Q", 24), "24 bytes are left, its header alone takes 64"),
        (patched(load("none.fatbin"), HEADER_LENGTH, "<I", 0), "its header claims 0 bytes"),
        (patched(load("none.fatbin"), HEADER_LENGTH, "<I", 2**32 - 1), "its header claims 4294967295 bytes"),
        (patched(load("none.fatbin"), STORED_LENGTH, "<Q", 2**63), "content, 5728 are left"),
        (patched(load("size.fatbin"), COMPRESSED_LENGTH, "<I", 2**31), "2147483648 compressed bytes"),
        (patched(load("size.fatbin"), RAW_LENGTH, "<Q", 2**42), "unpack to 4398046511104 bytes"),
        (patched(load("debug.fatbin"), NAME_OFFSET, "<I", 2**31), "name of .* beyond its header"),
        (patched(load("debug.fatbin"), NAME_LENGTH, "<I", 2**31), "name of 2147483648 bytes"),
    ],
)
def test_damage_is_one_clear_sentence(data: bytes, message: str) -> None:
    with pytest.raises(FatbinError, match=message) as raised:
        fatbin.read(data)
    assert "\n" not in str(raised.value)


def test_damaged_options_are_refused() -> None:
    data = load("none.fatbin")
    second = (
        16
        + struct.unpack_from("<I", data, HEADER_LENGTH)[0]
        + struct.unpack_from("<Q", data, STORED_LENGTH)[0]
    )
    for value in (2**31, 76):
        with pytest.raises(FatbinError, match="options"):
            fatbin.read(patched(data, second - 16 + OPTIONS, "<I", value))


@pytest.mark.parametrize("name", ["size.fatbin", "speed.fatbin"])
def test_content_that_unpacks_to_another_length_is_refused(name: str) -> None:
    for length in (4455, 4457, 0):
        first = fatbin.read(patched(load(name), RAW_LENGTH, "<Q", length))[0]
        with pytest.raises(FatbinError, match="cannot be unpacked"):
            first.data()


@pytest.mark.parametrize("name", ["size.fatbin", "speed.fatbin"])
def test_a_claimed_size_allocates_nothing(name: str) -> None:
    first = fatbin.read(patched(load(name), RAW_LENGTH, "<Q", 1 << 30))[0]
    tracemalloc.start()
    with pytest.raises(FatbinError):
        first.data()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_zstd_frame_that_claims_terabytes_allocates_nothing() -> None:
    # Single segment, 8-byte content size, then one compressed block that is none.
    frame = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", 1 << 42) + b"\x05\x00\x00\x00"
    tracemalloc.start()
    with pytest.raises(FatbinError, match="damaged"):
        decompress_zstd(frame, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_zstd_bomb_stops_at_the_size_it_should_have() -> None:
    # Blocks of one repeated byte: 128 KiB from 4 bytes each.
    block = (128 * 1024 << 3 | 1 << 1).to_bytes(3, "little") + b"x"
    frame = b"\x28\xb5\x2f\xfd" + bytes([0x00, 0x38]) + block * 100_000
    tracemalloc.start()
    with pytest.raises(FatbinError, match="more than the 5000 bytes"):
        decompress_zstd(frame, 5000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("packed", "content"),
    [
        (b"\x50hello", b"hello"),
        (b"\x00", b""),
        (b"\x1fa\x01\x00\x00\x10b", b"a" * 20 + b"b"),
        (b"\xf0\x00" + b"x" * 15, b"x" * 15),
        (b"\x24ab\x02\x00\x10c", b"ab" * 5 + b"c"),
    ],
)
def test_lz4_blocks(packed: bytes, content: bytes) -> None:
    assert decompress_lz4(packed, len(content)) == content


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (b"\x50hell", "cut short"),
        (b"\xf0", "cut short"),
        (b"\x1fa\x01", "cut short"),
        (b"\x1fa\x01\x00", "cut short"),
        (b"\x10a\x02\x00", "refers 2 bytes back at byte 1"),
        (b"\x10a\x00\x00", "refers 0 bytes back"),
        (b"\x1fa\x01\x00" + b"\xff" * 1000 + b"\x00", "more than the 100"),
        (b"\x50hello", "5 of the 100 bytes"),
        (b"", "0 of the 100 bytes"),
    ],
)
def test_damaged_lz4_blocks(packed: bytes, message: str) -> None:
    with pytest.raises(FatbinError, match=message):
        decompress_lz4(packed, 100)


def test_ptx_that_is_no_text_is_refused() -> None:
    data = load("none.fatbin").replace(b".visible", b".vis\xff\xfele")
    ptx = next(entry for entry in fatbin.read(data) if entry.kind == "ptx")
    with pytest.raises(FatbinError, match="is no text"):
        ptx.text()
    with pytest.raises(FatbinError, match="no PTX and has no text"):
        fatbin.read(data)[0].text()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x7fELF", "cut short"),
        (load("abi7.cubin")[:1000], "cut short"),
        (load("saxpy.cu"), "no ELF file"),
        (load("library.elf"), "no cubin: it is for machine 62"),
        (patched(load("abi7.cubin"), 4, "<B", 1), "not 64-bit little-endian"),
        (patched(load("abi7.cubin"), 62, "<H", 999), "names are in section 999"),
        (patched(load("abi7.cubin"), 60, "<H", 0), "damaged|cut short"),
    ],
)
def test_damaged_cubins(data: bytes, message: str) -> None:
    with pytest.raises(FatbinError, match=message):
        fatbin.cubin_kernels(data)


def test_a_file_that_has_no_device_code_is_named(tmp_path: Path) -> None:
    cubin = tmp_path / "k.cubin"
    cubin.write_bytes(load("abi7.cubin"))
    with pytest.raises(FatbinError, match=r"k\.cubin: This is a cubin, not a fatbin"):
        fatbin.read_file(cubin)
    host = tmp_path / "host"
    host.write_bytes(load("library.elf").replace(b".nv_fatbin", b".no_fatbin"))
    with pytest.raises(FatbinError, match="host: This host binary has no device code"):
        fatbin.read_file(host)
    with pytest.raises(FileNotFoundError):
        fatbin.read_file(tmp_path / "missing")


def test_the_error_is_one_of_gpufleets_and_a_value_error() -> None:
    assert issubclass(FatbinError, GpufleetError)
    assert issubclass(FatbinError, ValueError)


damage = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6)
# Headers are where damage does harm, and a small part of a file.
header_damage = st.lists(st.tuples(st.integers(0, 15), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])), max_size=4)


def mutated(
    data: bytes, anywhere: list[tuple[float, int]], headers: list[tuple[int, int]], keep: float
) -> bytes:
    changed = bytearray(data)
    for position, value in anywhere:
        changed[int(position * len(changed))] = value
    for word, value in headers:
        changed[16 + word * 4 : 16 + word * 4 + 4] = bytes([value]) * 4
    return bytes(changed[: int(keep * len(changed))])


@settings(deadline=None)
@given(st.sampled_from(FATBINS), damage, header_damage, st.sampled_from([1.0, 1.0, 0.99, 0.5]))
def test_no_damaged_fatbin_raises_anything_else(
    name: str, anywhere: list[tuple[float, int]], headers: list[tuple[int, int]], keep: float
) -> None:
    with only_fatbin_errors():
        for entry in fatbin.read(mutated(load(name), anywhere, headers, keep)):
            unpack(entry)


@settings(deadline=None)
@given(
    st.sampled_from(["abi7.cubin", "library.elf", "relocatable.obj"]), damage, header_damage, st.floats(0, 1)
)
def test_no_damaged_elf_file_raises_anything_else(
    name: str, anywhere: list[tuple[float, int]], headers: list[tuple[int, int]], keep: float
) -> None:
    data = mutated(load(name), anywhere, headers, keep)
    for read in (fatbin.read_host, fatbin.cubin_kernels, fatbin.cubin_arch):
        with only_fatbin_errors():
            read(data)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 500))
def test_no_bytes_make_the_decoders_raise_anything_else(data: bytes, size: int) -> None:
    for decompress in (decompress_lz4, decompress_zstd):
        for packed in (data, b"\x28\xb5\x2f\xfd" + data):
            with contextlib.suppress(FatbinError):
                assert len(decompress(packed, size)) == size
    fatbin.identify(data)
