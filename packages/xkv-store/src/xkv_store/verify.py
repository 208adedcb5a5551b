"""Proving a card that no gateway serves: every object read, the index compared with the slots, or made anew from them.

Owns the passes over a whole card and what they report. Must not know sessions, how a slot is proved, or who reads it.
"""

import errno
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from .audit import ClosedCard, closed_card
from .card import Card
from .card_folder import open_folder
from .card_options import CardOptions
from .database import aligned_slots
from .departures import Reason
from .errors import CorruptObject, MediumError, OtherObject, PeerError
from .index import Index
from .key import ObjectKey
from .layout import BadBytesError, Record, parse_record
from .medium import Medium, read_through
from .plans import GetPlan

READ_SLOTS_MAX = 64  # slots read at a time: 16 MiB of memory, whatever the object's size
KEYS_AHEAD = 1_024  # fetched from the index at a time


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of one object: `problem` is empty if it is sound.

    `misplaced`: the index leads to what is not this object, so that an index made anew may find it elsewhere.
    """

    key: bytes  # encoded
    generation: int
    length: int
    problem: str
    misplaced: bool = False
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class DamagedIndex:
    """The index cannot be used: no object can be reached by it. `whole`: objects that the slots tell of."""

    problem: str
    whole: int


@dataclass(frozen=True, slots=True)
class Unnamed:
    """`whole` objects on the medium that the index does not name: they have left the card, or the index lost them.

    No problem: what leaves a card lies there until it is overwritten.
    """

    whole: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Beginning:
    """So many objects are going to be proved."""

    objects: int
    problem: str = ""


Finding = Beginning | Verified | DamagedIndex | Unnamed


def verify(options: CardOptions, *, drop: bool) -> Generator[Finding, None, None]:
    """Read and prove every object of the card; with `drop` the corrupt leave it. UserError if it is in use.

    Without `drop` nothing is changed, also not an index that a start would make anew.
    """
    with closed_card(options) as card:
        index = card.open_index()
        if isinstance(index, str):
            yield DamagedIndex(index, len(card.from_slots().objects))
            return
        try:
            yield from _Verifier(card, index, drop=drop).run()
        finally:
            index.close()


def rebuild(options: CardOptions) -> dict[str, object]:
    """Make the index anew from slot headers (what an open does by itself for a damaged one); the card's status."""
    card = Card(options, open_folder(options, rebuild_index=True))
    status = card.status()
    card.close()
    return status


class _Verifier:
    def __init__(self, card: ClosedCard, index: Index, *, drop: bool) -> None:
        self._card = card
        self._index = index
        self._drop = drop
        self._medium = Medium(card.databases, card.geometry, card.uuid)
        self._slots = aligned_slots(READ_SLOTS_MAX, card.geometry.slot_bytes)
        self._dropped: dict[bytes, int] = {}

    def run(self) -> Iterator[Finding]:
        good, used = self._card.survey(self._index)
        yield Beginning(len(good))
        damaged: set[bytes] = set()
        try:
            for row, key in enumerate(self._keys()):
                found = self._verify_one(key, entry_is_good=bool(good[row]))
                if found.problem:
                    damaged.add(key)
                yield found
        finally:
            if self._dropped:
                self._card.remove(self._index, list(self._dropped))
                self._card.note_left(self._index, self._dropped.items(), Reason.CORRUPT)
        # What lies in slots that the index names has just been proved; what is elsewhere is its loss, or has left.
        rebuilt = self._card.from_slots(but=used).objects
        missed = [key for key, record in rebuilt.items() if key in damaged or self._is_newer(key, record)]
        yield Unnamed(len(missed))

    def _keys(self) -> Iterator[bytes]:
        keys = self._index.keys_after(b"", KEYS_AHEAD)
        while keys:
            yield from keys
            keys = self._index.keys_after(keys[-1], KEYS_AHEAD)

    def _is_newer(self, key: bytes, record: Record) -> bool:
        packed = self._index.get(key)
        return packed is None or _parse(packed, record).generation < record.generation

    def _verify_one(self, key: bytes, *, entry_is_good: bool) -> Verified:
        packed = self._index.get(key)
        assert packed is not None, "the card is ours alone"
        record = _parse(packed, Record(0, 0, 0, 0, ()))
        problem, misplaced, bad = "its index entry is damaged, or leads to slots of another one", True, True
        if entry_is_good:
            problem, misplaced, bad = self._prove(key, record)
        if bad and self._drop:
            self._dropped[key] = record.generation
        return Verified(key, record.generation, record.length, problem, misplaced, bad and self._drop)

    def _prove(self, key: bytes, record: Record) -> tuple[str, bool, bool]:
        """(problem, whether the slots are another object's, whether a drop is the remedy)."""
        try:
            decoded = ObjectKey.decode(key)
        except PeerError as error:
            return str(error), True, True
        fragments = self._card.geometry.fragments(record.length)
        plan = GetPlan(decoded, key, *record[:4], fragments, record.extents)
        try:
            read_through(self._medium.read, plan, self._slots, range(fragments))
        except MediumError as error:
            unreadable = error.errno == errno.EIO
            return str(error), isinstance(error, OtherObject), isinstance(error, CorruptObject) or unreadable
        return "", False, False


def _parse(packed: bytes, otherwise: Record) -> Record:
    try:
        return parse_record(packed)
    except BadBytesError:
        return otherwise
