"""What the benchmarks report: the figures by name, the bar of each, and the table.

Owns: names, units, bars (this release's, which is judged, and the next one's, which is shown), the table's text.
Must not know: how anything is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure: `now` is what this release must reach, `later` what the next one shall."""

    key: str
    what: str
    unit: str
    digits: int
    now: float | None
    later: float | None
    more_is_better: bool = False

    def reached(self, value: float, bar: float) -> bool:
        """Whether `value` is on the right side of a bar."""
        return value >= bar if self.more_is_better else value <= bar


BARS: Final = (
    Bar("put_32m_vs_fio", "put, 32 MiB objects", "of fio", 2, 0.7, 0.9, more_is_better=True),
    Bar("get_32m_vs_fio", "get, 32 MiB objects", "of fio", 2, 0.7, 0.9, more_is_better=True),
    Bar("put_2m_vs_fio", "put, 2 MiB objects", "of fio", 2, None, 0.8, more_is_better=True),
    Bar("get_2m_vs_fio", "get, 2 MiB objects", "of fio", 2, None, 0.8, more_is_better=True),
    Bar("cpu_s_per_gb", "CPU per GB moved, gateway + client", "s", 3, None, 0.25),
    Bar("prefix_512_ms", "lookup of 512 keys by the manager, 1 M objects", "ms", 2, 5.0, None),
    Bar("prefix_1024_ms", "lookup of 1,024 keys by the manager", "ms", 2, None, 4.0),
    Bar("lookup_us_1m", "lookup of one tag in the table, p50", "µs", 2, None, 1.5),
    Bar("start_s_1m", "start after kill -9, 1 M index entries", "s", 2, 5.0, 2.0),
    Bar("resident_mib", "resident beside ring, table and index pages", "MiB", 0, None, 150.0),
)
"""In the order of the table."""


@dataclass(slots=True)
class Part:
    """What one part has measured: figures by key, and lines for people."""

    figures: dict[str, float] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)

    def worst(self, key: str, value: float) -> None:
        """Give a figure of which less is better, unless it has been worse under other circumstances."""
        self.figures[key] = max(value, self.figures.get(key, value))

    def add(self, other: Part) -> None:
        """Take over what another part has measured."""
        self.figures |= other.figures
        self.details += other.details


def at_percent(values: Sequence[float], percent: int) -> float:
    """The value at a percentile: 50 is the (upper) median."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def percentiles(values: Sequence[float], unit: str) -> str:
    """Median and 99th percentile, for people."""
    return f"p50 {at_percent(values, 50):.2f}, p99 {at_percent(values, 99):.2f} {unit}"


def table(figures: dict[str, float]) -> str:
    """One line for each figure, with its bar and whether it is reached."""
    rows = [("what", "key", "figure", "bar", "", "next bar")]
    for bar in BARS:
        value = figures.get(bar.key)
        shown = "failed" if value is None else f"{value:.{bar.digits}f} {bar.unit}"
        verdict = "" if bar.now is None or value is None else "ok" if bar.reached(value, bar.now) else "missed"
        rows.append((bar.what, bar.key, shown, _limit(bar, bar.now), verdict, _limit(bar, bar.later)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def as_values(figures: dict[str, float]) -> dict[str, float | None]:
    """The figures for the JSON line; null for what failed to run."""
    return {
        bar.key: None if (value := figures.get(bar.key)) is None else round(value, max(bar.digits, 1)) for bar in BARS
    }


def _limit(bar: Bar, limit: float | None) -> str:
    return "" if limit is None else f"{'≥' if bar.more_is_better else '≤'} {limit:g}"
