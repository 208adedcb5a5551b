"""The remote behind a gateway's card: where other machines' objects come from, and the card's go to (ADR 0017).

Owns: the remote's parts, questions for existence, what is said of it. Must not know: sockets of engines, sessions'
rules, the library. All of it runs on the event loop's thread, save what `remote_work` has done on its own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from .remote_fetches import RemoteFetches
from .remote_format import remote_key
from .remote_link import Process, check_library
from .remote_memory import RemoteMemory
from .remote_nearby import Nearby
from .remote_stores import RemoteStores
from .remote_words import CALL_OBJECTS_MAX, Lane
from .remote_work import RemoteWork
from .sparse_log import SparseLog
from .wire_remote import SoughtObject, SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .card import Card, PutPlan
    from .key import ObjectKey
    from .remote_address import RemoteAddress
    from .session_actions import StartSeek

log = logging.getLogger(__name__)

ASKS_MAX: Final = 32_768  # objects whose existence is being asked for; for more there is no answer


class Answers(Protocol):
    """Where answers go: the connection, which sends them at the end of the loop's round."""

    def sought(self, seek: int, answer: SoughtObject) -> None:
        """Send this with others of the same seek."""


class Remote:
    """Of one gateway. `step` it each round; `files` tell when there is something to do."""

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
        self._asks: list[tuple[str, Answers, int, int]] = []
        self._asked = 0
        self._counters: Counter[str] = Counter()
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
                self._ask(answers, start.seek, index, key)

    def _ask(self, answers: Answers, seek: int, index: int, key: ObjectKey) -> None:
        if not self._link.is_up or self._draining or self._asked + len(self._asks) >= ASKS_MAX:
            self._counters["remote_asked_failed"] += 1
            answers.sought(seek, SoughtObject(index, SoughtStatus.FAILED))
        else:
            self._asks.append((remote_key(key.encode(), self._card.geometry), answers, seek, index))

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

    def step(self, now_ns: int) -> None:
        """Take in what has come, go on with what can go on."""
        for process in (self._link, self._holder):
            if process is not None:
                process.poll(now_ns)
        self._work.poll()
        if self._draining:
            return
        self._send_asks()
        self._fetches.step(now_ns)
        self._stores.step(now_ns)

    def _send_asks(self) -> None:
        while self._asks and (self._link.has_room(Lane.LOOK) or not self._link.is_up):
            taken, self._asks = self._asks[:CALL_OBJECTS_MAX], self._asks[CALL_OBJECTS_MAX:]
            self._asked += len(taken)
            told = partial(self._told, taken)
            if self._link.is_up:
                self._link.call(Lane.LOOK, [key for key, *_ in taken], told)
            else:
                told(None)

    def _told(self, taken: Sequence[tuple[str, Answers, int, int]], codes: Sequence[int] | None) -> None:
        self._asked -= len(taken)
        for (_, answers, seek, index), code in zip(taken, codes or [-1] * len(taken), strict=True):
            status = SoughtStatus.FOUND if code > 0 else SoughtStatus.FAILED if code < 0 else SoughtStatus.ABSENT
            self._counters[f"remote_asked_{status.name.lower()}"] += 1
            answers.sought(seek, SoughtObject(index, status))

    def counters(self) -> dict[str, int]:
        """What has happened so far."""
        own = {**self._counters, **self.nearby.counters}
        return {**own, **self._fetches.counters, **self._stores.counters, **self._link.counters}

    def status(self) -> dict[str, Any]:
        """For people and metrics."""
        holder = self._holder
        return {
            "master": self._address.master,
            "state": self._link.state.value,
            "reason": self._link.reason,
            "host": self._link.host,
            "protocol": self._address.protocol,
            "segment_bytes": self._address.segment_bytes,
            "segment_state": "none" if holder is None else holder.state.value,
            "segment_reason": "" if holder is None else holder.reason,
            "memory_bytes": self._address.memory_bytes,
            "memory_slots_free": self._memory.free,
            "fetching": len(self._fetches),
            "storing": len(self._stores),
        }

    def close(self) -> bool:
        """End its processes and threads; False where a thread hangs in an I/O call."""
        self._draining = True
        quiet = self._work.close()
        for process in (self._link, self._holder):
            if process is not None:
                process.close()
        self._memory.close()
        return quiet


def _answer(answers: Answers, seek: int, index: int, status: SoughtStatus) -> None:
    answers.sought(seek, SoughtObject(index, status))
