"""The doctor's checks that concern an engine, each on facts: environment, features, configuration, model, chunks."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from xkv_compat.features import Features
from xkv_compat.probes import FEATURES
from xkv_offload.doctor import chunks, command, environment, host, model, transfer_config
from xkv_store.commands_doctor import subject_of
from xkv_store.doctor.findings import Severity
from xkv_store.errors import UserError
from xkv_store.geometry import Geometry

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_store.doctor.findings import Finding

ALL = dict.fromkeys((feature.name for feature in FEATURES), True)
LLAMA = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
GEMMA = {
    **LLAMA,
    "num_hidden_layers": 12,
    "head_dim": 256,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
}
ROOM = chunks.Room(geometry=Geometry(), store_slots=3_072, load_slots=1_024)


def lacking(*names: str) -> Features:
    present = {**ALL, **dict.fromkeys(names, False)}
    return Features(present, {name: (f"symbol of {name}",) for name in names}, (), "made")


def worst(findings: list[Finding]) -> Severity:
    order = list(Severity)
    return max((one.severity for one in findings), key=order.index)


# --- the environment --------------------------------------------------------------------------------------------


def seed(value: str | None, features: Features | None, algorithm: str = "sha256") -> Finding:
    return environment.examine_seed(environment.Environment(seed=value, allocator={}), features, algorithm)


@pytest.mark.parametrize(
    ("value", "features", "algorithm", "severity"),
    [
        ("0", lacking("stable_none_hash_default"), "sha256", Severity.OK),
        (None, lacking(), "sha256", Severity.OK),
        (None, lacking(), "xxhash", Severity.FAULT),
        (None, lacking("stable_none_hash_default"), "sha256", Severity.FAULT),
        (None, None, "sha256", Severity.WARNING),
        ("random", lacking(), "sha256", Severity.WARNING),
        ("", lacking(), "sha256", Severity.WARNING),
        ("4294967296", lacking(), "sha256", Severity.FAULT),
        ("zero", lacking(), "sha256", Severity.FAULT),
    ],
)
def test_the_hash_seed(value: str | None, features: Features | None, algorithm: str, severity: Severity) -> None:
    found = seed(value, features, algorithm)
    assert found.severity is severity
    assert severity is Severity.OK or found.remedy.startswith("export PYTHONHASHSEED=0")


def test_python_takes_the_seeds_that_are_said_to_be_taken_and_no_others() -> None:
    for value, taken in (("4294967295", True), ("4294967296", False), ("zero", False)):
        done = subprocess.run(
            [sys.executable, "-S", "-c", ""],
            env={**os.environ, "PYTHONHASHSEED": value},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode == 0) == taken


@pytest.mark.parametrize("name", environment.ALLOCATOR_NAMES)
def test_expandable_segments_by_each_of_its_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in environment.ALLOCATOR_NAMES:
        monkeypatch.delenv(other, raising=False)
    (well,) = environment.examine_allocator(environment.gather_environment())
    assert well.severity is Severity.OK
    monkeypatch.setenv(name, "max_split_size_mb:128, expandable_segments:True")
    (found,) = environment.examine_allocator(environment.gather_environment())
    assert (found.severity, found.remedy) == (Severity.FAULT, f"export {name}=max_split_size_mb:128")
    assert ("refuses" in found.follows) == (name == "PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv(name, "expandable_segments:True")
    (found,) = environment.examine_allocator(environment.gather_environment())
    assert found.remedy == f"unset {name}"
    monkeypatch.setenv(name, "expandable_segments:False")
    (well,) = environment.examine_allocator(environment.gather_environment())
    assert well.severity is Severity.OK


def test_the_environment_of_a_running_process() -> None:
    code = "print('ready', flush=True); input()"
    variables = {**os.environ, "PYTHONHASHSEED": "7", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        found = environment.gather_environment(process.pid)
        process.communicate(b"\n", timeout=60)
    assert (found.seed, found.allocator["PYTORCH_ALLOC_CONF"]) == ("7", "expandable_segments:True")
    with pytest.raises(UserError, match="--pid"):
        environment.gather_environment(999_999_999)


# --- vLLM -------------------------------------------------------------------------------------------------------


def test_each_known_fault_is_told_by_its_feature_and_by_nothing_else() -> None:
    whole = {one.what for one in host.examine_faults(ALL)}
    for feature, words in {
        "abort_safe": "abort of a request",
        "reset_safe": "connector's reset",
        "finish_commit_clamp": "never computed",
        "state_hits_agree": "no Mamba state",
        "request_error_reporting": "by its blocks alone",
        "group_window_info": "with blocks missing",
        "group_ids": "draft model",
    }.items():
        (told,) = [one for one in host.examine_faults({**ALL, feature: False}) if one.what not in whole]
        assert words in told.what
        assert told.remedy
        assert (told.severity is Severity.WARNING) == (feature in {"abort_safe", "reset_safe"})
    without = {one.what for one in host.examine_faults({**ALL, "sync_loads": False})}
    assert any("inside a step" in one for one in whole - without)


def test_what_falls_back_is_said_with_its_reason() -> None:
    found = host.examine_host(host.HostFacts(lacking("request_error_reporting", "config_info")))
    text = {one.what for one in found if one.check == "fall-back"}
    assert any("request_error_reporting: block errors" in one and "symbol of request" in one for one in text)
    assert "1 other features are not there, which costs nothing" in text
    assert ALL.keys() >= host.FALL_BACKS, "each is a feature"


def test_a_vllm_without_what_is_needed() -> None:
    features = Features(ALL, {}, ("OffloadingSpec: no symbol here", "LookupResult: no symbol there"), "made")
    (found,) = host.examine_host(host.HostFacts(features))
    assert found.severity is Severity.FAULT
    assert "OffloadingSpec: no symbol here; LookupResult: no symbol there" in found.what
    (broken,) = host.examine_host(host.HostFacts(None, "vLLM's module x is there but broken"))
    assert broken.severity is Severity.FAULT
    (absent,) = host.examine_host(host.HostFacts(None, "none", absent=True))
    assert absent.severity is Severity.NOTE


def test_a_source_tree(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (found,) = host.examine_host(host.gather_host(tmp_path))
    assert found.severity is Severity.FAULT
    with pytest.raises(UserError, match="--source"):
        host.gather_host(tmp_path / "none")


@pytest.mark.filterwarnings("ignore")  # of libraries that are imported with it
def test_the_installed_vllm_works_with_xkv() -> None:
    found = host.examine_host(host.gather_host(None))
    assert found[0].severity is Severity.OK
    assert worst(found) in {Severity.OK, Severity.NOTE}


# --- the configuration ------------------------------------------------------------------------------------------

GOOD = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "XkvOffloadingSpec",
        "spec_module_path": transfer_config.PACKAGE,
        "blocks_per_chunk": 16,
        "xkv.port": 5557,
    },
}


def examined(extra: dict[str, Any], features: Features | None = None, **value: Any) -> list[Finding]:
    whole = {**GOOD, **value, "kv_connector_extra_config": {**GOOD["kv_connector_extra_config"], **extra}}  # type: ignore[dict-item]
    launch = command.launch_of(json.dumps(whole), None, tp=2, dtype="auto", block_tokens=16, blocks=None)
    return command._configuration(launch, features or lacking())


def test_a_configuration_that_an_engine_takes() -> None:
    (found,) = examined({})
    assert (found.severity, found.what) == (Severity.OK, "an engine would take it")


@pytest.mark.parametrize(
    ("extra", "value", "words"),
    [
        ({"xkv.prot": 1}, {}, "unknown key 'xkv.prot'"),
        ({"xkv.ring_bytes": "1 GiB"}, {}, "xkv.ring_bytes = '1 GiB' is not allowed"),
        ({"xkv.path": "/card"}, {}, "xkv.path = '/card' goes with an embedded card only"),
        ({"blocks_per_chunk": 0}, {}, "blocks_per_chunk is 0"),
        ({"canonical_layout": True}, {}, "canonical_layout"),
        ({"spec_name": "CPUOffloadingSpec"}, {}, "spec_name is 'CPUOffloadingSpec'"),
        ({"spec_module_path": "xkv"}, {}, "spec_module_path is 'xkv'"),
        ({}, {"kv_connector": "NixlConnector"}, "kv_connector is 'NixlConnector'"),
        ({}, {"kv_role": "both"}, "kv_role is 'both'"),
    ],
)
def test_a_configuration_that_none_would_take(extra: dict[str, Any], value: dict[str, Any], words: str) -> None:
    (found,) = examined(extra, **value)
    assert found.severity is Severity.FAULT
    assert words in found.what
    assert found.follows
    assert found.remedy


def test_the_nearest_key_and_keys_that_only_look_like_ours() -> None:
    (found,) = examined({"xkv.prot": 1})
    assert "'xkv.port'" in found.remedy
    (found, well) = examined({"xkv_ring_bytes": 1})
    assert well.severity is Severity.OK, "it is ignored"
    assert (found.severity, "'xkv.ring_bytes'" in found.remedy) == (Severity.WARNING, True)


def test_what_this_vllm_does_not_read_is_refused_with_what_to_type() -> None:
    (found,) = examined({}, lacking("blocks_per_chunk_key"))
    assert (found.severity, "block_size = 256" in found.remedy) == (Severity.FAULT, True)
    (found,) = examined({"offload_prompt_only": False}, lacking("finish_commit_clamp"))
    assert found.severity is Severity.FAULT


@pytest.mark.parametrize(
    "text", ["{", "[]", "/no/such/file", '{"kv_connector_extra_config": 3}', "x" * 5_000, '{"a":' * 99_999]
)
def test_what_is_no_configuration_is_the_user_s_mistake(text: str) -> None:
    with pytest.raises(UserError, match="--config"):
        transfer_config.read_transfer_config(text)


def test_a_configuration_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(GOOD))
    assert transfer_config.read_transfer_config(str(tmp_path / "c.json")).extra["xkv.port"] == 5557


def test_a_gateway_for_each_rank_is_looked_at() -> None:
    extra = {**GOOD["kv_connector_extra_config"], "xkv.port_per_rank": True}  # type: ignore[dict-item]
    text = json.dumps({**GOOD, "kv_connector_extra_config": extra})
    launch = command.launch_of(text, None, tp=3, dtype="auto", block_tokens=16, blocks=None)
    assert launch.config is not None
    own = subject_of(None, None, None, None, None, None, measures=False)
    assert [one.socket.name for one in command._subjects(launch, launch.config, own)] == [
        "5557.sock",
        "5558.sock",
        "5559.sock",
    ]


# --- a model ----------------------------------------------------------------------------------------------------


def test_bytes_of_a_token() -> None:
    whole = model.shape_of(LLAMA, ranks=1, dtype="auto")
    assert whole.rank_token_bytes == 32 * 2 * 8 * 128 * 2
    four = model.shape_of(LLAMA, ranks=4, dtype="fp8")
    assert four.rank_token_bytes == 32 * 2 * 2 * 128
    assert four.engine_token_bytes == 4 * four.rank_token_bytes
    many = model.shape_of(LLAMA, ranks=16, dtype="auto")
    assert many.rank_token_bytes == 32 * 2 * 1 * 128 * 2, "each rank has a whole head, which another has, too"
    latent = model.shape_of(DEEPSEEK, ranks=8, dtype="auto")
    assert latent.rank_token_bytes == 61 * 576 * 2
    assert (latent.replicated, latent.engine_token_bytes) == (True, latent.rank_token_bytes)


def test_groups_are_as_vllm_makes_them() -> None:
    shape = model.shape_of(GEMMA, ranks=1, dtype="auto")
    assert [(one.kind, one.layers) for one in shape.groups] == [("sliding", 2)] * 5 + [("full", 2)]
    assert shape.full_attention == (False,) * 5 + (True,)
    assert model.grouped(["sliding"] * 12 + ["full"] * 13) == [("sliding", 12), ("full", 13)]
    assert model.grouped(["full"] * 3) == [("full", 3)]
    assert model.shape_of({**GEMMA, "num_kv_shared_layers": 6}, ranks=1, dtype="auto").groups[-1].layers == 1


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"sliding_window": 4096}, {"sliding": 32}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {"full": 32}),
        ({"sliding_window": 4096, "sliding_window_pattern": 2}, {"sliding": 16, "full": 16}),
        ({"sliding_window": None}, {"full": 32}),
    ],
)
def test_windows_that_a_configuration_says_in_other_ways(changes: dict[str, Any], kinds: dict[str, int]) -> None:
    shape = model.shape_of({**LLAMA, **changes}, ranks=1, dtype="auto")
    assert {one.kind: one.layers for one in shape.groups} == kinds


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "--dtype fp8"),
        ({"torch_dtype": "int3"}, "--dtype 'int3'"),
        ({"num_key_value_heads": 6}, "--tp 4"),
    ],
)
def test_what_cannot_be_told_is_not_guessed(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        model.shape_of({**LLAMA, **changes}, ranks=4, dtype="auto")


def test_a_model_is_read_from_its_folder_and_from_inside_a_larger_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA, "dtype": "float16"}))
    read = model.read_model(tmp_path)
    assert (read["num_hidden_layers"], read["dtype"]) == (32, "float16")
    for text in ("[]", "[" * 99_999):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="--model"):
            model.read_model(tmp_path / "config.json")
    with pytest.raises(UserError, match="--model"):
        model.read_model(tmp_path / "none")


@pytest.mark.filterwarnings("ignore")
def test_pages_are_as_large_as_vllm_s() -> None:
    """By this release's own specs: a page of one layer is what a block's tokens take."""
    torch, specs = importlib.import_module("torch"), importlib.import_module("vllm.v1.kv_cache_interface")
    full = specs.FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    (group,) = model.shape_of(LLAMA, ranks=1, dtype="auto").groups
    assert full.page_size_bytes == 16 * group.layer_token_bytes
    latent = specs.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    (group,) = model.shape_of(DEEPSEEK, ranks=8, dtype="auto").groups
    assert latent.page_size_bytes == 16 * group.layer_token_bytes


# --- chunks -----------------------------------------------------------------------------------------------------


def plans(shape: model.ModelShape, room: chunks.Room = ROOM, *, holes: bool = False) -> list[chunks.ChunkPlan]:
    return [
        chunks.plan_chunk(shape, block_tokens=16, blocks=blocks, room=room, holes=holes)
        for blocks in chunks.BLOCKS_PER_CHUNK
    ]


def test_fragments_and_waste() -> None:
    shape = model.shape_of(LLAMA, ranks=1, dtype="auto")
    one, *_ = all_plans = plans(shape)
    assert (one.tokens, one.groups[0].object_bytes, one.groups[0].fragments) == (16, 2 << 20, 9)
    assert one.waste == pytest.approx(1 - (2 << 20) / (9 * 262_144))
    best = chunks.recommended(all_plans)
    assert best is not None
    assert best.blocks == 4, "the smallest that wastes little: a larger one would only hit more coarsely"


def test_a_wasteful_chunk_is_named_with_a_better_one() -> None:
    small = model.shape_of({**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 1}, ranks=1, dtype="auto")
    all_plans = plans(small)
    found = chunks.examine_chunks(all_plans, all_plans[0], in_tokens=False)[-1]
    assert found.severity is Severity.WARNING
    assert "blocks_per_chunk 1 is wasteful: 94%" in found.what
    assert found.remedy.startswith('give "blocks_per_chunk":')
    assert chunks.examine_chunks(all_plans, all_plans[0], in_tokens=True)[-1].remedy.startswith('give "block_size":')
    best = chunks.recommended(all_plans)
    assert chunks.examine_chunks(all_plans, best, in_tokens=False)[-1].severity is Severity.OK
    assert "recommended" in chunks.examine_chunks(all_plans, None, in_tokens=False)[-1].what


def test_chunks_that_the_ring_has_no_room_for() -> None:
    shape = model.shape_of(LLAMA, ranks=1, dtype="auto")
    tight = chunks.Room(geometry=Geometry(), store_slots=20, load_slots=20)
    all_plans = plans(shape, tight)
    assert [bool(plan.refused) for plan in all_plans] == [False, False, *[True] * 6]
    assert chunks.examine_chunks(all_plans, all_plans[-1], in_tokens=False)[-1].severity is Severity.FAULT
    none = plans(shape, chunks.Room(geometry=Geometry(), store_slots=2, load_slots=2))
    found = chunks.examine_chunks(none, None, in_tokens=False)[-1]
    assert (found.severity, "xkv.ring_bytes" in found.remedy) == (Severity.FAULT, True)


def test_a_ring_that_is_too_small_for_so_many_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    extra = {**GOOD["kv_connector_extra_config"], "xkv.ring_bytes": 4 << 20}  # type: ignore[dict-item]
    text = json.dumps({**GOOD, "kv_connector_extra_config": extra})
    launch = command.launch_of(text, tmp_path, tp=64, dtype="auto", block_tokens=16, blocks=None)
    assert launch.shape is not None
    findings, value = command._model(launch, launch.shape, lacking(), [])
    assert (findings[-1].severity, value) == (Severity.FAULT, {})
    assert "64 ranks need at least" in findings[-1].what


def test_what_a_model_comes_to_without_rates(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    launch = command.launch_of(json.dumps(GOOD), tmp_path, tp=2, dtype="auto", block_tokens=16, blocks=None)
    assert launch.shape is not None
    findings, value = command._model(launch, launch.shape, lacking("request_error_reporting"), [])
    text = " ".join(one.what for one in findings)
    assert "verified before they are given" in text, "several groups, and no failure that can be told by request"
    assert "not told: it takes the card's bandwidth" in text
    assert "break_even_tokens" not in value


def test_windows_with_holes_take_chunks_of_one_block() -> None:
    best = chunks.recommended(plans(model.shape_of(GEMMA, ranks=1, dtype="auto"), holes=True))
    assert best is not None
    assert best.blocks == 1


def test_when_restoring_pays() -> None:
    rates = chunks.Rates(read_bytes_per_s=1_000_000.0, prefill_tokens_per_s=100.0, start_s=0.95)
    # A token takes 1 ms from the card and 10 ms to compute: 9 ms are won, and 0.95 s lost at the start.
    assert chunks.break_even_tokens(1_000, rates, chunk_tokens=1) == 106
    assert chunks.break_even_tokens(1_000, rates, chunk_tokens=64) == 128, "whole chunks alone are restored"
    assert chunks.break_even_tokens(10_000, rates, chunk_tokens=64) is None
    shape = model.shape_of(LLAMA, ranks=1, dtype="auto")
    found, tokens = chunks.examine_break_even(shape, rates, chunk_tokens=64)
    assert (found.severity, tokens) == (Severity.WARNING, None)
    assert "12.5 MiB/s" in found.remedy, "which is what it would take"
    assert "when_faster" in found.remedy, "and what an engine can do about it by itself"
