"""Shared memory in huge pages: for direct I/O and for GPUs, what counts is in how few pieces a slot lies.

Owns: mapping a memory file where huge pages can be mapped, asking the kernel for them, and when to stop asking.
Must not know: rings, slots, what the memory is for. Why, and what it gives: docs/adr/0019. Source: madvise(2),
MADV_COLLAPSE (Linux 6.1) and MADV_POPULATE_READ (5.14).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import time
import weakref
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20
SECONDS_MAX: Final = 5.0  # 1 GiB takes 0.06 s, and 2.5 s where the kernel has to move other pages out of the way first
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value
_POPULATE_READ: Final = 22
_COLLAPSE: Final = 25
_TOUCHED_BYTES: Final = 4_096
_TMPFS: Final = 0x01021994  # linux/magic.h; the first word of a struct statfs (statfs(2))…
_STATFS_WORDS: Final = 32  # …which has 15


class Mapping:
    """A memory file, mapped for reading and writing from a multiple of a huge page on.

    Python's own `mmap` leaves the address to the kernel, which is no such multiple. `memory` is the mapping, at
    `address`; it lives as long as any view of it does. OSError where the kernel refuses.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.address = _map(fd, size_bytes)
        owner = (ctypes.c_ubyte * size_bytes).from_address(self.address)
        weakref.finalize(owner, _libc().munmap, self.address, size_bytes).atexit = False
        self.memory = memoryview(owner).cast("B")

    def use_huge_pages(
        self,
        parts: Iterable[range],
        *,
        seconds_max: float = SECONDS_MAX,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> int:
        """Let these bytes lie in huge pages, as far as the kernel can; how many do then.

        What is there stays as it is, and others may use it meanwhile. The memory is taken now, if it was not. A huge
        page at the edge of a part reaches beyond it. Where the kernel has none to give, or does not know how, or it
        takes longer than `seconds_max`, or is `unwanted` meanwhile, the rest stays in small pages. Raises nothing.
        """
        until_s = time.monotonic() + seconds_max
        pieces = _pieces(parts, len(self.memory) // HUGE_PAGE_BYTES)
        taken = 0
        for number in chain.from_iterable(pieces):
            problem = self._use_huge_page(number)
            taken += not problem
            if problem not in {0, errno.EAGAIN}:  # EAGAIN: somebody uses a page of that piece just now
                log.debug("no more huge pages: %s", os.strerror(problem))
                break
            if time.monotonic() > until_s or unwanted():
                break
        level = logging.INFO if taken else logging.DEBUG
        log.log(level, "%d of %d MiB lie in huge pages", _mib(taken), _mib(sum(map(len, pieces))))
        return taken * HUGE_PAGE_BYTES

    def touch(self, *, unwanted: Callable[[], bool]) -> bool:
        """Have each page made that is not there yet, whatever its size. Whether all are; not where the kernel has none
        to give (or is older than 5.14), or it is `unwanted` meanwhile. Raises nothing.
        """
        for begin in range(0, len(self.memory), HUGE_PAGE_BYTES):
            size_bytes = min(HUGE_PAGE_BYTES, len(self.memory) - begin)
            if unwanted():
                return False
            if _libc().madvise(self.address + begin, size_bytes, _POPULATE_READ):
                log.debug("no more pages: %s", os.strerror(ctypes.get_errno()))
                return False
        return True

    def _use_huge_page(self, number: int) -> int:
        """The errno of a refusal, or 0."""
        libc, start = _libc(), self.address + number * HUGE_PAGE_BYTES
        if libc.madvise(start, _TOUCHED_BYTES, _POPULATE_READ):  # a piece without any page would be refused
            return ctypes.get_errno()
        return ctypes.get_errno() if libc.madvise(start, HUGE_PAGE_BYTES, _COLLAPSE) else 0


def is_memory(fd: int) -> bool:
    """Whether a file lies on a tmpfs."""
    found = (ctypes.c_long * _STATFS_WORDS)()
    return not _libc().fstatfs(fd, ctypes.byref(found)) and found[0] == _TMPFS


def _mib(pieces: int) -> int:
    return pieces * HUGE_PAGE_BYTES >> 20


def _pieces(parts: Iterable[range], end: int) -> list[range]:
    """The numbers, each once and before `end`, of the pieces that parts lie in: a database has millions of them."""
    found: list[range] = []
    begin = 0
    for part in sorted(filter(None, parts), key=lambda part: part.start):
        first, begin = max(begin, part.start // HUGE_PAGE_BYTES), max(begin, -(-part.stop // HUGE_PAGE_BYTES))
        found.append(range(first, min(begin, end)))
    return found


def _map(fd: int, size_bytes: int) -> int:
    """Map it over a reservation that is larger by one huge page; what remains of that is given back."""
    libc, room_bytes = _libc(), size_bytes + HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = libc.mmap(None, room_bytes, _PROT_NONE, flags, -1, 0)
    if room == _FAILED:
        raise _error()
    start: int = -(-room // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if libc.mmap(start, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _FAILED:
        error = _error()
        libc.munmap(room, room_bytes)
        raise error
    end = start + -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for first, last in ((room, start), (end, room + room_bytes // mmap.PAGESIZE * mmap.PAGESIZE)):
        if first < last:
            libc.munmap(first, last - first)
    return start


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_int64), pointer
    libc.munmap.argtypes, libc.munmap.restype = (pointer, size), number
    libc.madvise.argtypes, libc.madvise.restype = (pointer, size, number), number
    libc.fstatfs.argtypes, libc.fstatfs.restype = (number, pointer), number
    return libc
