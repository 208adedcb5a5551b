"""From what compat shows of a worker to the descriptor that it publishes.

Owns: which facts of an engine are part of its identity (docs/identity.md), the layouts of its groups, the decision
between one object per rank and one for all.
Must not know: how compat finds a fact, how a namespace is made of them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xkv_compat.vllm_symbols import ConfigView, LayerFacts
from xkv_store.errors import UserError
from xkv_store.geometry import Geometry
from xkv_store.wire import SLOTS_PER_OBJECT_MAX

from . import sync_loads
from .config import Config
from .config_table import PORT_MAX
from .identity import Descriptor, canonical
from .layout import ObjectLayout, Page, group_layouts
from .weights import weights_fingerprint

FACT_CHARACTERS_MAX = 12_000  # of one fact's text; three such facts and the small ones fit one message


@dataclass(frozen=True, slots=True)
class GroupKind:
    """What a group's layers are; None facts make a group that is nothing special."""

    full_attention: bool
    mla: bool
    mamba: bool


def check_supported(view: ConfigView, config: Config, features: Mapping[str, bool]) -> None:
    """Raise UserError for what cannot be done right, before anything is made.

    Pipeline and context parallelism put different layers or tokens on each rank; `offload_prompt_only=False` stores
    a junk tail on releases without the framework's clamp; a chunk that vLLM would not read is not the one asked for.
    """
    if not features["blocks_per_chunk_key"]:
        _check_chunk(view)
    sync_loads.check_shape(view, features)
    for name, size in (
        ("pipeline_parallel_size", view.pp_size),
        ("prefill_context_parallel_size", view.pcp_size),
        ("decode_context_parallel_size", view.dcp_size),
    ):
        if size > 1:
            raise UserError(f"{name} = {size} is not supported yet: run with tensor parallelism alone")
    if view.extra_config.get("offload_prompt_only", True) is not True and not features["finish_commit_clamp"]:
        raise UserError(
            "offload_prompt_only = false is refused on this vLLM: it stores a chunk whose last token was "
            "never computed; leave it out"
        )
    if view.canonical_layout:
        raise UserError("canonical_layout = true is not supported: leave it out")
    last = (config.port or 0) + view.world_size - 1
    if config.port_per_rank and last > PORT_MAX:
        raise UserError(
            f"xkv.port_per_rank: with xkv.port = {config.port} rank {view.world_size - 1}'s gateway has port {last}; "
            f"there is none above {PORT_MAX}: give a lower xkv.port"
        )
    if config.tp_layout == "replicated" and view.world_size == 1:
        raise UserError("xkv.tp_layout = 'replicated' needs more than one rank; leave it out")


def _check_chunk(view: ConfigView) -> None:
    """Raise UserError unless the chunk is what was asked for, where vLLM reads `block_size` alone, in tokens."""
    sizes = sorted({group.tokens_per_block for group in view.groups})
    if view.blocks_per_chunk < 1:
        raise UserError(
            f"block_size = {view.extra_config['block_size']!r} is less than a block: on this vLLM it is the chunk's "
            f"size in tokens, a multiple of {sizes[0]}"
        )
    asked = view.extra_config.get("blocks_per_chunk")
    if asked is None or ("block_size" in view.extra_config and asked == view.blocks_per_chunk):
        return
    remedy = "leave it out"
    if len(sizes) > 1:
        remedy += f": its KV-cache groups have blocks of {' and '.join(map(str, sizes))} tokens, a chunk is one block"
    elif sizes and isinstance(asked, int) and asked > 0:
        remedy = f"give block_size = {asked * sizes[0]} (tokens) instead"
    raise UserError(f"blocks_per_chunk = {asked!r} is not read by this vLLM: {remedy}")


def kinds(view: ConfigView, layers: Mapping[str, LayerFacts] | None) -> tuple[GroupKind, ...] | None:
    """What each group is, by position; None where the layers cannot be asked."""
    if layers is None:
        return None
    found = []
    for group in view.groups:
        facts = [layers[name] for name in group.layer_names if name in layers]
        if len(facts) != len(group.layer_names):
            return None
        found.append(
            GroupKind(
                full_attention=bool(facts) and all(one.is_full_attention for one in facts),
                mla=bool(facts) and all(one.is_mla for one in facts),
                mamba=any(one.is_mamba for one in facts),
            )
        )
    return tuple(found)


def check_states(view: ConfigView, layers: Mapping[str, LayerFacts] | None, features: Mapping[str, bool]) -> None:
    """Raise UserError for Mamba's states beside another group where vLLM may read a state that nobody has.

    Such a vLLM, given any connector, begins a request behind the longest of all groups' local hits, though states are
    kept at few positions. Without prefix caching it takes no OffloadingConnector for such a model. One group is safe.
    """
    if features["state_hits_agree"] or len(view.groups) < 2:
        return
    if any(one.is_mamba for one in (layers or {}).values()):
        raise UserError(
            "Mamba layers beside other layers are refused on this vLLM: with any KV connector it may begin a request "
            "at a token for which it has attention's pages and no Mamba state, and answer wrongly; use a newer vLLM "
            "(xkv's README says which), or this one without a KV connector"
        )


def is_replicated(view: ConfigView, config: Config, group_kinds: Sequence[GroupKind] | None) -> bool:
    """Whether one object serves all ranks. Raises UserError where that was asked for and would be wrong.

    Never where each rank has a gateway of its own: none of them has what the others write (ADR 0011).
    """
    identical = bool(group_kinds) and all(kind.mla for kind in group_kinds or ())
    if config.tp_layout == "replicated" and not identical:
        raise UserError(
            "xkv.tp_layout = 'replicated' is wrong here: pages are identical on every rank only where "
            "every layer of every group is MLA; use 'auto' or 'per_rank'"
        )
    return view.world_size > 1 and identical and config.tp_layout != "per_rank" and not config.port_per_rank


def layout_text(*, asked: str, replicated: bool, world_size: int, ports: str = "") -> str:
    """What was chosen for the ranks of an engine, and why, for its log.

    `asked`: xkv.tp_layout. `ports`: of their gateways, where each has one of its own.
    """
    if world_size == 1:
        return "one rank"
    chosen = "replicated, one object for all" if replicated else "per_rank, an object for each of"
    why = "it is asked for"
    if ports:
        why = f"each has a gateway of its own, on ports {ports}"
    elif asked == "auto":
        why = "every layer of every group is MLA" if replicated else "not every layer of every group is known to be MLA"
    return f"xkv.tp_layout = {asked}: {chosen} {world_size} ranks, since {why}"


def layouts(view: ConfigView, kv_caches: Any) -> tuple[ObjectLayout, ...]:
    """The layout of each group's objects, from the framework's canonical view of the tensors."""
    pages = [
        [Page(int(ref.tensor_idx), int(ref.page_size_bytes)) for ref in refs] for refs in kv_caches.group_data_refs
    ]
    return group_layouts(blocks_per_chunk=view.blocks_per_chunk, pages=pages)


def check_room(
    *, chunk_bytes: Sequence[int], config: Config, world_size: int, load_slots: int, store_slots: int
) -> None:
    """Raise UserError if a chunk is larger than a rank's regions of the ring: it could never be moved."""
    geometry = Geometry.of_fragment_bytes(config.fragment_bytes)
    largest = max(chunk_bytes, default=0)
    slots = geometry.fragments(largest) if largest else 0
    if slots > SLOTS_PER_OBJECT_MAX:
        raise UserError(
            f"a chunk has {largest:,} bytes on each rank, {slots:,} fragments; at most {SLOTS_PER_OBJECT_MAX:,} are "
            "possible: give a smaller blocks_per_chunk (or block_size)"
        )
    if slots > min(load_slots, store_slots):
        needed = slots * geometry.slot_bytes * world_size
        raise UserError(
            f"a chunk has {largest:,} bytes on each rank, {slots:,} slots, and a rank has {store_slots:,} for puts and "
            f"{load_slots:,} for loads: give a smaller blocks_per_chunk (or block_size), or xkv.ring_bytes of at least "
            f"{needed * 4:,} (with the default xkv.load_reserve_bytes)"
        )


def describe(
    *,
    view: ConfigView,
    config: Config,
    features: Mapping[str, bool],
    version: str,
    model: Mapping[str, Any],
    layers: Mapping[str, LayerFacts] | None,
    replicated: bool,
    kv_caches: Any,
    kv_role: str,
    channel: str,
    full_attention: Sequence[bool],
) -> Descriptor:
    """What this rank publishes. `channel`: how failed loads reach vLLM (see failures). `full_attention`: by group."""
    group_layouts_ = layouts(view, kv_caches)
    undetermined = list(model["undetermined"])
    if layers is None:
        undetermined.append("kinds of attention")
    facts = {
        "model": {
            name: value for name, value in model.items() if name not in ("undetermined", "calculate_kv_scales", "lora")
        },
        "cache_dtype": view.cache_dtype,
        "kv_cache_layout": view.kv_cache_layout,
        "groups": [
            {
                "id": group.group_id,
                "tokens_per_block": group.tokens_per_block,
                "layers": _layer_facts(group.layer_names, layers),
                "pages": [page.page_bytes for page in layout.pages],
                "tensors": [_tensor_facts(kv_caches.tensors[page.tensor]) for page in layout.pages],
            }
            for group, layout in zip(view.groups, group_layouts_, strict=True)
        ],
        "blocks_per_chunk": view.blocks_per_chunk,
        "tokens_per_hash": view.tokens_per_hash,
        "sizes": [view.tp_size, view.pp_size, view.pcp_size, view.dcp_size],
        "replicated": replicated,
        "tagged_hashes": features["tagged_hash_extras"],
        "vllm": version,
    }
    return Descriptor(
        rank=view.rank,
        facts={name: compact(fact) for name, fact in facts.items()},
        weights=_weights(view, config, model) if view.rank == 0 else None,
        undetermined=tuple(sorted(set(undetermined))),
        engine={
            "chunk_bytes": [layout.chunk_bytes for layout in group_layouts_],
            "replicated": replicated,
            "kv_role": kv_role,
            "channel": channel,
            "full_attention": list(full_attention),
            "lora": model["lora"],
            "calculate_kv_scales": model["calculate_kv_scales"],
            "hash_algorithm": model["hash_algorithm"],
        },
    )


def compact(fact: object) -> object:
    """A fact, or its digest where its text is too long to be published whole."""
    text = canonical(fact)
    return fact if len(text) <= FACT_CHARACTERS_MAX else "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _weights(view: ConfigView, config: Config, model: Mapping[str, Any]) -> str | None:
    if config.weights_fingerprint != "auto":
        return f"given:{config.weights_fingerprint}"
    if model["commit"]:
        return f"commit:{model['commit']}"
    return weights_fingerprint(model["weights"] or view.model, model["revision"], model["load_format"])


def _layer_facts(names: Sequence[str], layers: Mapping[str, LayerFacts] | None) -> object:
    """The layers' specs in the group's order, equal neighbours counted: small for models of one kind of layer."""
    if layers is None:
        return None
    runs: list[list[Any]] = []
    for name in names:
        fact = layers.get(name)
        text = None if fact is None else [fact.kind, fact.page_size_bytes, *map(list, fact.details)]
        if runs and runs[-1][1] == text:
            runs[-1][0] += 1
        else:
            runs.append([1, text])
    return runs


def _tensor_facts(tensor: Any) -> list[int]:
    """Row stride and page of a canonical tensor, in bytes (its rows are int8)."""
    return [int(tensor.tensor.stride(0)), int(tensor.page_size_bytes)]
