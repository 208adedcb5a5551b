"""Why objects have left a card, or never came: the latest of each, by their keys' digests (docs/why.md).

Owns: the two bounded records, what is counted by reason, the file that keeps them over a clean end (docs/format.md).
Must not know: the index, slots, who asks, what a reason means for whoever reads it.

A record is a ring of numbers: the newest takes the place of the oldest, and says from when on it is whole.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from .errors import UserError
from .geometry import NAMESPACE_BYTES
from .private_files import open_private

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

LEFT_MAX: Final = 262_144
"""Objects that have left: 24 bytes each, 6 MiB; a day of three evictions a second."""
REFUSED_MAX: Final = 65_536
"""Stores that came to nothing: 1.5 MiB. A burst of them must not drive out what has left."""
RECORDED_PER_SLOT: Final = 4
"""A small card's records are smaller: it has turned over four times by then."""
RECORDED_MIN: Final = 1_024
TOLD_MAX: Final = 8
"""Of one key, the newest: a message holds them for as many keys as it may name."""
NAMESPACES_MAX: Final = 1_024
"""Whose refused stores are counted; beyond it the one that was not refused for the longest time leaves."""
FILE_NAME: Final = "departures"

_MAGIC: Final = b"XKVLEFT1"
_HEADER: Final = struct.Struct("<8s16sQQQII")  # magic, card, boots, since when (left, refused), how many of each
_CHECKSUM_BYTES: Final = 8
_WORDS: Final = 3  # digest, generation, milliseconds since 1970 × 256 + reason
_WORD_BYTES: Final = 8
_NS_PER_MS: Final = 1_000_000
_MASK: Final = (1 << 64) - 1


class Reason(str, Enum):
    """Why an object is not on the card, or is another one than it was."""

    EVICTED = "evicted"
    REPLACED = "replaced"
    PURGED = "purged"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    SHED = "shed"
    OVER_QUOTA = "over_quota"
    FAILED = "failed"
    INVALID = "invalid"


REASONS: Final = tuple(Reason)  # their numbers in the file: more may come at the end
REFUSALS: Final = (Reason.SHED, Reason.OVER_QUOTA, Reason.FAILED, Reason.INVALID)
_NUMBERS: Final = {reason: number for number, reason in enumerate(REASONS)}
COUNTERS: Final = {
    Reason.EVICTED: "evicted_objects",
    Reason.REPLACED: "replaced",
    Reason.PURGED: "purged_objects",
    Reason.CORRUPT: "dropped_corrupt",
    Reason.UNREADABLE: "dropped_unreadable",
    Reason.SHED: "puts_shed",
    Reason.OVER_QUOTA: "puts_shed",
    Reason.FAILED: "puts_failed",
    Reason.INVALID: "puts_invalid",
}


@dataclass(frozen=True, slots=True)
class Departure:
    """One object that left, or one store of it that came to nothing (generation 0); `when_ms` since 1970."""

    reason: Reason
    generation: int
    when_ms: int


class _Record:
    """The newest `capacity` of them. `since_ms`: nothing later than this is missing; 0: nothing is."""

    def __init__(self, capacity: int, since_ms: int) -> None:
        self.since_ms = since_ms
        self.held = 0
        self._words = np.zeros((_WORDS, capacity), dtype=np.uint64)
        self._digests, self._generations, self._whens = (memoryview(self._words[one]) for one in range(_WORDS))
        self._next = 0

    def add(self, digest: int, generation: int, when: int) -> None:
        at = self._next
        if self.held == len(self._digests):
            self.since_ms = max(self.since_ms, self._whens[at] >> 8)
        else:
            self.held += 1
        self._digests[at], self._generations[at], self._whens[at] = digest, generation, when
        self._next = (at + 1) % len(self._digests)

    def find(self, digest: int) -> list[Departure]:
        """The newest first, at most TOLD_MAX."""
        places = np.flatnonzero(self._words[0][: self.held] == np.uint64(digest))
        newest_first = sorted(
            places.tolist(), key=lambda place: (place - self._next) % len(self._digests), reverse=True
        )
        found = []
        for place in newest_first[:TOLD_MAX]:
            when_ms, number = divmod(self._whens[place], 256)
            if number < len(REASONS):
                found.append(Departure(REASONS[number], self._generations[place], when_ms))
        return found

    def pack(self) -> bytes:
        """All of it, the oldest first."""
        oldest_first = np.roll(self._words[:, : self.held], -self._next % max(self.held, 1), axis=1)
        packed: bytes = oldest_first.T.tobytes()
        return packed

    def unpack(self, packed: bytes) -> None:
        """Take in what `pack` gave, of a record of any capacity; before anything was added."""
        capacity = len(self._digests)
        found = np.frombuffer(packed, np.uint64).reshape(-1, _WORDS)
        if len(found) > capacity:
            self.since_ms = max(self.since_ms, int(found[len(found) - capacity - 1, 2]) >> 8)
            found = found[len(found) - capacity :]
        self._words[:, : len(found)] = found.T
        self.held, self._next = len(found), len(found) % capacity


class Departures:
    """What left one card, and what was refused. One thread. `counters`: by reason, of this life."""

    def __init__(self, slots: int, *, clock_ns: Callable[[], int] = time.time_ns, since_ms: int = 0) -> None:
        """`slots`: the card's; `since_ms`: 0 where nothing has happened to the card before."""
        wanted = max(RECORDED_MIN, slots * RECORDED_PER_SLOT)
        self._clock_ns = clock_ns
        self._left = _Record(min(LEFT_MAX, wanted), since_ms)
        self._refused = _Record(min(REFUSED_MAX, wanted), since_ms)
        self._refused_of: dict[bytes, Counter[Reason]] = {}
        self.counters: Counter[str] = Counter()

    def left(self, key: bytes, reason: Reason, generation: int) -> None:
        """The object of this encoded key is not the key's present one any more."""
        self._count(reason)
        self._left.add(xxh3_64_intdigest(key), generation, self._when(reason))

    def refused(self, key: bytes, reason: Reason) -> None:
        """A store of this key came to nothing."""
        self._count(reason)
        self._refused.add(xxh3_64_intdigest(key), 0, self._when(reason))
        namespace = bytes(key[:NAMESPACE_BYTES])
        counts = self._refused_of.pop(namespace, None) or Counter()
        counts[reason] += 1
        self._refused_of[namespace] = counts
        if len(self._refused_of) > NAMESPACES_MAX:
            del self._refused_of[next(iter(self._refused_of))]

    def of(self, key: bytes) -> tuple[list[Departure], list[Departure]]:
        """(what left of this key, what was refused of it), the newest first."""
        digest = xxh3_64_intdigest(key)
        return self._left.find(digest), self._refused.find(digest)

    def refusals_of(self, namespace: bytes) -> dict[Reason, int]:
        """How many stores of a namespace came to nothing in this life, by reason."""
        counts: Counter[Reason] = self._refused_of.get(namespace, Counter())
        return {reason: counts.get(reason, 0) for reason in REFUSALS}

    @property
    def since_ms(self) -> tuple[int, int]:
        """Since when the records are whole (left, refused); 0: since the card was made."""
        return self._left.since_ms, self._refused.since_ms

    def _count(self, reason: Reason) -> None:
        self.counters[COUNTERS[reason]] += 1
        if reason is Reason.OVER_QUOTA:
            self.counters["puts_over_quota"] += 1

    def _when(self, reason: Reason) -> int:
        return (self._clock_ns() // _NS_PER_MS << 8 | _NUMBERS[reason]) & _MASK

    # --- over a clean end -------------------------------------------------------------------------------------

    def pack(self, card_uuid: bytes, boots: int) -> bytes:
        """The file's content; `boots`: the life of the card that writes it."""
        left, refused = self._left, self._refused
        header = _HEADER.pack(_MAGIC, card_uuid, boots, left.since_ms, refused.since_ms, left.held, refused.held)
        body = header + left.pack() + refused.pack()
        return body + xxh3_64_digest(body)

    def save(self, folder: Path, card_uuid: bytes, boots: int) -> None:
        """Keep the records in the card's folder. Where that fails nothing is kept, and nothing else happens."""
        path, making = folder / FILE_NAME, folder / f"{FILE_NAME}.new"
        try:
            making.unlink(missing_ok=True)
            with open(open_private(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:  # noqa: PTH123
                file.write(self.pack(card_uuid, boots))
            making.replace(path)
        except (OSError, UserError) as error:
            log.warning("why objects have left is not kept over this end: %s", error)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        card_uuid: bytes,
        boots: int,
        slots: int,
        is_new: bool,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> Departures:
        """What former lives of the card kept; `boots`: of this one; `is_new`: nothing was ever put on it.

        Where a life ended without a word, what was kept before it is told, and that some is missing.
        """
        made = cls(slots, clock_ns=clock_ns, since_ms=0 if is_new else clock_ns() // _NS_PER_MS)
        packed = _read(folder / FILE_NAME)
        if packed is None or packed[-_CHECKSUM_BYTES:] != xxh3_64_digest(packed[:-_CHECKSUM_BYTES]):
            return made
        _, whose, of_boots, *since_ms, left, refused = _HEADER.unpack_from(packed)
        middle = _HEADER.size + left * _WORDS * _WORD_BYTES
        end = middle + refused * _WORDS * _WORD_BYTES
        if whose != card_uuid or end + _CHECKSUM_BYTES != len(packed):
            return made
        if of_boots + 1 == boots:
            made._left.since_ms, made._refused.since_ms = since_ms
        made._left.unpack(packed[_HEADER.size : middle])
        made._refused.unpack(packed[middle:end])
        return made


def _read(path: Path) -> bytes | None:
    bytes_max = _HEADER.size + (LEFT_MAX + REFUSED_MAX) * _WORDS * _WORD_BYTES + _CHECKSUM_BYTES
    try:
        with open(open_private(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123  a descriptor
            packed = file.read(bytes_max + 1)
    except (OSError, UserError):
        return None
    is_whole = _HEADER.size + _CHECKSUM_BYTES <= len(packed) <= bytes_max and packed.startswith(_MAGIC)
    return packed if is_whole else None
