"""The memory of objects on their way: neighbours, given back once, and room that stores never take."""

from __future__ import annotations

import pytest

from xkv_store.geometry import Geometry
from xkv_store.remote_memory import RemoteMemory

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
