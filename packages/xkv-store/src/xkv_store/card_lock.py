"""The lock of a card's folder, which the kernel drops with the process that holds it.

Owns: the file `lock` and who is named in it. Must not know: what else is in the folder.
"""

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from .errors import UserError
from .private_files import check_folder, open_private

LOCK_NAME = "lock"


class CardInUseError(UserError):
    """Another process has the card's lock."""


def lock_folder(folder: Path, *, create: bool, leave_file: bool = True) -> int:
    """The folder's lock, which the kernel drops with this process, however that ends.

    `create`: make the folder; `leave_file`: make the lock's file in it. UserError where what is needed is not there.
    """
    try:
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(folder)
        lock_fd = open_private(folder / LOCK_NAME, os.O_RDWR | (os.O_CREAT if leave_file else 0))
    except FileNotFoundError as error:
        raise UserError(f"there is no card in {folder}: give another folder") from error
    except OSError as error:
        raise UserError(
            f"cannot use {folder} for a card: {error.strerror}; give a folder that this user can write"
        ) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock_fd, 256, 0).decode("utf-8", "replace").strip()
        os.close(lock_fd)
        raise CardInUseError(
            f"the card in {folder} is in use by {holder or 'another process'}: stop that gateway, or give "
            "another folder"
        ) from error
    except OSError as error:
        os.close(lock_fd)
        raise UserError(f"cannot lock {folder}: {error.strerror}; give a folder on a local disk") from error
    holder_text = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
    with suppress(OSError):  # the text only helps whoever meets the lock
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, holder_text, 0)
    return lock_fd
