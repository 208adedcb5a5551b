"""Which slots of one database are free.

Owns the free runs of one database, and taking and giving them. Pure: no files, no clock, no objects. Must not
know what a slot holds.

Runs are kept by start and by end (so that giving coalesces in constant time) and in classes by the power of
two below their length (so that taking looks at a class in which every run is long enough).
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SAME_CLASS_TRIES_MAX = 8  # runs looked at in the class that may or may not be long enough


class Run(NamedTuple):
    """Neighbouring slots of one database."""

    first: int
    slots: int


class SlotAllocator:
    """The free slots of one database of `slots` slots. All are free at first."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free = 0
        self._length_at: dict[int, int] = {}  # first slot of a free run -> its slots
        self._start_before: dict[int, int] = {}  # slot after a free run -> its first slot
        self._classes: list[dict[int, None]] = [{} for _ in range(slots.bit_length() + 1)]
        self._classes_in_use = 0  # bit c: class c is not empty
        if slots:
            self._add(0, slots)

    def take(self, slots: int) -> list[Run] | None:
        """`slots` slots, in one run where there is one, else in the longest; None when too few are free."""
        if slots < 1 or slots > self.free:
            return None
        run = self._find(slots)
        if run is not None:
            self._take_from(run, slots)
            return [Run(run, slots)]
        taken = []
        while slots:
            run = next(iter(self._classes[self._classes_in_use.bit_length() - 1]))
            part = min(slots, self._length_at[run])
            self._take_from(run, part)
            taken.append(Run(run, part))
            slots -= part
        return taken

    def give(self, run: Run) -> None:
        """Make the slots of `run` free again; they must all be taken."""
        first, slots = run
        end = first + slots
        assert 0 <= first < end <= self.slots
        assert first not in self._length_at, "given twice"
        after = self._length_at.get(end)
        if after is not None:
            self._remove(end, after)
            end += after
        before = self._start_before.get(first)
        if before is not None:
            self._remove(before, first - before)
            first = before
        self._add(first, end - first)

    def free_runs(self) -> list[Run]:
        """All free runs, ascending."""
        return [Run(first, self._length_at[first]) for first in sorted(self._length_at)]

    @classmethod
    def with_used(cls, slots: int, used: npt.NDArray[np.bool_]) -> "SlotAllocator":
        """An allocator whose slot i is taken where `used[i]`; for recovery, without a step per slot."""
        assert len(used) == slots
        allocator = cls(0)
        allocator.slots = slots
        allocator._classes = [{} for _ in range(slots.bit_length() + 1)]
        edges = np.flatnonzero(np.diff(np.concatenate(([True], used, [True])).astype(np.int8)))
        for first, end in edges.reshape(-1, 2).tolist():
            allocator._add(first, end - first)
        return allocator

    def _find(self, slots: int) -> int | None:
        own_class = slots.bit_length() - 1
        if slots == 1 << own_class:  # every run of this class is long enough
            longer = self._classes_in_use >> own_class << own_class
        else:
            for tried, first in enumerate(self._classes[own_class]):
                if self._length_at[first] >= slots:
                    return first
                if tried == SAME_CLASS_TRIES_MAX:
                    break
            longer = self._classes_in_use >> (own_class + 1) << (own_class + 1)
        if not longer:
            return None
        lowest = (longer & -longer).bit_length() - 1
        return next(iter(self._classes[lowest]))

    def _take_from(self, first: int, slots: int) -> None:
        length = self._length_at[first]
        self._remove(first, length)
        if length > slots:
            self._add(first + slots, length - slots)

    def _add(self, first: int, slots: int) -> None:
        self._length_at[first] = slots
        self._start_before[first + slots] = first
        own_class = slots.bit_length() - 1
        self._classes[own_class][first] = None
        self._classes_in_use |= 1 << own_class
        self.free += slots

    def _remove(self, first: int, slots: int) -> None:
        del self._length_at[first]
        del self._start_before[first + slots]
        own_class = slots.bit_length() - 1
        members = self._classes[own_class]
        del members[first]
        if not members:
            self._classes_in_use &= ~(1 << own_class)
        self.free -= slots


def cut(fragments: int, databases: int, first: int, part_slots_min: int) -> list[tuple[int, int]]:
    """How an object is spread: (database, slots) parts, in the order of its fragments.

    The rule: contiguous parts of nearly equal size, at least `part_slots_min` slots each, over as many
    databases as that allows, beginning with database `first`; a small object is one part.
    """
    parts = max(1, min(databases, fragments // part_slots_min))
    base, longer = divmod(fragments, parts)
    return [((first + part) % databases, base + (part < longer)) for part in range(parts)]


def place(
    allocators: list[SlotAllocator], fragments: int, first: int, *, part_slots_min: int, extents_max: int
) -> list[tuple[int, Run]] | None:
    """Take slots for an object by the rule of `cut`; what a full database lacks comes from the others.

    None, with nothing taken, when too few slots are free or they lie in more than `extents_max` runs.
    """
    if fragments > sum([allocator.free for allocator in allocators]):
        return None
    is_one_part = fragments < 2 * part_slots_min
    if is_one_part and (runs := allocators[first].take(fragments)) is not None:
        taken = [(first, run) for run in runs]
    else:
        taken = _spread(allocators, cut(fragments, len(allocators), first, part_slots_min))
    if len(taken) > extents_max:
        give_all(allocators, taken)
        return None
    return taken


def _spread(allocators: list[SlotAllocator], parts: list[tuple[int, int]]) -> list[tuple[int, Run]]:
    taken: list[tuple[int, Run]] = []
    for database, slots in parts:
        missing = slots - _take(allocators, database, slots, taken)
        if missing:
            for other in sorted(range(len(allocators)), key=lambda one: -allocators[one].free):
                missing -= _take(allocators, other, missing, taken)
    return taken


def _take(allocators: list[SlotAllocator], database: int, slots: int, taken: list[tuple[int, Run]]) -> int:
    """Take up to `slots` slots of one database; how many it had."""
    part = min(slots, allocators[database].free)
    taken.extend((database, run) for run in allocators[database].take(part) or ())
    return part


def give_all(allocators: list[SlotAllocator], runs: Iterable[tuple[int, Run]]) -> None:
    """Give every (database, run) back."""
    for database, run in runs:
        allocators[database].give(run)
