"""Free slots: every slot has one owner, neighbours coalesce, one run where there is one."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from xkv_store.extents import Run, SlotAllocator, cut, give_all, place


class AllocatorMachine(RuleBasedStateMachine):
    """Against a plain set of free slots."""

    @initialize(slots=st.integers(0, 200))
    def make(self, slots: int) -> None:
        self.allocator = SlotAllocator(slots)
        self.free = set(range(slots))
        self.taken: list[Run] = []

    @rule(slots=st.integers(-1, 220))
    def take(self, slots: int) -> None:
        runs = self.allocator.take(slots)
        assert (runs is None) == (slots < 1 or slots > len(self.free))
        for run in runs or ():
            mine = set(range(run.first, run.first + run.slots))
            assert mine <= self.free
            self.free -= mine
            self.taken.append(run)
        assert sum(run.slots for run in runs or ()) == (slots if runs else 0)

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        if self.taken:
            run = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
            self.allocator.give(run)
            self.free |= set(range(run.first, run.first + run.slots))

    @invariant()
    def runs_are_the_free_slots_and_never_touch(self) -> None:
        """Runs that touch were not coalesced: the card would seem more and more fragmented."""
        runs = self.allocator.free_runs()
        assert {slot for run in runs for slot in range(run.first, run.first + run.slots)} == self.free
        assert all(one.first + one.slots < two.first for one, two in pairwise(runs))
        assert self.allocator.free == len(self.free)


TestAllocatorMachine = AllocatorMachine.TestCase


@given(st.lists(st.booleans(), max_size=200))
def test_bulk_marking_is_what_single_takes_would_leave(used: list[bool]) -> None:
    allocator = SlotAllocator.with_used(len(used), np.array(used, np.bool_))
    free = {slot for run in allocator.free_runs() for slot in range(run.first, run.first + run.slots)}
    assert free == {slot for slot, taken in enumerate(used) if not taken}
    assert allocator.free == len(free)
    for slot, taken in enumerate(used):
        if taken:
            allocator.give(Run(slot, 1))
    assert allocator.free_runs() == ([Run(0, len(used))] if used else [])


def test_one_run_is_preferred_where_a_small_one_comes_first() -> None:
    allocator = SlotAllocator(100)
    runs = [allocator.take(10) for _ in range(10)]
    for index in (1, 4, 5):
        for run in runs[index] or ():
            allocator.give(run)
    assert allocator.take(16) == [Run(40, 16)]
    assert allocator.take(12) == [Run(10, 10), Run(56, 2)]


@given(st.integers(1, 500), st.integers(1, 8), st.data(), st.integers(1, 32))
def test_the_cut_is_even_contiguous_and_complete(
    fragments: int, databases: int, data: st.DataObject, least: int
) -> None:
    first = data.draw(st.integers(0, databases - 1))
    parts = cut(fragments, databases, first, least)
    sizes = [slots for _, slots in parts]
    assert sum(sizes) == fragments
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == 1 or min(sizes) >= least
    assert parts[0][0] == first
    assert len({database for database, _ in parts}) == len(parts)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 120), st.data())
def test_a_full_database_leaves_its_part_to_others(sizes: list[int], fragments: int, data: st.DataObject) -> None:
    allocators = [SlotAllocator(size) for size in sizes]
    first = data.draw(st.integers(0, len(sizes) - 1))
    runs = place(allocators, fragments, first, part_slots_min=4, extents_max=100)
    assert (runs is not None) == (fragments <= sum(sizes))
    assert sum(run.slots for _, run in runs or ()) == (fragments if runs else 0)
    give_all(allocators, runs or ())
    assert [allocator.free for allocator in allocators] == sizes


def test_too_many_runs_are_refused_with_nothing_taken() -> None:
    used = np.arange(40) % 2 == 0
    allocators = [SlotAllocator.with_used(40, used)]
    assert place(allocators, 10, 0, part_slots_min=4, extents_max=9) is None
    assert allocators[0].free == 20
    assert len(place(allocators, 10, 0, part_slots_min=4, extents_max=10) or ()) == 10
