"""Reads of objects, each once for all who want the same at the same time.

Owns: which reads are under way, where each has to land, who waits for it, when one may still be joined or left.
Must not know: sessions' rules, messages, what a failed read means (`transfers`).

A read lands in one place and is copied from there to the others, and proved in each: rings are of engines that do not
trust each other's memory. What lies behind one another goes together, as small puts do (`put_jobs`). All of it runs on
the event loop's thread, save `_Row.run`.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from .database import aligned_slots
from .errors import CorruptObject, MediumError, SpoiltSlots, without_trace
from .io_pool import IoPool, Job, Lane
from .medium import BYTES_AT_ONCE, read_through
from .put_jobs import TOGETHER_SLOTS_MAX
from .testing.points import reached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .card import Card, GetPlan
    from .leases import Part, Placed
    from .put_jobs import Nearby
    from .ring import Ring
    from .slots import Slots

LANDINGS_MAX: Final = 64  # of one read: the first waits for the copies of all; more is another read


@dataclass(slots=True, eq=False)
class Landing:
    """Slots that a part is to come into. `owner`: the engine's id; `placed`: where these are its shared ones."""

    owner: str
    ring: Ring
    slots: tuple[int, ...]
    placed: Placed | None
    waiting: list[Waiting] = field(default_factory=list)
    error: Exception | None = None  # of the copy that was to come here

    def views(self) -> Slots:
        """The slots' memory."""
        return self.ring.views(self.slots)


class Waiting:
    """Somebody who waits for a landing; `transfers` knows more of him."""

    __slots__ = ("landing", "plan")

    def __init__(self, plan: GetPlan, landing: Landing) -> None:
        self.plan = plan
        self.landing = landing
        landing.waiting.append(self)


@dataclass(slots=True, eq=False)
class _Read:
    """One read from the medium. The lock guards `begun`, `closed` and `landings`. `error`: of a read among others."""

    card: Card
    plan: GetPlan
    part: Part
    landings: list[Landing]
    nearby: Nearby | None = None
    job: Job | None = None
    error: Exception | None = None
    begun: bool = False
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def join(self, landing: Landing) -> bool:
        """Whether the read will land there, too."""
        with self.lock:
            if self.closed or len(self.landings) >= LANDINGS_MAX:
                return False
            self.landings.append(landing)
            return True

    def leave(self, landing: Landing) -> bool:
        """Whether the read will not touch these slots: it has not begun."""
        with self.lock:
            if self.begun or self.closed:
                return False
            self.landings.remove(landing)
            self.closed = not self.landings
            return True

    def begin(self) -> Landing | None:
        """On a thread of the pool: from now on nobody leaves. Where to read to; None where all have left."""
        with self.lock:
            self.begun = True
            return self.landings[0] if self.landings else None

    def comes_from_nearby(self, source: Sequence[memoryview]) -> bool:
        """On a thread of the pool: whether it was found outside the card, proved, and is there now."""
        return self.nearby is not None and self.nearby.read(self.plan, source, self.part.first_fragment)

    def look_apart(self, error: CorruptObject) -> Exception:
        """On a thread of the pool: what it is that was read and not sound."""
        # The memory is an engine's: what it writes there meanwhile must cost nobody else the object.
        try:
            _prove_apart(self.card, self.plan, self.part)
        except (CorruptObject, MediumError) as found:
            return without_trace(found)
        return SpoiltSlots(0, f"slots of an engine were written to while they were read into ({error})")

    def copy(self, source: Sequence[memoryview]) -> None:
        """On a thread of the pool: from where it was read to, to whoever has joined meanwhile."""
        done = 1
        while (landing := self._next(done)) is not None:
            try:
                self.card.copy(self.plan, source, landing.views(), self.part.first_fragment)
            except CorruptObject as error:
                landing.error = without_trace(error)
            done += 1

    def _next(self, done: int) -> Landing | None:
        with self.lock:
            if done == len(self.landings):
                self.closed = True
                return None
            return self.landings[done]


@dataclass(slots=True, eq=False)
class _Row:
    """Reads that one job does: one, or several of one slot each that lie behind one another on the medium."""

    reads: list[_Read]

    def takes(self, read: _Read) -> bool:
        """Whether the medium's call for these can bring that one as well."""
        last, end = self.reads[-1], _place(self.reads[-1])
        if end is None or len(self.reads) >= TOGETHER_SLOTS_MAX:
            return False
        geometry = last.card.geometry
        is_whole = geometry.slot_fill_bytes(last.plan.length, last.part.first_fragment) == geometry.slot_bytes
        return is_whole and _place(read) == (end[0], end[1] + 1)

    def begin(self) -> list[tuple[_Read, Landing]]:
        """On a thread of the pool: from now on nobody leaves. What is still wanted, and where it is to be read to."""
        firsts = [(read, read.begin()) for read in self.reads]
        return [(read, first) for read, first in firsts if first is not None]

    def run(self) -> None:
        """On a thread of the pool: read, then copy to whoever has joined meanwhile."""
        begun = [(read, first.views()) for read, first in self.begin()]
        for _ in begun:
            reached("get.before_read")
        errors: Sequence[Exception | None] = [None] * len(begun)
        is_there = [read.comes_from_nearby(source) for read, source in begun]
        is_row = 1 < len(begun) == len(self.reads) and not any(is_there)
        if is_row:
            card = self.reads[0].card
            errors = card.read_row([(read.plan, source[0], read.part.first_fragment) for read, source in begun])
        for (read, source), error, came in zip(begun, errors, is_there, strict=True):
            self._go_on(read, source, error, is_read=is_row or came)

    def _go_on(self, read: _Read, source: Sequence[memoryview], error: Exception | None, *, is_read: bool) -> None:
        try:
            if not is_read:
                read.card.read(read.plan, source, read.part.first_fragment)
        except (CorruptObject, MediumError) as found:
            error = without_trace(found)
        read.error = read.look_apart(error) if isinstance(error, CorruptObject) else error
        if read.error is None:
            read.copy(source)
            reached("get.read")


class Reads:
    """All reads of one gateway."""

    def __init__(
        self,
        card: Card,
        pool: IoPool,
        ended: Callable[[Landing, GetPlan, Exception | None], None],
        nearby: Nearby | None = None,
    ) -> None:
        """`ended` hears of each landing once, when nothing touches its slots any more."""
        self._nearby = nearby
        self._card = card
        self._pool = pool
        self._ended = ended
        self._open: dict[Part, _Read] = {}
        self._jobs: dict[Job, _Row] = {}
        self._last: Job | None = None  # of those, the one that the pool has not got yet
        self._of: dict[Landing, _Read] = {}
        self._coming: dict[Placed, Landing] = {}
        self._unwanted: set[Job] = set()  # of reads that all have left
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(row.reads) for row in self._jobs.values())

    def landing_of(self, placed: Placed) -> Landing | None:
        """The landing that a place in a shared region waits for; None where its part has come."""
        return self._coming.get(placed)

    def begin(self, plan: GetPlan, part: Part, landing: Landing) -> bool:
        """Read a part to a landing, with others if that can be; False where no further read of its engine's can begin.

        A read that another has begun is joined whatever this engine has queued. It begins at the next `flush`.
        """
        if not self._join(part, landing) and not self._read(plan, part, landing):
            return False
        if landing.placed is not None:
            self._coming[landing.placed] = landing
        return True

    def _join(self, part: Part, landing: Landing) -> bool:
        read = self._open.get(part)
        if read is None or not read.join(landing):
            return False
        self.counters["reads_joined"] += 1
        self._of[landing] = read
        assert read.job is not None, "it has not ended"
        if read.job.owner != landing.owner:
            self.flush()
            self._pool.hand_over(read.job, landing.owner)  # or it would wait for all that the other has queued
        return True

    def _read(self, plan: GetPlan, part: Part, landing: Landing) -> bool:
        read, job = _Read(self._card, plan, part, [landing], self._nearby), self._last
        if job is not None and job.owner == landing.owner and self._jobs[job].takes(read):
            self._jobs[job].reads.append(read)
            job.cost += part.fragments
        else:
            self.flush()
            if self._pool.full(Lane.LOAD, landing.owner):
                return False
            row = _Row([read])
            self._last = job = Job(Lane.LOAD, row.run, owner=landing.owner, cost=part.fragments)
            self._jobs[job] = row
        read.job = job
        self._open[part] = read
        self._of[landing] = read
        return True

    def flush(self) -> None:
        """Hand over what waits for others to go with."""
        job, self._last = self._last, None
        if job is not None:
            taken = self._pool.submit(job)
            assert taken, "the lane was asked for room on this thread, and only this thread fills it"

    def leave(self, landings: Iterable[Landing]) -> list[Landing]:
        """Give these up; those of them that nothing will touch any more, of which `ended` does not hear."""
        left = []
        for landing in landings:
            read = self._of[landing]
            if read.leave(landing):
                self._forget_landing(landing)
                left.append(landing)
                if read.closed:
                    assert read.job is not None, "it has not ended"
                    if all(other.closed for other in self._jobs[read.job].reads):
                        self._unwanted.add(read.job)
        return left

    @property
    def untidy(self) -> bool:
        """Whether `tidy` has something to do."""
        return bool(self._unwanted)

    def tidy(self) -> None:
        """Take reads that all have left out of the pool: together, as each time everything in it is looked at."""
        unwanted, self._unwanted = self._unwanted, set()
        if unwanted:
            for job in self._pool.withdraw(lambda job: job in unwanted):
                self._forget(job)

    def withdraw_all(self) -> None:
        """End everything that has not begun."""
        for job in self._pool.withdraw(lambda job: job in self._jobs):
            self.ended(job)

    def ended(self, job: Job) -> bool:
        """The pool has ended a job; whether it was one of these."""
        if job not in self._jobs:
            return False
        for read in self._forget(job):
            failed, read.error = job.error or read.error, None  # its trace knows the read, and would be a cycle
            self._read_ended(read, failed)
        self.flush()
        return True

    def _read_ended(self, read: _Read, failed: Exception | None) -> None:
        with read.lock:
            read.closed = True
        self.counters["reads"] += read.begun and bool(read.landings)
        for landing in read.landings:
            self._forget_landing(landing)
            error, landing.error = failed or landing.error, None
            is_first = landing is read.landings[0]
            if error is not None and (failed is None or (isinstance(error, SpoiltSlots) and not is_first)):
                # What it was, or was to be, copied from was not what it should be: another engine's slots.
                if self.begin(read.plan, read.part, landing):
                    self.counters["reads_again"] += 1
                    continue
                error = SpoiltSlots(0, "another engine's slots were written to, and nothing more can be read now")
            self._ended(landing, read.plan, error)

    def _forget_landing(self, landing: Landing) -> None:
        del self._of[landing]
        if landing.placed is not None:
            del self._coming[landing.placed]

    def _forget(self, job: Job) -> list[_Read]:
        reads = self._jobs.pop(job).reads
        self._unwanted.discard(job)
        for read in reads:
            read.job = None  # a cycle would keep a dead engine's ring until some garbage collection
            if self._open.get(read.part) is read:
                del self._open[read.part]
        return reads


def _place(read: _Read) -> tuple[int, int] | None:
    """The database and slot of a read of one slot, of an object that lies in one extent."""
    if read.part.fragments > 1 or len(read.plan.extents) > 1:
        return None
    return read.plan.extents[0].database, read.plan.extents[0].first + read.part.first_fragment


def _prove_apart(card: Card, plan: GetPlan, part: Part) -> None:
    """Read and prove it, piece by piece, in memory that no engine reaches. MediumError, CorruptObject."""
    slot_bytes = card.geometry.slot_bytes
    slots = aligned_slots(min(part.fragments, max(1, BYTES_AT_ONCE // slot_bytes)), slot_bytes)
    read_through(card.read, plan, slots, range(part.first_fragment, part.first_fragment + part.fragments))
