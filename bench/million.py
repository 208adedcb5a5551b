"""A card whose index holds a million objects, without the 256 GB that they would take.

Owns: the keys, and the card's files, made directly: the index is real, the slots are holes in a sparse file.
Must not know: what is measured with it. Nothing here may be got: the slots hold no bytes.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Final

import numpy as np

from xkv_store.database import new_superblock
from xkv_store.geometry import DATA_OFFSET, FRAGMENT_BYTES, SLOT_BYTES, SUPERBLOCK_COPY_OFFSET
from xkv_store.index import Index, Meta, SetObject
from xkv_store.key import ObjectKey
from xkv_store.layout import Extent, Record, pack_record, pack_superblock

if TYPE_CHECKING:
    from pathlib import Path

OBJECTS: Final = 1_000_000
SLOTS: Final = 1_250_000  # room for what is put during the measurements: nothing is evicted
NAMESPACE: Final = b"bench-a-million."
HASH_BYTES: Final = 32
CHUNKS_PER_FAMILY: Final = 1_000  # chunks that one request stored
CHANGES_PER_TRANSACTION: Final = 50_000


def block_hashes() -> list[bytes]:
    """The same ones each time, ascending: objects and their order then fill up from one end, which is quick."""
    blob = np.random.default_rng(3).bytes(OBJECTS * HASH_BYTES)
    return sorted(blob[at : at + HASH_BYTES] for at in range(0, len(blob), HASH_BYTES))


def make_card(folder: Path, hashes: list[bytes]) -> None:
    """A card in `folder` with one object of one slot, of rank 0, for each hash."""
    folder.mkdir()
    card_uuid = uuid.uuid4().bytes
    superblock = new_superblock(
        number=0,
        databases=1,
        slot_bytes=SLOT_BYTES,
        slots=SLOTS,
        card_uuid=card_uuid,
        database_uuid=uuid.uuid4().bytes,
    )
    with (folder / "db-0.xkv").open("wb") as file:
        for offset in (0, SUPERBLOCK_COPY_OFFSET):
            os.pwrite(file.fileno(), pack_superblock(superblock), offset)
        file.truncate(DATA_OFFSET + SLOTS * SLOT_BYTES)
    index = Index.create(folder / "index", Meta(card_uuid, SLOT_BYTES, 1, len(hashes), 0), slots=SLOTS)
    # In the order of keys, which fills pages best; a card that grew has them fuller than half (docs/format.md).
    changes = [_change(number, block_hash) for number, block_hash in enumerate(hashes)]
    changes.sort(key=lambda change: change.key)
    for begin in range(0, len(changes), CHANGES_PER_TRANSACTION):
        index.apply(changes[begin : begin + CHANGES_PER_TRANSACTION])
    index.end_cleanly()
    index.close()


def _change(number: int, block_hash: bytes) -> SetObject:
    family, position = divmod(number, CHUNKS_PER_FAMILY)
    record = Record(number + 1, FRAGMENT_BYTES, family + 1, position, (Extent(0, number, 1),))
    return SetObject(ObjectKey(NAMESPACE, 0, block_hash, 0).encode(), pack_record(record))
