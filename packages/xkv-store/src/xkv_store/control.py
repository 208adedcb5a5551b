"""The control page: what a gateway and one engine's processes tell each other without a message.

Owns: the page's layout (docs/format.md) and every access to it. Must not know: sockets, sessions, tables.
The page is shared with other processes: what it holds is checked once when it is attached, and a wild
value read later may make lookups miss, never fail.

Words are read and written whole (8 aligned bytes through a native "Q" view, one machine access each; `struct`
with "<Q" would go byte by byte). Between two words whose order matters a lock is passed: its release and
acquisition are the memory barrier that weakly ordered processors need.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .errors import PeerError
from .ring import check_sealed_memory, make_sealed_memory, map_shared, memory_identity
from .wire import RANKS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

MAGIC: Final = b"XKVCTRL1"
VERSION: Final = 3
DENIALS_PER_RANK: Final = 1_024
"""A poll comes with every lookup batch; more failed loads than this in between is a dead medium."""
COUNTERS_PER_RANK: Final = 64
"""What a rank (or the scheduler) counts, for its engine's scheduler and the gateway; the page knows the counters'
numbers, and no meaning."""
COUNT_BELIEVED_MAX: Final = 1 << 50
"""Between two readings: a petabyte is more than any rank moves meanwhile."""

HEADER: Final = struct.Struct("<8sHHI16s")  # magic, version, ranks, denials per rank, boot id
HEARTBEAT_OFFSET: Final = 32
EPOCH_OFFSET: Final = 40
FLAGS_OFFSET: Final = 48
ATTACHED_OFFSET: Final = 56
RANKS_OFFSET: Final = 4_096
RANK_STRIDE_BYTES: Final = 64
RANK_DENIED_OFFSET: Final = 0
RANK_STORE_BYTES_OFFSET: Final = 8
RANK_SHED_OFFSET: Final = 16
RANK_TERM_OFFSET: Final = 24
RANK_LOADED_BYTES_OFFSET: Final = 32
RANK_LOADING_NS_OFFSET: Final = 40
DENIAL_BYTES: Final = 16
PAGE_ALIGN_BYTES: Final = 4_096

FLAG_DRAINING: Final = 1
_BOOT_ID_OFFSET: Final = 16
_WORD: Final = 8
_RANK_WORDS: Final = RANK_STRIDE_BYTES // _WORD
_U64_MASK: Final = 2**64 - 1

assert sys.byteorder == "little", "words are read natively, and the formats are little-endian"
assert HEADER.size == HEARTBEAT_OFFSET
assert RANK_STRIDE_BYTES >= RANK_LOADING_NS_OFFSET + _WORD


def denials_offset(ranks: int) -> int:
    """Where the first rank's denial log begins."""
    end = RANKS_OFFSET + RANK_STRIDE_BYTES * ranks
    return -(-end // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


def counters_offset(ranks: int) -> int:
    """Where the first rank's counters begin: behind all denial logs, which end at a multiple of 4,096."""
    return denials_offset(ranks) + DENIAL_BYTES * DENIALS_PER_RANK * ranks


def page_bytes(ranks: int) -> int:
    """The whole page's size, a multiple of 4,096."""
    end = counters_offset(ranks) + _WORD * COUNTERS_PER_RANK * ranks
    return -(-end // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


def _pass_barrier() -> None:
    """Order what this thread did before against what it does after."""
    lock = threading.Lock()
    with lock:
        pass
    with lock:
        pass


class ControlPage:
    """One engine's control page, mapped. The descriptor is the page's own."""

    def __init__(self, fd: int, ranks: int) -> None:
        self.fd = fd
        self.ranks = ranks
        self._map = map_shared(fd, "control page", page_bytes(ranks))
        self._words = memoryview(self._map).cast("Q")
        self._barrier = threading.Lock()
        self._log_word = denials_offset(ranks) // _WORD
        self._counters_word = counters_offset(ranks) // _WORD
        first = self._rank_word(0, RANK_DENIED_OFFSET)
        self._denied_counts = self._words[first : first + ranks * _RANK_WORDS : _RANK_WORDS]
        self.serves: Callable[[int], bool] = _serves_in(self._words, ranks)
        """Whether the gateway `works` since then (CLOCK_MONOTONIC, ns) and all ranks are here; for lookups."""

    @classmethod
    def create(cls, ranks: int, boot_id: bytes) -> ControlPage:
        """A new page (the gateway's): epoch 1, heartbeat now."""
        assert 0 < ranks <= RANKS_MAX
        assert len(boot_id) == 16
        fd = make_sealed_memory("xkv-control", page_bytes(ranks))
        os.pwrite(fd, HEADER.pack(MAGIC, VERSION, ranks, DENIALS_PER_RANK, boot_id), 0)
        page = cls._own(fd, ranks)
        page.set_boot(boot_id)
        return page

    @classmethod
    def attach(cls, fd: int, *, ranks: int | None = None) -> ControlPage:
        """Take over a peer's descriptor (closed on failure); raises PeerError unless it is such a page."""
        try:
            found = cls._check(fd, ranks)
        except BaseException:
            os.close(fd)
            raise
        return cls._own(fd, found)

    @staticmethod
    def _check(fd: int, expected_ranks: int | None) -> int:
        size = check_sealed_memory(fd, "control page")
        header = os.pread(fd, HEADER.size, 0)
        if len(header) < HEADER.size:
            raise PeerError(f"the control page has only {size} bytes")
        magic, version, ranks, denials, _boot = HEADER.unpack(header)
        if magic != MAGIC or version != VERSION:
            raise PeerError(f"a control page of version {version} (magic {magic!r}), not {VERSION}")
        if not 0 < ranks <= RANKS_MAX or denials != DENIALS_PER_RANK or size != page_bytes(ranks):
            raise PeerError(f"a control page of {ranks} ranks, {denials} denials, {size} bytes")
        if expected_ranks not in (None, ranks):
            raise PeerError(f"the control page is one of {ranks} ranks, not {expected_ranks}")
        return int(ranks)

    @classmethod
    def _own(cls, fd: int, ranks: int) -> ControlPage:
        try:
            return cls(fd, ranks)
        except BaseException:
            os.close(fd)
            raise

    # --- the gateway writes ------------------------------------------------------------------------------

    def beat(self, now_ns: int) -> None:
        """The gateway lives; `now_ns` is CLOCK_MONOTONIC."""
        self._words[HEARTBEAT_OFFSET // _WORD] = now_ns

    def set_boot(self, boot_id: bytes) -> int:
        """A new life of the gateway: a new epoch, no rank attached, no lease that holds, no draining, a beating heart.

        Returns the epoch.
        """
        assert len(boot_id) == 16
        epoch = (self.epoch + 1) & _U64_MASK
        self._map[_BOOT_ID_OFFSET : _BOOT_ID_OFFSET + 16] = boot_id
        self._words[FLAGS_OFFSET // _WORD] = 0
        self.set_attached(0)
        self._words[EPOCH_OFFSET // _WORD] = epoch
        for rank in range(self.ranks):
            self.end_term(rank)
        self.beat(time.monotonic_ns())
        return epoch

    def set_draining(self, draining: bool) -> None:
        """The gateway takes no more work."""
        self._words[FLAGS_OFFSET // _WORD] = FLAG_DRAINING if draining else 0

    def set_attached(self, ranks: int) -> None:
        """So many ranks of the engine are attached."""
        self._words[ATTACHED_OFFSET // _WORD] = ranks

    def end_term(self, rank: int) -> None:
        """From now on none of the leases that this rank has been given holds.

        To be called before the first slot of one is used again: a copy that sees the old term afterwards has read
        nothing of what came into the slot.
        """
        word = self._rank_word(rank, RANK_TERM_OFFSET)
        self._words[word] = (self._words[word] + 1) & _U64_MASK
        _pass_barrier()

    # --- a rank writes -----------------------------------------------------------------------------------

    def deny(self, rank: int, tag: int, generation: int) -> None:
        """From now on, entries of `tag` with a generation of `generation` or less are misses.

        To be called before the failed load is reported. One thread of the rank at a time is let in.
        """
        count_word = self._rank_word(rank, RANK_DENIED_OFFSET)
        with self._barrier:
            count = self._words[count_word]
            word = self._log_word + 2 * (rank * DENIALS_PER_RANK + count % DENIALS_PER_RANK)
            self._words[word] = tag
            self._words[word + 1] = generation
            _pass_barrier()
            self._words[count_word] = (count + 1) & _U64_MASK

    def set_store_bytes(self, rank: int, store_bytes: int) -> None:
        """What this rank has in flight to the card."""
        self._words[self._rank_word(rank, RANK_STORE_BYTES_OFFSET)] = store_bytes

    def add_shed(self, rank: int, objects: int = 1) -> None:
        """This rank shed objects."""
        word = self._rank_word(rank, RANK_SHED_OFFSET)
        with self._barrier:
            self._words[word] = (self._words[word] + objects) & _U64_MASK

    def add_count(self, rank: int, number: int, amount: int) -> None:
        """This rank counts `amount` more, on its counter of that number."""
        assert 0 <= number < COUNTERS_PER_RANK
        word = self._counters_word + rank * COUNTERS_PER_RANK + number
        with self._barrier:
            self._words[word] = (self._words[word] + amount) & _U64_MASK

    def set_loaded(self, rank: int, loaded_bytes: int, loading_ns: int) -> None:
        """So many bytes this rank has ever loaded, in so much time in which it had a load under way."""
        self._words[self._rank_word(rank, RANK_LOADED_BYTES_OFFSET)] = loaded_bytes
        self._words[self._rank_word(rank, RANK_LOADING_NS_OFFSET)] = loading_ns

    # --- everybody reads ---------------------------------------------------------------------------------

    @property
    def heartbeat_ns(self) -> int:
        """CLOCK_MONOTONIC of the gateway's last beat."""
        return self._words[HEARTBEAT_OFFSET // _WORD]

    @property
    def epoch(self) -> int:
        """How many lives of the gateway this page has seen."""
        return self._words[EPOCH_OFFSET // _WORD]

    @property
    def draining(self) -> bool:
        """The gateway takes no more work."""
        return bool(self._words[FLAGS_OFFSET // _WORD] & FLAG_DRAINING)

    def works(self, since_ns: int) -> bool:
        """The gateway's heart has beaten since then, and it takes work."""
        return self.heartbeat_ns >= since_ns and not self.draining

    @property
    def boot_id(self) -> bytes:
        """The gateway's present life, 16 bytes."""
        return bytes(self._map[_BOOT_ID_OFFSET : _BOOT_ID_OFFSET + 16])

    def store_bytes(self) -> int:
        """The largest number of bytes that any rank has in flight to the card."""
        return max(self._words[self._rank_word(rank, RANK_STORE_BYTES_OFFSET)] for rank in range(self.ranks))

    def shed(self) -> int:
        """Objects that the ranks have shed, together."""
        return sum(self._words[self._rank_word(rank, RANK_SHED_OFFSET)] for rank in range(self.ranks))

    def counts(self, rank: int, numbers: int, first: int = 0) -> list[int]:
        """A rank's `numbers` counters from `first` on; they begin at 0 with the page, and grow."""
        word = self._counters_word + rank * COUNTERS_PER_RANK + first
        return self._words[word : word + numbers].tolist()

    def loaded(self, rank: int) -> tuple[int, int]:
        """What a rank has said by `set_loaded`. The two may be of moments that are a copy apart."""
        return (
            self._words[self._rank_word(rank, RANK_LOADED_BYTES_OFFSET)],
            self._words[self._rank_word(rank, RANK_LOADING_NS_OFFSET)],
        )

    def term(self, rank: int) -> int:
        """A rank's leases hold as long as this stays what it was when its session was welcomed.

        Between what is read of a slot and this word, and the other way round, there is a barrier.
        """
        _pass_barrier()
        term = self._words[self._rank_word(rank, RANK_TERM_OFFSET)]
        _pass_barrier()
        return term

    def denied_counts(self) -> list[int]:
        """Denials that each rank has ever written: all of `denied` in one step."""
        return self._denied_counts.tolist()

    def denied(self, rank: int) -> int:
        """Denials that this rank has ever written."""
        return self._words[self._rank_word(rank, RANK_DENIED_OFFSET)]

    def denial(self, rank: int, number: int) -> tuple[int, int]:
        """(tag, generation) of a rank's denial by its number; overwritten by the one D later."""
        word = self._log_word + 2 * (rank * DENIALS_PER_RANK + number % DENIALS_PER_RANK)
        return self._words[word], self._words[word + 1]

    @property
    def identity(self) -> tuple[int, int]:
        """What tells one page from another, whatever descriptor leads to it."""
        return memory_identity(self.fd)

    def close(self) -> None:
        """Give the descriptor back; the mapping stays readable until the page object goes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _rank_word(self, rank: int, offset: int) -> int:
        assert 0 <= rank < self.ranks
        return (RANKS_OFFSET + RANK_STRIDE_BYTES * rank + offset) // _WORD


@dataclass(frozen=True, slots=True)
class Denials:
    """New denials; with `overflow` some were lost and all that is confirmed so far counts as denied."""

    pairs: tuple[tuple[int, int], ...]
    overflow: bool


def _serves_in(words: memoryview, ranks: int) -> Callable[[int], bool]:
    """A closure, as the lookup table's: attributes and properties would double the time of each lookup."""
    heartbeat, flags, attached = (offset // _WORD for offset in (HEARTBEAT_OFFSET, FLAGS_OFFSET, ATTACHED_OFFSET))

    def serves(since_ns: int) -> bool:
        return words[heartbeat] >= since_ns and words[attached] >= ranks and not words[flags] & FLAG_DRAINING

    return serves


NOTHING_DENIED: Final = Denials((), overflow=False)
"""What `DenialReader.poll` gives, this very object, where there is nothing new."""


class CountReader:
    """What all ranks have counted since it was asked last. Not for several threads."""

    def __init__(self, page: ControlPage, numbers: int, first: int = 0) -> None:
        """So many counters from `first` on."""
        assert first + numbers <= COUNTERS_PER_RANK
        self._page = page
        self._numbers = numbers
        self._first = first
        self._seen = [[0] * numbers for _ in range(page.ranks)]

    def poll(self) -> list[int]:
        """By counter; a wild value counts nothing."""
        sums = [0] * self._numbers
        for rank, seen in enumerate(self._seen):
            counts = self._page.counts(rank, self._numbers, self._first)
            if counts == seen:
                continue
            for number, (now, before) in enumerate(zip(counts, seen, strict=True)):
                more = (now - before) & _U64_MASK
                sums[number] += more if more <= COUNT_BELIEVED_MAX else 0
            self._seen[rank] = counts
        return sums


class DenialReader:
    """Hands out each denial once. Not for several threads."""

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._seen = [0] * page.ranks

    def poll(self) -> Denials:
        """What has been denied since the last call (since the page was made, at the first)."""
        page = self._page
        if page.denied_counts() == self._seen:
            return NOTHING_DENIED
        pairs: list[tuple[int, int]] = []
        overflow = False
        for rank, seen in enumerate(self._seen):
            count = page.denied(rank)
            if count == seen:
                continue
            _pass_barrier()
            if 0 < count - seen < DENIALS_PER_RANK:
                found = [page.denial(rank, number) for number in range(seen, count)]
                _pass_barrier()
                # The writer may have come round while we read, and be one entry ahead of its count.
                intact = 0 <= page.denied(rank) - seen < DENIALS_PER_RANK
                pairs.extend(found if intact else ())
                overflow |= not intact
            else:
                overflow = True
            self._seen[rank] = count
        return Denials(tuple(pairs), overflow) if pairs or overflow else NOTHING_DENIED
