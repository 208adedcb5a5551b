"""The kinds of faults, as data: what fails of the medium, at which points a gateway dies, what happens to whom.

Owns: the names that the outcome counts, the plan of each of the medium's faults, and which kind comes next.
Must not know: how an event is carried out.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_store.testing.faults import Fault, FaultPlan, Kind, Operation
from xkv_store.testing.points import POINTS

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import Mapping, Sequence

OFTEN: Final = 0.35  # of the moves of slots: many objects of a batch are still whole
MOSTLY: Final = 0.5  # of what is done only once or twice a batch
ALWAYS: Final = 1_000_000
FEW: Final = 4  # kinds to choose the rarest of


def _moves(operation: Operation, kind: Kind, error: int = errno.EIO) -> tuple[Fault, ...]:
    return (Fault(operation=operation, kind=kind, probability=OFTEN, error=error),)


def _calls(operation: Operation, kind: Kind, error: int = errno.EIO) -> tuple[Fault, ...]:
    return (Fault(operation=operation, kind=kind, probability=MOSTLY, error=error),)


# What goes wrong in one life of a gateway.
MEDIUM: Final[Mapping[str, tuple[Fault, ...]]] = {
    "read_error": _moves(Operation.READ, Kind.ERROR),
    "read_interrupted": _moves(Operation.READ, Kind.ERROR, errno.EINTR),
    "read_late_error": _moves(Operation.READ, Kind.LATE_ERROR),
    "read_short": _moves(Operation.READ, Kind.SHORT),
    "read_flipped": _moves(Operation.READ, Kind.FLIP),
    "read_zeroed": _moves(Operation.READ, Kind.ZERO),
    "read_cut": _moves(Operation.READ, Kind.CUT),
    "read_swapped": _moves(Operation.READ, Kind.SWAP),
    "read_delayed": (Fault(operation=Operation.READ, kind=Kind.DELAY, probability=OFTEN, delay_s=0.3),),
    "write_error": _moves(Operation.WRITE, Kind.ERROR),
    "write_no_space": _moves(Operation.WRITE, Kind.ERROR, errno.ENOSPC),
    "write_interrupted": _moves(Operation.WRITE, Kind.ERROR, errno.EINTR),
    "write_late_error": _moves(Operation.WRITE, Kind.LATE_ERROR),
    "write_short": _moves(Operation.WRITE, Kind.SHORT),
    "write_flipped": _moves(Operation.WRITE, Kind.FLIP),
    "write_zeroed": _moves(Operation.WRITE, Kind.ZERO),
    "write_cut": _moves(Operation.WRITE, Kind.CUT),
    "write_swapped": _moves(Operation.WRITE, Kind.SWAP),
    "write_stale": _moves(Operation.WRITE, Kind.STALE),
    "commit_error": _calls(Operation.COMMIT, Kind.ERROR),
    "commit_no_space": _calls(Operation.COMMIT, Kind.ERROR, errno.ENOSPC),
    "commit_map_full": _calls(Operation.COMMIT, Kind.FULL),
    "commit_index_dead": _calls(Operation.COMMIT, Kind.DEAD),
    "index_unreadable": _calls(Operation.LOOKUP, Kind.ERROR),
    "medium_read_only": tuple(
        Fault(operation=operation, kind=Kind.ERROR, nth=1, times=ALWAYS, error=errno.EROFS)
        for operation in (Operation.WRITE, Operation.COMMIT, Operation.SYNC)
    ),
    "direct_refused": (Fault(operation=Operation.DIRECT, kind=Kind.ERROR, nth=1, times=ALWAYS),),
}

# kill -9 of the gateway at a point of its source, by what it is doing there.
KILL_POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "kill_at_put": tuple(sorted(point for point in POINTS if point.startswith("put."))),
    "kill_at_get": tuple(sorted(point for point in POINTS if point.startswith("get."))),
    "kill_at_eviction": tuple(sorted(point for point in POINTS if point.startswith(("evict.", "limbo.")))),
    "kill_at_commit": tuple(sorted(point for point in POINTS if point.startswith("commit."))),
    "kill_at_start": tuple(sorted(point for point in POINTS if point.startswith("open."))),
    "kill_at_end": tuple(sorted(point for point in POINTS if point.startswith("close."))),
}
assert {point for points in KILL_POINTS.values() for point in points} == POINTS

DAMAGES: Final = ("lies_flipped", "lies_zeroed", "lies_cut", "lies_swapped", "lies_stale")  # slots on the medium

# What happens during one batch of requests.
EVENTS: Final = (
    *KILL_POINTS,
    *DAMAGES,
    "kill_anywhere",
    "restart_within_a_heartbeat",
    "restart_clean",
    "gateway_stopped",
    "two_gateways",
    "newer_format",
    "index_lost",
    "index_damaged",
    "engine_killed",
    "request_aborted",
)

KINDS: Final = (*MEDIUM, *EVENTS)


def plan_of(medium: str, *, seed: int, proves: bool) -> FaultPlan:
    """The plan of one life of a gateway."""
    return FaultPlan(MEDIUM[medium], seed=seed, proves=proves)


@dataclass(frozen=True, slots=True)
class Draw:
    """Draws kinds: of a few at random the one that took effect least often, so that none stays rare."""

    kinds: Sequence[str]
    rng: random.Random
    effects: Counter[str]

    def deal(self) -> str:
        """The next kind."""
        few = self.rng.sample(self.kinds, min(FEW, len(self.kinds)))
        return min(few, key=lambda kind: self.effects[kind])
