"""A card's folder: its lock, making a card in it, and opening the card that is there.

Owns the folder's layout (`lock`, `making`, `index/`, `db-N.xkv`, `departures`), and the decision between making,
opening and mending. Must not know puts, gets or sessions.

A folder with the file `making` holds a card that was never finished, so that nothing in it can be lost.
"""

import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from .card_lock import CardInUseError, lock_folder
from .card_options import MEDIA, CardOptions
from .database import BusyDatabaseError, Database, device_bytes, new_superblock, read_superblock
from .departures import FILE_NAME as DEPARTURES
from .departures import Departures
from .errors import LACKING, MediumError, UserError
from .geometry import (
    DATA_OFFSET,
    GENERATION_BELIEVED_MAX,
    SLOT_BYTES,
    SLOTS_PER_DATABASE_MAX,
    Geometry,
)
from .index import CLOSED, Index, Meta, doubt, is_doubted, trust
from .index_file import DamagedIndexError
from .layout import Superblock
from .private_files import check_no_link, open_private
from .recovery import Loaded, fill, load, rebuild
from .testing.points import reached

log = logging.getLogger(__name__)

CAPACITY_BYTES_DEFAULT_MAX = 64 << 30  # what a card takes unasked
FREE_SPACE_SHARE = 0.8  # of what is free; the rest is the index's and other people's
GENERATIONS_PER_CEILING = 1 << 20  # puts between two durable ceilings; numbers are not scarce, syncs are

_MAKING, _INDEX = "making", "index"
_MAKING_CHARS_MAX = 64  # a UUID in hex, with room
_ADVICE = (
    "remove the file making if there is a whole card, remove the other files if they are worthless, "
    "or give another folder"
)


@dataclass(slots=True)
class Opened:
    """An open card's parts. `lock_fd` holds the folder's lock until it is closed."""

    lock_fd: int
    card_uuid: bytes
    geometry: Geometry
    databases: list[Database]
    index: Index
    loaded: Loaded
    generation: int  # the last one that may have been given
    generation_ceiling: int
    boots: int
    rebuilt: bool
    departures: Departures


def open_folder(options: CardOptions, *, rebuild_index: bool = False) -> Opened:
    """Lock the folder, make the card if there is none, mend what can be mended, and open it. UserError."""
    assert not options.is_alone, "such a card has no folder"
    folder = options.folder
    reached("open.before_lock")
    lock_fd = _lock(options)
    reached("open.locked")
    with _letting_go(lock_fd, folder):
        if os.path.lexists(folder / _MAKING) or not card_is_there(folder):
            _make(options)
        return _open(options, lock_fd, rebuild_index=rebuild_index)


@contextmanager
def lock_card(options: CardOptions) -> Iterator[None]:
    """Hold the folder's lock for the block; UserError where there is no whole card in it."""
    folder = options.folder
    lock_fd = _lock(replace(options, create=False))
    with _letting_go(lock_fd, folder):
        if os.path.lexists(folder / _MAKING) or not card_is_there(folder):
            raise UserError(f"there is no card in {folder}: give another folder")
        yield
    os.close(lock_fd)


def _lock(options: CardOptions) -> int:
    """The folder's lock. Where no card is and none shall be made, nothing of ours is left behind."""
    leaves = options.create or card_is_there(options.folder)
    return lock_folder(options.folder, create=options.create, leave_file=leaves)


@contextmanager
def _letting_go(lock_fd: int, folder: Path) -> Iterator[None]:
    """Where the block fails, the lock is given up, and the user hears why in one line."""
    try:
        yield
    except MediumError as error:
        os.close(lock_fd)
        raise UserError(f"cannot open the card in {folder}: {error}") from error
    except BusyDatabaseError as error:
        os.close(lock_fd)
        raise CardInUseError(str(error)) from error
    except BrokenPipeError:  # no card's: of whoever reads what is said of it
        os.close(lock_fd)
        raise
    except OSError as error:
        os.close(lock_fd)
        raise UserError(f"cannot open the card in {folder}: {error}; look at what is in that folder") from error
    except BaseException:
        os.close(lock_fd)
        raise


# --- making -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Making:
    """What has been made so far, to be taken away again if the rest fails."""

    paths: list[Path] = field(default_factory=list)

    def undo(self, folder: Path) -> None:
        for path in self.paths:
            with suppress(OSError):
                path.unlink()
        shutil.rmtree(folder / _INDEX, ignore_errors=True)
        if any(os.path.lexists(path) for path in (*self.paths, folder / _INDEX)):
            return  # not everything could go: the next start takes away what is of an unfinished card
        with suppress(OSError):
            (folder / _MAKING).unlink()


def card_is_there(folder: Path) -> bool:
    """Whether the folder has what a card is made of, be it whole or not."""
    return os.path.lexists(_database_path(folder, 0)) or os.path.exists(folder / _INDEX)  # noqa: PTH110  never raises


def _database_path(folder: Path, number: int) -> Path:
    return folder / f"db-{number}.xkv"


def _make(options: CardOptions) -> None:
    folder = options.folder
    if not options.create:
        raise UserError(f"there is no card in {folder}: give another folder")
    geometry = Geometry(options.slot_bytes or SLOT_BYTES)
    paths = _paths(options)
    _check_distinct(paths)
    interrupted = _interrupted_making(folder)
    leftovers = _leftovers(folder, interrupted)
    card_uuid = interrupted or _mark_making(folder)
    for leftover in leftovers:
        leftover.unlink()  # a file of ours, or a link to somebody's device
    _take_away(folder / _INDEX)
    made = _Making()
    try:
        slots = _plan_slots(options, paths, geometry)
        options.quotas.check(slots=sum(slots), slot_bytes=geometry.slot_bytes, databases=len(paths))
        log.info("making a card of %d slots of %d bytes in %s", sum(slots), geometry.slot_bytes, folder)
        for number, (path, count) in enumerate(zip(paths, slots, strict=True)):
            superblock = new_superblock(
                number=number,
                databases=len(paths),
                slot_bytes=geometry.slot_bytes,
                slots=count,
                card_uuid=card_uuid,
                database_uuid=uuid.uuid4().bytes,
            )
            existed = path.exists()
            MEDIA.database.make(path, superblock)
            if not existed:
                made.paths.append(path)
            _link(folder, number, path, made)
        meta = Meta(card_uuid, geometry.slot_bytes, len(paths), 0, 0)
        MEDIA.index.create(folder / _INDEX, meta, slots=sum(slots)).close()
        _sync_folder(folder)
    except BaseException:
        made.undo(folder)
        raise
    (folder / _MAKING).unlink()
    _sync_folder(folder)


def _interrupted_making(folder: Path) -> bytes | None:
    """The uuid of a making that did not end; None without one, or where its first write was torn."""
    try:
        with open(open_private(folder / _MAKING, os.O_RDONLY), encoding="ascii") as file:  # noqa: PTH123  a descriptor
            found = bytes.fromhex(file.read(_MAKING_CHARS_MAX))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise UserError(f"cannot make a card in {folder}: {error.strerror}") from error
    return found if len(found) == 16 else None


def _leftovers(folder: Path, interrupted: bytes | None) -> list[Path]:
    """The databases that the interrupted making has left in the folder; UserError if there is anything else."""
    found = [path for path in folder.iterdir() if re.fullmatch(r"db-[0-9]+\.xkv", path.name)]
    for path in found:
        if not path.is_symlink() and path.is_file() and path.stat().st_size == 0:
            continue
        try:
            is_ours = read_superblock(path).card_uuid == interrupted
        except UserError:
            is_ours = False
        if not is_ours:
            raise UserError(f"{path} is not of the card being made in {folder}: {_ADVICE}")
    if interrupted is None and os.path.lexists(folder / _INDEX):
        raise UserError(f"{folder / _INDEX} is not of the card being made in {folder}: {_ADVICE}")
    return found


def _check_distinct(paths: Sequence[Path]) -> None:
    """UserError where two paths lead to the same file or device."""
    seen: dict[object, Path] = {}
    for path in paths:
        name: object = os.path.realpath(path)  # of a loop of links, too: opening it says what is wrong
        if path.exists():
            status = path.stat()
            name = status.st_rdev or (status.st_dev, status.st_ino)
        if name in seen:
            raise UserError(f"{path} and {seen[name]} are the same database: give each one once")
        seen[name] = path


def _take_away(path: Path) -> None:
    """Remove a folder of ours, or whatever has its name."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _mark_making(folder: Path) -> bytes:
    """The uuid of the card that is being made from now on."""
    marker = folder / _MAKING
    card_uuid = uuid.uuid4().bytes
    try:
        fd = open_private(marker, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            os.write(fd, card_uuid.hex().encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        _sync_folder(folder)
    except OSError as error:
        raise UserError(f"cannot make a card in {folder}: {error.strerror}") from error
    return card_uuid


def _paths(options: CardOptions) -> list[Path]:
    if isinstance(options.databases, tuple):
        return [path.absolute() for path in options.databases]
    return [_database_path(options.folder, number) for number in range(options.databases or 1)]


def _link(folder: Path, number: int, path: Path, made: _Making) -> None:
    """Let the folder lead to a database elsewhere, so that the card can be opened by its folder alone."""
    link = _database_path(folder, number)
    if link.is_symlink():
        if link.readlink() == path:
            return
    elif link.absolute() == path or (link.exists() and path.exists() and link.samefile(path)):
        return
    if link.is_symlink():
        link.unlink()
    try:
        link.symlink_to(path)
    except OSError as error:
        raise UserError(f"cannot link {link} to {path}: {error.strerror}") from error
    made.paths.append(link)


def _plan_slots(options: CardOptions, paths: Sequence[Path], geometry: Geometry) -> list[int]:
    """Slots of each database, from the capacity asked for, the devices' sizes, and what is free."""
    sizes = [device_bytes(path) for path in paths]
    files = [path for path, size in zip(paths, sizes, strict=True) if size is None]
    if options.capacity_bytes is not None:
        share = options.capacity_bytes // len(paths)
    elif files:
        free = min(_free_bytes(path.parent) for path in files)
        share = min(CAPACITY_BYTES_DEFAULT_MAX, int(free * FREE_SPACE_SHARE)) // len(files)
    else:
        share = max(size for size in sizes if size is not None)
    slots = []
    for path, size in zip(paths, sizes, strict=True):
        given = share if size is None else min(share, size)
        if size is not None and options.capacity_bytes is None:
            given = size
        count = min((given - DATA_OFFSET) // geometry.slot_bytes, SLOTS_PER_DATABASE_MAX)
        if count < 1:
            least = len(paths) * (DATA_OFFSET + geometry.slot_bytes)
            raise UserError(f"{given} bytes are too few for the database {path}: give {least} bytes or more in all")
        slots.append(count)
    return slots


def _free_bytes(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise UserError(f"cannot use {folder} for a database: {error.strerror}") from error
    return status.f_bavail * status.f_frsize


# --- opening ------------------------------------------------------------------------------------------------


def _open(options: CardOptions, lock_fd: int, *, rebuild_index: bool) -> Opened:
    folder = options.folder
    databases = open_databases(options)
    one = databases[0].superblock
    geometry = Geometry(one.slot_bytes)
    slots_total = sum(database.superblock.slots for database in databases)
    try:
        options.quotas.check(slots=slots_total, slot_bytes=one.slot_bytes, databases=len(databases))
        index, loaded, meta, rebuilt = _open_index(folder, databases, geometry, rebuild_index=rebuild_index)
    except BaseException:
        for database in databases:
            database.close()
        raise
    log.info("card %s: %d objects in %d slots", one.card_uuid.hex(), len(loaded.tags), slots_total)
    if rebuilt:  # lives are counted anew
        with suppress(OSError):
            (folder / DEPARTURES).unlink()
    is_new = not rebuilt and meta.generation_ceiling == GENERATIONS_PER_CEILING
    departures = Departures.load(folder, card_uuid=one.card_uuid, boots=meta.boots, slots=slots_total, is_new=is_new)
    return Opened(
        lock_fd,
        one.card_uuid,
        geometry,
        databases,
        index,
        loaded,
        meta.generation_ceiling - GENERATIONS_PER_CEILING,
        meta.generation_ceiling,
        meta.boots,
        rebuilt,
        departures,
    )


def open_databases(options: CardOptions) -> list[Database]:
    """All databases of the card in their order, after their superblocks were found to agree. UserError."""
    databases: list[Database] = []
    try:
        for number in range(_superblocks(options)[0].databases):
            databases.append(MEDIA.database.open(_database_path(options.folder, number)))  # noqa: PERF401 -- see below
    except BaseException:
        for database in databases:
            database.close()
        raise
    return databases


def _superblocks(options: CardOptions) -> list[Superblock]:
    """The superblocks of all databases, which must agree with each other and with what was asked for."""
    folder = options.folder
    if isinstance(options.databases, tuple):
        for number, path in enumerate(_paths(options)):
            _check_same(path, read_superblock(path), number, read_superblock(_paths(options)[0]))
        _relink(folder, _paths(options))
    one = read_superblock(_database_path(folder, 0))
    found = [one]
    for number in range(one.databases):
        path = _database_path(folder, number)
        superblock = read_superblock(path)
        _check_same(path, superblock, number, one)
        found[number:] = [superblock]
    advice = "leave that option out, or give another folder for a new card"
    wanted = len(options.databases) if isinstance(options.databases, tuple) else options.databases
    if wanted not in {None, one.databases}:
        raise UserError(f"the card in {folder} has {one.databases} databases, not {wanted}: {advice}")
    if options.slot_bytes not in {None, one.slot_bytes}:
        raise UserError(f"the card in {folder} has slots of {one.slot_bytes} bytes, not {options.slot_bytes}: {advice}")
    if options.capacity_bytes is not None:
        paths = [_database_path(folder, number).resolve() for number in range(one.databases)]
        slots = [superblock.slots for superblock in found]
        if _plan_slots(options, paths, Geometry(one.slot_bytes)) != slots:
            held = sum(DATA_OFFSET + count * one.slot_bytes for count in slots)
            raise UserError(
                f"the card in {folder} has a capacity of {held} bytes, not {options.capacity_bytes}: {advice}"
            )
    return found


def _check_same(path: Path, superblock: Superblock, number: int, one: Superblock) -> None:
    if superblock.card_uuid != one.card_uuid:
        raise UserError(f"the database {path} belongs to another card: put the right one in its place")
    same = (superblock.number, superblock.databases, superblock.slot_bytes)
    if same != (number, one.databases, one.slot_bytes):
        raise UserError(f"{path} is database {superblock.number} of its card, not {number}: give them in order")


def _relink(folder: Path, paths: Sequence[Path]) -> None:
    for number, path in enumerate(paths):
        link = _database_path(folder, number)
        if link.exists() and not link.is_symlink() and not link.samefile(path):
            raise UserError(f"the card in {folder} has its database {number} in the folder, not at {path}")
        _link(folder, number, path, _Making())


def _open_index(
    folder: Path, databases: Sequence[Database], geometry: Geometry, *, rebuild_index: bool
) -> tuple[Index, Loaded, Meta, bool]:
    """The index, read, checked and taken; made anew from the slots where it is missing or damaged."""
    check_no_link(folder / _INDEX)
    if not rebuild_index:
        try:
            return *_load_index(folder, databases, geometry), False
        except (DamagedIndexError, MediumError) as error:
            if not _is_damage(error):
                raise
            log.warning("the index in %s is damaged (%s): making it anew from the slots", folder, error)
    _rebuild_index(folder, databases, geometry)
    return *_load_index(folder, databases, geometry), True


def _load_index(folder: Path, databases: Sequence[Database], geometry: Geometry) -> tuple[Index, Loaded, Meta]:
    """Read the index and take it; doubted meanwhile, as some damage ends this process and only the next can tell."""
    if is_doubted(folder / _INDEX):
        raise DamagedIndexError("whoever used it last died of it, or found it damaged")
    doubt(folder / _INDEX)
    try:
        taken = _take_index(folder, databases, geometry)
    except BaseException as error:
        if not _is_damage(error):
            trust(folder / _INDEX)
        raise
    trust(folder / _INDEX)
    return taken


def _is_damage(error: BaseException) -> bool:
    if isinstance(error, MediumError):
        return error.errno not in LACKING  # where something is, an index anew would meet the same
    return isinstance(error, DamagedIndexError)


def _take_index(folder: Path, databases: Sequence[Database], geometry: Geometry) -> tuple[Index, Loaded, Meta]:
    slots = [database.superblock.slots for database in databases]
    index = MEDIA.index.open(folder / _INDEX, slots=sum(slots))
    try:
        meta = index.meta()
        check_meta(meta, folder, databases, geometry)
        loaded = load(index, slots, geometry)
        generation = max(meta.generation_ceiling, int(loaded.generations.max(initial=0)))
        meta = replace(
            meta,
            generation_ceiling=generation + GENERATIONS_PER_CEILING,
            boots=meta.boots + 1,
            open_in=kernel_boot_id(),
        )
        index.set_meta(meta)
        reached("open.taken")
    except BaseException:
        index.close()
        raise
    return index, loaded, meta


def check_meta(meta: Meta, folder: Path, databases: Sequence[Database], geometry: Geometry) -> None:
    """DamagedIndexError for an index of another geometry or of before a power loss; UserError for another card's."""
    if meta.card_uuid != databases[0].superblock.card_uuid:
        raise UserError(
            f"the index in {folder} belongs to another card than its databases: put the right ones "
            f"together, or have it made anew from the slots with `xkv verify {folder} --rebuild`"
        )
    if (meta.slot_bytes, meta.databases) != (geometry.slot_bytes, len(databases)):
        raise DamagedIndexError("it tells of another geometry")
    if meta.generation_ceiling > GENERATION_BELIEVED_MAX:
        raise DamagedIndexError("it tells of more generations than can have been given")
    if meta.open_in not in (CLOSED, kernel_boot_id()):
        raise DamagedIndexError("the machine ended while it was open")


def kernel_boot_id() -> bytes:
    """16 bytes that are the kernel's for as long as the machine runs (proc(5), random/boot_id)."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def _rebuild_index(folder: Path, databases: Sequence[Database], geometry: Geometry) -> None:
    """Make `index/` anew. Until it is complete it has another name, so that a crash only repeats this."""
    slots = sum(database.superblock.slots for database in databases)
    card_uuid = databases[0].superblock.card_uuid
    rebuilt = rebuild(databases, card_uuid, geometry)
    fresh, aside = folder / "index.new", folder / "index.damaged"
    _take_away(fresh)
    meta = Meta(card_uuid, geometry.slot_bytes, len(databases), rebuilt.highest_generation, 0)
    index = MEDIA.index.create(fresh, meta, slots=slots)
    try:
        fill(index, rebuilt)
    finally:
        index.close()
    if os.path.lexists(folder / _INDEX):
        _take_away(aside)
        (folder / _INDEX).rename(aside)
    fresh.rename(folder / _INDEX)
    _sync_folder(folder)
    log.info("the index was made anew: %d objects from %d slots", len(rebuilt.objects), rebuilt.slots_scanned)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
