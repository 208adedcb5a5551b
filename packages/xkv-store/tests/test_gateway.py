"""A real gateway process, spoken to message by message: answers, refusals, ends of sessions, bounds."""

from __future__ import annotations

import json
import os
import random
import resource
import socket as sockets_of_python
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_store import wire
from xkv_store.control import ControlPage
from xkv_store.gateway import fitting_json
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey, chunk_tag, tag_salt
from xkv_store.native import path_word
from xkv_store.ring import make_sealed_memory
from xkv_store.table import TableReader
from xkv_store.testing.peer import Peer
from xkv_store.testing.processes import GatewayProcess, running_gateway
from xkv_store.wire import LoadStatus, RefusedCode, Role, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOT_BYTES = 65_536
GEOMETRY = Geometry(SLOT_BYTES)
NAMESPACE = b"n" * 16

MakePeer = "Callable[[], Peer]"


def content_of(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def key_of(number: int, rank: int = 0) -> bytes:
    return ObjectKey(NAMESPACE, 0, number.to_bytes(32, "little"), rank).encode()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One for the tests that leave it as it was."""
    with running_gateway(tmp_path_factory.mktemp("g"), slot_bytes=SLOT_BYTES) as running:
        yield running


@pytest.fixture
def connect(gateway: GatewayProcess) -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def make() -> Peer:
        peers.append(Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def status_of(peer: Peer) -> dict[str, object]:
    peer.send(wire.AskStatus(1))
    value = json.loads(peer.receive(wire.Status).text)
    assert isinstance(value, dict)
    return value


def test_what_was_put_is_confirmed_found_and_read_back(connect: Callable[[], Peer]) -> None:
    peer = connect()
    welcome = peer.attach()
    content = content_of(1, 5 * GEOMETRY.fragment_bytes + 17)
    assert peer.get(len(content), key_of(1))[0] is LoadStatus.MISS
    assert peer.put(content, key_of(1)) is StoreStatus.CONFIRMED
    assert peer.put(content, key_of(1)) is StoreStatus.HELD
    assert peer.get(len(content), key_of(1)) == (LoadStatus.OK, content)
    table = TableReader.attach(os.dup(peer.fds[2]), check_card_uuid=welcome.card_uuid)
    found = table.lookup(chunk_tag(tag_salt(NAMESPACE, 0, 0), (1).to_bytes(32, "little")))
    assert found is not None
    assert found[1] == 1
    table.close()


def test_a_get_may_begin_inside_and_read_less_than_the_object(connect: Callable[[], Peer]) -> None:
    peer = connect()
    welcome = peer.attach()
    content = content_of(2, 4 * GEOMETRY.fragment_bytes)
    assert peer.put(content, key_of(2)) is StoreStatus.CONFIRMED
    slots = (welcome.load_region.first, welcome.load_region.first + 1)
    peer.send(wire.Get(100, (wire.GetObject(key_of(2), slots, 1),)))
    (loaded,) = peer.receive(wire.Loaded).objects
    assert (loaded.status, loaded.length) == (LoadStatus.OK, len(content))
    size = GEOMETRY.fragment_bytes
    assert peer.content(2 * size) == content[size : 3 * size]
    peer.send(wire.Get(101, (wire.GetObject(key_of(2), slots, 3),)))
    assert peer.receive(wire.Loaded).objects[0].status is LoadStatus.MISS, "fragment 4 does not exist"


def test_a_length_that_does_not_match_its_slots_is_invalid(connect: Callable[[], Peer]) -> None:
    peer = connect()
    welcome = peer.attach()
    first = welcome.store_region.first
    peer.send(wire.Put(1, (wire.PutObject(key_of(3), 10, (first, first + 1), 1, 1, False),)))
    assert peer.receive(wire.Stored).objects[0].status is StoreStatus.INVALID


def test_slots_of_others_end_the_session_and_nobody_elses(connect: Callable[[], Peer]) -> None:
    one, other = connect(), connect()
    mine = one.attach(engine="two ranks", rank=0, world_size=2)
    other.attach(engine="two ranks", rank=1, world_size=2)
    foreign = mine.store_region.first
    other.send(wire.Put(1, (wire.PutObject(key_of(4), 10, (foreign,), 1, 1, False),)))
    assert other.receive(wire.Refused).code is RefusedCode.PROTOCOL
    assert other.next() is None
    assert one.put(b"still here", key_of(4)) is StoreStatus.CONFIRMED


@pytest.mark.parametrize("packet", [b"", b"GET / HTTP/1.1", b"XKV1\xff", b"XKV1" + b"\x91" * 60_000])
def test_junk_ends_the_session_alone(connect: Callable[[], Peer], packet: bytes) -> None:
    peer, witness = connect(), connect()
    witness.attach(engine="witness")
    peer.socket.send(packet)
    last = peer.next()
    assert last is None or (isinstance(last, wire.Refused) and last.code is RefusedCode.PROTOCOL)
    assert status_of(witness)["draining"] is False


def test_a_second_rank_is_refused_until_the_first_is_gone(connect: Callable[[], Peer]) -> None:
    first, second, third = connect(), connect(), connect()
    first.attach()
    second.hello()
    refused = second.receive(wire.Refused)
    assert refused.code is RefusedCode.RANK_TAKEN
    assert "engine" in refused.reason
    first.close()
    third.attach()


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"world_size": 3}, RefusedCode.RING, ("world_size is 3", "gave 2")),
        ({"ring_slots": 32}, RefusedCode.RING, (str(32 * SLOT_BYTES), str(160 * SLOT_BYTES))),
        ({"fragment_bytes": 3_072}, RefusedCode.FRAGMENT_BYTES, ("3072", str(GEOMETRY.fragment_bytes))),
    ],
)
def test_ranks_of_an_engine_must_agree(
    connect: Callable[[], Peer], change: dict[str, int], code: RefusedCode, named: tuple[str, ...]
) -> None:
    first, second = connect(), connect()
    first.attach(engine="agree", rank=0, world_size=2)
    wanted: dict[str, int] = {"world_size": 2, "ring_slots": 160, **change}
    second.hello(engine="agree", rank=1, **wanted)  # type: ignore[arg-type]
    refused = second.receive(wire.Refused)
    assert refused.code is code
    assert all(text in refused.reason for text in named), refused.reason


def test_a_ring_that_is_not_the_engines_is_refused(connect: Callable[[], Peer]) -> None:
    first, second = connect(), connect()
    first.attach(engine="own ring", rank=0, world_size=2)
    ring = make_sealed_memory("another", 160 * SLOT_BYTES)
    page = ControlPage.create(2, b"b" * 16)
    second.hello(engine="own ring", rank=1, world_size=2, fds=(ring, page.fd))
    assert second.receive(wire.Refused).code is RefusedCode.RING
    os.close(ring)
    page.close()


def test_an_unsealed_ring_is_refused(connect: Callable[[], Peer]) -> None:
    """A client could shorten it under the gateway's feet and kill it with SIGBUS."""
    peer = connect()
    ring = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(ring, 160 * SLOT_BYTES)
    page = ControlPage.create(1, b"b" * 16)
    peer.hello(fds=(ring, page.fd))
    refused = peer.receive(wire.Refused)
    assert refused.code is RefusedCode.RING
    assert "sealed" in refused.reason
    os.close(ring)
    page.close()


def test_namespaces_are_collected_and_kept(connect: Callable[[], Peer]) -> None:
    rank, scheduler, bad = connect(), connect(), connect()
    rank.attach(engine="names")
    scheduler.hello(engine="names", role=Role.SCHEDULER)
    scheduler.receive(wire.Welcome)
    scheduler.send(wire.AskNamespaces(1))
    assert scheduler.receive(wire.Namespaces).ranks == ()
    rank.send(wire.PublishNamespace(NAMESPACE, '{"model": "m"}'))
    deadline = time.monotonic() + 10
    published: tuple[wire.RankNamespace, ...] = ()
    while not published and time.monotonic() < deadline:
        scheduler.send(wire.AskNamespaces(2))
        published = scheduler.receive(wire.Namespaces).ranks
    assert published == (wire.RankNamespace(0, NAMESPACE, '{"model": "m"}'),)
    bad.attach(engine="other names")
    bad.send(wire.PublishNamespace(NAMESPACE, "not JSON"))
    assert bad.receive(wire.Refused).code is RefusedCode.PROTOCOL


def test_the_heart_beats_while_nothing_happens(connect: Callable[[], Peer]) -> None:
    peer = connect()
    welcome = peer.attach()
    page = ControlPage.attach(os.dup(peer.fds[1]))
    seen = {page.heartbeat_ns}
    for _ in range(10):
        time.sleep(welcome.heartbeat_ms / 1000)
        seen.add(page.heartbeat_ns)
    assert len(seen) >= 8
    assert page.boot_id == welcome.boot_id
    page.close()


def test_status_names_who_is_here(connect: Callable[[], Peer]) -> None:
    peer, tool = connect(), connect()
    peer.attach(engine="seen")
    tool.hello(engine="t", role=Role.TOOL)
    assert tool.receive(wire.Welcome).ring_slots == 0
    status = status_of(tool)
    sessions = status["sessions"]
    assert isinstance(sessions, list)
    seen = next(one for one in sessions if one["engine"] == "seen")
    assert (seen["role"], seen["rank"], seen["pid"], seen["in_flight"]) == ("rank", 0, os.getpid(), 0)
    assert {"card_uuid", "boot_id", "pid", "version", "uptime_s", "counters", "capacity_bytes"} <= status.keys()
    assert status["checksums"] == path_word(), "the gateway's process has the same library, or none"


def test_what_a_dead_client_held_is_free_within_a_second(gateway: GatewayProcess, connect: Callable[[], Peer]) -> None:
    peer, heir = connect(), connect()
    content = content_of(5, 3 * GEOMETRY.fragment_bytes)
    peer.attach(engine="dies")
    before = gateway.times_reached("put.before_write")
    gateway.hold("put.before_write")
    peer.begin_put(content, key_of(5))
    gateway.await_point("put.before_write", before + 1)
    peer.close()
    heir.hello(engine="dies")  # the old session's I/O has not ended: the place is not free yet
    with pytest.raises(TimeoutError):
        heir.next(0.3)
    gateway.let_go("put.before_write")
    started = time.monotonic()
    heir.receive(wire.Welcome)
    assert time.monotonic() - started < 1.0


def test_a_dead_engines_memory_is_given_back(gateway: GatewayProcess, connect: Callable[[], Peer]) -> None:
    """Its ring may be most of the machine's memory: it must not wait for a garbage collection."""
    peer = connect()
    peer.attach(engine="large")
    assert peer.put(b"used", key_of(6)) in (StoreStatus.CONFIRMED, StoreStatus.HELD)
    maps = Path(f"/proc/{gateway.pid}/maps")
    assert "xkv-ring" in maps.read_text()
    peer.close()
    deadline = time.monotonic() + 1.0
    while "xkv-ring" in maps.read_text():
        assert time.monotonic() < deadline, "the dead engine's ring is still mapped"
        time.sleep(0.02)


def test_a_foreign_uid_is_refused(gateway: GatewayProcess) -> None:
    """The folder and the socket keep others out; where they do not, the credentials do."""
    if os.geteuid() != 0:
        pytest.fail("this test changes its uid, so it runs as root; CI does")
    path = gateway.ready["socket"]
    ours, theirs = sockets_of_python.socketpair()
    folder = Path(path).parent
    ancestors = [folder, *folder.parents]
    modes = {one: one.stat().st_mode for one in ancestors}
    child = os.fork()
    if child == 0:  # pragma: no cover
        code = 1
        try:
            theirs.recv(1)
            os.setuid(65_534)
            connection = sockets_of_python.socket(sockets_of_python.AF_UNIX, sockets_of_python.SOCK_SEQPACKET)
            connection.settimeout(10)
            connection.connect(path)
            answer = wire.decode_from_gateway(connection.recv(65_536))
            code = 0 if isinstance(answer, wire.Refused) and answer.code is RefusedCode.PEER else 2
        finally:
            os._exit(code)
    try:
        for one in ancestors:
            one.chmod(modes[one] | 0o055)
        Path(path).chmod(0o666)
        ours.send(b"g")
        _, status = os.waitpid(child, 0)
    finally:
        for one in ancestors:
            one.chmod(modes[one])
        Path(path).chmod(0o600)
        ours.close()
        theirs.close()
    assert os.waitstatus_to_exitcode(status) == 0


def try_to_ask(peer: Peer, ask: int) -> int | None:
    """Questions sent (1 or 0); None when the connection is gone."""
    try:
        peer.socket.send(wire.encode(wire.AskStatus(ask)))
    except BlockingIOError:
        time.sleep(0.01)
        return 0
    except (BrokenPipeError, ConnectionResetError):
        return None
    return 1


def test_a_client_that_does_not_read_is_dropped(connect: Callable[[], Peer]) -> None:
    peer, witness = connect(), connect()
    peer.attach(engine="deaf")
    witness.attach(engine="listens")
    deadline = time.monotonic() + 30
    asked = 0
    while (taken := try_to_ask(peer, asked)) is not None and time.monotonic() < deadline:
        asked += taken
    assert taken is None, f"{asked} questions without reading an answer, and still attached"
    counters = status_of(witness)["counters"]
    assert isinstance(counters, dict)
    assert counters["sessions_not_reading"] == 1


def test_without_descriptors_a_client_is_refused_and_the_gateway_lives(tmp_path: Path) -> None:
    """EMFILE out of the loop would end every session on the machine."""
    with running_gateway(tmp_path, slot_bytes=SLOT_BYTES) as gateway:
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (64, 64))
        peers: list[Peer] = []
        answers: list[wire.FromGateway | None] = []
        try:
            for number in range(24):
                peers.append(Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY))
                peers[-1].hello(engine=f"engine {number}")
                answers.append(peers[-1].next())
            refused = [one for one in answers if isinstance(one, wire.Refused)]
            assert {one.code for one in refused} == {RefusedCode.SESSIONS}
            assert sum(isinstance(one, wire.Welcome) for one in answers) >= 4
            assert isinstance(answers[0], wire.Welcome)
            peers[0].send(wire.AskStatus(1))
            assert json.loads(peers[0].receive(wire.Status).text)["draining"] is False
            assert gateway.alive
        finally:
            for peer in peers:
                peer.close()


def test_a_long_status_leaves_entries_out_and_stays_json() -> None:
    """Cut text is of no use to anybody who parses it."""
    status = {"sessions": ["s" * 300] * 300, "sessions_left_out": 7, "databases": [{"path": "d" * 4_000}] * 64}
    text = fitting_json(status, ("sessions", "databases"))
    assert len(text) <= wire.TEXT_BYTES_MAX
    value = json.loads(text)
    assert len(value["sessions"]) + value["sessions_left_out"] == 307
    assert len(value["databases"]) + value["databases_left_out"] == 64
    assert value["sessions"]
    assert value["databases"]
