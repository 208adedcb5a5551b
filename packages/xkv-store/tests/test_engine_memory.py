"""What comes with a Welcome is taken over whole or refused whole, and no descriptor is left open."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_store import wire
from xkv_store.control import ControlPage
from xkv_store.engine_memory import take_memory
from xkv_store.errors import PeerError
from xkv_store.ring import Ring
from xkv_store.table import TableWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOT = 8_192
CARD = b"c" * 16


class Side:
    """The gateway's side."""

    def __init__(self, card_uuid: bytes = CARD) -> None:
        self.ring = Ring.create(16, SLOT)
        self.control = ControlPage.create(2, b"b" * 16)
        self.table = TableWriter.create(64, card_uuid, b"b" * 16)
        self.card_uuid = card_uuid

    def fds(self) -> tuple[int, int, int]:
        return os.dup(self.ring.fd), os.dup(self.control.fd), self.table.fd_read_only()

    def welcome(self, *, slots: int = 16, store: tuple[int, int] = (0, 6)) -> wire.Welcome:
        return wire.Welcome(
            1, 1, b"b" * 16, self.card_uuid, 1, SLOT, slots, wire.SlotRange(*store), wire.SlotRange(6, 2), 100
        )


def open_fds() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd", name).exists()}  # noqa: PTH208


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side()
    before = open_fds()
    yield side
    gc.collect()
    assert open_fds() <= before, "what is refused is closed, what is taken belongs to the memory, closed below"


def test_taken_and_taken_again(side: Side) -> None:
    memory = take_memory(side.welcome(), side.fds(), world_size=2, previous=None)
    side.ring.slot(1)[0] = 7
    side.table.put(5, 3, 1, 1)
    assert memory.ring.array[1, 0] == 7
    assert memory.table.lookup(5) == (3, 1)
    assert (memory.store_region.count, memory.load_region.first) == (6, 6)
    again = take_memory(side.welcome(), side.fds(), world_size=2, previous=memory)
    assert again.ring is memory.ring
    assert again.store_region is memory.store_region, "slots that are out stay out"
    assert again.table is not memory.table
    memory.close()


def test_what_is_not_as_announced(side: Side) -> None:
    pipe = os.pipe()
    other_card = Side(b"d" * 16)
    ring, control, table = side.ring.fd, side.control.fd, side.table.fd_read_only()
    other_table = other_card.table.fd_read_only()
    cases = {
        "a control page of another world": (side.welcome(), (ring, control, table), 3),
        "a ring of another size": (side.welcome(slots=15), (ring, control, table), 2),
        "a table of another card": (side.welcome(), (ring, control, other_table), 2),
        "no table": (side.welcome(), (ring, control, pipe[0]), 2),
        "no ring": (side.welcome(), (pipe[0], control, table), 2),
        "no page": (side.welcome(), (ring, pipe[0], table), 2),
    }
    for name, (welcome, fds, world_size) in cases.items():
        given = [os.dup(fd) for fd in fds]
        with pytest.raises(PeerError):
            take_memory(welcome, given, world_size=world_size, previous=None)
        for fd in given:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        assert name
    for fd in (*pipe, table, other_table, other_card.ring.fd, other_card.control.fd):
        os.close(fd)
    other_card.table.close()


def test_after_a_reconnect_it_has_to_be_the_same(side: Side) -> None:
    """Slots of one ring used in another would be reads into the void, or into somebody else's bytes."""
    memory = take_memory(side.welcome(), side.fds(), world_size=2, previous=None)
    other = Side(b"d" * 16)
    ring, control, table = side.fds()
    cases = {
        "another card": (other.welcome(), (ring, control, other.table.fd_read_only())),
        "did not take this engine's ring": (side.welcome(), (other.ring.fd, control, table)),
        "did not take this engine's control page": (side.welcome(), (ring, other.control.fd, table)),
        "divides the ring otherwise": (side.welcome(store=(0, 5)), (ring, control, table)),
    }
    for reason, (welcome, fds) in cases.items():
        with pytest.raises(PeerError, match=reason):
            take_memory(welcome, [os.dup(fd) for fd in fds], world_size=2, previous=memory)
    for fd in (ring, control, table, cases["another card"][1][2], other.ring.fd, other.control.fd):
        os.close(fd)
    other.table.close()
    memory.close()
