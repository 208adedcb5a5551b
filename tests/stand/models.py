"""Models with real weights, made here.

Owns: the shapes that the engines run, the scale of their weights, and the writing of a model's folder.
Must not know: vLLM, xkv, or which test uses which shape.

Dummy weights prove nothing: such a model answers the same tokens when every restored page is zeroed. The scale
of each shape below was chosen so that greedy output is diverse and depends on the restored pages; the canary of
every shape checks that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

COMPLETE_MARKER = "complete"  # written last: a folder without it was interrupted and is written anew


@dataclass(frozen=True, slots=True)
class Shape:
    """One model: its name (the matrix's, where a row names it), its classes in transformers, its seed."""

    name: str
    config_class: str
    model_class: str
    config: dict[str, Any] = field(hash=False)
    seed: int = 0
    mutes_rotary_queries: bool = False

    @property
    def vocab_size(self) -> int:
        """Token ids of prompts lie below this."""
        size = self.config["vocab_size"]
        assert isinstance(size, int)
        return size

    def with_seed(self, seed: int) -> Shape:
        """The same architecture with other weights."""
        return replace(self, name=f"{self.name}-{seed}", seed=seed)


LLAMA = Shape(
    name="llama",
    config_class="LlamaConfig",
    model_class="LlamaForCausalLM",
    config={
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
)

# Three KV-cache groups: the sliding layers form two of them, the full ones the third.
GEMMA = Shape(
    name="gemma3",
    config_class="Gemma3TextConfig",
    model_class="Gemma3ForCausalLM",
    config={
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "sliding_window": 256,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "torch_dtype": "float32",
    },
)

# vLLM's CPU kernel for rotary embeddings takes MLA's strided queries and keys for packed ones and rotates the wrong
# rows, by angles that depend on the batch: a prompt computed at once and the same prompt computed in two parts then
# differ without any offloading. With queries that are zero in their rotary part the rotation has no effect, while
# the pages' rotary bytes stay what they are.
MLA = Shape(
    name="mla",
    mutes_rotary_queries=True,
    config_class="DeepseekV2Config",
    model_class="DeepseekV2ForCausalLM",
    config={
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 100,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "initializer_range": 0.12,
        "torch_dtype": "float32",
    },
)

SHAPES = {shape.name: shape for shape in (LLAMA, GEMMA, MLA)}


def prompt(shape: Shape, *, tokens: int, seed: int) -> list[int]:
    """Token ids without a pattern, the same in every process. Ids 0 to 9 stay free for special tokens."""
    state = seed * 2654435761 + 97
    ids = []
    for _ in range(tokens):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        ids.append(10 + (state >> 33) % (shape.vocab_size - 10))
    return ids


def write(shape: Shape, folder: Path) -> None:
    """Write configuration and weights into `folder`, unless it is complete. Imports torch: call it in a child."""
    if (folder / COMPLETE_MARKER).exists():
        return
    import torch  # noqa: PLC0415 - a client never needs it
    import transformers  # noqa: PLC0415 - nor this

    torch.manual_seed(shape.seed)
    config = getattr(transformers, shape.config_class)(**shape.config)
    model = getattr(transformers, shape.model_class)(config)
    if shape.mutes_rotary_queries:
        _mute_rotary_queries(model, config)
    model.save_pretrained(folder)
    (folder / COMPLETE_MARKER).touch()


def _mute_rotary_queries(model: Any, config: Any) -> None:
    head_size = config.qk_nope_head_dim + config.qk_rope_head_dim
    for layer in model.model.layers:
        rows = layer.self_attn.q_proj.weight.data.view(config.num_attention_heads, head_size, config.hidden_size)
        rows[:, config.qk_nope_head_dim :] = 0
