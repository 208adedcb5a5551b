"""What has left is known for a while, with its age and uses; what left together is forgotten together."""

import random

import pytest

from xkv_store.ghosts import PLACES_MIN, USES_MAX, Ghosts


def tags(count: int, seed: int = 3) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(64) for _ in range(count)]


@pytest.mark.parametrize("slots", [1, 100_000, 10_000_000])
def test_a_ghost_says_how_old_and_how_often_used_it_was(slots: int) -> None:
    ghosts = Ghosts(slots)
    unit = max(1, slots * 16 >> 17) + 1  # ages are rounded so
    for number, (tag, age, uses) in enumerate(zip(tags(100), range(0, 5_000, 50), [*range(10)] * 10, strict=True)):
        now = (1 << 40) + 7 * number
        ghosts.add(tag, age, uses, now)
        found = ghosts.find(tag, now + 1_000)
        assert found is not None
        assert abs(found[0] - age - 1_000) <= unit
        assert found[1] == min(uses, USES_MAX)


def test_one_that_leaves_once_more_is_known_as_it_was_last() -> None:
    ghosts = Ghosts(1)
    for age in range(2 * PLACES_MIN):  # and has one place
        ghosts.add(99, age, 1, 5_000)
        assert ghosts.find(99, 5_000) == (age, 1)


def test_an_age_beyond_what_can_be_told_apart_is_still_a_great_one() -> None:
    ghosts = Ghosts(1)
    ghosts.add(99, 1 << 50, 0, 1 << 60)
    found = ghosts.find(99, 1 << 60)
    assert found is not None
    assert found[0] > 10_000


def test_strangers_are_seldom_taken_for_ghosts() -> None:
    ghosts = Ghosts(PLACES_MIN * 8)
    for tag in tags(PLACES_MIN * 8):
        ghosts.add(tag, 1, 0, 1)
    strangers = tags(20_000, seed=4)
    assert sum(ghosts.find(tag, 1) is not None for tag in strangers) < len(strangers) // 200


def test_what_left_together_is_forgotten_together_and_not_before_a_third_of_the_places_is_used() -> None:
    """A chain of chunks with a hole in it hits no farther than that."""
    slots, chain = PLACES_MIN * 8, 20
    ghosts, gone = Ghosts(slots), tags(4 * slots)
    for tag in gone:
        ghosts.add(tag, 1, 0, 1)
    known = [sum(ghosts.find(tag, 1) is not None for tag in gone[at : at + chain]) for at in range(0, len(gone), chain)]
    assert sum(2 < of_chain < chain - 2 for of_chain in known) <= 2, "but where a table ends, and what strangers do"
    assert sum(of_chain >= chain - 2 for of_chain in known) >= slots // 3 // chain - 2


def test_memory_is_four_bytes_a_slot() -> None:
    ghosts = Ghosts(1_000_000)
    for tag in tags(2_000):
        ghosts.add(tag, 1, 0, 1)
    assert ghosts.bytes <= 4 * 1_000_000 + 8
