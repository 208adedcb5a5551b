"""Which chunk leaves next: the one that has not been asked for longest, where ages of some kinds may count more.

Owns: the hands over the index's order and the choice between them. Pure but for its own state: it sees the objects
through `View`. Must not know slots, limbo or the clock.

The order of the index is that of the last time that an object was put or, with AGAIN in its family, asked for, as far
as that is known there: a part for each kind of objects (see `recency`). In each a hand goes from the oldest on; what
was asked for since it was filed is filed anew, behind, and what was not leaves. A hand is told of what comes to where
it has been: later chunks of a request, which leave before its earlier ones. So the choice is exact, and what is asked
for often costs one change of the index in a pass of the hand, not one for each time. Why, and what it is measured
against: docs/adr/0014-who-leaves-first.md.
"""

from bisect import bisect_left
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
AHEAD_MAX = 256  # entries that a hand knows of, with those that came to where it had been: more meets its next pass
EMPTY_CHOICES = 64  # for so many choices nobody looks into a part where nothing was, unless something comes there
PASS_ENTRIES_MAX = 2_048  # or as many as there are objects: then a hand begins anew, as what was held is free…
OTHERS_PER_OWN = 64  # …but one that passes others does not look at more of them by that, for each of its own
PASSES_MAX = 3  # in a choice: to the end of the present one, one to file anew, one through all: nothing can leave


class View(Protocol):
    """What the choice needs to see of the card, and the one thing that it does to it."""

    @property
    def objects(self) -> int:
        """How many there are of those that may leave."""

    def order_from(self, order_key: bytes, limit: int, end: bytes) -> list[tuple[bytes, bytes]]:
        """(order key, object key) from `order_key` to before `end`."""

    def chunk(self, key: bytes) -> list[tuple[bytes, Record]]:
        """The present objects of the chunk that an object belongs to."""

    def held(self, chunk_key: bytes, chunk: list[tuple[bytes, Record]]) -> bool:
        """Whether something of the chunk is being read or written."""

    def refile(self, key: bytes, record: Record, former: Record) -> None:
        """The object has another place in the order, that of `record`; `Chooser.came` hears when it stands there."""


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
    at: bytes = field(init=False)  # from here on nothing is fetched
    ahead: deque[_Entry] = field(default_factory=deque)  # in their order
    seen: int = 0  # entries of this pass, but for those of others than may leave…
    others: int = 0  # …which are these
    rests: int = 0  # choices for which its part counts as one of nothing that may leave

    def __post_init__(self) -> None:
        self.at = self.begin

    def head(self, view: View, recency: Recency) -> _Entry | None:
        """The entry that the hand is at; None at the end of its part, from where it begins anew when that is due."""
        if self.rests:
            self.rests -= 1
            return None
        if not self.ahead:
            if self.seen >= PASS_ENTRIES_MAX or self.seen > max(view.objects, self.others // OTHERS_PER_OWN):
                self.rewind()
            pairs = view.order_from(self.at, ORDER_BATCH, self.end)
            if not pairs:
                if not self.seen:
                    self.rests = max(EMPTY_CHOICES, self.others // OTHERS_PER_OWN)
                if not self.seen or self.seen >= self.others // OTHERS_PER_OWN:
                    self.rewind()
                return None
            self.at = pairs[-1][0] + b"\0"
            self.ahead.extend(_entries(pairs, recency))
        return self.ahead[0]

    def pass_on(self, *, counts: bool) -> None:
        """The entry is dealt with. Where it `counts` not, those that do may all stand behind many such."""
        self.ahead.popleft()
        self.seen += counts
        self.others += not counts

    def misses(self, order_key: bytes) -> bool:
        """Whether it goes on without what comes to that place, unless it is told of it."""
        return order_key < self.at or self.rests > 0

    def take(self, entry: _Entry) -> None:
        """It is told of what it misses."""
        if self.rests:  # nothing else is in its part
            self.rests, self.at = 0, entry.order_key
            return
        place = bisect_left(self.ahead, entry)
        if place == len(self.ahead) or self.ahead[place].order_key != entry.order_key:
            self.ahead.insert(place, entry)
        if len(self.ahead) > AHEAD_MAX:
            self.at = self.ahead.pop().order_key

    def rewind(self) -> None:
        """Begin anew."""
        self.at, self.seen, self.others = self.begin, 0, 0
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

    def came(self, order_key: bytes, key: bytes) -> None:
        """An object that may leave stands at that place of the order from now on."""
        family, _, generation = parse_order_key(order_key)
        hand = self._hands[kind_of(family)]
        if hand.misses(order_key):
            filed = self._recency.filed(family, generation)
            hand.take(_Entry(order_key, key, family, generation, filed))

    def next_chunk(self, view: View, budget: Budget) -> list[tuple[bytes, Record]] | None:
        """The objects of the next chunk to leave; None when the budget is spent or nothing can leave."""
        ends, looks_left = 0, PASSES_MAX * view.objects + ORDER_BATCH  # the order may show some that have left
        while budget.left > 0 and looks_left:
            hand = self._oldest(view, budget)
            if hand is None:
                if budget.left <= 0:
                    return None
                for one in self._hands:
                    one.rests = 0
                    one.rewind()
                ends += 1
                if ends == PASSES_MAX:
                    return None
                continue
            budget.left -= 1
            looks_left -= 1
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
        chunk = view.chunk(key)
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
            family = FAMILY_OF_KIND[kind or AGAIN_KIND] | asked
            for rank_key, record in chunk:
                view.refile(rank_key, record._replace(family=family), record)
            return None
        for tag in tags:
            recency.left(tag, entry.filed, max(uses, USES_OF_KIND[kind]))
        return chunk


def tags_of(chunk: list[tuple[bytes, Record]]) -> tuple[int, ...]:
    """The tags of a chunk's objects, which are in the order of their ranks; PeerError where a key is none."""
    last = chunk[-1][0]
    if last[-RANK_BYTES:] < _SECOND_PAGE:
        return (encoded_entry(last)[0],)
    return tuple({encoded_entry(key)[0] for key, _ in chunk})
