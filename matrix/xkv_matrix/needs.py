"""What the product reads of vLLM's objects, and makes of vLLM's classes, checked in a release's sources.

Owns: the table of it, and finding what a tree lacks. Must not know: features' terms, and what vLLM calls of ours.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xkv_compat import syntax

from .binding import misbound
from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xkv_compat.source import SourceReader

__all__ = ["KEY_PARTS", "NEEDS", "Need", "lacking"]

_BASE = "vllm.v1.kv_offload.base"
_CONFIG = "vllm.v1.kv_offload.config"
_OLD_WORKER = "vllm.v1.kv_offload.worker.worker"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"


@dataclass(frozen=True)
class Need:
    """Of a class, looked for in ``modules`` in order: attributes that are read, and how objects are made.

    ``made_with``: the keywords of the call, None where we make none. ``when``: a feature with which we need it;
    with a ``!``, one without which we do.
    """

    name: str
    modules: tuple[str, ...]
    reads: tuple[str, ...] = ()
    made_with: tuple[str, ...] | None = None
    when: str = ""


NEEDS: tuple[Need, ...] = (
    Need("ReqContext", (_BASE,), ("req_id",)),
    Need("PrepareStoreOutput", (_BASE,), made_with=("keys_to_store", "store_spec", "evicted_keys")),
    Need("RequestOffloadingContext", (_BASE,), made_with=()),
    Need("TransferResult", (_BASE, _OLD_WORKER), made_with=("job_id", "success", "transfer_size", "transfer_time")),
    Need("LookupResult", (_BASE,), ("MISS", "HIT", "HIT_PENDING"), when="lookup_enum"),
    Need("CacheHitSource", (_BASE, "vllm.v1.metrics.cache_hit_source"), ("DISK",), when="load_source"),
    Need("GPULoadStoreSpec", (_BASE,), ("block_ids", "group_sizes", "block_indices")),
    Need("CanonicalKVCaches", (_BASE,), ("tensors", "group_data_refs")),
    Need("CanonicalKVCacheTensor", (_BASE,), ("tensor", "page_size_bytes")),
    Need("CanonicalKVCacheRef", (_BASE,), ("tensor_idx", "page_size_bytes")),
    Need("OffloadingCounterMetadata", (_BASE,), made_with=("documentation",)),
    Need("OffloadingCounterMetadata", (_BASE,), made_with=("documentation", "labelnames"), when="labelled_stats"),
    Need("OffloadingHistogramMetadata", (_BASE,), made_with=("documentation", "buckets"), when="histogram_stats"),
    Need("OffloadingConnectorStats", (f"{_OFFLOADING}.metrics",), ("increase_counter",), made_with=()),
    Need("OffloadingConnectorStats", (f"{_OFFLOADING}.metrics",), ("observe_histogram",), when="histogram_stats"),
    Need("KVConnectorTransferResults", (f"{_CONNECTOR}.base",), ("finished_recving", "failed_recving"),
         when="request_error_reporting"),
    Need("OffloadingConnector", (f"{_CONNECTOR}.offloading_connector",), ("connector_worker", "connector_scheduler")),
    Need("OffloadingConnectorScheduler", (f"{_OFFLOADING}.scheduler",), ("manager",)),
    Need("SchedulerOutput", ("vllm.v1.core.sched.output",), ("num_scheduled_tokens", "scheduled_spec_decode_tokens")),
    Need("OffloadingConnectorWorker", (f"{_OFFLOADING}.worker",), ("worker",)),
    Need("OffloadingConfig", (_CONFIG,),
         ("groups", "parallel", "engine_id", "extra_config", "model", "cache", "worker_kv_bytes_per_block"),
         when="normalized_config"),
    Need("OffloadingGroupConfig", (_CONFIG,), ("tokens_per_block", "layer_names"), when="normalized_config"),
    Need("OffloadingModelConfig", (_CONFIG,), ("name", "dtype"), when="normalized_config"),
    Need("OffloadingCacheConfig", (_CONFIG,), ("tokens_per_hash", "blocks_per_chunk"), when="normalized_config"),
    Need("OffloadingParallelConfig", (_CONFIG,),
         ("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_index"),
         when="normalized_config"),
    Need("VllmConfig", ("vllm.config.vllm",),
         ("kv_transfer_config", "parallel_config", "model_config", "cache_config", "scheduler_config", "load_config",
          "compilation_config")),
    Need("KVTransferConfig", ("vllm.config.kv_transfer",), ("kv_load_failure_policy", "kv_role")),
    Need("SchedulerConfig", ("vllm.config.scheduler",), ("async_scheduling",)),
    Need("KVTransferConfig", ("vllm.config.kv_transfer",), ("engine_id", "kv_connector_extra_config"),
         when="!normalized_config"),
    Need("ParallelConfig", ("vllm.config.parallel",),
         ("rank", "world_size", "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
          "decode_context_parallel_size", "data_parallel_index"), when="!normalized_config"),
    Need("KVCacheConfig", ("vllm.v1.kv_cache_interface",), ("kv_cache_groups",), when="!normalized_config"),
    Need("KVCacheGroupSpec", ("vllm.v1.kv_cache_interface",), ("kv_cache_spec", "layer_names"),
         when="!normalized_config"),
    Need("KVCacheSpec", ("vllm.v1.kv_cache_interface",), ("block_size", "page_size_bytes")),
    Need("ModelConfig", ("vllm.config.model",),
         ("model", "revision", "dtype", "quantization", "hf_config")),
    Need("CacheConfig", ("vllm.config.cache",), ("prefix_caching_hash_algo", "cache_dtype")),
    Need("LoadConfig", ("vllm.config.load",), ("load_format",)),
)  # fmt: skip

# A key is taken apart by us without vLLM's help: the functions that do it there, and what they must return.
KEY_PARTS: Mapping[str, tuple[str, ...]] = {
    "get_offload_block_hash": ("BlockHash(key[:-4])", "key[:-4]"),
    "get_offload_group_idx": ("int.from_bytes(key[-4:], 'big', signed=False)", "int.from_bytes(key[-4:], 'big')"),
}


def lacking(reader: SourceReader, features: Mapping[str, bool]) -> Iterator[Finding]:
    """What we need of vLLM's classes and a tree does not have."""
    for need in NEEDS:
        if need.when and features[need.when.removeprefix("!")] == need.when.startswith("!"):
            continue
        for module in need.modules:
            if lineage := [node for _, node in reader.lineage(module, need.name)]:
                yield from (Finding("needs", f"{module}.{need.name}", text) for text in _faults(lineage, need))
                break
        else:
            yield Finding("needs", f"{need.modules[0]}.{need.name}", "no such class, and we need it")
    for name, known in KEY_PARTS.items():
        function = reader.function(_BASE, name)
        if function is not None and (found := _returned(function)) not in known:
            text = f"returns {found}: keys are taken apart as {known[0]}"
            yield Finding("needs", f"{_BASE}.{name}", text)


def _returned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    last = function.body[-1]
    body = ast.unparse(last.value) if isinstance(last, ast.Return) and last.value is not None else "nothing"
    return body if syntax.parameter_names(function) == ("key",) else f"{body} of ({ast.unparse(function.args)})"


def _faults(lineage: list[ast.ClassDef], need: Need) -> Iterator[str]:
    for name in need.reads:
        if not any(
            name in syntax.class_body_names(node)
            or name in syntax.field_names(node)
            or syntax.assigns_to_self(node, name)
            for node in lineage
        ):
            yield f"{name}: read by us, and not there"
    if need.made_with is not None and (text := _misfit(lineage, need.made_with)) is not None:
        yield f"made by us with ({', '.join(f'{name}=' for name in need.made_with)}): {text}"


def _misfit(lineage: list[ast.ClassDef], keywords: tuple[str, ...]) -> str | None:
    """Why a class cannot be made with these keywords."""
    fields: dict[str, bool] = {}  # name → has a default
    for node in reversed(lineage):
        made = syntax.class_body_names(node).get("__init__")
        if isinstance(made, ast.FunctionDef):
            return misbound(made, keywords) if node is lineage[0] else "one of its bases has a constructor of its own"
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields[statement.target.id] = statement.value is not None and _is_default(statement.value)
    if missing := [name for name in keywords if name not in fields]:
        return f"no field {', '.join(missing)}"
    if needed := [name for name, has_default in fields.items() if not has_default and name not in keywords]:
        return f"needs {', '.join(needed)}"
    return None


def _is_default(value: ast.expr) -> bool:
    """Whether what stands behind a field gives it a value: ``field(...)`` need not."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in {"field", "Field"}):
        return True
    named = {keyword.arg for keyword in value.keywords}
    return bool(value.args) or bool(named & {"default", "default_factory", "init"})
