"""What engines leave out themselves: chunks of which no store ever reaches their gateway, counted by why.

Owns: the reasons, their counters' numbers on a control page (docs/format.md), and a gateway's sums by namespace.
Must not know: who counts, sockets, what a reason means for whoever reads it (`explanation`).

Of single objects nothing is kept: an engine that sheds has no time for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FIRST_NUMBER: Final = 48
"""Of a rank's counters: those before are for its engine's scheduler."""
NAMESPACES_MAX: Final = 1_024
"""Beyond it the one of which nothing was left out for the longest time is forgotten."""
COUNT_MAX: Final = 1 << 53
LOOK_EVERY_NS: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000


class LeftOut(str, Enum):
    """Why. The first are the scheduler's, of chunks; the others each rank's, of its own object."""

    BACKLOG = "backlog"
    RARE = "rare"
    NO_GATEWAY = "no_gateway"
    ROLE = "role"
    RESET = "reset"
    NO_SLOT = "no_slot"
    PARTIAL = "partial"
    SUSPECT = "suspect"


REASONS: Final = tuple(LeftOut)  # their numbers on the page: more may come at the end
NUMBERS: Final = {reason: FIRST_NUMBER + place for place, reason in enumerate(REASONS)}


@dataclass(frozen=True, slots=True)
class Omission:
    """So many of a namespace for one reason, the last of them (about) then, in ms since 1970."""

    count: int
    last_ms: int


class Ledger:
    """What all engines of a gateway have left out, by the namespace that each has adopted. One thread."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._of: dict[bytes, dict[LeftOut, Omission]] = {}

    def add(self, namespace: bytes, counts: Sequence[int]) -> None:
        """An engine has left out so many more, in the order of `REASONS`."""
        if not any(counts):
            return
        now_ms = self._clock_ns() // _NS_PER_MS
        found = self._of.pop(namespace, {})
        for reason, more in zip(REASONS, counts, strict=True):
            if more:
                before = found[reason].count if reason in found else 0
                found[reason] = Omission(min(before + more, COUNT_MAX), now_ms)
        self._of[namespace] = found
        if len(self._of) > NAMESPACES_MAX:
            del self._of[next(iter(self._of))]

    def of(self, namespaces: Iterable[bytes]) -> dict[bytes, dict[LeftOut, Omission]]:
        """By namespace: those of which something was left out."""
        return {one: dict(self._of[one]) for one in dict.fromkeys(namespaces) if one in self._of}
