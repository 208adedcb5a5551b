"""Fragments that are damaged where they lie, under a gateway that serves or not.

Owns: which slots of a card's databases hold something, and what is done to them.
Must not know: objects, gateways.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from xkv_store.geometry import DATA_OFFSET, HEADER_BYTES
from xkv_store.layout import SLOT_MAGIC

if TYPE_CHECKING:
    import random
    from pathlib import Path

SLOTS_AT_ONCE: Final = 6
FLIPPED_BYTES: Final = 64
FLIP: Final = 0x41  # turns a float's exponent and its last bits, wherever it strikes
KEPT_MAX: Final = 256  # former contents of slots, to be put back

Place = tuple["Path", int]  # a database and the offset of a slot in it


class Damage:
    """The slots of one card, seen from outside."""

    def __init__(self, card: Path, slot_bytes: int, rng: random.Random) -> None:
        self._card = card
        self._slot_bytes = slot_bytes
        self._rng = rng
        self._former: dict[Place, bytes] = {}

    def _held(self) -> list[Place]:
        """Every slot with a header; whether its object still lives is not told."""
        found = []
        for path in sorted(self._card.glob("db-*.xkv")):
            with path.open("rb") as file:
                for offset in range(DATA_OFFSET, path.stat().st_size, self._slot_bytes):
                    file.seek(offset)
                    if file.read(len(SLOT_MAGIC)) == SLOT_MAGIC:
                        found.append((path, offset))
        return found

    def do(self, kind: str) -> int:
        """Damage some slots; how many are others now."""
        held = self._held()
        chosen = self._rng.sample(held, min(SLOTS_AT_ONCE, len(held)))
        before = {place: self._read(place) for place in held[:KEPT_MAX]}
        if kind == "lies_stale":
            chosen = [place for place in held if self._former.get(place, before.get(place)) != before.get(place)]
            chosen = chosen[:SLOTS_AT_ONCE]
        changed = sum(self._strike(kind, place, held) for place in chosen)
        for place, content in before.items():
            self._former.setdefault(place, content)
        return changed

    def _strike(self, kind: str, place: Place, held: list[Place]) -> bool:
        old = self._read(place)
        new = bytearray(old)
        if kind == "lies_flipped":
            start = self._rng.randrange(HEADER_BYTES, self._slot_bytes - FLIPPED_BYTES)
            for at in range(start, start + FLIPPED_BYTES):
                new[at] ^= FLIP
        elif kind == "lies_zeroed":
            new[:] = bytes(len(new))
        elif kind == "lies_cut":
            cut = self._rng.randrange(self._slot_bytes // 4_096) * 4_096
            new[cut:] = bytes(len(new) - cut)
        elif kind == "lies_swapped":
            other = self._rng.choice(held)
            new[:] = self._read(other)
            self._write(other, old)
        else:
            new[:] = self._former.pop(place)
        if new == old:
            return False
        self._write(place, bytes(new))
        return True

    def _read(self, place: Place) -> bytes:
        path, offset = place
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(self._slot_bytes)

    def _write(self, place: Place, content: bytes) -> None:
        path, offset = place
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
