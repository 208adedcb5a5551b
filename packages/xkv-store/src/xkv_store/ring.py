"""The ring: one engine's slots in shared memory, and who of its ranks uses which of them.

Owns: the memfd with its seals, the mapping, the free list of a region, and the plan that divides a ring
over ranks. Must not know: sockets, messages, or what lies in a slot. A descriptor that came from a peer
is checked with `PeerError`; giving a slot back twice is our own bug and asserts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from .errors import PeerError, UserError
from .geometry import IO_STEP_BYTES
from .huge_pages import Mapping
from .memory_limit import has_room_for_ring
from .slots import Slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""No process can make the file shorter under another's feet (SIGBUS), or longer, or take that back."""
RING_SLOTS_MAX: Final = 2**24
"""4 TiB at the usual slot: beyond any host, and far below what a message's 32 bits can name."""

_BLOCK_BYTES: Final = 512  # of st_blocks (stat(3type))
_FREE_RUN: Final = re.compile(rb"\x01+")


def make_sealed_memory(name: str, size_bytes: int) -> int:
    """A new memfd of this size, sealed; it has no name that could be left behind. Returns its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_sealed_memory(fd: int, what: str, *, size_bytes: int | None = None) -> int:
    """The size of a peer's memfd; raises PeerError unless it is sealed, writable and of the size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        size = os.fstat(fd).st_size
    except OSError as error:
        raise PeerError(f"the {what}'s descriptor is no memory file: {error.strerror}") from error
    if seals & SEALS != SEALS:
        raise PeerError(f"the {what}'s memory file is not sealed against shrinking and growing")
    if seals & ~SEALS:
        raise PeerError(f"the {what}'s memory file carries seals that forbid writing ({seals:#x})")
    if mode != os.O_RDWR:
        raise PeerError(f"the {what}'s descriptor is not open for reading and writing")
    if size_bytes is not None and size != size_bytes:
        raise PeerError(f"the {what}'s memory file has {size} bytes, not {size_bytes}")
    return size


def map_shared(fd: int, what: str, size_bytes: int) -> mmap.mmap:
    """Map a checked memory file for reading and writing; raises PeerError where the kernel refuses."""
    try:
        return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise PeerError(f"the {what}'s memory file cannot be mapped: {error}") from error


class Ring:
    """`slots` slots of `slot_bytes` bytes, page-aligned, mapped for reading and writing.

    The descriptor is the ring's own. The mapping lives as long as any view of it does, also after `close`.
    """

    def __init__(self, fd: int, *, slots: int, slot_bytes: int) -> None:
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        try:
            self._mapping = Mapping(fd, slots * slot_bytes)
        except OSError as error:
            raise PeerError(f"the ring's memory file cannot be mapped: {error.strerror}") from error
        self._view = self._mapping.memory
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._view, np.uint8).reshape(slots, slot_bytes)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> Ring:
        """A new ring; its memory is taken by `use_huge_pages`, or page by page as slots are first touched."""
        assert 0 < slots <= RING_SLOTS_MAX
        assert slot_bytes > 0
        assert slot_bytes % IO_STEP_BYTES == 0
        return cls._own(make_sealed_memory("xkv-ring", slots * slot_bytes), slots, slot_bytes)

    @classmethod
    def adopt(cls, fd: int, *, slots: int, slot_bytes: int) -> Ring:
        """Take over a peer's descriptor (it is the ring's from here on, closed on failure).

        Raises PeerError where it is not a memory file of `slots` times `slot_bytes` bytes with our seals.
        """
        try:
            _check_size(slots, slot_bytes)
            check_sealed_memory(fd, "ring", size_bytes=slots * slot_bytes)
        except PeerError:
            os.close(fd)
            raise
        return cls._own(fd, slots, slot_bytes)

    @classmethod
    def _own(cls, fd: int, slots: int, slot_bytes: int) -> Ring:
        try:
            return cls(fd, slots=slots, slot_bytes=slot_bytes)
        except BaseException:
            os.close(fd)
            raise

    def slot(self, slot: int) -> memoryview:
        """The `slot_bytes` bytes of one slot, writable."""
        assert 0 <= slot < self.slots
        start = slot * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def views(self, numbers: Sequence[int]) -> Slots:
        """Some slots, writable, in this order. IndexError."""
        return Slots(self._view, self.slot_bytes, numbers)

    def use_huge_pages(self, numbers: Iterable[range]) -> int:
        """Let these slots lie in huge pages, as far as the kernel can; how many bytes do then. Takes the memory now.

        Not where the whole ring might be more than there is: then its memory is taken as slots are first touched.
        """
        taken_bytes = os.fstat(self.fd).st_blocks * _BLOCK_BYTES
        if not has_room_for_ring(self.slots * self.slot_bytes, taken_bytes=taken_bytes):
            return 0
        each = self.slot_bytes
        return self._mapping.use_huge_pages([range(some.start * each, some.stop * each) for some in numbers])

    @property
    def identity(self) -> tuple[int, int]:
        """What tells one memory file from another, whatever descriptor leads to it."""
        return memory_identity(self.fd)

    def close(self) -> None:
        """Give the descriptor back. The memory goes when the last view of it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _check_size(slots: int, slot_bytes: int) -> None:
    if not 0 < slots <= RING_SLOTS_MAX or slot_bytes <= 0 or slot_bytes % IO_STEP_BYTES:
        raise PeerError(f"a ring of {slots} slots of {slot_bytes} bytes")


def memory_identity(fd: int) -> tuple[int, int]:
    """Device and inode: equal for all descriptors of one memory file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class SlotRegion:
    """The free list of `count` slots from `first` on. Any thread may take and give."""

    def __init__(self, first: int, count: int) -> None:
        assert first >= 0
        assert count >= 0
        self.first = first
        self.count = count
        self._lock = threading.Lock()
        self._is_free = bytearray(b"\x01" * count)  # a byte a slot: the search for a run is then memmem's
        self._free = count

    @property
    def numbers(self) -> range:
        """All its slots."""
        return range(self.first, self.first + self.count)

    @property
    def free(self) -> int:
        """Slots that can be taken now."""
        return self._free

    def take(self, count: int) -> list[int] | None:
        """`count` slots in ascending order, or None where there are not so many free.

        Neighbours where there is a run that long, so that the gateway reaches them in one call; otherwise
        from the longest runs.
        """
        assert count > 0
        with self._lock:
            if count > self._free:
                return None
            start = self._is_free.find(b"\x01" * count)
            self._free -= count
            if start >= 0:
                self._is_free[start : start + count] = bytes(count)
                return list(range(self.first + start, self.first + start + count))
            places = self._gather(count)
            for place in places:
                self._is_free[place] = 0
        return [self.first + place for place in places]

    def give(self, slots: Iterable[int]) -> None:
        """Take slots back that `take` has given out."""
        numbers = list(slots)
        with self._lock:
            if len(numbers) == 1 or not self._give_run(numbers):
                self._give_each(numbers)
            self._free += len(numbers)

    def _give_run(self, numbers: list[int]) -> bool:
        """Whether they were neighbours, and taken; then they are free."""
        if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            return False
        begin, end = numbers[0] - self.first, numbers[-1] + 1 - self.first
        if not 0 <= begin < end <= self.count or b"\x01" in self._is_free[begin:end]:
            return False
        self._is_free[begin:end] = b"\x01" * len(numbers)
        return True

    def _give_each(self, numbers: list[int]) -> None:
        for place in [number - self.first for number in numbers]:
            assert 0 <= place < self.count, f"slot {self.first + place} is not of this region"
            assert self._is_free[place] == 0, f"slot {self.first + place} is given back twice"
            self._is_free[place] = 1

    def _gather(self, count: int) -> list[int]:
        runs = sorted((run.span() for run in _FREE_RUN.finditer(self._is_free)), key=lambda r: r[0] - r[1])
        places: list[int] = []
        for start, end in runs:
            places.extend(range(start, min(end, start + count - len(places))))
            if len(places) == count:
                break
        return sorted(places)


class SlotBudget:
    """How many slots of a region that is shared one session may hold at once. Any thread may take and give."""

    def __init__(self, count: int) -> None:
        assert count >= 0
        self.count = count
        self._lock = threading.Lock()
        self._free = count

    @property
    def free(self) -> int:
        """Slots that may be taken now."""
        return self._free

    def take(self, count: int) -> bool:
        """Whether `count` more may be held; then they count as held."""
        assert count > 0
        with self._lock:
            if count > self._free:
                return False
            self._free -= count
        return True

    def give(self, count: int) -> None:
        """So many are held no more."""
        with self._lock:
            self._free += count
            assert self._free <= self.count, "slots are given back twice"


class RingUse(str, Enum):
    """How an engine's ranks use the load reserve of their ring (ADR 0010)."""

    OWN = "own"  # each rank has load slots of its own, and names them in its gets
    LEASED = "leased"  # one region for all ranks: the gateway says what lies where, for as long as a lease is held
    REPLICATED = "replicated"  # leased, and rank 0 alone stores


@dataclass(frozen=True, slots=True)
class RankRegions:
    """One rank's part of a ring: slots that stores use, and slots that loads use.

    `lease_slots`: where the load region is the engine's and not the rank's, how many of it the rank may hold at once.
    """

    first: int
    store_slots: int
    load_first: int
    load_slots: int
    lease_slots: int = 0


def ring_slots(*, ring_bytes: int, slot_bytes: int) -> int:
    """Slots of a ring of at most `ring_bytes`; raises UserError where it cannot be one."""
    slots = ring_bytes // slot_bytes
    if not 2 <= slots <= RING_SLOTS_MAX:
        raise UserError(
            f"xkv.ring_bytes is {ring_bytes}: give at least {2 * slot_bytes} and at most "
            f"{RING_SLOTS_MAX * slot_bytes} (a slot has {slot_bytes} bytes)"
        )
    return slots


def staged_slots(*, staged_bytes: int, slot_bytes: int) -> int:
    """Slots of the scheduler's part of a ring: they are the ring's last."""
    return staged_bytes // slot_bytes


def regions(
    *,
    ring_bytes: int,
    slot_bytes: int,
    world_size: int,
    load_reserve_bytes: int,
    staged_bytes: int = 0,
    use: RingUse = RingUse.OWN,
) -> tuple[RankRegions, ...]:
    """Divide a ring evenly over the ranks, and each rank's part into slots for stores and for loads.

    The reserve is the whole engine's; each rank has its share, rounded up, at least one slot and at most
    all but one. What the scheduler has is taken off the ring's end first; what does not divide evenly stays
    unused. Where loads are leased, the shares are one region behind all store regions, and a rank may hold as many
    slots of it as its share has: so there is always a slot that nobody holds for whoever holds less than his share.
    Raises UserError where a rank would have fewer than two slots.
    """
    assert world_size > 0
    staged = staged_slots(staged_bytes=staged_bytes, slot_bytes=slot_bytes)
    each = (ring_slots(ring_bytes=ring_bytes, slot_bytes=slot_bytes) - staged) // world_size
    if each < 2:
        needed = (2 * world_size + staged) * slot_bytes
        beside = f" beside xkv.staged_bytes = {staged_bytes}" if staged else ""
        raise UserError(f"xkv.ring_bytes is {ring_bytes}: {world_size} ranks need at least {needed}{beside}")
    share = -(-load_reserve_bytes // (slot_bytes * world_size))
    load = min(max(share, 1), each - 1)
    stores = each - load
    if use is RingUse.OWN:
        return tuple(RankRegions(rank * each, stores, rank * each + stores, load) for rank in range(world_size))
    leased = (world_size * stores, world_size * load, load)
    if use is RingUse.LEASED:
        return tuple(RankRegions(rank * stores, stores, *leased) for rank in range(world_size))
    return tuple(RankRegions(0, 0 if rank else world_size * stores, *leased) for rank in range(world_size))
