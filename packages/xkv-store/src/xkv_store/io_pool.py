"""A bounded pool of I/O threads with three lanes: loads go first, then stores, then proofs, and none starves.

In each lane every owner (an engine) has a fair share of the bytes: a flood of one's keeps no other's waiting.

Owns: its threads, the queues, the list of finished jobs and the eventfd that tells of them.
Must not know: cards, sessions or sockets; a job is something to call on one of the threads.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from .fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable

JOBS_PER_LANE_MAX: Final = 16_384  # of one owner: four rings of 1 GiB full of one-slot objects; more is shed or busy
LOADS_IN_A_ROW_MAX: Final = 8  # so many loads may pass a waiting store; then one store goes
OTHERS_IN_A_ROW_MAX: Final = 64  # so many loads and stores may pass a waiting proof; a busy card is proved, too
PROOFS_RUNNING_MAX: Final = 1  # one thread at a time proves what nobody waits for
IO_THREADS_DEFAULT: Final = 8  # some make checksums, some wait for the index to be flushed: 4 fell short of the medium
IO_THREADS_MAX: Final = 64
JOIN_S_MAX: Final = 10.0  # one read or write that a device does not end must not hold up the end for ever


class Lane(enum.Enum):
    """What a job is for."""

    LOAD = "load"
    STORE = "store"
    PROOF = "proof"  # reading what nobody waits for, only to see whether it is sound


class WithdrawnError(Exception):
    """The job was taken back before any thread began it."""


@dataclass(slots=True, eq=False)
class Job:
    """One object's I/O, and how it ended. `cost`: slots. `took_s`: how long it ran."""

    lane: Lane
    run: Callable[[], None]
    error: Exception | None = None
    owner: str = ""
    cost: int = 1
    took_s: float = 0.0


@dataclass(slots=True)
class _Queues:
    loads: FairQueue[Job] = field(default_factory=FairQueue)
    stores: FairQueue[Job] = field(default_factory=FairQueue)
    proofs: FairQueue[Job] = field(default_factory=FairQueue)
    loads_in_a_row: int = 0
    others_in_a_row: int = 0
    stores_running: int = 0
    proofs_running: int = 0

    def of(self, lane: Lane) -> FairQueue[Job]:
        if lane is Lane.LOAD:
            return self.loads
        return self.stores if lane is Lane.STORE else self.proofs

    def choose(self, stores_running_max: int) -> Job | None:
        """The next job: a load, unless a store has waited long enough; stores and proofs never fill all threads.

        A proof comes when nothing else can, or has waited long enough itself.
        """
        room = self.stores_running + self.proofs_running < stores_running_max
        proof_may_go = bool(self.proofs) and room and self.proofs_running < PROOFS_RUNNING_MAX
        if not (proof_may_go and self.others_in_a_row >= OTHERS_IN_A_ROW_MAX):
            job = self._choose_other(store_may_go=bool(self.stores) and room)
            if job is not None or not proof_may_go:
                self.others_in_a_row += job is not None
                return job
        self.others_in_a_row = 0
        self.proofs_running += 1
        return self.proofs.popleft()

    def _choose_other(self, *, store_may_go: bool) -> Job | None:
        if self.loads and not (store_may_go and self.loads_in_a_row >= LOADS_IN_A_ROW_MAX):
            self.loads_in_a_row += 1
            return self.loads.popleft()
        if store_may_go:
            self.loads_in_a_row = 0
            self.stores_running += 1
            return self.stores.popleft()
        return None

    def ended(self, lane: Lane) -> bool:
        """A job of this lane has ended; whether another, held back until now, may go."""
        self.stores_running -= lane is Lane.STORE
        self.proofs_running -= lane is Lane.PROOF
        return lane is not Lane.LOAD and bool(self.stores or self.proofs)


class IoPool:
    """Threads that run jobs; `fileno()` becomes readable when `finished_jobs()` has something.

    With more than one thread, one is always left for loads, so that a load never waits for a store (or a proof) to end.
    """

    def __init__(self, threads: int) -> None:
        assert 1 <= threads <= IO_THREADS_MAX
        self._stores_running_max = max(1, threads - 1)
        self._queues = _Queues()
        self._wake = threading.Condition()
        self._stopping = False
        self._finished: list[Job] = []
        self._rung = False  # the eventfd is written to, or about to be, for all of these
        self.others = 0  # loads and stores submitted so far
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = [
            threading.Thread(target=self._work, name=f"xkv-io-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """The eventfd to select on."""
        return self._eventfd

    def submit(self, job: Job) -> bool:
        """Queue a job; False when its owner's part of the lane is full."""
        with self._wake:
            if self.full(job.lane, job.owner):
                return False
            self._queues.of(job.lane).append(job)
            self.others += job.lane is not Lane.PROOF
            self._wake.notify()
        return True

    def full(self, lane: Lane, owner: str) -> bool:
        """Whether `submit` would refuse a job of this owner's."""
        return self._stopping or self._queues.of(lane).count(owner) >= JOBS_PER_LANE_MAX

    def hand_over(self, job: Job, owner: str) -> None:
        """Somebody else wants what this job does: it comes in his turn where he has fewer queued than its owner."""
        with self._wake:
            queue = self._queues.of(job.lane)
            if queue.count(owner) < queue.count(job.owner) and queue.remove(job):
                job.owner = owner
                queue.append(job)

    def withdraw(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Take back the queued jobs that `wanted` names; what has begun is not touched.

        Their `error` is a `WithdrawnError`, and they do not come up in `finished_jobs`.
        """
        taken: list[Job] = []
        with self._wake:
            for lane in Lane:
                taken += self._queues.of(lane).take_out(wanted)
        for job in taken:
            job.error = WithdrawnError()
        return taken

    def finished_jobs(self) -> list[Job]:
        """The jobs that have ended since the last call."""
        if not self._rung:
            return []
        try:
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return []  # it is about to be
        with self._wake:
            self._rung = False
            jobs, self._finished = self._finished, []
        return jobs

    def queued(self, lane: Lane) -> int:
        """Jobs of a lane that no thread has begun."""
        return len(self._queues.of(lane))

    def close(self) -> bool:
        """End the threads after their present jobs; False when one did not end in time (its I/O hangs)."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S_MAX)
        if any(thread.is_alive() for thread in self._threads):
            return False  # the eventfd stays open: a late thread still writes to it
        os.close(self._eventfd)
        return True

    def _next(self) -> Job | None:
        with self._wake:
            while True:
                if self._stopping:
                    return None
                job = self._queues.choose(self._stores_running_max)
                if job is not None:
                    return job
                self._wake.wait()

    def _ended(self, job: Job) -> None:
        with self._wake:
            if self._queues.ended(job.lane):
                self._wake.notify()
            self._finished.append(job)
            is_first, self._rung = not self._rung, True
        if is_first:
            os.eventfd_write(self._eventfd, 1)

    def _work(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            begun_s = time.monotonic()
            try:
                job.run()
            except Exception as error:  # noqa: BLE001  the loop judges it; the thread lives on
                job.error = error
            job.took_s = time.monotonic() - begun_s
            self._ended(job)
            del job  # a thread that waits must not keep the ring of an engine that is gone
