"""Which chunk leaves next: SIEVE over the index's order.

Owns the hand, the visited marks and the choice. Pure but for its own state: it sees the objects through `View`.
Must not know slots, limbo or the clock.

SIEVE: Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024. A hand goes from the oldest to the newest; what was
visited since the hand's last pass stays and loses its mark, what was not leaves. New objects come in behind the
hand's turning point, so that a scan of things used once passes through without driving out what is used.
"""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from .errors import PeerError
from .key import RANK_BYTES, ObjectKey
from .layout import BadBytesError, Record, parse_order_key

ORDER_BATCH = 64  # entries of the order fetched at a time
SPARED_MAX = 4_096  # chunks at one place of the order that were spared in this pass; more are forgotten
MARKS_PER_SLOT = 4  # marks are shared by tags that fall together: at most one chunk in four stays by mistake
MARKS_MIN = 1_024


class View(Protocol):
    """What the choice needs to see of the card."""

    def order_from(self, order_key: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """(order key, object key) from `order_key` on."""

    def generation_of(self, key: bytes) -> int | None:
        """The present generation of an object."""

    def chunk(self, chunk_key: bytes) -> list[tuple[bytes, Record]]:
        """The present objects of a chunk."""

    def held(self, chunk_key: bytes, chunk: list[tuple[bytes, Record]]) -> bool:
        """Whether something of the chunk is being read or written."""


class Budget:
    """How many entries one call may still look at."""

    __slots__ = ("left",)

    def __init__(self, steps: int) -> None:
        self.left = steps


class Marks:
    """One visited mark per tag (a byte, for speed), in a table a few times as large as objects can be many."""

    def __init__(self, slots: int) -> None:
        self._size = max(MARKS_MIN, slots * MARKS_PER_SLOT) | 1  # odd: tags that differ in any bit fall apart
        self._bytes = bytearray(self._size)

    def set_all(self, tags: Iterable[int]) -> None:
        """These chunks were asked for."""
        marks, size = self._bytes, self._size
        for tag in tags:
            marks[tag % size] = 1

    def set(self, tag: int) -> None:
        """This chunk was asked for."""
        self._bytes[tag % self._size] = 1

    def clear(self, tag: int) -> bool:
        """Whether the chunk was asked for since it was last cleared."""
        at = tag % self._size
        marked = self._bytes[at]
        self._bytes[at] = 0
        return bool(marked)


class Sieve:
    """The hand. `next_chunk` is called until enough has left.

    `only`: with what keys begin that may leave; the hand passes over all others. Several hands may share their marks.
    """

    def __init__(self, slots: int, *, marks: Marks | None = None, only: bytes = b"") -> None:
        self.marks = Marks(slots) if marks is None else marks
        self._only = only
        self._hand = b""
        self._ahead: deque[tuple[bytes, bytes]] = deque()
        self._place: tuple[int, int] = (0, 0)  # the family and position that the hand is at
        self._spared: set[bytes] = set()  # chunks spared there: their other ranks' entries follow

    def next_chunk(self, view: View, budget: Budget) -> list[tuple[bytes, Record]] | None:
        """The objects of the next chunk to leave; None when the budget is spent or nothing can leave."""
        turns = 0
        while budget.left > 0:
            if not self._ahead:
                self._ahead.extend(view.order_from(self._hand, ORDER_BATCH))
            if not self._ahead:
                turns += 1
                if turns > 2:  # once to finish this pass, once through all: the order is empty
                    return None
                self._hand = b""
                self._spared.clear()  # a card may have a single place: what was spared there leaves in the next pass
                continue
            budget.left -= 1
            order_key, key = self._ahead.popleft()
            self._hand = order_key + b"\0"
            if not key.startswith(self._only):
                continue
            chunk = self._consider(view, order_key, key)
            if chunk:
                return chunk
        return None

    def _consider(self, view: View, order_key: bytes, key: bytes) -> list[tuple[bytes, Record]] | None:
        try:
            family, position, generation = parse_order_key(order_key)
            ObjectKey.decode(key)
        except (BadBytesError, PeerError):
            return None  # damage in the index: recovery drops what it cannot parse
        if view.generation_of(key) != generation:
            return None  # has left or been replaced since the snapshot
        if (family, position) != self._place or len(self._spared) >= SPARED_MAX:
            self._place = (family, position)
            self._spared.clear()
        chunk_key = key[:-RANK_BYTES]
        if chunk_key in self._spared:
            return None
        chunk = view.chunk(chunk_key)
        tags = {ObjectKey.decode(rank_key).tag for rank_key, _ in chunk}
        visited = [self.marks.clear(tag) for tag in tags]
        if any(visited) or view.held(chunk_key, chunk):
            self._spared.add(chunk_key)
            return None
        return chunk
