"""A file that is memory (on a tmpfs) gets all of its memory, in huge pages, while the gateway serves from it already.

Owns: the thread that does it, at the lowest priority, and its end. Must not know: what the file is for.

A file that was allocated has a right to its pages, not the pages: each is made at its first touch, which a put would
wait for. Where a hypervisor gives a guest its memory as late as that, too, it is ten times a copy (docs/adr/0019).
Small pages are charged to the control group that allocated the file, a huge page to the one that asks for it: so those
are asked for only while this process's group has room; what has none then is touched where it is.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final

from .memory_limit import groups_have_room

if TYPE_CHECKING:
    from .huge_pages import Mapping

log = logging.getLogger(__name__)

NICE: Final = 19
PIECES_PER_LOOK: Final = 8  # 16 MiB, in a millisecond at best, between two looks at the control group


class MemoryTaker:
    """Of one file, from `begin` on; `mapping`: all of it, or None for a file that is no memory."""

    def __init__(self, mapping: Mapping | None) -> None:
        self._mapping = mapping
        self._unwanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = 0
        self._is_taken = False

    @property
    def word(self) -> str | None:
        """`taking`, `taken`, `partly` where the kernel gives no more, or None where there is nothing to take."""
        if self._thread is None:
            return None
        if self._thread.is_alive():
            return "taking"
        return "taken" if self._is_taken else "partly"

    def begin(self) -> None:
        """On a thread of its own; what is there already costs next to nothing. Raises nothing."""
        if self._mapping is not None:
            self._thread = threading.Thread(target=self._work, args=(self._mapping,), name="xkv-memory", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: the pages come as they are touched
                self._thread = None

    def close(self) -> None:
        """End it, after its present piece."""
        self._unwanted.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self, mapping: Mapping) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # on Linux, of this thread alone
        if not self._must_stop():
            mapping.use_huge_pages([range(len(mapping.memory))], seconds_max=inf, unwanted=self._must_stop)
        self._is_taken = mapping.touch(unwanted=self._unwanted.is_set)

    def _must_stop(self) -> bool:
        """Asked for each piece: whether no other shall be in a huge page."""
        is_full = self._asked % PIECES_PER_LOOK == 0 and not groups_have_room()
        self._asked += 1
        return is_full or self._unwanted.is_set()
