"""What a spec's constructor is given, as one plain frozen view for all releases.

Owns: reading an OffloadingConfig, and building the same view from (vllm_config, kv_cache_config).
Must not know: the product's own keys in ``extra_config``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedVLLM
from .features import detect_live, installed_version
from .live import import_module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ConfigView", "GroupView", "offloading_config_view"]


@dataclass(frozen=True)
class GroupView:
    """One KV-cache group, at its position in the framework's order.

    ``tokens_per_block``: the tokens that one block spans over all workers. ``group_id``: the number
    that keys carry. ``window_in_chunks``: of a sliding window, where the release says so, else None.
    """

    tokens_per_block: int
    layer_names: tuple[str, ...]
    group_id: int
    window_in_chunks: int | None


@dataclass(frozen=True)
class ConfigView:
    """A spec's configuration. Sizes are in ranks, spans in tokens or blocks.

    ``cache_dtype``: text; ``auto`` on releases that do not resolve it (feature
    ``resolved_cache_dtype``). ``rank`` is 0 in the scheduler too. ``layer_names`` are the first
    worker's there. ``replicated_hint``: what the release thinks of identical pages, None where it has
    no opinion. ``kv_cache_layout``: None where the configuration does not name it.
    """

    engine_id: str
    extra_config: Mapping[str, Any]
    model: str
    cache_dtype: str
    groups: tuple[GroupView, ...]
    tokens_per_hash: int
    blocks_per_chunk: int
    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    data_parallel_index: int
    replicated_hint: bool | None
    canonical_layout: bool
    kv_cache_layout: str | None
    kv_bytes_per_block: int | None


def offloading_config_view(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ConfigView:
    """The view of the arguments that vLLM made the spec with, in either shape.

    Raises UnsupportedVLLM for a shape that is neither of the two.
    """
    if detect_live()["normalized_config"]:
        if len(args) + len(kwargs) == 1:
            return _from_offloading_config(args[0] if args else kwargs["config"])
    elif len(args) + len(kwargs) == 2:
        named = dict(zip(("vllm_config", "kv_cache_config"), args, strict=False)) | dict(kwargs)
        return _from_vllm_config(named["vllm_config"], named["kv_cache_config"])
    shape = f"{len(args)} positional arguments and {sorted(kwargs)}"
    needed = "OffloadingSpec made from config, or from vllm_config and kv_cache_config"
    raise UnsupportedVLLM((f"{needed} (it was given {shape})",), installed_version())


def _fields(value: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(value))


def _text(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _from_offloading_config(config: Any) -> ConfigView:
    known = _fields(config)
    groups = []
    for position, group in enumerate(config.groups):
        has = _fields(group)
        groups.append(
            GroupView(
                tokens_per_block=int(group.tokens_per_block),
                layer_names=tuple(group.layer_names),
                group_id=int(group.group_id) if "group_id" in has else position,
                window_in_chunks=(
                    group.sliding_window_size_in_chunks if "sliding_window_size_in_chunks" in has else None
                ),
            )
        )
    parallel = config.parallel
    return ConfigView(
        engine_id=str(config.engine_id),
        extra_config=config.extra_config,
        model=str(config.model.name),
        cache_dtype=_text(config.model.dtype),
        groups=tuple(groups),
        tokens_per_hash=int(config.cache.tokens_per_hash),
        blocks_per_chunk=int(config.cache.blocks_per_chunk),
        rank=int(parallel.rank),
        world_size=int(parallel.world_size),
        tp_size=int(parallel.tp_size),
        pp_size=int(parallel.pp_size),
        pcp_size=int(parallel.pcp_size),
        dcp_size=int(parallel.dcp_size),
        data_parallel_index=int(parallel.data_parallel_index),
        replicated_hint=bool(config.replicated_layout) if "replicated_layout" in known else None,
        canonical_layout=bool(config.canonical_layout) if "canonical_layout" in known else False,
        kv_cache_layout=config.kv_cache_layout if "kv_cache_layout" in known else None,
        kv_bytes_per_block=int(config.worker_kv_bytes_per_block) or None,
    )


def _from_vllm_config(vllm_config: Any, kv_cache_config: Any) -> ConfigView:
    """The view where the framework hands over vLLM's own configuration (no OffloadingConfig yet)."""
    transfer = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    factor = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    groups = tuple(
        GroupView(
            tokens_per_block=int(group.kv_cache_spec.block_size) * factor,
            layer_names=tuple(group.layer_names),
            group_id=position,
            window_in_chunks=None,
        )
        for position, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    hashes = import_module("vllm.v1.core.kv_cache_utils")
    if hashes is None:
        raise UnsupportedVLLM(("resolve_kv_cache_block_sizes: no vllm.v1.core.kv_cache_utils",), installed_version())
    _, tokens_per_hash = hashes.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return ConfigView(
        engine_id=str(transfer.engine_id),
        extra_config=transfer.kv_connector_extra_config,
        model=str(vllm_config.model_config.model),
        cache_dtype=_text(vllm_config.cache_config.cache_dtype),
        groups=groups,
        tokens_per_hash=int(tokens_per_hash),
        blocks_per_chunk=_blocks_per_chunk(transfer.kv_connector_extra_config.get("block_size"), groups),
        rank=int(parallel.rank),
        world_size=int(parallel.world_size),
        tp_size=int(parallel.tensor_parallel_size),
        pp_size=int(parallel.pipeline_parallel_size),
        pcp_size=int(parallel.prefill_context_parallel_size),
        dcp_size=int(parallel.decode_context_parallel_size),
        data_parallel_index=int(parallel.data_parallel_index),
        replicated_hint=None,
        canonical_layout=False,
        kv_cache_layout=None,
        kv_bytes_per_block=None,
    )


def _blocks_per_chunk(tokens_per_chunk: Any, groups: Sequence[GroupView]) -> int:
    """As the framework reckons it; what it refuses by itself it is left to refuse."""
    if tokens_per_chunk is None or not groups:
        return 1
    return int(tokens_per_chunk) // groups[0].tokens_per_block
