"""Fair shares: nobody waits for all that another has queued, whoever came first and however large it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from xkv_store import fair_queue
from xkv_store.fair_queue import FairQueue


@dataclass(frozen=True)
class Thing:
    owner: str
    number: int = 0
    cost: int = 1


def taken(queue: FairQueue[Thing], count: int) -> str:
    return "".join(queue.popleft().owner for _ in range(count))


def test_a_flood_lets_another_pass_at_once() -> None:
    queue: FairQueue[Thing] = FairQueue()
    for number in range(1_000):
        queue.append(Thing("a", number))
    assert taken(queue, 10) == "a" * 10
    queue.append(Thing("b"))
    assert "b" in taken(queue, 2)


def test_one_that_is_taken_out_is_no_more_in_it() -> None:
    queue: FairQueue[Thing] = FairQueue()
    things = [Thing("a", 0), Thing("a", 1), Thing("b")]
    for thing in things:
        queue.append(thing)
    assert queue.remove(things[0])
    assert queue.remove(things[2])
    assert not queue.remove(things[0])
    assert not queue.remove(things[2])
    assert (len(queue), queue.count("a"), queue.count("b")) == (1, 1, 0)
    assert queue.popleft() is things[1]
    queue.append(things[2])
    assert queue.popleft() is things[2]


def test_who_asks_one_by_one_takes_no_more_than_his_share() -> None:
    """He would pass the one who waits for ever, if what he has had were forgotten with each."""
    queue: FairQueue[Thing] = FairQueue()
    for number in range(100):
        queue.append(Thing("a", number))
    turns = []
    for _ in range(60):
        if not queue.count("b"):
            queue.append(Thing("b"))
        turns.append(queue.popleft().owner)
    assert abs(turns.count("a") - turns.count("b")) <= 1


def test_shares_are_of_bytes_not_of_things() -> None:
    queue: FairQueue[Thing] = FairQueue()
    for number in range(100):
        queue.append(Thing("large", number, cost=10))
        queue.append(Thing("small", number, cost=1))
    counted = Counter(queue.popleft().owner for _ in range(55))
    assert counted == {"small": 50, "large": 5}


@given(st.lists(st.one_of(st.sampled_from("abc"), st.just(""), st.just("out")), max_size=80))
def test_each_is_given_out_once_and_its_owners_in_order(steps: list[str]) -> None:
    queue: FairQueue[Thing] = FairQueue()
    model: dict[str, list[Thing]] = {"a": [], "b": [], "c": []}
    for number, step in enumerate(steps):
        if step == "out":
            gone = queue.take_out(lambda thing: thing.number % 3 == 0)
            assert sorted(thing.number for thing in gone) == sorted(
                thing.number for own in model.values() for thing in own if thing.number % 3 == 0
            )
            model = {owner: [thing for thing in own if thing.number % 3] for owner, own in model.items()}
        elif step:
            thing = Thing(step, number, 1 + number % 4)
            queue.append(thing)
            model[step].append(thing)
        elif len(queue):
            thing = queue.popleft()
            assert model[thing.owner].pop(0) == thing
        assert len(queue) == sum(map(len, model.values()))
        assert all(queue.count(owner) == len(own) for owner, own in model.items())


def test_owners_that_have_gone_are_forgotten() -> None:
    queue: FairQueue[Thing] = FairQueue()
    for number in range(5 * fair_queue.FORGET_FROM):
        queue.append(Thing(f"owner {number}"))
        queue.popleft()
    assert len(queue._had) <= fair_queue.FORGET_FROM
    assert not queue._of
    assert not queue._turns
