"""The probe table: every question that is asked of a vLLM, as data.

Owns: probes, the terms that join them, the features made of terms, and the requirements (renames as
pairs). The release where a thing was first seen stands in ``since`` for people; nothing compares it.
Must not know: how a question is answered (``live``, ``source``), and what is done with the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FEATURES", "REQUIREMENTS", "AllOf", "AnyOf", "Feature", "Kind", "Not", "Probe", "Requirement",
           "Term", "probes_of"]  # fmt: skip


class Kind(Enum):
    """What a probe looks for."""

    MODULE = "module"  # the module exists
    SYMBOL = "symbol"  # a name bound at the module's top level, imported names included
    MEMBER = "member"  # an attribute of a class, inherited ones included
    OWN_MEMBER = "class-dict member"  # an attribute in the class's own body
    FIELD = "field"  # of a dataclass or a NamedTuple, inherited ones included
    PARAMETER = "parameter"  # of a function, or of a method ("Class.method")
    ENUM_MEMBER = "enum member"
    ABSTRACT = "abstract method"  # an abstract method of a class that no subclass body filled
    SELF_ATTRIBUTE = "instance attribute"  # assigned to ``self`` in a method of the class
    CALL = "call"  # a call ``<…>.owner.name(…)`` in the module's source
    TEXT = "source text"  # a string constant in the module, or in the function or class ``owner``


@dataclass(frozen=True)
class Probe:
    """One question: is ``name`` there, of this kind, in ``owner`` of ``module``?"""

    kind: Kind
    module: str
    name: str = ""
    owner: str = ""

    def __str__(self) -> str:
        path = ".".join(part for part in (self.module, self.owner) if part)
        return f"{self.kind.value} {path}:{self.name}" if self.name else f"{self.kind.value} {path}"


@dataclass(frozen=True)
class AllOf:
    """True when every term is."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class AnyOf:
    """True when at least one term is."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Not:
    """True when the term is not."""

    term: Term


Term = Probe | AllOf | AnyOf | Not


@dataclass(frozen=True)
class Feature:
    """A named capability of a vLLM.

    ``since``: the release where it was first seen (for people). ``present``, ``absent``: what the
    product does in each case.
    """

    name: str
    term: Term
    since: str
    present: str
    absent: str


@dataclass(frozen=True)
class Requirement:
    """Something that the product cannot do without, under any of its names (renames stand together)."""

    name: str
    one_of: tuple[Probe, ...]


def probes_of(term: Term) -> Iterator[Probe]:
    """Every probe in a term, left to right."""
    if isinstance(term, Probe):
        yield term
    elif isinstance(term, Not):
        yield from probes_of(term.term)
    else:
        for inner in term.terms:
            yield from probes_of(inner)


_BASE = "vllm.v1.kv_offload.base"
_CONFIG = "vllm.v1.kv_offload.config"
_OLD_WORKER = "vllm.v1.kv_offload.worker.worker"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_CONNECTOR_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_HASHES = "vllm.v1.core.kv_cache_utils"
_SPECS = "vllm.v1.kv_cache_interface"
_SCHEDULER = "vllm.v1.core.sched.scheduler"


def _symbol(module: str, name: str) -> Probe:
    return Probe(Kind.SYMBOL, module, name)


def _member(module: str, owner: str, name: str) -> Probe:
    return Probe(Kind.MEMBER, module, name, owner)


def _field(module: str, owner: str, name: str) -> Probe:
    return Probe(Kind.FIELD, module, name, owner)


def _parameter(module: str, owner: str, name: str) -> Probe:
    return Probe(Kind.PARAMETER, module, name, owner)


_HAS_CONFIG = _parameter(_BASE, "OffloadingSpec.__init__", "config")
# Releases whose spec is not made from an OffloadingConfig store nothing when a request finishes.
_NO_FINISH_PASS = AllOf((_symbol(_BASE, "OffloadingSpec"), Not(_HAS_CONFIG)))
_HAS_GROUP_ID = _field(_CONFIG, "OffloadingGroupConfig", "group_id")

FEATURES: tuple[Feature, ...] = (
    Feature(
        "normalized_config",
        AllOf((_HAS_CONFIG, Probe(Kind.MODULE, _CONFIG))),
        "0.26",
        "the spec is made from an OffloadingConfig",
        "the same view is built from (vllm_config, kv_cache_config)",
    ),
    Feature(
        "single_worker",
        AllOf((_symbol(_BASE, "OffloadingWorker"), _member(_BASE, "OffloadingSpec", "get_worker"))),
        "0.25",
        "get_worker returns one worker with submit_store and submit_load",
        "get_handlers yields a handler for each direction",
    ),
    Feature(
        "handlers",
        _member(_BASE, "OffloadingSpec", "get_handlers"),
        "up to 0.24",
        "get_handlers is abstract and must be there",
        "get_handlers is not called",
    ),
    Feature(
        "lookup_enum",
        _symbol(_BASE, "LookupResult"),
        "0.25",
        "lookup answers with the enum",
        "lookup answers True, False or None",
    ),
    Feature(
        "schedule_end_context",
        _parameter(_BASE, "OffloadingManager.on_schedule_end", "context"),
        "0.25",
        "on_schedule_end gets new and preempted request ids",
        "on_schedule_end gets nothing (context=None serves both)",
    ),
    Feature(
        "load_store_spec_medium_abstract",
        Probe(Kind.ABSTRACT, _BASE, "medium", "LoadStoreSpec"),
        "up to 0.25",
        "the load/store spec must define medium()",
        "medium() is harmless",
    ),
    Feature(
        "event_medium_enum",
        _symbol(_BASE, "Medium"),
        "0.27",
        "events name Medium.STORAGE (a str is fatal)",
        "events name the medium by a str",
    ),
    Feature(
        "event_locality",
        AllOf((_symbol(_BASE, "Locality"), _field(_BASE, "OffloadingEvent", "locality"))),
        "0.26",
        "events tell local from remote",
        "the field is left out",
    ),
    Feature(
        "event_ownership",
        _field(_BASE, "OffloadingEvent", "ownership"),
        "0.29",
        "events may name their owner",
        "the field is left out",
    ),
    Feature(
        "chunk_policy_name",
        Probe(Kind.ENUM_MEMBER, _BASE, "CHUNK_LEVEL", "OffloadPolicy"),
        "0.30",
        "the default policy is CHUNK_LEVEL",
        "the default policy is BLOCK_LEVEL (nobody names it: the context's default is used)",
    ),
    Feature(
        "request_state",
        _member(_BASE, "ReqContext", "get_state"),
        "0.27",
        "request contexts carry per-request state",
        "a dict by request id",
    ),
    Feature(
        "offload_key_position",
        _member(_BASE, "ReqContext", "get_offload_key_position"),
        "0.31",
        "a key's end token is known",
        "positions are not known to the manager",
    ),
    Feature(
        "recency_calls",
        Probe(Kind.CALL, f"{_OFFLOADING}.scheduler", "touch", "manager"),
        "up to 0.30",
        "the connector calls manager.touch",
        "touch is never called; lookups alone carry recency",
    ),
    Feature(
        "group_ids",
        _HAS_GROUP_ID,
        "0.30",
        "positions map to KV-group ids through config.groups",
        "a group's position is its id",
    ),
    Feature(
        "group_window_info",
        _field(_CONFIG, "OffloadingGroupConfig", "sliding_window_size_in_chunks"),
        "0.33",
        "a chunk with unreachable missing blocks only is offered: chunks of several blocks are safe",
        "chunks of several groups may have holes: see the valid-block masks",
    ),
    Feature(
        "window_store_mask",
        Probe(Kind.CALL, f"{_OFFLOADING}.scheduler", "reachable_block_mask", "manager_cls"),
        "0.30",
        "of a sliding window's chunks only those are offered that a hit at the prompt's end can need",
        "all of a sliding window's chunks are offered",
    ),
    Feature(
        "finish_commit_clamp",
        AnyOf((_HAS_GROUP_ID, _NO_FINISH_PASS)),
        "not 0.26 to 0.29",
        "offload_prompt_only=False is honoured",
        "offload_prompt_only is forced: a finished request may store a slot that was never computed",
    ),
    Feature(
        "load_source",
        _member(_BASE, "OffloadingManager", "get_load_source"),
        "0.32",
        "the manager says DISK for a load's source",
        "nobody asks",
    ),
    Feature(
        "manager_lock",
        _member(_BASE, "OffloadingManager", "lock"),
        "0.33",
        "the connector enters the manager's lock; on_schedule_end is the step's last call",
        "the manager is single-threaded; on_schedule_end may come in mid-step",
    ),
    Feature(
        "reset_fence",
        _member(_BASE, "OffloadingManager", "on_reset_flushed"),
        "0.33",
        "old transfers' end after a reset is told",
        "late stores are dropped by the namespace's nonce",
    ),
    Feature(
        "config_info",
        _member(_BASE, "OffloadingManager", "config_info"),
        "0.33",
        "the manager may publish configuration as an info metric",
        "nobody asks",
    ),
    Feature(
        "config_info_keys",
        _member(_BASE, "OffloadingSpec", "config_info_keys"),
        "0.33",
        "the spec may declare info labels",
        "nobody asks",
    ),
    Feature(
        "set_info_metrics",
        _member(f"{_OFFLOADING}.metrics", "OffloadingConnectorStats", "set_info"),
        "0.33",
        "stats may carry info metrics",
        "counters, gauges and histograms only",
    ),
    Feature(
        "labelled_stats",
        _parameter(f"{_OFFLOADING}.metrics", "OffloadingConnectorStats.increase_counter", "labelvalues"),
        "0.24",
        "counters may carry labels: misses by reason, failures by kind",
        "the counters without labels alone",
    ),
    Feature(
        "histogram_stats",
        _member(f"{_OFFLOADING}.metrics", "OffloadingConnectorStats", "observe_histogram"),
        "0.24",
        "times and sizes are histograms",
        "no times and sizes",
    ),
    Feature(
        "expedited_load",
        _parameter(_BASE, "OffloadingWorker.submit_load", "expedited"),
        "0.33",
        "loads inside the step are marked expedited",
        "the argument is accepted and never comes",
    ),
    Feature(
        "sync_loads",
        _field(f"{_OFFLOADING}.common", "TransferJob", "sync"),
        "0.33",
        "loads may run inside the step: one group only, else the budget must be 0",
        "loads are always asynchronous",
    ),
    Feature(
        "block_error_reporting",
        _member(_CONNECTOR_BASE, "KVConnectorBase_V1", "get_block_ids_with_load_errors"),
        "0.24",
        "failed destination blocks of one full-attention group can be reported",
        "a load must not be able to fail",
    ),
    Feature(
        "request_error_reporting",
        AllOf(
            (
                _symbol(_CONNECTOR_BASE, "KVConnectorTransferResults"),
                _member(_SCHEDULER, "Scheduler", "_handle_failed_recving"),
            )
        ),
        "0.30",
        "failed loads are reported by request, any number of groups",
        "block errors where they are safe, otherwise verify before hit",
    ),
    Feature(
        "abort_safe",  # a sign only: the parameter came with the change that made aborts safe
        AnyOf(
            (
                _parameter(f"{_OFFLOADING}.scheduler", "RequestOffloadState.storable_chunks", "group_state"),
                _NO_FINISH_PASS,
            )
        ),
        "all but 0.26",
        "aborts of queued and loading requests are safe",
        "an abort may end the engine by itself: warned about, and several ranks verify before hit",
    ),
    Feature(
        "reset_safe",  # a sign only: the parameter came with the release that made resets safe
        _HAS_CONFIG,
        "0.26",
        "reset_cache with transfers in flight is safe",
        "reset_cache under load may end the engine: documented",
    ),
    Feature(
        "stable_none_hash_default",
        _symbol(_HASHES, "DEFAULT_NONE_HASH_SEED"),
        "0.29",
        "block hashes are stable without PYTHONHASHSEED (sha256 and sha256_cbor)",
        "block hashes are stable only with PYTHONHASHSEED set",
    ),
    Feature(
        "tagged_hash_extras",
        Probe(Kind.TEXT, _HASHES, "lora", "_gen_lora_extra_hash_keys"),
        "0.31",
        "LoRA, image, salt and embedding parts of a hash are tagged tuples",
        "they are raw values; the namespace tells the two apart",
    ),
    Feature(
        "replicated_store",
        Probe(Kind.SELF_ATTRIBUTE, _BASE, "replicated_layout", "OffloadingSpec"),
        "0.27",
        "a spec that sets replicated_layout gets stores on rank 0 only",
        "every rank is asked to store; ranks other than 0 answer done",
    ),
    Feature(
        "canonical_mapping",
        _field(_BASE, "CanonicalKVCacheRef", "mapping"),
        "0.27",
        "refs may say how a page maps to a canonical one (not used yet)",
        "pages are opaque bytes",
    ),
    Feature(
        "blocks_per_chunk_key",
        Probe(Kind.TEXT, f"{_OFFLOADING}.config", "blocks_per_chunk", "build_offloading_config"),
        "0.26",
        "blocks_per_chunk sets the chunk",
        "only block_size (in tokens) does; blocks_per_chunk alone is a start-up error that says what to type",
    ),
    Feature(
        "resolved_cache_dtype",
        Probe(Kind.TEXT, f"{_OFFLOADING}.config", "auto", "build_offloading_config"),
        "0.27",
        "config.model.dtype is the resolved dtype",
        "it may be 'auto': the model's own dtype is taken then",
    ),
    Feature(
        "cross_layers_registration",
        Probe(Kind.OWN_MEMBER, _CONNECTOR, "register_cross_layers_kv_cache", "OffloadingConnector"),
        "up to 0.28",
        "all layers may come as one tensor",
        "tensors come by layer, or packed",
    ),
    Feature(
        "kv_cache_layout",
        _field(_CONFIG, "OffloadingConfig", "kv_cache_layout"),
        "0.29",
        "the configuration names the pages' layout",
        "the layout is the one that the connector requires",
    ),
    Feature(
        "loads_after_forward",
        _field("vllm.v1.core.sched.output", "SchedulerOutput", "has_sync_kv_loads"),
        "0.29",
        "loads are submitted after the forward pass was launched",
        "loads are submitted before the forward pass",
    ),
    Feature(
        "state_hits_agree",  # lifts a refusal: the method alone, which nobody might call, is not enough
        AllOf(
            (
                _member("vllm.v1.core.kv_cache_manager", "KVCacheManager", "get_computed_blocks_for_connector"),
                Probe(Kind.CALL, _SCHEDULER, "get_computed_blocks_for_connector", "kv_cache_manager"),
            )
        ),
        "0.27",
        "with a connector, a request begins where attention and Mamba both have what they need",
        "it may begin where there is no Mamba state: Mamba beside other layers is a start-up error",
    ),
    Feature(
        "gauge_multiprocess_mode",
        _field(_BASE, "OffloadingGaugeMetadata", "multiprocess_mode"),
        "0.33",
        "gauges may name their multi-process mode",
        "gauges have none",
    ),
    Feature(
        "calculate_kv_scales",
        _field("vllm.config.cache", "CacheConfig", "calculate_kv_scales"),
        "up to 0.27",
        "scales may be computed at run time: such a launch keeps its namespace to itself",
        "the option does not exist",
    ),
    Feature(
        "customized_layer_specs",
        _member("vllm.v1.attention.backend", "AttentionBackend", "customize_spec"),
        "0.28",
        "the attention implementation has the last word on a layer's spec",
        "the layer's own spec is final",
    ),
    Feature(
        "current_vllm_config",
        AnyOf(
            (
                _symbol("vllm.config.vllm", "get_current_vllm_config_or_none"),
                _symbol("vllm.config.vllm", "_current_vllm_config"),
            )
        ),
        "0.24",
        "workers read the whole configuration while the spec is made",
        "the namespace is this launch's own",
    ),
    Feature(
        "layer_specs",
        AllOf(
            (
                _field("vllm.config.compilation", "CompilationConfig", "static_forward_context"),
                _member("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase", "get_kv_cache_spec"),
                _symbol(_SPECS, "FullAttentionSpec"),
                _symbol(_SPECS, "MLAAttentionSpec"),
                _symbol(_SPECS, "MambaSpec"),
            )
        ),
        "0.24",
        "workers read each layer's kind of attention and page",
        "the namespace is this launch's own",
    ),
)

_NAMES: Final = (
    "OffloadingSpec", "OffloadingManager", "LoadStoreSpec", "GPULoadStoreSpec", "PrepareStoreOutput",
    "RequestOffloadingContext", "ReqContext", "OffloadingCounterMetadata", "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata", "get_offload_block_hash", "get_offload_group_idx",
)  # fmt: skip
REQUIREMENTS: tuple[Requirement, ...] = (
    *(Requirement(name, (_symbol(_BASE, name),)) for name in _NAMES),
    Requirement("OffloadingWorker", (_symbol(_BASE, "OffloadingWorker"), _symbol(_OLD_WORKER, "OffloadingHandler"))),
    Requirement("TransferResult", (_symbol(_BASE, "TransferResult"), _symbol(_OLD_WORKER, "TransferResult"))),
    Requirement(
        "OffloadingSpec.get_worker",
        (_member(_BASE, "OffloadingSpec", "get_worker"), _member(_BASE, "OffloadingSpec", "get_handlers")),
    ),
    # Bools for lookups came with handlers; where there are none, an enum under another name would never hit.
    Requirement("LookupResult", (_symbol(_BASE, "LookupResult"), _member(_BASE, "OffloadingSpec", "get_handlers"))),
    Requirement(
        "OffloadPolicy's default",
        (
            Probe(Kind.ENUM_MEMBER, _BASE, "CHUNK_LEVEL", "OffloadPolicy"),
            Probe(Kind.ENUM_MEMBER, _BASE, "BLOCK_LEVEL", "OffloadPolicy"),
        ),
    ),
    Requirement("CanonicalKVCaches", (_symbol(_BASE, "CanonicalKVCaches"),)),
    Requirement("OffloadingSpecFactory", (_symbol("vllm.v1.kv_offload.factory", "OffloadingSpecFactory"),)),
    Requirement("OffloadingConnector", (_symbol(_CONNECTOR, "OffloadingConnector"),)),
    Requirement("OffloadingConnectorStats", (_symbol(f"{_OFFLOADING}.metrics", "OffloadingConnectorStats"),)),
)
