"""From an index, or from bare slots, to what a card needs in memory.

Owns reading a whole index into columns (no step per object), checking it against the databases, and making an
index anew from slot headers. Must not know locks, sessions, or what happens after the start.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .database import Database, aligned
from .errors import MediumError, PeerError
from .extents import SlotAllocator
from .geometry import (
    EXTENTS_MAX,
    GENERATION_BELIEVED_MAX,
    IO_STEP_BYTES,
    NAMESPACE_BYTES,
    RANKS_PER_ENTRY,
    Geometry,
)
from .index import SCAN_BATCH, Index, RemoveObject, SetObject
from .key import ObjectKey, tag_salt
from .layout import AGAIN, EXTENT, RECORD, BadBytesError, Extent, Record, SlotHeader, pack_record, parse_slot_header

log = logging.getLogger(__name__)

FRONTS_PER_BATCH = 2_048  # slot headers read at a time: 8 MiB
SCAN_THREADS = 16  # reads in flight while slots are scanned; an NVMe's latency hides behind them
CHANGES_PER_TRANSACTION = 65_536  # of an index that is made anew

_KEY_FIXED_BYTES = 23  # all of a key but its hash
_HASH_AT = 21
_PAGES_MAX = (1 << 16) // RANKS_PER_ENTRY

U64s = npt.NDArray[np.uint64]
I64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Used: TypeAlias = list[npt.NDArray[np.bool_]]  # of each database, a row per slot


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked index in columns, one row per object; `used` has one row per slot of each database."""

    tags: U64s
    generations: U64s
    rank_bits: U64s
    fragments: U64s
    lengths: U64s
    used: Used
    namespaces: dict[bytes, tuple[int, int]]  # objects and slots of each
    newest_family: int  # of new objects

    def allocators(self) -> list[SlotAllocator]:
        """The free slots of each database."""
        return [SlotAllocator.with_used(len(used), used) for used in self.used]


def load(index: Index, slots: Sequence[int], geometry: Geometry) -> Loaded:
    """Read the index; entries that are damaged or claim each other's slots are removed from it."""
    objects, order = index.counts()
    if objects != order:
        log.warning("the index has %d objects and %d entries in their order: making the order anew", objects, order)
        index.restore_order()
    columns, used = _check(index, objects, slots, geometry)
    if not columns.good.all():
        _remove(index, np.flatnonzero(~columns.good))
    good = columns.good
    return Loaded(
        columns.tags[good],
        columns.generations[good],
        columns.rank_bits[good],
        columns.fragments[good],
        columns.lengths[good],
        used,
        columns.usage(),
        columns.newest_family,
    )


def survey(index: Index, slots: Sequence[int], geometry: Geometry) -> tuple[npt.NDArray[np.bool_], Used]:
    """Which entries are good, in the order of keys, and which slots they name; nothing is changed."""
    columns, used = _check(index, index.counts()[0], slots, geometry)
    return columns.good, used


def _check(index: Index, objects: int, slots: Sequence[int], geometry: Geometry) -> "tuple[_Columns, Used]":
    columns = _Columns(objects)
    with ThreadPoolExecutor(1, "xkv-columns") as pool:  # beside the next batch's reading
        former: Future[None] | None = None
        for keys, records in index.scan(SCAN_BATCH):
            if former is not None:
                former.result()
            former = pool.submit(columns.add, keys, records)
        if former is not None:
            former.result()
    columns.check_generations()
    return columns, columns.check_extents(slots, geometry)


def _remove(index: Index, rows: I64s) -> None:
    """Remove the entries at these places of the order of keys."""
    log.warning("removing %d damaged entries from the index", len(rows))
    bad: list[bytes] = []
    begin = 0
    for keys, _ in index.scan(SCAN_BATCH):
        bad.extend(keys[row - begin] for row in rows.tolist() if begin <= row < begin + len(keys))
        begin += len(keys)
    index.apply([RemoveObject(key) for key in bad])
    index.refresh()


class _Columns:
    """The rows of an index while they are being read."""

    def __init__(self, rows: int) -> None:
        self.good = np.ones(rows, np.bool_)
        self.tags, self.generations, self.rank_bits, self.fragments, self.lengths = (
            np.zeros(rows, np.uint64) for _ in range(5)
        )
        self.newest_family = 0
        self._numbers: dict[bytes, int] = {}  # of namespaces
        self._namespaces = np.zeros(rows, np.int64)  # the number of each row's
        self._filled = 0
        self._owner: list[I64s] = []
        self._extents: list[Bytes] = []

    def add(self, keys: list[bytes], records: list[bytes]) -> None:
        """The next rows."""
        self._add_keys(keys)
        self._add_records(records)
        self._filled += len(keys)

    def _add_keys(self, keys: list[bytes]) -> None:
        """Tags and rank bits."""
        for places, data in _by_length(keys):
            rows = places + self._filled
            hash_bytes = data.shape[1] - _KEY_FIXED_BYTES
            if hash_bytes < 1:
                self.good[rows] = False
                continue
            self.good[rows] &= data[:, _HASH_AT - 1] == hash_bytes
            self._namespaces[rows] = self._numbers_of(data[:, :NAMESPACE_BYTES])
            front = np.zeros((len(data), 8), np.uint8)
            front[:, : min(8, hash_bytes)] = data[:, _HASH_AT : _HASH_AT + min(8, hash_bytes)]
            ranks = data[:, -2].astype(np.int64) * 256 + data[:, -1]
            tags = front.view("<u8")[:, 0] ^ _salts(data[:, : _HASH_AT - 1], ranks // RANKS_PER_ENTRY)
            tags[tags == 0] = 1
            self.tags[rows] = tags
            self.rank_bits[rows] = np.uint64(1) << (ranks % RANKS_PER_ENTRY).astype(np.uint64)

    def _numbers_of(self, names: Bytes) -> I64s:
        """The number of each row's namespace. Rows come in the order of keys: namespaces in runs."""
        new = np.concatenate(([True], (names[1:] != names[:-1]).any(axis=1)))
        firsts = [names[row].tobytes() for row in np.flatnonzero(new).tolist()]
        numbers = np.array([self._numbers.setdefault(name, len(self._numbers)) for name in firsts], np.int64)
        found: I64s = numbers[np.cumsum(new) - 1]
        return found

    def usage(self) -> dict[bytes, tuple[int, int]]:
        """Objects and slots of each namespace, of the good rows."""
        mine, many = self._namespaces[self.good], len(self._numbers)
        objects = np.bincount(mine, minlength=many).tolist()
        slots = np.bincount(mine, weights=self.fragments[self.good], minlength=many).astype(np.int64).tolist()
        return {name: (objects[number], slots[number]) for name, number in self._numbers.items() if objects[number]}

    def _add_records(self, records: list[bytes]) -> None:
        """Generations, lengths, the newest family, and extents."""
        for places, data in _by_length(records):
            rows = places + self._filled
            extents, rest = divmod(data.shape[1] - RECORD.size, EXTENT.size)
            if extents < 1 or rest:
                self.good[rows] = False
                continue
            self.good[rows] &= _column(data, 28, "<u2") == extents
            self.generations[rows] = _column(data, 0, "<u8")
            self.lengths[rows] = _column(data, 8, "<u8")
            families = _column(data, 16, "<u8")
            newest = int(families.max(initial=0, where=families < np.uint64(AGAIN)))
            self.newest_family = max(self.newest_family, newest)
            self._owner.append(np.repeat(rows, extents))
            self._extents.append(data[:, RECORD.size :].reshape(-1, EXTENT.size))

    def check_generations(self) -> None:
        """Entries of a generation that cannot have been, or that another one has, too, are not good."""
        self.good &= self.generations <= np.uint64(GENERATION_BELIEVED_MAX)
        ascending = np.sort(self.generations[self.good])
        if not (ascending[1:] == ascending[:-1]).any():  # as ever: half of what it takes to say which are
            return
        rows = np.flatnonzero(self.good)
        order = rows[np.argsort(self.generations[rows], kind="stable")]
        twins = np.flatnonzero(self.generations[order][1:] == self.generations[order][:-1])
        self.good[order[twins]] = False
        self.good[order[twins + 1]] = False

    def check_extents(self, slots: Sequence[int], geometry: Geometry) -> Used:
        """Used slots of each database. Entries out of range, of the wrong size or overlapping are not good."""
        owner = np.concatenate([*self._owner, np.zeros(0, np.int64)])
        data = np.concatenate([*self._extents, np.zeros((0, EXTENT.size), np.uint8)])
        database = _column(data, 0, "<u2").astype(np.int64)
        first = _column(data, 2, "<u4").astype(np.int64)
        count = _column(data, 6, "<u4").astype(np.int64)
        bounds = np.array([*slots, 0], np.int64)[np.minimum(database, len(slots))]
        self.good[owner[(count < 1) | (first + count > bounds)]] = False
        one_each = np.array_equal(owner, np.arange(len(self.good)))
        held = count if one_each else np.bincount(owner, weights=count, minlength=len(self.good)).astype(np.int64)
        payload = np.uint64(geometry.fragment_bytes)
        self.fragments = np.maximum(self.lengths // payload + (self.lengths % payload > 0), 1).astype(np.uint64)
        self.good &= held.astype(np.uint64) == self.fragments
        keep = self.good[owner]
        if not keep.all():
            owner, database, first, count = owner[keep], database[keep], first[keep], count[keep]
        used = []
        overlapping = np.zeros(len(self.good), np.bool_)
        for number, total in enumerate(slots):
            mine = database == number
            begin, end = first[mine], first[mine] + count[mine]
            cover = _cover(begin, end, total)
            if (cover > 1).any():
                doubly = np.concatenate(([0], np.cumsum(cover > 1)))
                overlapping[owner[mine][doubly[end] > doubly[begin]]] = True
            used.append(cover > 0)
        if overlapping.any():  # never written by us; which of them is right only a read could say
            self.good &= ~overlapping
            return self.check_extents(slots, geometry)
        return used


def _cover(begin: I64s, end: I64s, total: int) -> I64s:
    """How many of the runs [begin, end) lie over each of `total` slots."""
    edges = np.bincount(begin, minlength=total + 1) - np.bincount(end, minlength=total + 1)
    cover: I64s = np.cumsum(edges)[:total]
    return cover


def _by_length(items: list[bytes]) -> list[tuple[I64s, Bytes]]:
    """(rows, bytes as a matrix) for each length that occurs."""
    blob = np.frombuffer(b"".join(items), np.uint8)
    distinct = sorted(set(map(len, items)))
    if len(distinct) == 1:
        return [(np.arange(len(items)), blob.reshape(len(items), distinct[0]))]
    found: list[tuple[I64s, Bytes]] = []
    lengths = np.fromiter(map(len, items), np.int64, len(items))
    offsets = np.cumsum(lengths) - lengths
    for length in distinct:
        rows = np.flatnonzero(lengths == length)
        found.append((rows, blob[offsets[rows][:, None] + np.arange(length)]))
    return found


def _column(data: Bytes, at: int, kind: str) -> npt.NDArray[np.unsignedinteger]:
    column: npt.NDArray[np.unsignedinteger] = np.ascontiguousarray(data[:, at : at + np.dtype(kind).itemsize]).view(
        kind
    )[:, 0]
    return column


def _salts(heads: Bytes, pages: I64s) -> U64s:
    """The salt of each row's (namespace, group, page of ranks). Rows come in the order of keys: heads in runs."""
    new = np.concatenate(([False], (heads[1:] != heads[:-1]).any(axis=1)))
    run = np.cumsum(new)
    if pages.any():
        combined = run * _PAGES_MAX + pages
        _, first, inverse = np.unique(combined, return_index=True, return_inverse=True)
    else:
        first, inverse = np.flatnonzero(np.concatenate(([True], new[1:]))), run
    salts = []
    for row in first.tolist():
        head = heads[row].tobytes()
        group = int.from_bytes(head[NAMESPACE_BYTES:], "big")
        salts.append(tag_salt(head[:NAMESPACE_BYTES], group, int(pages[row])))
    found: U64s = np.array(salts, np.uint64)[inverse.reshape(-1)]
    return found


# --- from bare slots ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a scan of all slots has found."""

    objects: dict[bytes, Record]
    highest_generation: int
    slots_scanned: int


def rebuild(databases: Sequence[Database], card_uuid: bytes, geometry: Geometry, but: Used | None = None) -> Rebuilt:
    """The newest complete generation of every key that slot headers tell of. Payloads are proved when read.

    `but`: without the slots that are true there.
    """
    parts: dict[int, list[tuple[SlotHeader, int, int]]] = {}
    scanned = 0
    for number, database in enumerate(databases):
        scanned += database.superblock.slots
        for slot, header in _scan(database):
            named = but is not None and but[number][slot]
            if not named and header.card_uuid == card_uuid and header.generation <= GENERATION_BELIEVED_MAX:
                parts.setdefault(header.generation, []).append((header, number, slot))
    objects: dict[bytes, Record] = {}
    for generation in sorted(parts):
        found = _assemble(parts[generation], geometry)
        if found is not None:
            objects[found[0]] = found[1]  # ascending generations: the newest is set last
    return Rebuilt(objects, max(parts, default=0), scanned)


def fill(index: Index, rebuilt: Rebuilt) -> None:
    """Write what a rebuild has found into an empty index."""
    changes = [SetObject(key, pack_record(record)) for key, record in sorted(rebuilt.objects.items())]
    for begin in range(0, len(changes), CHANGES_PER_TRANSACTION):
        index.apply(changes[begin : begin + CHANGES_PER_TRANSACTION])
    index.end_cleanly()
    index.refresh()


def _scan(database: Database) -> list[tuple[int, SlotHeader]]:
    """(slot, header) of each slot with a sound header."""
    total = database.superblock.slots
    found: list[tuple[int, SlotHeader]] = []
    buffer = aligned(FRONTS_PER_BATCH * IO_STEP_BYTES)
    fronts = [buffer[at : at + IO_STEP_BYTES] for at in range(0, len(buffer), IO_STEP_BYTES)]
    share = FRONTS_PER_BATCH // SCAN_THREADS
    with ThreadPoolExecutor(SCAN_THREADS, "xkv-scan") as pool:
        for begin in range(0, total, FRONTS_PER_BATCH):
            count = min(FRONTS_PER_BATCH, total - begin)
            jobs = [
                pool.submit(_read_some, database, begin + at, fronts[at : min(at + share, count)])
                for at in range(0, count, share)
            ]
            for job in jobs:
                job.result()
            headers = enumerate(map(_sound_header, fronts[:count]), begin)
            found.extend((slot, header) for slot, header in headers if header is not None)
    return found


def _sound_header(front: memoryview) -> SlotHeader | None:
    try:
        return parse_slot_header(front)
    except BadBytesError:
        return None


def _read_some(database: Database, first: int, fronts: Sequence[memoryview]) -> None:
    try:
        database.read_fronts(first, fronts)
    except MediumError as error:
        log.warning("scanning: %s", error)
        for front in fronts:
            front[:] = bytes(len(front))


def _assemble(parts: list[tuple[SlotHeader, int, int]], geometry: Geometry) -> tuple[bytes, Record] | None:
    """The object of one generation, if all of its fragments are there and say the same."""
    parts = sorted(parts, key=lambda part: part[0].fragment)
    one = parts[0][0]
    try:
        ObjectKey.decode(one.key)
    except PeerError:
        return None
    if one.fragments != geometry.fragments(one.length) or len(parts) != one.fragments:
        return None
    extents: list[Extent] = []
    for fragment, (header, database, slot) in enumerate(parts):
        expected = one._replace(
            fragment=fragment,
            payload_bytes=geometry.payload_bytes(one.length, fragment),
            payload_checksum=header.payload_checksum,
        )
        if header != expected:
            return None
        last = extents[-1] if extents else None
        if last is not None and (last.database, last.first + last.slots) == (database, slot):
            extents[-1] = last._replace(slots=last.slots + 1)
        else:
            extents.append(Extent(database, slot, 1))
    if len(extents) > EXTENTS_MAX:
        return None
    return one.key, Record(one.generation, one.length, one.family, one.position, tuple(extents))
