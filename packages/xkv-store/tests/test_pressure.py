"""The reserve: within its shares, as large as the stream asks for, and no larger for absurd demands."""

import pytest

from xkv_store.pressure import Pressure

GRACE_NS = 1_000_000_000


def test_a_quiet_card_keeps_the_least_reserve() -> None:
    pressure = Pressure(6_400, GRACE_NS)
    assert pressure.lacking_slots(free=0, on_their_way=0) == 100
    assert pressure.lacking_slots(free=60, on_their_way=40) == 0
    assert pressure.lacking_slots(free=6_400, on_their_way=0) < 0


def test_a_stream_needs_a_grace_times_puts_and_a_margin() -> None:
    pressure = Pressure(6_400, GRACE_NS)
    pressure.advance(GRACE_NS)
    pressure.put(400)
    assert pressure.lacking_slots(free=0, on_their_way=0) == 600
    pressure.put(4_000)
    assert pressure.lacking_slots(free=0, on_their_way=0) == 800


def test_a_stream_that_ends_is_forgotten_little_by_little() -> None:
    """One that pauses for a moment, as on a busy machine, finds its reserve when it goes on."""
    pressure = Pressure(6_400, GRACE_NS)
    pressure.advance(GRACE_NS)
    pressure.put(400)
    reserves = []
    for period in range(2, 42):
        pressure.advance(period * GRACE_NS)
        reserves.append(pressure.lacking_slots(free=0, on_their_way=0))
    assert reserves[:2] == [600, 581]
    assert 150 < reserves[-1] < 200
    pressure.advance(1_000 * GRACE_NS)
    assert pressure.lacking_slots(free=0, on_their_way=0) == 100


def test_a_demand_lasts_until_it_is_met() -> None:
    pressure = Pressure(64, GRACE_NS)
    pressure.refused(10, one_in_the_way=False)
    assert pressure.lacking_slots(free=3, on_their_way=2) == 5
    assert pressure.lacking_slots(free=3, on_their_way=7) == 0
    assert pressure.lacking_slots(free=10, on_their_way=0) < 0
    assert pressure.lacking_slots(free=0, on_their_way=0) == 1


def test_more_than_half_the_card_is_no_demand() -> None:
    pressure = Pressure(64, GRACE_NS)
    pressure.refused(33, one_in_the_way=False)
    assert pressure.lacking_slots(free=0, on_their_way=0) == 1


@pytest.mark.parametrize("slots", [1, 2, 3, 64])
def test_where_one_object_is_all_that_fits_it_makes_way(slots: int) -> None:
    pressure = Pressure(slots, GRACE_NS)
    pressure.refused(slots, one_in_the_way=False)
    assert pressure.lacking_slots(free=0, on_their_way=0) == slots // 64
    pressure.refused(slots + 1, one_in_the_way=True)
    assert pressure.lacking_slots(free=0, on_their_way=0) == slots // 64
    pressure.refused(slots, one_in_the_way=True)
    assert pressure.lacking_slots(free=0, on_their_way=0) == slots
    assert pressure.lacking_slots(free=0, on_their_way=slots) == 0
    assert pressure.lacking_slots(free=slots, on_their_way=0) <= 0
    assert pressure.lacking_slots(free=0, on_their_way=0) == slots // 64, "it is met"
