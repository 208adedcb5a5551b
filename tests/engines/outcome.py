"""What a run of several engines has found: counts, and what it owes.

Owns: what is counted beside every run's counts; engines count in threads of their own.
Must not know: how anything was counted.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

from stand.runs import Findings

KILLS_MIN: Final = 3


@dataclass(slots=True)
class Outcome(Findings):
    """Everything that is counted; `restored` by the seat of whoever restored it. `engine_deaths`: not by us."""

    seats: tuple[str, ...]
    kills: int = 0
    reads_joined: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, amount: int = 1) -> None:
        """Count something."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def restore(self, seat: str, objects: int) -> None:
        """Count what a seat has restored."""
        with self._lock:
            self.restored[seat] += objects

    def unproved(self) -> list[str]:
        """Kills, and who has restored nothing."""
        why = [f"{seat} restored nothing" for seat in self.seats if not self.restored[seat]]
        return [*why, *([f"only {self.kills} kills"] if self.kills < KILLS_MIN else [])]

    def counts(self) -> dict[str, Any]:
        """The closing line's."""
        return {
            "target": self.target,
            "requests": self.requests,
            "wrong": self.wrong,
            "engine_deaths": self.engine_deaths,
            "kills": self.kills,
            "restored": {seat: self.restored[seat] for seat in self.seats},
            "reads_joined": self.reads_joined,
            "stuck": self.stuck,
            "leaks": self.leaks,
        }
