"""Which chunk leaves next: the one that has not been asked for longest, where ages of new ones may count more.

Owns: the two hands over the index's order and the choice between them. Pure but for its own state: it sees the objects
through `View`. Must not know slots, limbo or the clock.

The order of the index is that of the last time that an object was put or, with AGAIN in its family, asked for, as far
as that is known there. A hand goes from the oldest on; what was asked for since it was filed is filed anew, behind, and
what was not leaves. So the choice is exact, and what is asked for often costs one change of the index in a pass of the
hand, not one for each time. Why, and what it is measured against: docs/adr/0014-who-leaves-first.md.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from .errors import PeerError
from .key import RANK_BYTES, ObjectKey
from .layout import AGAIN, BadBytesError, Record, pack_order_key, parse_order_key
from .recency import Recency

ORDER_BATCH = 64  # entries of the order fetched at a time
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


@dataclass(slots=True)
class _Hand:
    """Over the part of the order from `begin` to before `end`."""

    begin: bytes
    end: bytes
    at: bytes = field(init=False)
    ahead: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    seen: int = 0  # entries of this pass, but for those of others than may leave

    def __post_init__(self) -> None:
        self.at = self.begin

    def head(self, view: View) -> tuple[bytes, bytes] | None:
        """The entry that the hand is at; None at the end of its part, from where it begins anew."""
        if not self.ahead:
            if self.seen >= PASS_ENTRIES_MAX:
                self.rewind()
            self.ahead.extend(view.order_from(self.at, ORDER_BATCH, self.end))
            if not self.ahead:
                self.rewind()
                return None
        return self.ahead[0]

    def pass_on(self, *, counts: bool) -> None:
        """The entry is dealt with. Where it `counts` not, those that do may all stand behind many such."""
        order_key, _ = self.ahead.popleft()
        self.at = order_key + b"\0"
        self.seen += counts

    def makes_room(self, order_key: bytes) -> None:
        """An entry has come here: what was fetched from behind it is fetched again."""
        self.at = min(self.at, order_key)
        while self.ahead and self.ahead[-1][0] > order_key:
            self.ahead.pop()

    def rewind(self) -> None:
        """Begin anew."""
        self.at, self.seen = self.begin, 0
        self.ahead.clear()


_AGAIN_BEGINS = pack_order_key(AGAIN, (1 << 32) - 1, 0)
_ORDER_ENDS = b"\xff" * (len(_AGAIN_BEGINS) + 1)


class Chooser:
    """`next_chunk` is called until enough has left.

    `only`: with what keys begin that may leave; others are passed over. Several may share what is known of recency.
    """

    def __init__(self, recency: Recency, *, only: bytes = b"") -> None:
        self._recency = recency
        self._only = only
        self._hands = (_Hand(b"", _AGAIN_BEGINS), _Hand(_AGAIN_BEGINS, _ORDER_ENDS))

    def next_chunk(self, view: View, budget: Budget) -> list[tuple[bytes, Record]] | None:
        """The objects of the next chunk to leave; None when the budget is spent or nothing can leave."""
        ends = 0
        while budget.left > 0:
            hand = self._older(view)
            if hand is None:
                ends += 1
                if ends > 2:  # once to finish this pass, once through all: nothing can leave
                    return None
                continue
            budget.left -= 1
            order_key, key = hand.ahead[0]
            may_leave = key.startswith(self._only)
            hand.pass_on(counts=may_leave)
            chunk = self._consider(view, order_key, key) if may_leave else None
            if chunk:
                return chunk
        return None

    def _older(self, view: View) -> _Hand | None:
        """The hand that is at what should leave first."""
        new, again = self._hands
        of_new, of_again = new.head(view), again.head(view)
        if of_new is None or of_again is None:
            return new if of_new is not None else again if of_again is not None else None
        return new if self._age(of_new[0]) * self._recency.weight >= self._age(of_again[0]) else again

    def _age(self, order_key: bytes) -> int:
        return max(0, self._recency.now - _filed(order_key)) + 1

    def _consider(self, view: View, order_key: bytes, key: bytes) -> list[tuple[bytes, Record]] | None:
        try:
            family, _, generation = parse_order_key(order_key)
            chunk_key = key[:-RANK_BYTES]
            chunk = view.chunk(chunk_key)
            tags = {ObjectKey.decode(rank_key).tag for rank_key, _ in chunk}
        except (BadBytesError, PeerError):
            return None  # damage in the index: recovery drops what it cannot parse
        if not any(one == key and (own.family, own.generation) == (family, generation) for one, own in chunk):
            return None  # has left, was replaced or filed elsewhere since the snapshot
        if view.held(chunk_key, chunk):
            return None  # nor filed anew: what waits for its commit must be in the overlay as what it is
        filed = _filed(order_key)
        asked = max(self._recency.asked_at(tag) for tag in tags)
        if asked > filed:
            for one, own in chunk:
                view.refile(one, own._replace(family=AGAIN | asked))
                self._hands[1].makes_room(pack_order_key(AGAIN | asked, own.position, own.generation))
            return None
        for tag in tags:
            self._recency.left(tag, filed, again=family >= AGAIN)
        return chunk


def _filed(order_key: bytes) -> int:
    """When the object of this entry was last used, as far as the order knows."""
    try:
        family, _, generation = parse_order_key(order_key)
    except BadBytesError:
        return 0  # damage: passed over as soon as it is looked at
    return family - AGAIN if family >= AGAIN else generation
