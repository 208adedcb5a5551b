"""Proving a card that a gateway serves: all damage is told and no sound object, whatever else the gateway does."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xkv_store import cli, wire
from xkv_store.audit import closed_card
from xkv_store.card_options import CardOptions
from xkv_store.geometry import DATA_OFFSET, Geometry
from xkv_store.index import Index
from xkv_store.key import ObjectKey
from xkv_store.layout import parse_record
from xkv_store.testing.faults import Fault, FaultPlan, Kind, Operation
from xkv_store.testing.peer import Peer, attached
from xkv_store.testing.processes import GatewayProcess, running_gateway
from xkv_store.tool import Tool
from xkv_store.wire import LoadStatus, StoreStatus, VerifyState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GEOMETRY = Geometry(16_384)
LENGTH = 5 * GEOMETRY.fragment_bytes - 77
SLOTS = 600
OBJECTS = 60
CAPACITY = str(DATA_OFFSET + SLOTS * GEOMETRY.slot_bytes)
WAIT_S_MAX = 20.0
SLOW = Fault(operation=Operation.READ, kind=Kind.DELAY, nth=1, times=1_000_000, delay_s=0.02)


def key_of(number: int) -> bytes:
    return ObjectKey(b"m" * 16, 0, number.to_bytes(32, "little"), 0).encode()


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(LENGTH)


def where_objects_lie(folder: Path) -> dict[bytes, int]:
    """Offset of each object's first slot in the database, read from the index while nobody has the card."""
    with closed_card(CardOptions(folder=folder / "card", create=False)):
        index = Index.open(folder / "card" / "index", slots=SLOTS)
        found = {}
        for keys, records in index.scan(1_000):
            for key, record in zip(keys, records, strict=True):
                found[key] = DATA_OFFSET + parse_record(record).extents[0].first * GEOMETRY.slot_bytes
        index.close()
    return found


def flip(folder: Path, offset: int) -> None:
    fd = os.open(folder / "card" / "db-0.xkv", os.O_RDWR)
    byte = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte[0] ^ 4]), offset)
    os.fsync(fd)
    os.close(fd)


@contextmanager
def serving(folder: Path, *faults: Fault) -> Iterator[tuple[GatewayProcess, Peer]]:
    plan = FaultPlan(faults) if faults else None
    with (
        running_gateway(folder, capacity=CAPACITY, slot_bytes=GEOMETRY.slot_bytes, faults=plan) as gateway,
        attached(Path(gateway.ready["socket"]), geometry=GEOMETRY) as peer,
    ):
        yield gateway, peer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a card of 60 objects, closed."""
    folder = tmp_path_factory.mktemp("original")
    with serving(folder) as (gateway, peer):
        for number in range(OBJECTS):
            assert peer.put(content_of(number), key_of(number)) is StoreStatus.CONFIRMED
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
    return folder


@pytest.fixture
def offsets(original: Path, tmp_path: Path) -> dict[bytes, int]:
    """A copy of that card in `tmp_path`, and where its objects lie."""
    shutil.copytree(original / "card", tmp_path / "card")
    (tmp_path / "card").chmod(0o700)
    return where_objects_lie(tmp_path)


def status_of(gateway: GatewayProcess) -> dict[str, Any]:
    with closing(Tool(Path(gateway.ready["socket"]))) as tool:
        found: dict[str, Any] = json.loads(tool.status())
    return found


def told(tool: Tool, *, drop: bool = False) -> tuple[dict[bytes, str], wire.Verifying]:
    """Problems by key, and the last message."""
    damaged: dict[bytes, str] = {}
    for message in tool.verify(drop=drop):
        damaged |= {one.key: one.problem for one in message.damaged}
    return damaged, message


def test_damage_is_told_and_leaves_when_asked(
    tmp_path: Path, offsets: dict[bytes, int], xkv: Callable[..., tuple[int, list[dict[str, Any]]]]
) -> None:
    place = ("--socket-dir", tmp_path / "sockets")
    bad = {3, 30, 59}
    with serving(tmp_path) as (gateway, peer):
        for number in bad:
            flip(tmp_path, offsets[key_of(number)] + 3_000)
        code, lines = xkv("verify", tmp_path / "card", *place)
        assert code == 1
        assert {line["damaged"]["block_hash"] for line in lines[:-1]} == {n.to_bytes(32, "little").hex() for n in bad}
        assert not any(line["damaged"]["dropped"] for line in lines[:-1])
        total = lines[-1]["verified"]
        assert (total["online"], total["objects"], total["damaged"], total["gone"]) == (True, OBJECTS, 3, 0)
        assert total["proved_bytes"] == (OBJECTS - 3) * LENGTH
        assert status_of(gateway)["objects"] == OBJECTS, "nothing leaves unasked"
        code, lines = xkv("verify", "--socket", gateway.ready["socket"], "--drop")
        assert (code, lines[-1]["verified"]["dropped"], lines[-1]["advice"]) == (1, 3, [])
        assert status_of(gateway)["objects"] == OBJECTS - 3
        assert {number: peer.get(LENGTH, key_of(number))[0] for number in bad} == dict.fromkeys(bad, LoadStatus.MISS)
        code, lines = xkv("verify", tmp_path / "card", *place)
        assert (code, lines[-1]["verified"]["objects"]) == (0, OBJECTS - 3)
        gateway.kill()
    with serving(tmp_path) as (gateway, _):
        assert status_of(gateway)["objects"] == OBJECTS - 3, "they left the index, too"


def test_under_load_all_damage_is_told_and_nothing_sound(tmp_path: Path, offsets: dict[bytes, int]) -> None:
    """A client puts, replaces and gets while bits flip underneath: every flipped object is told, whoever meets it."""
    kept, replaced = range(40), range(40, OBJECTS)
    rng = random.Random(7)
    bad = {key_of(number) for number in rng.sample(kept, 12)}
    heard: list[tuple[str, int, object]] = []
    done = threading.Event()
    with serving(tmp_path, SLOW) as (gateway, peer):

        def live() -> None:
            random_of_mine = random.Random(8)
            while not done.is_set():
                number = 1_000 + len(heard) // 3 % 20  # so few that nothing is evicted for them
                heard.append(("put", number, peer.put(content_of(number), key_of(number), replace=True)))
                again = random_of_mine.choice(replaced)
                heard.append(("replace", again, peer.put(content_of(again), key_of(again), replace=True)))
                asked = random_of_mine.choice(range(OBJECTS))
                status, content = peer.get(LENGTH, key_of(asked))
                heard.append(("get", asked, status))
                assert status is not LoadStatus.OK or content == content_of(asked), "never wrong bytes"

        client = threading.Thread(target=live)
        for key in sorted(bad)[:6]:
            flip(tmp_path, offsets[key] + 1_024 + rng.randrange(LENGTH // 5))
        client.start()
        try:
            with closing(Tool(Path(gateway.ready["socket"]))) as tool:
                damaged: dict[bytes, str] = {}
                late = sorted(bad)[6:]
                for message in tool.verify(drop=False):
                    if late:
                        assert message.objects < int.from_bytes(late[0][21:-2], "big"), "none of them is proved yet"
                    while late:
                        flip(tmp_path, offsets[late.pop()] + 1_024 + rng.randrange(LENGTH // 5))
                    damaged |= {one.key: one.problem for one in message.damaged}
        finally:
            done.set()
            client.join(WAIT_S_MAX)
        counters = status_of(gateway)["counters"]
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
    assert message.state is VerifyState.ENDED
    assert set(damaged) == bad
    assert len(kept) - len(bad) <= message.objects <= OBJECTS
    kinds = {kind for kind, _, status in heard if status in (LoadStatus.OK, StoreStatus.CONFIRMED)}
    assert kinds == {"put", "replace", "get"}, "the client has lived"
    corrupt = {number for kind, number, status in heard if kind == "get" and status is LoadStatus.CORRUPT}
    assert {key_of(number) for number in corrupt} <= bad
    assert counters.get("dropped_corrupt", 0) == len(corrupt)


def test_one_proof_at_a_time_and_it_ends_with_its_tool(tmp_path: Path, offsets: dict[bytes, int]) -> None:
    assert len(offsets) == OBJECTS
    with serving(tmp_path, SLOW) as (gateway, peer):
        first, second = (Tool(Path(gateway.ready["socket"])) for _ in range(2))
        run = first.verify(drop=False)
        assert next(run).state is VerifyState.RUNNING
        refused = told(second)[1]
        assert refused.state is VerifyState.BUSY
        assert "already" in refused.reason
        first.close()  # in the middle: a read is under way
        deadline = time.monotonic() + WAIT_S_MAX
        while True:
            ended = told(second)[1]
            if ended.state is VerifyState.ENDED:
                break
            assert ended.state is VerifyState.BUSY
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert ended.objects == OBJECTS
        second.close()
        assert peer.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))
        counters = status_of(gateway)["counters"]
        assert counters["verify_runs"] == 2
        assert counters["verified_objects"] < 2 * OBJECTS - 10, "nobody waited for the rest of the first run"
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0, "nothing is held any more"


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_gateway_that_ends_meanwhile(
    tmp_path: Path, offsets: dict[bytes, int], how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(offsets) == OBJECTS
    with serving(tmp_path, SLOW) as (gateway, _):
        ends = {"stop": lambda: gateway.signal(signal.SIGTERM), "kill": gateway.kill}
        timer = threading.Timer(0.4, ends[how])
        timer.start()
        code = cli.main(["verify", str(tmp_path / "card"), "--socket-dir", str(tmp_path / "sockets")])
        timer.join()
        output, errors = capsys.readouterr()
        assert (code, output, len(errors.splitlines())) == (1 if how == "stop" else 2, "", 1)
        assert ("of 60 objects were proved" if how == "stop" else "closed the connection") in errors
        assert gateway.wait() == (0 if how == "stop" else -signal.SIGKILL)


def test_a_gateway_that_nobody_uses_stays_until_the_proof_has_ended(tmp_path: Path, offsets: dict[bytes, int]) -> None:
    assert len(offsets) == OBJECTS
    options = ("--linger-s", "0.2")
    plan = FaultPlan((SLOW,))
    with running_gateway(
        tmp_path, capacity=CAPACITY, slot_bytes=GEOMETRY.slot_bytes, options=options, faults=plan
    ) as gateway:
        with closing(Tool(Path(gateway.ready["socket"]))) as tool:
            assert told(tool)[1].state is VerifyState.ENDED
        assert gateway.wait() == 0


def test_who_serves_the_card_is_found(
    tmp_path: Path, offsets: dict[bytes, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(offsets) == OBJECTS
    card, sockets = str(tmp_path / "card"), str(tmp_path / "sockets")
    (tmp_path / "other").mkdir(mode=0o700)
    with serving(tmp_path):
        link = tmp_path / "link"
        link.symlink_to(card)
        assert cli.main(["verify", str(link), "--socket-dir", sockets]) == 0
        assert "60 objects proved" in capsys.readouterr().out
        for words, said in (
            ([card, "--socket-dir", str(tmp_path / "other")], "name it with --socket-dir or --socket"),
            ([card, "--rebuild"], "only where no gateway has the card"),
            ([str(tmp_path), "--socket-dir", sockets, "--port", "5557"], "serves another card"),
        ):
            assert cli.main(["verify", *words]) == 2
            errors = capsys.readouterr().err
            assert len(errors.splitlines()) == 1
            assert said in errors
    assert cli.main(["verify", card, "--socket-dir", sockets]) == 0, "killed, so that the lock is free: offline"
    assert "60 objects proved" in capsys.readouterr().out


def test_an_object_that_cannot_be_read_stays_unless_its_sectors_are_gone(
    tmp_path: Path, offsets: dict[bytes, int]
) -> None:
    """No memory says nothing of the object; EIO does."""
    assert len(offsets) == OBJECTS
    for error, dropped in ((12, False), (5, True)):
        fault = Fault(operation=Operation.READ, kind=Kind.ERROR, nth=4, error=error)
        with serving(tmp_path, fault) as (gateway, _):
            with closing(Tool(Path(gateway.ready["socket"]))) as tool:
                found = [one for message in tool.verify(drop=True) for one in message.damaged]
            assert [one.dropped for one in found] == [dropped]
            assert status_of(gateway)["objects"] == OBJECTS - dropped
