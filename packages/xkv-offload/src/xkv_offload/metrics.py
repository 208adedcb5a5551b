"""Counters of this package.

Owns: the names and texts of what is counted; `PROCESS_COUNTERS`, which accumulates per process; the increments that
the manager hands to vLLM since it last asked.
Must not know: vLLM's metric classes (compat hands them over), the gateway.
"""

import threading
from collections import Counter
from collections.abc import Mapping

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
    "lookup_unverified": ("Lookups answered with a miss since the object was not verified in time", "manager"),
    "pending_timeouts": ("Requests that waited longer than xkv.pending_timeout_ms", "manager"),
    "verify_failures": ("Objects that could not be verified", "manager"),
    "lookup_denied": ("Lookups of objects whose load had failed", "manager"),
    "lookup_no_gateway": ("Lookups while the gateway was not there", "manager"),
    "store_keys": ("Chunks given to the workers to be stored", "manager"),
    "rare_keys": ("Chunks not stored because too few requests have asked for them", "manager"),
    "held_keys": ("Chunks not stored because the card holds them, or is about to", "manager"),
    "shed_keys": ("Chunks not stored because of the backlog", "manager"),
    "resets": ("Cache resets", "manager"),
    "manager_errors": ("Errors inside the manager that were kept from vLLM", "manager"),
}

METRIC_PREFIX = "vllm:xkv_"

_lock = threading.Lock()
PROCESS_COUNTERS: dict[str, int] = dict.fromkeys(COUNTERS, 0)


def count(name: str, amount: int = 1) -> None:
    """Add to a counter of this process. Thread-safe."""
    with _lock:
        PROCESS_COUNTERS[name] += amount


class Increments:
    """What the manager counted since vLLM last asked; also added to PROCESS_COUNTERS. One thread."""

    def __init__(self) -> None:
        self._since: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount`."""
        self._since[name] += amount

    def take(self) -> dict[str, int]:
        """The increments since the last call, and forget them."""
        taken = dict(self._since)
        self._since.clear()
        for name, amount in taken.items():
            count(name, amount)
        return taken


def metric_name(name: str) -> str:
    """The name under which vLLM's metrics endpoint shows counter `name`."""
    return METRIC_PREFIX + name
