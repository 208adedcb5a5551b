"""Formats: the code does what docs/format.md draws, round trips, and refuses damage."""

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xkv_store import geometry, layout
from xkv_store.layout import BadBytesError, Extent, OtherVersionError, Record, SlotHeader, Superblock

FORMAT_PAGE = Path(__file__).parents[3] / "docs" / "format.md"

u16 = st.integers(0, (1 << 16) - 1)
u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
uuids = st.binary(min_size=16, max_size=16)
headers = st.builds(SlotHeader, st.binary(min_size=24, max_size=55), u32, u32, u32, u64, u64, u64, uuids, u64, u32)
superblocks = st.builds(Superblock, u16, u16, u32, u64, uuids, uuids, u64)
records = st.builds(Record, u64, u64, u64, u32, st.lists(st.builds(Extent, u16, u32, u32), max_size=5).map(tuple))


def drawn_fields(title: str) -> list[tuple[int, int]]:
    """(offset, bytes) of each row of the first table with numbers after the words `title`."""
    text = FORMAT_PAGE.read_text(encoding="utf-8")
    text = text[text.index(title) :]
    rows = []
    for line in text.splitlines():
        found = re.match(r"\| ([\d,]+) \| ([\d,]+) \|", line)
        if found:
            rows.append((int(found[1].replace(",", "")), int(found[2].replace(",", ""))))
        elif rows:
            break
    return rows


def coded_fields(format_: struct.Struct) -> list[tuple[int, int]]:
    """(offset, bytes) of each field of a struct format, runs of padding as one field."""
    rows, at = [], 0
    for repeat, code in re.findall(r"(\d*)([a-zA-Z])", format_.format.lstrip("<>")):
        size = struct.calcsize(f"<{repeat}{code}")
        rows.append((at, size))
        at += size
    return rows


@pytest.mark.parametrize(
    ("title", "format_", "tail"),
    [
        ("## Slot header", layout.SLOT_HEADER, [(1016, 8)]),
        ("Superblock:", layout.SUPERBLOCK, [(4088, 8)]),
        ("Record:", layout.RECORD, []),
        ("## Lookup table", layout.TABLE_HEADER, []),
        ("## Control page", layout.CONTROL_HEADER, []),
    ],
)
def test_page_and_code_agree(title: str, format_: struct.Struct, tail: list[tuple[int, int]]) -> None:
    drawn = drawn_fields(title)
    coded = coded_fields(format_) + tail
    assert drawn[: len(coded)] == coded


def test_sizes_on_the_page_are_the_codes() -> None:
    text = FORMAT_PAGE.read_text(encoding="utf-8")
    for name, size in [
        ("slot", geometry.SLOT_BYTES),
        ("slot header", geometry.HEADER_BYTES),
        ("slot payload (`fragment_bytes`)", geometry.FRAGMENT_BYTES),
        ("I/O step", geometry.IO_STEP_BYTES),
    ]:
        assert f"| {name} | {size:,} |" in text
    assert f"| {geometry.DATA_OFFSET:,} | slot 0" in text
    for magic in (layout.SLOT_MAGIC, layout.DATABASE_MAGIC, layout.TABLE_MAGIC, layout.CONTROL_MAGIC):
        assert f"magic `{magic.decode()}`" in text
    assert layout.TABLE_ENTRY.size == 32
    assert layout.EXTENT.size == 10
    assert layout.ORDER_KEY.size == 20


@given(headers)
def test_slot_header_round_trip(header: SlotHeader) -> None:
    slot = memoryview(bytearray(b"\xff" * 4096))
    layout.pack_slot_header(slot, header)
    assert layout.parse_slot_header(slot) == header
    assert bytes(slot[140:1016]) == bytes(876)
    assert bytes(slot[1024:]) == b"\xff" * 3072


@given(headers, st.integers(0, 1023), st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_noticed(header: SlotHeader, at: int, flip: int) -> None:
    slot = bytearray(1024)
    layout.pack_slot_header(memoryview(slot), header)
    slot[at] ^= flip
    with pytest.raises(BadBytesError):
        layout.parse_slot_header(slot)


@given(superblocks)
def test_superblock_round_trip(superblock: Superblock) -> None:
    assert layout.parse_superblock(layout.pack_superblock(superblock)) == superblock


@given(superblocks, st.integers(0, 4095), st.integers(1, 255))
def test_any_changed_byte_of_a_superblock_is_noticed(superblock: Superblock, at: int, flip: int) -> None:
    data = bytearray(layout.pack_superblock(superblock))
    data[at] ^= flip
    with pytest.raises(BadBytesError):
        layout.parse_superblock(data)


def test_a_newer_superblock_is_named_as_such_whatever_its_checksum() -> None:
    data = bytearray(layout.pack_superblock(Superblock(0, 1, 4096, 1, bytes(16), bytes(16), 0)))
    data[8] = 2
    with pytest.raises(OtherVersionError) as caught:
        layout.parse_superblock(data)
    assert caught.value.version == 2


@given(records)
def test_record_round_trip(record: Record) -> None:
    assert layout.parse_record(layout.pack_record(record)) == record


@given(records, st.integers(1, 40))
def test_a_cut_record_is_refused(record: Record, cut: int) -> None:
    with pytest.raises(BadBytesError):
        layout.parse_record(layout.pack_record(record)[:-cut])


order_keys = st.tuples(u64, u32, u64)


@given(order_keys, order_keys)
def test_order_is_families_then_latest_chunk_first(one: tuple[int, int, int], two: tuple[int, int, int]) -> None:
    def rank(key: tuple[int, int, int]) -> tuple[int, int, int]:
        return key[0], -key[1], key[2]

    packed_one, packed_two = layout.pack_order_key(*one), layout.pack_order_key(*two)
    assert (packed_one < packed_two) == (rank(one) < rank(two))
    assert layout.parse_order_key(packed_one) == one
