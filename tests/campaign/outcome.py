"""What a campaign has found: counts, the verdict and its line of JSON.

Owns: the names in the line, and when a campaign has failed.
Must not know: how anything was counted.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

LONG_S: Final = 1_800
EACH_KIND_MIN: Final = 20  # in a long run
KINDS_MIN: Final = 8  # that took effect in a run of a minute


@dataclass(slots=True)
class Outcome:
    """Everything that is counted."""

    target: str
    seconds: int
    seed: int
    canary: bool
    expected_kinds: tuple[str, ...]
    shapes: tuple[str, ...]
    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    engine_deaths: int = 0
    stuck: int = 0
    leaks: int = 0
    failed_as_asked: int = 0
    recomputed: int = 0
    unverified: int = 0
    restored: Counter[str] = field(default_factory=Counter)  # objects, by the model's shape
    aborted: int = 0
    reasons: list[str] = field(default_factory=list)  # one line for each thing that should not be

    def complain(self, what: str) -> None:
        """Keep what should not be, for whoever looks into it."""
        self.reasons.append(what)

    @property
    def rare_kinds(self) -> list[str]:
        """Kinds that took effect less often than a run of this length owes."""
        if self.canary:
            return []
        if self.seconds >= LONG_S:
            return [kind for kind in self.expected_kinds if self.faults[kind] < EACH_KIND_MIN]
        struck = [kind for kind in self.expected_kinds if self.faults[kind]]
        return [] if len(struck) >= KINDS_MIN else [kind for kind in self.expected_kinds if kind not in struck]

    @property
    def not_restored(self) -> list[str]:
        """Shapes whose answers prove nothing since nothing was restored; a short run need not get to all of them."""
        if self.seconds < LONG_S and self.restored.total():
            return []
        return [shape for shape in self.shapes if not self.restored[shape]]

    @property
    def passed(self) -> bool:
        """Whether all is as it has to be; a canary has to find something."""
        if self.canary:
            return self.wrong > 0
        bad = self.wrong + self.engine_deaths + self.stuck + self.leaks
        return not bad and not self.not_restored and self.requests > 0 and not self.rare_kinds

    def so_far(self) -> str:
        """The counts that matter, in words."""
        return (
            f"{self.faults.total()} faults, {self.wrong} wrong, {self.stuck} stuck, {self.engine_deaths} dead, "
            f"{self.restored.total()} restored"
        )

    def verdict(self) -> str:
        """Why it passed or not, one line."""
        if self.canary:
            return "the canary found wrong answers" if self.passed else "the canary found nothing: a campaign is blind"
        if self.passed:
            return "nothing wrong, nothing dead, nothing stuck"
        why = [f"{name} {getattr(self, name)}" for name in ("wrong", "engine_deaths", "stuck", "leaks")]
        why += [f"nothing of {shape} was restored" for shape in self.not_restored]
        if self.rare_kinds:
            why.append(f"too rare: {', '.join(self.rare_kinds)}")
        return "; ".join(why)

    def line(self) -> str:
        """The closing line."""
        found: dict[str, Any] = {
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
            "seconds": self.seconds,
            "seed": self.seed,
            "canary": self.canary,
        }
        return json.dumps(found)
