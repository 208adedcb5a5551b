"""A gateway on a medium that fails: what the client hears, and that the fault ends with its object."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from xkv_store import connections, control, io_pool, medium, ring, wire
from xkv_store import database as database_module
from xkv_store import gateway as gateway_module
from xkv_store.card import Card, CardOptions
from xkv_store.database import Database
from xkv_store.errors import CorruptObject, MediumError, PeerError
from xkv_store.gateway import Gateway, GatewayOptions
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.testing.peer import Peer, attached
from xkv_store.wire import LoadStatus, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

SLOT_BYTES = 16_384
GEOMETRY = Geometry(SLOT_BYTES)
CONTENT = b"content" * 5_000
WAIT_S_MAX = 20.0
GONE_S_MAX = 5.0


def key_of(number: int) -> bytes:
    return ObjectKey(b"f" * 16, 0, number.to_bytes(32, "little"), 0).encode()


class Bench:
    """A gateway in a thread of this process, so that a test can break what is under it."""

    def __init__(self, folder: Path, io_threads: int) -> None:
        self.options = GatewayOptions(
            socket=folder / "sockets" / "g.sock",
            card=CardOptions(
                folder=folder / "card", capacity_bytes=8 << 20, databases=1, slot_bytes=SLOT_BYTES, grace_ms=0
            ),
            io_threads=io_threads,
        )
        self.peers: list[Peer] = []
        self.gateway = Gateway(self.options)
        self.gateway.open()
        self.thread = threading.Thread(target=self.gateway.run)
        self.thread.start()

    def peer(self, engine: str = "engine") -> Peer:
        peer = Peer(self.options.socket, geometry=GEOMETRY)
        self.peers.append(peer)
        peer.attach(engine=engine)
        return peer

    def end(self) -> None:
        for peer in self.peers:
            peer.close()
        self.gateway.stop()
        self.thread.join(WAIT_S_MAX)
        assert not self.thread.is_alive()
        self.gateway.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Bench]]:
    with ExitStack() as stack:

        def make(io_threads: int) -> Bench:
            bench = Bench(tmp_path, io_threads)
            stack.callback(bench.end)
            return bench

        yield make


@pytest.fixture
def peer(start: Callable[[int], Bench]) -> Peer:
    return start(2).peer()


def fails(error: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise MediumError(error, "the test's medium")

    return fail


def test_a_failed_write_is_a_failed_store_and_a_miss(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(database_module, "library", lambda: None)  # it would go past this
        broken.setattr(Database, "write", fails(errno.EIO))
        assert peer.put(CONTENT, key_of(1)) is StoreStatus.FAILED
    assert peer.get(len(CONTENT), key_of(1))[0] is LoadStatus.MISS
    assert peer.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED
    assert peer.get(len(CONTENT), key_of(1)) == (LoadStatus.OK, CONTENT)


def test_a_failed_commit_is_a_failed_store_and_heals(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC once must not be ENOSPC for ever."""
    monkeypatch.setattr(gateway_module, "COMMIT_RETRY_NS", 10_000_000)
    with monkeypatch.context() as broken:
        broken.setattr(Card, "commit_batch", fails(errno.ENOSPC))
        assert peer.put(CONTENT, key_of(1)) is StoreStatus.FAILED
    assert peer.get(len(CONTENT), key_of(1))[0] is LoadStatus.MISS
    assert peer.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED


@pytest.mark.parametrize(("error", "next_status"), [(errno.EIO, LoadStatus.MISS), (errno.ENOMEM, LoadStatus.OK)])
def test_an_unreadable_object_leaves_the_card_and_a_passing_fault_does_not(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, error: int, next_status: LoadStatus
) -> None:
    """Hit, fail, hit, fail for ever: one failure by the object's own sectors makes it a miss."""
    assert peer.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED
    with monkeypatch.context() as broken:
        broken.setattr(database_module, "library", lambda: None)
        broken.setattr(Database, "read", fails(error))
        assert peer.get(len(CONTENT), key_of(1))[0] is LoadStatus.FAILED
    assert peer.get(len(CONTENT), key_of(1))[0] is next_status


def test_a_corrupt_object_is_said_once_with_its_generation(peer: Peer, tmp_path: Path) -> None:
    """The client needs the generation to deny what the lookup table may still show."""
    assert peer.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED
    (database,) = (tmp_path / "card").glob("db-*.xkv")
    data = database.read_bytes()
    at = data.index(CONTENT[:4_000], 1 << 20)
    with database.open("r+b") as file:
        file.seek(at + 100)
        file.write(b"X")
    peer.begin_get(len(CONTENT), key_of(1))
    (loaded,) = peer.receive(wire.Loaded).objects
    assert loaded.status is LoadStatus.CORRUPT
    assert loaded.generation > 0
    assert peer.get(len(CONTENT), key_of(1))[0] is LoadStatus.MISS


def test_an_error_of_ours_costs_one_object_and_is_counted(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(Card, "write", bug)
        assert peer.put(CONTENT, key_of(1)) is StoreStatus.FAILED
    assert peer.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED


@contextmanager
def no_collector() -> Iterator[None]:
    """A gateway that has nothing to do makes no garbage that would have it begin. No record of an error is kept."""
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("objects", [1, 3], ids=["one", "a row"])
@pytest.mark.parametrize("what", ["store", "load", "a damaged load", "a bug"])
def test_an_engine_that_is_gone_leaves_no_memory_behind_though_its_io_has_failed(
    start: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch, what: str, objects: int
) -> None:
    """An error's trace leads to the ring: gigabytes, until the collector comes."""
    bench = start(2)
    content = b"small"
    keys = [key_of(number) for number in range(objects)]
    if what != "store":
        with attached(bench.options.socket, geometry=GEOMETRY) as before:
            assert [before.put(content, key) for key in keys] == [StoreStatus.CONFIRMED] * objects
    if what == "a damaged load":
        monkeypatch.setattr(medium, "prove", lambda *_: corrupt())
    elif what == "a bug":
        monkeypatch.setattr(Card, "read", lambda *_: 1 // 0)
        monkeypatch.setattr(Card, "read_row", lambda *_: 1 // 0)
    else:
        monkeypatch.setattr(database_module, "library", lambda: None)  # it would go past these
        monkeypatch.setattr(os, "pwritev", no_io)
        monkeypatch.setattr(os, "preadv", no_io)
    with no_collector():
        peer = bench.peer("dying")
        assert bench.gateway._loop is not None
        (engine,) = bench.gateway._loop._desk.engines
        ring_of_gateway = weakref.ref(engine.ring)
        del engine
        if what == "store":
            store_slots = [(peer.welcome.store_region.first + number,) for number in range(objects)]
            puts = [wire.PutObject(key, 5, slots, 1, 0, False) for key, slots in zip(keys, store_slots, strict=True)]
            peer.send(wire.Put(1, tuple(puts)))
        else:
            load_slots = [(peer.welcome.load_region.first + number,) for number in range(objects)]
            peer.send(wire.Get(1, tuple(wire.GetObject(key, at, 0) for key, at in zip(keys, load_slots, strict=True))))
        settle(peer, objects)
        peer.close()
        until_s = time.monotonic() + GONE_S_MAX
        while ring_of_gateway() is not None and time.monotonic() < until_s:
            time.sleep(0.01)
        assert ring_of_gateway() is None


def no_io(*_: object) -> int:
    raise OSError(errno.EIO, "the test's medium")


def corrupt() -> None:
    raise CorruptObject("the test's damage")


class Valve:
    """Holds the pool's threads inside the medium."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self, *_: object) -> None:
        self.entered.release()
        assert self.open.wait(WAIT_S_MAX)


def test_full_lanes_answer_shed_and_busy_at_once(
    start: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_pool, "JOBS_PER_LANE_MAX", 1)
    bench = start(2)
    peer = bench.peer()
    for number in (7, 8, 9):
        assert peer.put(CONTENT, key_of(number)) is StoreStatus.CONFIRMED
    valve = Valve()
    fragments = GEOMETRY.fragments(len(CONTENT))
    with monkeypatch.context() as slow:
        slow.setattr(Card, "write", valve)
        slow.setattr(Card, "read", valve)
        peer.begin_put(CONTENT, key_of(1))
        peer.begin_get(len(CONTENT), key_of(9))
        assert valve.entered.acquire(timeout=WAIT_S_MAX)
        assert valve.entered.acquire(timeout=WAIT_S_MAX)
        peer.begin_put(CONTENT, key_of(2), first_slot=fragments)
        begun = peer.begin_put(CONTENT, key_of(3), first_slot=2 * fragments)
        assert peer.receive(wire.Stored) == wire.Stored(begun, (wire.StoredObject(0, StoreStatus.SHED),))
        peer.begin_get(len(CONTENT), key_of(8), first_slot=fragments)
        begun = peer.begin_get(len(CONTENT), key_of(7), first_slot=2 * fragments)
        assert peer.receive(wire.Loaded) == wire.Loaded(begun, (wire.LoadedObject(0, LoadStatus.BUSY, 0, 0),))
        valve.open.set()
        settle(peer, 4)


def settle(peer: Peer, objects: int) -> None:
    """Take so many answers."""
    while objects > 0:
        message = peer.next()
        assert isinstance(message, wire.Stored | wire.Loaded)
        objects -= len(message.objects)


def test_cancel_answers_what_has_not_begun_at_once(
    start: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start(1)
    peer = bench.peer()
    for number in (1, 2):
        assert peer.put(CONTENT, key_of(number)) is StoreStatus.CONFIRMED
    valve = Valve()
    first = peer.welcome.load_region.first
    count = GEOMETRY.fragments(len(CONTENT))
    with monkeypatch.context() as slow:
        slow.setattr(Card, "read", valve)
        slots = [tuple(range(first + one * count, first + (one + 1) * count)) for one in range(2)]
        peer.send(wire.Get(50, tuple(wire.GetObject(key_of(n + 1), slots[n], 0) for n in range(2))))
        assert valve.entered.acquire(timeout=WAIT_S_MAX)
        peer.send(wire.Cancel(50))
        (waiting,) = peer.receive(wire.Loaded).objects
        assert (waiting.index, waiting.status) == (1, LoadStatus.CANCELLED)
        with pytest.raises(TimeoutError):
            peer.next(0.2)  # the other one's slots are being written to: they are not the client's yet
        valve.open.set()
        (begun,) = peer.receive(wire.Loaded).objects
        assert (begun.index, begun.status) == (0, LoadStatus.CANCELLED)


def test_the_end_of_a_session_frees_what_waits_and_harms_nobody(
    start: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start(1)
    dying, living = bench.peer("dying"), bench.peer("living")
    valve = Valve()
    count = GEOMETRY.fragments(len(CONTENT))
    real = Card.write

    def write(card: Card, plan: object, slots: Sequence[memoryview]) -> None:
        valve()
        real(card, plan, slots)  # type: ignore[arg-type]

    with monkeypatch.context() as slow:
        slow.setattr(Card, "write", write)
        for number in range(5):
            dying.begin_put(CONTENT, key_of(number), first_slot=count * number)
        assert valve.entered.acquire(timeout=WAIT_S_MAX)
        dying.close()
        number_of_put = living.begin_put(CONTENT, key_of(100))
        time.sleep(0.2)
        valve.open.set()
        answer = living.receive(wire.Stored, 1.0)
        assert answer == wire.Stored(number_of_put, (wire.StoredObject(0, StoreStatus.CONFIRMED),))
    statuses = [living.get(len(CONTENT), key_of(number))[0] for number in range(5)]
    assert statuses == [LoadStatus.OK, *[LoadStatus.MISS] * 4], "only the one that had begun was finished"


def test_drain_is_bounded_by_withdrawing_what_has_not_begun(
    start: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "DRAIN_S_MAX", 0.2)
    bench = start(1)
    peer = bench.peer()
    valve = Valve()
    count = GEOMETRY.fragments(len(CONTENT))
    with monkeypatch.context() as slow:
        slow.setattr(Card, "write", valve)
        for number in range(3):
            peer.begin_put(CONTENT, key_of(number), first_slot=count * number)
        assert valve.entered.acquire(timeout=WAIT_S_MAX)
        peer.send(wire.AskStatus(1))
        peer.receive(wire.Status)  # in order: all three puts have come
        bench.gateway.stop()
        answers = [peer.receive(wire.Stored) for _ in range(2)]
        assert {one.status for answer in answers for one in answer.objects} == {StoreStatus.FAILED}
        valve.open.set()
        bench.thread.join(WAIT_S_MAX)
        assert not bench.thread.is_alive()


def test_a_client_that_does_not_read_is_bounded_in_bytes(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 statuses of a busy gateway are 150 MiB."""
    monkeypatch.setattr(wire, "OUTBOX_BYTES_MAX", 65_536)
    deadline = time.monotonic() + WAIT_S_MAX
    asked = 0
    while (taken := try_to_ask(peer, asked)) is not None and time.monotonic() < deadline:
        asked += taken
    assert taken is None
    assert asked < wire.OUTBOX_MESSAGES_MAX


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


def tool_of(bench: Bench) -> Peer:
    peer = Peer(bench.options.socket, geometry=GEOMETRY)
    bench.peers.append(peer)
    peer.hello(engine="tool", role=wire.Role.TOOL)
    return peer


def test_tools_leave_places_to_engines(start: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TOOL_SESSIONS_MAX", 2)
    bench = start(1)
    for _ in range(2):
        tool_of(bench).receive(wire.Welcome)
    assert tool_of(bench).receive(wire.Refused).code is wire.RefusedCode.SESSIONS
    bench.peer()
    bench.peers[0].close()
    time.sleep(0.2)
    tool_of(bench).receive(wire.Welcome)


def test_an_idle_tool_is_dropped_and_an_idle_engine_is_not(
    start: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "TOOL_IDLE_S_MAX", 0.2)
    bench = start(1)
    engine, tool = bench.peer(), tool_of(bench)
    tool.receive(wire.Welcome)
    assert tool.next() is None
    assert engine.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED


def test_a_deleted_card_confirms_nothing_and_its_gateway_ends(start: Callable[[int], Bench], tmp_path: Path) -> None:
    """Puts would be confirmed into files that nobody can ever open again."""
    bench = start(2)
    peer = bench.peer()
    assert peer.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED
    shutil.rmtree(tmp_path / "card")
    number = peer.begin_put(CONTENT, key_of(2))
    answer = peer.next()
    if answer is not None:  # or the gateway has ended already
        assert isinstance(answer, wire.Stored)
        assert answer.put == number
        assert answer.objects[0].status is not StoreStatus.CONFIRMED
    bench.thread.join(WAIT_S_MAX)
    assert not bench.thread.is_alive()


@pytest.mark.parametrize(
    ("owner", "mapping", "error"),
    [(ring, "Mapping", OSError(errno.ENOMEM, "no memory")), (control, "map_shared", PeerError("it cannot be mapped"))],
)
def test_a_ring_that_cannot_be_mapped_is_refused_and_the_gateway_lives(
    start: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch, owner: ModuleType, mapping: str, error: Exception
) -> None:
    """The kernel's refusal of one engine's memory must not end all others' sessions."""

    def refuse(*_: object) -> None:
        raise error

    bench = start(1)
    witness = bench.peer("witness")
    with monkeypatch.context() as broken:
        broken.setattr(owner, mapping, refuse)
        vast = Peer(bench.options.socket, geometry=GEOMETRY)
        bench.peers.append(vast)
        vast.hello(engine="vast")
        assert vast.receive(wire.Refused).code is wire.RefusedCode.RING
    assert witness.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED


def test_a_client_that_has_said_hello_already_hears_why_it_is_refused(
    start: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a socket with unread packets resets it, and the refusal is lost."""
    bench = start(1)
    bench.peer()
    monkeypatch.setattr(wire, "SESSIONS_MAX", 1)
    valve = Valve()
    with monkeypatch.context() as busy:
        busy.setattr(Card, "tick", valve)
        assert valve.entered.acquire(timeout=WAIT_S_MAX)
        late = Peer(bench.options.socket, geometry=GEOMETRY)
        bench.peers.append(late)
        late.hello(engine="late")
    valve.open.set()
    time.sleep(0.3)  # it reads when the gateway has closed
    assert late.receive(wire.Refused).code is wire.RefusedCode.SESSIONS
