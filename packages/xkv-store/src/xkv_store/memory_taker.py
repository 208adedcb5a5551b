"""A file that is memory (on a tmpfs) gets all of its memory, in huge pages, while the gateway serves from it already.

Owns: the thread that does it, at the lowest priority, and its end. Must not know: what the file is for.

A file that was allocated has a right to its pages, not the pages: each is made at its first touch, which a put would
wait for. Where a hypervisor gives a guest its memory as late as that, too, it is ten times a copy (docs/adr/0019).
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .huge_pages import Mapping

log = logging.getLogger(__name__)

NICE: Final = 19


class MemoryTaker:
    """Of one file, from `begin` on; `mapping`: all of it, or None for a file that is no memory."""

    def __init__(self, mapping: Mapping | None) -> None:
        self._mapping = mapping
        self._unwanted = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def word(self) -> str | None:
        """`taking`, `taken`, or None where there is nothing to take."""
        if self._thread is None:
            return None
        return "taking" if self._thread.is_alive() else "taken"

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
        mapping.use_huge_pages([range(len(mapping.memory))], seconds_max=inf, unwanted=self._unwanted.is_set)
