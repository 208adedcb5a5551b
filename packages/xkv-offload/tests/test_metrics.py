"""Every counter and histogram of an engine has its line of the page, and nothing is declared otherwise than counted."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from xkv_offload import metrics
from xkv_offload.metrics import COUNTERS, HISTOGRAMS, LABELLED, WORKER_COUNTERS, Increments, Makers
from xkv_store.control import COUNTERS_PER_RANK

CHANNEL = {"labelled_stats": True, "histogram_stats": True}
NEITHER = dict.fromkeys(CHANNEL, False)


@dataclass
class Declared:
    documentation: str
    labelnames: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None


@dataclass
class Stats:
    seen: list[tuple[str, float, tuple[str, ...]]] = field(default_factory=list)

    def increase_counter(self, name: str, value: float, labels: tuple[str, ...] = ()) -> None:
        self.seen.append((name, value, labels))

    def observe_histogram(self, name: str, value: float) -> None:
        self.seen.append((name, value, ()))


def test_names_are_each_others_in_no_way_and_as_prometheus_wants_them() -> None:
    names = [*COUNTERS, *LABELLED, *HISTOGRAMS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z_]*[a-z]", name) for name in names)
    assert not [name for name in names if name.endswith(("_total", "_count", "_sum", "_bucket"))]
    assert all(list(one.buckets) == sorted(set(one.buckets)) for one in HISTOGRAMS.values())
    assert {counter for one in LABELLED.values() for counter in one.of.values()} <= {"", *COUNTERS}


def test_what_ranks_count_has_room_on_the_control_page() -> None:
    assert len(WORKER_COUNTERS) <= COUNTERS_PER_RANK
    assert [metrics.worker_number(name) for name in WORKER_COUNTERS] == list(range(len(WORKER_COUNTERS)))


def test_nothing_is_said_that_was_not_declared() -> None:
    """VLLM's front end ends by an assert at an unknown name, or another number of labels."""
    for features in (CHANNEL, NEITHER):
        declared = metrics.definitions(Makers(counter=Declared, histogram=Declared), features)
        counts = Increments()
        for name in COUNTERS:
            counts.add(name, 2)
        for reason in LABELLED["misses"].of:
            counts.miss(reason)
        for name in HISTOGRAMS:
            counts.observe(name, 0.5)
        said: Any = counts.take(Stats, features)
        assert {name for name, _, _ in said.seen} == set(declared)
        assert all(len(labels) == len(declared[name].labelnames) for name, _, labels in said.seen)
        assert counts.take(Stats, features) is None


def test_failures_are_told_by_kind_and_alone() -> None:
    counts = Increments()
    counts.add("load_timeouts", 3)
    counts.add("worker_errors")
    said: Any = counts.take(Stats, CHANNEL)
    failures = {labels: value for name, value, labels in said.seen if name == "vllm:xkv_failures"}
    assert failures == {("timeout",): 3, ("worker",): 1}


def test_measurements_between_two_askings_are_bounded() -> None:
    counts = Increments()
    for _ in range(metrics.OBSERVATIONS_MAX + 10):
        counts.observe("load_seconds", 1.0)
    said: Any = counts.take(Stats, CHANNEL)
    assert len(said.seen) == metrics.OBSERVATIONS_MAX
