"""A card that is the remote alone: it has no databases, and what it lists lies at the remote (ADR 0017).

Owns: its list, an index in memory that ends with the gateway, and sealing objects where they lie. Must not know: the
remote, its library, sessions.

All else is a card's: who puts what, generations, the lookup table, what leaves when there is no room in the list. Its
slots are numbers without bytes: its capacity is how much of the remote is listed, and so found without asking.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from .card import Card
from .card_folder import GENERATIONS_PER_CEILING, Opened, card_is_there
from .card_lock import lock_folder
from .card_options import NO_FOLDER
from .departures import Departures
from .errors import MediumError, UserError
from .fragment import Identity, ObjectSlots
from .geometry import SLOT_BYTES, Geometry
from .index import INDEX_BYTES_PER_SLOT, MAP_BYTES_MIN, Index, Meta
from .recovery import Loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .card import GetPlan, PutPlan
    from .card_options import CardOptions
    from .key import ObjectKey
    from .plans import ObjectPlan

LISTED_BYTES_DEFAULT: Final = 256 << 30  # costs 64 MiB of lookup table where all of it is listed
LISTED_SLOTS_MAX: Final = 1 << 28


class IndexInMemory(Index):
    """An index that nobody else finds, and that is gone with this process."""

    @classmethod
    def make(cls, meta: Meta, *, slots: int) -> IndexInMemory:
        """A new, empty one. MediumError."""
        fd = os.memfd_create("xkv-index", os.MFD_CLOEXEC)
        try:
            # LMDB wants a name, for as long as it takes to open it; the bytes are in memory all the time.
            with tempfile.TemporaryDirectory(prefix="xkv-") as name:
                folder = Path(name)
                (folder / "data.mdb").symlink_to(f"/proc/self/fd/{fd}")
                index = cls._open(folder, slots, max(MAP_BYTES_MIN, slots * INDEX_BYTES_PER_SLOT * 2))
                try:
                    index.set_meta(meta)
                except BaseException:
                    index.close()
                    raise
        except OSError as error:
            raise MediumError.of(error, "making an index in memory") from error
        finally:
            os.close(fd)
        assert isinstance(index, cls)
        return index


class CardAlone(Card):
    """As `Card`; what is written is sealed, and nothing is read here."""

    @classmethod
    def open(cls, options: CardOptions) -> CardAlone:
        """A new card, with nothing on it. The folder, if one is named, has its lock alone. UserError."""
        lock_fd = _lock(options.folder)
        try:
            return cls(options, _open(options, lock_fd))
        except MediumError as error:
            os.close(lock_fd)
            raise UserError(f"cannot make a card without databases: {error}") from error
        except BaseException:
            os.close(lock_fd)
            raise

    def write(self, plan: PutPlan, slots: Sequence[memoryview], sums: Sequence[int] | None = None) -> None:
        """Seal the object's slots where they are."""
        self.seal(plan, slots, sums)

    def write_many(self, objects: Sequence[tuple[PutPlan, Sequence[memoryview]]]) -> list[Exception | None]:
        """As `write`, several."""
        for plan, slots in objects:
            self.seal(plan, slots)
        return [None] * len(objects)

    def seal(self, plan: ObjectPlan, slots: Sequence[memoryview], sums: Sequence[int] | None = None) -> None:
        """Seal an object as this card's. `sums`: of its payloads, where they are known."""
        identity = Identity(self.uuid, plan.encoded_key, plan.generation, plan.length, plan.family, plan.position)
        ObjectSlots(identity, self.geometry).seal(slots, 0, sums)

    def begin_proof(self, key: ObjectKey) -> GetPlan | None:  # noqa: ARG002
        """Nothing lies here that could be proved."""
        return None

    def close(self) -> None:
        """Let go of everything: nothing outlives this process."""
        self.abandon()


def _lock(folder: Path) -> int:
    """The folder's lock, in which there may be nothing else of a card; without a folder a descriptor that is none."""
    if folder == NO_FOLDER:
        return os.eventfd(0, os.EFD_CLOEXEC)
    if card_is_there(folder):
        raise UserError(f"the card in {folder} has databases of its own: give their number, or another folder")
    return lock_folder(folder, create=True)


def _open(options: CardOptions, lock_fd: int) -> Opened:
    geometry = Geometry(options.slot_bytes or SLOT_BYTES)
    slots = (options.capacity_bytes or LISTED_BYTES_DEFAULT) // geometry.slot_bytes
    if not 1 <= slots <= LISTED_SLOTS_MAX:
        raise UserError(
            f"the capacity of a card without databases is how much of the remote it lists: give {geometry.slot_bytes} "
            f"to {LISTED_SLOTS_MAX * geometry.slot_bytes} bytes, not {options.capacity_bytes}"
        )
    options.quotas.check(slots=slots, slot_bytes=geometry.slot_bytes, databases=1)
    # Engines live on, and believe nothing of a chunk up to the generation that was denied them: not even of this life.
    generation = time.time_ns() // 1000
    meta = Meta(uuid.uuid4().bytes, geometry.slot_bytes, 0, generation + GENERATIONS_PER_CEILING, 1)
    none = np.zeros(0, np.uint64)
    return Opened(
        lock_fd=lock_fd,
        card_uuid=meta.card_uuid,
        geometry=geometry,
        databases=[],
        index=IndexInMemory.make(meta, slots=slots),
        loaded=Loaded(none, none, none, none, none, [np.zeros(slots, np.bool_)], {}, 0),
        generation=generation,
        generation_ceiling=meta.generation_ceiling,
        boots=meta.boots,
        rebuilt=False,
        departures=Departures(slots),
    )
