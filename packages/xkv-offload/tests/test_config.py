"""Configuration: every fault is an error that says what to type, before anything exists."""

import logging
from pathlib import Path
from typing import Any

import pytest

from xkv_offload.config import page, parse
from xkv_offload.config_table import KEYS
from xkv_store.errors import UserError

REPO = Path(__file__).parents[3]


def test_defaults_make_an_embedded_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    config = parse({"spec_name": "XkvOffloadingSpec", "blocks_per_chunk": 16})
    assert config.port is None
    assert config.path == Path("/somewhere/xkv/card")
    assert config.load_reserve_bytes == config.ring_bytes // 4


def test_hits_of_a_card_without_databases_are_verified() -> None:
    remote = {"xkv.remote": "mooncake://m:1"}
    assert parse({**remote, "xkv.databases": 0}).verify_hits
    assert not parse(remote).verify_hits


def test_every_key_of_the_table_is_a_field_and_is_taken() -> None:
    for key in KEYS:
        value: Any = {"int": key.low, "float": key.low, "str": "x", "bool": True, "choice": key.choices[-1:]}[key.kind]
        value = value[0] if key.kind == "choice" else value
        if key.name == "xkv.ring_bytes":
            value = 64 << 20
        if key.name == "xkv.remote":
            value = "mooncake://master:50051"
        beside: dict[str, object] = {"xkv.port": 5557} if key.name == "xkv.port_per_rank" else {}
        if key.name == "xkv.databases":
            beside = {"xkv.remote": "mooncake://master:50051"}
        config = parse({key.name: value, **beside})
        assert str(getattr(config, key.field)) == str(float(value) if key.kind == "float" else value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"xkv.prot": 5557}, ["'xkv.prot'", "5557", "'xkv.port'"]),
        ({"xkv.port": "5557"}, ["xkv.port", "'5557'", "1 to 65,535"]),
        ({"xkv.port": True}, ["xkv.port", "True"]),
        ({"xkv.port": 0}, ["xkv.port", "0", "1 to 65,535"]),
        ({"xkv.fragment_bytes": 262_144}, ["xkv.fragment_bytes", "262144", "261120"]),
        ({"xkv.tp_layout": "sharded"}, ["xkv.tp_layout", "'sharded'", "auto, replicated, per_rank"]),
        ({"xkv.trust_lora_names": "yes"}, ["xkv.trust_lora_names", "'yes'", "true or false"]),
        ({"xkv.port": 5557, "xkv.path": "/card"}, ["xkv.path", "xkv.port"]),
        ({"xkv.port": 5557, "xkv.linger_s": 3}, ["xkv.linger_s", "embedded"]),
        ({"xkv.port": 5557, "xkv.remote": "mooncake://m:1"}, ["xkv.remote", "embedded"]),
        ({"xkv.remote": "mooncake://m:1?segments=1GiB"}, ["xkv.remote", "'segments'", "segment"]),
        ({"xkv.remote": "redis://m:1"}, ["xkv.remote", "mooncake://"]),
        ({"xkv.databases": 0}, ["xkv.databases = 0", "xkv.remote"]),
        ({"xkv.port_per_rank": True}, ["xkv.port_per_rank = True", "needs xkv.port"]),
        ({"xkv.port_per_rank": True, "xkv.path": "/card"}, ["xkv.port_per_rank = True", "needs xkv.port"]),
        ({"xkv.port_per_rank": 1, "xkv.port": 5557}, ["xkv.port_per_rank", "1", "true or false"]),
        (
            {"xkv.port_per_rank": True, "xkv.port": 5557, "xkv.tp_layout": "replicated"},
            ["xkv.tp_layout = 'replicated'", "xkv.port_per_rank = True"],
        ),
        ({"xkv.ring_bytes": 4 << 20, "xkv.load_reserve_bytes": 4 << 20}, ["xkv.load_reserve_bytes"]),
        ({"xkv.path": ""}, ["xkv.path", "''"]),
        ({"xkv.": 1}, ["'xkv.'"]),
    ],
)
def test_a_wrong_key_is_an_error_that_names_key_value_and_allowed(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(given)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"xkv.port": 5557, "xkv.port_per_rank": True, "xkv.tp_layout": "per_rank"},
        {"xkv.port": 5557, "xkv.port_per_rank": False, "xkv.tp_layout": "replicated"},
        {"xkv.path": "/card", "xkv.port_per_rank": False},
    ],
)
def test_a_gateway_for_each_rank_excludes_only_what_contradicts_it(given: dict[str, object]) -> None:
    assert parse(given).port_per_rank is given["xkv.port_per_rank"]


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(UserError, match=r"xkv\.one.*xkv\.two"):
        parse({"xkv.one": 1, "xkv.two": 2})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("xkv_port", "xkv.port"),
        ("xkv-ring-bytes", "xkv.ring_bytes"),
        ("xvk.port", "xkv.port"),
        (" xkv.port", "xkv.port"),
        ("XKV.PORT", "xkv.port"),
        ("xkvport", "xkv.port"),
    ],
)
def test_look_alikes_warn(caplog: pytest.LogCaptureFixture, name: str, meant: str) -> None:
    with caplog.at_level(logging.WARNING):
        parse({name: 1})
    assert repr(name) in caplog.text
    assert repr(meant) in caplog.text


def test_vllms_own_keys_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse(
            dict.fromkeys(("block_size", "spec_name", "spec_module_path", "blocks_per_chunk", "offload_prompt_only"), 1)
        )
    assert not caplog.text


@pytest.mark.parametrize("key", ["xkv.path", "xkv.socket_dir"])
@pytest.mark.parametrize("text", ["~nosuchuser/x", "a\0b", "a\ud800"])
def test_a_folder_that_can_be_none_is_an_error_that_names_the_key(key: str, text: str) -> None:
    with pytest.raises(UserError, match=key):
        parse({key: text})


def test_a_long_value_is_not_repeated_whole() -> None:
    with pytest.raises(UserError) as caught:
        parse({"xkv.port": "x" * 100_000})
    assert len(str(caught.value)) < 1_000


def test_the_documentation_is_the_table() -> None:
    assert (REPO / "docs" / "configuration.md").read_text() == page()
