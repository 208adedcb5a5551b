"""A queue in which everybody gets his turn, however much others have put in.

Owns: the order: whoever has had least goes first, each owner's own in the order in which it came.
Must not know: what is queued, threads (its user holds a lock). Start-time fair queueing (Goyal, Vin, Cheng 1996), with
one difference: what somebody has had is forgotten once the others have had as much.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

FORGET_FROM: Final = 1_024  # owners that are remembered before those of no account are forgotten


class Queued(Protocol):
    """What can be queued: `owner` must not keep anything alive; `cost` is more than 0."""

    @property
    def owner(self) -> Hashable:
        """Whose it is."""

    @property
    def cost(self) -> int:
        """How much of the shared good it takes."""


Item = TypeVar("Item", bound=Queued)


class FairQueue(Generic[Item]):
    """One queue over all owners."""

    def __init__(self) -> None:
        self._of: dict[Hashable, deque[Item]] = {}
        self._turns: list[tuple[int, int, Hashable]] = []  # a heap: when an owner's turn is, and who came first
        self._waiting: set[Hashable] = set()  # those in it
        self._had: dict[Hashable, int] = {}  # when an owner's next turn is at the earliest
        self._now = 0
        self._sequence = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count(self, owner: Hashable) -> int:
        """How much of this owner's is queued."""
        return len(self._of.get(owner, ()))

    def append(self, item: Item) -> None:
        """The last of its owner's."""
        self._of.setdefault(item.owner, deque()).append(item)
        self._count += 1
        if item.owner not in self._waiting:
            self._wait(item.owner)

    def popleft(self) -> Item:
        """The next one; there must be one."""
        while True:
            turn, _, owner = heapq.heappop(self._turns)
            self._waiting.remove(owner)
            own = self._of.get(owner)
            if own:
                break  # else all of it was taken out
        item = own.popleft()
        self._count -= 1
        self._now = turn
        self._had[owner] = turn + item.cost
        if own:
            self._wait(owner)
        else:
            del self._of[owner]
            self._forget()
        return item

    def _forget(self) -> None:
        """What owners have had matters to those who wait, and as long as these have had less."""
        if not self._count:
            self._had.clear()
        elif len(self._had) >= FORGET_FROM:
            self._had = {owner: at for owner, at in self._had.items() if at > self._now}

    def remove(self, item: Item) -> bool:
        """Take this one out; whether it was queued."""
        own = self._of.get(item.owner, deque())
        try:
            own.remove(item)
        except ValueError:
            return False
        if not own:
            del self._of[item.owner]
        self._count -= 1
        return True

    def take_out(self, wanted: Callable[[Item], bool]) -> list[Item]:
        """Take out what `wanted` names, whoever's it is."""
        taken: list[Item] = []
        for owner, own in list(self._of.items()):
            mine = [item for item in own if wanted(item)]
            if mine:
                kept = [item for item in own if not wanted(item)]
                taken += mine
                if kept:
                    self._of[owner] = deque(kept)
                else:
                    del self._of[owner]
        self._count -= len(taken)
        return taken

    def _wait(self, owner: Hashable) -> None:
        self._sequence += 1
        self._waiting.add(owner)
        heapq.heappush(self._turns, (max(self._now, self._had.get(owner, 0)), self._sequence, owner))
