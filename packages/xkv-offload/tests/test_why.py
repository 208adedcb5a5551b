"""What a prompt needs by a published identity, and what a configuration says of one: no engine, no vLLM."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from xkv_offload import config as keys
from xkv_offload.identity import Descriptor, adopt
from xkv_offload.why import prompt
from xkv_offload.why.command import engine_namespace
from xkv_offload.why.expected import Launch, compared, expected
from xkv_offload.why.prompt import Cut, CutGroup, cut_of, keys_of, places, read_tokens
from xkv_store.contents import HeldNamespace
from xkv_store.errors import UserError
from xkv_store.explanation import Verdict
from xkv_store.identities import differences, in_words, parsed
from xkv_store.inquiry import Inquiry
from xkv_store.key import ObjectKey

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_store.card_view import CardView

FACTS: dict[str, Any] = {
    "model": {"model": "org/small", "hash_algorithm": "sha256", "cache_dtype": "auto"},
    "cache_dtype": "bfloat16",
    "groups": [
        {"id": 0, "tokens_per_block": 16, "layers": [[2, ["FullAttentionSpec", 512]]]},
        {"id": 3, "tokens_per_block": 32, "layers": [[1, ["SlidingWindowSpec", 512]], [1, None]]},
    ],
    "blocks_per_chunk": 2,
    "tokens_per_hash": 16,
    "replicated": False,
    "sizes": [2, 1, 1, 1],
    "vllm": "x.y",
}


def published(salt: str = "", weights: str = "sampled:aa", engine: str = "", **facts: Any) -> Any:
    """As an engine makes it: what is compared is the text that the card keeps."""
    merged = {**copy.deepcopy(FACTS), **facts}
    descriptor = Descriptor(0, merged, weights, (), {})
    adopted = adopt(
        descriptors=[descriptor], world_size=1, engine_id=engine, salt=salt, own_because=["doubt"] if engine else []
    )
    return parsed(adopted.text)


def test_the_identity_says_how_a_prompt_is_cut() -> None:
    cut = cut_of(published())
    assert cut == Cut(16, "sha256", (0, 1), (CutGroup(0, 32, needs_all=True), CutGroup(3, 64, needs_all=False)))
    assert places(cut, 31) == []
    assert places(cut, 32) == [(32, 0)]
    assert places(cut, 135) == [(32, 0), (64, 0), (96, 0), (128, 0), (128, 3)], "of the window its last chunk alone"
    hashes = [bytes([number]) * 32 for number in range(8)]
    assert [ObjectKey.decode(key) for key in keys_of(b"n" * 16, cut, hashes, (96, 0))] == [
        ObjectKey(b"n" * 16, 0, hashes[5], rank) for rank in (0, 1)
    ], "a chunk has the hash of its last tokens, and an object of each rank"
    assert cut_of(published(replicated=True)).ranks == (0,)


@pytest.mark.parametrize("changes", [{"groups": "sha256:00"}, {"groups": []}, {"model": "sha256:00"}, {"sizes": []}])
def test_an_identity_that_was_not_published_whole_is_said(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="ask by --key or --block-hash"):
        cut_of(published(**changes))
    with pytest.raises(UserError):
        cut_of(None)


@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2 3", "1,2,3\n", " 1\n2\n3 "])
def test_tokens_are_read_as_people_have_them(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens").write_text(text)
    assert read_tokens(tmp_path / "tokens") == [1, 2, 3]


def test_a_mark_of_utf_8_is_no_part_of_the_first_token(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("1 2 3", encoding="utf-8-sig")
    assert read_tokens(tmp_path / "tokens") == [1, 2, 3]


@pytest.mark.parametrize("text", ["[" * 200_000, '["' + "a" * 300_000 + '"]', "a" * 300_000, "[" + "1" * 5_000 + "]"])
def test_what_is_far_from_tokens_is_one_short_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(UserError, match="no token id") as raised:
        read_tokens(tmp_path / "tokens")
    assert len(str(raised.value)) < 600 + len(str(tmp_path))


def test_a_file_that_is_too_long_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning would be another prompt, and its last token perhaps another one."""
    monkeypatch.setattr(prompt, "FILE_BYTES_MAX", 8)
    (tmp_path / "tokens").write_text("123 4567")
    assert read_tokens(tmp_path / "tokens") == [123, 4567]
    (tmp_path / "tokens").write_text("123 45678")
    with pytest.raises(UserError, match="more than"):
        read_tokens(tmp_path / "tokens")


@pytest.mark.parametrize("text", ["", "[]", "[1, true]", "[1.5]", "a b", "[1", "-4", "[99999999999]"])
def test_what_are_no_tokens_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(UserError, match="--tokens"):
        read_tokens(tmp_path / "tokens")
    with pytest.raises(UserError, match="--tokens"):
        read_tokens(tmp_path / "nowhere")


FULL = Launch(
    model="org/small",
    ranks=2,
    cache_dtype="auto",
    block_tokens=16,
    hash_algorithm="sha256",
    vllm="x.y",
    extra={"blocks_per_chunk": 2},
    config=keys.parse({"xkv.port": 1, "xkv.weights_fingerprint": "w"}),
)


def test_a_configuration_that_fits_differs_in_nothing() -> None:
    assert compared(expected(FULL), published(weights="given:w")) == []
    assert expected(Launch()) == {}
    assert compared({}, published()) == []


@pytest.mark.parametrize(("changes", "word"), [
    ({"model": "org/large"}, "model"),
    ({"ranks": 4}, "tensor parallel size"),
    ({"cache_dtype": "fp8"}, "KV dtype"),
    ({"block_tokens": 32}, "KV-cache groups"),
    ({"hash_algorithm": "xxhash"}, "hash algorithm"),
    ({"vllm": "x.z"}, "vLLM's version"),
    ({"extra": {"blocks_per_chunk": 8}}, "blocks per chunk"),
    ({"extra": {"block_size": 64}}, "blocks per chunk"),
    ({"config": keys.parse({"xkv.port": 1, "xkv.namespace": "a", "xkv.weights_fingerprint": "w"})}, "namespace word"),
    ({"config": keys.parse({"xkv.port": 1, "xkv.weights_fingerprint": "v"})}, "weights"),
])  # fmt: skip
def test_the_field_that_a_configuration_has_otherwise_is_named(changes: dict[str, Any], word: str) -> None:
    found = compared(expected(replace(FULL, **changes)), published(weights="given:w"))
    assert [one.words for one in found] == [word]


@dataclass(frozen=True)
class View:
    """A card of which only this is known."""

    published: dict[bytes, str]

    def namespaces(self) -> list[HeldNamespace]:
        return [HeldNamespace(namespace, descriptor=text) for namespace, text in self.published.items()]


def test_a_launchs_own_namespace_is_an_engines_where_it_is_named() -> None:
    """Its own prompts are hit there: what an engine with LoRA adapters stored is asked about like any other's."""
    own = published(engine="engine-1")
    inquiry = Inquiry(cast("CardView", View({b"o" * 16: json.dumps(own)})))
    found, answer = engine_namespace(inquiry, Launch(), (b"o" * 16).hex())
    assert (found, answer.verdict) == (b"o" * 16, Verdict.HELD)
    found, answer = engine_namespace(inquiry, Launch(cache_dtype="fp8"), (b"o" * 16).hex())
    assert (found, answer.verdict) == (None, Verdict.OTHER_IDENTITY)
    assert "launch" not in [one.path for one in answer.differences]
    found, answer = engine_namespace(inquiry, Launch(cache_dtype="auto"), None)
    assert found is None
    assert "launch" in [one.path for one in answer.differences]


def test_a_launchs_own_identity_fits_no_configuration() -> None:
    (one,) = compared(expected(FULL), published(weights="given:w", engine="engine-1"))
    assert (one.words, one.there) == ("launch", "engine-1")


def test_other_weights_in_the_same_folder_are_told_apart(tmp_path: Path) -> None:
    """As an engine fingerprints them: the folder is read here, too."""
    folder = tmp_path / "model"
    folder.mkdir()
    launch = Launch(model=str(folder))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"a" * 5_000)
    before = str(expected(launch)["weights"])
    identity = published(weights=before, model={**FACTS["model"], "model": str(folder)})
    assert compared(expected(launch), identity) == []
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"b" * 5_000)
    assert [one.words for one in compared(expected(launch), identity)] == ["weights"]


def test_two_identities_are_compared_causes_first() -> None:
    here = published(salt="a", sizes=[4, 1, 1, 1], groups=[])
    found = differences(here, published())
    assert [one.words for one in found] == ["namespace word", "tensor parallel size", "KV-cache groups"]
    assert in_words(found)[0] == 'namespace word (a here, "" there)'
    assert differences(here, here) == []
    assert differences({"new": 1}, {})[0].as_value() == {"field": "new", "words": "new", "here": "1", "there": "-"}
