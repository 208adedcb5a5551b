"""The memory in which objects lie on their way to and from a remote: a memfd that the library's process maps, too.

Owns: its slots, which of them are in use, that those of one object are neighbours, and what stays there until its
slots are needed. Must not know: what lies in them, who moves it. Thread-safe.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .huge_pages import Mapping
from .ring import make_sealed_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .geometry import Geometry

STORES_SHARE_MAX: Final = 2  # stores, for which nobody waits, take at most this part (a half) of it


@dataclass(frozen=True, slots=True)
class Place:
    """Neighbouring slots. `offset`: of the first, in bytes."""

    first: int
    slots: int
    offset: int
    is_store: bool


@dataclass(slots=True, eq=False)
class _Kept:
    """A place that nobody has taken: it is given up for who takes one, unless somebody reads there."""

    place: Place
    readers: int = 0
    is_unwanted: bool = False


class RemoteMemory:
    """Whole slots of a card's size; its pages are taken as they are first touched."""

    def __init__(self, memory_bytes: int, geometry: Geometry) -> None:
        self.memory_bytes = memory_bytes
        self.slots = memory_bytes // geometry.slot_bytes
        self._slot_bytes = geometry.slot_bytes
        self.fd = make_sealed_memory("xkv-remote", memory_bytes)
        self._view = Mapping(self.fd, memory_bytes).memory
        self._lock = threading.Lock()
        self._is_free = bytearray(b"\x01" * self.slots)
        self._store_slots = 0
        self._kept: dict[int, _Kept] = {}  # by the name it was kept under, the oldest first

    @property
    def stores_max(self) -> int:
        """The most slots that an object on its way to the remote may have."""
        return self.slots // STORES_SHARE_MAX

    @property
    def free(self) -> int:
        """Slots that nobody has taken."""
        with self._lock:
            return self._is_free.count(1) + sum(kept.place.slots for kept in self._kept.values())

    def take(self, slots: int, *, is_store: bool) -> Place | None:
        """Neighbouring slots, or None where there are none just now. What is kept makes room, the oldest first."""
        with self._lock:
            if is_store and self._store_slots + slots > self.stores_max:
                return None
            free = b"\x01" * slots
            while (first := self._is_free.find(free)) < 0:
                name = next((name for name, kept in self._kept.items() if not kept.readers), None)
                if name is None:
                    return None
                self._give(self._kept.pop(name).place)
            self._is_free[first : first + slots] = bytes(slots)
            self._store_slots += slots if is_store else 0
            return Place(first, slots, first * self._slot_bytes, is_store)

    def give(self, place: Place) -> None:
        """Nothing touches these slots any more."""
        with self._lock:
            self._give(place)

    def _give(self, place: Place) -> None:
        assert not any(self._is_free[place.first : place.first + place.slots]), "given back twice"
        self._is_free[place.first : place.first + place.slots] = b"\x01" * place.slots
        self._store_slots -= place.slots if place.is_store else 0

    def keep(self, place: Place, name: int) -> None:
        """Nothing writes to these slots any more; until they are needed, what lies there can be read by its name."""
        assert not place.is_store
        with self._lock:
            assert name not in self._kept, "kept twice"
            self._kept[name] = _Kept(place)

    @contextmanager
    def kept(self, name: int) -> Iterator[Place | None]:
        """What is kept under that name, if it still is: for as long as the block runs."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None and kept.is_unwanted:
                kept = None
            if kept is not None:
                kept.readers += 1
        try:
            yield kept.place if kept is not None else None
        finally:
            if kept is not None:
                with self._lock:
                    kept.readers -= 1
                    self._drop_unwanted(name)

    def forget(self, name: int) -> None:
        """Keep that no longer, once nobody reads it."""
        with self._lock:
            if name in self._kept:
                self._kept[name].is_unwanted = True
                self._drop_unwanted(name)

    def _drop_unwanted(self, name: int) -> None:
        kept = self._kept.get(name)
        if kept is not None and kept.is_unwanted and not kept.readers:
            self._give(self._kept.pop(name).place)

    def views(self, place: Place, slots: int) -> list[memoryview]:
        """The first `slots` of a place's slots, whole."""
        size = self._slot_bytes
        begins = (place.offset + number * size for number in range(slots))
        return [self._view[begin : begin + size] for begin in begins]

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with its last view."""
        os.close(self.fd)
