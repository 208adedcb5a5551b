"""The memory in which objects lie on their way to and from a remote: a memfd that the library's process maps, too.

Owns: its slots, which of them are in use, and that those of one object are neighbours. Must not know: what lies in
them, who moves it. The event loop's thread takes and gives.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .ring import make_sealed_memory, map_shared

if TYPE_CHECKING:
    from .geometry import Geometry

STORES_SHARE_MAX: Final = 2  # stores, for which nobody waits, take at most this part (a half) of it


@dataclass(frozen=True, slots=True)
class Place:
    """Neighbouring slots. `offset`: of the first, in bytes."""

    first: int
    slots: int
    offset: int
    is_store: bool


class RemoteMemory:
    """Whole slots of a card's size; its pages are taken as they are first touched."""

    def __init__(self, memory_bytes: int, geometry: Geometry) -> None:
        self.memory_bytes = memory_bytes
        self.slots = memory_bytes // geometry.slot_bytes
        self._slot_bytes = geometry.slot_bytes
        self.fd = make_sealed_memory("xkv-remote", memory_bytes)
        self._view = memoryview(map_shared(self.fd, "remote's memory", memory_bytes))
        self._is_free = bytearray(b"\x01" * self.slots)
        self._store_slots = 0

    @property
    def stores_max(self) -> int:
        """The most slots that an object on its way to the remote may have."""
        return self.slots // STORES_SHARE_MAX

    @property
    def free(self) -> int:
        """Slots in no use."""
        return self._is_free.count(1)

    def take(self, slots: int, *, is_store: bool) -> Place | None:
        """Neighbouring slots, or None where there are none just now."""
        if is_store and self._store_slots + slots > self.stores_max:
            return None
        first = self._is_free.find(b"\x01" * slots)
        if first < 0:
            return None
        self._is_free[first : first + slots] = bytes(slots)
        self._store_slots += slots if is_store else 0
        return Place(first, slots, first * self._slot_bytes, is_store)

    def give(self, place: Place) -> None:
        """Nothing touches these slots any more."""
        assert not any(self._is_free[place.first : place.first + place.slots]), "given back twice"
        self._is_free[place.first : place.first + place.slots] = b"\x01" * place.slots
        self._store_slots -= place.slots if place.is_store else 0

    def views(self, place: Place, slots: int) -> list[memoryview]:
        """The first `slots` of a place's slots, whole."""
        size = self._slot_bytes
        begins = (place.offset + number * size for number in range(slots))
        return [self._view[begin : begin + size] for begin in begins]

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with its last view."""
        os.close(self.fd)
