"""The client against a hand-written gateway that answers only what a test lets it: answers once, slots given
back once, reconnects, and every reason why there is no session.
"""

from __future__ import annotations

import os
import queue
import resource
import select
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pytest

from xkv_store import client_connection, embedded, sockets, wire
from xkv_store.attachment import Attachment
from xkv_store.bell import Bell
from xkv_store.client import Client, GetObject, PutObject
from xkv_store.control import ControlPage
from xkv_store.embedded import EmbeddedCard
from xkv_store.errors import UserError
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.ring import Ring, regions
from xkv_store.table import TableWriter
from xkv_store.wire import LoadedObject, LoadStatus, RefusedCode, Role, StoredObject, StoreStatus

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from xkv_store.client_connection import ClientConnection

GEOMETRY = Geometry(8_192)
SLOTS = 64
WAIT_S_MAX = 10.0
CARD = b"c" * 16
T = TypeVar("T")


def wait_until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not check():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


@dataclass
class Engine:
    """What the gateway has of one engine."""

    ring: Ring
    control: ControlPage


@dataclass
class Says:
    """How a fake gateway answers a Hello."""

    refuse: tuple[RefusedCode, str] | None = None
    mute: bool = False
    card_uuid: bytes = CARD
    welcome_changes: dict[str, object] = field(default_factory=dict)
    descriptors: int = 3


class FakeGateway:
    """One life of a gateway: answers Hello, beats, and hands everything else to the test."""

    def __init__(self, path: Path, says: Says | None = None) -> None:
        self.says = says or Says()
        self.listener = sockets.Listener.open(path)
        self.hellos: queue.Queue[wire.Hello] = queue.Queue()
        self.messages: queue.Queue[wire.FromClient] = queue.Queue()
        self.engine: Engine | None = None
        self.taken_over = False
        self.beats = True
        self.reads = True
        self.ended = threading.Event()
        self.connections: list[socket.socket] = []
        self.boot_id = os.urandom(16)
        self.table = TableWriter.create(64, self.says.card_uuid, self.boot_id)
        self.rounds = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self.rounds += 1
            watched = [self.listener.socket, *(self.connections if self.reads else ())]
            poll = select.poll()
            for own in watched:
                poll.register(own, select.POLLIN)
            numbers = {number for number, _ in poll.poll(10)}
            ready = [own for own in watched if own.fileno() in numbers]
            if self.beats and self.engine is not None:
                self.engine.control.beat(time.monotonic_ns())
            for own in ready:
                if own is self.listener.socket:
                    accepted = self.listener.accept()
                    if accepted is not None:
                        self.connections.append(accepted)
                else:
                    self._read(own)

    def _read(self, connection: socket.socket) -> None:
        packet = sockets.receive(connection)
        if packet is None:
            self.connections.remove(connection)
            connection.close()
            self.ended.set()
            return
        message = wire.decode_from_client(packet.data)
        if not isinstance(message, wire.Hello):
            assert not packet.fds
            self.messages.put(message)
            return
        self.hellos.put(message)
        if self.says.refuse is not None:
            sockets.send(connection, wire.encode(wire.Refused(*self.says.refuse)))
        elif not self.says.mute:
            self._welcome(connection, message, packet.fds)
            return
        packet.close()

    def _welcome(self, connection: socket.socket, hello: wire.Hello, fds: tuple[int, ...]) -> None:
        if self.engine is None:
            self.taken_over = bool(fds)
            if fds:
                control = ControlPage.attach(fds[1], ranks=hello.world_size)
                control.set_boot(self.boot_id)
                self.engine = Engine(Ring.adopt(fds[0], slots=SLOTS, slot_bytes=GEOMETRY.slot_bytes), control)
            else:
                ring = Ring.create(SLOTS, GEOMETRY.slot_bytes)
                self.engine = Engine(ring, ControlPage.create(hello.world_size, self.boot_id))
        plan = regions(
            ring_bytes=hello.ring_bytes,
            slot_bytes=GEOMETRY.slot_bytes,
            world_size=hello.world_size,
            load_reserve_bytes=hello.load_reserve_bytes,
        )[hello.rank]
        welcome = wire.Welcome(
            version=wire.PROTOCOL_VERSION,
            session=1,
            boot_id=self.boot_id,
            card_uuid=self.says.card_uuid,
            epoch=self.engine.control.epoch,
            slot_bytes=GEOMETRY.slot_bytes,
            ring_slots=SLOTS,
            store_region=wire.SlotRange(plan.first, plan.store_slots),
            load_region=wire.SlotRange(plan.load_first, plan.load_slots),
            heartbeat_ms=10,
        )
        table_fd = self.table.fd_read_only()
        own = (self.engine.ring.fd, self.engine.control.fd, table_fd)
        changed = msgspec.structs.replace(welcome, **self.says.welcome_changes)
        sockets.send(connection, wire.encode(changed), own[: self.says.descriptors])
        os.close(table_fd)

    def next(self, kind: type[T]) -> T:
        """The next message; it has to be of this kind."""
        message = self.messages.get(timeout=WAIT_S_MAX)
        assert isinstance(message, kind), message
        return message

    def send(self, message: wire.FromGateway) -> None:
        assert sockets.send(self.connections[-1], wire.encode(message))

    def hang_up(self) -> None:
        """The end of all connections, as the kernel does it for a killed gateway."""
        self._stop = True
        self._thread.join()
        self.listener.close()
        for connection in self.connections:
            connection.close()

    def pause_reading(self) -> None:
        """What is sent from here on stays in the socket."""
        self.reads = False
        rounds = self.rounds
        wait_until(lambda: self.rounds > rounds + 1)


@contextmanager
def serving(path: Path, says: Says | None = None) -> Iterator[FakeGateway]:
    """A life of a gateway."""
    gateway = FakeGateway(path, says)
    try:
        yield gateway
    finally:
        gateway.hang_up()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s" / "5557.sock"


@pytest.fixture
def attachment(path: Path) -> Attachment:
    return Attachment(
        socket=path,
        engine_id="engine",
        role=Role.RANK,
        rank=0,
        world_size=1,
        ring_bytes=SLOTS * GEOMETRY.slot_bytes,
        load_reserve_bytes=SLOTS * GEOMETRY.slot_bytes // 4,
        staged_bytes=0,
        fragment_bytes=GEOMETRY.fragment_bytes,
        connect_timeout_ms=3_000,
        heartbeat_timeout_ms=500,
    )


@pytest.fixture
def gateway(path: Path) -> Iterator[FakeGateway]:
    with serving(path) as running:
        yield running


@pytest.fixture
def client(gateway: FakeGateway, attachment: Attachment) -> Iterator[Client]:
    assert gateway.beats
    attached = Client.attach(attachment)
    yield attached
    attached.close()


def key(number: int) -> ObjectKey:
    return ObjectKey(b"n" * 16, 0, number.to_bytes(32, "little"), 0)


def take(client: Client, count: int = 1) -> list[int]:
    slots = client.store_region.take(count)
    assert slots is not None
    return slots


def put_one(client: Client, answers: list[StoredObject]) -> list[int]:
    slots = take(client)
    client.put([PutObject(key(1), 100, slots, 1, 0, replace=False)], answers.append)
    return slots


def get_one(client: Client, answers: list[LoadedObject]) -> tuple[int, list[int]]:
    slots = client.load_region.take(1)
    assert slots is not None
    return client.get([GetObject(key(1), slots, 0)], answers.append), slots


# --- attaching -------------------------------------------------------------------------------------------


def test_attached(client: Client, gateway: FakeGateway) -> None:
    assert client.alive()
    assert client.epoch == 1
    assert client.card_uuid == CARD
    assert (client.store_region.count, client.load_region.count) == (48, 16)
    assert gateway.engine is not None
    client.ring.slot(5)[:2] = b"hi"
    assert bytes(gateway.engine.ring.slot(5)[:2]) == b"hi"
    gateway.table.put(99, 7, 1, 1)
    assert client.table.lookup(99) == (7, 1)
    client.control.deny(0, 1, 2)
    assert gateway.engine.control.denial(0, 0) == (1, 2)
    hello = gateway.hellos.get(timeout=WAIT_S_MAX)
    assert (hello.pid, hello.engine_id, hello.role) == (os.getpid(), "engine", Role.RANK)


def test_one_thread_and_none_before(attachment: Attachment, gateway: FakeGateway) -> None:
    """The engine imports the module in processes that fork: a thread before attach would be lost there."""
    before = threading.active_count()
    idle = Client(attachment)
    assert threading.active_count() == before
    assert not idle.alive()
    attached = Client.attach(attachment)
    assert gateway.beats
    assert threading.active_count() == before + 1
    attached.close()
    attached.close()
    assert threading.active_count() == before


def test_no_gateway(attachment: Attachment) -> None:
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"start one with `xkv gateway run --port 5557`"):
        Client.attach(replace(attachment, connect_timeout_ms=200))
    assert time.monotonic() - begun < 2


def test_a_gateway_that_starts_a_moment_later_is_found(attachment: Attachment, path: Path) -> None:
    """Both are often started by the same script."""
    lives: list[FakeGateway] = []
    timer = threading.Timer(0.3, lambda: lives.append(FakeGateway(path)))
    timer.start()
    client = Client.attach(attachment)
    assert client.alive()
    client.close()
    timer.join()
    lives[0].hang_up()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """More open descriptors than select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4_096, hard), hard))
    fds = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while fds[-1] <= 1_100:
            fds.append(os.dup(fds[0]))
        yield
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_an_engine_of_many_descriptors_finds_its_gateway_again(path: Path, attachment: Attachment) -> None:
    """Otherwise the client's thread dies at the first pause, and every lookup misses for good."""
    with serving(path):
        client = Client.attach(attachment)
    try:
        wait_until(lambda: not client.alive())
        time.sleep(0.1)  # some pauses
        with serving(path):
            wait_until(client.alive)
    finally:
        client.close()


def test_whatever_fails_in_the_thread_it_goes_on(
    path: Path, attachment: Attachment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise one surprise makes every lookup of this engine a miss until it is restarted."""
    failures = iter([OSError("first"), ValueError("second")])

    def pause(_bell: Bell, _pause_ms: float) -> None:
        failure = next(failures, None)
        if failure is not None:
            raise failure

    with serving(path):
        client = Client.attach(attachment)
    try:
        monkeypatch.setattr(Bell, "wait", pause)
        wait_until(lambda: "second" in caplog.text)
        with serving(path):
            wait_until(client.alive)
    finally:
        client.close()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (RefusedCode.VERSION, "install the same xkv on both sides"),
        (RefusedCode.FRAGMENT_BYTES, "xkv.fragment_bytes=7168 does not fit.*the card has 1"),
        (RefusedCode.PEER, "--allow-uid"),
        (RefusedCode.RING, "xkv.ring_bytes"),
        (RefusedCode.PROTOCOL, "does not understand"),
    ],
)
def test_refusals_that_waiting_does_not_mend(attachment: Attachment, path: Path, code: RefusedCode, text: str) -> None:
    with serving(path, Says(refuse=(code, "the card has 1"))) as gateway:
        begun = time.monotonic()
        with pytest.raises(UserError, match=text):
            Client.attach(attachment)
        assert time.monotonic() - begun < 1
        assert gateway.hellos.qsize() == 1


def test_a_place_that_is_taken_may_become_free(attachment: Attachment, path: Path) -> None:
    """An engine that comes back within a second of its death finds its own old session still there."""
    with serving(path, Says(refuse=(RefusedCode.RANK_TAKEN, "x"))) as gateway:
        threading.Timer(0.3, lambda: setattr(gateway.says, "refuse", None)).start()
        Client.attach(attachment).close()
        assert gateway.hellos.qsize() > 1
        gateway.says.refuse = (RefusedCode.RANK_TAKEN, "pid 7")
        with pytest.raises(UserError, match=r"rank 0 of engine 'engine' is attached.*pid 7"):
            Client.attach(replace(attachment, connect_timeout_ms=300))


def test_a_gateway_that_says_nothing(attachment: Attachment, path: Path) -> None:
    """A stopped process, or a foreign listener."""
    with serving(path, Says(mute=True)), pytest.raises(UserError, match=rf"pid {os.getpid()}\) does not answer"):
        Client.attach(replace(attachment, connect_timeout_ms=200))


def test_another_users_gateway(attachment: Attachment, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could serve any bytes as KV."""
    stranger = sockets.Peer(1, os.geteuid() + 5, 0)
    monkeypatch.setattr(sockets, "peer_credentials", lambda _: stranger)
    with pytest.raises(UserError, match=f"runs as uid {stranger.uid}"):
        Client.attach(attachment)
    Client.attach(replace(attachment, gateway_uids=frozenset({stranger.uid}))).close()
    assert gateway.beats


@pytest.mark.parametrize(
    "says",
    [
        Says(welcome_changes={"version": wire.PROTOCOL_VERSION + 1}),
        Says(welcome_changes={"slot_bytes": 4_096}),
        Says(welcome_changes={"ring_slots": SLOTS + 1}),
        Says(welcome_changes={"card_uuid": b"x" * 16}),
        Says(welcome_changes={"load_region": wire.SlotRange(SLOTS, 1)}),
        Says(welcome_changes={"load_region": wire.SlotRange(0, 4)}),
        Says(descriptors=2),
        Says(descriptors=0),
    ],
)
def test_a_welcome_that_is_not_true(attachment: Attachment, path: Path, says: Says) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  only the number counts
    with serving(path, says), pytest.raises(UserError, match="is not usable"):
        Client.attach(replace(attachment, connect_timeout_ms=150))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 3)  # noqa: PTH208  ring, page, table


def test_the_engine_id_is_bounded(attachment: Attachment) -> None:
    for engine_id in ("", "x" * 257):
        with pytest.raises(UserError, match="engine_id"):
            replace(attachment, engine_id=engine_id)


# --- puts and gets ---------------------------------------------------------------------------------------


def test_put_is_answered_once_and_gives_its_slots_back(client: Client, gateway: FakeGateway) -> None:
    answers: list[StoredObject] = []
    slots = take(client, 3)
    objects = [
        PutObject(key(1), 2 * GEOMETRY.fragment_bytes, slots[:2], 7, 3, replace=True),
        PutObject(key(2), 5, slots[2:], 7, 4, replace=False),
    ]
    client.put(objects, answers.append)
    message = gateway.next(wire.Put)
    assert message.objects[0] == wire.PutObject(
        key(1).encode(), 2 * GEOMETRY.fragment_bytes, tuple(slots[:2]), 7, 3, True
    )
    assert client.store_region.free == 45
    gateway.send(wire.Stored(message.put, (StoredObject(1, StoreStatus.CONFIRMED),)))
    wait_until(lambda: answers)
    assert client.store_region.free == 46
    gateway.send(wire.Stored(message.put, (StoredObject(0, StoreStatus.HELD),)))
    wait_until(lambda: len(answers) == 2)
    assert answers == [StoredObject(1, StoreStatus.CONFIRMED), StoredObject(0, StoreStatus.HELD)]
    assert client.store_region.free == 48


def test_get_and_cancel(client: Client, gateway: FakeGateway) -> None:
    answers: list[LoadedObject] = []
    get, slots = get_one(client, answers)
    message = gateway.next(wire.Get)
    assert message.objects == (wire.GetObject(key(1).encode(), tuple(slots), 0),)
    client.cancel(get)
    assert gateway.next(wire.Cancel).get == message.get
    assert answers == [], "the gateway may still be reading into the slots"
    gateway.send(wire.Loaded(message.get, (LoadedObject(0, LoadStatus.CANCELLED, 0, 0),)))
    wait_until(lambda: answers)
    assert client.load_region.free == 15, "the caller gives them back when it has copied"
    client.cancel(get)
    client.cancel(12_345)
    assert gateway.messages.empty()


def test_a_batch_that_does_not_fit_one_message(client: Client, gateway: FakeGateway) -> None:
    """Indexes are those of the caller's batch, whatever it was cut into; one cancel reaches all of it."""
    answers: list[LoadedObject] = []
    get = client.get([GetObject(key(number), [48], 0) for number in range(2_500)], answers.append)
    parts = [gateway.next(wire.Get)]
    while sum(len(part.objects) for part in parts) < 2_500:
        parts.append(gateway.next(wire.Get))
    assert len(parts) >= 2
    client.cancel(get)
    assert [gateway.next(wire.Cancel).get for _ in parts] == [part.get for part in parts]
    for part in reversed(parts):
        found = [LoadedObject(index, LoadStatus.MISS, 0, 0) for index in range(len(part.objects))]
        for message in wire.split_loaded(part.get, found):
            gateway.send(message)
    wait_until(lambda: len(answers) == 2_500)
    assert sorted(answer.index for answer in answers) == list(range(2_500))


def test_a_callback_that_fails_does_not_end_the_session(
    client: Client, gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(answer: StoredObject) -> None:
        raise RuntimeError(answer)

    client.put([PutObject(key(1), 1, take(client), 1, 0, replace=False)], fail)
    gateway.send(wire.Stored(gateway.next(wire.Put).put, (StoredObject(0, StoreStatus.CONFIRMED),)))
    wait_until(lambda: client.store_region.free == 48)
    answers: list[StoredObject] = []
    put_one(client, answers)
    gateway.send(wire.Stored(gateway.next(wire.Put).put, (StoredObject(0, StoreStatus.CONFIRMED),)))
    wait_until(lambda: answers)
    assert "a callback of a put or get failed" in caplog.text


def test_a_gateway_that_does_not_read_stalls_nobody(
    client: Client, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket and the outbox fill up; from then on puts are shed and gets fail, at once."""
    monkeypatch.setattr(client_connection, "OUTBOX_MESSAGES_MAX", 4)
    gateway.pause_reading()
    stored: list[StoredObject] = []
    loaded: list[LoadedObject] = []
    begun = time.monotonic()
    for _ in range(300):  # of some 60 KB each
        client.get([GetObject(key(number), [48], 0) for number in range(900)], loaded.append)
        if loaded:
            break
    assert {answer.status for answer in loaded} == {LoadStatus.FAILED}
    assert len(loaded) == 900
    put_one(client, stored)
    assert stored == [StoredObject(0, StoreStatus.SHED)]
    assert client.store_region.free == 48
    client.touch([1])
    assert time.monotonic() - begun < 5
    gateway.reads = True
    messages = [gateway.messages.get(timeout=WAIT_S_MAX)]
    while not isinstance(messages[-1], wire.PublishNamespace):
        client.publish_namespace(bytes(16), "{}")
        messages.append(gateway.messages.get(timeout=WAIT_S_MAX))
    gets = [message.get for message in messages if isinstance(message, wire.Get)]
    assert gets == sorted(gets), "in order, none lost"
    assert not any(isinstance(message, wire.Touch) for message in messages), "dropped, not kept"


# --- the connection's end --------------------------------------------------------------------------------


def test_the_end_answers_everything_and_a_new_life_takes_over(
    path: Path, attachment: Attachment, caplog: pytest.LogCaptureFixture
) -> None:
    stored: list[StoredObject] = []
    loaded: list[LoadedObject] = []
    first = FakeGateway(path)
    client = Client.attach(attachment)
    client.publish_namespace(b"n" * 16, "{}")
    put_one(client, stored)
    _, slots = get_one(client, loaded)
    first.next(wire.PublishNamespace)
    first.next(wire.Put)
    number = first.next(wire.Get).get
    ring, control, table = client.ring, client.control, client.table
    client.ring.slot(3)[:4] = b"kept"
    first.hang_up()
    wait_until(lambda: stored and loaded)
    assert stored == [StoredObject(0, StoreStatus.SHED)]
    assert loaded == [LoadedObject(0, LoadStatus.FAILED, 0, 0)]
    assert client.store_region.free == 48
    client.load_region.give(slots)
    assert not client.alive()
    put_one(client, stored)
    get_one(client, loaded)
    assert [answer.status for answer in stored] == [StoreStatus.SHED] * 2
    assert [answer.status for answer in loaded] == [LoadStatus.FAILED] * 2

    with serving(path) as second:
        wait_until(client.alive)
        assert client.epoch == 2
        assert second.taken_over
        assert second.engine is not None
        assert bytes(second.engine.ring.slot(3)[:4]) == b"kept", "nothing is pinned anew"
        assert client.ring is ring
        assert client.control is control
        assert client.control.epoch == 2
        assert client.table is not table
        assert table.lookup(5) is None, "the old one can still be asked by whoever is about to"
        assert second.next(wire.PublishNamespace).namespace == b"n" * 16
        put_one(client, stored)
        message = second.next(wire.Put)
        assert message.put > number, "numbers are never used again"
        second.send(wire.Stored(message.put, (StoredObject(0, StoreStatus.CONFIRMED),)))
        wait_until(lambda: len(stored) == 3)
        assert stored[-1].status is StoreStatus.CONFIRMED
        client.close()
    assert caplog.text.count("is gone") == 1


def test_an_answer_of_an_earlier_life_is_nobodys(path: Path, attachment: Attachment) -> None:
    """A gateway that answers what was not asked of it is confused: no session with it, nothing delivered."""
    stored: list[StoredObject] = []
    first = FakeGateway(path)
    client = Client.attach(attachment)
    put_one(client, stored)
    old = first.next(wire.Put).put
    first.hang_up()
    wait_until(lambda: stored)
    with serving(path) as second:
        wait_until(client.alive)
        second.says.mute = True
        second.send(wire.Stored(old, (StoredObject(0, StoreStatus.CONFIRMED),)))
        wait_until(lambda: not client.alive())
        assert len(stored) == 1
        client.close()


def test_slots_stay_the_gateways_until_it_closes(client: Client, gateway: FakeGateway) -> None:
    """A gateway that breaks the protocol may still be reading into the ring: its slots are not reused."""
    loaded: list[LoadedObject] = []
    get_one(client, loaded)
    gateway.next(wire.Get)
    gateway.pause_reading()
    gateway.says.mute = True
    gateway.send(wire.Stored(999, ()))
    wait_until(lambda: not client.alive())
    time.sleep(0.1)
    assert loaded == []
    stored: list[StoredObject] = []
    put_one(client, stored)
    assert stored[0].status is StoreStatus.SHED
    gateway.reads = True
    assert gateway.ended.wait(WAIT_S_MAX), "the client has hung up"
    wait_until(lambda: loaded)
    assert loaded[0].status is LoadStatus.FAILED


def test_whoever_sends_while_a_refusal_comes_in_is_told_that_there_is_no_session(
    client: Client, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[StoredObject] = []
    loaded: list[LoadedObject] = []
    get, _ = get_one(client, loaded)
    real = client._hang_up
    sent = threading.Event()

    def hang_up(connection: ClientConnection) -> None:
        if not sent.is_set():  # another thread, before this one goes on
            put_one(client, stored)
            client.cancel(get)
            sent.set()
        real(connection)

    monkeypatch.setattr(client, "_hang_up", hang_up)
    gateway.next(wire.Get)
    gateway.says.mute = True
    gateway.send(wire.Refused(RefusedCode.PROTOCOL, "x"))
    assert sent.wait(WAIT_S_MAX), "neither of the two raised anything"
    wait_until(lambda: stored and loaded)
    assert (stored[0].status, loaded[0].status) == (StoreStatus.SHED, LoadStatus.FAILED)
    assert client.store_region.free == client.store_region.count


def test_what_a_message_names_twice_is_answered_once_all_the_same(client: Client, gateway: FakeGateway) -> None:
    """The message counts for nothing; the end of its connection does."""
    stored: list[StoredObject] = []
    put_one(client, stored)
    put = gateway.next(wire.Put).put
    gateway.says.mute = True
    gateway.send(wire.Stored(put, (StoredObject(0, StoreStatus.CONFIRMED), StoredObject(0, StoreStatus.CONFIRMED))))
    wait_until(lambda: stored)
    assert [answer.status for answer in stored] == [StoreStatus.SHED]
    assert client.store_region.free == client.store_region.count


def test_another_card_is_not_attached_to(path: Path, attachment: Attachment, caplog: pytest.LogCaptureFixture) -> None:
    """The engine's lookups, denials and generations are the first card's."""
    with serving(path):
        client = Client.attach(attachment)
    with serving(path, Says(card_uuid=b"d" * 16)) as other:
        for _ in range(3):
            other.hellos.get(timeout=WAIT_S_MAX)
        assert not client.alive()
        assert client.epoch == 1
    with serving(path):
        wait_until(client.alive)
    client.close()
    assert caplog.text.count("another card") == 1


def test_a_gateway_that_did_not_take_the_ring_over(path: Path, attachment: Attachment) -> None:
    """Its answers would be about slots of a ring that nobody here sees."""
    with serving(path):
        client = Client.attach(attachment)
    with serving(path, Says(mute=True)) as other:
        other.engine = Engine(Ring.create(SLOTS, GEOMETRY.slot_bytes), ControlPage.create(1, other.boot_id))
        other.says.mute = False
        for _ in range(2):
            other.hellos.get(timeout=WAIT_S_MAX)
        assert not client.alive()
    client.close()


def test_a_refusal_after_the_first_attach_is_not_the_end(path: Path, attachment: Attachment) -> None:
    with serving(path):
        client = Client.attach(attachment)
    with serving(path, Says(refuse=(RefusedCode.VERSION, "x"))) as second:
        for _ in range(2):
            second.hellos.get(timeout=WAIT_S_MAX)
        second.says.refuse = None
        wait_until(client.alive)
    client.close()


def test_close_answers_what_is_outstanding(client: Client, gateway: FakeGateway) -> None:
    stored: list[StoredObject] = []
    loaded: list[LoadedObject] = []
    put_one(client, stored)
    get_one(client, loaded)
    view = client.ring.slot(0)
    client.close()
    assert [stored[0].status, loaded[0].status] == [StoreStatus.SHED, LoadStatus.FAILED]
    view[0] = 1
    assert gateway.ended.wait(WAIT_S_MAX)
    put_one(client, stored)
    assert len(stored) == 2
    client.touch([1])
    client.cancel(1)


# --- alive -----------------------------------------------------------------------------------------------


def test_a_stopped_gateway_is_not_alive(client: Client, gateway: FakeGateway) -> None:
    gateway.beats = False
    wait_until(lambda: not client.alive())
    gateway.beats = True
    wait_until(client.alive)
    assert gateway.engine is not None
    gateway.engine.control.set_draining(True)
    assert not client.alive(), "its gets would be answered busy, and a hit could not be loaded"


def test_alive_is_cheap(client: Client) -> None:
    """Called once per batch of lookups on vLLM's scheduling thread; a message would be 100 times as much."""
    begun = time.perf_counter()
    for _ in range(1_000):
        client.alive()
    assert time.perf_counter() - begun < 0.1


# --- the scheduler's -------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(gateway: FakeGateway, attachment: Attachment) -> Iterator[Client]:
    assert gateway.beats
    attached = Client.attach(replace(attachment, role=Role.SCHEDULER, world_size=2))
    yield attached
    attached.close()


def test_namespaces_are_awaited_from_all_ranks(scheduler: Client, gateway: FakeGateway) -> None:
    ranks = [wire.RankNamespace(rank, bytes([rank]) * 16, f"d{rank}") for rank in range(2)]

    def publish() -> None:
        for published in ((), (ranks[1],), (ranks[0],)):
            gateway.send(wire.Namespaces(gateway.next(wire.AskNamespaces).ask, published))

    thread = threading.Thread(target=publish)
    thread.start()
    assert scheduler.await_namespaces(2, 5.0) == {0: (bytes(16), "d0"), 1: (b"\1" * 16, "d1")}
    thread.join()


def test_missing_ranks_are_named(scheduler: Client, gateway: FakeGateway) -> None:
    with pytest.raises(UserError, match=r"no namespace from rank 0, 1 of 2 within 0\.2 s"):
        scheduler.await_namespaces(2, 0.2)
    last = gateway.next(wire.AskNamespaces)
    answer = wire.Namespaces(last.ask, (wire.RankNamespace(1, bytes(16), ""),))
    timer = threading.Timer(0.05, gateway.send, (answer,))
    timer.start()
    with pytest.raises(UserError, match="no namespace from rank 0 of 2"):
        scheduler.await_namespaces(2, 0.2)


def test_touch(scheduler: Client, gateway: FakeGateway) -> None:
    tags = range(2**63, 2**63 + 10_000)
    scheduler.touch(tags)
    first, second = gateway.next(wire.Touch), gateway.next(wire.Touch)
    assert [*first.tags, *second.tags] == list(tags)


def test_a_descriptor_that_no_message_holds(client: Client) -> None:
    with pytest.raises(UserError, match="60000"):
        client.publish_namespace(bytes(16), "é" * 30_001)


# --- embedded --------------------------------------------------------------------------------------------


def test_an_embedded_gateway_is_started_once_in_a_while(
    attachment: Attachment, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank asks for it, and asks again: not every time a process."""
    card = EmbeddedCard(folder=tmp_path / "card")
    starts: list[tuple[EmbeddedCard, Path]] = []
    lives: list[FakeGateway] = []

    def start(card: EmbeddedCard, socket_path: Path) -> bool:
        starts.append((card, socket_path))
        if len(starts) == 2:
            lives.append(FakeGateway(socket_path))
        return True

    card.folder.mkdir()
    monkeypatch.setattr(embedded, "start_detached", start)
    monkeypatch.setattr(embedded, "START_S_MIN", 0.4)
    begun = time.monotonic()
    client = Client.attach(replace(attachment, embedded=card))
    assert time.monotonic() - begun >= 0.4
    assert starts == [(card, path)] * 2
    client.close()
    lives[0].hang_up()


def test_an_embedded_gateway_that_does_not_come_up(
    attachment: Attachment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote last is what the user needs to read."""
    card = EmbeddedCard(folder=tmp_path)
    (tmp_path / "gateway.log").write_text("first\nthe card is of format 9; use another\n\n")
    monkeypatch.setattr(embedded, "start_detached", lambda *_: True)
    with pytest.raises(UserError, match="ends with: the card is of format 9; use another"):
        Client.attach(replace(attachment, embedded=card, connect_timeout_ms=100))
    monkeypatch.undo()
    (tmp_path / "file").touch()
    bad = replace(attachment, embedded=EmbeddedCard(folder=tmp_path / "file" / "card"))
    with pytest.raises(UserError, match=r"cannot be made .*xkv\.path"):
        Client.attach(bad)
