"""What the benchmarks report: the figures by name, the bar of each, and the table.

Owns: names, units, bars, the table's text.
Must not know: how anything is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure and what it must reach."""

    key: str
    what: str
    unit: str
    digits: int
    bar: float
    more_is_better: bool = False

    def reached(self, value: float) -> bool:
        """Whether `value` is on the right side of the bar."""
        return value >= self.bar if self.more_is_better else value <= self.bar


BARS: Final = (
    Bar("put_32m_vs_fio", "put, 32 MiB objects", "of fio", 2, 0.9, more_is_better=True),
    Bar("get_32m_vs_fio", "get, 32 MiB objects", "of fio", 2, 0.9, more_is_better=True),
    Bar("put_2m_vs_fio", "put, 2 MiB objects", "of fio", 2, 0.8, more_is_better=True),
    Bar("get_2m_vs_fio", "get, 2 MiB objects", "of fio", 2, 0.8, more_is_better=True),
    Bar("put_mem_vs_copy", "put, databases in memory", "of a copy", 2, 0.45, more_is_better=True),
    Bar("get_mem_vs_copy", "get, databases in memory", "of a copy", 2, 0.45, more_is_better=True),
    Bar("load_vs_vllm_fs_disk", "load of 4 GB, disk", "of vLLM's", 2, 1.0, more_is_better=True),
    Bar("load_vs_vllm_fs_mem", "load of 4 GB, memory", "of vLLM's", 2, 0.8, more_is_better=True),
    Bar("lookup_us_1m", "lookup of one tag, 1 M objects, p50", "µs", 2, 1.5),
    Bar("lookup_us_10m", "lookup of one tag, 10 M objects, p50", "µs", 2, 2.0),
    Bar("prefix_1024_ms", "lookup of 1,024 keys by the manager, p50", "ms", 2, 4.0),
    Bar("submit_us", "submit of a job on vLLM's thread, p50", "µs", 0, 200.0),
    Bar("cpu_s_per_gb", "CPU per GB moved, gateway + client", "s", 3, 0.25),
    Bar("decode_overhead", "decode step while the gateway stores, more", "of 1", 3, 0.05),
    Bar("start_s_1m", "start after kill -9, 1 M objects", "s", 2, 2.0),
    Bar("start_s_10m", "start after kill -9, 10 M objects", "s", 2, 10.0),
    Bar("resident_mib", "resident beside ring, table, index, 10 M objects", "MiB", 0, 150.0),
    Bar("small_put_vs_fio", "put, 10^4 objects of one slot", "of fio", 2, 0.7, more_is_better=True),
    Bar("small_get_vs_fio", "get, 10^4 objects of one slot", "of fio", 2, 0.7, more_is_better=True),
)
"""In the order of the table."""
_MORE_IS_BETTER: Final = {bar.key for bar in BARS if bar.more_is_better}


@dataclass(slots=True)
class Part:
    """What one part has measured: figures by key, and lines for people."""

    figures: dict[str, float] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)

    def worst(self, key: str, value: float) -> None:
        """Give a figure, unless it has been worse under other circumstances."""
        worse = min if key in _MORE_IS_BETTER else max
        self.figures[key] = worse(value, self.figures.get(key, value))

    def add(self, other: Part) -> None:
        """Take over what another part has measured."""
        for key, value in other.figures.items():
            self.worst(key, value)
        self.details += other.details


def at_percent(values: Sequence[float], percent: int) -> float:
    """The value at a percentile: 50 is the (upper) median."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def percentiles(values: Sequence[float], unit: str) -> str:
    """Median and 99th percentile, for people."""
    return f"p50 {at_percent(values, 50):.2f}, p99 {at_percent(values, 99):.2f} {unit}"


def table(figures: dict[str, float]) -> str:
    """One line for each figure, with its bar and whether it is reached."""
    rows = [("what", "key", "figure", "bar", "")]
    for bar in BARS:
        value = figures.get(bar.key)
        shown = "failed" if value is None else f"{value:.{bar.digits}f} {bar.unit}"
        verdict = "" if value is None else "ok" if bar.reached(value) else "missed"
        rows.append((bar.what, bar.key, shown, f"{'≥' if bar.more_is_better else '≤'} {bar.bar:g}", verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def as_values(figures: dict[str, float]) -> dict[str, float | None]:
    """The figures for the JSON line; null for what failed to run."""
    return {
        bar.key: None if (value := figures.get(bar.key)) is None else round(value, max(bar.digits, 1)) for bar in BARS
    }
