"""`xkv why` explains misses that were made on purpose, each by its cause, with a gateway and without one."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xkv_store import cli, wire
from xkv_store.control import ControlPage
from xkv_store.geometry import DATA_OFFSET, Geometry
from xkv_store.key import ObjectKey
from xkv_store.left_out import NUMBERS, LeftOut
from xkv_store.testing.peer import Peer, attached
from xkv_store.testing.processes import GatewayProcess, running_gateway
from xkv_store.wire import LoadStatus, Role, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Xkv = Callable[..., tuple[int, list[dict[str, Any]]]]

GEOMETRY = Geometry(16_384)
LENGTH = 2 * GEOMETRY.fragment_bytes - 77
SLOTS = 160
CAPACITY = str(DATA_OFFSET + SLOTS * GEOMETRY.slot_bytes)
OWN, SMALL, SILENT = (bytes.fromhex(digits) for digits in ("3fa9" + "0" * 28, "3fb7" + "1" * 28, "c0" * 16))
IDENTITY: dict[str, Any] = {
    "format": 1,
    "facts": {
        "model": {"model": "org/small", "dtype": "bfloat16", "hf_config": {"hidden_size": 64}},
        "cache_dtype": "bfloat16",
        "groups": [{"id": 0, "tokens_per_block": 16, "pages": [512]}],
        "blocks_per_chunk": 4,
        "tokens_per_hash": 16,
        "sizes": [1, 1, 1, 1],
        "vllm": "x.y",
    },
    "weights": "sampled:aa",
    "salt": "",
    "launch": "",
}
OTHERS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "cache_dtype": ("KV dtype", lambda one: one["facts"].update(cache_dtype="fp8")),
    "weights": ("weights", lambda one: one.update(weights="sampled:bb")),
    "chunk": ("blocks per chunk", lambda one: one["facts"].update(blocks_per_chunk=8)),
    "ranks": ("tensor parallel size", lambda one: one["facts"].update(sizes=[2, 1, 1, 1])),
    "word": ("namespace word", lambda one: one.update(salt="blue")),
    "version": ("vLLM's version", lambda one: one["facts"].update(vllm="x.z")),
    "model": ("model", lambda one: one["facts"]["model"].update(model="org/large")),
    "launch": ("launch", lambda one: one.update(launch="engine-7")),
}


def key_of(number: int, namespace: bytes = OWN, rank: int = 0) -> bytes:
    return ObjectKey(namespace, 0, (number * 1_000_003).to_bytes(32, "little"), rank).encode()


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(LENGTH)


def identity_of(what: str) -> str:
    made = copy.deepcopy(IDENTITY)
    OTHERS[what][1](made)
    return json.dumps(made)


def namespace_of(what: str) -> bytes:
    return bytes([0xD0 + list(OTHERS).index(what)]) * 16


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[GatewayProcess, Peer]]:
    """A gateway, and a rank attached to it."""
    with (
        running_gateway(folder, capacity=CAPACITY, slot_bytes=GEOMETRY.slot_bytes, options=options) as gateway,
        attached(Path(gateway.ready["socket"]), geometry=GEOMETRY) as peer,
    ):
        yield gateway, peer


def publish(gateway: GatewayProcess, *identities: tuple[bytes, str]) -> None:
    scheduler = Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY)
    scheduler.hello(engine="other", role=Role.SCHEDULER)
    scheduler.receive(wire.Welcome)
    for namespace, text in identities:
        scheduler.send(wire.PublishNamespace(namespace, text))
    scheduler.close()


def spoil(card: Path, content: bytes) -> None:
    path = card / "db-0.xkv"
    at = path.read_bytes().index(content[:4_000])
    with path.open("r+b") as file:
        file.seek(at + 11)
        file.write(bytes([content[11] ^ 4]))


@pytest.fixture(scope="module", params=["online", "offline"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], int]]:
    """One card on which all that can be the end of an object has happened to one; and the first one's generation."""
    folder = tmp_path_factory.mktemp("story")
    quota = 4 * GEOMETRY.slot_bytes
    with serving(folder, "--grace-ms", "1", "--quota", f"{SMALL.hex()}={quota}") as (gateway, peer):
        publish(gateway, (OWN, json.dumps(IDENTITY)), *((namespace_of(one), identity_of(one)) for one in OTHERS))
        socket = ["--socket", gateway.ready["socket"]]
        shed = 6
        while peer.put(content_of(shed), key_of(shed, SMALL)) is not StoreStatus.SHED:
            shed += 1
        assert peer.put(content_of(500), key_of(500)) is StoreStatus.CONFIRMED
        number = 501
        while not has_left(socket, key_of(500)):  # to make room for others
            peer.put(content_of(number), key_of(number))
            number += 1
            assert number < 2_000
        put(peer, 3)
        assert cli.main(["purge", *socket, "--key", key_of(3).hex(), "--yes"]) == 0
        put(peer, 4)
        spoil(folder / "card", content_of(4))
        assert peer.get(LENGTH, key_of(4))[0] is LoadStatus.CORRUPT
        put(peer, 5)
        put(peer, 5, replace=True)
        for number, what in enumerate(OTHERS, 20):
            put(peer, number, namespace_of(what))
        put(peer, 1)
        put(peer, 2, rank=0)
        put(peer, 50, SILENT)
        if request.param == "online":
            yield socket, shed
            return
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
    yield [str(folder / "card")], shed


def has_left(place: list[str], key: bytes) -> bool:
    return cli.main(["why", *place, "--key", key.hex()]) == 1


def put(peer: Peer, number: int, namespace: bytes = OWN, rank: int = 0, *, replace: bool = False) -> None:
    deadline = time.monotonic() + 20
    key, content = key_of(number, namespace, rank), content_of(number)
    while (status := peer.put(content, key, replace=replace)) is not StoreStatus.CONFIRMED:
        assert status is StoreStatus.SHED, status
        assert time.monotonic() < deadline
        time.sleep(0.02)


def why(xkv: Xkv, story: tuple[list[str], int], *words: str) -> tuple[int, dict[str, Any]]:
    code, (line,) = xkv("why", *story[0], *words)
    return code, line


def by_key(number: int, namespace: bytes = OWN) -> list[str]:
    return ["--key", key_of(number, namespace).hex()]


def test_what_is_there_is_no_miss(xkv: Xkv, story: tuple[list[str], int]) -> None:
    code, answer = why(xkv, story, *by_key(1))
    assert (code, answer["verdict"], answer["misses"]) == (0, "held", False)
    assert answer["about"]["namespace"] == OWN.hex()


@pytest.mark.parametrize(("number", "verdict", "said"), [
    (500, "evicted", "was evicted, to make room"),
    (3, "purged", "was purged"),
    (4, "damaged", "its bytes were damaged"),
    (900_001, "never_stored", "it was never stored on this card"),
])  # fmt: skip
def test_why_an_object_is_not_there(
    xkv: Xkv, story: tuple[list[str], int], number: int, verdict: str, said: str
) -> None:
    code, answer = why(xkv, story, *by_key(number))
    assert (code, answer["verdict"]) == (1, verdict), answer
    assert said in answer["what"]
    if verdict != "never_stored":
        assert abs(answer["when_ms"] / 1_000 - time.time()) < 120
        assert answer["when"] in answer["what"]


def test_a_store_that_found_no_room(xkv: Xkv, story: tuple[list[str], int]) -> None:
    code, answer = why(xkv, story, *by_key(story[1], SMALL))
    assert (code, answer["verdict"]) == (1, "shed")
    assert "its namespace was at its quota" in answer["what"]
    assert answer["type"] == "a larger --quota"


def test_another_generation(xkv: Xkv, story: tuple[list[str], int]) -> None:
    code, answer = why(xkv, story, *by_key(5))
    assert code == 0
    now = int(answer["what"].split("generation ")[1].split(",")[0])
    code, answer = why(xkv, story, *by_key(5), "--generation", str(now))
    assert (code, answer["verdict"]) == (0, "held")
    code, answer = why(xkv, story, *by_key(5), "--generation", str(now - 1))
    assert (code, answer["verdict"]) == (1, "other_generation")
    assert f"holds generation {now} of it, not {now - 1}: {now - 1} gave way to a newer one at" in answer["what"]
    code, answer = why(xkv, story, *by_key(5), "--generation", "999999999")
    assert (code, answer["verdict"]) == (1, "other_generation")
    assert "nothing is known of 999999999" in answer["what"]


@pytest.mark.parametrize("what", OTHERS)
def test_another_identity_is_named_by_its_field(xkv: Xkv, story: tuple[list[str], int], what: str) -> None:
    """The card holds the same block, stored by an engine that is another in one field."""
    number = 20 + list(OTHERS).index(what)
    code, answer = why(xkv, story, *by_key(number))
    assert (code, answer["verdict"]) == (1, "other_identity"), answer
    assert namespace_of(what).hex() in answer["what"]
    (difference,) = answer["differences"]
    assert difference["words"] == OTHERS[what][0]
    assert OTHERS[what][0] in answer["what"]
    code, answer = why(xkv, story, "--namespace", "3fa9", "--other", namespace_of(what).hex())
    assert (code, answer["differences"]) == (1, [difference])


def test_another_namespace_of_which_nothing_is_known(xkv: Xkv, story: tuple[list[str], int]) -> None:
    """As an engine's is after a reset of its cache."""
    code, answer = why(xkv, story, *by_key(50))
    assert (code, answer["verdict"]) == (1, "other_identity")
    assert f"it is held under namespace {SILENT.hex()}" in answer["what"]
    assert "nothing was published" in answer["what"]
    assert "differences" not in answer


def test_a_chunk_needs_every_rank(xkv: Xkv, story: tuple[list[str], int]) -> None:
    digits = ObjectKey.decode(key_of(2)).block_hash.hex()
    words = ["--namespace", "3fa9", "--block-hash", digits]
    assert why(xkv, story, *words)[0] == 0
    code, answer = why(xkv, story, *words, "--ranks", "2")
    assert (code, answer["verdict"]) == (1, "never_stored")
    assert answer["what"] == "rank 1's object, where 1 of 2 ranks' are held: it was never stored on this card"


def test_a_person_reads_it(story: tuple[list[str], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why", *story[0], *by_key(3)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("purged: generation ")
    assert "\n  follows:" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_card_that_nobody_serves_says_what_was_purged_there(xkv: Xkv, tmp_path: Path) -> None:
    with serving(tmp_path) as (gateway, peer):
        put(peer, 1)
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
    card = str(tmp_path / "card")
    assert cli.main(["purge", card, "--all", "--yes", "--json"]) == 0
    xkv("namespaces", card)
    code, (answer,) = xkv("why", card, *by_key(1))
    assert (code, answer["verdict"]) == (1, "purged")


def test_what_an_engine_left_out_itself_is_said_beside_what_was_never_stored(
    xkv: Xkv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It never came to the gateway, which knows from the engine's control page how much that was, and why."""
    with serving(tmp_path) as (gateway, peer):
        place = ("--socket", gateway.ready["socket"])
        scheduler = Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY)
        scheduler.hello(engine="engine", role=Role.SCHEDULER)
        scheduler.receive(wire.Welcome)
        scheduler.send(wire.PublishNamespace(OWN, json.dumps(IDENTITY)))
        code, (answer,) = xkv("why", *place, *by_key(1))
        assert (code, answer["verdict"], answer["follows"]) == (1, "never_stored", "no store of it came")
        assert "left_out" not in answer
        page = ControlPage.attach(os.dup(peer.fds[1]))
        page.add_count(0, NUMBERS[LeftOut.NO_SLOT], 2)
        page.add_count(0, NUMBERS[LeftOut.BACKLOG], 40)
        code, (answer,) = xkv("why", *place, *by_key(1))
        assert (code, answer["verdict"]) == (1, "never_stored")
        assert [(one["reason"], one["count"]) for one in answer["left_out"]] == [("backlog", 40), ("no_slot", 2)]
        assert abs(answer["left_out"][0]["last_ms"] / 1_000 - time.time()) < 120
        assert "its engines left out themselves, the last at " in answer["follows"]
        assert (
            "40 chunks as more than xkv.store_backlog_bytes was on its way to the card; 2 objects" in answer["follows"]
        )
        assert answer["type"].startswith("a faster card")
        assert cli.main(["why", *place, *by_key(1)]) == 1
        assert "it may be one of these" in " ".join(capsys.readouterr().out.split())
        code, (answer,) = xkv("why", *place, *by_key(1, SMALL))
        assert "left_out" not in answer, "another namespace's engine left out nothing"
        page.close()
        scheduler.close()


def test_what_was_published_does_nothing_to_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another user's engine may publish what it likes."""
    other = copy.deepcopy(IDENTITY)
    other["facts"]["model"]["model"] = "\x1b]0;gone\x07\x1b[2Jorg/large"
    with serving(tmp_path) as (gateway, peer):
        publish(gateway, (OWN, json.dumps(IDENTITY)), (SMALL, json.dumps(other)))
        put(peer, 1)
        place = ["--socket", gateway.ready["socket"]]
        assert cli.main(["why", *place, "--namespace", OWN.hex(), "--other", SMALL.hex()]) == 1
        assert cli.main(["namespaces", *place]) == 0
    text = capsys.readouterr().out
    assert text.count("org/large") == 2
    assert not set(text) & {"\x1b", "\x07"}


def test_after_a_kill_it_is_said_that_some_is_not_known(xkv: Xkv, tmp_path: Path) -> None:
    with serving(tmp_path) as (gateway, peer):
        put(peer, 1)
        gateway.kill()
    with serving(tmp_path) as (gateway, peer):
        code, (answer,) = xkv("why", "--socket", gateway.ready["socket"], *by_key(2))
    assert (code, answer["verdict"]) == (1, "never_stored")
    assert "what left before then is not known any more" in answer["what"]
    assert answer["follows"] == "no store of it came since then; of before, nothing can be said"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "type one question"),
        (["--key", "3f"], "is not a whole key"),
        (["--key", "xy"], "no beginning of hex digits"),
        (["--block-hash", "00"], "type --namespace"),
        (["--namespace", "3fa9", "--block-hash", "0"], "not a whole one"),
        (["--namespace", "99", "--block-hash", "00"], "no namespace of the card begins with 99"),
        (["--namespace", "d", "--other", "d0"], "8 namespaces begin with d"),
        (["--namespace", "3fa9", "--other", "c0"], "nothing was published of namespace c0c0"),
        (["--namespace", "3fa9", "--key", key_of(1).hex()], "leave --namespace out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(
    story: tuple[list[str], int], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["why", *story[0], *words]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
