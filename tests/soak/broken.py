"""Planted faults, one for each thing that a soak looks at: a run that does not notice them is blind.

Owns: the changes to a gateway that is about to serve. Must not know: anything else of the run.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, Final

from ranks.broken import break_gateway
from xkv_store import card
from xkv_store.card import Card

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from xkv_store.layout import Extent

LEAKS: Final = 200  # one in so many objects keeps its slots for ever
SLOW_S: Final = 0.002


def _leak() -> None:
    """Now and then slots that limbo lets go of are given to nobody."""
    real, calls = Card._give, itertools.count(1)

    def give(self: Card, extents: Iterable[Extent]) -> None:
        if next(calls) % LEAKS:
            real(self, extents)

    vars_of: Any = Card
    vars_of._give = give


def _grace() -> None:
    """Slots are free again as soon as their removal is committed, whatever the grace."""
    real = Card._to_limbo

    def to_limbo(self: Card, *args: Any, **more: Any) -> Any:
        self._grace_ns = 0
        return real(self, *args, **more)

    vars_of: Any = Card
    vars_of._to_limbo = to_limbo


def _cliff() -> None:
    """Places on a card that is nearly full are slow to find."""
    vars_of: Any = card
    real = vars_of.place

    def place(allocators: list[Any], *args: Any, **more: Any) -> Any:
        if sum(one.free for one in allocators) < sum(one.slots for one in allocators) // 4:
            time.sleep(SLOW_S)
        return real(allocators, *args, **more)

    vars_of.place = place


FAULTS: Final[dict[str, Callable[[], None]]] = {
    "leak": _leak,
    "grace": _grace,
    "cliff": _cliff,
    "lease": break_gateway,
}
