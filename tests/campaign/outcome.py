"""What a campaign has found: counts, the verdict and its line of JSON.

Owns: what a campaign counts beside every run's counts, and which kinds of faults it owes.
Must not know: how anything was counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from stand.runs import Findings

LONG_S: Final = 1_800
EACH_KIND_MIN: Final = 20  # in a long run
KINDS_MIN: Final = 8  # that took effect in a run of a minute


@dataclass(slots=True)
class Outcome(Findings):
    """Everything that is counted; `restored` by the model's shape."""

    expected_kinds: tuple[str, ...]
    shapes: tuple[str, ...]
    faults: Counter[str] = field(default_factory=Counter)
    failed_as_asked: int = 0
    recomputed: int = 0
    unverified: int = 0
    aborted: int = 0

    @property
    def rare_kinds(self) -> list[str]:
        """Kinds that took effect less often than a run of this length owes."""
        if self.options.seconds >= LONG_S:
            return [kind for kind in self.expected_kinds if self.faults[kind] < EACH_KIND_MIN]
        struck = [kind for kind in self.expected_kinds if self.faults[kind]]
        return [] if len(struck) >= KINDS_MIN else [kind for kind in self.expected_kinds if kind not in struck]

    @property
    def not_restored(self) -> list[str]:
        """Shapes whose answers prove nothing since nothing was restored; a short run need not get to all of them."""
        if self.options.seconds < LONG_S and self.restored.total():
            return []
        return [shape for shape in self.shapes if not self.restored[shape]]

    def unproved(self) -> list[str]:
        """What was not restored, and kinds of faults that were too rare."""
        why = [f"nothing of {shape} was restored" for shape in self.not_restored]
        if self.rare_kinds:
            why.append(f"too rare: {', '.join(self.rare_kinds)}")
        return why

    def so_far(self) -> str:
        """The counts that matter, in words."""
        return (
            f"{self.faults.total()} faults, {self.wrong} wrong, {self.stuck} stuck, {self.engine_deaths} dead, "
            f"{self.restored.total()} restored"
        )

    def counts(self) -> dict[str, Any]:
        """The closing line's."""
        return {
            "target": self.target,
            "requests": self.requests,
            "faults": {kind: self.faults[kind] for kind in self.expected_kinds},
            "wrong": self.wrong,
            "engine_deaths": self.engine_deaths,
            "stuck": self.stuck,
            "failed_as_asked": self.failed_as_asked,
            "recomputed": self.recomputed,
            "unverified": self.unverified,
            "restored": dict(self.restored),
            "aborted": self.aborted,
            "leaks": self.leaks,
            "seconds": self.options.seconds,
            "seed": self.options.seed,
            "canary": self.options.canary,
        }
