"""What each layer of the loaded model keeps in its pages, as plain data.

Owns: asking the layers of vLLM's forward context for their KV specs, and naming the kinds of attention.
Must not know: groups, objects and namespaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .live import import_module

__all__ = ["LayerFacts", "layer_specs"]

_SPECS = "vllm.v1.kv_cache_interface"


@dataclass(frozen=True)
class LayerFacts:
    """One layer's KV spec, as the layer itself (and its attention implementation) gives it.

    ``kind``: the spec's class name. ``block_size`` in tokens and ``page_size_bytes`` are the layer's
    own, before vLLM unifies pages of several groups: the group's real block size stands in the spec's
    configuration. ``dtype``, ``sliding_window`` and the like are None where the kind has no such thing.
    ``is_mla`` is true of exactly ``MLAAttentionSpec``, whose pages are the same on every rank; its
    subclasses and sliding variants are left out, so that doubt means one object for each rank.
    ``is_full_attention`` is true of every ``FullAttentionSpec``, MLA included. ``details``: every field
    of the spec as (name, text), sorted: for digests.
    """

    kind: str
    block_size: int
    page_size_bytes: int
    num_kv_heads: int | None
    head_size: int | None
    dtype: str | None
    sliding_window: int | None
    attention_chunk_size: int | None
    is_mla: bool
    is_full_attention: bool
    is_sliding_window: bool
    is_mamba: bool
    details: tuple[tuple[str, str], ...]


def layer_specs(vllm_config: Any) -> Mapping[str, LayerFacts] | None:
    """Layer name → facts for every layer of this process that has pages; None where there are none.

    To be called in a worker, once the model is loaded: while the spec is made or in ``get_worker``.
    In the scheduler's process there are no layers, hence None. Layers that share another layer's pages
    and layers without pages are left out.
    """
    context = vllm_config.compilation_config.static_forward_context
    specs = import_module(_SPECS)
    if specs is None:
        return None
    facts: dict[str, LayerFacts] = {}
    for name, layer in context.items():
        if not hasattr(layer, "get_kv_cache_spec") or getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is not None:
            facts[name] = _facts(_customized(layer, spec, specs), specs)
    return facts or None


def _customized(layer: Any, spec: Any, specs: Any) -> Any:
    """The spec after the attention implementation's last word, where the release asks for it."""
    if not isinstance(spec, _classes(specs, "AttentionSpec")) or not hasattr(layer, "get_attn_backend"):
        return spec
    implementation = layer.get_attn_backend()
    return implementation.customize_spec(spec) if hasattr(implementation, "customize_spec") else spec


def _classes(specs: Any, *names: str) -> tuple[type, ...]:
    """Those of the named classes that this vLLM has."""
    found = (getattr(specs, name, None) for name in names)
    return tuple(cls for cls in found if isinstance(cls, type))


def _facts(spec: Any, specs: Any) -> LayerFacts:
    heads: Any = getattr(spec, "num_kv_heads", None)
    head_size: Any = getattr(spec, "head_size", None)
    dtype: Any = getattr(spec, "dtype", None)
    window: Any = getattr(spec, "sliding_window", None)
    chunk: Any = getattr(spec, "attention_chunk_size", None)
    return LayerFacts(
        kind=type(spec).__name__,
        block_size=int(spec.block_size),
        page_size_bytes=int(spec.page_size_bytes),
        num_kv_heads=None if heads is None else int(heads),
        head_size=None if head_size is None else int(head_size),
        dtype=None if dtype is None else _text(dtype),
        sliding_window=None if window is None else int(window),
        attention_chunk_size=None if chunk is None else int(chunk),
        is_mla=type(spec) in _classes(specs, "MLAAttentionSpec"),
        is_full_attention=isinstance(spec, _classes(specs, "FullAttentionSpec")),
        is_sliding_window=isinstance(spec, _classes(specs, "SlidingWindowSpec")),
        is_mamba=isinstance(spec, _classes(specs, "MambaSpec")),
        details=_details(spec),
    )


def _details(spec: Any) -> tuple[tuple[str, str], ...]:
    if not dataclasses.is_dataclass(spec):
        return ()
    return tuple(sorted((field.name, _text(getattr(spec, field.name))) for field in dataclasses.fields(spec)))


def _text(value: Any) -> str:
    """A text that is the same in every process for equal values."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_text(item) for item in value) + ")"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(value[key])}" for key in sorted(value, key=str)) + "}"
    return str(value).removeprefix("torch.")
