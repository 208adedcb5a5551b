"""`xkv namespaces`, `xkv ls` and `xkv purge` say and do the same with a gateway and without one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xkv_store import card_view, cli, wire
from xkv_store.geometry import DATA_OFFSET, Geometry
from xkv_store.index import doubt
from xkv_store.key import ObjectKey
from xkv_store.testing.peer import Peer, attached
from xkv_store.testing.processes import PORT, GatewayProcess, running_gateway
from xkv_store.wire import LoadStatus, Role, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Xkv = Callable[..., tuple[int, list[dict[str, Any]]]]

GEOMETRY = Geometry(16_384)
LENGTH = 2 * GEOMETRY.fragment_bytes - 77
SLOTS = 400
CAPACITY = str(DATA_OFFSET + SLOTS * GEOMETRY.slot_bytes)
FIRST, SECOND, THIRD = (bytes.fromhex(digits) for digits in ("3fa9" + "0" * 28, "3fb7" + "1" * 28, "c0" * 16))
DESCRIPTION = {"facts": {"model": {"model": "org/small"}, "cache_dtype": "bfloat16", "vllm": "x.y"}, "weights": "w"}
OBJECTS = [(FIRST, number) for number in range(20)] + [(SECOND, number) for number in range(5)]


def key_of(namespace: bytes, number: int) -> bytes:
    return ObjectKey(namespace, number % 2, (number * 1_000_003).to_bytes(32, "little"), 0).encode()


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(LENGTH)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[GatewayProcess, Peer]]:
    """A gateway with some objects, and who has put them."""
    with (
        running_gateway(folder, capacity=CAPACITY, slot_bytes=GEOMETRY.slot_bytes, options=options) as gateway,
        attached(Path(gateway.ready["socket"]), geometry=GEOMETRY) as peer,
    ):
        yield gateway, peer


def fill(gateway: GatewayProcess, peer: Peer) -> None:
    for namespace, number in OBJECTS:
        assert peer.put(content_of(number), key_of(namespace, number)) is StoreStatus.CONFIRMED
    scheduler = Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY)
    scheduler.hello(engine="other", role=Role.SCHEDULER)
    scheduler.receive(wire.Welcome)
    for namespace in (FIRST, THIRD):
        scheduler.send(wire.PublishNamespace(namespace, json.dumps(DESCRIPTION)))
    scheduler.close()
    # A put that is confirmed was committed after them.
    assert peer.put(content_of(7), key_of(FIRST, 7), replace=True) is StoreStatus.CONFIRMED


@pytest.fixture(params=["online", "offline"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """The words that name a card of these objects, served or not."""
    with serving(tmp_path, "--quota", "3fb=2MiB", "--grace-ms", "100") as (gateway, peer):
        fill(gateway, peer)
        if request.param == "online":
            yield ["--port", str(PORT), "--socket-dir", str(tmp_path / "sockets")]
            return
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
    yield [str(tmp_path / "card")]


def is_online(place: list[str]) -> bool:
    return place[0] == "--port"


def test_namespaces(xkv: Xkv, place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = xkv("namespaces", *place)
    assert code == 0
    *found, total = lines
    names = {line["namespace"]["namespace"]: line["namespace"] for line in found}
    assert list(names) == sorted(one.hex() for one in (FIRST, SECOND, THIRD))
    first, second, third = (names[one.hex()] for one in (FIRST, SECOND, THIRD))
    assert (first["objects"], second["objects"], third["objects"]) == (20, 5, 0)
    slots = 5 * 2 * GEOMETRY.slot_bytes
    assert (second["held_bytes"], second["limbo_bytes"]) == (slots, 0)
    assert second["quota_bytes"] == (2 << 20 if is_online(place) else None)
    assert (first["description"], second["description"]) == (DESCRIPTION, None)
    assert (total["total"]["objects"], total["total"]["online"]) == (25, is_online(place))
    assert cli.main(["namespaces", *place]) == 0
    text = capsys.readouterr().out
    assert "org/small, KV bfloat16, vLLM x.y" in text
    assert "(nothing was published)" in text
    assert "3 namespaces, 25 objects" in text


def test_ls_shows_every_object_and_what_is_asked_for(
    xkv: Xkv, place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def keys(*words: str) -> list[str]:
        code, lines = xkv("ls", *place, *words)
        assert code == 0
        assert lines[-1]["total"]["objects"] == len(lines) - 1
        return [line["object"]["key"] for line in lines[:-1]]

    everything = sorted(key_of(*one).hex() for one in OBJECTS)
    assert keys() == everything
    assert keys("--namespace", SECOND.hex()) == [one for one in everything if one.startswith("3fb7")]
    assert keys("--namespace", "3FA") == [one for one in everything if one.startswith("3fa")], "half a byte"
    assert keys("--namespace", "3") == everything
    assert keys("--namespace", "4") == []
    assert keys("--key", everything[3]) == [everything[3]]
    assert keys("--key", everything[3][:-5]) == [everything[3]]
    digits = (4 * 1_000_003).to_bytes(32, "little").hex()
    assert keys("--block-hash", digits) == [one for one in everything if digits in one]
    assert keys("--limit", "3") == everything[:3]
    code, lines = xkv("ls", *place, "--limit", "25")
    assert (code, lines[-1]["total"]["more"]) == (0, False)
    one = lines[0]["object"]
    assert (one["namespace"], one["group"], one["rank"], one["length"]) == (FIRST.hex(), 0, 0, LENGTH)
    generations = sorted(line["object"]["generation"] for line in lines[:-1])
    assert len(keys("--before", str(generations[4]))) == 4
    assert cli.main(["ls", *place, "--limit", "1"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0].split() == ["GROUP", "RANK", "GENERATION", "BYTES", "POSITION", "KEY"]
    assert text[1].split()[-1] == everything[0]
    assert "there are more" in text[2]


def test_purge_takes_off_what_is_named(xkv: Xkv, place: list[str]) -> None:
    def left() -> list[str]:
        return [line["object"]["key"] for line in xkv("ls", *place)[1][:-1]]

    everything = left()
    assert xkv("purge", *place, "--key", everything[0], "--yes") == (
        0,
        [{"purged": {"objects": 1, "object_bytes": LENGTH, "namespaces": 0, "online": is_online(place)}}],
    )
    assert left() == everything[1:]
    code, lines = xkv("purge", *place, "--namespace", "3fa9", "--yes")
    assert (code, lines[0]["purged"]["objects"], lines[0]["purged"]["namespaces"]) == (0, 19, 1)
    assert left() == [one for one in everything if one.startswith("3fb7")]
    names = [line["namespace"]["namespace"] for line in xkv("namespaces", *place)[1][:-1]]
    if is_online(place):
        names = [one for one in names if one != FIRST.hex()]  # its slots may be in limbo for a tenth of a second
    assert names == [SECOND.hex(), THIRD.hex()]
    assert xkv("purge", *place, "--before", "0", "--yes")[1][0]["purged"]["objects"] == 0
    code, lines = xkv("purge", *place, "--all", "--yes")
    assert (code, lines[0]["purged"]["objects"]) == (0, 5)
    assert left() == []


def test_what_was_purged_offline_is_not_served_and_stays_away(tmp_path: Path, xkv: Xkv) -> None:
    with serving(tmp_path) as (gateway, peer):
        fill(gateway, peer)
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
    assert xkv("purge", tmp_path / "card", "--namespace", "3fa9", "--yes")[0] == 0
    for _ in range(2):
        with serving(tmp_path) as (gateway, peer):
            assert peer.get(LENGTH, key_of(FIRST, 3))[0] is LoadStatus.MISS
            assert peer.get(LENGTH, key_of(SECOND, 3)) == (LoadStatus.OK, content_of(3))
            gateway.signal(signal.SIGTERM)
            assert gateway.wait() == 0
    assert xkv("verify", tmp_path / "card")[1][-1]["verified"]["damaged"] == 0


def test_a_hit_that_was_just_given_can_be_loaded_while_a_card_is_purged(
    tmp_path: Path, xkv: Xkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card is more than half full: a purge waits for limbo, and takes no object from who was promised it."""
    monkeypatch.setattr(card_view, "PURGE_RETRY_S", 0.01)
    with serving(tmp_path, "--grace-ms", "300") as (gateway, peer):
        for number in range(100):
            assert peer.put(content_of(number), key_of(FIRST, number)) is StoreStatus.CONFIRMED
        word = ("--socket", gateway.ready["socket"])
        assert xkv("purge", *word, "--key", key_of(FIRST, 8).hex(), "--yes")[1][0]["purged"]["objects"] == 1
        assert peer.get(LENGTH, key_of(FIRST, 8)) == (LoadStatus.OK, content_of(8)), "the grace time is not over"
        code, lines = xkv("purge", *word, "--all", "--yes")
        assert (code, lines[0]["purged"]["objects"]) == (0, 99)
        status = xkv("gateway", "status", *word)[1][0]
        assert (status["objects"], status["counters"]["purged_objects"]) == (0, 100)
        assert peer.put(content_of(1), key_of(FIRST, 1)) is StoreStatus.CONFIRMED


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["namespaces"], "type the folder of the card"),
        (["ls"], "type the folder of the card"),
        (["ls", "{card}", "--namespace", "xyz"], "--namespace 'xyz' is no beginning of hex digits"),
        (["ls", "{card}", "--namespace", "0" * 33], "at most 32 are possible"),
        (["ls", "{card}", "--namespace", "3f", "--key", "3f"], "type one of them"),
        (["ls", "{card}", "--block-hash", ""], "no beginning of hex digits"),
        (["ls", "{card}", "--limit", "0"], "--limit"),
        (["ls", "{nowhere}"], "there is no card in"),
        (["namespaces", "{card}", "--port", "1", "--socket", "x"], "each name a gateway"),
        (["purge", "{card}"], "type what is to leave"),
        (["purge", "{card}", "--all", "--before", "3"], "exclude each other"),
        (["purge", "{card}", "--all"], "type --yes"),
        (["purge", "{card}", "--namespace", "9", "--yes"], "no namespace of the card begins with 9"),
        (["purge", "{card}", "--namespace", "3f", "--yes"], "2 namespaces begin with 3f"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(closed: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word.format(card=closed, nowhere=closed.parent / "nowhere") for word in words]
    assert cli.main([*words, "--json"]) == 2
    output, errors = capsys.readouterr()
    (line,) = output.splitlines()
    assert said in json.loads(line)["error"]
    assert errors.count("\n") == 1


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed")
    with serving(folder) as (gateway, peer):
        fill(gateway, peer)
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
    return folder / "card"


def test_a_person_is_asked_first(
    closed: Path, xkv: Xkv, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def say(answer: bool) -> Callable[..., bool]:
        def confirm(text: str, **_: object) -> bool:
            asked.append(text)
            return answer

        return confirm

    monkeypatch.setattr("sys.stdin", Input(is_terminal=False))
    assert cli.main(["purge", str(closed), "--all"]) == 2
    assert "type --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Input(is_terminal=True))
    monkeypatch.setattr("typer.confirm", say(False))
    words = ["purge", str(closed), "--namespace", "3fb7", "--block-hash", "0" * 64]
    assert cli.main(words) == 1
    assert capsys.readouterr().out == "nothing has left\n"
    assert asked == [f"Take 1 object (29.9 KiB) of namespace {SECOND.hex()} off the card?"]
    assert xkv("ls", closed)[1][-1]["total"]["objects"] == 25
    monkeypatch.setattr("typer.confirm", say(True))
    assert cli.main(words) == 0
    assert "1 object left (29.9 KiB)" in capsys.readouterr().out
    assert xkv("ls", closed)[1][-1]["total"]["objects"] == 24


class Input:
    def __init__(self, *, is_terminal: bool) -> None:
        self.isatty = lambda: is_terminal


def test_an_index_that_cannot_be_used_is_said_with_what_to_type(
    closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doubt(closed / "index")
    try:
        for words in (["ls"], ["namespaces"], ["purge", "--all", "--yes"]):
            assert cli.main([words[0], str(closed), *words[1:]]) == 1
            errors = capsys.readouterr().err
            assert errors.count("\n") == 1
            assert f"xkv verify {closed} --rebuild" in errors
    finally:
        (closed / "index" / "doubted").unlink()


def test_whoever_reads_a_list_may_have_enough(closed: Path) -> None:
    """`xkv ls CARD | head -1`: no traceback, and no word of a card that cannot be opened."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = f"{sys.executable} -m xkv_store.cli ls {closed} | head -1"
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[0] == "GROUP"
    assert done.stderr == ""


def test_the_gateway_that_serves_the_card_is_found(tmp_path: Path, xkv: Xkv) -> None:
    with serving(tmp_path) as (gateway, peer):
        fill(gateway, peer)
        code, lines = xkv("ls", tmp_path / "card", "--socket-dir", tmp_path / "sockets")
        assert (code, lines[-1]["total"]) == (
            0,
            {"objects": 25, "object_bytes": 25 * LENGTH, "more": False, "online": True},
        )
        code, lines = xkv("ls", tmp_path, "--socket", gateway.ready["socket"])
        assert code == 2
        assert "another card" in lines[0]["error"]
