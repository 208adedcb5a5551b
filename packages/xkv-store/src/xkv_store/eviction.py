"""Which chunk leaves next: the one that has not been asked for longest, where ages of some kinds may count more.

Owns: the hands over the index's order and the choice between them. Pure but for its own state: it sees the objects
through `View`. Must not know slots, limbo or the clock.

The order of the index is that of the last time that an object was put or, with AGAIN in its family, asked for, as far
as that is known there: a part for each kind of objects (see `recency`). In each a hand goes from the oldest on; what
was asked for since it was filed is filed anew, behind, and what was not leaves. So the choice is exact, and what is
asked for often costs one change of the index in a pass of the hand, not one for each time. Why, and what it is measured
against: docs/adr/0014-who-leaves-first.md.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple, Protocol

from .errors import PeerError
from .geometry import RANKS_PER_ENTRY
from .key import RANK_BYTES, encoded_entry
from .layout import AGAIN, OFTEN, BadBytesError, Record, pack_order_key, parse_order_key
from .recency import AGAIN_KIND, FAMILY_OF_KIND, KIND_OF_USES, USES_OF_KIND, Recency, kind_of

ORDER_BATCH = 64  # entries of the order fetched at a time
EMPTY_CHOICES = 64  # for so many choices nobody looks whether what may leave has come to a part where nothing was
PASS_ENTRIES_MAX = 2_048  # then a hand begins anew: what was held is free, what came late may stand behind it


class View(Protocol):
    """What the choice needs to see of the card, and the one thing that it does to it."""

    def order_from(self, order_key: bytes, limit: int, end: bytes) -> list[tuple[bytes, bytes]]:
        """(order key, object key) from `order_key` to before `end`."""

    def chunk(self, chunk_key: bytes) -> list[tuple[bytes, Record]]:
        """The present objects of a chunk."""

    def held(self, chunk_key: bytes, chunk: list[tuple[bytes, Record]]) -> bool:
        """Whether something of the chunk is being read or written."""

    def refile(self, key: bytes, record: Record) -> None:
        """The object has another place in the order from now on, that of `record`."""


class Budget:
    """How many entries one call may still look at."""

    __slots__ = ("left",)

    def __init__(self, steps: int) -> None:
        self.left = steps


_SECOND_PAGE = RANKS_PER_ENTRY.to_bytes(RANK_BYTES, "big")  # of ranks: from this one on they have another tag


class _Entry(NamedTuple):
    """Of the order. `filed`: when the object was last used, as far as its place says."""

    order_key: bytes
    key: bytes
    family: int
    generation: int
    filed: int


@dataclass(slots=True)
class _Hand:
    """Over the part of the order from `begin` to before `end`."""

    begin: bytes
    end: bytes
    at: bytes = field(init=False)
    ahead: deque[_Entry] = field(default_factory=deque)
    seen: int = 0  # entries of this pass, but for those of others than may leave
    rests: int = 0  # choices for which its part counts as one of nothing that may leave

    def __post_init__(self) -> None:
        self.at = self.begin

    def head(self, view: View, recency: Recency) -> _Entry | None:
        """The entry that the hand is at; None at the end of its part, from where it begins anew."""
        if self.rests:
            self.rests -= 1
            return None
        if not self.ahead:
            if self.seen >= PASS_ENTRIES_MAX:
                self.rewind()
            self.ahead.extend(_entries(view.order_from(self.at, ORDER_BATCH, self.end), recency))
            if not self.ahead:
                self.rests = 0 if self.seen else EMPTY_CHOICES
                self.rewind()
                return None
        return self.ahead[0]

    def pass_on(self, *, counts: bool) -> None:
        """The entry is dealt with. Where it `counts` not, those that do may all stand behind many such."""
        self.at = self.ahead.popleft().order_key + b"\0"
        self.seen += counts

    def makes_room(self, order_key: bytes) -> None:
        """An entry has come here: what was fetched from behind it is fetched again."""
        self.rests = 0
        self.at = min(self.at, order_key)
        while self.ahead and self.ahead[-1].order_key > order_key:
            self.ahead.pop()

    def rewind(self) -> None:
        """Begin anew."""
        self.at, self.seen = self.begin, 0
        self.ahead.clear()


def _entries(pairs: list[tuple[bytes, bytes]], recency: Recency) -> list[_Entry]:
    """Of new objects of one family all are as old as its first, which stands behind the others."""
    found, of_family, filed = [], -1, 0
    for order_key, key in reversed(pairs):
        try:
            family, _, generation = parse_order_key(order_key)
        except BadBytesError:
            found.append(_Entry(order_key, b"", 0, 0, 0))  # damage: passed over as soon as it is looked at
            continue
        if family != of_family:
            of_family, filed = family, recency.filed(family, generation)
        elif family < AGAIN:
            filed = min(filed, generation)
        found.append(_Entry(order_key, key, family, generation, filed))
    found.reverse()
    return found


_BOUNDS = (
    b"",
    *(pack_order_key(family, (1 << 32) - 1, 0) for family in (AGAIN, OFTEN)),
    b"\xff" * (len(pack_order_key(0, 0, 0)) + 1),
)


class Chooser:
    """`next_chunk` is called until enough has left.

    `only`: with what keys begin that may leave; others are passed over. Several may share what is known of recency.
    """

    def __init__(self, recency: Recency, *, only: bytes = b"") -> None:
        self._recency = recency
        self._only = only
        self._hands = [_Hand(begin, end) for begin, end in pairwise(_BOUNDS)]  # by kind

    def next_chunk(self, view: View, budget: Budget) -> list[tuple[bytes, Record]] | None:
        """The objects of the next chunk to leave; None when the budget is spent or nothing can leave."""
        ends = 0
        while budget.left > 0:
            hand = self._oldest(view, budget)
            if hand is None:
                if budget.left <= 0:
                    return None
                for one in self._hands:
                    one.rests = 0
                ends += 1
                if ends > 2:  # once to finish this pass, once through all: nothing can leave
                    return None
                continue
            budget.left -= 1
            entry = hand.ahead[0]
            hand.pass_on(counts=True)
            chunk = self._consider(view, entry)
            if chunk:
                return chunk
        return None

    def _oldest(self, view: View, budget: Budget) -> _Hand | None:
        """The hand that is at what should leave first; of those that are at equals the one of what is newer.

        Others' entries are passed over before ages are compared: old ones would be chosen again at each pass,
        before the one that may leave. None, too, when the budget is spent on them.
        """
        recency = self._recency
        now, weights = recency.now + 1, recency.weights
        oldest, its_age = None, -inf
        for kind, hand in enumerate(self._hands):
            entry = hand.ahead[0] if hand.ahead else hand.head(view, recency)
            while entry is not None and not entry.key.startswith(self._only):
                if budget.left <= 0:
                    return None
                budget.left -= 1
                hand.pass_on(counts=False)
                entry = hand.ahead[0] if hand.ahead else hand.head(view, recency)
            if entry is not None and (age := (now - entry.filed) / weights[kind]) > its_age:
                oldest, its_age = hand, age
        return oldest

    def _consider(self, view: View, entry: _Entry) -> list[tuple[bytes, Record]] | None:
        key, recency = entry.key, self._recency
        chunk_key = key[:-RANK_BYTES]
        chunk = view.chunk(chunk_key)
        own = None
        for rank_key, record in chunk:
            if rank_key == key:
                own = record
        if own is None or own.generation != entry.generation or own.family != entry.family:
            return None  # has left, was replaced or filed elsewhere since the snapshot
        if view.held(chunk_key, chunk):
            return None  # nor filed anew: what waits for its commit must be in the overlay as what it is
        try:
            tags = tags_of(chunk)
        except PeerError:
            return None  # damage in the index: recovery drops what it cannot parse
        asked, uses = recency.asked(tags[0]) if len(tags) == 1 else max(map(recency.asked, tags))
        kind = max(kind_of(entry.family), KIND_OF_USES[uses])
        if asked > entry.filed:
            self._file_anew(view, chunk, FAMILY_OF_KIND[kind or AGAIN_KIND] | asked)
            return None
        for tag in tags:
            recency.left(tag, entry.filed, max(uses, USES_OF_KIND[kind]))
        return chunk

    def _file_anew(self, view: View, chunk: list[tuple[bytes, Record]], family: int) -> None:
        hand = self._hands[kind_of(family)]
        for rank_key, record in chunk:
            view.refile(rank_key, record._replace(family=family))
            hand.makes_room(pack_order_key(family, record.position, record.generation))


def tags_of(chunk: list[tuple[bytes, Record]]) -> tuple[int, ...]:
    """The tags of a chunk's objects, which are in the order of their ranks; PeerError where a key is none."""
    last = chunk[-1][0]
    if last[-RANK_BYTES:] < _SECOND_PAGE:
        return (encoded_entry(last)[0],)
    return tuple({encoded_entry(key)[0] for key, _ in chunk})
