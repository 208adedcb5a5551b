"""What a run over two hosts has found: counts, and what it owes.

Owns: what is counted beside every run's counts. Must not know: how anything was counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from remote.network import HOSTS
from stand.runs import Findings

AFTER: Final = ("across", "master", "node", "partition", "pressure", "alone", "alone, killed")
"""Parts of a run; behind each, one host restores what the other has stored. Those alone are of hosts without a card."""


SEGMENT_MIB: Final = 16  # of the pool, on each host: all together hold a third of the run's prompts
POOL_BYTES: Final = (len(HOSTS) - 1) * SEGMENT_MIB << 20


@dataclass(slots=True)
class Outcome(Findings):
    """Everything that is counted. `across`: objects that came from the other host, by the run's part.

    `network`: what the hosts were. `healed_s`: by the part, how long it took from the mending to the first object.
    `pressed_bytes`: what was put in the part that puts more than the pool holds.
    """

    network: str
    across: Counter[str] = field(default_factory=Counter)
    healed_s: dict[str, float] = field(default_factory=dict)
    remote: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    pressed_bytes: int = 0
    wrong_alone: int = 0  # of the wrong ones, those of hosts whose card is the remote alone

    @property
    def passed(self) -> bool:
        """As for any run; a canary has to find something both with a card and without."""
        if self.options.canary:
            return self.wrong > self.wrong_alone > 0
        return super(Outcome, self).passed  # by name: the decorator makes another class of this one

    def unproved(self) -> list[str]:
        """Parts behind which nothing came across; no pressure."""
        why = [f"nothing came across: {part}" for part in AFTER if not self.across[part]]
        return [*why, *([] if self.pressed_bytes > POOL_BYTES else ["the pool had no reason to drop anything"])]

    def counts(self) -> dict[str, Any]:
        """The closing line's."""
        return {
            "target": self.target,
            "network": self.network,
            "requests": self.requests,
            "restored_across": self.across.total(),
            "across": dict(self.across),
            "wrong": self.wrong,
            "wrong_alone": self.wrong_alone,
            "stuck": self.stuck,
            "engine_deaths": self.engine_deaths,
            "leaks": self.leaks,
            "healed_s": self.healed_s,
            "pressed_bytes": self.pressed_bytes,
            "slowest_batch_s": round(self.slowest_s, 2),
            "remote": dict(self.remote),
        }
