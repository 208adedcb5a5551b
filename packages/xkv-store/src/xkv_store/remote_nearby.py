"""What of the card's objects lies in the remote's memory: bytes that are there need not come from the medium.

Owns: copying an object that was just written to the card, for its way to the remote, and reading one that has just come
from there. Must not know: queues, calls, who asks. `wrote` and `read` are called on threads of the gateway's pool.

What is read here is proved where it arrives, as what comes from the medium is.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from .errors import CorruptObject
from .fragment import filled
from .native import copied

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .card import Card, GetPlan, PutPlan
    from .remote_memory import Place, RemoteMemory


class Nearby:
    """Of one gateway."""

    def __init__(self, card: Card, memory: RemoteMemory, is_wanted: Callable[[], bool]) -> None:
        """`is_wanted`: whether what is written now may go to the remote soon."""
        self._card = card
        self._memory = memory
        self._is_wanted = is_wanted
        self._lock = threading.Lock()
        self._written: dict[int, Place] = {}  # by generation
        self.counters: Counter[str] = Counter()

    def wrote(self, plan: PutPlan, slots: Sequence[memoryview]) -> None:
        """These slots, sealed, are on the card, and its index will be told. They are the caller's until this returns.

        An engine that writes to them meanwhile spoils a copy: whoever fetches it from the remote finds that.
        """
        place = self._memory.take(plan.fragments, is_store=True) if self._is_wanted() else None
        if place is None:
            return
        geometry = self._card.geometry
        into = filled(self._memory.views(place, plan.fragments), plan.length, geometry, 0)
        copied(filled(slots, plan.length, geometry, 0), into, 0, [0] * plan.fragments)
        with self._lock:
            self._written[plan.generation] = place

    def take_written(self, plan: PutPlan) -> Place | None:
        """Where the copy of this object lies, if there is one; the caller's from now on."""
        with self._lock:
            return self._written.pop(plan.generation, None)

    def read(self, plan: GetPlan, slots: Sequence[memoryview], first_fragment: int) -> bool:
        """Bring these fragments and prove them in `slots`; False where the medium has to be asked."""
        with self._memory.kept(plan.generation) as place:
            if place is None:
                return False
            there = self._memory.views(place, plan.fragments)
            try:
                self._card.copy(plan, there[first_fragment : first_fragment + len(slots)], slots, first_fragment)
            except CorruptObject:
                self._memory.forget(plan.generation)  # the medium says what is true
                return False
        with self._lock:
            self.counters["remote_nearby_reads"] += 1
        return True
