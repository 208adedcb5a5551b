"""Puts and gets on their way through the gateway: card, I/O pool, card again, answer.

Owns: what is in flight for which session, and that every object is answered exactly once, or its session is gone.
Must not know: sockets, the index, how an object lies on the medium.

All of it runs on the event loop's thread, save `_write` and `_read`, which the pool's threads call.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from .card import PutRefusal
from .errors import CorruptObject, MediumError
from .io_pool import IoPool, Job, Lane, WithdrawnError
from .testing.points import reached
from .wire import LoadedObject, LoadStatus, StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .card import Card, GetPlan, PutPlan
    from .ring import Ring
    from .session import CancelGet, GetTask, PutTask, StartGet, StartPut

log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 10.0  # one line about failing I/O in so long; the counters tell how often

_REFUSED: Final = {
    PutRefusal.HELD: StoreStatus.HELD,
    PutRefusal.SHED: StoreStatus.SHED,
    # The same key is being put at this moment, by another session: as good as held, and proven by the table alone.
    PutRefusal.BUSY: StoreStatus.HELD,
    PutRefusal.INVALID: StoreStatus.INVALID,
}


class Answers(Protocol):
    """Where answers go: the connection, which sends them at the end of the loop's round."""

    def stored(self, put: int, answer: StoredObject) -> None:
        """Send this with others of the same put."""

    def loaded(self, get: int, answer: LoadedObject) -> None:
        """Send this with others of the same get."""


@dataclass(slots=True, eq=False)
class Party:
    """One session as its puts and gets see it: where its slots are, where its answers go."""

    ring: Ring
    answers: Answers


@dataclass(slots=True, eq=False)
class _Putting:
    party: Party
    put: int
    index: int
    slots: tuple[int, ...]
    plan: PutPlan


@dataclass(slots=True, eq=False)
class _Getting:
    party: Party
    get: int
    index: int
    slots: tuple[int, ...]
    first_fragment: int
    plan: GetPlan
    cancelled: bool = False


class Transfers:
    """All puts and gets of all sessions."""

    def __init__(self, card: Card, pool: IoPool, damaged: Callable[[GetPlan, str], None] = lambda _plan, _what: None):
        """`damaged` hears of each object that a get has found so, and which is off the card by then."""
        self._card = card
        self._damaged = damaged
        self._pool = pool
        self._unconfirmed: dict[int, _Putting] = {}  # by generation: written, its index entry not yet committed
        self._getting: dict[tuple[Party, int], set[_Getting]] = {}
        self._jobs: dict[Job, _Putting | _Getting] = {}
        self._logged_at_s = -LOG_INTERVAL_S
        self.counters: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Objects that are in the pool or wait for their commit."""
        return len(self._jobs) + len(self._unconfirmed)

    # --- puts --------------------------------------------------------------------------------------------

    def put(self, party: Party, start: StartPut, now_ns: int) -> None:
        """Begin, or answer at once, every object of a put."""
        for task in start.tasks:
            status = self._begin_put(party, start.put, task, now_ns)
            if status is not None:
                self._count("put", status)
                party.answers.stored(start.put, StoredObject(task.index, status))

    def _begin_put(self, party: Party, put: int, task: PutTask, now_ns: int) -> StoreStatus | None:
        item = task.item
        if self._pool.full(Lane.STORE):
            return StoreStatus.SHED
        plan = self._card.begin_put(task.key, item.length, item.family, item.position, item.replace, now_ns)
        if isinstance(plan, PutRefusal):
            return _REFUSED[plan]
        putting = _Putting(party, put, task.index, item.slots, plan)
        reached("put.received")
        self._submit(Lane.STORE, putting, partial(self._write, putting))
        return None

    def _write(self, putting: _Putting) -> None:
        reached("put.before_write")
        slot = putting.party.ring.slot
        self._card.write(putting.plan, [slot(number) for number in putting.slots])
        reached("put.written")

    def _written(self, putting: _Putting, error: Exception | None) -> None:
        self._card.finish_put(putting.plan, self._as_medium_error(error))
        if error is None:
            self._unconfirmed[putting.plan.generation] = putting
            reached("put.queued")
        else:
            self.counters["put_withdrawn"] += isinstance(error, WithdrawnError)
            self._answer_put(putting, StoreStatus.FAILED)

    def confirmed(self, plans: Sequence[PutPlan]) -> None:
        """The index holds these puts and the lookup table shows them."""
        for plan in plans:
            reached("put.confirmed")
            putting = self._unconfirmed.pop(plan.generation, None)
            if putting is not None:
                self._answer_put(putting, StoreStatus.CONFIRMED)

    def commit_failed(self, plans: Sequence[PutPlan]) -> None:
        """The index did not take these puts; the card has freed them."""
        for plan in plans:
            putting = self._unconfirmed.pop(plan.generation, None)
            if putting is not None:
                self._answer_put(putting, StoreStatus.FAILED)

    def _answer_put(self, putting: _Putting, status: StoreStatus) -> None:
        self._count("put", status)
        putting.party.answers.stored(putting.put, StoredObject(putting.index, status))
        reached("put.answered")

    # --- gets --------------------------------------------------------------------------------------------

    def get(self, party: Party, start: StartGet, now_ns: int) -> None:
        """Begin, or answer at once, every object of a get."""
        for task in start.tasks:
            status = self._begin_get(party, start.get, task, now_ns)
            if status is not None:
                self._count("get", status)
                party.answers.loaded(start.get, LoadedObject(task.index, status, 0, 0))

    def _begin_get(self, party: Party, get: int, task: GetTask, now_ns: int) -> LoadStatus | None:
        if self._pool.full(Lane.LOAD):
            return LoadStatus.BUSY
        plan = self._card.begin_get(task.key, now_ns)
        if plan is None:
            return LoadStatus.MISS
        slots, first_fragment = task.item.slots, task.item.first_fragment
        if first_fragment + len(slots) > self._card.geometry.fragments(plan.length):
            self._card.end_get(plan)  # an object shorter than the caller believes is not the one it means
            return LoadStatus.MISS
        getting = _Getting(party, get, task.index, slots, first_fragment, plan)
        self._getting.setdefault((party, get), set()).add(getting)
        reached("get.received")
        self._submit(Lane.LOAD, getting, partial(self._read, getting))
        return None

    def _read(self, getting: _Getting) -> None:
        reached("get.before_read")
        slot = getting.party.ring.slot
        self._card.read(getting.plan, [slot(number) for number in getting.slots], getting.first_fragment)
        reached("get.read")

    def _have_read(self, getting: _Getting, error: Exception | None) -> None:
        party, plan = getting.party, getting.plan
        siblings = self._getting[party, getting.get]
        siblings.discard(getting)
        if not siblings:
            del self._getting[party, getting.get]
        self._card.end_get(plan)
        status = self._judge_read(getting, error)
        self._count("get", status)
        answer = LoadedObject(getting.index, status, plan.generation, plan.length)
        party.answers.loaded(getting.get, answer)
        reached("get.answered")

    def _judge_read(self, getting: _Getting, error: Exception | None) -> LoadStatus:
        """What a read's end means. A corrupt object and one with unreadable sectors (EIO) leave the card.

        Any other error (no memory, a device that went away for a moment) says nothing about the object: it
        stays, the load fails, and the client's denial makes its next lookup a miss.
        """
        plan = getting.plan
        if isinstance(error, CorruptObject):
            self._card.drop(plan.key, plan.generation, "corrupt")
            self._log_error("corrupt object", error)
            self._damaged(plan, str(error))
            return LoadStatus.CORRUPT
        if isinstance(error, WithdrawnError) or getting.cancelled:
            return LoadStatus.CANCELLED
        if error is None:
            return LoadStatus.OK
        medium_error = self._as_medium_error(error)
        if medium_error is not None and medium_error.errno == errno.EIO:
            self._card.drop(plan.key, plan.generation, "unreadable")
            self._damaged(plan, str(medium_error))
        return LoadStatus.FAILED

    def cancel(self, party: Party, cancel: CancelGet) -> None:
        """Answer what is outstanding of this get as cancelled: at once where nothing has begun."""
        getting = self._getting.get((party, cancel.get), set())
        for one in getting:
            one.cancelled = True
        if getting:
            self._withdraw(lambda work: work in getting)

    # --- both --------------------------------------------------------------------------------------------

    def leave(self, party: Party) -> None:
        """Nobody hears this session's answers any more: end what has not begun. The rest ends by itself."""
        self._withdraw(lambda work: work.party is party)

    def withdraw_all(self) -> None:
        """End everything that has not begun (the drain's time is over)."""
        self._withdraw(lambda _: True)

    def ended(self, job: Job) -> None:
        """The pool has ended this load or store: go on with it."""
        work = self._jobs.pop(job)
        if isinstance(work, _Putting):
            self._written(work, job.error)
        else:
            self._have_read(work, job.error)

    def _withdraw(self, wanted: Callable[[_Putting | _Getting], bool]) -> None:
        jobs = self._jobs
        for job in self._pool.withdraw(lambda job: job in jobs and wanted(jobs[job])):
            self.ended(job)

    def _submit(self, lane: Lane, work: _Putting | _Getting, run: partial[None]) -> None:
        job = Job(lane, run)
        self._jobs[job] = work
        taken = self._pool.submit(job)
        assert taken, "the lane was asked for room on this thread, and only this thread fills it"

    def _as_medium_error(self, error: Exception | None) -> MediumError | None:
        if error is None or isinstance(error, MediumError):
            if error is not None:
                self._log_error("the medium failed", error)
            return error
        if isinstance(error, WithdrawnError):
            return MediumError(errno.ECANCELED, "withdrawn before it began")
        if isinstance(error, OSError):
            return MediumError.of(error, "I/O")
        log.error("an error of ours while moving an object", exc_info=error)
        self.counters["errors_of_ours"] += 1
        return MediumError(0, f"{type(error).__name__}: {error}")

    def _log_error(self, what: str, error: Exception) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= LOG_INTERVAL_S:
            self._logged_at_s = now_s
            log.warning("%s: %s (further ones are only counted for %.0f s)", what, error, LOG_INTERVAL_S)

    def _count(self, what: str, status: StoreStatus | LoadStatus) -> None:
        self.counters[f"{what}_{status.name.lower()}"] += 1
