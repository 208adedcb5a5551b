"""What one token of a model takes on each rank, from its `config.json`.

Owns: reading the shape of attention (heads, latent vectors, sliding windows, groups as vLLM makes them) into bytes.
Must not know: chunks, cards, rates. What cannot be told from the file alone is said, and not guessed.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xkv_store.errors import UserError

FILE_BYTES_MAX = 16 << 20
DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
AUTO = "auto"
INNER_NAMES = ("text_config", "llm_config", "language_config")  # of a model that also sees or hears
KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "sliding_window_attention": "sliding",
    "chunked_attention": "chunked",
}
UNKNOWN_NAMES = (
    "index_topk",  # a sparse indexer has pages of its own
    "global_head_dim",  # layers of two sizes
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "hybrid_override_pattern",
    "linear_num_value_heads",
)
SCALED_NAMES = ("kv_cache_scheme", "kv_cache_quant_algo")  # in quantization_config: the checkpoint names its KV dtype
LAYERS_ALIKE = 1.5  # vLLM's own bound: groups of nearly as many layers become of one size


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group: its kind, its layers, and the bytes of one token of one layer on one rank."""

    kind: str
    layers: int
    layer_token_bytes: int

    @property
    def token_bytes(self) -> int:
        """Of all its layers."""
        return self.layers * self.layer_token_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model on `ranks` ranks. `replicated`: pages are the same on every rank, so that one object serves all."""

    groups: tuple[Group, ...]
    ranks: int
    dtype: str
    replicated: bool

    @property
    def rank_token_bytes(self) -> int:
        """One token of all groups on one rank; a sliding window keeps only its last ones."""
        return sum(group.token_bytes for group in self.groups)

    @property
    def engine_token_bytes(self) -> int:
        """What the card keeps of one token for the whole engine."""
        return self.rank_token_bytes * (1 if self.replicated else self.ranks)

    @property
    def full_attention(self) -> tuple[bool, ...]:
        """By group."""
        return tuple(group.kind in {"full", "latent"} for group in self.groups)


def read_model(path: Path) -> dict[str, Any]:
    """A model's configuration: the file, or the folder that holds it. Raises UserError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            value = json.loads(opened.read(FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--model {path}: no config.json can be read there ({error}); type its path") from error
    if not isinstance(value, dict):
        raise UserError(f"--model {path}: that is no model's configuration; type the path of its config.json")
    for name in INNER_NAMES:
        inner = value.get(name)
        if isinstance(inner, dict) and "num_hidden_layers" in inner:
            outer = {key: value[key] for key in ("torch_dtype", "dtype") if key in value}
            return {**outer, **inner}
    return value


def shape_of(model: Mapping[str, Any], *, ranks: int, dtype: str) -> ModelShape:
    """The shape on `ranks` ranks with KV pages of `dtype` (auto: the model's).

    Raises UserError where the file does not say it in a way that is known here.
    """
    unknown = [name for name in UNKNOWN_NAMES if model.get(name) is not None]
    if unknown:
        raise UserError(
            f"a model with {unknown[0]!r} has pages that its config.json does not tell the size of; start the engine, "
            "whose log says its namespace's chunks"
        )
    resolved = _dtype(model, dtype)
    element = DTYPE_BYTES[resolved]
    kinds = _layer_kinds(model)
    latent = model.get("kv_lora_rank")
    if latent is not None:
        token = (_number(model, "kv_lora_rank") + _number(model, "qk_rope_head_dim")) * element
        kinds = ["latent" if kind == "full" else kind for kind in kinds]
    else:
        heads = _number(model, "num_key_value_heads", "n_head_kv", "num_kv_heads", "num_attention_heads", "n_head")
        if ranks > 1 and heads % ranks and ranks % heads:
            raise UserError(f"--tp {ranks} does not divide {heads} KV heads; vLLM would not start with it")
        token = 2 * max(1, heads // ranks) * _head_bytes(model, element)
    groups = tuple(Group(kind, layers, token) for kind, layers in grouped(kinds))
    replicated = ranks > 1 and all(group.kind == "latent" for group in groups)
    return ModelShape(groups, ranks, resolved, replicated)


def grouped(kinds: Sequence[str]) -> list[tuple[str, int]]:
    """(kind, layers) of each group, as vLLM puts layers together: groups of one kind, of nearly equal sizes."""
    counts = Counter(kinds)
    least, most = min(counts.values()), max(counts.values())
    size = most if most < least * LAYERS_ALIKE else least
    found = []
    for kind, layers in counts.items():
        number = -(-layers // size)
        found += [(kind, len(range(place, layers, number))) for place in range(number)]
    return found


def _layer_kinds(model: Mapping[str, Any]) -> list[str]:
    layers = _number(model, "num_hidden_layers", "n_layer", "num_layers")
    types = model.get("layer_types")
    if isinstance(types, list) and types:
        unknown = sorted({str(one) for one in types} - KINDS.keys())
        if unknown:
            raise UserError(
                f"layers of the kind {unknown[0]!r} have pages that config.json does not tell the size of; start the "
                "engine, whose log says its namespace's chunks"
            )
        kinds = [KINDS[one] for one in types]
    else:
        window = model.get("sliding_window")
        pattern = model.get("sliding_window_pattern")
        if not window or model.get("use_sliding_window") is False:
            kinds = ["full"] * layers
        elif isinstance(pattern, int) and pattern > 1:
            kinds = ["sliding" if (place + 1) % pattern else "full" for place in range(layers)]
        else:
            kinds = ["sliding"] * layers
    shared = model.get("num_kv_shared_layers") or 0  # the last ones read pages of layers before them
    return kinds[: len(kinds) - shared] if isinstance(shared, int) and 0 < shared < len(kinds) else kinds


def _head_bytes(model: Mapping[str, Any], element: int) -> int:
    if model.get("head_dim") is not None:
        return _number(model, "head_dim") * element
    return _number(model, "hidden_size", "n_embd") // _number(model, "num_attention_heads", "n_head") * element


def _dtype(model: Mapping[str, Any], asked: str) -> str:
    scaled = model.get("quantization_config")
    if asked == AUTO and isinstance(scaled, dict) and any(scaled.get(name) for name in SCALED_NAMES):
        raise UserError("the model's quantization_config names a KV dtype of its own; type it: --dtype fp8")
    own = str(model.get("torch_dtype") or model.get("dtype") or "bfloat16").removeprefix("torch.")
    # vLLM loads a model of float32 as one of 16 bits unless it is told otherwise.
    resolved = ("bfloat16" if own in {"float32", "float"} else own) if asked == AUTO else asked
    if resolved not in DTYPE_BYTES:
        raise UserError(f"--dtype {resolved!r} is not known here; one of {', '.join((AUTO, *DTYPE_BYTES))}")
    return resolved


def _number(model: Mapping[str, Any], *names: str) -> int:
    """The first of these that the configuration has. Raises UserError."""
    for name in names:
        value = model.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"the model's {name} is {value!r}; type the path of another config.json")
            return value
    raise UserError(f"the model's config.json has no {names[0]}; type the path of another one")
