"""A gateway without its loop and threads: each of its steps happens when a test says so, on a clock of the test's own.

Owns: the clock, a pool whose jobs begin and end on command, the order of a round, the index's commits.
Must not know: any test, or what a client says. Connections are socket pairs: nothing listens, nothing waits.
"""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from .. import connections, control, desk, sparse_log  # noqa: TID252  the package may have another name
from ..card import Card, CardOptions, CommitBatch  # noqa: TID252
from ..desk import Desk  # noqa: TID252
from ..io_pool import IoPool, Job, Lane, WithdrawnError  # noqa: TID252
from ..prover import Prover  # noqa: TID252
from ..transfers import Transfers  # noqa: TID252

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..errors import MediumError  # noqa: TID252

PACKETS_MAX: Final = 16
ROUNDS_MAX: Final = 64  # until everything that was sent has been taken in
CLOCKED: Final = (connections, control, desk, sparse_log)


class Clock:
    """Time that goes on when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000_000

    def monotonic_ns(self) -> int:
        """The present."""
        return self.now_ns

    def monotonic(self) -> float:
        """The same in seconds."""
        return self.now_ns / 1e9


@contextmanager
def told_by(clock: Clock) -> Iterator[None]:
    """The gateway's modules take their time from this clock for the block."""
    former = [vars(module)["time"] for module in CLOCKED]
    for module in CLOCKED:
        vars(module)["time"] = clock
    try:
        yield
    finally:
        for module, time in zip(CLOCKED, former, strict=True):
            vars(module)["time"] = time


class StepPool(IoPool):
    """A pool without threads: `begin` takes a queued job up, `end` does what it has to do."""

    def __init__(self, jobs_max: int) -> None:
        self.others = 0
        self.waiting: list[Job] = []
        self.begun: list[Job] = []
        self._over: list[Job] = []
        self._jobs_max = jobs_max

    def submit(self, job: Job) -> bool:
        """As the pool's."""
        if self.full(job.lane, job.owner):
            return False
        self.waiting.append(job)
        self.others += job.lane is not Lane.PROOF
        return True

    def full(self, lane: Lane, owner: str) -> bool:
        """As the pool's, but for all owners together."""
        del owner
        return self.queued(lane) >= self._jobs_max

    def queued(self, lane: Lane) -> int:
        """As the pool's."""
        return sum(job.lane is lane for job in self.waiting)

    def hand_over(self, job: Job, owner: str) -> None:
        """Here the test says whose turn it is."""

    def withdraw(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """As the pool's."""
        taken = [job for job in self.waiting if wanted(job)]
        self.waiting = [job for job in self.waiting if job not in taken]
        for job in taken:
            job.error = WithdrawnError()
        return taken

    def finished_jobs(self) -> list[Job]:
        """As the pool's."""
        over, self._over = self._over, []
        return over

    def begin(self, which: int) -> None:
        """A thread takes up a waiting job: it can be withdrawn no more."""
        job = self.waiting.pop(which % len(self.waiting))
        if job.lane is Lane.LOAD:
            job.run.__self__.begin()  # type: ignore[attr-defined]
        self.begun.append(job)

    def end(self, which: int, error: MediumError | None = None) -> Job:
        """A job that has begun does its work, the whole of it only now, or fails."""
        job = self.begun.pop(which % len(self.begun))
        try:
            if error is None:
                job.run()
            job.error = error
        except Exception as caught:  # noqa: BLE001  as the pool does
            job.error = caught
        self._over.append(job)
        return job


class StepGateway:
    """One life of a gateway: from its card's opening to `close` or `die`."""

    def __init__(self, options: CardOptions, clock: Clock, *, jobs_max: int) -> None:
        self.clock = clock
        self.card = Card.open(options)
        self.pool = StepPool(jobs_max)
        self.prover = Prover(self.card, self.pool)
        self.transfers = Transfers(self.card, self.pool, self.prover.noticed)
        self.desk = Desk(
            card=self.card,
            transfers=self.transfers,
            prover=self.prover,
            allow_uids=(),
            boot_id=self.card.boot_id,
            house=self,
        )
        self.batch: CommitBatch | None = None
        self.stop_wanted = False
        self.over = False

    # --- the desk's house --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Noted."""
        self.stop_wanted = True

    def status_text(self) -> str:
        """JSON."""
        return json.dumps({**self.card.status(), **self.desk.status()})

    # --- steps -------------------------------------------------------------------------------------------

    def connect(self) -> socket.socket:
        """A new connection: the client's end, which does not block."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setblocking(False)
        self.desk.accept(ours)
        return theirs

    def round(self) -> None:
        """Take in what clients have sent and what the pool has ended; send the answers."""
        for connection in list(self.desk.connections.values()):
            self.desk.touched.add(connection)
            self.desk.readable(connection, PACKETS_MAX)
        for job in self.pool.finished_jobs():
            (self.prover if job.lane is Lane.PROOF else self.transfers).ended(job)
        while self.transfers.waiting:
            self.transfers.begin(self.clock.now_ns)
        for connection in self.desk.end_round(everybody=True):
            if connection.may_close(self.clock.monotonic()):
                self.desk.forget(connection)

    def tick(self, ms: float) -> None:
        """Time goes on; the heart beats."""
        self.clock.now_ns += int(ms * 1_000_000)
        self.desk.engines.beat(self.clock.now_ns)
        self.card.tick(self.clock.now_ns)
        self.round()

    def take_batch(self) -> CommitBatch | None:
        """What the committer is given next, if it is idle and there is something."""
        if self.batch is None:
            self.batch = self.card.take_commit_batch()
            return self.batch
        return None

    def end_batch(self, *, applied: bool, error: MediumError | None) -> CommitBatch:
        """The commit is over: applied or not, and with an error or not."""
        assert self.batch is not None
        batch, self.batch = self.batch, None
        if applied:
            self.card.commit_batch(batch)
        if error is None:
            assert applied
            self.transfers.confirmed(self.card.confirmed(batch))
        else:
            self.transfers.commit_failed(self.card.commit_failed(batch, self.clock.now_ns))
        self.round()
        return batch

    def close(self) -> None:
        """A clean end: the drain is over."""
        assert not self.desk.connections
        assert not self.transfers.in_flight
        self.over = True
        self.desk.close()
        self.card.close()

    def die(self) -> None:
        """As by kill -9."""
        self.over = True
        self.desk.close()
        self.card.abandon()


def works_of(job: Job) -> list[Any]:
    """The puts or gets that a job of the transfers is for: those that go together; of reads, all who wait."""
    if job.lane is Lane.STORE:
        return list(job.run.args[0].puts)  # type: ignore[attr-defined]
    reads = job.run.__self__.reads  # type: ignore[attr-defined]
    return [waiting for read in reads for landing in read.landings for waiting in landing.waiting]
