"""The memory of objects on their way: neighbours, given back once, and room that stores never take."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest

from xkv_store.geometry import Geometry
from xkv_store.huge_pages import HUGE_PAGE_BYTES
from xkv_store.remote_child import share
from xkv_store.remote_memory import RemoteMemory
from xkv_store.testing.fake_library import FakePool

GEOMETRY = Geometry(4_096)


def test_places_are_neighbours_and_come_back() -> None:
    memory = RemoteMemory(16 * 4_096, GEOMETRY)
    places = [memory.take(4, is_store=False) for _ in range(4)]
    assert memory.take(1, is_store=False) is None
    assert all(places)
    for place in (places[1], places[3]):
        assert place is not None
        memory.give(place)
    assert memory.free == 8
    assert memory.take(5, is_store=False) is None, "eight are free, and no five of them are neighbours"
    found = memory.take(4, is_store=False)
    assert found is not None
    assert (found.first, found.offset) == (4, 4 * 4_096)
    views = memory.views(found, 2)
    assert [len(view) for view in views] == [4_096, 4_096]
    last = places[3]
    assert last is not None
    with pytest.raises(AssertionError):
        memory.give(last)
    memory.close()


def test_what_is_kept_is_there_until_its_slots_are_needed() -> None:
    memory = RemoteMemory(8 * 4_096, GEOMETRY)
    for name in (1, 2):
        place = memory.take(4, is_store=False)
        assert place is not None
        memory.views(place, 1)[0][:1] = bytes([name])
        memory.keep(place, name)
    assert memory.free == 8, "nobody has taken them"
    with memory.kept(1) as place:
        assert place is not None
        assert memory.views(place, 1)[0][0] == 1
        newer = memory.take(4, is_store=False)
        assert newer is not None
        assert newer.first == 4, "the older one is being read"
        assert memory.take(1, is_store=False) is None
        memory.forget(1)
        assert memory.free == 4
        with memory.kept(1) as again:
            assert again is None
        assert memory.take(1, is_store=False) is None, "it is still being read"
    assert memory.take(4, is_store=False) is not None
    for name in (1, 2, 3):
        with memory.kept(name) as gone:
            assert gone is None
        memory.forget(name)
    memory.close()


def test_stores_leave_half_of_it_to_lookups() -> None:
    """Else a flood of stores would keep everybody waiting who waits for an object."""
    memory = RemoteMemory(16 * 4_096, GEOMETRY)
    store = memory.take(8, is_store=True)
    assert store is not None
    assert memory.take(1, is_store=True) is None
    assert memory.take(8, is_store=False) is not None
    memory.give(store)
    assert memory.take(8, is_store=True) is not None
    memory.close()


def test_the_process_that_calls_the_library_takes_the_memory_in_huge_pages() -> None:
    """I/O between it and the card goes in as few pieces as I/O of a ring, on both sides from a huge page's begin on."""
    memory = RemoteMemory(2 * HUGE_PAGE_BYTES, GEOMETRY)
    place = memory.take(1, is_store=False)
    assert place is not None
    ours = ctypes.addressof(ctypes.c_char.from_buffer(memory.views(place, 1)[0]))
    theirs = share(FakePool("/nowhere"), memory.fd, memory.memory_bytes)
    assert ours % HUGE_PAGE_BYTES == ctypes.addressof(theirs) % HUGE_PAGE_BYTES == 0
    ctypes.c_char.from_address(ours).value = b"x"
    assert theirs.value == b"x"
    if kernel_collapses():
        assert os.fstat(memory.fd).st_blocks * 512 == memory.memory_bytes, "all of it is taken, and not a page of it"
    memory.give(place)
    memory.close()


def kernel_collapses() -> bool:
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    return release >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").is_dir()
