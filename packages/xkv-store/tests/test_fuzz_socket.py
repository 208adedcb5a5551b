"""Any packets with any descriptors on the control socket: refused or answered, and nobody else notices.

One gateway in a process of its own serves all examples of this module. After each a healthy client puts and gets an
object; in the end the gateway has no more descriptors and memory than before.
"""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xkv_store import wire
from xkv_store.control import page_bytes
from xkv_store.errors import PeerError
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.ring import RingUse
from xkv_store.testing import descriptors
from xkv_store.testing.effort import chances
from xkv_store.testing.peer import Peer
from xkv_store.testing.processes import PORT, GatewayProcess, running_gateway
from xkv_store.wire import LoadStatus, Role, StoreStatus
from xkv_store.wire_tools import ListNamespaces, ListObjects, Purge, PurgeObject

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOT = 16_384
GEOMETRY = Geometry(SLOT)
RING_SLOTS = 16
CONTENT = b"healthy" * 5_000
RSS_GROWTH_BYTES_MAX = 24 << 20  # of thousands of packets: allocators and logs keep some
EXAMPLES_BEFORE_MEASURING = 40
SETTLED_S_MAX = 5.0
ANSWER_S_MAX = 10.0
ANSWERS_S = 0.005  # for puts and gets that are under way; who does not wait leaves them behind
FLOOD_RANKS = 120  # 7 MB for each question: sixteen, which is what one round takes in, are 115 MB
MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

Packet: TypeAlias = tuple[bytes, tuple[str, ...]]  # with kinds of descriptors


def key_of(number: int) -> bytes:
    return ObjectKey(b"f" * 16, 0, number.to_bytes(32, "little"), 0).encode()


class House:
    """The gateway, its healthy client, and the hostile ones."""

    def __init__(self, gateway: GatewayProcess, path: Path) -> None:
        self.gateway = gateway
        self.path = path
        self.healthy = Peer(path, geometry=GEOMETRY)
        self.healthy.attach(engine="healthy")
        self.number = 0
        self.examples = 0
        self.rss_bytes = 0
        self.heard: Counter[str] = Counter()  # what the hostile were told
        self.check()
        self.fds = self.open_fds()

    def check(self) -> None:
        """Everybody else is served as ever."""
        assert self.gateway.alive
        self.number += 1
        key = key_of(self.number % 7)
        deadline = time.monotonic() + ANSWER_S_MAX
        while (heard := self.healthy.put(CONTENT, key, replace=True)) is StoreStatus.SHED:
            # What was replaced, or put by somebody hostile, leaves limbo a tick later than it could.
            assert time.monotonic() < deadline, "there is never room"
            time.sleep(0.005)
        assert heard is StoreStatus.CONFIRMED
        assert self.healthy.get(len(CONTENT), key) == (LoadStatus.OK, CONTENT)

    def example_is_over(self) -> None:
        self.check()
        self.examples += 1
        if self.examples == EXAMPLES_BEFORE_MEASURING:
            self.rss_bytes = self.rss()

    def open_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.gateway.pid}/fd"))  # noqa: PTH208

    def rss(self, name: str = "RssAnon") -> int:
        status = Path(f"/proc/{self.gateway.pid}/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1_024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.gateway.pid}/clear_refs").write_text("5", encoding="ascii")

    def settled(self) -> None:
        """What the hostile held is given back: descriptors at once, memory but for what an allocator keeps."""
        deadline = time.monotonic() + SETTLED_S_MAX
        while self.open_fds() > self.fds and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.open_fds() <= self.fds
        if self.rss_bytes:
            assert self.rss() - self.rss_bytes < RSS_GROWTH_BYTES_MAX


@pytest.fixture(scope="module")
def shared_house() -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="xkv-fuzz-", dir=MEMORY_FOLDER) as name:
        folder = Path(name)
        with running_gateway(folder, capacity="8MiB", slot_bytes=SLOT, options=["--grace-ms", "0"]) as gateway:
            house = House(gateway, folder / "sockets" / f"{PORT}.sock")
            yield house
            house.healthy.close()


@pytest.fixture
def house(shared_house: House) -> Iterator[House]:
    yield shared_house
    shared_house.settled()
    gc.collect()


class Hostile:
    """A connection that says anything."""

    def __init__(self, house: House) -> None:
        self.peer = Peer(house.path, geometry=GEOMETRY)
        self.heard = house.heard
        self.refused: wire.Refused | None = None
        self.ended = False

    def say(self, packet: Packet) -> None:
        data, kinds = packet
        fds = [descriptors.KINDS[kind](size_of(number), b"") for number, kind in enumerate(kinds)]
        try:
            # It ended, or the socket is full: the gateway refused it already and reads no more.
            with suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
                if fds:
                    socket.send_fds(self.peer.socket, [data], fds)
                else:
                    self.peer.socket.send(data)
        finally:
            for fd in fds:
                os.close(fd)

    def hear(self, wait_s: float, until: type[wire.FromGateway] | None = None) -> None:
        """Take in what there is, up to a message of that kind; every message must be one of a gateway's."""
        while not self.ended:
            try:
                message = self.peer.next(wait_s)
            except TimeoutError:
                assert until is None, f"no {until}"
                return
            for fd in self.peer.fds:
                os.close(fd)
            self.peer.fds = ()
            self.heard[type(message).__name__] += 1
            if message is None:
                self.ended = True
            elif isinstance(message, wire.Refused):
                self.refused = message
            if until is not None and isinstance(message, until):
                return

    def await_end(self) -> None:
        self.hear(ANSWER_S_MAX)
        assert self.ended, "the session was not closed"


def size_of(number: int) -> int:
    return (RING_SLOTS * SLOT, page_bytes(1))[number % 2]


# --- what is said -------------------------------------------------------------------------------------------

u32s = st.one_of(st.integers(0, 40), st.sampled_from([2**31, 2**32 - 1]))
u64s = st.one_of(st.integers(0, 40), st.sampled_from([2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]))
keys = st.one_of(st.integers(100, 103).map(key_of), st.binary(min_size=1, max_size=55))
slot_lists = st.lists(st.one_of(st.integers(0, 15), u32s), min_size=1, max_size=4).map(tuple)
descriptor_texts = st.one_of(
    st.just('{"a": 1}'), st.text(max_size=50), st.just("[" * 5_000), st.just("1" * 5_000), st.just('{"a":"\\ud800"}')
)
hellos = st.builds(
    wire.Hello,
    version=st.sampled_from([wire.PROTOCOL_VERSION] * 8 + [0, 1, 2**32 - 1]),
    engine_id=st.sampled_from(["healthy", "x", "y", "", "\n\x1b[31m", "z" * 256]),
    role=st.sampled_from([Role.RANK, Role.RANK, Role.SCHEDULER, Role.TOOL]),
    rank=st.one_of(st.just(0), u32s),
    world_size=st.one_of(st.just(1), st.just(1), u32s, st.just(wire.RANKS_MAX)),
    ring_bytes=st.one_of(st.just(RING_SLOTS * SLOT), st.just(RING_SLOTS * SLOT), u64s),
    load_reserve_bytes=st.one_of(st.just(4 * SLOT), u64s),
    staged_bytes=st.one_of(st.none(), st.just(0), st.just(2 * SLOT), u64s),
    fragment_bytes=st.one_of(*[st.just(SLOT - 1_024)] * 5, u32s),
    pid=u32s,
    ring_use=st.sampled_from([None, *RingUse]),
)
good_hellos = st.builds(
    wire.Hello,
    version=st.just(wire.PROTOCOL_VERSION),
    engine_id=st.sampled_from(["x", "y"]),
    role=st.sampled_from([Role.RANK, Role.RANK, Role.SCHEDULER, Role.TOOL]),
    rank=st.just(0),
    world_size=st.just(1),
    ring_bytes=st.just(RING_SLOTS * SLOT),
    load_reserve_bytes=st.just(4 * SLOT),
    staged_bytes=st.sampled_from([None, 0]),
    fragment_bytes=st.just(SLOT - 1_024),
    pid=st.just(1),
    ring_use=st.sampled_from(RingUse),
).filter(lambda hello: hello.role is Role.SCHEDULER or hello.staged_bytes is not None)
put_objects = st.builds(
    wire.PutObject,
    keys,
    st.one_of(st.integers(0, 60_000), u64s),
    slot_lists,
    u64s,
    u32s,
    st.booleans(),
)
get_objects = st.builds(wire.GetObject, keys, slot_lists, u32s)
lease_objects = st.builds(wire.LeaseObject, keys, u32s, st.integers(1, wire.SLOTS_PER_OBJECT_MAX))
purge_objects = st.builds(PurgeObject, keys, st.one_of(st.integers(1, 200), u64s))
namespaces = st.one_of(st.sampled_from([bytes(16), b"f" * 16]), st.binary(min_size=16, max_size=16))
key_parts = st.one_of(st.sampled_from([b"", b"f" * 16, key_of(101)]), st.binary(max_size=55))
# No Stop: a tool may say it, and the gateway ends.
messages = st.one_of(
    hellos,
    st.builds(wire.PublishNamespace, st.binary(min_size=16, max_size=16), descriptor_texts),
    st.builds(wire.AskNamespaces, u64s),
    st.builds(wire.Put, u64s, st.lists(put_objects, min_size=1, max_size=3).map(tuple)),
    st.builds(wire.Put, u64s, st.lists(put_objects, min_size=1, max_size=3).map(tuple)),
    st.builds(wire.Get, u64s, st.lists(get_objects, min_size=1, max_size=3).map(tuple)),
    st.builds(wire.Get, u64s, st.lists(get_objects, min_size=1, max_size=3).map(tuple)),
    st.builds(wire.Lease, u64s, st.lists(lease_objects, min_size=1, max_size=3).map(tuple)),
    st.builds(wire.Release, u64s, st.lists(u32s, min_size=1, max_size=3).map(tuple)),
    st.builds(wire.Touch, st.lists(u64s, max_size=5).map(tuple)),
    st.builds(wire.Cancel, u64s),
    st.builds(wire.AskStatus, u64s),
    st.builds(ListNamespaces, u64s, st.binary(max_size=16)),
    st.builds(ListObjects, u64s, key_parts, st.one_of(key_parts, st.binary(max_size=56))),
    st.builds(Purge, u64s, st.lists(purge_objects, max_size=3).map(tuple), st.lists(namespaces, max_size=3).map(tuple)),
)
anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        u64s,
        st.integers(-(2**63), 0),
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=60),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
TAGS = [
    message.__name__
    for message in (
        wire.Hello,
        wire.Put,
        wire.Get,
        wire.Lease,
        wire.Release,
        wire.Touch,
        wire.Cancel,
        ListNamespaces,
        ListObjects,
        Purge,
        wire.Welcome,
        wire.Stored,
    )
]


def pack(content: Any) -> bytes:
    return wire.MAGIC + msgspec.msgpack.encode(content)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A proper message with other bytes, other fields, cut or continued."""
    packet = wire.encode(draw(messages))
    how = draw(st.sampled_from(["bytes", "field", "cut", "more", "twice", "vast"]))
    if how == "bytes":
        changed = bytearray(packet)
        for at, flip in draw(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 255)), min_size=1, max_size=4)):
            changed[at % len(changed)] ^= flip
        return bytes(changed)
    if how == "field":
        content = msgspec.msgpack.decode(packet[4:])
        content[draw(st.integers(1, 12)) % len(content)] = draw(anything)
        return pack(content)
    if how == "cut":
        return packet[: draw(st.integers(1, len(packet)))]
    if how == "more":
        return packet + draw(st.binary(min_size=1, max_size=20))
    if how == "twice":
        return packet + packet
    return packet + bytes(draw(st.sampled_from([65_532 - len(packet), 65_537 - len(packet), 100_000])))


improper = st.one_of(
    mutations(),
    mutations(),
    st.binary(min_size=1, max_size=100),
    st.binary(max_size=60).map(lambda data: wire.MAGIC + data),
    st.builds(lambda tag, fields: pack([tag, *fields]), st.sampled_from(TAGS), st.lists(anything, max_size=11)),
)
packets = st.one_of(messages.map(wire.encode), improper, st.just(b""))


def is_stop(data: bytes) -> bool:
    """Whether a tool would end the gateway with it, as it may."""
    with suppress(PeerError):
        return isinstance(wire.decode_from_client(data), wire.Stop)
    return False


def hello_of(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "version": wire.PROTOCOL_VERSION, "engine_id": "x", "role": Role.RANK, "rank": 0, "world_size": 1,
        "ring_bytes": RING_SLOTS * SLOT, "load_reserve_bytes": 4 * SLOT, "staged_bytes": 0,
        "fragment_bytes": SLOT - 1_024, "pid": 1,
    }  # fmt: skip
    return wire.encode(wire.Hello(**(fields | changes)))


kinds = st.sampled_from(sorted(descriptors.KINDS))
no_descriptors: st.SearchStrategy[tuple[str, ...]] = st.just(())
beside = st.one_of(no_descriptors, no_descriptors, no_descriptors, st.lists(kinds, max_size=6).map(tuple))
said = st.tuples(packets.filter(lambda data: not is_stop(data)), beside)
attempts = st.tuples(hellos.map(wire.encode), st.one_of(no_descriptors, st.tuples(kinds, kinds), beside))
STORE_SLOTS, LOAD_SLOTS = 12, 4  # what a rank of these Hellos is given


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Packet, list[Packet]]:
    """A rank that says proper things for a while, and improper ones in between."""
    first = (hello_of(engine_id=draw(st.sampled_from(["x", "y"]))), ())
    then: list[Packet] = []
    stores, loads = iter(range(STORE_SLOTS)), iter(range(STORE_SLOTS, STORE_SLOTS + LOAD_SLOTS))
    for number in range(draw(st.integers(1, 5))):
        key = key_of(draw(st.integers(100, 103)))
        what = draw(st.sampled_from(["put", "put", "get", "get", "cancel", "publish", "anything"]))
        message: wire.FromClient | None = None
        if what == "put":
            fragments = draw(st.integers(1, 2))
            slots = tuple(next(stores) for _ in range(fragments))
            length = fragments * GEOMETRY.fragment_bytes - draw(st.integers(0, 100))
            message = wire.Put(
                number, (wire.PutObject(key, length, slots, draw(u64s), draw(u32s), draw(st.booleans())),)
            )
        elif what == "get":
            slot = next(loads, None)
            if slot is not None:
                message = wire.Get(
                    number, (wire.GetObject(key, (slot,), draw(st.sampled_from([0, 0, 0, 1, 2**32 - 1]))),)
                )
        elif what == "cancel":
            message = wire.Cancel(number - 1)
        elif what == "publish":
            message = wire.PublishNamespace(bytes(16), "{}")
        then.append((wire.encode(message), ()) if message is not None else draw(said))
    return first, then


@st.composite
def tools(draw: st.DrawFn) -> tuple[Packet, list[Packet]]:
    """A tool that looks at the card and purges what the hostile have put; and says anything in between."""
    asks: list[st.SearchStrategy[wire.FromClient]] = [
        st.builds(ListNamespaces, u64s, st.sampled_from([b"", b"f" * 16])),
        st.builds(ListObjects, u64s, key_parts, st.sampled_from([b"", key_of(102), key_of(103) + b"\0"])),
        st.builds(
            Purge, u64s, st.lists(purge_objects, max_size=64).map(tuple), st.lists(namespaces, max_size=64).map(tuple)
        ),
    ]
    then = draw(st.lists(st.one_of(*(ask.map(wire.encode) for ask in asks)), min_size=1, max_size=6))
    between: list[Packet] = draw(st.lists(said, max_size=1))
    return (hello_of(role=Role.TOOL, engine_id="t"), ()), [*((packet, ()) for packet in then), *between]


openings = st.tuples(
    st.one_of(attempts, said, st.tuples(good_hellos.map(wire.encode), no_descriptors)), st.lists(said, max_size=5)
)
a_page_that_cannot_be_read = ("sealed", "write-only")


@chances(200)
@example(said_all=((hello_of(), a_page_that_cannot_be_read), []), leaves=True)
@example(said_all=((hello_of(ring_bytes=2**63), ()), []), leaves=True)
@example(said_all=((hello_of(ring_bytes=2**24 * SLOT, world_size=4_096), ()), []), leaves=False)
@given(said_all=st.one_of(conversations(), conversations(), tools(), openings), leaves=st.booleans())
def test_any_packets_in_any_order(house: House, said_all: tuple[Packet, list[Packet]], leaves: bool) -> None:
    first, then = said_all
    hostile = Hostile(house)
    try:
        hostile.say(first)
        hostile.hear(ANSWER_S_MAX, wire.Welcome)
        for packet in then:
            hostile.say(packet)
        hostile.say((wire.encode(wire.AskStatus(2**64 - 1)), ()))
        hostile.hear(ANSWER_S_MAX, wire.Status)
        hostile.hear(ANSWERS_S)
        if leaves and not hostile.ended:
            hostile.peer.socket.shutdown(socket.SHUT_WR)  # what is still answered is of no use to anybody
            hostile.await_end()
    finally:
        hostile.peer.close()
    house.example_is_over()


def test_the_packets_came_far(house: House) -> None:
    """Examples that are all refused at their first packet would try nothing."""
    assert house.heard["Welcome"] >= house.examples // 8, house.heard
    for answer in ("Stored", "Loaded", "Status", "ListedNamespaces", "ListedObjects", "Purged"):
        assert house.heard[answer] >= house.examples // 50, house.heard
    assert house.heard["Refused"] >= house.examples // 4, house.heard


def is_message(data: bytes) -> bool:
    try:
        wire.decode_from_client(data)
    except PeerError:
        return False
    return True


@chances(100)
@given(hello=st.one_of(st.none(), good_hellos), data=improper.filter(lambda data: not is_message(data)))
def test_what_is_no_message_ends_the_session_and_says_so(house: House, hello: wire.Hello | None, data: bytes) -> None:
    hostile = Hostile(house)
    try:
        if hello is not None:
            hostile.say((wire.encode(hello), ()))
        hostile.say((data, ()))
        hostile.await_end()
        assert hostile.refused is not None
        assert hostile.refused.code in {wire.RefusedCode.PROTOCOL, wire.RefusedCode.VERSION}
    finally:
        hostile.peer.close()
    house.example_is_over()


@chances(60)
@given(kinds_of=st.tuples(kinds, kinds), engine=st.sampled_from(["x", "healthy"]))
def test_any_descriptors_beside_a_hello(house: House, kinds_of: tuple[str, str], engine: str) -> None:
    """A ring that is none, a page that is none: refused by name, whoever else may be served."""
    hostile = Hostile(house)
    try:
        hostile.say((hello_of(engine_id=engine), kinds_of))
        hostile.await_end()
        assert hostile.refused is not None
        expected = wire.RefusedCode.RANK_TAKEN if engine == "healthy" else wire.RefusedCode.RING
        assert hostile.refused.code is expected
    finally:
        hostile.peer.close()
    house.example_is_over()


def test_a_tool_that_asks_without_reading_is_bounded(house: House) -> None:
    """Its answers are long, its questions short: it is ended, and what it was not told is not kept."""
    text = '{"a": "' + "n" * 59_900 + '"}'
    with closing(Peer(house.path, geometry=GEOMETRY)) as scheduler:
        scheduler.hello(engine="publisher", role=Role.SCHEDULER)
        scheduler.receive(wire.Welcome)
        for fd in scheduler.fds:
            os.close(fd)
        scheduler.fds = ()
        scheduler.send(wire.PublishNamespace(b"p" * 16, text))
        house.check()
    peer = Peer(house.path, geometry=GEOMETRY)
    peer.hello(engine="tool", role=Role.TOOL)
    peer.receive(wire.Welcome)
    house.forget_peak()
    before = house.rss("VmHWM")
    with suppress(BrokenPipeError, ConnectionResetError):
        for ask in range(2_000):
            with suppress(BlockingIOError):
                peer.socket.send(wire.encode(ListNamespaces(ask, b"")))
    house.check()
    peer.close()
    assert house.rss("VmHWM") - before < 3 * wire.OUTBOX_BYTES_MAX


def test_a_flood_of_questions_without_reading_is_bounded(house: House) -> None:
    """An engine's ranks publish much, and its scheduler asks for all of it at once, again and again."""
    text = '{"a": "' + "n" * 59_900 + '"}'
    peers = []
    for role, rank in [(Role.SCHEDULER, 0), *((Role.RANK, rank) for rank in range(FLOOD_RANKS))]:
        peer = Peer(house.path, geometry=GEOMETRY)
        peers.append(peer)
        peer.hello(engine="flood", role=role, rank=rank, world_size=FLOOD_RANKS, ring_slots=4 * FLOOD_RANKS)
        peer.receive(wire.Welcome)
        for fd in peer.fds:
            os.close(fd)
        peer.fds = ()
        if role is Role.RANK:
            peer.send(wire.PublishNamespace(bytes(16), text))
    house.check()
    house.forget_peak()
    before = house.rss("VmHWM")
    with suppress(BrokenPipeError, ConnectionResetError):
        for ask in range(200):
            with suppress(BlockingIOError):
                peers[0].socket.send(wire.encode(wire.AskNamespaces(ask)))
    house.check()
    for peer in peers:
        peer.close()
    assert house.rss("VmHWM") - before < 3 * wire.OUTBOX_BYTES_MAX
