"""What we need of vLLM's classes: a fork that has it otherwise must not pass, and no use of ours may be forgotten."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xkv_compat.features import evaluate
from xkv_matrix.check import Places, open_tree
from xkv_matrix.needs import NEEDS, lacking

Make = Callable[[dict[str, str]], Path]
_BASE = "v1/kv_offload/base.py"
_OURS = Places().ours
_COMPAT = Path(__file__).resolve().parents[2] / "compat" / "src" / "xkv_compat"
# Where our sources hold vLLM's objects: function and what stands before the dot -> the class.
_HELD = {
    ("layouts", "kv_caches"): "CanonicalKVCaches",
    ("layouts", "ref"): "CanonicalKVCacheRef",
    ("get_worker", "kv_caches"): "CanonicalKVCaches",
    ("_span", "spec"): "GPULoadStoreSpec",
    ("get_worker", "tensor"): "CanonicalKVCacheTensor",
    ("_tensor_facts", "tensor"): "CanonicalKVCacheTensor",
    ("get_transfer_results", "results"): "KVConnectorTransferResults",
    ("take", "made"): "OffloadingConnectorStats",
    ("connector_workers", "connector"): "OffloadingConnector",
    ("connector_workers", "side"): "OffloadingConnectorWorker",
    ("connector_manager", "connector"): "OffloadingConnector",
    ("connector_manager", "side"): "OffloadingConnectorScheduler",
    ("prompt_tokens", "scheduler_output"): "SchedulerOutput",
    ("_from_offloading_config", "config"): "OffloadingConfig",
    ("_from_offloading_config", "group"): "OffloadingGroupConfig",
    ("_from_offloading_config", "parallel"): "OffloadingParallelConfig",
    ("_from_offloading_config", "config.model"): "OffloadingModelConfig",
    ("_from_offloading_config", "config.cache"): "OffloadingCacheConfig",
    ("_from_vllm_config", "transfer"): "KVTransferConfig",
    ("_from_vllm_config", "parallel"): "ParallelConfig",
    ("_from_vllm_config", "group"): "KVCacheGroupSpec",
    ("_from_vllm_config", "kv_cache_config"): "KVCacheConfig",
    ("_from_vllm_config", "group.kv_cache_spec"): "KVCacheSpec",
    ("_facts", "spec"): "KVCacheSpec",
    ("model_config_facts", "model"): "ModelConfig",
    ("model_config_facts", "pages"): "CacheConfig",
}
# The same in whatever function.
_HELD_ANYWHERE = {
    "req_context": "ReqContext",
    "src_spec": "GPULoadStoreSpec",
    "dst_spec": "GPULoadStoreSpec",
    "vllm_config": "VllmConfig",
    "vllm_config.kv_transfer_config": "KVTransferConfig",
    "vllm_config.scheduler_config": "SchedulerConfig",
    "vllm_config.load_config": "LoadConfig",
    "vllm_config.model_config": "ModelConfig",
    "vllm_config.cache_config": "CacheConfig",
}
# What is read only after the object was asked whether it has it.
_ASKED_FOR = {"group_id", "sliding_window_size_in_chunks", "replicated_layout", "canonical_layout", "kv_cache_layout"}
# How our sources call the classes that they make, beside ``_framework.NAME``.
_MADE_AS = {
    "self._words.prepare_store_output": "PrepareStoreOutput",
    "self._words.request_context": "RequestOffloadingContext",
    "new_stats": "OffloadingConnectorStats",
    "makers.counter": "OffloadingCounterMetadata",
    "makers.histogram": "OffloadingHistogramMetadata",
    "self._result": "TransferResult",
}


def _functions() -> Iterator[ast.FunctionDef]:
    for path in sorted((*_OURS.glob("*.py"), *_COMPAT.glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef):
                yield node


def _reads() -> set[tuple[str, str]]:
    """(class, attribute) for whatever our sources read of vLLM's objects."""
    found = set()
    for function in _functions():
        ours = {item.arg for item in function.args.args if item.annotation and "Xkv" in ast.unparse(item.annotation)}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and (before := ast.unparse(node.value)) not in ours:
                name = _HELD.get((function.name, before)) or _HELD_ANYWHERE.get(before)
                if before.startswith("_framework."):
                    name = before.removeprefix("_framework.")
                if name is not None and node.attr not in _ASKED_FOR:
                    found.add((name, node.attr))
    return found


def _made() -> set[tuple[str, tuple[str | None, ...]]]:
    """(class, keywords) for whatever our sources make."""
    found = set()
    for function in _functions():
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                name = _MADE_AS.get(called) or (called.removeprefix("_framework.") if "_framework." in called else None)
                if name is not None:
                    assert not node.args, called
                    found.add((name, tuple(keyword.arg for keyword in node.keywords)))
    return found


def test_the_table_is_what_our_sources_do() -> None:
    """Both ways: what is used and not in the table is not checked, what is in it for nothing turns forks away."""
    table = {(need.name, name) for need in NEEDS for name in need.reads}
    assert _reads() == table
    assert _made() == {(need.name, need.made_with) for need in NEEDS if need.made_with is not None}


def test_every_place_of_the_test_is_still_there() -> None:
    """A function or a parameter of another name would leave what it reads unseen."""
    seen = {
        (function.name, ast.unparse(node.value))
        for function in _functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
    }
    assert set(_HELD) <= seen
    assert set(_HELD_ANYWHERE) <= {before for _, before in seen}


def _texts(tree: Path) -> list[str]:
    reader = open_tree(tree)
    return [str(finding) for finding in lacking(reader, evaluate(reader, ""))]


def test_a_whole_release_has_everything(make_tree: Make, whole: dict[str, str]) -> None:
    assert _texts(make_tree(whole)) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    evicted_keys: list\n", "    evicted_keys: list\n    newest: int\n", "needs newest"),
        ("    evicted_keys: list\n", "", "no field evicted_keys"),
        ("    evicted_keys: list\n", "    evicted_keys: list\n    newest: int = 0\n", ""),
        ("    evicted_keys: list\n", "    evicted_keys: list\n    newest: int = field(repr=False)\n", "needs newest"),
        ("    evicted_keys: list\n", "    evicted_keys: list\n    newest: list = field(default_factory=list)\n", ""),
        ("    evicted_keys: list\n", "    evicted_keys: list\n    def __init__(self, keys): ...\n", "it takes (keys)"),
        ("    success: bool\n", "    ok: bool\n", "no field success"),
        ("    policy: int = 0", "    policy: int", "needs policy"),
        ("HIT_PENDING =", "PENDING =", "HIT_PENDING: read by us, and not there"),
        ("    group_data_refs:", "    refs:", "group_data_refs: read by us, and not there"),
        ("class CanonicalKVCacheRef", "class Renamed", "no such class, and we need it"),
        ("get_offload_block_hash(key)", "get_offload_block_hash(key, seed)", "returns key[:-4] of (key, seed)"),
        ("return key[:-4]", "return key[4:]", "returns key[4:]: keys are taken apart as BlockHash(key[:-4])"),
    ],
)
def test_a_class_that_has_become_another(make_tree: Make, whole: dict[str, str], old: str, new: str, said: str) -> None:
    assert old in whole[_BASE]
    whole[_BASE] = whole[_BASE].replace(old, new)
    texts = _texts(make_tree(whole))
    if not said:
        assert texts == []
        return
    assert len(texts) == 1
    assert texts[0].startswith("needs: vllm.v1.kv_offload.base.")
    assert said in texts[0]
