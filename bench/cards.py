"""Cards whose index holds millions of objects, without the terabytes that they would take.

Owns: the keys, and the card's files, made directly: the index is real, the slots are holes in a sparse file.
Must not know: what is measured with it. Nothing here may be got: the slots hold no bytes.

The index's rows are made as columns and appended to LMDB in the order of its keys, page after page, by one call for
each named database (`putmulti`): a tenth of the time of as many puts, and the same entries (`check_same` says so).
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import lmdb
import numpy as np

from xkv_store.database import new_superblock
from xkv_store.geometry import DATA_OFFSET, FRAGMENT_BYTES, SLOT_BYTES, SUPERBLOCK_COPY_OFFSET
from xkv_store.index import INDEX_BYTES_PER_SLOT, Index, Meta, SetObject
from xkv_store.key import ObjectKey
from xkv_store.layout import POSITION_MAX, Extent, Record, pack_order_key, pack_record, pack_superblock, parse_record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    U64s = npt.NDArray[np.uint64]

NAMESPACE: Final = b"bench-cards-keys"
HASH_BYTES: Final = 32
RANKS: Final = 8  # of the chunks in `GROUP_OF_RANKS`
GROUP: Final = 0  # chunks of one rank
GROUP_OF_RANKS: Final = 1
CHUNKS_OF_RANKS: Final = 20_000
CHUNKS_PER_FAMILY: Final = 1_000  # chunks that one request stored
SPARE_SHARE: Final = 0.25  # of the objects: room for what is put during the measurements, so that nothing is evicted
ROWS_PER_BATCH: Final = 1 << 18
CHECKED: Final = 1_000  # rows compared with what the product would have written


@dataclass(frozen=True, slots=True)
class Keys:
    """The block hashes of a card: of chunks of one rank, and of chunks of `RANKS` ranks."""

    single: Bytes
    of_ranks: Bytes

    @classmethod
    def make(cls, objects: int) -> Keys:
        """So many objects' chunks, the same ones each time, ascending."""
        of_ranks = CHUNKS_OF_RANKS
        return cls(_hashes(objects - RANKS * of_ranks, seed=3), _hashes(of_ranks, seed=4))

    @property
    def objects(self) -> int:
        """How many objects they name."""
        return len(self.single) + RANKS * len(self.of_ranks)


def _hashes(count: int, *, seed: int) -> Bytes:
    random = np.random.default_rng(seed)
    hashes: Bytes = random.integers(0, 256, (count, HASH_BYTES), np.uint8)
    fronts = np.sort(random.integers(0, 1 << 64, count, np.uint64))
    if (fronts[1:] == fronts[:-1]).any():
        raise RuntimeError("two hashes begin alike: take another seed")
    hashes[:, :8] = fronts.astype(">u8").view(np.uint8).reshape(count, 8)
    return hashes


def make_card(folder: Path, keys: Keys) -> None:
    """A card in `folder` with one object of one slot for each chunk and rank of `keys`."""
    folder.mkdir()
    slots = int(keys.objects * (1 + SPARE_SHARE))
    card_uuid = uuid.uuid4().bytes
    superblock = new_superblock(
        number=0,
        databases=1,
        slot_bytes=SLOT_BYTES,
        slots=slots,
        card_uuid=card_uuid,
        database_uuid=uuid.uuid4().bytes,
    )
    with (folder / "db-0.xkv").open("wb") as file:
        for offset in (0, SUPERBLOCK_COPY_OFFSET):
            os.pwrite(file.fileno(), pack_superblock(superblock), offset)
        file.truncate(DATA_OFFSET + slots * SLOT_BYTES)
    index = Index.create(folder / "index", Meta(card_uuid, SLOT_BYTES, 1, keys.objects, 0), slots=slots)
    index.close()
    _append(folder / "index", keys, slots)
    index = Index.open(folder / "index", slots=slots)
    _check_same(index, keys)
    index.end_cleanly()
    index.close()


def _append(folder: Path, keys: Keys, slots: int) -> None:
    map_bytes = max(1 << 24, slots * INDEX_BYTES_PER_SLOT * 2)
    with lmdb.open(str(folder), map_size=map_bytes, max_dbs=8, sync=False, readahead=False) as environment:
        for name, rows in ((b"objects", _objects(keys)), (b"order", _order(keys))):
            database = environment.open_db(name)
            with environment.begin(write=True, db=database) as transaction, transaction.cursor() as cursor:
                consumed, added = cursor.putmulti(rows, append=True)
                if (consumed, added) != (keys.objects, keys.objects):
                    raise RuntimeError(f"{added} of {keys.objects} rows went into {name!r}")


def _encoded_keys(keys: Keys, first: int, last: int) -> Bytes:
    """The keys of objects number `first` up to `last`, ascending: one rank's chunks, then those of all ranks."""
    single = len(keys.single)
    template = np.frombuffer(ObjectKey(NAMESPACE, GROUP, bytes(HASH_BYTES), 0).encode(), np.uint8)
    rows = np.tile(template, (last - first, 1))
    hash_at = len(template) - HASH_BYTES - 2
    ones, many = np.arange(first, min(last, single)), np.arange(max(first, single), last) - single
    rows[: len(ones), hash_at:-2] = keys.single[ones]
    if len(many):
        shared = np.frombuffer(ObjectKey(NAMESPACE, GROUP_OF_RANKS, bytes(HASH_BYTES), 0).encode(), np.uint8)
        rows[len(ones) :] = shared
        rows[len(ones) :, hash_at:-2] = keys.of_ranks[many // RANKS]
        rows[len(ones) :, -1] = many % RANKS
    return rows


def _record_of(number: int) -> Record:
    """Each object in a slot of its own, in the order of keys; a family's chunks one after the other."""
    family, position = divmod(number, CHUNKS_PER_FAMILY)
    return Record(number + 1, FRAGMENT_BYTES, family + 1, position, (Extent(0, number, 1),))


def _pieces(rows: Bytes) -> Iterator[bytes]:
    blob, width = rows.tobytes(), rows.shape[1]
    return (blob[at : at + width] for at in range(0, len(blob), width))


def _batches(objects: int) -> Iterator[tuple[int, int]]:
    """Whole families, so that the order's batches are in order, too."""
    step = ROWS_PER_BATCH - ROWS_PER_BATCH % CHUNKS_PER_FAMILY
    return ((first, min(first + step, objects)) for first in range(0, objects, step))


def _objects(keys: Keys) -> Iterator[tuple[bytes, bytes]]:
    packed = np.frombuffer(pack_record(_record_of(0)), np.uint8)
    for first, last in _batches(keys.objects):
        numbers = np.arange(first, last)
        rows = np.tile(packed, (last - first, 1))
        _fill(rows, 0, numbers + 1, "<u8")
        _fill(rows, 16, numbers // CHUNKS_PER_FAMILY + 1, "<u8")
        _fill(rows, 24, numbers % CHUNKS_PER_FAMILY, "<u4")
        _fill(rows, 32, numbers, "<u4")
        yield from zip(_pieces(_encoded_keys(keys, first, last)), _pieces(rows), strict=True)


def _order(keys: Keys) -> Iterator[tuple[bytes, bytes]]:
    """The latest chunk of a family comes first."""
    for first, last in _batches(keys.objects):
        families = np.arange(first, last) // CHUNKS_PER_FAMILY
        positions = np.arange(first, last) % CHUNKS_PER_FAMILY
        order = np.lexsort((-positions, families))
        rows = np.zeros((last - first, 20), np.uint8)
        _fill(rows, 0, families[order] + 1, ">u8")
        _fill(rows, 8, POSITION_MAX - positions[order], ">u4")
        _fill(rows, 12, np.arange(first, last)[order] + 1, ">u8")
        yield from zip(_pieces(rows), _pieces(_encoded_keys(keys, first, last)[order]), strict=True)


def _fill(rows: Bytes, at: int, values: npt.NDArray[np.int64], kind: str) -> None:
    column = np.ascontiguousarray(values.astype(kind)).view(np.uint8).reshape(len(values), -1)
    rows[:, at : at + column.shape[1]] = column


def _check_same(index: Index, keys: Keys) -> None:
    """The rows are what the product would have written: some from all over, and the counts."""
    if index.counts() != (keys.objects, keys.objects):
        raise RuntimeError(f"the index holds {index.counts()} rows of {keys.objects}")
    for number in np.linspace(0, keys.objects - 1, CHECKED).astype(int).tolist():
        wanted = _change(keys, number)
        if index.get(wanted.key) != wanted.record:
            raise RuntimeError(f"object {number} is not what the product writes")
        generation, _, family, position, _ = parse_record(wanted.record)
        at = pack_order_key(family, position, generation)
        if index.order_from(at, 1) != [(at, wanted.key)]:
            raise RuntimeError(f"object {number} stands elsewhere in the order")


def _change(keys: Keys, number: int) -> SetObject:
    """What the product writes for an object."""
    chunk, rank = divmod(number - len(keys.single), RANKS)
    key = ObjectKey(NAMESPACE, GROUP_OF_RANKS, keys.of_ranks[chunk].tobytes(), rank) if chunk >= 0 else None
    key = key or ObjectKey(NAMESPACE, GROUP, keys.single[number].tobytes(), 0)
    return SetObject(key.encode(), pack_record(_record_of(number)))
