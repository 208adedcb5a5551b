"""The index: which object lies where, in an LMDB environment that only the gateway's process opens.

Owns every use of lmdb: the named databases of docs/format.md ("Index"), reading them from one snapshot, and
applying a batch of changes in one transaction. Must not know slots, the medium or why something changes.
Reads are the main thread's, `apply` the committer's; a lock keeps the map from growing under a read.
Why LMDB, and with these flags: docs/adr/0002-order-of-a-put-and-durability.md.
"""

from __future__ import annotations  # lmdb.Transaction takes a parameter in its stubs only

import errno
import logging
import os
import struct
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import lmdb

from .errors import LACKING, MediumError, UserError
from .index_file import DamagedIndexError, check_whole
from .layout import FORMAT_VERSION, BadBytesError, order_key_of
from .private_files import check_no_link, open_private
from .testing.points import reached

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

NAMED_DATABASES = (b"meta", b"objects", b"order", b"namespaces")
MAP_BYTES_MIN = 16 << 20
INDEX_BYTES_PER_SLOT = 512  # objects (key, record) + order (key, object key), in pages that are half full
SCAN_BATCH = 131_072  # entries read at a time at the start: some 40 MB of Python objects
READERS_MAX = 8  # transactions of this one process
LOCK_BYTES = 4_096  # of LMDB's lock file: more than that many readers take

CLOSED = bytes(16)
NOWHERE = b""  # in the order: there is no such object
_COUNTER_MAX = (1 << 63) - 1  # of generations and boots: more were never counted, and none can overflow
_DOUBTED = "doubted"  # a file in the environment's folder while nobody may rely on it

_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Meta:
    """What the index says of its card.

    `open_in`: the kernel's boot id (16 bytes) of the machine that has it open, CLOSED after a clean end.
    """

    card_uuid: bytes
    slot_bytes: int
    databases: int
    generation_ceiling: int
    boots: int
    open_in: bytes = CLOSED


@dataclass(frozen=True, slots=True)
class SetObject:
    """The object `key` is now what `record` (packed) says, whatever it was before.

    `stood`, here and below: its key in the order until then, NOWHERE where it had none; None: that is looked up.
    """

    key: bytes
    record: bytes
    stood: bytes | None = None


@dataclass(frozen=True, slots=True)
class MoveObject:
    """The object `key` stands elsewhere in the order, as `record` (packed) says; all else of it is as before."""

    key: bytes
    record: bytes
    stood: bytes | None = None


@dataclass(frozen=True, slots=True)
class RemoveObject:
    """There is no object `key` any more, whatever it was before."""

    key: bytes
    stood: bytes | None = None


@dataclass(frozen=True, slots=True)
class SetNamespace:
    """The identity behind a namespace, as JSON."""

    namespace: bytes
    descriptor: bytes


@dataclass(frozen=True, slots=True)
class RemoveNamespace:
    """The identity behind a namespace is not kept any more."""

    namespace: bytes


Change: TypeAlias = SetObject | MoveObject | RemoveObject | SetNamespace | RemoveNamespace


def doubt(folder: Path) -> None:
    """Leave a mark that the index in `folder` must not be opened: LMDB ends the process at some damage."""
    with suppress(OSError, UserError):  # the mark only saves whoever opens the index next from finding out by himself
        os.close(open_private(folder / _DOUBTED, os.O_WRONLY | os.O_CREAT))


def trust(folder: Path) -> None:
    """Take the mark away."""
    with suppress(OSError):
        (folder / _DOUBTED).unlink()


def is_doubted(folder: Path) -> bool:
    """Whether the mark is there."""
    return os.path.lexists(folder / _DOUBTED)


class Index:
    """An open index. Damage that shows at once raises DamagedIndexError from `open`."""

    def __init__(self, folder: Path, env: lmdb.Environment, *, map_bytes_max: int) -> None:
        self._folder = folder
        self._map_bytes_max = map_bytes_max
        self._lock = threading.Lock()
        self._reader: lmdb.Transaction[bytes] | None = None
        self._cursors: dict[int, lmdb.Cursor[bytes]] = {}  # of that reader
        self._use(env)

    def _use(self, env: lmdb.Environment) -> None:
        self._env = env
        self._map_bytes = env.info()["map_size"]
        self._meta, self._objects, self._order, self._namespaces = (env.open_db(name) for name in NAMED_DATABASES)

    @classmethod
    def create(cls, folder: Path, meta: Meta, *, slots: int, map_bytes: int | None = None) -> Index:
        """A new, empty index for a card of `slots` slots, with its space allocated ahead where it can be."""
        folder.mkdir(mode=0o700)
        index = cls._open(folder, slots, map_bytes)
        try:
            index.set_meta(meta)
            with suppress(OSError):  # as good as it gets: ENOSPC here only means that it may come later
                fd = open_private(folder / "data.mdb", os.O_RDWR)
                try:
                    os.posix_fallocate(fd, 0, max(1 << 16, slots * INDEX_BYTES_PER_SLOT))
                finally:
                    os.close(fd)
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    def open(cls, folder: Path, *, slots: int, map_bytes: int | None = None) -> Index:
        """The existing index in `folder`; UserError for one of another format version."""
        check_no_link(folder)
        check_no_link(folder / "data.mdb")  # LMDB opens by name, and would follow; it makes its lock file anew
        check_whole(folder / "data.mdb")
        index = cls._open(folder, slots, map_bytes)
        try:
            index.meta()
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    def _open(cls, folder: Path, slots: int, map_bytes: int | None) -> Index:
        likely_bytes = max(MAP_BYTES_MIN, slots * INDEX_BYTES_PER_SLOT * 2)
        on_disk = (folder / "data.mdb").stat().st_size if (folder / "data.mdb").exists() else 0
        try:
            env = _environment(folder, max(map_bytes or likely_bytes, on_disk))
            return cls(folder, env, map_bytes_max=likely_bytes * 16)
        except lmdb.Error as error:
            for number in LACKING:
                if str(error).endswith(os.strerror(number)):  # all that lmdb keeps of it
                    raise MediumError(number, f"opening the index {folder}") from error
            raise DamagedIndexError(str(error)) from error

    # --- reading: the main thread ---------------------------------------------------------------------------

    def refresh(self) -> None:
        """From now on read what the last `apply` has left."""
        with self._lock:
            self._end_reading()

    def get(self, key: bytes) -> bytes | None:
        """The packed record of an object. MediumError where the index cannot be read (so in all that follow)."""
        with self._lock, _Reading(self._folder):
            return self._read().get(key, db=self._objects)

    def chunk(self, chunk_key: bytes, objects_max: int) -> list[tuple[bytes, bytes]]:
        """(key, record) of every rank's object of a chunk, at most `objects_max`."""
        found: list[tuple[bytes, bytes]] = []
        key_bytes = len(chunk_key) + 2
        with self._lock, _Reading(self._folder):
            cursor = self._cursor(self._objects)
            if cursor.set_range(chunk_key):
                for key, record in cursor.iternext():
                    if not key.startswith(chunk_key) or len(found) == objects_max:
                        break
                    if len(key) == key_bytes:
                        found.append((key, record))
        return found

    def keys_after(self, key: bytes, limit: int) -> list[bytes]:
        """The next `limit` objects' keys behind `key`, in their order."""
        with self._lock, _Reading(self._folder), self._read().cursor(self._objects) as cursor:
            if not cursor.set_range(key + b"\0"):
                return []
            return list(islice(cursor.iternext(keys=True, values=False), limit))

    def objects_from(self, key: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """(key, record) of the next `limit` objects from `key` on, in the order of keys."""
        with self._lock, _Reading(self._folder), self._read().cursor(self._objects) as cursor:
            return list(islice(cursor.iternext(), limit)) if cursor.set_range(key) else []

    def order_from(self, order_key: bytes, limit: int, end: bytes | None = None) -> list[tuple[bytes, bytes]]:
        """(order key, object key) of the next `limit` objects in the order of eviction, from `order_key` to `end`."""
        found: list[tuple[bytes, bytes]] = []
        with self._lock, _Reading(self._folder):
            cursor = self._cursor(self._order)
            if cursor.set_range(order_key):
                for pair in cursor.iternext():
                    if len(found) == limit or (end is not None and pair[0] >= end):
                        break
                    found.append(pair)
        return found

    def namespaces(self, after: bytes = b"", limit: int | None = None) -> dict[bytes, bytes]:
        """Every namespace with its descriptor; or the next `limit` of them behind `after`, in their order."""
        with self._lock, _Reading(self._folder), self._read().cursor(self._namespaces) as cursor:
            return dict(islice(cursor.iternext(), limit)) if cursor.set_range(after + b"\0") else {}

    def scan(self, batch_max: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """All keys and records, in the order of keys, in batches. For the start: nothing else may read meanwhile."""
        with self._lock, _Reading(self._folder):
            reader = self._read()
            with reader.cursor(self._objects) as of_keys, reader.cursor(self._objects) as of_records:
                of_keys.first()
                of_records.first()
                all_keys = of_keys.iternext(keys=True, values=False)
                all_records = of_records.iternext(keys=False, values=True)
                while keys := list(islice(all_keys, batch_max)):
                    yield keys, list(islice(all_records, batch_max))

    def counts(self) -> tuple[int, int]:
        """(objects, entries of the order): equal unless the index is damaged.

        Every page of the order and of the namespaces is visited, so that LMDB ends the process now if it must at one
        of them, where the next start learns of it, and not at each eviction.
        """
        with self._lock, _Reading(self._folder):
            reader = self._read()
            for named in (self._namespaces, self._order):
                with reader.cursor(named) as cursor:
                    last = deque(enumerate(cursor.iternext(keys=True, values=False), 1), maxlen=1)  # no step in Python
                visited = last[0][0] if last else 0
            return reader.stat(self._objects)["entries"], visited

    def meta(self) -> Meta:
        """What the index says of its card; DamagedIndexError, or UserError for another format version."""
        with self._lock, _Reading(self._folder):
            reader = self._read()
            names = (b"format", b"card_uuid", b"slot_bytes", b"databases", b"generation_ceiling", b"boots", b"open_in")
            values = [reader.get(name, db=self._meta, default=b"") for name in names]
        if not all(values):
            raise DamagedIndexError("its meta entries are missing")
        version, card_uuid, slot_bytes, databases, ceiling, boots, open_in = values
        try:
            if _U16.unpack(version)[0] != FORMAT_VERSION:
                raise UserError(
                    f"{self._folder} is an index of format version {_U16.unpack(version)[0]}, this program knows "
                    f"version {FORMAT_VERSION}: use the release of xkv that made it, or another folder"
                )
            meta = Meta(
                card_uuid,
                _U32.unpack(slot_bytes)[0],
                _U16.unpack(databases)[0],
                _U64.unpack(ceiling)[0],
                _U64.unpack(boots)[0],
                open_in,
            )
        except struct.error as error:
            raise DamagedIndexError(f"its meta entries are damaged ({error})") from error
        if max(meta.generation_ceiling, meta.boots) > _COUNTER_MAX:
            raise DamagedIndexError("its counters are beyond all that can have been counted")
        return meta

    # --- writing: the committer -----------------------------------------------------------------------------

    def apply(self, changes: Iterable[Change], generation_ceiling: int | None = None) -> None:
        """Apply `changes` in order in one transaction; MediumError, and nothing applied, if that fails.

        With a ceiling, it is durable when this returns. Changes alone survive this process, not the machine: what a
        power loss leaves of the environment is not trusted (`Meta.open_in`).
        """
        changes = list(changes)
        try:
            while not self._try(changes, generation_ceiling):
                if not self._grow():
                    what = f"the index {self._folder} is full at {self.map_bytes()} bytes"
                    raise MediumError(errno.ENOSPC, what, "make the card anew, with larger objects")
            reached("commit.ended")
            if generation_ceiling is not None:
                self._env.sync(True)
        except (lmdb.Error, OSError) as error:
            self._revive()
            raise _as_medium_error(error, "writing the index", self._folder) from error

    def set_meta(self, meta: Meta) -> None:
        """Write what the index says of its card, durably."""
        values = {
            b"format": _U16.pack(FORMAT_VERSION),
            b"card_uuid": meta.card_uuid,
            b"slot_bytes": _U32.pack(meta.slot_bytes),
            b"databases": _U16.pack(meta.databases),
            b"generation_ceiling": _U64.pack(meta.generation_ceiling),
            b"boots": _U64.pack(meta.boots),
            b"open_in": meta.open_in,
        }
        try:
            with self._env.begin(write=True) as transaction:
                for name, value in values.items():
                    transaction.put(name, value, db=self._meta)
            self._env.sync(True)
        except (lmdb.Error, OSError) as error:
            raise _as_medium_error(error, "writing the index", self._folder) from error
        self.refresh()

    def restore_order(self) -> None:
        """Make the order anew from the objects."""
        with _Reading(self._folder), self._env.begin(write=True) as transaction:
            transaction.drop(self._order, delete=False)
            for keys, records in self.scan(SCAN_BATCH):
                for key, record in zip(keys, records, strict=True):
                    with suppress(BadBytesError):
                        transaction.put(order_key_of(record), key, db=self._order)
        self.refresh()

    def end_cleanly(self) -> None:
        """Make everything applied durable, and then that it is: the next open trusts it, also after a power loss."""
        try:
            self._env.sync(True)
        except (lmdb.Error, OSError) as error:
            raise _as_medium_error(error, "syncing the index", self._folder) from error
        self.set_meta(replace(self.meta(), open_in=CLOSED))

    def map_bytes(self) -> int:
        """The size of the map: what the index may grow to before the map grows."""
        return self._map_bytes

    def close(self) -> None:
        """Close the environment; what was not applied is lost."""
        with self._lock:
            self._end_reading()
            self._env.close()

    def _try(self, changes: list[Change], generation_ceiling: int | None) -> bool:
        """One transaction; False, and nothing applied, when the map is full."""
        try:
            with self._env.begin(write=True) as transaction:
                reached("commit.begin")
                for change in changes:
                    self._apply_one(transaction, change)
                if generation_ceiling is not None:
                    transaction.put(b"generation_ceiling", _U64.pack(generation_ceiling), db=self._meta)
                reached("commit.applied")
        except lmdb.MapFullError:
            return False
        return True

    def _apply_one(self, transaction: lmdb.Transaction[bytes], change: Change) -> None:
        match change:
            case SetObject(key, record, stood) | MoveObject(key, record, stood):
                self._forget_order(transaction, key, stood)
                transaction.put(key, record, db=self._objects)
                transaction.put(order_key_of(record), key, db=self._order)
            case RemoveObject(key, stood):
                self._forget_order(transaction, key, stood)
                transaction.delete(key, db=self._objects)
            case SetNamespace(namespace, descriptor):
                transaction.put(namespace, descriptor, db=self._namespaces)
            case RemoveNamespace(namespace):
                transaction.delete(namespace, db=self._namespaces)

    def _forget_order(self, transaction: lmdb.Transaction[bytes], key: bytes, stood: bytes | None) -> None:
        if stood is None:
            old = transaction.get(key, db=self._objects)
            stood = NOWHERE
            if old is not None:
                with suppress(BadBytesError):  # such a record's entry in the order leads nowhere, and is passed over
                    stood = order_key_of(old)
        if stood != NOWHERE:
            transaction.delete(stood, db=self._order)

    def _grow(self) -> bool:
        """Double the map within its bound: 16 times what the card's slots need is more than any index uses."""
        with self._lock:
            size = self.map_bytes()
            if size >= self._map_bytes_max:
                return False
            self._end_reading()
            self._env.set_mapsize(min(size * 2, self._map_bytes_max))
            self._map_bytes = self._env.info()["map_size"]
            log.info("the index's map grows from %d to %d bytes", size, self.map_bytes())
            return True

    def _revive(self) -> None:
        """LMDB refuses all that follows a meta page that it could not write: an environment anew does not.

        The meta page before it is still good. Where the new one cannot be had either, the next failed `apply` tries.
        """
        with self._lock:
            try:
                self._env.begin().abort()
            except lmdb.Error:
                log.warning("opening the index %s again: LMDB gave it up", self._folder)
            else:
                return
            with suppress(lmdb.Error):  # a reader of an environment that is closed is gone
                self._end_reading()
            self._env.close()
            try:
                check_whole(self._folder / "data.mdb")
                self._use(_environment(self._folder, self._map_bytes))
            except (lmdb.Error, OSError) as error:
                log.warning("the index %s cannot be opened again: %s", self._folder, error)
            except DamagedIndexError as error:
                log.warning("the index %s is damaged: %s", self._folder, error)
                doubt(self._folder)

    def _read(self) -> lmdb.Transaction[bytes]:
        if self._reader is None:
            self._reader = self._env.begin()
        return self._reader

    def _cursor(self, named: Any) -> lmdb.Cursor[bytes]:
        """For one look, under the lock: making a cursor takes as long as the look itself."""
        cursor = self._cursors.get(id(named))
        if cursor is None:
            cursor = self._cursors[id(named)] = self._read().cursor(named)
        return cursor

    def _end_reading(self) -> None:
        cursors, self._cursors = self._cursors, {}
        reader, self._reader = self._reader, None
        for cursor in cursors.values():
            cursor.close()
        if reader is not None:
            reader.abort()  # lmdb keeps it as a spare and renews it


def _environment(folder: Path, map_bytes: int) -> lmdb.Environment:
    """The environment in `folder`, opened. lmdb.Error, OSError."""
    # The card's own lock says that nobody else has this environment open, so that a lock file can only be a
    # dead process's, perhaps of another pid namespace: its readers are stale, its mutex of no use.
    lock_file = folder / "lock.mdb"
    lock_file.unlink(missing_ok=True)
    # LMDB maps it, and a page that a full file system does not give would end the process (SIGBUS): taken ahead.
    with open(open_private(lock_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:  # noqa: PTH123  a descriptor
        file.write(bytes(LOCK_BYTES))
    return lmdb.open(
        str(folder),
        map_size=map_bytes,
        mode=0o600,
        max_dbs=len(NAMED_DATABASES),
        max_readers=READERS_MAX,
        max_spare_txns=2,
        sync=False,
        readahead=False,
    )


class _Reading:
    """Turns lmdb's errors into the medium's."""

    __slots__ = ("_folder",)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lmdb.Error):
            raise _as_medium_error(error, "reading the index", self._folder) from error


_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.IncompatibleError, lmdb.CursorFullError)


def _as_medium_error(error: lmdb.Error | OSError, doing: str, folder: Path) -> MediumError:
    """The medium's error; where LMDB has met damage, the next start makes the index anew."""
    what = f"{doing} {folder}"
    if isinstance(error, _DAMAGE):
        doubt(folder)
    if isinstance(error, OSError):
        return MediumError.of(error, what)
    if isinstance(error, lmdb.DiskError) or "No space" in str(error):
        return MediumError(errno.ENOSPC, what, "free some space on that file system")
    return MediumError(errno.EIO, f"{what} ({error})", "restart the gateway: it makes a damaged index anew")
