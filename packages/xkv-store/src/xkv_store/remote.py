"""The remote behind a gateway's card: where other machines' objects come from, and the card's go to (ADR 0017).

Owns: the remote's parts, what is said of it. Must not know: sockets of engines, sessions'
rules, the library. All of it runs on the event loop's thread, save what `remote_work` has done on its own.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from .remote_asks import Answers, RemoteAsks
from .remote_fetches import RemoteFetches
from .remote_link import Process, check_library
from .remote_memory import RemoteMemory
from .remote_nearby import Nearby
from .remote_stores import RemoteStores
from .remote_work import RemoteWork
from .sparse_log import SparseLog
from .wire_remote import SoughtObject, SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .card import Card, PutPlan
    from .remote_address import RemoteAddress
    from .session_actions import StartSeek

log = logging.getLogger(__name__)


class Remote:
    """Of one gateway. `step` it each round; `files` tell when there is something to do."""

    alone = None  # it is not: there is a card before it

    def __init__(self, card: Card, address: RemoteAddress) -> None:
        """UserError where the library is not there. It does not wait for the master."""
        check_library()
        self._card = card
        self._address = address
        self._memory = RemoteMemory(address.memory_bytes, card.geometry)
        self._work = RemoteWork()
        self._link = Process(address, self._memory)
        self._holder = Process(address, None) if address.segment_bytes else None
        self.nearby = Nearby(card, self._memory, lambda: self._link.is_up and not self._draining)
        parts = (card, self._link, self._memory, self._work, partial(SparseLog(log).warning, "%s: %s"))
        self._fetches = RemoteFetches(*parts)
        self._stores = RemoteStores(*parts)
        self._asks = RemoteAsks(self._link, card.geometry)
        self._draining = False

    @property
    def files(self) -> tuple[Process | RemoteWork, ...]:
        """What to select on."""
        processes = (self._link,) if self._holder is None else (self._link, self._holder)
        return (*processes, self._work)

    @property
    def in_flight(self) -> int:
        """What the card's end has to wait for."""
        return len(self._work) + self._fetches.writing

    def seek(self, answers: Answers, start: StartSeek, now_ns: int) -> None:
        """A scheduler asks for these; each is answered once."""
        family = time.time_ns() // 1000  # one for all of a request, as an engine's are: its beginning leaves last
        for index, (key, fragments) in enumerate(start.objects):
            if start.fetch and not self._draining:
                self._fetches.add(key, fragments, family, partial(_answer, answers, start.seek, index), now_ns)
            else:
                self._asks.add(answers, start.seek, index, key)

    def confirmed(self, plans: Sequence[PutPlan]) -> None:
        """The card has confirmed these puts."""
        for plan in plans:
            if not self._fetches.settle(plan, is_confirmed=True):
                place = self.nearby.take_written(plan)
                if not self._draining:
                    self._stores.add(plan, place)

    def commit_failed(self, plans: Sequence[PutPlan]) -> None:
        """The card has not, and never will."""
        for plan in plans:
            place = self.nearby.take_written(plan)
            if not self._fetches.settle(plan, is_confirmed=False) and place is not None:
                self._memory.give(place)

    def drain(self) -> None:
        """Begin nothing more."""
        self._draining = True
        self._asks.drain()

    def step(self, now_ns: int) -> None:
        """Take in what has come, go on with what can go on."""
        for process in (self._link, self._holder):
            if process is not None:
                process.poll(now_ns)
        self._work.poll()
        if self._draining:
            return
        self._asks.step()
        self._fetches.step(now_ns)
        self._stores.step(now_ns)

    def counters(self) -> dict[str, int]:
        """What has happened so far."""
        own = {**self._asks.counters, **self.nearby.counters}
        return {**own, **self._fetches.counters, **self._stores.counters, **self._link.counters}

    def status(self) -> dict[str, Any]:
        """For people and metrics."""
        said = status_of(self._address, self._link, self._holder, self._memory)
        return said | {"fetching": len(self._fetches), "storing": len(self._stores)}

    def close(self) -> bool:
        """End its processes and threads; False where a thread hangs in an I/O call."""
        self._draining = True
        quiet = self._work.close()
        for process in (self._link, self._holder):
            if process is not None:
                process.close()
        self._memory.close()
        return quiet


def status_of(address: RemoteAddress, link: Process, holder: Process | None, memory: RemoteMemory) -> dict[str, Any]:
    """What there is to say of these parts of a remote."""
    return {
        "master": address.master,
        "state": link.state.value,
        "reason": link.reason,
        "host": link.host,
        "protocol": address.protocol,
        "segment_bytes": address.segment_bytes,
        "segment_state": "none" if holder is None else holder.state.value,
        "segment_reason": "" if holder is None else holder.reason,
        "memory_bytes": address.memory_bytes,
        "memory_slots_free": memory.free,
    }


def _answer(answers: Answers, seek: int, index: int, status: SoughtStatus) -> None:
    answers.sought(seek, SoughtObject(index, status))
