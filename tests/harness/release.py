"""The installed vLLM, as the harness drives it.

Owns: importing it (slow, and with warnings that are not ours), its configuration without a model, its KV-cache
groups and tensors in the shape that each release wants, told apart by the fields of its own classes.
Must not know: requests, steps, what a page holds.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from harness.shapes import ELEMENT_BYTES, GUARD_BYTES
from xkv_compat.features import detect_live
from xkv_offload.failures import choose

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from harness.shapes import Group, Shape
    from harness.story import Bytes

ARCHITECTURE = "XkvHarnessForCausalLM"
MODEL_TOKENS_MAX = 4096
LAYOUT = "LBHNC"  # the page order that the connector asks for, where releases name one

# A DeepSeek V2 in miniature, so that vLLM takes it for an MLA model; and one with ordinary heads.
_MODELS: Mapping[bool, Mapping[str, Any]] = {
    True: {
        "model_type": "deepseek_v2",
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": None,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
    },
    False: {"model_type": "llama", "num_key_value_heads": 4, "head_dim": 32},
}
_ANY_MODEL = {
    "architectures": [ARCHITECTURE],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": MODEL_TOKENS_MAX,
    "torch_dtype": "float32",
}


_PLACES = {
    "torch": "torch",
    "config": "vllm.config",
    "kv": "vllm.v1.kv_cache_interface",
    "kv_cache_utils": "vllm.v1.core.kv_cache_utils",
    "hash_function": "vllm.utils.hashing:get_hash_fn_by_name",
    "Scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "SchedulerOutput": "vllm.v1.core.sched.output:SchedulerOutput",
    "connector": "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "connector_scheduler": "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
    "StructuredOutputManager": "vllm.v1.structured_output:StructuredOutputManager",
    "KVConnectorFactory": "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory",
    "KVConnectorRole": "vllm.distributed.kv_transfer.kv_connector.v1:KVConnectorRole",
    "KVOutputAggregator": "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator",
    "KVConnectorOutput": "vllm.v1.outputs:KVConnectorOutput",
    "ModelRunnerOutput": "vllm.v1.outputs:ModelRunnerOutput",
    "Request": "vllm.v1.request:Request",
    "RequestStatus": "vllm.v1.request:RequestStatus",
    "SamplingParams": "vllm.sampling_params:SamplingParams",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """vLLM's modules, classes and functions that the harness uses, from `_PLACES`."""

    torch: Any
    config: Any
    kv: Any
    kv_cache_utils: Any
    hash_function: Any
    Scheduler: Any
    SchedulerOutput: Any
    connector: Any
    connector_scheduler: Any
    StructuredOutputManager: Any
    KVConnectorFactory: Any
    KVConnectorRole: Any
    KVOutputAggregator: Any
    KVConnectorOutput: Any
    ModelRunnerOutput: Any
    Request: Any
    RequestStatus: Any
    SamplingParams: Any


@cache
def names() -> Names:
    """Import vLLM, once in a process (12 to 30 s), and let it know the stand-in model's class.

    Pages lie in host memory, so its platform must be the CPU's. A wheel built for GPUs takes that for its platform
    only if it is told to, and without a driver it finds none at all; older releases and CPU wheels do not ask.
    """
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
        found = {name: _imported(place) for name, place in _PLACES.items()}
        # A class in this process: vLLM would start another to look at one that it names by its module.
        _imported("vllm.model_executor.models.registry:ModelRegistry").register_model(
            ARCHITECTURE, _model_class(found["torch"])
        )
    return Names(**found)


def _imported(place: str) -> Any:
    """A module, or an attribute of one after a colon."""
    module, _, attribute = place.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def _model_class(torch: Any) -> type:
    """A class with what vLLM looks for in a text model. Nothing of it is ever called."""

    def nothing(self: Any, *arguments: Any, **more: Any) -> None: ...

    def init(self: Any, *, vllm_config: Any, prefix: str = "") -> None: ...

    def forward(self: Any, input_ids: Any, positions: Any) -> None: ...

    def embed(self: Any, input_ids: Any) -> None: ...

    return type(
        ARCHITECTURE,
        (torch.nn.Module,),
        {
            "__init__": init,
            "forward": forward,
            "embed_input_ids": embed,
            "get_input_embeddings": embed,
            "compute_logits": nothing,
        },
    )


def _field_names(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


@cache
def loads_after_forward() -> bool:
    """Whether the model runner starts loads once the forward pass is launched (unless a step has sync loads)."""
    return "has_sync_kv_loads" in _field_names(names().SchedulerOutput)


def channel(shape: Shape) -> str:
    """How this release hears of a failed load with these groups and ranks."""
    full_attention = tuple(shape.groups[group].kind in ("full", "mla") for group in offloaded_groups(shape))
    return choose(features=detect_live(), full_attention=full_attention, world_size=shape.ranks).channel


def take_transfer_results(connector: Any, finished_req_ids: set[str], output: Any) -> set[str]:
    """What the model runner asks the connector for each step, put into its output; the requests whose loads failed."""
    if not detect_live()["request_error_reporting"]:
        output.finished_sending, output.finished_recving = connector.get_finished(finished_req_ids)
        return set()
    results = connector.get_transfer_results(finished_req_ids)
    output.finished_sending, output.finished_recving = results.finished_sending, results.finished_recving
    output.failed_recving = results.failed_recving
    return set(results.failed_recving)


def block_copies(scheduled: Any) -> list[Any]:
    """The blocks that a model runner copies before the step; older releases share no block that is written again."""
    named = "kv_cache_block_copies" in _field_names(names().SchedulerOutput)
    return list(scheduled.kv_cache_block_copies or ()) if named else []


def sides(job: Any) -> tuple[Any, Any]:
    """Where a transfer job's bytes come from and where they go; releases with handlers keep the two together."""
    return tuple(job.transfer_spec) if "transfer_spec" in _field_names(type(job)) else (job.src_spec, job.dst_spec)


def stores_tails() -> bool:
    """Whether the state inside the prompt's last block may be stored."""
    return "supports_partial_tail" in names().connector_scheduler.SchedulerOffloadConfig._fields


def hands_states_over() -> bool:
    """Whether states are stored one by one, as the scheduler hands them over, not from the block table."""
    return "kv_connector_block_state" in _field_names(names().SchedulerOutput)


def looks_up_what_it_loads() -> bool:
    """Whether the lookup of a window counts the chunk more that a hit inside a chunk needs."""
    return "load_window_size_in_chunks" in vars(names().connector_scheduler.GroupOffloadConfig)


def reconciles_hits() -> bool:
    """Whether groups with local hits of unequal length agree on one where the connector has nothing to add.

    The same releases have mended the count of a window's blocks in a load.
    """
    return detect_live()["state_hits_agree"]


def loads_inside_step(job: Any) -> bool:
    """Whether this load must be over before the forward pass of its step, by the job's own word if it has one."""
    return "sync" in _field_names(type(job)) and bool(job.sync)


# --- configuration ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What one start of an engine is given. `extra`: keys of kv_connector_extra_config beside the usual."""

    folder: Path
    engine_id: str
    extra: Mapping[str, Any]
    failure_policy: str = "recompute"
    batch_tokens: int = 2048
    requests_max: int = 8
    async_scheduling: bool = False
    events: Mapping[str, Any] | None = None  # of vLLM's KVEventsConfig


def vllm_config(shape: Shape, launch: Launch, *, rank: int) -> Any:
    """The configuration of one process of the engine: rank's worker, or with rank 0 the scheduler's as well.

    What the CPU platform switches off for its own kernels (prefix reuse and chunked prefill with MLA) is on.
    """
    config = names().config
    model = _model_folder(launch.folder, is_mla=any(group.kind == "mla" for group in shape.groups))
    transfer = config.KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id=launch.engine_id,
        kv_load_failure_policy=launch.failure_policy,
        kv_connector_extra_config={
            "spec_name": "XkvOffloadingSpec",
            "spec_module_path": "harness.recorded",
            **_chunk(shape),
            "xkv.weights_fingerprint": "harness",
            **launch.extra,
        },
    )
    made = config.VllmConfig(
        model_config=config.ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=MODEL_TOKENS_MAX, seed=0
        ),
        scheduler_config=config.SchedulerConfig(
            max_num_seqs=launch.requests_max,
            max_num_batched_tokens=launch.batch_tokens,
            max_model_len=MODEL_TOKENS_MAX,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        parallel_config=config.ParallelConfig(
            tensor_parallel_size=shape.ranks, distributed_executor_backend="mp" if shape.ranks > 1 else None
        ),
        cache_config=config.CacheConfig(
            block_size=min(group.block_tokens for group in shape.groups), enable_prefix_caching=True
        ),
        kv_transfer_config=transfer,
        kv_events_config=None if launch.events is None else config.KVEventsConfig(**launch.events),
    )
    made.cache_config.block_size = min(group.block_tokens for group in shape.groups)
    made.cache_config.prefix_match_unit = shape.hash_tokens
    if shape.dense:
        made.cache_config.prefix_cache_retention_interval = None
    made.cache_config.mamba_cache_mode = next(
        (group.state_mode for group in shape.groups if group.kind == "mamba"), "none"
    )
    if shape.speculative:
        # An n-gram's, which needs no draft model; the scheduler asks for its method alone.
        made.speculative_config = config.SpeculativeConfig(
            method="ngram", num_speculative_tokens=1, prompt_lookup_max=2
        )
        made.speculative_config.method = "mtp"
    made.cache_config.enable_prefix_caching = True
    made.cache_config.num_gpu_blocks = shape.blocks
    made.scheduler_config.enable_chunked_prefill = True
    made.scheduler_config.max_num_batched_tokens = launch.batch_tokens
    made.scheduler_config.async_scheduling = launch.async_scheduling  # which the CPU platform switches off
    made.parallel_config.rank = rank
    context = made.compilation_config.static_forward_context
    for group in shape.groups:
        context.update({layer: _Layer(group) for layer in group.layers})
    return made


def _chunk(shape: Shape) -> dict[str, int]:
    """The chunk in blocks, or in tokens where a release reads nothing else (and refuses blocks of several sizes)."""
    if detect_live()["blocks_per_chunk_key"]:
        return {"blocks_per_chunk": shape.blocks_per_chunk}
    if shape.blocks_per_chunk == 1:
        return {}
    return {"block_size": shape.blocks_per_chunk * min(group.block_tokens for group in shape.groups)}


def _model_folder(parent: Path, *, is_mla: bool) -> Path:
    folder = parent / ("mla-model" if is_mla else "model")
    if not folder.is_dir():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**_ANY_MODEL, **_MODELS[is_mla]}))
    return folder


class _Layer:
    """What stands in vLLM's forward context for a layer that has pages."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def get_kv_cache_spec(self, _vllm_config: Any) -> Any:
        """The layer's own KV spec."""
        return kv_spec(self._group)


# --- KV-cache groups and tensors --------------------------------------------------------------------------------


def kv_spec(group: Group) -> Any:
    """The spec of a group's layers; its page size is the one that the harness reckons with."""
    found, torch = names().kv, names().torch
    padded = group.stride_bytes if group.padding_bytes else None
    if group.kind == "mamba":
        spec = found.MambaSpec(
            block_size=group.block_tokens,
            shapes=tuple((elements,) for elements in _state_elements(group)),
            dtypes=(torch.float32, torch.float32),
            page_size_padded=padded,
            mamba_cache_mode=group.state_mode,
        )
        assert spec.page_size_bytes == group.stride_bytes
        return spec
    common: dict[str, Any] = {
        "block_size": group.block_tokens,
        "num_kv_heads": group.heads,
        "dtype": torch.float32,
        "page_size_padded": padded,
    }
    if group.kind == "mla":
        spec = found.MLAAttentionSpec(head_size=group.head_elements, **common)
    elif group.kind == "ring":
        spec = found.CircularBufferSpec(head_size=group.head_elements // 2, **common)
    elif group.kind == "full":
        spec = found.FullAttentionSpec(head_size=group.head_elements // 2, **common)
    else:
        spec = found.SlidingWindowSpec(head_size=group.head_elements // 2, sliding_window=group.window, **common)
    assert spec.page_size_bytes == group.stride_bytes
    return spec


def _state_elements(group: Group) -> tuple[int, int]:
    """A Mamba state's two parts, as of convolution and recurrence."""
    return group.head_elements // 4, group.head_elements - group.head_elements // 4


def has_rings() -> bool:
    """Whether there are groups that are no part of a prefix."""
    return "CircularBufferSpec" in vars(names().kv)


@cache
def offloaded_groups(shape: Shape) -> tuple[int, ...]:
    """The numbers of the groups that the connector is given, in a job's order."""
    connector = vars(names().connector)
    if "get_offloading_group_ids" in connector:
        return tuple(connector["get_offloading_group_ids"](kv_cache_config(shape)))
    return tuple(range(len(shape.groups)))


def kv_cache_config(shape: Shape) -> Any:
    """The groups, and where their layers' pages lie, as the engine core would have decided."""
    kv = names().kv
    named_layout = {"kv_cache_layout": LAYOUT} if "kv_cache_layout" in _field_names(kv.KVCacheConfig) else {}
    return kv.KVCacheConfig(
        num_blocks=shape.blocks,
        kv_cache_tensors=_tensor_places(shape),
        kv_cache_groups=[
            kv.KVCacheGroupSpec(
                layer_names=list(group.layers), kv_cache_spec=kv_spec(group), is_eagle_group=group.is_draft
            )
            for group in shape.groups
        ],
        **named_layout,
    )


def _tensor_places(shape: Shape) -> list[Any]:
    """One KVCacheTensor per region, or one per layer where a release describes layers within one allocation."""
    kind = names().kv.KVCacheTensor
    offsets = shape.offsets()
    if "shared_by" in _field_names(kind):
        if not shape.packed:
            return [kind(size=shape.region_bytes(layers), shared_by=list(layers)) for layers in shape.regions()]
        return [
            kind(
                size=shape.blocks * shape.packed_bytes,
                shared_by=list(layers),
                offset=offsets[layers[0]] - GUARD_BYTES,
                block_stride=shape.packed_bytes,
            )
            for layers in shape.regions()
        ]
    return [
        kind(
            size=shape.blocks * shape.packed_bytes if shape.packed else shape.memory_bytes,
            layers=[layer],
            layer_stride=shape.region_bytes((layer,)),
            block_stride=shape.page_stride(layer),
            offset=offset - GUARD_BYTES if shape.packed else offset,
        )
        for layer, offset in offsets.items()
    ]


def kv_tensors(shape: Shape, memory: Bytes) -> dict[str, Any]:
    """Each layer's tensor, a view into the rank's one allocation, shaped as this release's model runner does.

    Where vLLM reads a storage from its beginning, the tensor's storage is the part of the allocation without guards.
    """
    kv = names().kv
    start = 0
    if shape.packed:
        start, memory = GUARD_BYTES, memory[GUARD_BYTES : len(memory) - GUARD_BYTES]
    raw = names().torch.from_numpy(memory).view(names().torch.int8)
    if "shared_by" not in _field_names(kv.KVCacheTensor):
        found: dict[str, Any] = {}
        for place in _tensor_places(shape):
            group = shape.groups[shape.group_of(place.layers[0])]
            views = kv.create_kv_cache_views(raw, kv_spec(group), shape.blocks, kv.KVCacheLayout[LAYOUT], place)
            found.update(zip(place.layers, views, strict=True))
        return found
    return {layer: _view(raw, shape, layer, offset - start) for layer, offset in shape.offsets().items()}


def _view(raw: Any, shape: Shape, layer: str, offset: int) -> Any:
    """(blocks, tokens, latent) for MLA, (blocks, heads, tokens, K and V) for the CPU's attention; for Mamba the pages
    as bytes, or the states one by one.
    """
    group = shape.groups[shape.group_of(layer)]
    if group.kind == "mamba":
        pages = names().torch.from_numpy(raw.numpy()[offset : offset + shape.blocks * group.stride_bytes])
        return pages if detect_live()["canonical_mapping"] else _states(pages, group, shape.blocks)
    rows = raw.as_strided((shape.blocks, group.page_bytes), (shape.page_stride(layer), 1), offset)
    rows = rows.view(names().torch.float32)
    assert rows.shape[1] * ELEMENT_BYTES == group.page_bytes
    if group.kind == "mla":
        return rows.unflatten(1, (group.block_tokens, group.head_elements))
    return rows.unflatten(1, (group.heads, group.block_tokens, group.head_elements))


def _states(pages: Any, group: Group, blocks: int) -> list[Any]:
    """Both parts of the states, as tensors on the pages' storage."""
    rows = pages.view(names().torch.float32).unflatten(0, (blocks, -1))
    first, second = _state_elements(group)
    return [rows[:, :first], rows[:, first : first + second]]
