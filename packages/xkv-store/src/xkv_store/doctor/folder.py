"""The card's folder: who has it, what its names lead to, what is left on its file system, and O_DIRECT.

Owns: looking at a card from outside, opening nothing for writing, and what that means for whoever serves it.
Must not know: what is in a database or an index (but for whether a gateway of this release takes it), sockets, engines.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..database import aligned, read_superblock  # noqa: TID252  the package may have another name
from ..errors import UserError  # noqa: TID252
from ..geometry import IO_STEP_BYTES  # noqa: TID252
from ..sizes import format_size  # noqa: TID252
from .findings import fault, note, ok, warning

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .findings import Finding

    Move = Callable[[int, memoryview], int]

INDEX_SPARE_BYTES_MIN: Final = 64 << 20  # an index grows to some 150 bytes an object; a gateway's log beside it
OTHERS_WRITE: Final = 0o022
REFUSES_DIRECT: Final = (errno.EINVAL, errno.ENOTSUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFacts:
    """One name `db-N.xkv` of a card. `link_uid`: who made the link, where it is one; `target`: what is there.

    `refused`: why no gateway of this release takes what is there; None where one does.
    """

    path: Path
    link_uid: int | None
    target: os.stat_result | None
    writable: bool
    refused: UserError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A card's folder, or the place where it will be. `direct`: None where it could not be tried."""

    folder: Path
    status: os.stat_result | None
    is_link: bool
    writable: bool
    is_read_only: bool
    free_bytes: int
    databases: tuple[DatabaseFacts, ...]
    direct: bool | None

    @property
    def is_card(self) -> bool:
        """Whether a card was made here."""
        return bool(self.databases)


_SERVES: Final = "no gateway of this user can serve the card, and an engine that would start one does not start"


def gather_folder(folder: Path) -> FolderFacts:
    """Look at a card's folder; where it is not there, at the nearest one that is."""
    there = nearest(folder)
    system = os.statvfs(there)
    databases = tuple(_database(path) for path in sorted(folder.glob("db-*.xkv"))) if folder.is_dir() else ()
    return FolderFacts(
        folder=folder,
        status=folder.stat() if folder.exists() else None,
        is_link=folder.is_symlink(),
        writable=os.access(there, os.W_OK | os.X_OK),
        is_read_only=bool(system.f_flag & os.ST_RDONLY),
        free_bytes=system.f_bavail * system.f_frsize,
        databases=databases,
        direct=_reads_directly(databases[0].path) if databases else _writes_directly(there),
    )


def nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def examine_owner(facts: FolderFacts, *, uid: int) -> Finding:
    """Whether the folder is that user's (who serves the card) alone."""
    if facts.is_link and facts.status is None:
        what = f"{facts.folder} is a link that leads to nothing, and no folder is made in its place"
        return fault("card", what, _SERVES, f"make the folder {facts.folder.readlink()}, or: rm {facts.folder}")
    if facts.status is not None and not stat.S_ISDIR(facts.status.st_mode):
        what = f"{facts.folder} is no folder"
        return fault("card", what, _SERVES, "name another with --card or xkv.path, or move it away")
    return _examine_rights(facts, uid=uid)


def _examine_rights(facts: FolderFacts, *, uid: int) -> Finding:
    folder, status = facts.folder, facts.status
    if status is not None and status.st_uid != uid:
        what = f"the card's folder {folder} belongs to uid {status.st_uid}, and the gateway is uid {uid}'s"
        remedy = f"run gateway and engines as uid {status.st_uid}, or: chown -R {uid} {folder}"
        if facts.writable:
            return warning("card", what, "its owner can read and alter what this user's engines store", remedy)
        return fault("card", what, _SERVES, remedy)
    if status is not None and status.st_mode & OTHERS_WRITE:
        what = f"others may write to the card's folder {folder} (mode {stat.S_IMODE(status.st_mode):04o})"
        is_everybodys = status.st_mode & stat.S_ISVTX  # on purpose, as /tmp
        remedy = "name a folder of its own with --card or xkv.path" if is_everybodys else f"chmod go-w {folder}"
        return fault("card", what, "a gateway refuses it", remedy)
    if facts.is_read_only:
        mount = "mount it for writing (mount -o remount,rw), or name a folder elsewhere with --card or xkv.path"
        return fault("card", f"the file system of {folder} is read-only", "nothing can be stored", mount)
    if not facts.writable:
        where = "" if status is not None else ", where it would be made,"
        remedy = f"chmod u+rwx {nearest(folder)}, or name a folder of your own with --card or xkv.path"
        return fault("card", f"this user may not write to {nearest(folder)}{where}", _SERVES, remedy)
    what = "is this user's alone to write" if status is not None else "is not there yet, and can be made"
    link = f", by a link to {os.path.realpath(folder)}" if facts.is_link else ""
    return ok("card", f"{folder} {what}{link}")


def examine_databases(facts: FolderFacts, *, uid: int) -> list[Finding]:
    """Whether each database is there, is that user's, and of a format that this release knows."""
    found = []
    for one in facts.databases:
        if one.link_uid is not None and one.link_uid not in (uid, 0):
            what, remedy = f"{one.path} is a link that uid {one.link_uid} has made", f"rm {one.path}, and make it anew"
        elif one.target is None:
            what, remedy = f"{one.path} leads to nothing", f"bring back what was at {os.path.realpath(one.path)}"
        elif not one.writable:
            what = f"the database {os.path.realpath(one.path)} may not be written by this user"
            remedy = f"chown {uid} {os.path.realpath(one.path)}, or the device's group in SupplementaryGroups="
        elif one.refused is not None:
            what, _, remedy = str(one.refused).rpartition(": ")
        else:
            continue
        found.append(fault("database", what, "no gateway of this user can serve the card", remedy))
    return found


def examine_room(facts: FolderFacts, *, capacity_bytes: int | None, log_bytes: int = INDEX_SPARE_BYTES_MIN) -> Finding:
    """Whether the file system has room: for a new card as a whole, else for its index."""
    free = f"{format_size(facts.free_bytes)} are free on the file system of {facts.folder}"
    if facts.is_card:
        if facts.free_bytes < log_bytes:
            return fault(
                "room",
                free,
                "the index cannot grow: stores are refused; what is on the card can still be restored",
                f"make room of at least {format_size(log_bytes)} there (df {facts.folder})",
            )
        return ok("room", f"{free}: the index can grow")
    needed = (capacity_bytes or 0) + log_bytes
    if facts.free_bytes < needed:
        remedy = "make room, or give a smaller --capacity (xkv.capacity_bytes), or another folder"
        return fault("room", f"{free}, and the card takes {format_size(needed)}", "the card cannot be made", remedy)
    return ok("room", free)


def examine_direct(facts: FolderFacts, served: bool | None) -> Finding:
    """Whether I/O goes past the page cache. `served`: what the gateway says of its own; None where none answers."""
    direct = facts.direct if served is None else served
    if direct is None:
        return note("O_DIRECT", f"it could not be tried in {facts.folder}")
    if direct:
        return ok("O_DIRECT", "works on the card's medium: one copy, no page cache")
    return warning(
        "O_DIRECT",
        f"the file system of {facts.folder} refuses O_DIRECT",
        "every byte is copied once more, through the page cache, which takes memory from others; it works, slower",
        "name a folder on ext4 or XFS, or a block device (--database), of a local disk",
    )


# --- looking -----------------------------------------------------------------------------------------------------


def _database(path: Path) -> DatabaseFacts:
    own = path.lstat()
    refused = None
    try:
        read_superblock(path)
    except UserError as error:
        refused = error
    return DatabaseFacts(
        path=path,
        link_uid=own.st_uid if stat.S_ISLNK(own.st_mode) else None,
        target=path.stat() if path.exists() else None,
        writable=os.access(path, os.R_OK | os.W_OK),
        refused=refused,
    )


def _reads_directly(path: Path) -> bool | None:
    return _tried(path, os.O_RDONLY, lambda fd, step: os.preadv(fd, [step], 0))


def _writes_directly(folder: Path) -> bool | None:
    """In a file without a name, which goes when it is closed."""
    return _tried(folder, os.O_RDWR | os.O_TMPFILE, lambda fd, step: os.pwritev(fd, [step], 0))


def _tried(path: Path, flags: int, move: Move) -> bool | None:
    try:
        fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)  # a pipe would wait
        try:
            move(fd, aligned(IO_STEP_BYTES))
        finally:
            os.close(fd)
    except OSError as error:
        return False if error.errno in REFUSES_DIRECT else None
    return True
