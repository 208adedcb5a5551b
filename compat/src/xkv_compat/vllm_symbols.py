"""The one place where the product gets vLLM's symbols whose presence varies between releases.

Owns: handing out vLLM's classes, and the door to the views of its configuration (``config_view``,
``layers``, ``model_facts``); all of it imported when asked for, nothing when this module is.
Must not know: what the product does with them.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .config_view import ConfigView, GroupView, offloading_config_view
from .errors import UnsupportedVLLM
from .features import detect_live, installed_version
from .layers import LayerFacts, layer_specs
from .live import import_module
from .model_facts import model_config_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "BoolLookupResult",
    "ConfigView",
    "Framework",
    "GroupView",
    "LayerFacts",
    "connector_manager",
    "connector_workers",
    "current_vllm_config",
    "default_request_context",
    "event_maker",
    "framework",
    "has_default_seed",
    "kv_events_are_on",
    "kv_load_failure_policy",
    "kv_role",
    "layer_specs",
    "model_config_facts",
    "none_hash_is_stable",
    "offloading_config_view",
    "offloading_connector_class",
    "schedules_ahead",
    "vllm_version_text",
]

_BASE = "vllm.v1.kv_offload.base"
_OLD_WORKER = "vllm.v1.kv_offload.worker.worker"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"

# The algorithms for which vLLM, where it has a fixed default seed, uses it.
_SEEDED_BY_DEFAULT = frozenset({"sha256", "sha256_cbor"})


class BoolLookupResult:
    """What stands for ``LookupResult`` where lookups answer a bool or None (None asks again)."""

    MISS = False
    HIT = True
    HIT_PENDING = None
    RETRY = None


@dataclass(frozen=True)
class Framework:
    """vLLM's classes and functions that a spec is written with. None where a release has no such thing."""

    OffloadingSpec: Any
    OffloadingManager: Any
    OffloadingWorker: Any  # OffloadingHandler on releases with handlers
    LoadStoreSpec: Any
    GPULoadStoreSpec: Any
    PrepareStoreOutput: Any
    RequestOffloadingContext: Any
    TransferResult: Any
    LookupResult: Any  # the enum, or BoolLookupResult
    OffloadingConnectorStats: Any
    OffloadingCounterMetadata: Any
    OffloadingGaugeMetadata: Any
    OffloadingHistogramMetadata: Any
    get_offload_block_hash: Any
    get_offload_group_idx: Any
    CacheHitSource: Any  # None where nobody asks for a load's source


def _attribute(module: str, name: str) -> Any:
    """A module's attribute, or None where the module or the attribute is not there."""
    loaded = import_module(module)
    return None if loaded is None else getattr(loaded, name, None)


# Attribute of Framework → the places where it may be, in the order of trying.
_PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "OffloadingSpec": ((_BASE, "OffloadingSpec"),),
    "OffloadingManager": ((_BASE, "OffloadingManager"),),
    "LoadStoreSpec": ((_BASE, "LoadStoreSpec"),),
    "GPULoadStoreSpec": ((_BASE, "GPULoadStoreSpec"),),
    "PrepareStoreOutput": ((_BASE, "PrepareStoreOutput"),),
    "RequestOffloadingContext": ((_BASE, "RequestOffloadingContext"),),
    "OffloadingWorker": ((_BASE, "OffloadingWorker"), (_OLD_WORKER, "OffloadingHandler")),
    "TransferResult": ((_BASE, "TransferResult"), (_OLD_WORKER, "TransferResult")),
    "OffloadingConnectorStats": ((_METRICS, "OffloadingConnectorStats"),),
    "OffloadingCounterMetadata": ((_BASE, "OffloadingCounterMetadata"),),
    "OffloadingGaugeMetadata": ((_BASE, "OffloadingGaugeMetadata"),),
    "OffloadingHistogramMetadata": ((_BASE, "OffloadingHistogramMetadata"),),
    "get_offload_block_hash": ((_BASE, "get_offload_block_hash"),),
    "get_offload_group_idx": ((_BASE, "get_offload_group_idx"),),
}
_OPTIONAL_PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "LookupResult": ((_BASE, "LookupResult"),),
    "CacheHitSource": ((_BASE, "CacheHitSource"), ("vllm.v1.metrics.cache_hit_source", "CacheHitSource")),
}


def _first(places: tuple[tuple[str, str], ...]) -> Any:
    for module, name in places:
        found = _attribute(module, name)
        if found is not None:
            return found
    return None


def framework() -> Framework:
    """The framework's classes in this vLLM.

    Raises UnsupportedVLLM that lists everything missing at once; BrokenVLLM where a module fails to
    import.
    """
    places = _PLACES | _OPTIONAL_PLACES
    found = {name: _first(tried) for name, tried in places.items()}
    needed = set(_PLACES)
    if found["LookupResult"] is None and not detect_live()["single_worker"]:
        found["LookupResult"] = BoolLookupResult  # bools for lookups came with handlers
    else:
        needed.add("LookupResult")
    missing = tuple(
        f"{name}: not in " + ", nor in ".join(module for module, _ in places[name])
        for name, value in found.items()
        if name in needed and value is None
    )
    if missing:
        raise UnsupportedVLLM(missing, installed_version())
    return Framework(**found)


def current_vllm_config() -> Any | None:
    """The configuration of vLLM where one is set, else None; without a warning or an error in either case.

    It is set in a worker while the connector makes the spec and while it calls ``get_worker`` (the
    worker's wrapper sets it around ``initialize_from_config``), and not in the scheduler's process.
    """
    ask = _attribute("vllm.config.vllm", "get_current_vllm_config_or_none")
    if ask is not None:
        return ask()
    return _attribute("vllm.config.vllm", "_current_vllm_config")


def none_hash_is_stable(hash_algorithm: str) -> bool:
    """Whether block hashes of this algorithm stay the same from one process to the next.

    A set PYTHONHASHSEED makes them so everywhere (vLLM hashes its text, whatever it is).
    """
    if os.environ.get("PYTHONHASHSEED") is not None:
        return True
    return has_default_seed(detect_live(), hash_algorithm)


def has_default_seed(features: Mapping[str, bool], hash_algorithm: str) -> bool:
    """Whether a vLLM with these features seeds this algorithm by itself, always alike."""
    return features["stable_none_hash_default"] and hash_algorithm in _SEEDED_BY_DEFAULT


def vllm_version_text() -> str:
    """The installed vLLM's version, an opaque text: it is never compared but for equality."""
    return installed_version()


def kv_load_failure_policy(vllm_config: Any) -> str:
    """What vLLM does with a request whose load failed: ``fail`` or ``recompute``."""
    return str(vllm_config.kv_transfer_config.kv_load_failure_policy)


def kv_role(vllm_config: Any) -> str:
    """``kv_both``, ``kv_producer`` or ``kv_consumer``."""
    return str(vllm_config.kv_transfer_config.kv_role)


def schedules_ahead(vllm_config: Any) -> bool:
    """Whether vLLM decides on a step before it has heard of the one before it (async scheduling)."""
    return vllm_config.scheduler_config.async_scheduling is not False


def offloading_connector_class() -> Any:
    """The class ``OffloadingConnector``; UnsupportedVLLM where there is none."""
    found = _attribute(_CONNECTOR, "OffloadingConnector")
    if found is None:
        raise UnsupportedVLLM((f"OffloadingConnector: not in {_CONNECTOR}",), installed_version())
    return found


def connector_workers(connector: Any) -> tuple[Any, ...]:
    """The spec's worker, or its handlers, in an OffloadingConnector; none in the scheduler's process.

    A handler that serves several directions comes once.
    """
    side = connector.connector_worker
    if side is None or side.worker is None:
        return ()
    return (side.worker,) if detect_live()["single_worker"] else tuple(side.worker.handlers)


def connector_manager(connector: Any) -> Any | None:
    """The spec's manager in an OffloadingConnector; None in a worker's process."""
    side = connector.connector_scheduler
    return None if side is None else side.manager


def kv_events_are_on(spec: Any) -> bool:
    """Whether vLLM publishes KV events; False where a spec is not told."""
    config = getattr(spec, "kv_events_config", None)
    return bool(getattr(config, "enable_kv_cache_events", False))


def event_maker() -> Callable[[Sequence[bytes], bool], Any] | None:
    """How an event of a local storage medium is made, of offload keys and whether they are removed.

    None where a release has no events. The medium is a text where releases have no enumeration of media; what else an
    event may say is said where it can be.
    """
    made = _attribute(_BASE, "OffloadingEvent")
    if made is None:
        return None
    known = frozenset(field.name for field in dataclasses.fields(made))
    media, localities = _attribute(_BASE, "Medium"), _attribute(_BASE, "Locality")
    more: dict[str, Any] = {"medium": "STORAGE" if media is None else media.STORAGE}
    if localities is not None and "locality" in known:
        more["locality"] = localities.LOCAL

    def make(keys: Sequence[bytes], removed: bool) -> Any:
        expected = {"removal_expected": not removed} if "removal_expected" in known else {}
        return made(keys=list(keys), removed=removed, **more, **expected)

    return make


def default_request_context() -> Any:
    """A new ``RequestOffloadingContext`` with the release's own default policy."""
    return framework().RequestOffloadingContext()
