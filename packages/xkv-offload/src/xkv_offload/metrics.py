"""What this package counts and measures, and under which names vLLM shows it.

Owns: the names, texts, labels and bounds; `PROCESS_COUNTERS`, which accumulates per process; what the manager hands to
vLLM since it last asked: its own counts, and what the ranks have written to the control page.
Must not know: vLLM's metric classes (compat hands them over), the gateway, the page.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# name -> (text, counted by)
COUNTERS: Mapping[str, tuple[str, str]] = {
    "store_objects": ("Objects handed to the gateway", "worker"),
    "store_bytes": ("Bytes handed to the gateway", "worker"),
    "confirmed_objects": ("Objects that the card confirmed or held already", "worker"),
    "refused_objects": ("Objects that the gateway did not take, or lost", "worker"),
    "load_objects": ("Objects restored into KV pages", "worker"),
    "load_bytes": ("Bytes restored into KV pages", "worker"),
    "load_rereads": (
        "Objects read again, as a gateway had ended the lease of their slots before they were copied",
        "worker",
    ),
    "load_failures": ("Objects whose load failed", "worker"),
    "failed_load_jobs": ("Load jobs, each a request's, of which an object failed", "worker"),
    "recomputed_jobs": (
        "Of these, jobs whose request vLLM computes anew (kv_load_failure_policy)",
        "worker",
    ),
    "load_timeouts": ("Load jobs that took longer than xkv.load_timeout_ms", "worker"),
    "shed_objects": ("Objects not stored for want of a ring slot", "worker"),
    "partial_chunks": ("Chunks not stored because they were not certainly whole", "worker"),
    "suspect_chunks": ("Chunks not stored because they may follow from a load that failed inside a step", "worker"),
    "worker_errors": ("Errors inside the worker that were kept from vLLM", "worker"),
    "lookup_hits": ("Lookups answered with a hit", "manager"),
    "lookup_misses": ("Lookups answered with a miss", "manager"),
    "lookup_pending": (
        "Lookups answered later: the object was being verified, or waited for room in the ring",
        "manager",
    ),
    "lookup_remote": ("Lookups answered later: the remote was being asked, or the object was on its way", "manager"),
    "remote_timeouts": ("Requests that waited longer than xkv.pending_timeout_ms for the remote", "manager"),
    "lookup_unverified": ("Lookups answered with a miss since the object was not verified in time", "manager"),
    "pending_timeouts": ("Requests that waited longer than xkv.pending_timeout_ms", "manager"),
    "verify_failures": ("Objects that could not be verified", "manager"),
    "lookup_denied": ("Lookups of objects whose load had failed", "manager"),
    "lookup_declined": ("Lookups answered with a miss since restoring takes longer than computing", "manager"),
    "restore_probes": ("Requests restored to see how fast that is, while hits are declined", "manager"),
    "lookup_no_gateway": ("Lookups while the gateway was not there", "manager"),
    "store_keys": ("Chunks given to the workers to be stored", "manager"),
    "rare_keys": ("Chunks not stored because too few requests have asked for them", "manager"),
    "held_keys": ("Chunks not stored because the card holds them, or is about to", "manager"),
    "shed_keys": ("Chunks not stored because of the backlog", "manager"),
    "resets": ("Cache resets", "manager"),
    "manager_errors": ("Errors inside the manager that were kept from vLLM", "manager"),
}

# What a rank counts goes to its scheduler by number (the control page): new ones come at the end.
WORKER_COUNTERS: tuple[str, ...] = tuple(name for name, (_, counted_by) in COUNTERS.items() if counted_by == "worker")
_WORKER_NUMBERS = {name: number for number, name in enumerate(WORKER_COUNTERS)}


@dataclass(frozen=True, slots=True)
class Labelled:
    """A counter whose values have one label; `of`: which of COUNTERS is which value ("": none is)."""

    text: str
    label: str
    of: Mapping[str, str]


LABELLED: Mapping[str, Labelled] = {
    "misses": Labelled(
        "Lookups answered with a miss, by reason: no object of the chunk is on the card (absent), some rank's is not "
        "(incomplete), its load had failed (denied), the gateway is not there (no_gateway), it was not verified in "
        "time (unverified), restoring takes longer than computing (declined)",
        "reason",
        dict.fromkeys(("absent", "incomplete", "denied", "no_gateway", "unverified", "declined"), ""),
    ),
    "failures": Labelled(
        "What went wrong, by kind: objects whose load failed (load), load jobs that took too long (timeout), objects "
        "that the gateway did not take or lost (store), objects that could not be verified (verify), errors that were "
        "kept from vLLM (worker, manager)",
        "kind",
        {
            "load": "load_failures",
            "timeout": "load_timeouts",
            "store": "refused_objects",
            "verify": "verify_failures",
            "worker": "worker_errors",
            "manager": "manager_errors",
        },
    ),
}
_SHOWN_AS = {counter: (name, value) for name, one in LABELLED.items() for value, counter in one.of.items() if counter}


@dataclass(frozen=True, slots=True)
class Histogram:
    """Something that is measured; `buckets`: upper bounds, in the unit that ends its name."""

    text: str
    buckets: tuple[float, ...]


_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_CHUNKS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
_BYTES = tuple(float(1 << shift) for shift in range(18, 35))  # 256 KiB to 16 GiB
HISTOGRAMS: Mapping[str, Histogram] = {
    "lookup_seconds": Histogram(
        "What the lookups of one step took together",
        (0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0),
    ),
    "wait_seconds": Histogram(
        "How long a request waited for its lookups: for objects to be verified, for room in the ring, or for a remote",
        _SECONDS,
    ),
    "load_seconds": Histogram("From a load job's beginning until all ranks have its bytes in their pages", _SECONDS),
    "load_chunks": Histogram("Chunks of a load job", _CHUNKS),
    "load_job_bytes": Histogram("Slots of the chunks of a load job, on one rank, in bytes", _BYTES),
    "store_seconds": Histogram("From a store job's beginning until its bytes have left all ranks' pages", _SECONDS),
    "store_chunks": Histogram("Chunks of a store job", _CHUNKS),
    "store_job_bytes": Histogram("Slots of the chunks of a store job, on one rank, in bytes", _BYTES),
}
OBSERVATIONS_MAX = 4096  # of one metric between two askings: each goes to vLLM's front end by itself

METRIC_PREFIX = "vllm:xkv_"

_lock = threading.Lock()
PROCESS_COUNTERS: dict[str, int] = dict.fromkeys(COUNTERS, 0)


def count(name: str, amount: int = 1) -> None:
    """Add to a counter of this process. Thread-safe."""
    with _lock:
        PROCESS_COUNTERS[name] += amount


def worker_number(name: str) -> int:
    """The number of a counter of the workers on the control page."""
    return _WORKER_NUMBERS[name]


class Increments:
    """What happened since vLLM last asked; the manager's own is also added to PROCESS_COUNTERS. One thread."""

    def __init__(self) -> None:
        self.since: Counter[str] = Counter()
        """The counts themselves: to add one to where a call would show."""
        self._misses: Counter[str] = Counter()
        self._observed: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount`."""
        self.since[name] += amount

    def miss(self, reason: str) -> None:
        """A lookup was answered with a miss."""
        self._misses[reason] += 1

    def observe(self, name: str, value: float) -> None:
        """Something was measured."""
        values = self._observed[name]
        if len(values) < OBSERVATIONS_MAX:
            values.append(value)

    def add_workers(self, counts: Iterable[int]) -> None:
        """What the ranks have counted meanwhile, by number."""
        for name, amount in zip(WORKER_COUNTERS, counts, strict=False):
            if amount:
                self.since[name] += amount

    def drop(self) -> None:
        """Nobody will ask any more: the process's own counters are all that is left of it."""
        for name, amount in self.since.items():
            if COUNTERS[name][1] == "manager":
                count(name, amount)
        self.since.clear()

    def take(self, new_stats: Callable[[], Any], features: Mapping[str, bool]) -> Any | None:
        """All of it as vLLM's statistics, made by `new_stats`, and forget it; None where nothing happened.

        Without a feature of vLLM's channel (`labelled_stats`, `histogram_stats`) what needs it is left out.
        """
        since, misses, observed = self.since, self._misses, self._observed
        self.since, self._misses, self._observed = Counter(), Counter(), defaultdict(list)
        labelled = Counter({("misses", reason): amount for reason, amount in misses.items()})
        made = None
        for name, amount in since.items():
            if COUNTERS[name][1] == "manager":
                count(name, amount)
            made = made or new_stats()
            made.increase_counter(metric_name(name), amount)
            if name in _SHOWN_AS:
                labelled[_SHOWN_AS[name]] += amount
        if features["labelled_stats"]:
            for (name, value), amount in labelled.items():
                made = made or new_stats()
                made.increase_counter(metric_name(name), amount, (value,))
        if features["histogram_stats"]:
            for name, values in observed.items():
                made = made or new_stats()
                for seen in values:
                    made.observe_histogram(metric_name(name), seen)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Makers:
    """VLLM's classes that say what a metric is."""

    counter: Callable[..., Any]
    histogram: Callable[..., Any]


def definitions(makers: Makers, features: Mapping[str, bool]) -> dict[str, Any]:
    """Everything that `Increments.take` may name, as vLLM wants it declared: what is not ends its API server."""
    found = {metric_name(name): makers.counter(documentation=text) for name, (text, _) in COUNTERS.items()}
    if features["labelled_stats"]:
        for name, one in LABELLED.items():
            found[metric_name(name)] = makers.counter(documentation=one.text, labelnames=(one.label,))
    if features["histogram_stats"]:
        for name, measured in HISTOGRAMS.items():
            found[metric_name(name)] = makers.histogram(documentation=measured.text, buckets=measured.buckets)
    return found


def metric_name(name: str) -> str:
    """The name under which vLLM's metrics endpoint shows `name`."""
    return METRIC_PREFIX + name
