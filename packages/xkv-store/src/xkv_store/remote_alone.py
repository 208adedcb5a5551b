"""A remote that is the card (ADR 0017): engines' rings are put from and loaded into, and nothing is kept here.

Owns: the remote's parts where there is no card in front of it, what the card lists of it, what is said of it. Must not
know: sockets of engines, sessions' rules, the library. All of it runs on the event loop's thread, save what is proved.

It stands where `Remote` does for other cards. What is listed is believed to be there, and nobody relies on it: an
engine hits what lies proved in its ring (ADR 0007).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .card import PutPlan, PutRefusal
from .remote_asks import Answers, RemoteAsks
from .remote_parts import RemoteParts
from .remote_puts import RemotePuts
from .remote_reads import RemoteReads
from .remote_rings import RemoteRings
from .wire_remote import SoughtObject, SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .card import GetPlan
    from .card_alone import CardAlone
    from .io_pool import IoPool
    from .key import ObjectKey
    from .reads import Landing
    from .remote_address import RemoteAddress
    from .remote_link import Process
    from .remote_work import RemoteWork
    from .ring import Ring
    from .session_actions import StartSeek

    OnEnded = Callable[[Landing, GetPlan, Exception | None], None]
    OnWritten = Callable[[Any, Exception | None], None]


class RemoteAlone:
    """Of one gateway. `step` it each round; `files` tell when there is something to do."""

    nearby = None  # nothing of the card lies elsewhere

    @property
    def alone(self) -> RemoteAlone:
        """This: the card is nothing else."""
        return self

    def __init__(self, card: CardAlone, address: RemoteAddress) -> None:
        """UserError where the library is not there. It does not wait for the master."""
        self._card = card
        self._parts = RemoteParts(address, card.geometry)
        self._rings = RemoteRings(self._parts.link)
        self._asks = RemoteAsks(self._parts.link, card.geometry)
        self._puts: RemotePuts | None = None
        self._reads: RemoteReads | None = None
        self._listing: dict[int, tuple[Answers, int, int]] = {}  # by generation: what seeks wait for
        self._closed = False

    def puts(self, pool: IoPool, written: OnWritten) -> RemotePuts:
        """What makes puts, in place of `PutJobs`; once."""
        self._puts = RemotePuts(
            self._card,
            pool,
            self._unless_closed(written),
            link=self._parts.link,
            rings=self._rings,
            memory=self._parts.memory,
            note=self._parts.note,
        )
        return self._puts

    def reads(self, ended: OnEnded, more: Callable[[], bool]) -> RemoteReads:
        """What makes reads, in place of `Reads`; once. `more`: whether some are asked for and not begun yet."""
        self._reads = RemoteReads(
            self._card,
            self._unless_closed(ended),
            link=self._parts.link,
            rings=self._rings,
            memory=self._parts.memory,
            work=self._parts.work,
            note=self._parts.note,
            other=self._list_again,
            more=more,
        )
        return self._reads

    def attached(self, ring: Ring) -> None:
        """An engine has come with this ring: the remote's process should have it before it is needed."""
        self._rings.number_of(ring)

    def _unless_closed(self, told: Callable[..., None]) -> Callable[..., None]:
        """Once the gateway has let go of everything nobody waits, and the card is closed."""
        return lambda *what: None if self._closed else told(*what)

    @property
    def files(self) -> tuple[Process | RemoteWork, ...]:
        """What to select on."""
        return self._parts.files

    @property
    def in_flight(self) -> int:
        """What the card's end has to wait for, beside puts and reads."""
        return 0

    # --- what is listed ----------------------------------------------------------------------------------

    def seek(self, answers: Answers, start: StartSeek, now_ns: int) -> None:
        """A scheduler asks for these; each is answered once. To fetch one is to list it: then it can be read."""
        family = time.time_ns() // 1000  # one for all of a request, as an engine's are: its beginning leaves last
        for index, (key, fragments) in enumerate(start.objects):
            if not start.fetch:
                self._asks.add(answers, start.seek, index, key)
                continue
            plan = self._list(key, fragments * self._card.geometry.fragment_bytes, family, 0, now_ns, replace=False)
            if isinstance(plan, PutPlan):
                self._listing[plan.generation] = (answers, start.seek, index)
                continue
            is_there = plan in {PutRefusal.HELD, PutRefusal.BUSY}
            answers.sought(start.seek, SoughtObject(index, SoughtStatus.FOUND if is_there else SoughtStatus.FAILED))

    def _list(
        self, key: ObjectKey, length: int, family: int, position: int, now_ns: int, *, replace: bool
    ) -> PutPlan | PutRefusal:
        plan = self._card.begin_put(key, length, family, position, replace, now_ns)
        if isinstance(plan, PutPlan):
            self._card.finish_put(plan, None, now_ns)
        return plan

    def _list_again(self, plan: GetPlan, length: int) -> None:
        """The remote's object has so many bytes: whoever asks for it next is told so."""
        self._list(plan.key, length, plan.family, plan.position, time.monotonic_ns(), replace=True)

    def confirmed(self, plans: Sequence[PutPlan]) -> None:
        """The card lists these."""
        self._listed(plans, SoughtStatus.FOUND)

    def commit_failed(self, plans: Sequence[PutPlan]) -> None:
        """The card does not, and never will."""
        self._listed(plans, SoughtStatus.FAILED)

    def _listed(self, plans: Sequence[PutPlan], status: SoughtStatus) -> None:
        for plan in plans:
            sought = self._listing.pop(plan.generation, None)
            if sought is not None:
                answers, seek, index = sought
                answers.sought(seek, SoughtObject(index, status))

    # --- rounds ------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ask nothing more; puts and reads that were begun go on."""
        self._asks.drain()

    def step(self, now_ns: int) -> None:
        """Take in what has come, go on with what can go on."""
        self._parts.poll(now_ns)
        self._rings.step()
        self._asks.step()
        if self._puts is not None:
            self._puts.step()
        if self._reads is not None:
            self._reads.step(now_ns)

    def counters(self) -> dict[str, int]:
        """What has happened so far."""
        parts = [part.counters for part in (self._asks, self._puts, self._reads, self._parts.link) if part is not None]
        return {name: value for counters in parts for name, value in counters.items()}

    def status(self) -> dict[str, Any]:
        """For people and metrics."""
        said = self._parts.status()
        fetching, storing = (0 if part is None else len(part) for part in (self._reads, self._puts))
        return said | {"fetching": fetching, "storing": storing, "rings": len(self._rings)}

    def close(self) -> bool:
        """End its processes and threads; False where a thread hangs."""
        self._closed = True
        return self._parts.close()
