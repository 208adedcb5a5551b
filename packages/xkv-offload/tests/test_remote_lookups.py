"""Lookups of what the card lacks: one batch a step, none beyond the first sure miss, bounded in time and memory."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from xkv_offload import remote_lookups
from xkv_offload.remote_lookups import ABSENT_SECONDS, FAILED_SECONDS, FOUND_SECONDS, RemoteLookups
from xkv_store.client_seeks import SoughtObject, SoughtStatus
from xkv_store.key import ObjectKey

PENDING_SECONDS = 2.0
FRAGMENTS = 9


@dataclass
class Asked:
    objects: Sequence[tuple[ObjectKey, int]]
    fetch: bool
    on_answer: Callable[[SoughtObject], None]

    def answer(self, *statuses: SoughtStatus) -> None:
        for index, status in enumerate(statuses):
            self.on_answer(SoughtObject(index, status))


@dataclass
class FakeSeeks:
    usable: bool = True
    asked: list[Asked] = field(default_factory=list)

    def ask(
        self, objects: Sequence[tuple[ObjectKey, int]], *, fetch: bool, on_answer: Callable[[SoughtObject], None]
    ) -> None:
        self.asked.append(Asked(objects, fetch, on_answer))


@dataclass
class Rig:
    """`lookups` of an engine of some ranks, at a time that the test sets."""

    seeks: FakeSeeks
    lookups: RemoteLookups
    ranks: int = 1
    now: float = 100.0

    def objects(self, key: bytes) -> list[ObjectKey]:
        return [ObjectKey(b"n" * 16, int.from_bytes(key[-4:], "big"), key[:-4], rank) for rank in range(self.ranks)]

    def waits(self, *numbers: int, req_id: str = "r", group: int = 0) -> list[bool]:
        return [self.lookups.waits(req_id, key_of(number, group), self.objects) for number in numbers]

    def step(self) -> Asked | None:
        before = len(self.seeks.asked)
        self.lookups.end_step()
        new = self.seeks.asked[before:]
        assert len(new) <= 1, "one batch a step"
        return new[0] if new else None


def key_of(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "little") + group.to_bytes(4, "big")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    seeks = FakeSeeks()
    made = Rig(seeks, RemoteLookups(seeks, pending_seconds=PENDING_SECONDS, fragments={0: FRAGMENTS, 1: 0}))
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


FOUND, ABSENT, FAILED = SoughtStatus.FOUND, SoughtStatus.ABSENT, SoughtStatus.FAILED


def numbers_of(asked: Asked | None) -> list[int]:
    assert asked is not None
    assert all(fragments == FRAGMENTS for _, fragments in asked.objects)
    return [int.from_bytes(key.block_hash, "little") for key, _ in asked.objects]


def test_a_step_asks_once_and_then_fetches_what_is_there_before_the_first_sure_miss(rig: Rig) -> None:
    assert rig.waits(1, 2, 3, 4) == [True] * 4
    asks = rig.step()
    assert numbers_of(asks) == [1, 2, 3, 4]
    assert asks is not None
    assert not asks.fetch
    assert rig.waits(1, 2, 3, 4) == [True] * 4
    assert rig.step() is None, "what was asked is not asked again"
    asks.answer(FOUND, FOUND, ABSENT, FOUND)
    assert rig.waits(1, 2, 3) == [True, True, False], "vLLM looks no further than this"
    fetches = rig.step()
    assert numbers_of(fetches) == [1, 2]
    assert fetches is not None
    assert fetches.fetch
    fetches.answer(FOUND, ABSENT)
    assert rig.waits(2) == [False], "it was dropped between the two"


def test_what_was_fetched_is_the_cards_word_again(rig: Rig) -> None:
    """The table has it, so that nobody asks here; where it has left the card meanwhile, all begins anew."""
    rig.waits(1)
    asked = rig.step()
    assert asked is not None
    asked.answer(FOUND)
    rig.waits(1)
    fetches = rig.step()
    assert fetches is not None
    fetches.answer(FOUND)
    assert rig.waits(1) == [True]
    again = rig.step()
    assert again is not None
    assert not again.fetch


@pytest.mark.parametrize(("status", "life"), [(ABSENT, ABSENT_SECONDS), (FAILED, FAILED_SECONDS)])
def test_a_miss_is_remembered_for_its_time(rig: Rig, status: SoughtStatus, life: float) -> None:
    rig.waits(1)
    asked = rig.step()
    assert asked is not None
    asked.answer(status)
    assert rig.waits(1, req_id="s") == [False]
    rig.now += life - 0.01
    assert rig.waits(1, req_id="t") == [False]
    assert rig.step() is None
    rig.now += 0.02
    assert rig.waits(1, req_id="t") == [True]
    assert numbers_of(rig.step()) == [1]


def test_what_was_found_is_believed_for_its_time(rig: Rig) -> None:
    rig.waits(1)
    asked = rig.step()
    assert asked is not None
    asked.answer(FOUND)
    rig.lookups.waits("other", key_of(2), rig.objects)  # takes the answer in
    rig.step()
    rig.now += FOUND_SECONDS + 0.01
    assert rig.waits(1, req_id="s") == [True]
    again = rig.step()
    assert again is not None
    assert not again.fetch


def test_a_request_waits_no_longer_than_its_bound(rig: Rig) -> None:
    assert rig.waits(1, 2) == [True, True]
    rig.step()
    rig.now += PENDING_SECONDS + 0.01
    assert rig.waits(1, 2, 3) == [False] * 3
    assert rig.step() is None, "nothing more is asked for it"
    assert rig.lookups.take_timeouts() == 1
    assert rig.waits(1, req_id="s") == [True], "another one may wait for the same answer"
    rig.lookups.forget("r")
    assert rig.waits(3) == [True]


def test_a_chunk_needs_all_ranks_objects(rig: Rig) -> None:
    rig.ranks = 3
    rig.waits(1)
    asked = rig.step()
    assert asked is not None
    assert [key.rank for key, _ in asked.objects] == [0, 1, 2]
    asked.answer(FOUND, ABSENT)
    assert rig.waits(1) == [True], "one has not answered"
    asked.on_answer(SoughtObject(2, FOUND))
    assert rig.waits(1) == [False]


def test_nothing_is_asked_where_it_is_of_no_use(rig: Rig) -> None:
    assert rig.waits(1, group=1) == [False], "chunks of this group are never stored"
    assert rig.lookups.waits("r", key_of(1), lambda _key: []) is True, "the card has it by now"
    rig.seeks.usable = False
    assert rig.waits(2) == [False]
    rig.seeks.usable = True
    rig.waits(2)
    rig.lookups.stop()
    assert rig.step() is None
    assert rig.waits(2) == [False]


def test_memory_of_a_long_run_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_lookups, "CHUNKS_MAX", 4)
    monkeypatch.setattr(remote_lookups, "REQUESTS_MAX", 4)
    for number in range(20):
        assert rig.waits(number, req_id=str(number)) == [True]
    asked = rig.step()
    assert asked is not None
    asked.answer(*[FOUND] * 20)
    assert rig.waits(19, req_id="x") == [True]
    assert len(rig.lookups._chunks) <= 4
    assert len(rig.lookups._since) <= 4
