"""What else makes a page's bytes what they are: the model, its weights' origin and the options that matter.

Owns: reading those facts from vLLM's configuration into plain, sorted, json-able data.
Must not know: digests, weights on disk and namespaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

__all__ = ["model_config_facts"]

# Parts of a model's config that say where it came from or which library wrote it, not what it computes.
_NOT_THE_MODEL = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


def model_config_facts(vllm_config: Any) -> dict[str, Any]:
    """Facts for an identity, json-able with sorted keys; tokenizers are left out.

    Keys: ``model`` (name or path), ``weights`` (where they lie when not there), ``revision``,
    ``code_revision``, ``commit`` (of the hub snapshot, where known), ``dtype``, ``quantization``,
    ``quantization_config``, ``load_format``, ``hf_config`` (RoPE included), ``hash_algorithm``,
    ``cache_dtype``, ``cache_dtype_skipped_layers``, ``mamba`` (dtypes and mode), ``calculate_kv_scales``,
    ``lora``, ``speculative`` (the drafting model, or None), and ``undetermined``: the names of facts
    whose value has no stable text, which must make an identity this launch's own.
    """
    undetermined: list[str] = []

    def plain(name: str, value: Any) -> Any:
        return _plain(name, value, undetermined)

    model = vllm_config.model_config
    pages = vllm_config.cache_config
    facts = {
        "model": str(model.model),
        "weights": plain("weights", _optional(model, "model_weights")) or "",
        "revision": plain("revision", model.revision),
        "code_revision": plain("code_revision", _optional(model, "code_revision")),
        "commit": plain("commit", _optional(model.hf_config, "_commit_hash")),
        "dtype": _dtype_text(model.dtype),
        "quantization": plain("quantization", model.quantization),
        "quantization_config": plain("quantization_config", _optional(model, "quantization_config")),
        "load_format": _load_format(vllm_config),
        "hf_config": _hf_config(model.hf_config, undetermined),
        "hash_algorithm": str(pages.prefix_caching_hash_algo),
        "cache_dtype": _dtype_text(pages.cache_dtype),
        "cache_dtype_skipped_layers": plain("skipped layers", _optional(pages, "kv_cache_dtype_skip_layers")),
        "mamba": {
            name: plain(name, _optional(pages, name))
            for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "mamba_block_size")
        },
        "calculate_kv_scales": bool(_optional(pages, "calculate_kv_scales")),
        "lora": _optional(vllm_config, "lora_config") is not None,
        "speculative": _speculative(_optional(vllm_config, "speculative_config"), undetermined),
    }
    return {**facts, "undetermined": sorted(set(undetermined))}


def _optional(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _dtype_text(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _load_format(vllm_config: Any) -> str:
    load_format = vllm_config.load_config.load_format
    return str(load_format.value if isinstance(load_format, Enum) else load_format)


def _hf_config(config: Any, undetermined: list[str]) -> Any:
    if not hasattr(config, "to_dict"):
        undetermined.append("hf_config")
        return None
    return _plain("hf_config", config.to_dict(), undetermined)


def _speculative(config: Any, undetermined: list[str]) -> dict[str, Any] | None:
    """A drafting model's layers have pages too, so what it is belongs to the identity."""
    if config is None:
        return None
    draft = _optional(config, "draft_model_config")
    return {
        "method": _plain("speculative.method", _optional(config, "method"), undetermined),
        "model": _plain("speculative.model", _optional(config, "model"), undetermined),
        "revision": _plain("speculative.revision", _optional(config, "revision"), undetermined),
        "hf_config": None if draft is None else _hf_config(draft.hf_config, undetermined),
    }


def _plain(name: str, value: Any, undetermined: list[str]) -> Any:
    """Json-able data with sorted keys; what has no stable text is noted by its name and becomes None."""
    if isinstance(value, Enum):
        value = value.value
    elif type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        value = _dtype_text(value)
    elif hasattr(value, "to_dict"):
        value = value.to_dict()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {
            str(key): _plain(f"{name}.{key}", value[key], undetermined)
            for key in sorted(value, key=str)
            if str(key) not in _NOT_THE_MODEL
        }
    if isinstance(value, tuple | list):
        return [_plain(f"{name}[{index}]", item, undetermined) for index, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((_plain(name, item, undetermined) for item in value), key=str)
    undetermined.append(name)
    return None
