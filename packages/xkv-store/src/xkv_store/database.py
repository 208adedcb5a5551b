"""One set of slots on one file or block device, and moving slots to and from it.

Owns the descriptor, the superblocks, the choice of O_DIRECT, and every read and write of slots. Must not know
objects, keys or the index. Thread-safe: it has no state but its descriptor.
"""

import errno
import fcntl
import logging
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from .errors import CorruptObject, MediumError, UserError
from .geometry import (
    DATA_OFFSET,
    DATABASES_MAX,
    IO_STEP_BYTES,
    SLOTS_PER_DATABASE_MAX,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_COPY_OFFSET,
    Geometry,
)
from .huge_pages import Mapping, is_memory
from .layout import BadBytesError, OtherVersionError, Superblock, pack_superblock, parse_superblock
from .memory_limit import Roots, group_limit
from .memory_taker import MemoryTaker
from .native import FilePlace, Headers, Native, PlaceError, UnreachableError, library
from .private_files import database_path, open_private
from .slots import Slots

log = logging.getLogger(__name__)

IOV_MAX = 1_024  # buffers that the kernel takes in one call (UIO_MAXIOV)
IO_BYTES_MAX = 32 << 20  # bytes per call: long enough for any device's full speed, short enough to stay fair
SUMMED_BYTES = 512 << 10  # of what is copied by the core: summed while it is in the core's own cache
HUGE_S_MIN = 1.0
HUGE_BYTES_PER_S = 2 << 30  # with huge pages at hand 16 GiB/s; small ones are touched at 1.2 to 2.5
STALLS_MAX = 8  # moves in a row of less than a step: at a file's end for ever, elsewhere a coincidence
_BLOCK_BYTES = 512  # of st_blocks (stat(3type))

_DIRECT_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_SUPERBLOCKS_BYTES = SUPERBLOCK_COPY_OFFSET + SUPERBLOCK_BYTES

Mover: TypeAlias = Callable[[int, Sequence[memoryview], int], int]


class BusyDatabaseError(UserError):
    """Another process, or another card, has the file or device."""


class Database:
    """An open database. Buffers must be page-aligned whole I/O steps where `direct` is true."""

    def __init__(self, path: Path, fd: int, superblock: Superblock, *, direct: bool, claim_fd: int) -> None:
        self.path = path
        self._claim_fd = claim_fd  # holds the file or device for us alone until it is closed
        self.superblock = superblock
        self.direct = direct
        self._fd = fd
        self._in_memory = is_memory(fd)
        self._mapping = self._mapped()
        self._memory = MemoryTaker(self._mapping)

    @classmethod
    def make(cls, path: Path, superblock: Superblock) -> None:
        """Make an empty database; UserError, and nothing changed, where there is something else or no space.

        A file is allocated in full now, so that no put can meet a full file system later.
        """
        existed = path.exists()
        try:
            fd = open_private(database_path(path), os.O_RDWR | _exclusively(path))
        except OSError as error:
            raise _cannot_open(path, error) from error
        try:
            _claim(path, fd)
            empty = _check_empty(path, fd, superblock.card_uuid)
            data = pack_superblock(superblock)
            try:
                os.pwrite(fd, data + data, 0)  # first of all: from now on it is known for ours
                cls._allocate(path, fd, superblock)
                os.fsync(fd)
            except BaseException:
                if empty:
                    os.ftruncate(fd, 0)
                raise
        except OSError as error:
            raise UserError(f"cannot make the database {path}: {error.strerror}") from error
        except BaseException:
            if not existed:
                with suppress(OSError):
                    path.unlink()
            raise
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path) -> "Database":
        """Open a database, mending one damaged copy of its superblock from the other."""
        superblock = read_superblock(path)
        try:
            fd = open_private(database_path(path), os.O_RDWR | (os.O_EXCL if _is_device(path) else 0))
        except OSError as error:
            raise _cannot_open(path, error) from error
        try:
            _claim(path, fd)
            cls._check_size(path, fd, superblock)
            data = pack_superblock(superblock)
            if os.pread(fd, _SUPERBLOCKS_BYTES, 0) != data + data:
                log.warning("a superblock of %s was damaged: written again from its copy", path)
                os.pwrite(fd, data, 0)
                os.pwrite(fd, data, SUPERBLOCK_COPY_OFFSET)
                os.fsync(fd)
        except OSError as error:
            os.close(fd)
            raise UserError(f"cannot use the database {path}: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise
        try:
            direct_fd = cls._probe_direct(path, data)
        except BaseException:
            os.close(fd)
            raise
        if direct_fd is None:
            log.info("%s: no O_DIRECT on this file system, I/O goes through the page cache", path)
            return cls(path, fd, superblock, direct=False, claim_fd=fd)
        return cls(path, direct_fd, superblock, direct=True, claim_fd=fd)

    @staticmethod
    def _probe_direct(path: Path, superblock: bytes) -> int | None:
        """A descriptor with O_DIRECT, proved by rewriting the second superblock; None where that is refused."""
        try:
            fd = open_private(database_path(path), os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno in _DIRECT_REFUSED:
                return None
            raise UserError(f"cannot open the database {path}: {error.strerror}") from error
        buffer = aligned(SUPERBLOCK_BYTES)
        buffer[:] = superblock
        try:
            written = os.pwritev(fd, [buffer], SUPERBLOCK_COPY_OFFSET)
            buffer[:] = bytes(SUPERBLOCK_BYTES)
            read = os.preadv(fd, [buffer], SUPERBLOCK_COPY_OFFSET)
        except OSError as error:
            os.close(fd)
            if error.errno in _DIRECT_REFUSED:
                return None
            raise UserError(f"cannot use the database {path}: {error.strerror}") from error
        if (written, read) == (SUPERBLOCK_BYTES, SUPERBLOCK_BYTES) and buffer == superblock:
            return fd
        os.close(fd)
        return None

    def write(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Write neighbouring slots; only the last buffer may be shorter than a slot. MediumError."""
        self._move(os.pwritev, "writing", first_slot, buffers)

    def read(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Read neighbouring slots; only the last buffer may be shorter. MediumError; CorruptObject where cut."""
        self._move(os.preadv, "reading", first_slot, buffers)

    def place(self, first_slot: int, count: int) -> FilePlace:
        """Where neighbouring slots lie, for the library.

        What comes or goes through the core's cache is moved in such parts that it is summed there.
        """
        assert 0 <= first_slot <= self.superblock.slots - count
        step_bytes = SUMMED_BYTES if self._in_memory or not self.direct else IO_BYTES_MAX
        offset = DATA_OFFSET + first_slot * self.superblock.slot_bytes
        address = 0 if self._mapping is None else self._mapping.address + offset
        return FilePlace(self._fd, offset, count, step_bytes, address)

    def read_fronts(self, first_slot: int, fronts: Sequence[memoryview]) -> None:
        """Read the first I/O step of neighbouring slots, each into its own buffer (for a scan)."""
        slot_bytes = self.superblock.slot_bytes
        for number, front in enumerate(fronts, first_slot):
            self._move_all(os.preadv, "reading", DATA_OFFSET + number * slot_bytes, [front])

    def sync(self) -> None:
        """Make all that was written durable."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise MediumError.of(error, f"syncing {self.path}") from error

    def _mapped(self) -> Mapping | None:
        """A database in memory, mapped: written as a file, by one at a time, each page of it is looked up."""
        if not self._in_memory:
            return None
        try:
            return Mapping(self._fd, _database_bytes(self.superblock))
        except OSError as error:
            log.info("%s is not mapped (%s): the kernel copies", self.path, error.strerror)
            return None

    def take_memory(self) -> None:
        """From now on a database in memory is given all that it was promised, while it is used.

        Of one that was cut, or has holes, others may have that memory by now: it comes with what is put there, or not.
        """
        if _has_all(self._fd, self.superblock):
            self._memory.begin()

    @property
    def memory(self) -> str | None:
        """`taking` while that goes on, then `taken`, or `partly`; None for a database on a device, or with holes."""
        return self._memory.word

    def close(self) -> None:
        """Close the descriptor; nothing may be in flight."""
        self._memory.close()
        os.close(self._fd)
        if self._claim_fd != self._fd:
            os.close(self._claim_fd)

    @classmethod
    def _allocate(cls, path: Path, fd: int, superblock: Superblock) -> None:
        needed = _database_bytes(superblock)
        if stat.S_ISBLK(os.fstat(fd).st_mode):
            if os.lseek(fd, 0, os.SEEK_END) < needed:
                raise UserError(f"{path} is smaller than the {needed} bytes asked for: give a smaller capacity")
            return
        size = os.fstat(fd).st_size
        try:
            _expect_room(path, fd, needed)
            _use_huge_pages(fd, needed)
            cls._reserve(fd, needed)
        except OSError as error:
            os.ftruncate(fd, size)  # or the next start would take its holes for room that it has
            if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise UserError(f"cannot allocate {needed} bytes for {path}: {error.strerror}") from error
            free = os.fstatvfs(fd)
            raise UserError(
                f"no room for a database of {needed} bytes at {path} ({free.f_bavail * free.f_frsize} are free): "
                "give a smaller capacity, or another path"
            ) from error

    @classmethod
    def _reserve(cls, fd: int, needed: int) -> None:
        os.posix_fallocate(fd, 0, needed)

    @classmethod
    def _check_size(cls, path: Path, fd: int, superblock: Superblock) -> None:
        """A file that was cut is made whole again: what it lost reads as misses. So is one in memory with holes.

        Those are where nothing was ever put (`cp` leaves that out): without room for them it can be used all the same.
        """
        size = os.lseek(fd, 0, os.SEEK_END)
        if size < _database_bytes(superblock):
            log.warning("%s was cut to %d bytes: what it lost are misses now", path, size)
            cls._allocate(path, fd, superblock)
        elif is_memory(fd) and not _has_all(fd, superblock):
            try:
                cls._allocate(path, fd, superblock)
            except UserError as error:
                log.warning("%s has holes, and puts into them may fail: %s", path, error)

    def _move(self, call: Mover, doing: str, first_slot: int, buffers: Sequence[memoryview]) -> None:
        assert 0 <= first_slot <= self.superblock.slots - len(buffers)
        offset = DATA_OFFSET + first_slot * self.superblock.slot_bytes
        for part in _parts(buffers):
            self._move_all(call, doing, offset, part)
            offset += sum(map(len, part))

    def _move_all(self, call: Mover, doing: str, offset: int, buffers: Sequence[memoryview]) -> None:
        wanted = sum(map(len, buffers))
        done = stalled = 0
        while done < wanted:
            try:
                moved = call(self._fd, _rest(buffers, done) if done else buffers, offset + done)
            except OSError as error:
                raise self.error(error, doing, wanted, offset) from error
            if done + moved < wanted:
                # A short move. With O_DIRECT the next one must begin on a step again.
                kept = moved - (moved % IO_STEP_BYTES if self.direct else 0)
                stalled = 0 if kept > 0 else stalled + 1
                if moved <= 0 or stalled > STALLS_MAX:
                    what = f"{doing} {wanted} bytes at {offset} of {self.path}: cut off after {done}"
                    raise CorruptObject(what) if doing == "reading" else MediumError(errno.EIO, what)
                moved = kept
            done += moved

    def error(self, error: OSError, doing: str, wanted: int, offset: int) -> MediumError:
        """What that error of the system means."""
        return MediumError.of(error, f"{doing} {wanted} bytes at {offset} of {self.path}")


Place: TypeAlias = tuple[Database, int, int]  # and the first of some neighbouring slots, and how many


def read_proving(places: Sequence[Place], buffers: Sequence[memoryview], headers: Headers) -> int | None:
    """Read slots from these places, one place's behind the other's, and prove them as they come. MediumError.

    How many of the buffers, from the first on, are proved; of the others nothing is known. None: all is to be read by
    `Database.read`, and proved then.
    """
    by = _library_for(places)
    if by is None:
        return None
    try:
        return by.read([database.place(slot, count) for database, slot, count in places], buffers, headers)
    except PlaceError as error:
        raise _error_at(places, error, "reading", buffers) from error
    except UnreachableError:
        return None


def seal_and_write(
    places: Sequence[Place], buffers: Sequence[memoryview], headers: Headers, sums: Sequence[int] | None = None
) -> bool:
    """Seal slots and write them to these places, one place's behind the other's. MediumError.

    `sums`: of their payloads, where they are known. False: all is to be sealed, and written by `Database.write`.
    """
    by = _library_for(places)
    if by is None:
        return False
    try:
        return by.write([database.place(slot, count) for database, slot, count in places], buffers, headers, sums)
    except PlaceError as error:
        raise _error_at(places, error, "writing", buffers) from error
    except UnreachableError:
        return False


def _library_for(places: Sequence[Place]) -> Native | None:
    """None without it, and for databases of a class of tests, which have their own means."""
    found = library()
    return found if all(type(database) is Database for database, _, _ in places) else None


def _error_at(places: Sequence[Place], error: PlaceError, doing: str, buffers: Sequence[memoryview]) -> MediumError:
    begin = sum(count for _, _, count in places[: error.place])
    database, slot, count = places[error.place]
    wanted = sum(map(len, buffers[begin : begin + count]))
    return database.error(error, doing, wanted, database.place(slot, count).offset)


def read_superblock(path: Path) -> Superblock:
    """What a database says of itself, from either copy; UserError that says what to do when neither is good."""
    try:
        _is_device(path)
        with open(open_private(database_path(path), os.O_RDONLY), "rb") as file:  # noqa: PTH123  a descriptor
            data = file.read(_SUPERBLOCKS_BYTES)
    except FileNotFoundError as error:
        raise UserError(
            f"the database {path} is missing: bring it back, or remove the card's folder to begin with an empty card"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read the database {path}: {error.strerror}") from error
    first, second = (_superblock_at(data, offset) for offset in (0, SUPERBLOCK_COPY_OFFSET))
    for found in (first, second):
        if isinstance(found, Superblock):
            return found
        if isinstance(found, OtherVersionError):
            raise UserError(f"{path} is {found}: use the release of xkv that made it, or another folder")
    raise UserError(f"{path} is not a database of a card ({first}): give another path, or remove it if it is worthless")


def _superblock_at(data: bytes, offset: int) -> Superblock | BadBytesError:
    try:
        found = parse_superblock(data[offset : offset + SUPERBLOCK_BYTES])
        Geometry(found.slot_bytes)
    except BadBytesError as problem:
        return problem
    except UserError as problem:
        return BadBytesError(f"a superblock of another kind: {problem}")
    if not (1 <= found.databases <= DATABASES_MAX and 1 <= found.slots <= SLOTS_PER_DATABASE_MAX):
        return BadBytesError(f"a superblock of {found.databases} databases and {found.slots} slots")
    return found


def new_superblock(
    *, number: int, databases: int, slot_bytes: int, slots: int, card_uuid: bytes, database_uuid: bytes
) -> Superblock:
    """A superblock made now."""
    return Superblock(number, databases, slot_bytes, slots, card_uuid, database_uuid, int(time.time()))


def device_bytes(path: Path) -> int | None:
    """The size of the block device at `path`; None where it is a file or nothing."""
    try:
        if not _is_device(path):
            return None
        fd = open_private(database_path(path), os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot open {path}: {error.strerror}") from error
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def _is_device(path: Path) -> bool:
    """Whether it is a block device rather than a file; UserError for what is neither, which may not even open."""
    mode = path.stat().st_mode
    if not stat.S_ISBLK(mode) and not stat.S_ISREG(mode):
        raise UserError(f"{path} is neither a file nor a block device: give another path")
    return stat.S_ISBLK(mode)


def aligned(buffer_bytes: int) -> memoryview:
    """Zeroed memory that O_DIRECT accepts."""
    return memoryview(mmap.mmap(-1, buffer_bytes))


def aligned_slots(count: int, slot_bytes: int) -> Slots:
    """Zeroed slots that O_DIRECT accepts and nobody else can reach."""
    return Slots(aligned(count * slot_bytes), slot_bytes, range(count))


def _database_bytes(superblock: Superblock) -> int:
    return DATA_OFFSET + superblock.slots * superblock.slot_bytes


def _has_all(fd: int, superblock: Superblock) -> bool:
    """Whether a file holds all that it needs: nothing was cut off, and there are no holes."""
    return os.fstat(fd).st_blocks * _BLOCK_BYTES >= _database_bytes(superblock)


def _use_huge_pages(fd: int, needed: int) -> None:
    """Let a file that is memory (on a tmpfs) lie in huge pages: each copy in or out of it then costs half as much.

    It takes at most as long as taking small pages does; what is not done then is done while it is used (MemoryTaker).
    """
    if not is_memory(fd):
        return
    if os.fstat(fd).st_size < needed:
        os.ftruncate(fd, needed)
    try:
        Mapping(fd, needed).use_huge_pages([range(needed)], seconds_max=HUGE_S_MIN + needed / HUGE_BYTES_PER_S)
    except OSError as error:
        log.debug("no huge pages for a database: %s", error.strerror)


def _expect_room(path: Path, fd: int, needed: int) -> None:
    """OSError (ENOSPC) where a file of so many bytes cannot fit: trying would take all that others have left.

    UserError where it is memory, and more than this process may have: trying would be its end.
    """
    free, held = os.fstatvfs(fd), os.fstat(fd).st_blocks * _BLOCK_BYTES
    limit = group_limit(Roots()) if is_memory(fd) else None
    if limit is not None and needed - held > limit.limit_bytes:
        raise UserError(
            f"no room for a database of {needed} bytes at {path}, which is memory: this process's control group may "
            f"have {limit.limit_bytes} bytes ({limit.file}); give a smaller capacity, another path, or raise that limit"
        )
    if needed - held > free.f_bavail * free.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _exclusively(path: Path) -> int:
    """How to open what may be there: a device for us alone (so not one that is mounted), a file made if need be."""
    is_device = device_bytes(path) is not None
    return os.O_EXCL if is_device else os.O_CREAT


def _claim(path: Path, fd: int) -> None:
    """Keep other gateways away, which may reach the same file from another card's folder (a device: O_EXCL)."""
    if _is_device(path):
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BusyDatabaseError(f"the database {path} is in use: stop the gateway that has it") from error
    except OSError as error:
        raise UserError(f"cannot lock {path}: {error.strerror}; give a path on a local disk") from error


def _cannot_open(path: Path, error: OSError) -> UserError:
    if error.errno == errno.EBUSY:
        return BusyDatabaseError(f"the device {path} is in use: unmount it, or stop the gateway that has it")
    return UserError(f"cannot open the database {path}: {error.strerror}")


def _check_empty(path: Path, fd: int, card_uuid: bytes) -> bool:
    """Whether it is an empty file; UserError unless that, a blank device, or a beginning of the same card."""
    front = os.pread(fd, DATA_OFFSET, 0)
    if not front:
        return True
    is_device = stat.S_ISBLK(os.fstat(fd).st_mode)
    if is_device and not front.strip(b"\0"):
        return False
    for offset in (0, SUPERBLOCK_COPY_OFFSET):
        with suppress(BadBytesError):
            if parse_superblock(front[offset : offset + SUPERBLOCK_BYTES]).card_uuid == card_uuid:
                return False
    remedy = f"wipe it (wipefs --all {path}; blkdiscard --zeroout {path})" if is_device else "remove it"
    raise UserError(f"{path} holds something already: give another path, or {remedy} if it is worthless")


def _parts(buffers: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    """`buffers` in calls of at most IOV_MAX buffers and about IO_BYTES_MAX bytes (at least one buffer)."""
    step = max(1, min(IOV_MAX, IO_BYTES_MAX // max(1, len(buffers[0])))) if buffers else 1
    for begin in range(0, len(buffers), step):
        yield buffers[begin : begin + step]


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` after `done` bytes."""
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest
