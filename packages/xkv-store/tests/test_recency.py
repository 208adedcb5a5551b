"""What recency says: ages, uses, kinds, and the weights that hits would have been most with."""

import pytest

from xkv_store.geometry import GENERATION_BELIEVED_MAX
from xkv_store.ghosts import USES_MAX
from xkv_store.layout import AGAIN, OFTEN
from xkv_store.recency import (
    EDGES,
    FAMILIES_AT_MAX,
    FAMILIES_MAX,
    LRU,
    SLIGHT,
    SPELL_SHARE,
    TURN_PUTS_MIN,
    TURN_SHARE,
    WHEN_BITS,
    Ages,
    Recency,
    Weights,
    best_weights,
    bucket,
    kind_of,
)
from xkv_store.table import TableWriter


def make(slots: int = 1_024) -> tuple[Recency, TableWriter]:
    table = TableWriter.create(4 * slots, bytes(16), bytes(16))
    recency = Recency(slots, table)
    recency.advance(1)
    return recency, table


def test_every_age_lies_between_the_edges_of_its_bucket() -> None:
    for age in [*range(300), 12_345, 1 << 20, (1 << 32) - 1]:
        assert EDGES[bucket(age)] <= age < EDGES[bucket(age) + 1]
    assert bucket(1 << 63) == len(EDGES) - 2


def test_asked_is_no_earlier_than_the_put_before_it() -> None:
    turn = 1 << WHEN_BITS
    recency, table = make(16)
    for uses, now in enumerate((5, turn - 1, turn, (1 << 40) + 3), 1):
        recency.advance(now)
        table.put(77, now, 1, 3)
        recency.touch(77)
        assert recency.asked(77) == (now + 1, uses)
        recency.advance(now + 1_000)
        assert recency.asked(77) == (now + 1, uses)
    assert recency.asked(78) == (0, 0)
    recency.touch(78)  # not held: nothing happens
    assert table.get(78) is None


def test_a_lookup_its_load_and_what_each_rank_asks_are_one_use() -> None:
    """What is loaded by eight ranks would have been used often with its first hit."""
    recency, table = make()
    spell = 10
    recency.adapt(spell * SPELL_SHARE)  # so many objects
    recency.advance(spell)
    table.put(77, spell, 1, 3)
    recency.touch(77)
    assert recency.asked(77) == (0, 0), "it has just been put"
    for use in range(1, USES_MAX + 3):
        recency.advance((use + 1) * spell)
        for _ in range(9):
            recency.touch(77)
            assert recency.asked(77) == (recency.now + 1, min(use, USES_MAX)), "the last of them says when"
            recency.advance(recency.now + 1)


def test_what_is_asked_for_all_the_time_is_used_often() -> None:
    recency, table = make()
    recency.adapt(100 * SPELL_SHARE)
    table.put(77, 1, 1, 3)
    for now in range(1, 1_000):
        recency.advance(now)
        recency.touch(77)
    assert recency.asked(77) == (1_000, USES_MAX)


def test_a_chunk_that_comes_again_is_of_the_kind_that_its_uses_make_it() -> None:
    recency, table = make()
    recency.left(99, 1, 0)
    recency.left(98, 1, USES_MAX - 1)
    families = [recency.came(tag, 7, 5) for tag in (99, 98, 97)]
    assert families == [AGAIN | 5, OFTEN | 5, 5]
    assert [kind_of(family) for family in families] == [1, 2, 0]
    for tag, family in zip((99, 98, 97), families, strict=True):
        table.put(tag, 5, 1, 1)
        recency.confirmed(tag, family)
    assert [recency.asked(tag) for tag in (99, 98, 97)] == [(5, 1), (5, USES_MAX), (0, 0)]


def test_one_that_came_again_is_used_though_its_ghost_is_forgotten_before_its_commit() -> None:
    recency, table = make()
    table.put(99, 5, 1, 1)
    table.put(98, 5, 1, 1)
    recency.advance(5)
    recency.confirmed(99, AGAIN | 5)
    recency.confirmed(98, OFTEN | 5)
    assert [recency.asked(tag) for tag in (99, 98)] == [(5, 1), (5, USES_MAX)]


def test_what_comes_of_one_family_is_filed_at_one_time_while_the_family_is_known() -> None:
    recency, _ = make()
    assert [recency.came(generation, 7, generation) for generation in (11, 12, 13)] == [11, 11, 11]
    assert [recency.filed(11, generation) for generation in (11, 12, 13)] == [11, 11, 11]
    assert recency.filed(AGAIN | 3, 13) == recency.filed(OFTEN | 3, 13) == 3
    for family in range(8, 8 + FAMILIES_MAX):
        recency.came(1_000 + family, family, 20)
    assert recency.came(5, 7, 21) == 21
    assert recency.filed(11, 13) == 11


def test_a_families_number_is_the_arrival_of_its_first_chunk_whatever_the_engines_say() -> None:
    """One that was behind came under a clock that had been set; numbers beyond counting are as good as others."""
    recency, _ = make()
    sent = [(1 << 64) - 1, 9, 1 << 63, 8, 0, (1 << 64) - 1, 9]
    assert [recency.came(number, family, number) for number, family in enumerate(sent, 1)] == [1, 2, 3, 4, 5, 1, 2]


@pytest.mark.parametrize("newest", [0, 1, 1_700_000_000_000_000, FAMILIES_AT_MAX])
def test_families_go_on_behind_the_newest_that_the_card_has(newest: int) -> None:
    """An earlier version's were engines' microseconds. Each life begins with a higher generation than any before."""
    _, table = make()
    generation = 5
    for _ in range(3):
        recency = Recency(1_024, table, generation, newest)
        families = [recency.came(number, number, generation + number) for number in (1, 2, 3)]
        assert newest < families[0] < families[1] < families[2] < AGAIN
        assert [recency.filed(family, generation + 9) for family in families] == [generation + n for n in (1, 2, 3)]
        newest, generation = families[-1], generation + (1 << 20)


def test_when_what_an_earlier_version_filed_came_is_taken_from_its_own_generation() -> None:
    _, table = make()
    newest = 1_700_000_000_000_000
    recency = Recency(1_024, table, 100, newest)
    assert [recency.filed(newest - 3_600_000_000, 7), recency.filed(newest, 100)] == [7, 100]


def test_a_family_beyond_all_clocks_leaves_no_new_one_beyond_counting() -> None:
    """Only damage, or an engine that knew no time, has left such on a card: later ones are in order all the same."""
    _, table = make()
    lives = [Recency(1_024, table, generation, AGAIN - 1) for generation in (1, 1 << 20, GENERATION_BELIEVED_MAX)]
    families = [one.came(1, 1, one.now + 1) for one in lives]
    assert families == sorted(set(families))
    assert families[-1] < AGAIN


def ages(uses: dict[int, int], begun: int) -> Ages:
    found = Ages()
    found.begun(begun)
    for age, objects in uses.items():
        found.used(age, objects)
    return found


NONE: dict[int, int] = {}


@pytest.mark.parametrize(
    ("new", "again", "often", "expected"),
    [
        ({50: 900}, {50: 900}, NONE, SLIGHT),  # all is used again in time: LRU, as far as anything is known
        ({50: 500, 2_000: 400}, {50: 500, 2_000: 400}, NONE, LRU),  # half comes back too late, of either kind
        ({50_000: 100}, {400: 900}, NONE, "again"),  # what is new comes too late to be kept, what was used again soon
        ({10: 100}, {50_000: 900}, NONE, LRU),  # …and the other way about
        ({50_000: 100}, {50_000: 100}, {400: 900}, "often"),
        (NONE, NONE, NONE, LRU),
    ],
)
def test_the_weights_favour_what_comes_back_while_it_is_kept(
    new: dict[int, int], again: dict[int, int], often: dict[int, int], expected: Weights | str
) -> None:
    counted = [ages(uses, 1_000 if uses else 0).curve(1_000) for uses in (new, again, often)]
    weights = best_weights(counted, 600)
    if isinstance(expected, Weights):
        assert weights == expected
    else:
        assert weights.new <= weights.again <= weights.often
        assert weights.often > 1
        assert (weights.again > 1) is (expected == "again")


def test_counts_fade_so_that_another_load_finds_its_own_weights() -> None:
    one = ages({400: 900}, 1_000)
    hits = [one.curve(1_000).hits[-1] for _ in range(1 + TURN_SHARE)]
    assert hits[0] == 900
    assert 0.45 < hits[-1] / hits[0] < 0.55, "half of them are gone after a turn"


def test_new_weights_after_each_part_of_a_turn() -> None:
    recency, _ = make()
    objects = 2 * TURN_PUTS_MIN * TURN_SHARE
    recency.adapt(objects)
    assert recency.weights == LRU
    recency.weights = SLIGHT
    recency.advance(2 * TURN_PUTS_MIN - 1)
    recency.adapt(objects)
    assert recency.weights == SLIGHT
    recency.advance(2 * TURN_PUTS_MIN)
    recency.adapt(objects)
    assert recency.weights == LRU, "nothing was counted"


def test_a_small_card_finds_its_weights_within_its_first_thousands_of_puts() -> None:
    recency, _ = make(64)
    recency.weights = SLIGHT
    recency.advance(TURN_PUTS_MIN)
    recency.adapt(8)
    assert recency.weights == LRU
