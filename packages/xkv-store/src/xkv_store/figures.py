"""What a gateway can say of itself in numbers at one moment, and how long its reads and writes took.

Owns: the histogram, and the snapshot that leaves the event loop. Must not know: who reads it, or by what names.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

BOUNDS_S: Final = (0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""From a slot of a quick NVMe to a device that is about to be given up."""


class Histogram:
    """How many lasted at most so long; one thread's. `sum_s`: of all together."""

    __slots__ = ("_counts", "sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def cumulated(self) -> tuple[int, ...]:
        """For each bound, and for none, how many lasted no longer."""
        total = 0
        cumulated = []
        for count in self._counts:
            total += count
            cumulated.append(total)
        return tuple(cumulated)


@dataclass(frozen=True, slots=True)
class Times:
    """A histogram at one moment, as `cumulated` says."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """A snapshot that nobody changes any more.

    `status`: what `xkv gateway status` says, whole; `queued`: objects that wait, by what for; `times`: by lane.
    """

    status: Mapping[str, Any]
    roles: Mapping[str, int]
    queued: Mapping[str, int]
    in_flight: int
    uptime_s: float
    times: Mapping[str, Times]
