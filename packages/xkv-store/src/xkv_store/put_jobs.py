"""Puts on their way through the I/O pool: a large object is a job, small ones of one session share one.

Owns: which puts go together, and that each of them hears how its own write ended.
Must not know: sessions, answers, the index, how an object lies on the medium.

A job wakes a thread and rings the loop's bell once, which for an object of one slot costs more than its write. All of
it runs on the event loop's thread, save `_run`, which the pool's threads call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from .io_pool import IoPool, Job, Lane, WithdrawnError
from .testing.points import reached

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .card import Card, GetPlan, PutPlan

TOGETHER_SLOTS_MAX: Final = 8  # of one job: 2 MiB, from where on one object alone keeps the medium busy
SMALL_SLOTS_MAX: Final = 2  # of an object that goes with others


class Nearby(Protocol):
    """Memory of the gateway's own from which objects are read as from the card, where they are there (a remote's)."""

    def wrote(self, plan: PutPlan, slots: Sequence[memoryview]) -> None:
        """These slots are on the card. They are an engine's, and nobody else touches them until this returns."""

    def read(self, plan: GetPlan, slots: Sequence[memoryview], first_fragment: int) -> bool:
        """As `Card.read`; False where the object is not there."""


class Put(Protocol):
    """What is to be written."""

    @property
    def plan(self) -> PutPlan:
        """The object, and where it goes."""

    @property
    def party(self) -> Any:
        """The session whose ring has it: only puts of one go together."""

    @property
    def owner(self) -> str:
        """Whose share of the pool it takes."""

    def memory(self) -> Sequence[memoryview]:
        """The object's slots in the ring."""


@dataclass(slots=True, eq=False)
class _Together:
    puts: list[Put] = field(default_factory=list)
    slots: int = 0
    errors: Sequence[Exception | None] = ()


class PutJobs:
    """The puts that the pool has, or is about to get."""

    def __init__(
        self, card: Card, pool: IoPool, written: Callable[[Any, Exception | None], None], nearby: Nearby | None = None
    ) -> None:
        """`written` is told of each put when it has ended, in `ended`, `withdraw`, `add` or `flush`."""
        self._nearby = nearby
        self._card = card
        self._pool = pool
        self._written = written
        self._jobs: dict[Job, _Together] = {}
        self._open = _Together()

    def __len__(self) -> int:
        return len(self._open.puts) + sum(len(together.puts) for together in self._jobs.values())

    def full(self, owner: str) -> bool:
        """Whether the pool would not take another job of this owner's."""
        return self._pool.full(Lane.STORE, owner)

    def add(self, put: Put) -> None:
        """Write this, now or, with others, at the next `flush`."""
        slots = put.plan.fragments
        is_small = slots <= SMALL_SLOTS_MAX and len(put.plan.extents) == 1
        first = self._open.puts[0] if self._open.puts else put
        if not is_small or first.party is not put.party or self._open.slots + slots > TOGETHER_SLOTS_MAX:
            self.flush()
        self._open.puts.append(put)
        self._open.slots += slots
        if not is_small:
            self.flush()

    def flush(self) -> None:
        """Hand over what waits for others to go with."""
        together, self._open = self._open, _Together()
        if not together.puts:
            return
        job = Job(Lane.STORE, partial(self._run, together), owner=together.puts[0].owner, cost=together.slots)
        if self._pool.submit(job):
            self._jobs[job] = together
        else:
            self._end(together, WithdrawnError())

    def ended(self, job: Job) -> None:
        """The pool has ended this job."""
        self._end(self._jobs.pop(job), job.error)

    def withdraw(self, wanted: Callable[[Any], bool]) -> None:
        """Take back the puts that `wanted` names, session by session, and that have not begun."""
        jobs = self._jobs
        for job in self._pool.withdraw(lambda job: job in jobs and wanted(jobs[job].puts[0])):
            self.ended(job)

    def _end(self, together: _Together, error: Exception | None) -> None:
        errors = [error] * len(together.puts) if error is not None or not together.errors else together.errors
        for put, own in zip(together.puts, errors, strict=True):
            self._written(put, own)

    def _run(self, together: _Together) -> None:
        for _ in together.puts:
            reached("put.before_write")
        objects = [(put.plan, put.memory()) for put in together.puts]
        if len(objects) == 1:
            self._card.write(*objects[0])
        else:
            together.errors = self._card.write_many(objects)
        if self._nearby is not None:
            for one, error in zip(objects, together.errors or [None] * len(objects), strict=True):
                if error is None:
                    self._nearby.wrote(*one)
        for _ in together.puts:
            reached("put.written")
