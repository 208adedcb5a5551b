"""What is refused at start-up, what is part of the identity, one object per rank or for all."""

from types import SimpleNamespace
from typing import Any

import pytest

from xkv_compat.vllm_symbols import ConfigView, GroupView, LayerFacts
from xkv_offload import description
from xkv_offload.config import parse
from xkv_offload.description import (
    GroupKind,
    check_room,
    check_states,
    check_supported,
    compact,
    describe,
    is_replicated,
    kinds,
    layout_text,
)
from xkv_store.errors import UserError

FEATURES = {
    "blocks_per_chunk_key": True,
    "finish_commit_clamp": False,
    "sync_loads": False,
    "tagged_hash_extras": False,
}


def view(**changes: Any) -> ConfigView:
    fields: dict[str, Any] = {
        "engine_id": "e",
        "extra_config": {},
        "model": "m",
        "cache_dtype": "float32",
        "groups": (GroupView(32, ("a", "b"), 0, None), GroupView(32, ("c",), 1, None)),
        "tokens_per_hash": 32,
        "blocks_per_chunk": 2,
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "replicated_hint": None,
        "canonical_layout": False,
        "kv_cache_layout": None,
        "kv_bytes_per_block": None,
    }
    return ConfigView(**(fields | changes))


def layer(**changes: Any) -> LayerFacts:
    fields: dict[str, Any] = {
        "kind": "FullAttentionSpec",
        "block_size": 32,
        "page_size_bytes": 64,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "float32",
        "sliding_window": None,
        "attention_chunk_size": None,
        "is_mla": False,
        "is_full_attention": True,
        "is_sliding_window": False,
        "is_mamba": False,
        "details": (("dtype", "float32"),),
    }
    return LayerFacts(**(fields | changes))


LAYERS = {"a": layer(), "b": layer(), "c": layer(is_full_attention=False, is_mamba=True)}


class Rows:
    """An int8 tensor's row stride, which is all that is read of it."""

    def __init__(self, stride: int) -> None:
        self._stride = stride

    def stride(self, dimension: int) -> int:
        assert dimension == 0
        return self._stride


def caches(*, stride: int = 64) -> Any:
    tensors = [SimpleNamespace(tensor=Rows(stride), page_size_bytes=64) for _ in range(3)]
    refs = [[(0, 60), (1, 64)], [(2, 64)]]
    return SimpleNamespace(
        tensors=tensors,
        group_data_refs=[[SimpleNamespace(tensor_idx=t, page_size_bytes=size) for t, size in group] for group in refs],
    )


def model(**changes: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "weights": "",
        "revision": None,
        "commit": "c",
        "load_format": "auto",
        "hf_config": {"rope": 1},
        "lora": False,
        "calculate_kv_scales": False,
        "hash_algorithm": "sha256",
        "undetermined": [],
    } | changes


def described(*, of: ConfigView | None = None, layers: Any = LAYERS, stride: int = 64, **changes: Any) -> Any:
    return describe(
        view=of or view(),
        config=parse({}),
        features=FEATURES,
        version="1",
        model=model(**changes),
        layers=layers,
        replicated=False,
        kv_caches=caches(stride=stride),
        kv_role="kv_both",
        channel="block_errors",
        full_attention=[True],
    )


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        ({"pp_size": 2}, {}, "pipeline_parallel_size = 2"),
        ({"dcp_size": 2}, {}, "decode_context_parallel_size = 2"),
        ({"pcp_size": 2}, {}, "prefill_context_parallel_size = 2"),
        ({"extra_config": {"offload_prompt_only": False}}, {}, "offload_prompt_only"),
        ({"canonical_layout": True}, {}, "canonical_layout"),
        ({}, {"xkv.tp_layout": "replicated"}, "more than one rank"),
    ],
)
def test_what_cannot_be_done_right_is_refused_at_start(changes: Any, config: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_supported(view(**changes), parse(config), FEATURES)
    check_supported(view(), parse({}), FEATURES)


def test_a_release_with_the_clamp_may_store_what_was_generated() -> None:
    check_supported(
        view(extra_config={"offload_prompt_only": False}), parse({}), FEATURES | {"finish_commit_clamp": True}
    )


OF_ONE_SIZE = "give block_size = 512 \\(tokens\\) instead"
OF_TWO_SIZES = (GroupView(16, ("a", "b"), 0, None), GroupView(32, ("c",), 1, None))


@pytest.mark.parametrize(
    ("extra", "changes", "words"),
    [
        ({"blocks_per_chunk": 16}, {"blocks_per_chunk": 1}, OF_ONE_SIZE),
        ({"blocks_per_chunk": 16, "block_size": 64}, {"blocks_per_chunk": 2}, OF_ONE_SIZE),
        ({"blocks_per_chunk": 16}, {"blocks_per_chunk": 1, "groups": OF_TWO_SIZES}, "leave it out.*16 and 32 tokens"),
        ({"blocks_per_chunk": "16"}, {"blocks_per_chunk": 1}, "'16' is not read by this vLLM: leave it out"),
        ({"block_size": 16}, {"blocks_per_chunk": 0}, "block_size = 16 is less than a block.*multiple of 32"),
    ],
)
def test_a_chunk_that_vllm_would_not_read_says_what_to_type(extra: Any, changes: Any, words: str) -> None:
    """Unread, every chunk would be one block: sixteen times the objects, and nothing would say why."""
    asked = view(extra_config=extra, **changes)
    with pytest.raises(UserError, match=words):
        check_supported(asked, parse({}), FEATURES | {"blocks_per_chunk_key": False})


def test_a_chunk_in_tokens_is_taken_where_vllm_reads_that() -> None:
    old = FEATURES | {"blocks_per_chunk_key": False}
    check_supported(view(extra_config={"block_size": 64}), parse({}), old)
    check_supported(view(extra_config={"block_size": 64, "blocks_per_chunk": 2}), parse({}), old)
    check_supported(view(extra_config={"blocks_per_chunk": 16}, blocks_per_chunk=16), parse({}), FEATURES)


def test_kinds_by_group_and_none_where_a_layer_is_unknown() -> None:
    assert kinds(view(), LAYERS) == (GroupKind(True, False, False), GroupKind(False, False, True))
    assert kinds(view(), {"a": layer()}) is None
    assert kinds(view(), None) is None


@pytest.mark.parametrize("others", [{}, {"b": layer(is_full_attention=False, is_sliding_window=True)}])
def test_states_beside_other_groups_are_refused_where_vllm_begins_without_one(others: dict[str, LayerFacts]) -> None:
    """Let through, the engine would say what follows from whatever lies in the null block."""
    words = "Mamba layers beside other layers are refused on this vLLM.*newer vLLM.*without a KV connector"
    with pytest.raises(UserError, match=words):
        check_states(view(), LAYERS | others, {"state_hits_agree": False})
    check_states(view(), LAYERS | others, {"state_hits_agree": True})


def test_states_alone_and_groups_without_states_are_taken_everywhere() -> None:
    old = {"state_hits_agree": False}
    check_states(view(groups=(GroupView(32, ("c",), 0, None),)), {"c": LAYERS["c"]}, old)
    check_states(view(), {"a": layer(), "b": layer(), "c": layer(is_full_attention=False)}, old)
    check_states(view(), None, old)


@pytest.mark.parametrize(
    ("mla", "layout", "world_size", "expected"),
    [
        ((True, True), "auto", 2, True),
        ((True, True), "auto", 1, False),
        ((True, True), "per_rank", 2, False),
        ((True, False), "auto", 2, False),
        (None, "auto", 2, False),
        ((True, True), "replicated", 2, True),
    ],
)
def test_one_object_for_all_ranks_only_where_every_layer_is_mla(
    mla: tuple[bool, ...] | None, layout: str, world_size: int, expected: bool
) -> None:
    found = None if mla is None else [GroupKind(True, one, False) for one in mla]
    config = parse({"xkv.tp_layout": layout})
    assert is_replicated(view(world_size=world_size), config, found) is expected


@pytest.mark.parametrize("found", [None, [GroupKind(True, False, False)]])
def test_replicated_asked_for_where_it_is_wrong_is_an_error(found: Any) -> None:
    with pytest.raises(UserError, match="every layer of every group is MLA"):
        is_replicated(view(world_size=2), parse({"xkv.tp_layout": "replicated"}), found)


def test_with_a_gateway_for_each_rank_no_object_serves_two() -> None:
    """`auto` must not fail for a model's sake, and no rank reads what another's gateway has."""
    config = parse({"xkv.port": 5557, "xkv.port_per_rank": True})
    assert is_replicated(view(world_size=2), config, [GroupKind(True, True, False)]) is False


def test_the_last_ranks_port_is_one() -> None:
    config = parse({"xkv.port": 65_534, "xkv.port_per_rank": True})
    check_supported(view(world_size=2, tp_size=2), config, FEATURES)
    check_supported(view(world_size=3, tp_size=3), parse({"xkv.port": 65_534}), FEATURES)
    with pytest.raises(UserError, match=r"xkv.port = 65534 rank 2's gateway has port 65536.*lower"):
        check_supported(view(world_size=3, tp_size=3), config, FEATURES)


@pytest.mark.parametrize(
    ("asked", "replicated", "said"),
    [
        ("auto", True, "auto: replicated, one object for all 2 ranks, since every layer of every group is MLA"),
        ("auto", False, "auto: per_rank, an object for each of 2 ranks, since not every layer of every group is known"),
        ("per_rank", False, "per_rank: per_rank, an object for each of 2 ranks, since it is asked for"),
        ("replicated", True, "replicated: replicated, one object for all 2 ranks, since it is asked for"),
    ],
)
def test_the_log_says_what_was_chosen_and_why(asked: str, replicated: bool, said: str) -> None:
    text = layout_text(asked=asked, replicated=replicated, world_size=2)
    assert text.startswith(f"xkv.tp_layout = {said}")
    assert layout_text(asked=asked, replicated=False, world_size=1) == "one rank"


def test_the_log_says_so_where_each_rank_has_a_gateway() -> None:
    assert layout_text(asked="auto", replicated=False, world_size=2, ports="5557 to 5558") == (
        "xkv.tp_layout = auto: per_rank, an object for each of 2 ranks, since each has a gateway of its own, on ports "
        "5557 to 5558"
    )


def test_bytes_of_a_chunk() -> None:
    assert described().engine["chunk_bytes"] == [2 * 124, 2 * 64]


@pytest.mark.parametrize(
    "other",
    [
        {"hf_config": {"rope": 2}},
        {"of": view(blocks_per_chunk=4)},
        {"of": view(cache_dtype="fp8")},
        {"of": view(kv_cache_layout="HND")},
        {"of": view(tp_size=2)},
        {"stride": 128},
        {"layers": LAYERS | {"a": layer(dtype="bfloat16", details=(("dtype", "bfloat16"),))}},
        {"layers": None},
    ],
)
def test_whatever_makes_bytes_valid_changes_the_facts(other: dict[str, Any]) -> None:
    assert described(**other).digest() != described().digest()


def test_what_is_not_known_is_said() -> None:
    assert described(layers=None).undetermined == ("kinds of attention",)
    assert described(undetermined=["quantization"]).undetermined == ("quantization",)


def test_a_long_fact_is_published_as_its_digest() -> None:
    long = ["x" * description.FACT_CHARACTERS_MAX]
    assert str(compact(long)).startswith("sha256:")
    assert compact(long) != compact(["y" * description.FACT_CHARACTERS_MAX])
    assert compact([1]) == [1]


def test_a_chunk_larger_than_the_ring_is_a_start_up_error() -> None:
    config = parse({})
    check_room(chunk_bytes=[261_120 * 8], config=config, world_size=1, load_slots=8, store_slots=24)
    with pytest.raises(UserError, match=r"9 slots.*blocks_per_chunk.*, or xkv.ring_bytes"):
        check_room(chunk_bytes=[261_120 * 8 + 1], config=config, world_size=1, load_slots=8, store_slots=24)
    with pytest.raises(UserError, match="fragments"):
        check_room(chunk_bytes=[1 << 40], config=config, world_size=1, load_slots=8, store_slots=24)
