"""What a soak puts: keys, sizes and bytes, all from an object's number.

Owns: the mix of sizes, and contents of which no two fragments are alike. Must not know: gateways, time.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from xkv_store.geometry import HEADER_BYTES
from xkv_store.key import ObjectKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

NAMESPACE: Final = b"soak-full-cards!"
SIZES: Final = (1, 3, 1, 17, 2, 5, 1, 40, 2, 9)  # fragments, by an object's number: 8.1 slots on average
SLOTS_MAX: Final = max(SIZES)
MEAN_SLOTS: Final = sum(SIZES) / len(SIZES)
OBJECTS_PER_FAMILY: Final = 16
_NUMBER_BYTES: Final = 8
_STEP: Final = 64
_STARTS: Final = 1 << 14


class Objects:
    """Of a card whose slots hold `fragment_bytes`."""

    def __init__(self, fragment_bytes: int) -> None:
        self.fragment_bytes = fragment_bytes
        size = _STARTS * _STEP + SLOTS_MAX * fragment_bytes
        self._noise = np.random.default_rng(11).integers(0, 256, size, dtype=np.uint8)

    @staticmethod
    def fragments(number: int) -> int:
        """How many it has."""
        return SIZES[number % len(SIZES)]

    def length(self, number: int) -> int:
        """Its bytes: the last fragment is filled more or less."""
        return self.fragments(number) * self.fragment_bytes - number * 13 % (self.fragment_bytes - _NUMBER_BYTES)

    @staticmethod
    def place(number: int) -> tuple[int, int]:
        """Family and position."""
        return 1 + number // OBJECTS_PER_FAMILY, number % OBJECTS_PER_FAMILY

    def content(self, number: int) -> npt.NDArray[np.uint8]:
        """Whole fragments, a row each; each begins with the object's number."""
        begin = number % _STARTS * _STEP
        rows = self._noise[begin : begin + self.fragments(number) * self.fragment_bytes]
        found: npt.NDArray[np.uint8] = rows.reshape(-1, self.fragment_bytes).copy()
        found[:, :_NUMBER_BYTES] = np.frombuffer(number.to_bytes(_NUMBER_BYTES, "little"), np.uint8)
        return found

    def fill(self, ring: npt.NDArray[np.uint8], slots: Sequence[int], number: int) -> None:
        """Lay the object into slots of a ring."""
        first, count = slots[0], len(slots)
        rows: slice | Sequence[int] = slots
        if slots[-1] - first == count - 1:
            rows = slice(first, first + count)
        ring[rows, HEADER_BYTES:] = self.content(number)

    def lies(self, ring: npt.NDArray[np.uint8], slots: Sequence[int], number: int) -> bool:
        """Whether these slots hold the object, byte for byte."""
        found = ring[list(slots), HEADER_BYTES:].reshape(-1)
        length = self.length(number)
        return bool(np.array_equal(found[:length], self.content(number).reshape(-1)[:length]))


@lru_cache(maxsize=1 << 12)
def object_key(number: int) -> ObjectKey:
    """Spread evenly, as vLLM's hashes are."""
    return ObjectKey(NAMESPACE, 0, hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest(), 0)
