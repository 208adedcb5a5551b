"""Opening files in a card's folder: ours alone, and not what a link leads to.

Owns what is refused, and the wording. Must not know what the files are for.

Databases alone may be links, which are made by us where a card has its databases elsewhere (docs/security.md).
"""

import errno
import os
import stat
from pathlib import Path

from .errors import UserError

FILE_MODE = 0o600
_OTHERS_WRITE = 0o022


def open_private(path: Path, flags: int) -> int:
    """A descriptor; a file that is made is 0600. UserError for a link, OSError as open(2) has it."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_a_link(path) from error
        raise


def check_no_link(path: Path) -> None:
    """UserError for a link, for what another library opens by its name."""
    if path.is_symlink():
        raise _is_a_link(path)


def check_folder(folder: Path) -> None:
    """UserError where others than the owner may put files into the folder. OSError."""
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    mode = stat.S_IMODE(status.st_mode)
    if mode & _OTHERS_WRITE:
        # What everybody may write on purpose, as /tmp, is not to be taken from them.
        remedy = "give a folder of its own" if mode & stat.S_ISVTX else f"type: chmod go-w {folder}"
        raise UserError(f"the folder {folder} can be written by others (mode {mode:04o}); {remedy}")


def database_path(path: Path) -> Path:
    """Where a database's name leads, to be opened without following; UserError for a link of another user's."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return path
    if not stat.S_ISLNK(status.st_mode):
        return path
    if status.st_uid not in (os.geteuid(), 0):
        raise UserError(f"{path} is a link that uid {status.st_uid} has made: remove it, or have it made by this user")
    if not path.exists():
        raise UserError(f"{path} is a link that leads nowhere: bring back what was at {path.readlink()}, or remove it")
    return path.resolve()


def _is_a_link(path: Path) -> UserError:
    return UserError(f"{path} is a link, and xkv follows none there: put what it leads to in its place, or remove it")
