"""Puts and gets on their way through the gateway: card, I/O pool, card again, answer.

Owns: what is in flight for which session, and that every object is answered exactly once, or its session is gone.
Must not know: sockets, the index, how an object lies on the medium.

All of it runs on the event loop's thread.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from .card import PutRefusal
from .errors import CorruptObject, MediumError, RemoteAwayError, RemoteGoneError, SpoiltSlots
from .fair_queue import FairQueue
from .io_pool import IoPool, Job, WithdrawnError
from .leases import Part
from .put_jobs import PutJobs
from .reads import Landing, Reads, Waiting
from .session_actions import GetTask, LeaseTask, PutTask
from .sparse_log import SparseLog
from .testing.points import reached
from .wire import LeasedObject, LoadedObject, LoadStatus, StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .card import Card, GetPlan, PutPlan
    from .key import ObjectKey
    from .leases import LeaseRegion, Placed
    from .put_jobs import Nearby
    from .remote_alone import RemoteAlone
    from .remote_puts import RemotePuts
    from .remote_reads import RemoteReads
    from .ring import Ring
    from .session_actions import CancelGet, DropLease, StartGet, StartLease, StartPut
    from .slots import Slots

log = logging.getLogger(__name__)

Task = PutTask | GetTask | LeaseTask

BEGUN_PER_ROUND_MAX: Final = 16  # then the loop listens and answers: a millisecond or so

_REFUSED: Final = {
    PutRefusal.HELD: StoreStatus.HELD,
    PutRefusal.SHED: StoreStatus.SHED,
    # The same key is being put at this moment, by another session: as good as held, and proven by the table alone.
    PutRefusal.BUSY: StoreStatus.HELD,
    PutRefusal.INVALID: StoreStatus.INVALID,
}


_ENDED: Final = {
    type(None): LoadStatus.OK,
    WithdrawnError: LoadStatus.CANCELLED,
    RemoteAwayError: LoadStatus.BUSY,
}


class Answers(Protocol):
    """Where answers go: the connection, which sends them at the end of the loop's round."""

    def stored(self, put: int, answer: StoredObject) -> None:
        """Send this with others of the same put."""

    def loaded(self, get: int, answer: LoadedObject) -> None:
        """Send this with others of the same get."""

    def leased(self, lease: int, answer: LeasedObject) -> None:
        """Send this with others of the same lease."""


@dataclass(slots=True, eq=False)
class Party:
    """One session as its puts and gets see it: where its slots are, where its answers go.

    `region`: what it shares with the other ranks, where they share anything; `held`: what it has of that, by number
    and index of the lease. `owner`: the engine's id. `end_term`: makes that known not to hold any more.
    """

    ring: Ring
    answers: Answers
    owner: str
    region: LeaseRegion | None = None
    end_term: Callable[[], None] | None = None
    held: dict[tuple[int, int], Placed] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Putting:
    party: Party
    put: int
    index: int
    slots: tuple[int, ...]
    plan: PutPlan
    replace: bool

    @property
    def owner(self) -> str:
        return self.party.owner

    @property
    def ring(self) -> Ring:
        return self.party.ring

    def memory(self) -> Slots:
        return self.ring.views(self.slots)


class _Asked(NamedTuple):
    """One object that a session has asked for, until its turn. `cost`: slots."""

    party: Party
    number: int
    task: Task
    owner: str
    cost: int


class _Getting(Waiting):
    """One object of a get, or of a lease, until it is answered."""

    __slots__ = ("cancelled", "index", "number", "party")

    def __init__(self, party: Party, number: int, index: int, plan: GetPlan, landing: Landing) -> None:
        super().__init__(plan, landing)
        self.party = party
        self.number = number
        self.index = index
        self.cancelled = False


class Transfers:
    """All puts and gets of all sessions."""

    def __init__(
        self,
        card: Card,
        pool: IoPool,
        damaged: Callable[[GetPlan, str], None] = lambda _plan, _what: None,
        nearby: Nearby | None = None,
        alone: RemoteAlone | None = None,
    ) -> None:
        """`damaged` hears of each object that a get has found so, and which is off the card by then.

        `alone`: the remote, where the card is nothing else.
        """
        self._card = card
        self._damaged = damaged
        self._unconfirmed: dict[int, _Putting] = {}  # by generation: written, its index entry not yet committed
        self._getting: dict[tuple[Party, int], set[_Getting]] = {}
        self._intake: FairQueue[_Asked] = FairQueue()
        self._puts: PutJobs | RemotePuts
        self._reads: Reads | RemoteReads
        if alone is None:
            self._puts = PutJobs(card, pool, self._written, nearby)
            self._reads = Reads(card, pool, self._landed, nearby)
        else:
            self._puts = alone.puts(pool, self._written)
            self._reads = alone.reads(self._landed, lambda: len(self._intake) > 0)
        self._queued: Counter[tuple[Party, int]] = Counter()  # what of a get or lease is still in it
        self._cancelled: set[tuple[Party, int]] = set()  # of those
        self._sparse_log = SparseLog(log)
        self.counters: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Objects that wait for their turn, are in the pool or wait for their commit."""
        return len(self._intake) + len(self._puts) + len(self._reads) + len(self._unconfirmed)

    @property
    def queued(self) -> int:
        """Objects that wait for their turn."""
        return len(self._intake)

    def all_counters(self) -> dict[str, int]:
        """What has happened so far, reads included."""
        return {**self.counters, **self._reads.counters}

    # --- whose turn it is --------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether `begin` has something to do."""
        return bool(len(self._intake)) or self._reads.untidy

    def begin(self, now_ns: int) -> None:
        """Begin some of what sessions have asked for, in a fair order: no engine's thousands keep another waiting."""
        self._reads.tidy()
        for _ in range(min(len(self._intake), BEGUN_PER_ROUND_MAX)):
            asked = self._intake.popleft()
            if self._forget(asked):
                self._refuse(asked)
                continue
            match asked.task:
                case PutTask():
                    self._put(asked.party, asked.number, asked.task, now_ns)
                case GetTask():
                    self._get(asked.party, asked.number, asked.task, now_ns)
                case LeaseTask():
                    self._lease(asked.party, asked.number, asked.task, now_ns)
        self._puts.flush()
        self._reads.flush()

    def _queue(self, party: Party, number: int, task: Task, cost: int) -> None:
        self._intake.append(_Asked(party, number, task, party.owner, cost))
        if not isinstance(task, PutTask):
            self._queued[party, number] += 1

    def _forget(self, asked: _Asked) -> bool:
        """It is queued no more; whether it has been cancelled. Puts, whose numbers may be gets' as well, never are."""
        if isinstance(asked.task, PutTask):
            return False
        name = asked.party, asked.number
        is_cancelled = name in self._cancelled
        self._queued[name] -= 1
        if not self._queued[name]:
            del self._queued[name]
            self._cancelled.discard(name)
        return is_cancelled

    def _refuse(self, asked: _Asked) -> None:
        """Nobody waits for it any more, or the gateway ends."""
        match asked.task:
            case PutTask():
                self._refuse_put(asked.party, asked.number, asked.task, StoreStatus.FAILED)
            case GetTask():
                self._refuse_get(asked.party, asked.number, asked.task.index, LoadStatus.CANCELLED)
            case LeaseTask():
                self._refuse_lease(asked.party, asked.number, asked.task.index, LoadStatus.CANCELLED)

    def _refuse_all(self, wanted: Callable[[_Asked], bool]) -> None:
        for asked in self._intake.take_out(wanted):
            self._forget(asked)
            self._refuse(asked)

    # --- puts --------------------------------------------------------------------------------------------

    def put(self, party: Party, start: StartPut) -> None:
        """Each object of a put will be begun, or answered, in `begin`."""
        for task in start.tasks:
            self._queue(party, start.put, task, len(task.item.slots))

    def _put(self, party: Party, put: int, task: PutTask, now_ns: int) -> None:
        status = self._begin_put(party, put, task, now_ns)
        if status is not None:
            self._refuse_put(party, put, task, status)

    def _refuse_put(self, party: Party, put: int, task: PutTask, status: StoreStatus) -> None:
        self._count("put", status)
        party.answers.stored(put, StoredObject(task.index, status))

    def _begin_put(self, party: Party, put: int, task: PutTask, now_ns: int) -> StoreStatus | None:
        item = task.item
        if self._puts.full(party.owner):
            return StoreStatus.SHED
        plan = self._card.begin_put(task.key, item.length, item.family, item.position, item.replace, now_ns)
        if isinstance(plan, PutRefusal):
            return _REFUSED[plan]
        reached("put.received")
        self._puts.add(_Putting(party, put, task.index, item.slots, plan, item.replace))
        return None

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

    # --- gets and leases ---------------------------------------------------------------------------------

    def get(self, party: Party, start: StartGet) -> None:
        """Each object of a get will be begun, or answered, in `begin`."""
        for task in start.tasks:
            self._queue(party, start.get, task, len(task.item.slots))

    def lease(self, party: Party, start: StartLease) -> None:
        """Each object of a lease will be begun, or answered, in `begin`."""
        for task in start.tasks:
            self._queue(party, start.lease, task, task.item.fragments)

    def _get(self, party: Party, get: int, task: GetTask, now_ns: int) -> None:
        slots, first_fragment = task.item.slots, task.item.first_fragment
        plan = self._begin_get(task.key, first_fragment, len(slots), now_ns)
        if plan is None:
            self._refuse_get(party, get, task.index, LoadStatus.MISS)
            return
        landing = Landing(party.owner, party.ring, slots, None)
        if not self._reads.begin(plan, Part(plan.generation, first_fragment, len(slots)), landing):
            self._card.end_get(plan)
            self._refuse_get(party, get, task.index, LoadStatus.BUSY)
            return
        self._wait(party, get, task.index, plan, landing)

    def _lease(self, party: Party, lease: int, task: LeaseTask, now_ns: int) -> None:
        region = party.region
        assert region is not None, "only ranks of an engine with a shared region may hold slots of it"
        first_fragment, fragments = task.item.first_fragment, task.item.fragments
        plan = self._begin_get(task.key, first_fragment, fragments, now_ns)
        if plan is None:
            self._refuse_lease(party, lease, task.index, LoadStatus.MISS)
            return
        part = Part(plan.generation, first_fragment, fragments)
        placed = region.find(part)
        if placed is None:
            placed = region.place(part)
            landing = Landing(party.owner, party.ring, placed.slots, placed)
            if self._reads.begin(plan, part, landing):
                self._wait(party, lease, task.index, plan, landing)
            else:
                region.spoil(placed)
                region.let_go(placed)
                self._card.end_get(plan)
                self._refuse_lease(party, lease, task.index, LoadStatus.BUSY)
            return
        coming = self._reads.landing_of(placed)
        if coming is None:
            self.counters["leases_found"] += 1
            self._answer_lease(party, (lease, task.index), LoadStatus.OK, placed.as_it_came(plan), placed)
        else:
            self.counters["leases_joined"] += 1
            self._wait(party, lease, task.index, plan, coming)

    def _begin_get(self, key: ObjectKey, first_fragment: int, fragments: int, now_ns: int) -> GetPlan | None:
        """Pin the object; None for a miss."""
        plan = self._card.begin_get(key, now_ns)
        if plan is not None and first_fragment + fragments > self._card.geometry.fragments(plan.length):
            self._card.end_get(plan)  # an object shorter than the caller believes is not the one it means
            return None
        return plan

    def _wait(self, party: Party, number: int, index: int, plan: GetPlan, landing: Landing) -> None:
        self._getting.setdefault((party, number), set()).add(_Getting(party, number, index, plan, landing))
        reached("get.received")

    def _refuse_get(self, party: Party, get: int, index: int, status: LoadStatus) -> None:
        self._count("get", status)
        party.answers.loaded(get, LoadedObject(index, status, 0, 0))

    def _refuse_lease(self, party: Party, lease: int, index: int, status: LoadStatus) -> None:
        self._count("get", status)
        party.answers.leased(lease, LeasedObject(index, status, 0, 0, ()))

    def _landed(self, landing: Landing, plan: GetPlan, error: Exception | None) -> None:
        """A read has ended: answer all who wait for it here."""
        status = self._judge_read(plan, error)
        if landing.placed is not None and status is not LoadStatus.OK:
            _region_of(landing).spoil(landing.placed)
        for waiting in list(landing.waiting):
            assert isinstance(waiting, _Getting)
            is_late = waiting.cancelled and status is not LoadStatus.CORRUPT
            self._answer(waiting, LoadStatus.CANCELLED if is_late else status)

    def _answer(self, getting: _Getting, status: LoadStatus) -> None:
        party, number, plan = getting.party, getting.number, getting.plan
        getting.landing.waiting.remove(getting)  # a cycle would keep a dead engine's ring until some garbage collection
        siblings = self._getting[party, number]
        siblings.discard(getting)
        if not siblings:
            del self._getting[party, number]
        placed = getting.landing.placed
        if placed is not None:
            self._answer_lease(party, (number, getting.index), status, plan, placed)
            return
        self._card.end_get(plan)
        self._count_get(status, plan, getting.landing.slots)
        party.answers.loaded(number, LoadedObject(getting.index, status, plan.generation, plan.length))
        reached("get.answered")

    def _answer_lease(
        self, party: Party, name: tuple[int, int], status: LoadStatus, plan: GetPlan, placed: Placed
    ) -> None:
        """`name`: the lease's number and the object's index in it."""
        lease, index = name
        self._card.end_get(plan)
        self._count_get(status, plan, placed.slots)
        slots: tuple[int, ...] = ()
        if status is LoadStatus.OK:
            slots = placed.slots
            party.held[name] = placed
        else:
            assert party.region is not None
            party.region.let_go(placed)
        party.answers.leased(lease, LeasedObject(index, status, plan.generation, plan.length, slots))
        reached("get.answered")

    def drop(self, party: Party, drop: DropLease) -> None:
        """The session has copied these."""
        assert party.region is not None
        for index in drop.indexes:
            party.region.let_go(party.held.pop((drop.lease, index)))

    def _judge_read(self, plan: GetPlan, error: Exception | None) -> LoadStatus:
        """What a read's end means. A corrupt object and one with unreadable sectors (EIO) leave the card.

        Any other error (no memory, a device that went away for a moment) says nothing about the object: it
        stays, the load fails, and the client's denial makes its next lookup a miss.
        """
        if (plain := _ENDED.get(type(error))) is not None:
            return plain
        if isinstance(error, RemoteGoneError):
            self._card.drop(plan.key, plan.generation, "evicted")
            return LoadStatus.MISS
        if isinstance(error, CorruptObject):
            self._card.drop(plan.key, plan.generation, "corrupt")
            self._sparse_log.warning("corrupt object: %s", error)
            self._damaged(plan, str(error))
            return LoadStatus.CORRUPT
        if isinstance(error, SpoiltSlots):
            self.counters["spoilt_slots"] += 1
            self._sparse_log.warning("a load failed: %s", error)
            return LoadStatus.FAILED
        medium_error = self._as_medium_error(error)
        if medium_error is not None and medium_error.errno == errno.EIO:
            self._card.drop(plan.key, plan.generation, "unreadable")
            self._damaged(plan, str(medium_error))
        return LoadStatus.FAILED

    def cancel(self, party: Party, cancel: CancelGet) -> None:
        """Answer what is outstanding of this get as cancelled: at once where nothing has begun, or others wait."""
        if (party, cancel.get) in self._queued:
            self._cancelled.add((party, cancel.get))
        alone: list[Landing] = []
        for getting in list(self._getting.get((party, cancel.get), ())):
            getting.cancelled = True
            if len(getting.landing.waiting) == 1:
                alone.append(getting.landing)
            else:
                self._answer(getting, LoadStatus.CANCELLED)
        for landing in self._reads.leave(alone):
            if landing.placed is not None:
                _region_of(landing).spoil(landing.placed)
            for waiting in list(landing.waiting):
                assert isinstance(waiting, _Getting)
                self._answer(waiting, LoadStatus.CANCELLED)

    # --- both --------------------------------------------------------------------------------------------

    def leave(self, party: Party) -> None:
        """Nobody hears this session's answers any more: end what has not begun. The rest ends by itself.

        Its gets and leases that are not answered have been cancelled.
        """
        self._refuse_all(lambda asked: asked.party is party)
        self._puts.withdraw(lambda putting: putting.party is party)
        if party.end_term is not None:
            party.end_term()
        for placed in party.held.values():
            assert party.region is not None
            party.region.let_go(placed)
        party.held.clear()

    def withdraw_all(self) -> None:
        """End everything that has not begun (the drain's time is over)."""
        self._refuse_all(lambda _: True)
        self._puts.withdraw(lambda _: True)
        self._reads.withdraw_all()

    def ended(self, job: Job) -> None:
        """The pool has ended this load or store: go on with it."""
        if not self._reads.ended(job):
            self._puts.ended(job)

    def _as_medium_error(self, error: Exception | None) -> MediumError | None:
        if error is None or isinstance(error, MediumError):
            if error is not None:
                self._sparse_log.warning("the medium failed: %s", error)
            return error
        if isinstance(error, WithdrawnError):
            return MediumError(errno.ECANCELED, "withdrawn before it began")
        if isinstance(error, OSError):
            return MediumError.of(error, "I/O")
        log.error("an error of ours while moving an object", exc_info=error)
        self.counters["errors_of_ours"] += 1
        return MediumError(0, f"{type(error).__name__}: {error}")

    def _count_get(self, status: LoadStatus, plan: GetPlan, slots: Sequence[int]) -> None:
        self._count("get", status)
        if status is LoadStatus.OK:
            self.counters["get_bytes"] += min(plan.length, len(slots) * self._card.geometry.fragment_bytes)

    def _count(self, what: str, status: StoreStatus | LoadStatus) -> None:
        self.counters[f"{what}_{status.name.lower()}"] += 1


def _region_of(landing: Landing) -> LeaseRegion:
    """The region that a landing's place is in: all who wait there are of one engine."""
    waiting = landing.waiting[0]
    assert isinstance(waiting, _Getting)
    region = waiting.party.region
    assert region is not None
    return region
