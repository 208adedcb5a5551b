"""What a soak has found: counts, the verdict and its line of JSON.

Owns: the names in the line, the bars, and when a run has failed. Must not know: how anything was counted.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Final

RATE_RATIO_MIN: Final = 0.85  # puts of a full card to those of one that fills
PROBES_MIN: Final = 50  # loads of objects that were leaving, and leases: fewer prove nothing
TURNS_MIN: Final = 1.0  # how often a full card's slots were all put anew


@dataclass(slots=True)
class Outcome:
    """Everything that is counted. `turns`: slots put while full, to the card's. Rates are in objects a second.

    `rates`: of windows that follow each other, on a full card and on one that fills. `late_loads`: not there, but asked
    for after their grace, by our own delay: they prove nothing. `cpu_us_*`: of the gateway, for each object.
    """

    canary: str = ""
    puts: int = 0
    turns: float = 0.0
    shed: int = 0
    evicted: int = 0
    rates: list[tuple[float, float]] = field(default_factory=list)
    cpu_us_full: float = 0.0
    cpu_us_filling: float = 0.0
    status_samples: int = 0
    accounting_errors: int = 0
    grace_loads: int = 0
    late_loads: int = 0
    from_limbo: int = 0
    lost_in_grace: int = 0
    leases: int = 0
    leases_broken: int = 0
    wrong: int = 0
    audited_objects: int = 0
    audit_errors: int = 0
    extents_per_object: float = 0.0
    reasons: list[str] = field(default_factory=list)

    def note(self, counter: str, reason: str) -> None:
        """One more of `counter`, and why."""
        match counter:
            case "accounting_errors":
                self.accounting_errors += 1
            case "lost_in_grace":
                self.lost_in_grace += 1
            case "leases_broken":
                self.leases_broken += 1
            case "wrong":
                self.wrong += 1
            case "audit_errors":
                self.audit_errors += 1
            case _:
                raise ValueError(counter)
        self.reasons.append(f"{counter}: {reason}")

    @property
    def rate_ratio(self) -> float:
        """A full card's rate to that of one that fills, the median of all windows."""
        return _ratio(self.rates)

    @property
    def late_rate_ratio(self) -> float:
        """The same of the last third."""
        return _ratio(self.rates[-max(1, len(self.rates) // 3) :])

    def missed(self) -> list[str]:
        """The bars that are missed."""
        counts = {
            "accounting errors": self.accounting_errors,
            "objects lost in their grace": self.lost_in_grace,
            "leases broken": self.leases_broken,
            "objects wrong": self.wrong,
            "audit errors": self.audit_errors,
        }
        found = [f"{count} {name}" for name, count in counts.items() if count]
        for name, ratio in (("", self.rate_ratio), (" in the last third", self.late_rate_ratio)):
            if ratio < RATE_RATIO_MIN:
                found.append(f"a full card's puts{name} at {ratio} of a filling one's, less than {RATE_RATIO_MIN}")
        return found

    def blind(self) -> list[str]:
        """What did not happen often enough to prove anything."""
        found = []
        if self.turns < TURNS_MIN:
            found.append(f"the full card was put anew {self.turns} times")
        if min(self.grace_loads, self.from_limbo, self.leases) < PROBES_MIN:
            found.append(f"{self.grace_loads} loads ({self.from_limbo} from limbo) and {self.leases} leases")
        if not (self.status_samples and self.evicted and self.audited_objects):
            found.append("nothing was counted")
        return found

    @property
    def passed(self) -> bool:
        """Whether all is as it has to be; a canary has to find something."""
        if self.canary:
            return bool(self.missed())
        return not (self.missed() or self.blind())

    def verdict(self) -> str:
        """One line."""
        found = "; ".join([*self.missed(), *self.blind()])
        if self.canary:
            return f"the canary found: {found}" if self.passed else "the canary found nothing: the run is blind"
        return found or "every byte accounted for, no lease broken, nothing lost in its grace"

    def line(self) -> str:
        """The closing line."""
        values = {**asdict(self), "put_rate_ratio": self.rate_ratio, "late_rate_ratio": self.late_rate_ratio}
        values |= {"missed": self.missed(), "passed": self.passed}
        for name, rates in zip(("put_rate_full", "put_rate_filling"), zip(*self.rates, strict=True), strict=False):
            values[name] = round(median(rates), 1)
        del values["reasons"], values["rates"]
        return json.dumps(values)


def _ratio(rates: list[tuple[float, float]]) -> float:
    return round(median(full / filling for full, filling in rates), 3) if rates else 0.0
