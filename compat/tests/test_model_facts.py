"""What an identity is made of: a fact that is lost here lets one model read another one's pages."""

from __future__ import annotations

import json
from enum import Enum
from types import SimpleNamespace as Some
from typing import Any

from xkv_compat.model_facts import model_config_facts


class _Format(Enum):
    AUTO = "auto"


class _Config:
    def __init__(self, **values: Any) -> None:
        self._values = values
        self._commit_hash = values.get("_commit_hash")

    def to_dict(self) -> dict[str, Any]:
        return self._values


def _vllm_config(**changes: Any) -> Any:
    hf_config = _Config(
        hidden_size=128,
        rope_parameters={"rope_theta": 1.0, "factor": 8},
        layers=("a", "b"),
        nested=_Config(x=1),
        names={"b", "a"},
        transformers_version="9",
        _name_or_path="/somewhere",
        _commit_hash="abc",
    )
    model = Some(model="org/model", revision="main", dtype="torch.bfloat16", quantization=None, hf_config=hf_config)
    config = Some(
        model_config=model,
        cache_config=Some(prefix_caching_hash_algo="sha256", cache_dtype="auto"),
        load_config=Some(load_format=_Format.AUTO),
    )
    for path, value in changes.items():
        owner, _, name = path.rpartition("__")
        setattr(getattr(config, owner) if owner else config, name, value)
    return config


def test_facts_are_plain_sorted_data() -> None:
    facts = model_config_facts(_vllm_config())
    assert json.loads(json.dumps(facts)) == facts
    assert facts["hf_config"] == {
        "hidden_size": 128,
        "layers": ["a", "b"],
        "names": ["a", "b"],
        "nested": {"x": 1},
        "rope_parameters": {"factor": 8, "rope_theta": 1.0},
    }
    assert list(facts["hf_config"]["rope_parameters"]) == ["factor", "rope_theta"]
    assert (facts["model"], facts["dtype"], facts["commit"], facts["load_format"]) == (
        "org/model",
        "bfloat16",
        "abc",
        "auto",
    )
    assert (facts["lora"], facts["calculate_kv_scales"], facts["speculative"]) == (False, False, None)
    assert facts["undetermined"] == []


def test_every_option_that_matters_changes_the_facts() -> None:
    plain = model_config_facts(_vllm_config())
    changes: dict[str, Any] = {
        "model_config__model": "other",
        "model_config__revision": "r2",
        "model_config__dtype": "torch.float16",
        "model_config__quantization": "fp8",
        "model_config__quantization_config": {"bits": 4},
        "model_config__hf_config": _Config(hidden_size=128, rope_parameters={"factor": 4}),
        "cache_config__prefix_caching_hash_algo": "xxhash",
        "cache_config__cache_dtype": "fp8",
        "cache_config__calculate_kv_scales": True,
        "cache_config__kv_cache_dtype_skip_layers": ["0"],
        "cache_config__mamba_cache_mode": "align",
        "load_config__load_format": "dummy",
        "lora_config": object(),
        "speculative_config": Some(method="eagle", model="draft", draft_model_config=Some(hf_config=_Config(n=1))),
    }
    for name, value in changes.items():
        assert model_config_facts(_vllm_config(**{name: value})) != plain, name


def test_what_has_no_stable_text_is_named() -> None:
    """An object's default text holds its address: such a launch must keep its namespace to itself."""
    facts = model_config_facts(_vllm_config(model_config__hf_config=_Config(odd=object(), inner=[object()])))
    assert facts["undetermined"] == ["hf_config.inner[0]", "hf_config.odd"]
    facts = model_config_facts(_vllm_config(model_config__hf_config=object()))
    assert facts["undetermined"] == ["hf_config"]
