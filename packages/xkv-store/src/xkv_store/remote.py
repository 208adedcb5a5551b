"""The remote behind a gateway's card: where other machines' objects come from, and the card's go to (ADR 0017).

Owns: the remote's parts, what is said of it. Must not know: sockets of engines, sessions'
rules, the library. All of it runs on the event loop's thread, save what `remote_work` has done on its own.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from .remote_asks import Answers, RemoteAsks
from .remote_fetches import RemoteFetches
from .remote_nearby import Nearby
from .remote_parts import RemoteParts
from .remote_stores import RemoteStores
from .wire_remote import SoughtObject, SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .card import Card, PutPlan
    from .remote_address import RemoteAddress
    from .remote_link import Process
    from .remote_work import RemoteWork
    from .session_actions import StartSeek


class Remote:
    """Of one gateway. `step` it each round; `files` tell when there is something to do."""

    alone = None  # it is not: there is a card before it

    def __init__(self, card: Card, address: RemoteAddress) -> None:
        """UserError where the library is not there. It does not wait for the master."""
        self._parts = parts = RemoteParts(address, card.geometry)
        self.nearby = Nearby(card, parts.memory, lambda: parts.link.is_up and not self._draining)
        self._fetches = RemoteFetches(card, parts.link, parts.memory, parts.work, parts.note)
        self._stores = RemoteStores(card, parts.link, parts.memory, parts.work, parts.note)
        self._asks = RemoteAsks(parts.link, card.geometry)
        self._draining = False

    @property
    def files(self) -> tuple[Process | RemoteWork, ...]:
        """What to select on."""
        return self._parts.files

    @property
    def in_flight(self) -> int:
        """What the card's end has to wait for."""
        return len(self._parts.work) + self._fetches.writing

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
                self._parts.memory.give(place)

    def drain(self) -> None:
        """Begin nothing more."""
        self._draining = True
        self._asks.drain()

    def step(self, now_ns: int) -> None:
        """Take in what has come, go on with what can go on."""
        self._parts.poll(now_ns)
        if self._draining:
            return
        self._asks.step()
        self._fetches.step(now_ns)
        self._stores.step(now_ns)

    def counters(self) -> dict[str, int]:
        """What has happened so far."""
        own = {**self._asks.counters, **self.nearby.counters}
        return {**own, **self._fetches.counters, **self._stores.counters, **self._parts.link.counters}

    def status(self) -> dict[str, Any]:
        """For people and metrics."""
        return self._parts.status() | {"fetching": len(self._fetches), "storing": len(self._stores)}

    def close(self) -> bool:
        """End its processes and threads; False where a thread hangs in an I/O call."""
        self._draining = True
        return self._parts.close()


def _answer(answers: Answers, seek: int, index: int, status: SoughtStatus) -> None:
    answers.sought(seek, SoughtObject(index, status))
