"""What a capacity holds under each policy: the references of a library, and the product's own code.

Owns: how a request's blocks are asked for and put in each. Must not know: traces, tables.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, Protocol

import libcachesim

from xkv_store.eviction import Budget, Chooser
from xkv_store.key import ObjectKey
from xkv_store.layout import Record, pack_order_key
from xkv_store.recency import Recency, Weights
from xkv_store.table import TableWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAMESPACE: Final = b"bench-evictions!"
STEPS: Final = 1 << 30
LOAD_MAX: Final = 512  # entries of one piece of a sorted list


class Policy(Protocol):
    """One capacity."""

    def request(self, blocks: Sequence[int], stored: Sequence[bool]) -> tuple[int, int]:
        """(how many leading blocks are held, how many blocks are written); `stored`: which of them may be."""


class Reference:
    """A policy of libCacheSim (Yang and others): every block of a request is used, or put, in the order of the prompt.

    `tail_first`: from the last block on, so that a prefix's beginning is the newest of it.
    """

    def __init__(self, policy: Callable[[int], libcachesim.CacheBase], capacity: int, *, tail_first: bool) -> None:
        self._held = policy(capacity)
        self._one = libcachesim.Request()
        self._one.obj_size = 1
        self._tail_first = tail_first

    def request(self, blocks: Sequence[int], stored: Sequence[bool]) -> tuple[int, int]:
        """See Policy."""
        one, held = self._one, self._held
        hit = 0
        for block in blocks:
            one.obj_id = block
            if held.find(one, False) is None:
                break
            hit += 1
        written = 0
        pairs = list(zip(blocks, stored, strict=True))
        for block, may_store in reversed(pairs) if self._tail_first else pairs:
            one.obj_id = block
            if may_store or held.find(one, False) is not None:
                written += not held.get(one)
        return hit, written


class Ours:
    """`xkv_store.eviction` and `xkv_store.recency` as the card uses them, with a lookup table; objects of one slot."""

    def __init__(self, capacity: int, slots_each: int = 8) -> None:
        self._capacity = capacity
        self._table = TableWriter.create(max(64, 2 * capacity), bytes(16), bytes(16))
        self._recency = Recency(capacity * slots_each, self._table)
        self._chooser = Chooser(self._recency)
        self._records: dict[bytes, Record] = {}
        self._order = SortedOrder()
        self._keys: dict[int, tuple[ObjectKey, bytes]] = {}
        self._family = 0
        self._generation = 0

    def request(self, blocks: Sequence[int], stored: Sequence[bool]) -> tuple[int, int]:
        """See Policy."""
        self._family += 1
        keys = [self._key(block) for block in blocks]
        hit = 0
        for key, encoded in keys:
            if encoded not in self._records:
                break
            self._recency.touch(key.tag)
            hit += 1
        for key, _ in keys[:hit]:
            self._recency.touch(key.tag)  # the lookup was one, this is the load
        written = 0
        for position in range(hit, len(keys)):
            key, encoded = keys[position]
            if encoded in self._records:
                self._recency.touch(key.tag)  # computed again, since one before it is missing
            elif stored[position]:
                self._put(key, encoded, position)
                written += 1
        self._recency.adapt(len(self._records))
        return hit, written

    @property
    def weights(self) -> Weights:
        """See `xkv_store.recency`."""
        return self._recency.weights

    def close(self) -> None:
        """Give the table back."""
        self._table.close()

    def _key(self, block: int) -> tuple[ObjectKey, bytes]:
        found = self._keys.get(block)
        if found is None:
            digest = hashlib.blake2b(block.to_bytes(8, "little"), digest_size=32).digest()
            key = ObjectKey(NAMESPACE, 0, digest, 0)
            found = self._keys[block] = (key, key.encode())
        return found

    def _put(self, key: ObjectKey, encoded: bytes, position: int) -> None:
        while len(self._records) >= self._capacity:
            chunk = self._chooser.next_chunk(self, Budget(STEPS))
            assert chunk is not None, "nothing is held"
            for one, record in chunk:
                decoded = ObjectKey.decode(one)
                self._table.remove_rank(decoded.tag, decoded.bit)
                self._order.remove(_place(record))
                del self._records[one]
        self._generation += 1
        family = self._recency.came(key.tag, self._family, self._generation)
        record = Record(self._generation, 1, family, position, ())
        self._stands(encoded, record)
        self._table.put(key.tag, self._generation, key.bit, 1)
        self._recency.confirmed(key.tag, family)

    # --- what `xkv_store.eviction.View` asks for ----------------------------------------------------------

    @property
    def objects(self) -> int:
        """See View."""
        return len(self._records)

    def order_from(self, order_key: bytes, limit: int, end: bytes) -> list[tuple[bytes, bytes]]:
        """See View."""
        return [pair for pair in self._order.range_from(order_key, limit) if pair[0] < end]

    def chunk(self, key: bytes) -> list[tuple[bytes, Record]]:
        """See View."""
        record = self._records.get(key)
        return [(key, record)] if record is not None else []

    def held(self, chunk_key: bytes, chunk: list[tuple[bytes, Record]]) -> bool:  # noqa: ARG002 -- nothing is read here
        """See View."""
        return False

    def refile(self, key: bytes, record: Record, former: Record) -> None:
        """See View."""
        self._order.remove(_place(former))
        self._stands(key, record)

    def _stands(self, key: bytes, record: Record) -> None:
        self._records[key] = record
        self._order.add(_place(record), key)
        self._chooser.came(_place(record), key)


def _place(record: Record) -> bytes:
    return pack_order_key(record.family, record.position, record.generation)


class SortedOrder:
    """Order keys with object keys, in pieces of bounded size: what LMDB does in the product."""

    def __init__(self) -> None:
        self._pieces: list[list[bytes]] = [[]]
        self._firsts: list[bytes] = [b""]
        self._keys: dict[bytes, bytes] = {}

    def add(self, place: bytes, key: bytes) -> None:
        """One more."""
        self._keys[place] = key
        number = self._piece(place)
        piece = self._pieces[number]
        piece.insert(bisect_left(piece, place), place)
        if len(piece) > 2 * LOAD_MAX:
            self._pieces[number : number + 1] = [piece[:LOAD_MAX], piece[LOAD_MAX:]]
            self._firsts.insert(number + 1, piece[LOAD_MAX])

    def remove(self, place: bytes) -> None:
        """One less."""
        del self._keys[place]
        number = self._piece(place)
        piece = self._pieces[number]
        del piece[bisect_left(piece, place)]
        if not piece and number:
            del self._pieces[number], self._firsts[number]

    def range_from(self, place: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """The next `limit` from `place` on."""
        number = self._piece(place)
        at = bisect_left(self._pieces[number], place)
        found = self._pieces[number][at : at + limit]
        while len(found) < limit and number + 1 < len(self._pieces):
            number += 1
            found = found + self._pieces[number][: limit - len(found)]
        return [(one, self._keys[one]) for one in found]

    def _piece(self, place: bytes) -> int:
        return max(0, bisect_left(self._firsts, place + b"\0") - 1)


REFERENCES: Final = {
    "LRU": libcachesim.LRU,
    "SIEVE": libcachesim.Sieve,
    "S3-FIFO": libcachesim.S3FIFO,
}
