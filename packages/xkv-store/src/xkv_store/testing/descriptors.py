"""File descriptors of every kind that a peer may send beside a message, right or wrong.

Owns: making them. Must not know: who takes them, or what is made of them.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
from typing import TYPE_CHECKING, Final

from ..ring import SEALS  # noqa: TID252  the package may have another name

if TYPE_CHECKING:
    from collections.abc import Callable

VAST_BYTES: Final = 1 << 46  # a file of holes that no machine's memory holds


def sealed(size_bytes: int, content: bytes = b"", *, seals: int = SEALS) -> int:
    """A memory file of this size that begins with `content`."""
    fd = os.memfd_create("xkv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    os.pwrite(fd, content[:size_bytes], 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _reopened(size_bytes: int, content: bytes, flags: int) -> int:
    fd = sealed(size_bytes, content)
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _one_of(pair: tuple[int, int], which: int) -> int:
    os.close(pair[1 - which])
    return pair[which]


def _socket() -> int:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.close()
    return one.detach()


def _epoll() -> int:
    with select.epoll() as poll:
        return os.dup(poll.fileno())


def _path(path: str, flags: int) -> Callable[[int, bytes], int]:
    return lambda _size, _content: os.open(path, flags | os.O_CLOEXEC)


KINDS: Final[dict[str, Callable[[int, bytes], int]]] = {
    "sealed": sealed,
    "unsealed": lambda size, content: sealed(size, content, seals=0),
    "may shrink": lambda size, content: sealed(size, content, seals=SEALS & ~fcntl.F_SEAL_SHRINK),
    "write-sealed": lambda size, content: sealed(size, content, seals=SEALS | fcntl.F_SEAL_WRITE),
    "too small": lambda size, content: sealed(max(0, size - 4_096), content),
    "empty": lambda _size, _content: sealed(0),
    "vast": lambda _size, content: sealed(VAST_BYTES, content),
    "read-only": lambda size, content: _reopened(size, content, os.O_RDONLY),
    "write-only": lambda size, content: _reopened(size, content, os.O_WRONLY),
    "path": lambda size, content: _reopened(size, content, os.O_PATH),
    "pipe, reading": lambda _size, _content: _one_of(os.pipe2(os.O_CLOEXEC), 0),
    "pipe, writing": lambda _size, _content: _one_of(os.pipe2(os.O_CLOEXEC), 1),
    "socket": lambda _size, _content: _socket(),
    "directory": _path("/", os.O_RDONLY | os.O_DIRECTORY),
    "null": _path("/dev/null", os.O_RDWR),
    "zero": _path("/dev/zero", os.O_RDWR),
    "file": _path("/proc/self/exe", os.O_RDONLY),
    "eventfd": lambda _size, _content: os.eventfd(0, os.EFD_CLOEXEC),
    "epoll": lambda _size, _content: _epoll(),
}
"""By name: (size in bytes, content) to a descriptor, which is the caller's to close."""
