"""The lookup table: as a dictionary would answer, filled at once or one by one, and read-only for engines."""

import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from xkv_store.errors import PeerError
from xkv_store.layout import TABLE_ENTRIES_OFFSET
from xkv_store.table import CAPACITY_MIN, TableReader, TableWriter

UUID, BOOT = b"u" * 16, b"b" * 16
CAPACITY = 67
# Tags that crowd together, at the table's end and around zero, so that probing wraps.
near = st.sampled_from([0, 1 << 40, (1 << 64) - (1 << 58)])
tags = st.builds(lambda base, n: max(1, (base + n) % (1 << 64)), near, st.integers(0, 15))
bits = st.integers(0, 63).map(lambda bit: 1 << bit)


def attach(table: TableWriter) -> TableReader:
    fd = table.fd_read_only()
    try:
        return TableReader.attach(fd, check_card_uuid=UUID)
    finally:
        os.close(fd)


class TableMachine(RuleBasedStateMachine):
    """Against a dictionary; the reader is attached throughout."""

    @initialize()
    def make(self) -> None:
        self.table = TableWriter.create(CAPACITY, UUID, BOOT)
        self.reader = attach(self.table)
        self.model: dict[int, tuple[int, int]] = {}
        self.stamps: dict[int, int] = {}
        self.highest = 0

    def teardown(self) -> None:
        self.reader.close()
        self.table.close()

    @rule(tag=tags, generation=st.integers(1, 1 << 60), bit=bits)
    def put(self, tag: int, generation: int, bit: int) -> None:
        self.table.put(tag, generation, bit, 3)
        old_generation, old_bits = self.model.get(tag, (0, 0))
        self.model[tag] = (max(old_generation, generation), old_bits | bit)
        self.highest = max(self.highest, generation)

    @rule(tag=tags, stamp=st.integers(0, (1 << 32) - 1))
    def stamp(self, tag: int, stamp: int) -> None:
        found = self.table.stamp_of(tag)
        assert (found is None) == (tag not in self.model)
        if found is not None:
            self.table.stamp(found[0], stamp)
            self.stamps[tag] = stamp

    @rule(tag=tags, all_ranks=st.booleans(), bit=bits)
    def remove(self, tag: int, all_ranks: bool, bit: int) -> None:
        generation, held = self.model.get(tag, (0, 0))
        gone = held if all_ranks else bit
        self.table.remove_rank(tag, gone)
        self.model.pop(tag, None)
        if held & ~gone:
            self.model[tag] = (generation, held & ~gone)
        else:
            self.stamps.pop(tag, None)

    @invariant()
    def all_answers_are_the_dictionarys(self) -> None:
        for base in (0, 1 << 40, (1 << 64) - (1 << 58)):
            for n in range(16):
                tag = max(1, (base + n) % (1 << 64))
                assert self.reader.lookup(tag) == self.table.get(tag) == self.model.get(tag)
                assert self.reader.fragments(tag) == (3 if tag in self.model else 0)
                stamped = self.table.stamp_of(tag)
                assert (stamped and stamped[1:]) == (
                    (*self.model[tag], self.stamps.get(tag, 0)) if tag in self.model else None
                )
        assert self.reader.entries == self.table.entries == len(self.model)
        assert self.reader.highest_generation == self.highest


TestTableMachine = TableMachine.TestCase

rows = st.tuples(tags | st.integers(1, (1 << 64) - 1), st.integers(1, 1 << 60), bits, st.integers(1, 9))


@given(st.lists(rows, max_size=60))
def test_filling_at_once_answers_as_one_by_one(entries: list[tuple[int, int, int, int]]) -> None:
    one_by_one, at_once = (TableWriter.create(CAPACITY, UUID, BOOT) for _ in range(2))
    for entry in entries:
        one_by_one.put(*entry)
    columns = np.array(entries, np.uint64).reshape(-1, 4)
    at_once.load_many(*(np.ascontiguousarray(columns[:, n]) for n in range(4)))
    reader = attach(at_once)
    assert all(reader.lookup(entry[0]) == one_by_one.get(entry[0]) for entry in entries)
    assert at_once.entries == one_by_one.entries
    assert at_once.is_exact == one_by_one.is_exact
    assert reader.highest_generation == max((entry[1] for entry in entries), default=0)
    for tag, _, bit, _ in entries:  # and the filled table is one that can be changed
        at_once.remove_rank(tag, bit)
        one_by_one.remove_rank(tag, bit)
        assert reader.lookup(tag) == one_by_one.get(tag)
    assert at_once.entries == 0
    reader.close()
    one_by_one.close()
    at_once.close()


def test_an_engine_cannot_write_it() -> None:
    """An engine that goes wild must not give other engines false hits."""
    table = TableWriter.create(CAPACITY_MIN, UUID, BOOT)
    fd = table.fd_read_only()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096)
    writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(writable, 4096)
    with pytest.raises(PermissionError):
        os.pwrite(writable, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(writable, 0)
    table.put(1, 2, 4, 1)  # the gateway still can
    reader = TableReader.attach(fd)
    assert reader.lookup(1) == (2, 4)
    assert (reader.card_uuid, reader.boot_id, reader.capacity) == (UUID, BOOT, CAPACITY_MIN)
    reader.close()
    os.close(writable)
    os.close(fd)
    table.close()


def memory(content: bytes, size: int) -> int:
    fd = os.memfd_create("not-a-table")
    os.ftruncate(fd, size)
    os.pwrite(fd, content, 0)
    return fd


@pytest.mark.parametrize(
    ("change_at", "change"),
    [(0, b"XKVTABL2"), (8, b"\x02"), (10, b"\x21"), (16, b"\xff\xff"), (16, bytes(8)), (32, b"another-card-uid")],
)
def test_what_is_no_table_of_this_card_is_refused(change_at: int, change: bytes) -> None:
    table = TableWriter.create(CAPACITY_MIN, UUID, BOOT)
    header = bytearray(os.pread(table._fd, 72, 0))
    header[change_at : change_at + len(change)] = change
    fd = memory(bytes(header), TABLE_ENTRIES_OFFSET + 32 * CAPACITY_MIN)
    with pytest.raises(PeerError):
        TableReader.attach(fd, check_card_uuid=UUID)
    os.close(fd)
    table.close()


def test_a_short_memory_is_refused() -> None:
    fd = memory(b"XKVTABL1", 100)
    with pytest.raises(PeerError):
        TableReader.attach(fd)
    os.close(fd)


def test_a_table_without_an_empty_entry_does_not_trap_a_reader() -> None:
    """A torn or foreign table must not hold vLLM's scheduling thread for ever."""
    table = TableWriter.create(CAPACITY_MIN, UUID, BOOT)
    words = table._words
    for at in range(TABLE_ENTRIES_OFFSET // 8, len(words), 4):
        words[at] = 7
    reader = attach(table)
    assert reader.lookup(9) is None
    reader.close()
    table.close()
