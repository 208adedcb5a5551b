"""The region of a ring that an engine's ranks share: what lies where, and who needs it.

Owns: which slots hold which fragments, how many need them, which are used again first. Books only.
Must not know: sessions, messages, I/O.

What nobody needs stays where it is until its slots are wanted, the longest unneeded first. Whoever asks keeps to the
share of `ring.regions`: then there is always room, whatever others hold and however long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .ring import SlotRegion

if TYPE_CHECKING:
    from .plans import GetPlan


class Part(NamedTuple):
    """Some fragments of one object. The generation is of one key alone, and never given twice by a card."""

    generation: int
    first_fragment: int
    fragments: int


@dataclass(slots=True, eq=False)
class Placed:
    """A part's place in the region. `needed_by`: how many have it, or wait for it.

    `length`: of its object as it came, where that is not what the card says.
    """

    part: Part
    slots: tuple[int, ...]
    needed_by: int = 1
    length: int = 0

    def as_it_came(self, plan: GetPlan) -> GetPlan:
        """The plan of whoever has found it here."""
        return plan._replace(length=self.length) if self.length else plan


class LeaseRegion:
    """The shared region of one engine. The event loop's thread alone."""

    def __init__(self, first: int, count: int) -> None:
        self._free = SlotRegion(first, count)
        self._placed: dict[Part, Placed] = {}
        self._unneeded: dict[Part, Placed] = {}  # in the order in which they came to be so

    @property
    def needed_slots(self) -> int:
        """Slots that somebody has or waits for."""
        return self._free.count - self._free.free - sum(len(placed.slots) for placed in self._unneeded.values())

    def find(self, part: Part) -> Placed | None:
        """The place of a part that is here or on its way, needed by one more from now on; None where it is not."""
        placed = self._placed.get(part)
        if placed is not None:
            placed.needed_by += 1
            self._unneeded.pop(part, None)
        return placed

    def place(self, part: Part) -> Placed:
        """Slots for a part that `find` has not found; needed by one."""
        assert part not in self._placed
        slots = self._free.take(part.fragments)
        while slots is None:
            assert self._unneeded, "nobody holds more than his share, so there is room"
            self._reuse(next(iter(self._unneeded.values())))
            slots = self._free.take(part.fragments)
        placed = self._placed[part] = Placed(part, tuple(slots))
        return placed

    def let_go(self, placed: Placed) -> None:
        """Needed by one less. What nobody needs can still be found, unless it was spoilt."""
        assert placed.needed_by > 0
        placed.needed_by -= 1
        if placed.needed_by:
            return
        if self._placed.get(placed.part) is placed:
            self._unneeded[placed.part] = placed
        else:
            self._free.give(placed.slots)

    def spoil(self, placed: Placed) -> None:
        """The part is not there: it is found no more, and its slots are free once nobody needs them."""
        if self._placed.get(placed.part) is placed:
            del self._placed[placed.part]

    def _reuse(self, placed: Placed) -> None:
        del self._unneeded[placed.part]
        del self._placed[placed.part]
        self._free.give(placed.slots)
