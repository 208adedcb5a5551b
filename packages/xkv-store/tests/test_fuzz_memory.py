"""Any bytes in shared memory: the control page and the lookup table, and descriptors that are neither.

What is attached is checked once; what changes afterwards may make a lookup miss, and never fails, spins or grows.
"""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xkv_store import wire
from xkv_store.control import DENIALS_PER_RANK, VERSION, ControlPage, CountReader, DenialReader, page_bytes
from xkv_store.engine_memory import take_memory
from xkv_store.errors import PeerError
from xkv_store.layout import CONTROL_HEADER, TABLE_ENTRIES_OFFSET, TABLE_ENTRY, TABLE_HEADER
from xkv_store.left_out import COUNT_MAX, FIRST_NUMBER, REASONS, Ledger
from xkv_store.ring import Ring
from xkv_store.table import CAPACITY_MAX, TableReader, TableWriter
from xkv_store.testing import descriptors
from xkv_store.testing.effort import chances

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOT = 8_192
RANKS = 2
BOOT = b"b" * 16
CARD = b"c" * 16
LOOKUP_S_MAX = 1.0  # two laps over the table below take a millisecond

words = st.one_of(
    st.integers(0, 3), st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1)
)
kinds = st.sampled_from(sorted(descriptors.KINDS))
patches = st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=40)), max_size=4)


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = open_fds()
    yield
    gc.collect()
    assert open_fds() <= before


def open_fds() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd", name).exists()}  # noqa: PTH208


def patched(data: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    changed = bytearray(data)
    for at, piece in changes:
        changed[at : at + len(piece)] = piece[: max(0, len(changed) - at)]
    return bytes(changed)


# --- the control page ---------------------------------------------------------------------------------------

headers = st.builds(
    CONTROL_HEADER.pack,
    st.sampled_from([b"XKVCTRL1", b"XKVCTRL1", b"XKVTABL1", bytes(8)]),
    st.sampled_from([VERSION, VERSION, VERSION, 0, 1, 65_535]),
    st.sampled_from([RANKS, RANKS, 0, 1, 4_096, 4_097, 65_535]),
    st.sampled_from([DENIALS_PER_RANK, DENIALS_PER_RANK, 0, 2**32 - 1]),
    st.binary(min_size=16, max_size=16),
    words,
    words,
    words,
    words,
)
sizes = st.sampled_from([page_bytes(RANKS), page_bytes(RANKS), page_bytes(1), 0, 31, 4_096, page_bytes(4_096)])


@chances(150)
@example(
    header=CONTROL_HEADER.pack(b"XKVCTRL1", VERSION, RANKS, DENIALS_PER_RANK, BOOT, 0, 0, 0, 0),
    changes=[],
    size=page_bytes(RANKS),
    kind="write-only",
    ranks=RANKS,
)  # an OSError that nobody expected
@given(
    header=headers,
    changes=patches,
    size=sizes,
    kind=st.one_of(st.just("sealed"), kinds),
    ranks=st.sampled_from([None, 1, RANKS]),
)
def test_a_control_page_of_any_bytes_and_kind(
    header: bytes, changes: list[tuple[int, bytes]], size: int, kind: str, ranks: int | None
) -> None:
    fd = descriptors.KINDS[kind](size, patched(header, changes))
    with suppress(PeerError):
        page = ControlPage.attach(fd, ranks=ranks)
        assert ranks in (None, page.ranks)
        use(page)
        page.close()


def use(page: ControlPage) -> None:
    """Everything that either side does with a page."""
    before = page.epoch
    page.set_boot(BOOT)
    assert (page.epoch, page.boot_id, page.draining) == ((before + 1) % 2**64, BOOT, False)
    assert not page.serves(0)
    page.set_attached(page.ranks)
    assert page.serves(0)
    assert page.heartbeat_ns >= 0
    assert page.store_bytes() >= 0
    assert page.shed() >= 0
    ledger, left_out = Ledger(), CountReader(page, len(REASONS), FIRST_NUMBER)
    ledger.add(BOOT, left_out.poll())
    assert all(0 < one.count <= COUNT_MAX for reasons in ledger.of([BOOT]).values() for one in reasons.values())
    assert not any(left_out.poll()), "each is counted once"
    reader = DenialReader(page)
    denials = reader.poll()
    assert len(denials.pairs) < DENIALS_PER_RANK * page.ranks
    assert not reader.poll().pairs, "each is told once"
    page.deny(0, 7, 8)
    page.add_shed(0)
    told = reader.poll()
    assert (7, 8) in told.pairs or told.overflow


@chances(150)
@given(writes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), words), max_size=30))
def test_wild_words_between_two_polls(writes: list[tuple[int, int, int]]) -> None:
    """Another process of the engine goes mad while the page is in use."""
    page = ControlPage.create(RANKS, BOOT)
    reader = DenialReader(page)
    for where, offset, value in writes:
        at = {0: 0, 1: 32, 2: 4_096, 3: 4_096 + 64, 4: 8_192}[where] + 8 * (offset % (8 if where != 4 else 31))
        os.pwrite(page.fd, value.to_bytes(8, "little"), at)
        denials = reader.poll()
        assert denials.overflow or len(denials.pairs) < DENIALS_PER_RANK * RANKS
    use(page)
    page.close()


# --- the lookup table ---------------------------------------------------------------------------------------

CAPACITY = 64
table_headers = st.builds(
    TABLE_HEADER.pack,
    st.sampled_from([b"XKVTABL1", b"XKVTABL1", b"XKVCTRL1"]),
    st.sampled_from([1, 1, 1, 0, 2]),
    st.sampled_from([TABLE_ENTRY.size, TABLE_ENTRY.size, 0, 65_535]),
    st.one_of(st.sampled_from([CAPACITY, CAPACITY, 0, 1, CAPACITY + 1, CAPACITY_MAX, CAPACITY_MAX + 1]), words),
    words,
    st.sampled_from([CARD, CARD, bytes(16)]),
    st.just(BOOT),
    words,
)
halves = st.integers(0, 2**32 - 1)
entries = st.lists(st.tuples(words, words, words, halves, halves), min_size=1, max_size=8)
table_sizes = st.sampled_from([CAPACITY, CAPACITY, CAPACITY + 2, 0, 1]).map(lambda n: TABLE_ENTRIES_OFFSET + n * 32)


@chances(200)
@given(
    header=table_headers,
    rows=entries,
    size=table_sizes,
    kind=st.one_of(st.just("sealed"), kinds),
    tags=st.lists(words, max_size=6),
)
def test_a_table_of_any_bytes_and_kind(
    header: bytes, rows: list[tuple[int, int, int, int]], size: int, kind: str, tags: list[int]
) -> None:
    body = b"".join(TABLE_ENTRY.pack(*rows[number % len(rows)]) for number in range(CAPACITY))
    content = header.ljust(TABLE_ENTRIES_OFFSET, b"\0") + body
    fd = descriptors.KINDS[kind](size, content)
    try:
        reader = TableReader.attach(fd, check_card_uuid=CARD)
    except (PeerError, OSError, ValueError):  # what its one caller makes a PeerError of, see below
        return
    finally:
        os.close(fd)
    started_s = time.monotonic()
    for tag in [*tags, *(row[0] for row in rows)]:
        answer = reader.lookup(tag)
        if answer is not None:
            # The empty entry's tag is never asked for; another one is only found where an entry has it.
            assert any((tag, *answer) == row[:3] for row in rows) or not tag
        assert reader.fragments(tag) < 2**32
    assert time.monotonic() - started_s < LOOKUP_S_MAX
    assert min(reader.entries, reader.highest_generation) >= 0
    reader.close()


# --- what comes with a Welcome ------------------------------------------------------------------------------


@chances(150)
@given(
    which=st.tuples(*[st.one_of(st.just("ours"), kinds)] * 3),
    again=st.tuples(*[st.one_of(st.just("ours"), kinds)] * 3),
    slots=st.sampled_from([16, 16, 0, 15, 2**24, 2**32 - 1]),
)
def test_any_descriptors_beside_a_welcome(which: tuple[str, ...], again: tuple[str, ...], slots: int) -> None:
    """Taken over whole or refused whole: at the first Welcome, and at that of a gateway that came back."""
    ring, control = Ring.create(16, SLOT), ControlPage.create(RANKS, BOOT)
    table = TableWriter.create(64, CARD, BOOT)

    def fds(kinds_of: tuple[str, ...]) -> tuple[int, ...]:
        ours: tuple[Callable[[], int], ...]
        ours = (lambda: os.dup(ring.fd), lambda: os.dup(control.fd), table.fd_read_only)
        wanted = (16 * SLOT, page_bytes(RANKS), TABLE_ENTRIES_OFFSET + 64 * 32)
        return tuple(
            own() if kind == "ours" else descriptors.KINDS[kind](size, b"")
            for own, kind, size in zip(ours, kinds_of, wanted, strict=True)
        )

    welcome = wire.Welcome(1, 1, BOOT, CARD, 1, SLOT, slots, wire.SlotRange(0, 6), wire.SlotRange(6, 2), 100)
    previous = None
    for attempt in (which, again):
        with suppress(PeerError):
            previous = take_memory(welcome, fds(attempt), world_size=RANKS, previous=previous)
            assert attempt[2] == "ours", "no other table has that card"
    if previous is not None:
        previous.table.close()
        previous.close()
    ring.close()
    control.close()
    table.close()
