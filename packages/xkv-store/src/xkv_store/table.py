"""The lookup table: what the gateway publishes of its index, read by engines without a message.

Owns the memory file of docs/format.md ("Lookup table"): its one writer and its readers. Must not know the
index, objects or sessions. A reader takes no lock: a torn entry at worst answers wrongly once, and every read
of an object is verified against key and generation.
"""

import fcntl
import logging
import mmap
import os
import sys
from collections.abc import Callable
from errno import EINVAL
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import PeerError
from .layout import FORMAT_VERSION, TABLE_ENTRIES_OFFSET, TABLE_ENTRY, TABLE_HEADER, TABLE_MAGIC

log = logging.getLogger(__name__)

CAPACITY_MAX = 1 << 31  # entries: 64 GiB of table; positions are computed in 64-bit halves
CAPACITY_MIN = 64

_WORD_BYTES = 8
_ENTRY_WORDS = TABLE_ENTRY.size // _WORD_BYTES
_FIRST_WORD = TABLE_ENTRIES_OFFSET // _WORD_BYTES
_ENTRIES_WORD = 3  # words of the header that change: entries in use, highest confirmed generation
_HIGHEST_WORD = 8
_HALF_BITS = 32  # an entry's last word: fragments, and above them when, and how often, the chunk was asked for
_HALF = (1 << _HALF_BITS) - 1
_F_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1; not in the fcntl module of every Python that we run on
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

assert TABLE_ENTRY.size % _WORD_BYTES == 0
assert sys.byteorder == "little", "shared memory is read as native words"

Words: TypeAlias = npt.NDArray[np.uint64]
Answer: TypeAlias = tuple[int, int]  # generation, ranks


class TableWriter:
    """The table of one life of a gateway; used on its main thread only."""

    def __init__(self, fd: int, capacity: int) -> None:
        self._fd = fd
        self.capacity = capacity
        self._map = mmap.mmap(fd, TABLE_ENTRIES_OFFSET + capacity * TABLE_ENTRY.size)
        self._words = memoryview(self._map).cast("Q")
        self._end = len(self._words)
        self.is_exact = True
        """Whether no two objects share a bit: one whose bit is not set is then not in the index either."""

    @classmethod
    def create(cls, capacity: int, card_uuid: bytes, boot_id: bytes) -> "TableWriter":
        """A table of `capacity` entries in a memory file that nobody else can write."""
        assert CAPACITY_MIN <= capacity <= CAPACITY_MAX
        fd = os.memfd_create("xkv-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, TABLE_ENTRIES_OFFSET + capacity * TABLE_ENTRY.size)
        table = cls(fd, capacity)
        header = (TABLE_MAGIC, FORMAT_VERSION, TABLE_ENTRY.size, capacity, 0, card_uuid, boot_id, 0)
        TABLE_HEADER.pack_into(table._map, 0, *header)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if error.errno != EINVAL:
                raise
            log.warning("this kernel cannot seal memory against writing; the lookup table is only opened read-only")
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        return table

    @property
    def entries(self) -> int:
        """Entries in use."""
        return self._words[_ENTRIES_WORD]

    def fd_read_only(self) -> int:
        """A new descriptor, to hand to an engine and to close; it cannot be mapped for writing."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def put(self, tag: int, generation: int, rank_bit: int, fragments: int, *, replaces: bool = False) -> None:
        """Say that the rank with `rank_bit` holds the chunk `tag`, confirmed with `generation`.

        `replaces`: an object of the same key; else one whose bit is set already is of another key with that tag.
        """
        words = self._words
        at = self._find(tag)
        if words[at] == tag:
            words[at + 1] = max(words[at + 1], generation)
            self.is_exact = self.is_exact and (replaces or not words[at + 2] & rank_bit)
            words[at + 2] |= rank_bit
            last = words[at + 3]
            words[at + 3] = last & ~_HALF | max(last & _HALF, fragments)
        else:
            assert words[_ENTRIES_WORD] < self.capacity - 1, "sized for every slot of the card"
            words[at + 1] = generation
            words[at + 2] = rank_bit
            words[at + 3] = fragments
            words[at] = tag  # last: a reader that sees the tag sees its entry
            words[_ENTRIES_WORD] += 1
        words[_HIGHEST_WORD] = max(words[_HIGHEST_WORD], generation)

    def get(self, tag: int) -> Answer | None:
        """(generation, ranks) of the chunk `tag`, or None."""
        at = self._find(tag)
        return (self._words[at + 1], self._words[at + 2]) if self._words[at] == tag else None

    def holds(self, tag: int, rank_bit: int) -> bool:
        """Whether this rank holds the chunk."""
        at = self._find(tag)
        return self._words[at] == tag and bool(self._words[at + 2] & rank_bit)

    def stamp_of(self, tag: int) -> tuple[int, int, int, int] | None:
        """(place for `stamp`, generation, ranks, stamp) of the chunk `tag`; None where nobody holds it.

        The place is good until something is put or removed.
        """
        at = self._find(tag)
        words = self._words
        if words[at] != tag:
            return None
        return at, words[at + 1], words[at + 2], words[at + 3] >> _HALF_BITS

    def stamp(self, at: int, stamp: int) -> None:
        """Stamp the entry there, with 32 bits that are the caller's to understand."""
        self._words[at + 3] = self._words[at + 3] & _HALF | stamp << _HALF_BITS

    def remove_rank(self, tag: int, rank_bit: int) -> None:
        """Say that this rank no longer holds the chunk; the entry goes with its last rank."""
        words = self._words
        at = self._find(tag)
        if words[at] != tag:
            return
        words[at + 2] &= ~rank_bit
        if not words[at + 2]:
            words[_ENTRIES_WORD] -= 1
            self._close_gap(at)

    def remove_failed(self, tag: int, rank_bit: int) -> None:
        """As `remove_rank`, of what the index may not have taken: another object of that bit may still be there."""
        self.is_exact = False
        self.remove_rank(tag, rank_bit)

    def load_many(
        self,
        tags: Words,
        generations: Words,
        rank_bits: Words,
        fragments: Words,
    ) -> None:
        """Fill an empty table with what `put` would make of these rows, without a step per row."""
        assert not self.entries
        if not len(tags):
            return
        order = _order(tags)
        ordered = tags[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        rows = np.zeros((len(starts), _ENTRY_WORDS), np.uint64)
        rows[:, 0] = ordered[starts]
        rows[:, 1] = np.maximum.reduceat(generations[order], starts)
        bits = rank_bits[order]
        rows[:, 2] = np.bitwise_or.reduceat(bits, starts)
        self.is_exact = _are_apart(bits, starts, rows[:, 2])
        rows[:, 3] = np.maximum.reduceat(fragments[order], starts)
        assert len(rows) < self.capacity
        # Sorted by tag is sorted by home, so linear probing puts each row at the later of its home and the
        # place after its predecessor. What runs over the end is put one by one: it wraps around.
        rank = np.arange(len(rows), dtype=np.int64)
        places = rank + np.maximum.accumulate(_homes(rows[:, 0], self.capacity) - rank)
        inside = int(np.searchsorted(places, self.capacity))
        entries = np.frombuffer(self._map, np.uint64, offset=TABLE_ENTRIES_OFFSET).reshape(-1, _ENTRY_WORDS)
        entries[places[:inside]] = rows[:inside]
        self._words[_ENTRIES_WORD] = inside
        self._words[_HIGHEST_WORD] = int(generations.max())
        for tag, generation, bits, count in rows[inside:].tolist():
            self.put(tag, generation, bits, count)

    def close(self) -> None:
        """Give the writer's mapping and descriptor back; readers keep theirs."""
        self._words.release()
        self._map.close()
        os.close(self._fd)

    def _find(self, tag: int) -> int:
        """The word where the entry of `tag` is, or would go."""
        words = self._words
        at = _FIRST_WORD + ((tag * self.capacity) >> 64) * _ENTRY_WORDS
        while (found := words[at]) != tag and found:
            at += _ENTRY_WORDS
            if at == self._end:
                at = _FIRST_WORD
        return at

    def _close_gap(self, gap: int) -> None:
        """Empty the entry at word `gap`, and shift back those that would no longer be found behind it."""
        words, end, capacity = self._words, len(self._words), self.capacity
        at = gap
        while True:
            at += _ENTRY_WORDS
            if at == end:
                at = _FIRST_WORD
            tag = words[at]
            if not tag:
                break
            home = _FIRST_WORD + ((tag * capacity) >> 64) * _ENTRY_WORDS
            # It may move to the gap if its home does not lie cyclically within (gap, at].
            if (gap < home <= at) if gap < at else (home > gap or home <= at):
                continue
            words[gap] = 0  # so that no reader joins the old tag with the new fields
            words[gap + 1], words[gap + 2], words[gap + 3] = words[at + 1], words[at + 2], words[at + 3]
            words[gap] = tag
            gap = at
        words[gap] = 0


class TableReader:
    """An engine's view of a gateway's table. `lookup(tag)` gives (generation, ranks) or None."""

    def __init__(self, mapping: mmap.mmap, header: tuple[int, bytes, bytes]) -> None:
        self.capacity, self.card_uuid, self.boot_id = header
        self._map = mapping
        self._words = memoryview(mapping)[: _table_bytes(self.capacity)].cast("Q")
        self.lookup: Callable[[int], Answer | None] = _lookup_in(self._words, self.capacity)

    @classmethod
    def attach(cls, fd: int, *, check_card_uuid: bytes | None = None) -> "TableReader":
        """Map the table behind `fd` (which stays the caller's); PeerError when it is none."""
        file_bytes = os.fstat(fd).st_size
        if file_bytes < TABLE_ENTRIES_OFFSET:
            raise PeerError(f"a lookup table of {file_bytes} bytes")
        mapping = mmap.mmap(fd, file_bytes, prot=mmap.PROT_READ)
        magic, version, entry_bytes, capacity, _, card_uuid, boot_id, _ = TABLE_HEADER.unpack_from(mapping)
        problem = ""
        if (magic, version, entry_bytes) != (TABLE_MAGIC, FORMAT_VERSION, TABLE_ENTRY.size):
            problem = f"not a lookup table of version {FORMAT_VERSION}"
        elif not 1 <= capacity <= CAPACITY_MAX or _table_bytes(capacity) > file_bytes:
            problem = f"a lookup table of {file_bytes} bytes for {capacity} entries"
        elif check_card_uuid is not None and card_uuid != check_card_uuid:
            problem = "the lookup table of another card"
        if problem:
            mapping.close()
            raise PeerError(problem)
        return cls(mapping, (capacity, card_uuid, boot_id))

    @property
    def entries(self) -> int:
        """Entries in use."""
        return self._words[_ENTRIES_WORD]

    def fragments(self, tag: int) -> int:
        """The fragments of the chunk's largest object; 0 where it is not held. Slower than a lookup."""
        if self.lookup(tag) is None:
            return 0
        words, at = self._words, _FIRST_WORD + ((tag * self.capacity) >> 64) * _ENTRY_WORDS
        for _ in range(self.capacity):
            if words[at] in {tag, 0}:
                return words[at + 3] & _HALF if words[at] else 0
            at += _ENTRY_WORDS
            if at >= _FIRST_WORD + self.capacity * _ENTRY_WORDS:
                at = _FIRST_WORD
        return 0

    @property
    def highest_generation(self) -> int:
        """The highest generation that has ever been confirmed in this life of the gateway."""
        return self._words[_HIGHEST_WORD]

    def close(self) -> None:
        """Unmap; a lookup after this is an error of the caller."""
        self._words.release()
        self._map.close()


def _table_bytes(capacity: int) -> int:
    return TABLE_ENTRIES_OFFSET + capacity * TABLE_ENTRY.size


def _lookup_in(words: memoryview, capacity: int) -> Callable[[int], Answer | None]:
    """The hot path: a closure, since every attribute would cost a tenth of a lookup."""
    first, step, end = _FIRST_WORD, _ENTRY_WORDS, len(words)

    def lookup(tag: int) -> Answer | None:
        at = first + ((tag * capacity) >> 64) * step
        found = words[at]
        if found == tag:
            return words[at + 1], words[at + 2]
        laps = 0
        while found:
            at += step
            if at == end:
                at = first
                laps += 1
                if laps > 1:  # a table without an empty entry is none of ours: do not spin in it
                    return None
            found = words[at]
            if found == tag:
                return words[at + 1], words[at + 2]
        return None

    return lookup


def _order(tags: Words) -> npt.NDArray[np.uint64]:
    """Rows by their tags, ascending; in any order where they are equal, since rows of one tag are joined alike.

    Sorting numbers takes half of what sorting rows by them takes: a number is a tag's upper bits and its row. What the
    lower bits would have put elsewhere is put right by a sort that is quick where nearly all is in its order.
    """
    row_bits = np.uint64(len(tags).bit_length())
    packed = tags >> row_bits << row_bits | np.arange(len(tags), dtype=np.uint64)
    packed.sort()
    order: npt.NDArray[np.uint64] = packed & ((np.uint64(1) << row_bits) - np.uint64(1))
    ordered = tags[order]
    if (ordered[1:] < ordered[:-1]).any():
        order = order[np.argsort(ordered, kind="stable")]
    return order


def _are_apart(bits: Words, starts: npt.NDArray[np.intp], joined: Words) -> bool:
    """Whether no bit is twice among the rows of one entry: their sum, in halves that cannot overflow, says so."""
    if len(starts) == len(bits):
        return True
    half = np.uint64(_HALF)
    low, high = np.add.reduceat(bits & half, starts), np.add.reduceat(bits >> np.uint64(_HALF_BITS), starts)
    return bool((low == joined & half).all() and (high == joined >> np.uint64(_HALF_BITS)).all())


def _homes(tags: Words, capacity: int) -> npt.NDArray[np.int64]:
    """`(tag * capacity) >> 64` for each tag, exactly: the product's upper half, made from 32-bit halves."""
    half = np.uint64(32)
    wide = np.uint64(capacity)
    low = ((tags & np.uint64(0xFFFFFFFF)) * wide) >> half
    homes: npt.NDArray[np.int64] = (((tags >> half) * wide + low) >> half).astype(np.int64)
    return homes
