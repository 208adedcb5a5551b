"""The I/O pool: order of the lanes, bounds, withdrawal, and that an error does not end a thread."""

from __future__ import annotations

import select
import threading
from typing import TYPE_CHECKING

import pytest

from xkv_store import io_pool
from xkv_store.io_pool import IoPool, Job, Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S_MAX = 10.0


class Drill:
    """A pool of which a test holds the threads, and a record of what ran."""

    def __init__(self, threads: int) -> None:
        self.pool = IoPool(threads)
        self.ran: list[str] = []
        self.gates: list[threading.Event] = []

    def hold(self, lane: Lane) -> threading.Event:
        """Occupy one thread; returns when it is occupied."""
        gate, begun = threading.Event(), threading.Event()

        def run() -> None:
            begun.set()
            assert gate.wait(WAIT_S_MAX)

        assert self.pool.submit(Job(lane, run))
        assert begun.wait(WAIT_S_MAX)
        self.gates.append(gate)
        return gate

    def add(self, lane: Lane, name: str) -> bool:
        return self.pool.submit(self.job(lane, name))

    def job(self, lane: Lane, name: str) -> Job:
        return Job(lane, lambda: self.ran.append(name))

    def settle(self, jobs: int) -> list[Job]:
        """Take finished jobs until there are so many."""
        taken: list[Job] = []
        while len(taken) < jobs:
            readable, _, _ = select.select([self.pool.fileno()], [], [], WAIT_S_MAX)
            assert readable, f"only {len(taken)} of {jobs} jobs ended"
            taken += self.pool.finished_jobs()
        return taken


@pytest.fixture
def drill() -> Iterator[Callable[[int], Drill]]:
    made: list[Drill] = []

    def make(threads: int) -> Drill:
        made.append(Drill(threads))
        return made[-1]

    yield make
    for one in made:
        for gate in one.gates:
            gate.set()
        assert one.pool.close()


def test_loads_pass_waiting_stores_but_not_for_ever(drill: Callable[[int], Drill]) -> None:
    d = drill(1)
    gate = d.hold(Lane.LOAD)
    d.add(Lane.STORE, "store")
    for number in range(io_pool.LOADS_IN_A_ROW_MAX + 5):
        d.add(Lane.LOAD, f"load {number}")
    gate.set()
    d.settle(io_pool.LOADS_IN_A_ROW_MAX + 7)
    assert d.ran[0] == "load 0"
    assert 0 < d.ran.index("store") <= io_pool.LOADS_IN_A_ROW_MAX
    assert d.ran[-1] != "store"


def test_stores_never_fill_every_thread(drill: Callable[[int], Drill]) -> None:
    d = drill(2)
    d.hold(Lane.STORE)
    d.add(Lane.STORE, "second store")
    d.add(Lane.LOAD, "load")
    assert len(d.settle(1)) == 1
    assert d.ran == ["load"]


def test_a_proof_waits_for_all_others_but_not_for_ever(drill: Callable[[int], Drill]) -> None:
    """Proofs must not slow loads down, and a card that is never at rest must be proved all the same."""
    d = drill(1)
    gate = d.hold(Lane.LOAD)
    d.add(Lane.PROOF, "first proof")
    d.add(Lane.PROOF, "second proof")
    others = io_pool.OTHERS_IN_A_ROW_MAX + 10
    for number in range(others):
        d.add(Lane.LOAD if number % 2 else Lane.STORE, f"other {number}")
    gate.set()
    d.settle(others + 3)
    assert d.ran.index("first proof") == io_pool.OTHERS_IN_A_ROW_MAX - 1, "the load that was held is one of them"
    assert d.ran[-1] == "second proof"
    assert d.pool.others == others + 1


def test_one_thread_at_a_time_proves(drill: Callable[[int], Drill]) -> None:
    d = drill(3)
    gate = d.hold(Lane.PROOF)
    d.add(Lane.PROOF, "proof")
    for number in range(5):
        d.add(Lane.LOAD, f"load {number}")
    d.settle(5)
    assert sorted(d.ran) == [f"load {number}" for number in range(5)]
    gate.set()
    d.settle(2)
    assert d.ran[-1] == "proof"


def test_a_proof_takes_no_thread_that_is_left_for_loads(drill: Callable[[int], Drill]) -> None:
    d = drill(3)
    held = [d.hold(Lane.PROOF), d.hold(Lane.STORE)]
    d.add(Lane.STORE, "store")
    d.add(Lane.LOAD, "load")
    d.settle(1)
    assert d.ran == ["load"]
    held[0].set()
    d.settle(2)
    assert d.ran == ["load", "store"], "the proof's end lets the store go"


def test_a_full_lane_refuses(drill: Callable[[int], Drill], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_pool, "JOBS_PER_LANE_MAX", 2)
    d = drill(1)
    d.hold(Lane.STORE)
    assert [d.add(Lane.STORE, str(n)) for n in range(3)] == [True, True, False]
    assert d.add(Lane.LOAD, "the other lane has its own room")


def test_withdraw_takes_what_has_not_begun(drill: Callable[[int], Drill]) -> None:
    d = drill(1)
    gate = d.hold(Lane.STORE)
    mine = [d.job(Lane.LOAD, "a"), d.job(Lane.STORE, "c")]
    for job in [*mine, d.job(Lane.LOAD, "b")]:
        assert d.pool.submit(job)
    taken = d.pool.withdraw(lambda job: job in mine)
    assert taken == mine
    assert all(isinstance(job.error, io_pool.WithdrawnError) for job in taken)
    gate.set()
    d.settle(2)
    assert d.ran == ["b"]


def test_what_another_wants_as_well_does_not_wait_for_all_that_its_owner_has_queued(
    drill: Callable[[int], Drill],
) -> None:
    d = drill(1)
    gate = d.hold(Lane.LOAD)
    flood = [d.job(Lane.LOAD, str(number)) for number in range(100)]
    for job in flood:
        job.owner = "flood"
        assert d.pool.submit(job)
    d.pool.hand_over(flood[-1], "other")
    assert (flood[-1].owner, flood[-2].owner) == ("other", "flood")
    d.pool.hand_over(flood[-1], "flood")
    assert flood[-1].owner == "other", "there it would wait again"
    gate.set()
    d.settle(101)
    assert d.ran.index("99") <= 1
    d.pool.hand_over(flood[0], "other")
    assert (sorted(d.ran), d.pool.queued(Lane.LOAD)) == (sorted(map(str, range(100))), 0), "each ran once"


def test_an_error_reaches_the_job_and_the_thread_lives(drill: Callable[[int], Drill]) -> None:
    d = drill(1)

    def fail() -> None:
        raise OSError(5, "no medium")

    d.pool.submit(Job(Lane.LOAD, fail))
    d.add(Lane.LOAD, "next")
    jobs = d.settle(2)
    assert isinstance(jobs[0].error, OSError)
    assert d.ran == ["next"]
