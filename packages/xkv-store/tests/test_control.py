"""The control page: its layout, heartbeat and epoch, and that no denial is ever missed."""

from __future__ import annotations

import os
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_store import control
from xkv_store.control import (
    COUNTERS_PER_RANK,
    DENIALS_PER_RANK,
    ControlPage,
    CountReader,
    DenialReader,
    counters_offset,
)
from xkv_store.errors import PeerError
from xkv_store.ring import make_sealed_memory

BOOT = bytes(range(16))


@pytest.fixture
def page() -> ControlPage:
    return ControlPage.create(3, BOOT)


def test_layout_is_that_of_the_page(page: ControlPage) -> None:
    """Processes of other versions map the same bytes: offsets by hand from docs/format.md."""
    page.beat(0x1122)
    page.set_draining(True)
    page.deny(1, 0xAAAA, 0xBBBB)
    page.set_store_bytes(2, 77)
    page.add_shed(0, 5)
    page.set_loaded(1, 88, 99)
    page.set_attached(2)
    page.add_count(1, 5, 9)
    raw = os.pread(page.fd, control.page_bytes(3), 0)
    assert raw[:8] == b"XKVCTRL1"
    assert struct.unpack_from("<HHI", raw, 8) == (3, 3, 1_024)
    assert raw[16:32] == BOOT
    assert struct.unpack_from("<QQQQ", raw, 32) == (0x1122, 1, 1, 2)
    assert struct.unpack_from("<Q", raw, 4_096 + 64) == (1,)
    assert struct.unpack_from("<Q", raw, 4_104 + 128) == (77,)
    assert struct.unpack_from("<Q", raw, 4_112) == (5,)
    assert struct.unpack_from("<QQ", raw, 4_128 + 64) == (88, 99)
    assert struct.unpack_from("<QQ", raw, 8_192 + 16 * 1_024) == (0xAAAA, 0xBBBB)
    assert struct.unpack_from("<Q", raw, 8_192 + 3 * 16 * 1_024 + 512 + 40) == (9,)
    assert len(raw) == 8_192 + 3 * 16 * 1_024 + 4_096


def test_counts_are_told_once_and_wild_ones_not_at_all(page: ControlPage) -> None:
    """What a rank writes must not make the engine's metrics end it: vLLM asserts that counters grow."""
    reader = CountReader(page, 3)
    assert reader.poll() == [0, 0, 0]
    page.add_count(0, 0, 4)
    page.add_count(2, 0, 1)
    page.add_count(1, 2, 7)
    page.add_count(1, 3, 100)
    assert reader.poll() == [5, 0, 7]
    assert reader.poll() == [0, 0, 0]
    os.pwrite(page.fd, b"\xff" * 8 * COUNTERS_PER_RANK, counters_offset(3))
    assert reader.poll() == [0, 0, 0]
    page.add_count(0, 1, 3)
    assert reader.poll() == [0, 3, 0]


def test_a_new_life_of_the_gateway_is_seen(page: ControlPage) -> None:
    engine = ControlPage.attach(os.dup(page.fd), ranks=3)
    assert (engine.epoch, engine.boot_id, engine.draining) == (1, BOOT, False)
    page.set_attached(3)
    assert engine.serves(0)
    page.set_draining(True)
    assert engine.draining
    assert not engine.serves(0)
    before_ns = time.monotonic_ns()
    assert page.set_boot(b"n" * 16) == 2
    assert not engine.serves(0), "each has to come back"
    assert (engine.epoch, engine.boot_id, engine.draining) == (2, b"n" * 16, False)
    assert engine.heartbeat_ns >= before_ns
    assert engine.identity == page.identity


def test_backlog_is_the_slowest_ranks(page: ControlPage) -> None:
    page.set_store_bytes(0, 10)
    page.set_store_bytes(2, 30)
    page.add_shed(0)
    page.add_shed(1, 4)
    assert page.store_bytes() == 30
    assert page.shed() == 5


def test_what_is_no_control_page_is_the_peers_error(page: ControlPage) -> None:
    size = control.page_bytes(3)
    good = os.pread(page.fd, 4_096, 0)
    for change in (
        {0: b"Y"},
        {8: b"\1"},
        {8: b"\2"},
        {8: b"\4"},
        {10: b"\0\0"},
        {10: b"\4"},
        {10: b"\xff\xff"},
        {12: b"\1"},
    ):
        raw = bytearray(good)
        for offset, content in change.items():
            raw[offset : offset + len(content)] = content
        fd = make_sealed_memory("test", size)
        os.pwrite(fd, raw, 0)
        with pytest.raises(PeerError):
            ControlPage.attach(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with pytest.raises(PeerError):
        ControlPage.attach(make_sealed_memory("test", 16))
    with pytest.raises(PeerError, match="3 ranks, not 4"):
        ControlPage.attach(os.dup(page.fd), ranks=4)


def test_a_lookup_asks_the_three_things_at_once(page: ControlPage) -> None:
    """A heart that is too old, a gateway that drains and a rank that is missing each end the hits."""
    engine = ControlPage.attach(os.dup(page.fd), ranks=3)
    page.set_attached(3)
    page.beat(1_000)
    assert engine.serves(1_000)
    assert not engine.serves(1_001)
    page.set_draining(True)
    assert not engine.serves(1_000)
    page.set_draining(False)
    page.set_attached(2)
    assert not engine.serves(1_000)
    page.set_attached(3)
    assert engine.serves(-1), "a machine that has just started"


# --- denials ---------------------------------------------------------------------------------------------


def test_each_denial_is_told_once(page: ControlPage) -> None:
    reader = DenialReader(ControlPage.attach(os.dup(page.fd)))
    assert reader.poll().pairs == ()
    page.deny(0, 1, 2)
    page.deny(2, 2**64 - 1, 2**64 - 1)
    assert reader.poll().pairs == ((1, 2), (2**64 - 1, 2**64 - 1))
    assert reader.poll() is control.NOTHING_DENIED
    assert page.denied_counts() == [page.denied(rank) for rank in range(3)] == [1, 0, 1]


def test_a_reader_that_was_away_knows_that_it_missed_some(page: ControlPage) -> None:
    """Else a failed load's object would be offered again: hit, fail, hit, fail."""
    reader = DenialReader(page)
    for tag in range(DENIALS_PER_RANK - 1):
        page.deny(1, tag, 1)
    denials = reader.poll()
    assert len(denials.pairs) == DENIALS_PER_RANK - 1
    assert not denials.overflow
    for tag in range(DENIALS_PER_RANK + 1):
        page.deny(1, tag, 2)
    assert reader.poll().overflow
    page.deny(1, 5, 3)
    assert reader.poll() == control.Denials(((5, 3),), overflow=False)


def test_a_wild_count_is_an_overflow_not_a_fault(page: ControlPage) -> None:
    reader = DenialReader(page)
    page.deny(0, 1, 1)
    reader.poll()
    for wild in (0, 2**64 - 1):
        os.pwrite(page.fd, struct.pack("<Q", wild), 4_096)
        assert reader.poll().overflow
        assert not reader.poll().overflow
    page.deny(0, 7, 7)  # the count wraps around
    assert reader.poll().overflow


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 700)), max_size=12))
def test_nothing_denied_is_lost(steps: list[tuple[int, int]]) -> None:
    page = ControlPage.create(3, BOOT)
    reader = DenialReader(page)
    number = 0
    for rank, count in steps:
        expected = []
        for _ in range(count):
            number += 1
            page.deny(rank, number, number)
            expected.append((number, number))
        denials = reader.poll()
        assert denials.overflow or list(denials.pairs) == expected


def test_denials_come_whole_from_another_thread(page: ControlPage) -> None:
    """An entry that was read before it was written would deny something else, and the object itself not."""
    reader = DenialReader(page)
    total = 20_000

    def write() -> None:
        for number in range(1, total + 1):
            page.deny(1, number, number)

    writer = threading.Thread(target=write)
    writer.start()
    found: list[tuple[int, int]] = []
    overflows = 0
    while writer.is_alive() or page.denied(1) != reader._seen[1]:
        denials = reader.poll()
        found.extend(denials.pairs)
        overflows += denials.overflow
    writer.join()
    assert all(tag == generation for tag, generation in found)
    assert overflows or [tag for tag, _ in found] == list(range(1, total + 1))
