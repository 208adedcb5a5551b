"""`xkv why` of prompts: hashes and identities are the release's own, each miss is explained by what was made to differ.

If this goes, nothing shows any more that the command asks for the keys that an engine asks for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from harness import release
from harness.shapes import Shape, full, sliding
from harness.story import prompt
from xkv_offload.why import command
from xkv_store import cli

if TYPE_CHECKING:
    from pathlib import Path

    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

OTHERS = {"why": lambda: command.register}
SHAPE = Shape(groups=(full(),), blocks=64, blocks_per_chunk=2)
CHUNK = 32
CHUNKS = 5
TOKENS = prompt(tokens=CHUNK * CHUNKS + 3, seed=21)


@dataclass(frozen=True, slots=True)
class Card:
    """A card in a rig, asked as a person would."""

    rig: Rig
    folder: Path
    capture: pytest.CaptureFixture[str]

    def stored(self, shape: Shape = SHAPE, tokens: list[int] = TOKENS, **extra: Any) -> str:
        """Serve the prompt by an engine of this shape, end it, and give its namespace's digits."""
        engine = self.rig.launch(shape, extra=extra)
        before = self.rig.gateway.status()["objects"]
        engine.serve("r", tokens)
        engine.await_stores()
        assert self.rig.gateway.status()["objects"] > before
        return self._ended(engine)

    def launched(self, shape: Shape = SHAPE, **extra: Any) -> str:
        """The namespace of an engine that serves nothing."""
        return self._ended(self.rig.launch(shape, extra=extra))

    def _ended(self, engine: Any) -> str:
        digits: str = engine.manager._namespace.hex()
        self.rig.end(engine)
        return digits

    def why(self, *words: str, tokens: list[int] | None = TOKENS) -> tuple[int, dict[str, Any]]:
        """Ask; without a --hash-seed by the environment's."""
        extra = self.rig.gateway.extra
        place = ["--port", str(extra["xkv.port"]), "--socket-dir", str(extra["xkv.socket_dir"])]
        if any(word == "--config" for word in words):
            place = []
        if tokens is not None:
            (self.folder / "tokens").write_text(" ".join(map(str, tokens)))
            place += ["--tokens", str(self.folder / "tokens")]
        self.capture.readouterr()
        code = cli.main(["why", *place, *words, "--json"], OTHERS)
        return code, json.loads(self.capture.readouterr().out.splitlines()[-1])

    def config(self, **extra: Any) -> list[str]:
        """--config, as the rig's engines have it."""
        value = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "XkvOffloadingSpec",
                "spec_module_path": "xkv_offload",
                "xkv.weights_fingerprint": "harness",
                **release._chunk(SHAPE),
                **self.rig.gateway.extra,
                **extra,
            },
        }
        return ["--config", json.dumps(value), "--block-size", "16", "--model", str(self.folder / "model")]


@pytest.fixture
def card(rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return Card(rig, tmp_path, capsys)


def test_a_prompt_that_an_engine_stored_is_held(card: Card) -> None:
    own = card.stored()
    code, answer = card.why("--namespace", own)
    assert (code, answer["verdict"]) == (0, "held"), answer
    assert answer["about"]["hit_tokens"] == CHUNK * CHUNKS
    code, answer = card.why(*card.config())
    assert (code, answer["about"]["namespace"]) == (0, own), "the configuration leads to the same namespace"
    code, answer = card.why(*card.config(), tokens=None)
    assert (code, answer["about"]) == (0, {"namespace": own})


def test_another_prompt_was_never_stored_and_a_longer_one_only_in_part(card: Card) -> None:
    own = card.stored()
    code, answer = card.why("--namespace", own, tokens=prompt(tokens=100, seed=22))
    assert (code, answer["verdict"]) == (1, "never_stored"), answer
    code, answer = card.why("--namespace", own, tokens=prompt(tokens=300, seed=23, after=TOKENS[:70]))
    assert (code, answer["verdict"], answer["about"]["hit_tokens"]) == (1, "never_stored", 64)
    code, answer = card.why("--namespace", own, tokens=TOKENS[: CHUNK - 1])
    assert (code, answer["verdict"]) == (1, "too_short")


def test_another_hash_seed_or_cache_salt(card: Card) -> None:
    own = card.stored()
    code, answer = card.why("--namespace", own, "--hash-seed", "7")
    assert (code, answer["verdict"]) == (1, "hash_seed"), answer
    assert "stored by an engine with PYTHONHASHSEED=0, and is asked for with PYTHONHASHSEED=7" in answer["what"]
    code, answer = card.why("--namespace", own, "--hash-seed", "unset")
    assert (code, answer["verdict"]) == (1, "hash_seed"), answer
    code, answer = card.why("--namespace", own, "--salt", "somebody's")
    assert (code, answer["verdict"]) == (1, "never_stored")


def test_what_an_engine_left_out_itself_is_counted_where_its_gateway_sees_it(card: Card) -> None:
    """No store of it came: the gateway knows of it from the engine's control page alone."""
    own = card.launched(SHAPE, **{"xkv.store_threshold": 2})
    code, answer = card.why("--namespace", own)
    assert (code, answer["verdict"]) == (1, "never_stored"), answer
    assert "left_out" not in answer
    engine = card.rig.launch(SHAPE, extra={"xkv.store_threshold": 2})
    engine.serve("r", TOKENS)
    engine.await_stores()
    code, answer = card.why("--namespace", own)
    assert (code, answer["verdict"]) == (1, "never_stored"), answer
    assert [(one["reason"], one["count"]) for one in answer["left_out"]] == [("rare", CHUNKS)]
    assert f"{CHUNKS} chunks as too few requests had asked for them" in answer["follows"]
    assert answer["type"] == "a lower xkv.store_threshold"
    card.rig.end(engine)
    assert card.why("--namespace", own)[1]["left_out"] == answer["left_out"], "when the engine is gone, too"


DIFFERENT: dict[str, tuple[Shape, dict[str, Any]]] = {
    "namespace word": (SHAPE, {"xkv.namespace": "blue"}),
    "weights": (SHAPE, {"xkv.weights_fingerprint": "other"}),
    "tensor parallel size": (replace(SHAPE, ranks=2), {}),
    "blocks per chunk": (replace(SHAPE, blocks_per_chunk=4), {}),
    "tokens per hash": (replace(SHAPE, groups=(full(block_tokens=32),), blocks_per_chunk=1), {}),
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_an_engine_that_differs_in_one_thing(card: Card, field: str) -> None:
    own = card.stored()
    other = card.launched(DIFFERENT[field][0], **DIFFERENT[field][1])
    code, answer = card.why("--namespace", other)
    assert (code, answer["verdict"]) == (1, "other_identity"), answer
    assert own in answer["what"]
    words = [one["words"] for one in answer["differences"]]
    assert field in words, words
    assert set(words) <= {field, *("KV-cache groups", "blocks per chunk", "tokens per hash", "model")}
    code, compared = card.why("--namespace", other, "--other", own, tokens=None)
    assert (code, compared["differences"]) == (1, answer["differences"])


CONFIGURED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "namespace word": ({"xkv.namespace": "red"}, []),
    "weights": ({"xkv.weights_fingerprint": "third"}, []),
    "KV dtype": ({}, ["--dtype", "fp8"]),
    "tensor parallel size": ({}, ["--tp", "8"]),
    "hash algorithm": ({}, ["--hash-algorithm", "sha256_cbor"]),
    "model": ({}, ["--model", "org/other"]),
}


@pytest.mark.parametrize("field", CONFIGURED)
def test_a_configuration_that_no_engine_of_the_card_had(card: Card, field: str) -> None:
    own = card.stored()
    extra, words = CONFIGURED[field]
    code, answer = card.why(*card.config(**extra), *words)
    assert (code, answer["verdict"]) == (1, "other_identity"), answer
    assert own in answer["what"]
    assert [one["words"] for one in answer["differences"]] == [field]


def test_what_became_of_a_chunk_in_the_middle(card: Card) -> None:
    """Evicted or purged, damaged: it is the first missing chunk that is explained, and what hits before it is told."""
    own = card.stored()
    place = ["--port", str(card.rig.gateway.port), "--socket-dir", str(card.rig.gateway.extra["xkv.socket_dir"])]
    card.capture.readouterr()
    assert cli.main(["ls", *place, "--namespace", own, "--json"]) == 0
    lines = [json.loads(line) for line in card.capture.readouterr().out.splitlines()]
    by_position = {one["object"]["position"]: one["object"]["key"] for one in lines if "object" in one}
    assert len(by_position) == CHUNKS
    assert cli.main(["purge", *place, "--key", by_position[2], "--yes", "--json"]) == 0
    code, answer = card.why("--namespace", own)
    assert (code, answer["verdict"], answer["about"]["hit_tokens"]) == (1, "purged", 2 * CHUNK), answer
    card.stored(tokens=prompt(tokens=40, seed=24))
    assert card.why("--namespace", own)[1]["verdict"] == "purged"


def test_a_program_gets_json_alone_where_importing_vllm_logs(card: Card) -> None:
    own = card.stored()
    (card.folder / "tokens").write_text(" ".join(map(str, TOKENS)))
    extra = card.rig.gateway.extra
    words = ["--port", str(extra["xkv.port"]), "--socket-dir", str(extra["xkv.socket_dir"]), "--namespace", own]
    done = subprocess.run(
        [sys.executable, "-m", "xkv_offload.why", *words, "--tokens", str(card.folder / "tokens"), "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["verdict"] == "held"


def test_windows_need_their_last_chunk_alone(card: Card) -> None:
    shape = Shape(groups=(full(), sliding(window=32)), blocks=96, blocks_per_chunk=1, shared=True)
    own = card.stored(shape)
    code, answer = card.why("--namespace", own)
    assert (code, answer["verdict"]) == (0, "held"), answer
    assert answer["about"]["chunks"] == len(TOKENS) // 16 + 1


def test_of_a_gateway_for_each_rank_all_are_asked(
    two_gateways_rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    card = Card(two_gateways_rig, tmp_path, capsys)
    own = card.stored(replace(SHAPE, ranks=2))
    words = [*card.config(**{"xkv.port_per_rank": True}), "--namespace", own]
    assert card.why(*words)[0] == 2, "how many ranks there are is not said"
    code, answer = card.why(*words, "--tp", "2")
    assert (code, answer["verdict"]) == (0, "held"), answer
    second = two_gateways_rig.gateways[1]
    place = ["--port", str(second.port), "--socket-dir", str(second.extra["xkv.socket_dir"])]
    assert cli.main(["purge", *place, "--all", "--yes"]) == 0
    code, answer = card.why(*words, "--tp", "2")
    assert (code, answer["verdict"]) == (1, "purged"), answer


def test_what_cannot_be_asked_is_one_line(card: Card, tmp_path: Path) -> None:
    own = card.stored()
    for words, tokens, said in (
        (["--namespace", own, "--key", "00"], TOKENS, "leave these out"),
        (["--namespace", "00" * 16], TOKENS, "nothing was published of namespace 0000"),
        ([], None, "type one question: --tokens, or what is known of the engine"),
    ):
        code, answer = card.why(*words, tokens=tokens)
        assert code == 2, words
        assert said in answer["error"]
    for text, said in (("", "it is empty"), ("1 x", "no token ids"), ('["a"]', "is no token id")):
        (tmp_path / "bad").write_text(text)
        code, answer = card.why("--namespace", own, "--tokens", str(tmp_path / "bad"), tokens=None)
        assert code == 2
        assert said in answer["error"]
