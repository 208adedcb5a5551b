"""The shared region: what is needed keeps its slots, what is not is found until they are wanted, a share is enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xkv_store.leases import LeaseRegion, Part, Placed
from xkv_store.ring import RankRegions, RingUse, SlotBudget, regions

SLOT = 262_144


def test_what_nobody_needs_is_found_until_its_slots_are_wanted() -> None:
    region = LeaseRegion(10, 4)
    first, second = region.place(Part(1, 0, 2)), region.place(Part(2, 0, 2))
    assert {*first.slots, *second.slots} == {10, 11, 12, 13}
    region.let_go(first)
    region.let_go(second)
    assert region.find(Part(1, 0, 2)) is first, "it lies where it lay"
    region.let_go(first)
    third = region.place(Part(3, 0, 1))
    assert region.find(Part(2, 0, 2)) is None, "the longest unneeded has gone, which a look at the first has made this"
    assert region.find(Part(1, 0, 2)) is first
    assert not {*third.slots} & {*first.slots}
    assert region.find(Part(1, 0, 1)) is None, "another part is another place"


def test_what_was_spoilt_is_found_no_more_and_its_slots_are_free_once_nobody_needs_them() -> None:
    region = LeaseRegion(0, 2)
    spoilt = region.place(Part(1, 0, 1))
    assert region.find(Part(1, 0, 1)) is spoilt
    region.spoil(spoilt)
    assert region.find(Part(1, 0, 1)) is None
    again = region.place(Part(1, 0, 1))
    assert again.slots != spoilt.slots, "two still need the spoilt one's"
    region.let_go(spoilt)
    region.let_go(spoilt)
    assert region.place(Part(2, 0, 1)).slots == spoilt.slots
    assert region.find(Part(1, 0, 1)) is again, "the spoilt one's end is not its"


@given(
    share=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(1, 4), st.booleans()), max_size=60),
)
def test_a_share_is_always_enough(share: int, steps: list[tuple[int, int, int, bool]]) -> None:
    """Three ranks hold what they like of their shares, for as long as they like: nobody meets a full region."""
    region = LeaseRegion(7, 3 * share)
    budgets = [SlotBudget(share) for _ in range(3)]
    held: list[list[Placed]] = [[], [], []]
    for rank, generation, fragments, spoils in steps:
        if fragments <= share and budgets[rank].take(fragments):
            part = Part(generation, 0, fragments)
            held[rank].append(region.find(part) or region.place(part))
        elif held[rank]:
            placed = held[rank].pop(0)
            if spoils:
                region.spoil(placed)
            region.let_go(placed)
            budgets[rank].give(len(placed.slots))
        needed = {placed for own in held for placed in own}
        slots = [slot for placed in needed for slot in placed.slots]
        assert len(slots) == len(set(slots)) == region.needed_slots, "a slot that is needed was given again"
        assert all(placed.needed_by == sum(own.count(placed) for own in held) for placed in needed)
        assert set(slots) <= set(range(7, 7 + 3 * share))


@given(
    slots=st.integers(16, 400), world=st.integers(1, 8), reserve=st.integers(0, 200), use=st.sampled_from(list(RingUse))
)
def test_the_ring_is_divided_without_overlap(slots: int, world: int, reserve: int, use: RingUse) -> None:
    plan = regions(
        ring_bytes=slots * SLOT, slot_bytes=SLOT, world_size=world, load_reserve_bytes=reserve * SLOT, use=use
    )
    stores = [slot for own in plan for slot in range(own.first, own.first + own.store_slots)]
    loads = [slot for own in plan for slot in range(own.load_first, own.load_first + own.load_slots)]
    if use is not RingUse.OWN:
        assert {(own.load_first, own.load_slots) for own in plan} == {(plan[0].load_first, plan[0].load_slots)}
        assert sum(own.lease_slots for own in plan) == plan[0].load_slots, "the shares are the region"
        loads = loads[: plan[0].load_slots]
    assert len({*stores, *loads}) == len(stores) + len(loads) == slots // world * world
    assert max(*stores, *loads) < slots
    writers = [own for own in plan if own.store_slots]
    assert len(writers) == (1 if use is RingUse.REPLICATED else world)
    assert plan[0] in writers


def test_one_writer_has_the_store_slots_of_all() -> None:
    plan = regions(
        ring_bytes=80 * SLOT, slot_bytes=SLOT, world_size=8, load_reserve_bytes=16 * SLOT, use=RingUse.REPLICATED
    )
    assert plan[0] == RankRegions(first=0, store_slots=64, load_first=64, load_slots=16, lease_slots=2)
    assert {own.store_slots for own in plan[1:]} == {0}


def test_a_budget_is_bounded_and_given_back_once() -> None:
    budget = SlotBudget(3)
    assert budget.take(2)
    assert not budget.take(2)
    assert budget.free == 1
    budget.give(2)
    with pytest.raises(AssertionError, match="given back twice"):
        budget.give(1)
