"""Puts in the pool: which go together, that each hears of its own write, and that none is lost."""

from __future__ import annotations

import select
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from xkv_store.card import CardOptions
from xkv_store.errors import MediumError
from xkv_store.geometry import HEADER_BYTES
from xkv_store.io_pool import IoPool, WithdrawnError
from xkv_store.key import ObjectKey
from xkv_store.plans import PutPlan
from xkv_store.put_jobs import SMALL_SLOTS_MAX, TOGETHER_SLOTS_MAX, PutJobs
from xkv_store.testing.cards import CardDriver
from xkv_store.testing.faults import Fault, FaultPlan, Kind, Operation, under

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOT = 8_192
PAYLOAD = SLOT - HEADER_BYTES
WAIT_S_MAX = 10.0


@dataclass(eq=False)
class FakePut:
    plan: PutPlan
    slots: list[memoryview]
    party: str = "one"
    owner: str = "engine"

    def memory(self) -> list[memoryview]:
        return self.slots


@dataclass
class Drill:
    """A card, a pool, and what was heard of each put."""

    driver: CardDriver
    pool: IoPool
    heard: dict[FakePut, Exception | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jobs = PutJobs(self.driver.card, self.pool, self.heard.__setitem__)
        self._taken = 0

    def put(self, number: int, *, fragments: int = 1, length: int | None = None, party: str = "one") -> FakePut:
        """A put that is granted its slots; its bytes are all of its number."""
        length = PAYLOAD * fragments if length is None else length
        plan = self.driver.begin(key(number), length, position=number)
        assert isinstance(plan, PutPlan)
        slots = self.driver.ring[self._taken : self._taken + fragments]
        self._taken += fragments
        for slot in slots:
            slot[HEADER_BYTES:] = bytes([number]) * (len(slot) - HEADER_BYTES)
        return FakePut(plan, slots, party)

    def settle(self, puts: int) -> int:
        """Until so many puts have been heard of; how many jobs ended."""
        ended = 0
        while len(self.heard) < puts:
            assert select.select([self.pool.fileno()], [], [], WAIT_S_MAX)[0], f"{len(self.heard)} of {puts}"
            for job in self.pool.finished_jobs():
                self.jobs.ended(job)
                ended += 1
        return ended

    def confirm(self) -> None:
        for put, error in self.heard.items():
            self.driver.card.finish_put(put.plan, error if isinstance(error, MediumError) else None)
        self.driver.commit()

    def got(self, number: int) -> bytes | None:
        """The object's bytes as the card gives them."""
        plan = self.driver.card.begin_get(key(number), self.driver.now_ns)
        if plan is None:
            return None
        slots = self.driver.ring[-plan.fragments :]
        self.driver.card.read(plan, slots, 0)
        self.driver.card.end_get(plan)
        return b"".join(bytes(slot[HEADER_BYTES:]) for slot in slots)[: plan.length]


def key(number: int) -> ObjectKey:
    return ObjectKey(b"n" * 16, 0, bytes([number]) * 32, 0)


def opened(folder: Path) -> Drill:
    driver = CardDriver(CardOptions(folder=folder / "card", capacity_bytes=1 << 21, slot_bytes=SLOT), ring_slots=96)
    return Drill(driver, IoPool(2))


@pytest.fixture
def drill(tmp_path: Path) -> Iterator[Drill]:
    one = opened(tmp_path)
    yield one
    assert one.pool.close()
    one.driver.card.close()


def test_small_puts_go_together_and_all_come_back(drill: Drill) -> None:
    """Twenty objects of one slot are three jobs, whose bytes are each object's own."""
    puts = [drill.put(number) for number in range(20)]
    for put in puts:
        drill.jobs.add(put)
    assert len(drill.jobs) == 20
    drill.jobs.flush()
    assert drill.settle(20) == -(-20 // TOGETHER_SLOTS_MAX)
    assert len(drill.jobs) == 0
    assert list(drill.heard.values()) == [None] * 20
    drill.confirm()
    for number in range(20):
        assert drill.got(number) == bytes([number]) * PAYLOAD


def test_slots_that_are_not_filled_are_written_as_far_as_they_are(drill: Drill) -> None:
    """Between them lies what nobody writes: they must not become neighbours in one call."""
    lengths = [PAYLOAD, 10, PAYLOAD, PAYLOAD, 2_000, PAYLOAD + 5, 1]
    puts = [drill.put(number, fragments=-(-length // PAYLOAD), length=length) for number, length in enumerate(lengths)]
    for put in puts:
        drill.jobs.add(put)
    drill.jobs.flush()
    assert drill.settle(len(puts)) == 1
    drill.confirm()
    for number, length in enumerate(lengths):
        assert drill.got(number) == bytes([number]) * length


def test_large_objects_and_other_sessions_go_apart(drill: Drill) -> None:
    """A large object fills a thread by itself, and a session that ends takes back its own puts alone."""
    large = SMALL_SLOTS_MAX + 1
    puts = [drill.put(0), drill.put(1, fragments=large), drill.put(2), drill.put(3, party="two"), drill.put(4)]
    for put in puts:
        drill.jobs.add(put)
    drill.jobs.flush()
    assert drill.settle(5) == 5


def test_each_hears_of_its_own_write(tmp_path: Path) -> None:
    """An error in one call is that of the objects in it, and of no other that went with them."""
    fault = Fault(operation=Operation.WRITE, kind=Kind.ERROR, nth=2)
    plan = FaultPlan((fault,))
    with under(plan) as injector:
        drill = opened(tmp_path)
        lengths = [10, 20, PAYLOAD, PAYLOAD]  # three calls: the last two objects are neighbours
        puts = [drill.put(number, length=length) for number, length in enumerate(lengths)]
        assert injector.calls[Operation.WRITE] == 0
        for put in puts:
            drill.jobs.add(put)
        drill.jobs.flush()
        drill.settle(4)
        assert injector.calls[Operation.WRITE] == 3
    failed = [isinstance(drill.heard[put], MediumError) for put in puts]
    assert failed == [False, True, False, False]
    drill.confirm()
    assert [drill.got(number) is None for number in range(4)] == failed
    assert drill.pool.close()
    drill.driver.card.close()


def test_what_the_pool_does_not_take_is_heard_of(tmp_path: Path) -> None:
    """A gateway that ends must answer every put."""
    drill = opened(tmp_path)
    put = drill.put(0)
    drill.jobs.add(put)
    assert drill.pool.close()
    drill.jobs.flush()
    assert isinstance(drill.heard[put], WithdrawnError)
    assert len(drill.jobs) == 0
    drill.driver.card.close()
