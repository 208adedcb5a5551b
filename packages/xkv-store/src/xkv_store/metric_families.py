"""The names under which a gateway's figures are published, and what each of them says.

Owns: every metric's name, text and labels (docs/metrics.md lists them), and which counter of the gateway is which.
Must not know: how the figures are had, or who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from .figures import BOUNDS_S
from .wire import RefusedCode, Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from .figures import Figures

PREFIX: Final = "xkv_"


@dataclass(frozen=True, slots=True)
class Count:
    """A metric that only grows: from one counter of the gateway, or from several, told apart by a label."""

    name: str  # less the prefix and `_total`
    text: str
    of: str | Mapping[str, str]  # the gateway's counter; or the counter of each value of `label`
    label: str = ""

    @property
    def counters(self) -> tuple[str, ...]:
        """The gateway's counters that are in it."""
        return (self.of,) if isinstance(self.of, str) else tuple(self.of.values())


REMOTE_COUNTS: Final = (
    Count(
        "remote_asked_objects",
        "Objects that the remote was asked for: found, absent, or failed where nobody knows",
        {one: f"remote_asked_{one}" for one in ("found", "absent", "failed")},
        "result",
    ),
    Count(
        "remote_fetched_objects",
        "Objects that were to come from the remote, by what became of them",
        {
            "ok": "remote_fetches",
            **{
                one: f"remote_fetches_{one}"
                for one in ("absent", "corrupt", "failed", "held", "not_admitted", "refused")
            },
        },
        "result",
    ),
    Count("remote_fetched_bytes", "Bytes of objects that came from the remote", "remote_fetch_bytes"),
    Count("remote_nearby_reads", "Loads from the remote's memory instead of the medium", "remote_nearby_reads"),
    Count(
        "remote_stored_objects",
        "Objects that were to go to the remote, by what became of them",
        {
            "ok": "remote_stores",
            **{one: f"remote_stores_{one}" for one in ("held", "shed", "failed", "gone", "too_large")},
        },
        "result",
    ),
    Count("remote_stored_bytes", "Bytes of objects that went to the remote", "remote_store_bytes"),
    Count(
        "remote_late_calls",
        "Calls of the remote's library that took too long and ended its process",
        {one: f"remote_late_{one}" for one in ("look", "load", "store", "map")},
        "lane",
    ),
    Count("remote_starts", "Starts of the process that calls the remote's library", "remote_starts"),
    Count("remote_ends", "Ends of that process", "remote_ends"),
)
COUNTS: Final = (
    Count(
        "load_objects",
        "Objects that engines asked for: ok is a hit, everything else a miss with its reason",
        {one: f"get_{one}" for one in ("ok", "miss", "corrupt", "failed", "cancelled", "busy")},
        "result",
    ),
    Count("load_bytes", "Bytes of objects given to engines", "get_bytes"),
    Count(
        "load_objects_from_limbo", "Loads of objects that had just left (evicted, replaced, purged)", "gets_from_limbo"
    ),
    Count(
        "store_objects",
        "Objects that engines wanted to store, by what became of them",
        {one: f"put_{one}" for one in ("confirmed", "held", "shed", "failed", "invalid")},
        "result",
    ),
    Count("store_bytes", "Bytes of objects that were confirmed", "put_bytes"),
    Count("stores_over_quota", "Stores for which a namespace had no room left in its quota", "puts_over_quota"),
    Count("stores_withdrawn", "Stores taken back before they began, as their session had ended", "put_withdrawn"),
    Count("evicted_objects", "Objects that left to make room", "evicted_objects"),
    Count("evicted_chunks", "Chunks that left to make room", "evicted_chunks"),
    Count("replaced_objects", "Objects that gave way to one of the same key", "replaced"),
    Count("purged_objects", "Objects that somebody took off the card", "purged_objects"),
    Count(
        "dropped_objects",
        "Objects taken off the card as their bytes were bad or could not be read",
        {one: f"dropped_{one}" for one in ("corrupt", "unreadable")},
        "reason",
    ),
    Count("commits", "Transactions of the index", {"ok": "commits", "failed": "commits_failed"}, "result"),
    Count("index_errors", "Reads of the index that failed; each is a miss", "index_errors"),
    Count("errors", "Errors inside the gateway, with a traceback in its log", "errors_of_ours"),
    Count(
        "reads",
        "Reads of the medium for loads: done, joined by another load of the same, or begun again",
        {"done": "reads", "joined": "reads_joined", "again": "reads_again"},
        "how",
    ),
    Count(
        "leases",
        "Leases of what lay in the ring already, or was on its way there",
        {"found": "leases_found", "joined": "leases_joined"},
        "how",
    ),
    Count("spoilt_loads", "Loads that failed as their engine wrote to the slots meanwhile", "spoilt_slots"),
    Count("connections", "Connections to the gateway's socket", "connections"),
    Count(
        "refused_connections",
        "Connections that were refused, by the code of docs/protocol.md",
        {code.value: f"refused_{code.value}" for code in RefusedCode},
        "code",
    ),
    Count("sessions_not_reading", "Sessions ended as they did not read their answers", "sessions_not_reading"),
    Count("verify_runs", "Proofs of the whole card that were begun", "verify_runs"),
    Count("verified_objects", "Objects proved by them", "verified_objects"),
    Count("verified_damaged_objects", "Objects found damaged by them", "verified_damaged"),
    Count("purges", "Messages of tools by which objects were to leave", "purges"),
    *REMOTE_COUNTS,
)
# What the gateway counts twice over: how the card answered, beside what the session was told.
ELSEWHERE: Final = frozenset(
    {"gets", "gets_missed", "puts_confirmed", "puts_failed", "puts_held", "puts_shed", "puts_busy", "puts_invalid"}
)

# Name, text, and where the status has it.
GAUGES: Final = (
    ("card_capacity_bytes", "What the card's slots take together", "capacity_bytes"),
    ("card_slot_bytes", "One slot", "slot_bytes"),
    ("card_objects", "Objects on the card", "objects"),
    ("card_object_bytes", "Their bytes, without what slots are not filled", "object_bytes"),
    ("card_limbo_objects", "Objects that have left and can still be read", "limbo_objects"),
    ("card_uncommitted_changes", "Changes of the index that wait for their commit", "uncommitted"),
    ("lookup_table_entries", "Entries of the lookup table", "table_entries"),
    ("index_map_bytes", "What the index may grow to before its map grows", "index_map_bytes"),
    ("engines", "Engines that are attached", "engines"),
)
NAMESPACE_GAUGES: Final = (
    ("namespace_objects", "Objects of a namespace", "objects"),
    ("namespace_held_bytes", "What a namespace has of the card: slots in flight, used and in limbo", "bytes"),
    ("namespace_limbo_bytes", "What of that is about to be free", "limbo_bytes"),
    ("namespace_quota_bytes", "What a namespace may have; absent without a quota", "quota_bytes"),
)


def families(figures: Figures) -> Iterator[Metric]:
    """Every metric, with what it says now. Those that count are there from the beginning, as 0."""
    yield from _counts(figures.status["counters"])
    yield from _gauges(figures)
    yield from _namespaces(figures.status)
    times = HistogramMetricFamily(
        f"{PREFIX}io_seconds",
        "How long the read or write of one object took, checksums included",
        labels=["lane"],
    )
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    for lane, one in figures.times.items():
        times.add_metric([lane], buckets=list(zip(bounds, one.counts, strict=True)), sum_value=one.sum_s)
    yield times


def _counts(counters: Mapping[str, int]) -> Iterator[Metric]:
    for count in COUNTS:
        family = CounterMetricFamily(f"{PREFIX}{count.name}", count.text, labels=[count.label] if count.label else [])
        if isinstance(count.of, str):
            family.add_metric([], counters.get(count.of, 0))
        else:
            for value, name in count.of.items():
                family.add_metric([value], counters.get(name, 0))
        yield family


def _gauges(figures: Figures) -> Iterator[Metric]:
    status = figures.status
    for name, text, place in GAUGES:
        yield GaugeMetricFamily(f"{PREFIX}{name}", text, status[place])
    yield GaugeMetricFamily(f"{PREFIX}uptime_seconds", "Since the gateway's start", figures.uptime_s)
    yield GaugeMetricFamily(f"{PREFIX}objects_in_flight", "Objects that are being loaded or stored", figures.in_flight)
    yield GaugeMetricFamily(f"{PREFIX}draining", "1: the gateway is ending", int(status["draining"]))
    yield GaugeMetricFamily(
        f"{PREFIX}direct_io", "1: the page cache of the kernel is passed by (O_DIRECT)", int(status["direct"])
    )
    yield from _remote(status)
    yield _labelled("card_slots", "Slots of the card, by what they are just now", "state", status["slots"])
    sessions = {role.value: figures.roles.get(role.value, 0) for role in Role}
    yield _labelled("sessions", "Attached sessions", "role", sessions)
    yield _labelled("queued_objects", "Objects that wait, by what for", "queue", figures.queued)
    info = GaugeMetricFamily(f"{PREFIX}gateway_info", "Always 1; who it is", labels=["version", "protocol", "card"])
    info.add_metric([status["version"], str(status["protocol"]), status["card_uuid"]], 1)
    yield info


def _remote(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Nothing where there is no remote."""
    remote = status.get("remote")
    if remote is None:
        return
    up = {"calls": remote["state"] == "up"}
    if remote["segment_state"] != "none":
        up["segment"] = remote["segment_state"] == "up"
    yield _labelled("remote_up", "1: the process of that part is set up with the remote's master", "part", up)
    for name, text in (
        ("fetching", "Objects that are awaited from the remote"),
        ("storing", "Objects on their way to it"),
    ):
        yield GaugeMetricFamily(f"{PREFIX}remote_{name}_objects", text, remote[name])


def _namespaces(status: Mapping[str, object]) -> Iterator[Metric]:
    """The namespaces that take most, as many as a status shows: labels are bounded."""
    shown = status["namespaces"]
    left_out = status["namespaces_left_out"]
    assert isinstance(shown, list)
    assert isinstance(left_out, int)
    yield GaugeMetricFamily(f"{PREFIX}namespaces", "Namespaces that have something of the card", len(shown) + left_out)
    for name, text, place in NAMESPACE_GAUGES:
        values = {one["namespace"]: one[place] for one in shown if one[place] is not None}
        yield _labelled(name, text, "namespace", values)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
