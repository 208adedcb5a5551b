"""Looking at a card that no gateway serves, with nothing changed in it: its index, and what the slots say.

Owns holding such a card by its lock, and finding out whether its index can be used at all, in a process of its own
that may die of it. Must not know who is told, or how an object is proved.
"""

import os
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .card_folder import check_meta, kernel_boot_id, lock_card, open_databases
from .card_options import MEDIA, CardOptions
from .database import Database
from .departures import Departures, Reason
from .errors import LACKING, MediumError, UserError
from .geometry import Geometry
from .index import CLOSED, SCAN_BATCH, Index, RemoveNamespace, RemoveObject, is_doubted
from .index_file import DamagedIndexError
from .private_files import check_no_link
from .recovery import Rebuilt, Used, rebuild, survey

PROBE_S_MAX = 600  # of an index of ten million objects some ten seconds; a damaged one may lead in a circle

_SOUND, _DAMAGED = 0, 1


@dataclass(slots=True)
class ClosedCard:
    """Its databases, open; its index, once `open_index` has found it usable."""

    options: CardOptions
    databases: list[Database]

    @property
    def uuid(self) -> bytes:
        """The card's, as its databases say."""
        return self.databases[0].superblock.card_uuid

    @property
    def geometry(self) -> Geometry:
        """The card's."""
        return Geometry(self.databases[0].superblock.slot_bytes)

    @property
    def slots(self) -> list[int]:
        """Of each database."""
        return [database.superblock.slots for database in self.databases]

    def open_index(self) -> Index | str:
        """The index; or what is wrong with it, so that it must be made anew. UserError for another format version."""
        folder = self.options.folder / "index"
        check_no_link(folder)
        try:
            _check_alive(folder, sum(self.slots))
            index = MEDIA.index.open(folder, slots=sum(self.slots))
            try:
                self._check(index)
            except BaseException:
                index.close()
                raise
        except DamagedIndexError as error:
            return str(error)
        except MediumError as error:
            if error.errno in LACKING:
                raise
            return str(error)
        return index

    def _check(self, index: Index) -> None:
        meta = index.meta()
        if meta.card_uuid != self.uuid:
            whose = f"({meta.card_uuid.hex()}, the databases to {self.uuid.hex()})"
            raise DamagedIndexError(f"it belongs to another card {whose}")
        check_meta(meta, self.options.folder, self.databases, self.geometry)

    def survey(self, index: Index) -> tuple[npt.NDArray[np.bool_], Used]:
        """Which entries are good, in the order of keys, and which slots they name."""
        return survey(index, self.slots, self.geometry)

    def from_slots(self, but: Used | None = None) -> Rebuilt:
        """The whole objects that slot headers tell of, without those in the slots of `but`."""
        return rebuild(self.databases, self.uuid, self.geometry, but)

    def departures(self, index: Index) -> Departures:
        """Why objects have left it, as its last gateway has kept that; with what is not known since then."""
        meta = index.meta()
        return Departures.load(
            self.options.folder,
            card_uuid=self.uuid,
            boots=meta.boots + 1,
            slots=sum(self.slots),
            is_new=not meta.boots,
        )

    def note_left(self, index: Index, objects: Iterable[tuple[bytes, int]], reason: Reason) -> None:
        """Keep that these (key, generation) have left, for whoever asks."""
        departures = self.departures(index)
        for key, generation in objects:
            departures.left(key, reason, generation)
        departures.save(self.options.folder, self.uuid, index.meta().boots)

    def remove(self, index: Index, keys: Sequence[bytes], namespaces: Sequence[bytes] = ()) -> None:
        """Take these objects, and what was published of these namespaces, out of the index, durably.

        A power loss meanwhile makes it doubtful, as in a gateway.
        """
        meta = index.meta()
        if meta.open_in == CLOSED:
            index.set_meta(replace(meta, open_in=kernel_boot_id()))
        index.apply([*map(RemoveObject, keys), *map(RemoveNamespace, namespaces)])
        index.refresh()
        if meta.open_in == CLOSED:
            index.end_cleanly()


@contextmanager
def closed_card(options: CardOptions) -> Iterator[ClosedCard]:
    """The card, held for the block. UserError where there is none; CardInUseError where somebody has it."""
    with lock_card(options):
        databases = open_databases(options)
        try:
            yield ClosedCard(options, databases)
        finally:
            for database in databases:
                database.close()


def _check_alive(folder: Path, slots: int) -> None:
    """DamagedIndexError where whoever reads the index dies, as LMDB does at some damage: a child reads all of it."""
    if is_doubted(folder):
        raise DamagedIndexError("whoever used it last died of it, or found it damaged")
    if not folder.is_dir():
        raise DamagedIndexError("it is missing")
    with warnings.catch_warnings():
        # Python warns of threads, which some library may have; the child uses nothing but LMDB and ends.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _read_all_and_exit(folder, slots)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        raise DamagedIndexError(f"whoever reads it dies of it ({signal.Signals(-code).name})")
    if code != _SOUND:
        raise DamagedIndexError("its pages are damaged")


def _read_all_and_exit(folder: Path, slots: int) -> None:
    code = _DAMAGED
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)  # what LMDB says when it ends a process helps nobody
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PROBE_S_MAX)
        _read_all(folder, slots)
        code = _SOUND
    except (DamagedIndexError, MediumError, UserError, OSError, MemoryError):
        code = _SOUND  # the parent meets the same, and can say it
    finally:
        os._exit(code)


def _read_all(folder: Path, slots: int) -> None:
    index = MEDIA.index.open(folder, slots=slots)
    index.meta()
    index.counts()
    for _ in index.scan(SCAN_BATCH):
        pass
