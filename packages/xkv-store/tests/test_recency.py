"""What recency says: ages, ghosts, and the weight that hits would have been most with."""

import random

import pytest

from xkv_store.layout import AGAIN
from xkv_store.recency import EDGES, GHOSTS_MIN, TURN_PUTS_MIN, WAYS, Ages, Recency, best_weight, bucket
from xkv_store.table import TableWriter


def make(slots: int = 1_024) -> Recency:
    table = TableWriter.create(4 * slots, bytes(16), bytes(16))
    recency = Recency(slots, table)
    recency.advance(1)
    return recency


def test_every_age_lies_between_the_edges_of_its_bucket() -> None:
    for age in [*range(300), 12_345, 1 << 20, (1 << 32) - 1]:
        assert EDGES[bucket(age)] <= age < EDGES[bucket(age) + 1]
    assert bucket(1 << 63) == len(EDGES) - 2


def test_asked_at_is_no_earlier_than_the_put_before_it() -> None:
    table = TableWriter.create(64, bytes(16), bytes(16))
    recency = Recency(8, table)
    for now in (5, (1 << 32) - 1, 1 << 32, (1 << 40) + 3):
        recency.advance(now)
        table.put(77, now, 1, 3)
        recency.touch(77)
        assert recency.asked_at(77) == now + ((now + 1) % (1 << 32) != 0), "its lower half must not say never"
        recency.advance(now + 1_000)
        assert recency.asked_at(77) == now + ((now + 1) % (1 << 32) != 0)
    assert recency.asked_at(78) == 0
    recency.touch(78)  # not held: nothing happens
    assert table.get(78) is None


def test_a_ghost_is_known_until_others_have_taken_its_bucket() -> None:
    recency = make()
    recency.left(99, 1, again=False)
    assert recency.came(99, 7, 1) == AGAIN | 1
    assert recency.came(98, 7, 1) == 7
    buckets = GHOSTS_MIN // WAYS | 1
    for number in range(1, WAYS + 1):
        recency.left(99 + number * buckets, 1, again=False)
    assert recency.came(99, 7, 1) == 7


def test_few_ghosts_are_lost_within_half_of_what_can_be_remembered() -> None:
    """A chain of chunks with a hole in it hits no farther than that: with one place for each ghost a third was lost."""
    recency, draw = make(8_192), random.Random(3)
    tags = [draw.getrandbits(64) for _ in range(4_096)]
    for tag in tags:
        recency.left(tag, 1, again=False)
    assert sum(recency.came(tag, 1, 1) == 1 for tag in tags) < len(tags) // 50
    strangers = [draw.getrandbits(64) for _ in range(4_096)]
    assert sum(recency.came(tag, 1, 1) != 1 for tag in strangers) < len(strangers) // 50


def test_a_family_of_an_engine_that_knows_no_time_is_not_taken_for_one_that_was_asked_again() -> None:
    assert make().came(5, (1 << 64) - 1, 1) == AGAIN - 1


def ages(uses: dict[int, int], begun: int) -> Ages:
    found = Ages()
    found.begun(begun)
    for age, objects in uses.items():
        found.used(age, objects)
    return found


@pytest.mark.parametrize(
    ("new", "again", "weighs_more"),
    [
        ({50: 900}, {50: 900}, None),  # all is used again in time: LRU
        ({50_000: 100}, {400: 900}, True),  # what is new comes back too late to be kept, what was used again soon
        ({10: 100}, {50_000: 900}, False),  # …and the other way about
    ],
)
def test_the_weight_favours_what_comes_back_while_it_is_kept(
    new: dict[int, int], again: dict[int, int], weighs_more: bool | None
) -> None:
    curves = [ages(uses, 1_000).curves(1_000) for uses in (new, again)]
    weight = best_weight(curves[0], curves[1], 600)
    assert (weight == 1.0) if weighs_more is None else (weight > 1.0) is weighs_more


def test_counts_fade_so_that_another_load_finds_its_own_weight() -> None:
    one = ages({400: 900}, 1_000)
    first = one.curves(1_000)
    second = one.curves(1_000)
    assert first.hits(EDGES[-1:])[0] == 900
    assert second.hits(EDGES[-1:])[0] == 450


def test_a_new_weight_once_in_a_turn() -> None:
    recency = make()
    objects = 2 * TURN_PUTS_MIN
    recency.adapt(objects)
    assert recency.weight == 1.0
    recency.weight = 3.0
    recency.advance(objects - 1)
    recency.adapt(objects)
    assert recency.weight == 3.0
    recency.advance(objects)
    recency.adapt(objects)
    assert recency.weight == 1.0, "nothing was counted"
