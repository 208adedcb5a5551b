"""Limbo: readable for the grace, not reusable before everything lets go."""

import pytest

from xkv_store.layout import Extent, Record
from xkv_store.limbo import Ghost, Limbo


def ghost(generation: int, *, expires_ns: int = 100, readable: bool = True, settled: bool = True) -> Ghost:
    record = Record(generation, 1, 0, 0, (Extent(0, generation, 2),))
    return Ghost(b"key", record, 2, expires_ns, readable, settled)


def released(limbo: Limbo, now_ns: int, pinned: frozenset[int] = frozenset()) -> list[int]:
    return [ghost.record.generation for ghost in limbo.release(now_ns, pinned)]


def test_readable_until_the_grace_ends_then_released() -> None:
    limbo = Limbo()
    limbo.add(ghost(1))
    assert limbo.find(b"key", 99) is not None
    assert limbo.find(b"key", 100) is None
    assert limbo.find(b"other", 0) is None
    assert released(limbo, 99) == []
    assert (limbo.slots, limbo.next_end_ns()) == (2, 100)
    assert released(limbo, 100) == [1]
    assert (limbo.slots, len(limbo), limbo.next_end_ns()) == (0, 0, None)


@pytest.mark.parametrize("readable", [True, False])
def test_held_while_pinned_or_unsettled(readable: bool) -> None:
    limbo = Limbo()
    one = ghost(1, readable=readable, settled=False)
    limbo.add(one)
    assert released(limbo, 1_000) == []
    one.settled = True
    assert released(limbo, 1_000, frozenset({1})) == []
    assert released(limbo, 1_000) == [1]


def test_a_pinned_one_does_not_hold_up_those_behind_it() -> None:
    limbo = Limbo()
    limbo.add(ghost(1))
    limbo.add(ghost(2))
    assert released(limbo, 100, frozenset({1})) == [2]


def test_the_newest_of_a_key_is_found() -> None:
    limbo = Limbo()
    limbo.add(ghost(1, expires_ns=100))
    limbo.add(ghost(2, expires_ns=200))
    assert (limbo.find(b"key", 50) or ghost(9).record).generation == 2
    assert released(limbo, 150) == [1]
    assert (limbo.find(b"key", 150) or ghost(9).record).generation == 2


def test_the_condemned_is_unreadable_and_needs_no_grace() -> None:
    limbo = Limbo()
    limbo.add(ghost(1))
    limbo.condemn(b"another", 1)
    limbo.condemn(b"key", 2)
    assert limbo.find(b"key", 0) is not None
    limbo.condemn(b"key", 1)
    assert limbo.find(b"key", 0) is None
    assert released(limbo, 0) == [1]
    assert limbo.slots == 0


def test_a_grace_begins_with_a_clock_that_was_read_after_the_object_left() -> None:
    """The gateway reads its clock once a round, and evicts later in it: that time was missing at the end."""
    limbo = Limbo()
    one = ghost(1)
    one.left_ns = 0
    limbo.add(one)
    assert released(limbo, 0) == []
    assert limbo.find(b"key", 150) is not None
    assert released(limbo, 70) == []
    assert limbo.find(b"key", 169) is not None
    assert limbo.find(b"key", 170) is None
    assert released(limbo, 169) == []
    assert released(limbo, 170) == [1]
