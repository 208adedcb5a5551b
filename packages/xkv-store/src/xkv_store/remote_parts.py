"""What every remote has, whether there is a card before it or not: its processes, its memory, its thread (ADR 0017).

Owns: making them, what to select on, their end, what is said of them. Must not know: cards, objects, the library. All
of it runs on the event loop's thread.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from .remote_link import Process, check_library
from .remote_memory import RemoteMemory
from .remote_work import RemoteWork
from .sparse_log import SparseLog

if TYPE_CHECKING:
    from .geometry import Geometry
    from .remote_address import RemoteAddress

log = logging.getLogger(__name__)


class RemoteParts:
    """Of one gateway. `note(what, why)` logs, not too often."""

    def __init__(self, address: RemoteAddress, geometry: Geometry) -> None:
        """UserError where the library is not there. It does not wait for the master."""
        check_library()
        self._address = address
        self.memory = RemoteMemory(address.memory_bytes, geometry)
        self.work = RemoteWork()
        self.link = Process(address, self.memory)
        self._holder = Process(address, None) if address.segment_bytes else None
        self.note = partial(SparseLog(log).warning, "%s: %s")

    @property
    def _processes(self) -> tuple[Process, ...]:
        return (self.link,) if self._holder is None else (self.link, self._holder)

    @property
    def files(self) -> tuple[Process | RemoteWork, ...]:
        """What to select on."""
        return (*self._processes, self.work)

    def poll(self, now_ns: int) -> None:
        """Take in what has come."""
        for process in self._processes:
            process.poll(now_ns)
        self.work.poll()

    def status(self) -> dict[str, Any]:
        """For people and metrics."""
        holder = self._holder
        return {
            "master": self._address.master,
            "state": self.link.state.value,
            "reason": self.link.reason,
            "host": self.link.host,
            "protocol": self._address.protocol,
            "segment_bytes": self._address.segment_bytes,
            "segment_state": "none" if holder is None else holder.state.value,
            "segment_reason": "" if holder is None else holder.reason,
            "memory_bytes": self._address.memory_bytes,
            "memory_slots_free": self.memory.free,
        }

    def close(self) -> bool:
        """End processes and threads; False where a thread hangs in an I/O call."""
        quiet = self.work.close()
        for process in self._processes:
            process.close()
        self.memory.close()
        return quiet
