"""Every counter of the gateway has a metric, every metric a line of the page; names are as Prometheus wants them."""

from __future__ import annotations

import re
from pathlib import Path

from xkv_store import departures, metric_families
from xkv_store.figures import BOUNDS_S, Figures, Histogram, Times
from xkv_store.metric_families import COUNTS, ELSEWHERE, families
from xkv_store.remote_words import Lane
from xkv_store.wire import LoadStatus, RefusedCode, StoreStatus
from xkv_store.wire_remote import SoughtStatus

SOURCES = Path(metric_families.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
STATUS = {
    **dict.fromkeys(
        ("capacity_bytes", "slot_bytes", "objects", "object_bytes", "limbo_objects", "uncommitted", "table_entries",
         "index_map_bytes", "engines", "protocol"), 7),
    "card_uuid": "c" * 32,
    "version": "9",
    "draining": False,
    "direct": True,
    "slots": {"free": 1, "in_flight": 2, "used": 3, "limbo": 4},
    "counters": {"get_ok": 5, "refused_peer": 6},
    "namespaces": [
        {"namespace": "aa", "objects": 1, "bytes": 2, "limbo_bytes": 3, "quota_bytes": None},
        {"namespace": "bb", "objects": 1, "bytes": 2, "limbo_bytes": 3, "quota_bytes": 4},
    ],
    "namespaces_left_out": 10,
    "remote": {"state": "up", "segment_state": "down", "fetching": 1, "storing": 2},
}  # fmt: skip


def figures(**changes: object) -> Figures:
    times = Times(tuple(range(len(BOUNDS_S) + 1)), 2.5)
    return Figures({**STATUS, **changes}, {"rank": 2}, {"turn": 1}, 8, 9.5, {"load": times})


def counters_of_the_sources() -> set[str]:
    """What is counted anywhere in the gateway, by the letters of its sources."""
    found: set[str] = set(departures.COUNTERS.values())
    for path in SOURCES.glob("*.py"):
        for name in re.findall(r"counters\[f?\"([^\"]+)\"\]", path.read_text()):
            values = {
                "puts_{plan.value}": {"puts_held", "puts_shed", "puts_busy", "puts_invalid"},
                "refused_{refusal.code.value}": {f"refused_{code.value}" for code in RefusedCode},
                "remote_asked_{status.name.lower()}": {f"remote_asked_{one.name.lower()}" for one in SoughtStatus},
                "remote_late_{lane.value}": {f"remote_late_{lane.value}" for lane in Lane},
                "{what}_{status.name.lower()}": {
                    *(f"put_{one.name.lower()}" for one in StoreStatus),
                    *(f"get_{one.name.lower()}" for one in LoadStatus if one is not LoadStatus.TIMEOUT),
                },
            }
            found |= values.get(name, {name})
    return found


def test_every_counter_of_the_gateway_is_published_or_said_to_be_elsewhere() -> None:
    """One that nobody publishes would be found out when it is needed."""
    counted = counters_of_the_sources()
    assert len(counted) > 30, "the pattern finds them"
    assert not [name for name in counted if "{" in name], "a name that is made up is listed above"
    published = [name for count in COUNTS for name in count.counters]
    assert len(published) == len(set(published))
    assert set(published) - counted == set(), "nothing counts these"
    assert counted - set(published) == ELSEWHERE


def test_figures_become_what_they_say() -> None:
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(figures())
        for sample in family.samples
    }
    assert samples["xkv_load_objects_total", (("result", "ok"),)] == 5
    assert samples["xkv_load_objects_total", (("result", "miss"),)] == 0, "there from the beginning"
    assert samples["xkv_refused_connections_total", (("code", "peer"),)] == 6
    assert samples["xkv_card_slots", (("state", "limbo"),)] == 4
    assert samples["xkv_sessions", (("role", "rank"),)] == 2
    assert samples["xkv_sessions", (("role", "tool"),)] == 0
    assert samples["xkv_namespaces", ()] == 12
    assert samples["xkv_namespace_quota_bytes", (("namespace", "bb"),)] == 4
    assert ("xkv_namespace_quota_bytes", (("namespace", "aa"),)) not in samples
    assert samples["xkv_io_seconds_bucket", (("lane", "load"), ("le", "+Inf"))] == len(BOUNDS_S)
    assert samples["xkv_io_seconds_sum", (("lane", "load"),)] == 2.5


def test_names_are_as_prometheus_wants_them() -> None:
    found = list(families(figures()))
    assert len({family.name for family in found}) == len(found)
    for family in found:
        assert re.fullmatch(r"xkv_[a-z][a-z_]*", family.name)
        assert family.documentation
        assert family.type != "gauge" or not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert not re.search(r"_(ms|ns|kib|mb)$", family.name), "base units: seconds and bytes"


def test_the_page_lists_every_metric_with_its_labels_and_words() -> None:
    rows: dict[str, tuple[set[str], str]] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `xkv_"):
            name, told_labels, text = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name.strip("`")] = (set(re.findall(r"`(\w+)`", told_labels)), text)
    told = {}
    for family in families(figures()):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        told[family.name + ("_total" if family.type == "counter" else "")] = (labels, family.documentation)
    assert rows == told


def test_a_histogram_counts_what_lasted_no_longer_than_each_bound() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, 0.3, 99.0):
        histogram.add(seconds)
    counts = dict(zip((*BOUNDS_S, float("inf")), histogram.cumulated(), strict=True))
    assert counts[BOUNDS_S[0]] == 2
    assert counts[BOUNDS_S[1]] == 3
    assert counts[0.25] == 3
    assert counts[0.5] == 4
    assert counts[10.0] == 4
    assert counts[float("inf")] == 5
    assert histogram.sum_s > 99
