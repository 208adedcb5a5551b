"""What a run of ranks has found: counts, the verdict and its line of JSON.

Owns: the names in the line, and when a run has failed. Must not know: how anything was counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

READS_PER_OBJECT_MAX: Final = 1.05  # where the shared region holds the working set


@dataclass(slots=True)
class Outcome:
    """Everything that is counted. `reads`, `objects`: of the phases in which the ring had room for all."""

    ranks: int
    canary: bool = False
    jobs: int = 0
    wrong: int = 0
    timeouts: int = 0
    stuck: int = 0
    reads: int = 0
    objects: int = 0
    misses: int = 0
    killed: int = 0
    stopped: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def reads_per_object(self) -> float:
        """With ring room."""
        return round(self.reads / self.objects, 3) if self.objects else 0.0

    @property
    def passed(self) -> bool:
        """Whether all is as it has to be; a canary has to find something."""
        if self.canary:
            return self.wrong > 0
        return not self.verdict_reasons()

    def verdict_reasons(self) -> list[str]:
        """Why not, if so."""
        why = [f"{name} {getattr(self, name)}" for name in ("wrong", "timeouts", "stuck") if getattr(self, name)]
        if self.reads_per_object > READS_PER_OBJECT_MAX:
            why.append(f"{self.reads_per_object} reads of each object, with room for all")
        if not (self.jobs and self.objects and self.misses and self.killed and self.stopped):
            why.append("something did not happen that proves anything")
        return why

    def verdict(self) -> str:
        """Why it passed or not, one line."""
        if self.canary:
            return "the canary found wrong bytes" if self.passed else "the canary found nothing: the run is blind"
        return "; ".join(self.verdict_reasons()) or "nothing wrong, nothing late, nothing stuck"

    def line(self) -> str:
        """The closing line."""
        return json.dumps(
            {
                "ranks": self.ranks,
                "jobs": self.jobs,
                "wrong": self.wrong,
                "timeouts": self.timeouts,
                "disk_reads_per_object": self.reads_per_object,
                "stuck": self.stuck,
            }
        )
