"""The wire: what is sent arrives as it was; what is not a message is the peer's error; batches fit."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_store import wire, wire_tools, wire_types
from xkv_store.errors import PeerError
from xkv_store.geometry import KEY_BYTES_MAX
from xkv_store.ring import RingUse
from xkv_store.wire_types import MESSAGE_BYTES_MAX

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=1, max_size=KEY_BYTES_MAX)
SLOTS = st.lists(U32, min_size=1, max_size=40).map(tuple)
ID = st.binary(min_size=16, max_size=16)
REGIONS = st.builds(wire.SlotRange, U32, U32)

PUT_OBJECTS = st.builds(wire.PutObject, KEYS, U64, SLOTS, U64, U32, st.booleans())
GET_OBJECTS = st.builds(wire.GetObject, KEYS, SLOTS, U32)
STORED = st.builds(wire.StoredObject, U32, st.sampled_from(wire.StoreStatus))
LOADED = st.builds(wire.LoadedObject, U32, st.sampled_from(wire.LoadStatus), U64, U64)
LEASE_OBJECTS = st.builds(wire.LeaseObject, KEYS, U32, st.integers(1, wire.SLOTS_PER_OBJECT_MAX))
LEASED = st.builds(
    wire.LeasedObject, U32, st.sampled_from(wire.LoadStatus), U64, U64, st.lists(U32, max_size=9).map(tuple)
)
USES = st.sampled_from(RingUse)
TEXT = st.text(max_size=50)
ROLES = st.sampled_from(wire.Role)

NAMESPACES = st.builds(wire_tools.ListedNamespace, ID, U64, U64, U64, st.none() | U64, TEXT)

FROM_CLIENT = st.one_of(
    st.builds(wire.Hello, U32, TEXT, ROLES, U32, U32, U64, U64, st.none() | U64, U32, U32, st.none() | USES),
    st.builds(wire.PublishNamespace, ID, TEXT),
    st.builds(wire.AskNamespaces, U64),
    st.builds(wire.Put, U64, st.lists(PUT_OBJECTS, min_size=1, max_size=5).map(tuple)),
    st.builds(wire.Get, U64, st.lists(GET_OBJECTS, min_size=1, max_size=5).map(tuple)),
    st.builds(wire.Lease, U64, st.lists(LEASE_OBJECTS, min_size=1, max_size=5).map(tuple)),
    st.builds(wire.Release, U64, st.lists(U32, min_size=1, max_size=9).map(tuple)),
    st.builds(wire.Touch, st.lists(U64, max_size=20).map(tuple)),
    st.builds(wire.Cancel, U64),
    st.builds(wire.AskStatus, U64),
    st.builds(wire.Stop, U64),
    st.builds(wire.Verify, U64, st.booleans()),
    st.builds(wire_tools.ListNamespaces, U64, st.binary(max_size=16)),
    st.builds(wire_tools.ListObjects, U64, st.binary(max_size=KEY_BYTES_MAX), st.binary(max_size=KEY_BYTES_MAX + 1)),
    st.builds(
        wire_tools.Purge,
        U64,
        st.lists(st.builds(wire_tools.PurgeObject, KEYS, U64), max_size=9).map(tuple),
        st.lists(ID, max_size=3).map(tuple),
    ),
)
FROM_GATEWAY = st.one_of(
    st.builds(wire.Welcome, U32, U64, ID, ID, U64, U32, U32, REGIONS, REGIONS, U32, USES, U32),
    st.builds(wire.Refused, st.sampled_from(wire.RefusedCode), TEXT),
    st.builds(wire.Namespaces, U64, st.lists(st.builds(wire.RankNamespace, U32, ID, TEXT), max_size=3).map(tuple)),
    st.builds(wire.Stored, U64, st.lists(STORED, max_size=9).map(tuple)),
    st.builds(wire.Loaded, U64, st.lists(LOADED, max_size=9).map(tuple)),
    st.builds(wire.Leased, U64, st.lists(LEASED, max_size=9).map(tuple)),
    st.builds(wire.Status, U64, TEXT),
    st.builds(wire.Done, U64, TEXT),
    st.builds(
        wire.Verifying,
        U64,
        st.sampled_from(wire.VerifyState),
        U64,
        U64,
        U64,
        U64,
        st.lists(st.builds(wire.DamagedObject, KEYS, U64, U64, TEXT, st.booleans()), max_size=9).map(tuple),
        TEXT,
    ),
    st.builds(wire_tools.ListedNamespaces, U64, st.lists(NAMESPACES, max_size=5).map(tuple), st.booleans(), TEXT),
    st.builds(
        wire_tools.ListedObjects,
        U64,
        st.lists(st.builds(wire_tools.ListedObject, KEYS, U64, U64, U32), max_size=9).map(tuple),
        st.binary(max_size=KEY_BYTES_MAX + 1),
        TEXT,
    ),
    st.builds(wire_tools.Purged, U64, U64, U64, st.lists(U32, max_size=9).map(tuple), U64),
)


@given(FROM_CLIENT)
def test_what_a_client_sends_arrives(message: wire.FromClient) -> None:
    assert wire.decode_from_client(wire.encode(message)) == message


@given(FROM_GATEWAY)
def test_what_a_gateway_sends_arrives(message: wire.FromGateway) -> None:
    assert wire.decode_from_gateway(wire.encode(message)) == message


@given(FROM_CLIENT)
def test_each_side_takes_only_the_other_sides_messages(message: wire.FromClient) -> None:
    with pytest.raises(PeerError):
        wire.decode_from_gateway(wire.encode(message))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_the_peers_error(content: bytes) -> None:
    """Whatever escaped as another exception would end the gateway, and with it every other session."""
    for packet in (content, wire.MAGIC + content):
        with contextlib.suppress(PeerError):
            wire.decode_from_client(packet)
        wire.foreign_version(packet)


@settings(max_examples=200)
@given(FROM_CLIENT, st.data())
def test_a_damaged_message_is_a_message_or_the_peers_error(message: wire.FromClient, data: st.DataObject) -> None:
    packet = bytearray(wire.encode(message))
    packet[data.draw(st.integers(0, len(packet) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(PeerError):
        wire.decode_from_client(bytes(packet))


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"XKV",
        b"XKV2" + wire.encode(wire.Cancel(1))[4:],
        wire.encode(wire.Cancel(1))[:-1],
        wire.encode(wire.Cancel(1)) + b"\x00",
        wire.MAGIC + msgspec.msgpack.encode(["Cancel", -1]),
        wire.MAGIC + msgspec.msgpack.encode(["Cancel", 1, 2]),
        wire.MAGIC + msgspec.msgpack.encode(["Cancel", True]),
        wire.MAGIC + msgspec.msgpack.encode(["Cancle", 1]),
        wire.MAGIC + msgspec.msgpack.encode(["Put", 1, []]),
        wire.MAGIC + msgspec.msgpack.encode(["Put", 1, [[b"k" * 56, 1, [1], 0, 0, False]]]),
        wire.MAGIC + msgspec.msgpack.encode(["Put", 1, [[b"k", 1, [], 0, 0, False]]]),
        wire.MAGIC + msgspec.msgpack.encode(["Put", 1, [[b"k", 1, [2**32], 0, 0, False]]]),
        wire.MAGIC + msgspec.msgpack.encode(["PublishNamespace", b"short", ""]),
        wire.MAGIC + b"\x91" * 5_000,
        wire.MAGIC + bytes(MESSAGE_BYTES_MAX),
    ],
)
def test_malformed(packet: bytes) -> None:
    with pytest.raises(PeerError):
        wire.decode_from_client(packet)


def test_a_hello_of_another_version_is_known_as_such() -> None:
    """Otherwise the user of a newer client would read "malformed message" instead of which version is where."""
    newer = wire.MAGIC + msgspec.msgpack.encode(["Hello", wire.PROTOCOL_VERSION + 1, {"all": "new"}])
    with pytest.raises(PeerError):
        wire.decode_from_client(newer)
    assert wire.foreign_version(newer) == wire.PROTOCOL_VERSION + 1
    hello = wire.Hello(wire.PROTOCOL_VERSION, "e", wire.Role.RANK, 0, 1, 0, 0, 0, 0, 0)
    assert wire.foreign_version(wire.encode(hello)) is None
    assert wire.foreign_version(wire.encode(wire.Cancel(2))) is None


def put_object(slots: int, number: int) -> wire.PutObject:
    return wire.PutObject(
        number.to_bytes(55, "big"), 1 << 40, tuple(range(70_000, 70_000 + slots)), 2**64 - 1, 9, False
    )


@pytest.mark.parametrize("slots", [1, 8, 129, wire.SLOTS_PER_OBJECT_MAX])
def test_batches_are_cut_so_that_each_message_fits(slots: int) -> None:
    """An oversized message would end the session with everything in flight on it."""
    objects = [put_object(slots, number) for number in range(8 if slots > 1_000 else 2_000)]
    pieces = wire.split_puts(objects)
    assert [item for piece in pieces for item in piece] == objects
    sizes = [len(wire.encode(wire.Put(2**64 - 1, piece))) for piece in pieces]
    assert max(sizes) <= MESSAGE_BYTES_MAX
    if slots < 1_000:
        assert min(sizes[:-1]) > MESSAGE_BYTES_MAX * 0.9, "and no more messages than needed"


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30), st.integers(1, 1_000))
def test_touches_fit_and_lose_nothing(tags: list[int], repeat: int) -> None:
    messages = wire.split_touches(tags * repeat)
    assert [tag for message in messages for tag in message.tags] == tags * repeat
    assert all(len(wire.encode(message)) <= MESSAGE_BYTES_MAX for message in messages)


def test_answers_fit() -> None:
    """A put's answers come in as many messages as they need."""
    stored = [wire.StoredObject(2**32 - 1, wire.StoreStatus.SHED)] * 20_000
    assert sum(len(message.objects) for message in wire.split_stored(2**64 - 1, stored)) == 20_000
    loaded = [wire.LoadedObject(2**32 - 1, wire.LoadStatus.OK, 2**64 - 1, 2**64 - 1)] * 20_000
    for message in wire.split_loaded(2**64 - 1, loaded):
        wire.encode(message)
    ranks = [wire.RankNamespace(rank, bytes(16), "x" * wire.DESCRIPTOR_BYTES_MAX) for rank in range(3)]
    messages = wire.split_namespaces(2**64 - 1, ranks)
    assert [own for message in messages for own in message.ranks] == ranks
    for namespaces in messages:
        wire.encode(namespaces)
    assert wire.split_namespaces(5, []) == [wire.Namespaces(5, ())]
    assert not wire.split_puts([])
    assert not wire.split_gets([])
    assert not wire.split_touches([])


@given(st.text(max_size=20), st.integers(1, 10_000))
def test_bounded_text_fits_and_is_text(text: str, repeat: int) -> None:
    bounded = wire.bounded_text(text * repeat)
    wire.encode(wire.Status(2**64 - 1, bounded))
    assert len(bounded.encode()) <= wire.TEXT_BYTES_MAX


def test_as_many_namespaces_as_an_answer_holds_are_in_it() -> None:
    """One with a description of the greatest length must not keep all that follow from ever being told."""
    vast = wire_tools.ListedNamespace(b"n" * 16, 2**64 - 1, 2**64 - 1, 2**64 - 1, 2**64 - 1, "d" * wire.TEXT_BYTES_MAX)
    small = wire_tools.ListedNamespace(b"m" * 16, 1, 1, 0, None, "{}")
    most = [small] * wire_tools.NAMESPACES_LISTED_MAX
    assert wire.split_listed_namespaces([vast, *most])[0] == vast
    assert wire.split_listed_namespaces([small, vast, vast]) == (small, vast)
    assert wire.split_listed_namespaces(most) == tuple(most)
    assert wire.split_listed_namespaces([]) == ()
    for listed in ([vast, *most], [vast]):
        answer = wire_tools.ListedNamespaces(2**64 - 1, wire.split_listed_namespaces(listed), True, "")
        assert len(wire.encode(answer)) <= MESSAGE_BYTES_MAX


def test_the_largest_page_of_objects_and_the_largest_purge_fit_a_message() -> None:
    number, key = 2**64 - 1, b"k" * KEY_BYTES_MAX
    page = (wire_tools.ListedObject(key, number, number, 2**32 - 1),) * wire_tools.OBJECTS_LISTED_MAX
    answer = wire_tools.ListedObjects(number, page, key + b"\0", "\U0001f600" * wire_tools.REASON_CHARS_MAX)
    assert wire.decode_from_gateway(wire.encode(answer)) == answer
    objects = (wire_tools.PurgeObject(key, number),) * wire_tools.OBJECTS_PURGED_MAX
    purge = wire_tools.Purge(number, objects, (b"n" * 16,) * wire_tools.NAMESPACES_FORGOTTEN_MAX)
    assert wire.decode_from_client(wire.encode(purge)) == purge


def test_bounds_are_those_of_the_page() -> None:
    """docs/protocol.md is what others build against."""
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.split("## Bounds")[1].splitlines()]
    bounds = {
        row[0]: int(row[1].replace(",", "")) for row in rows if len(row) == 3 and row[0].endswith(("_MAX", "_MS"))
    }
    ours = {**vars(wire_types), **vars(wire_tools), **vars(wire)}
    assert bounds == {name: ours[name] for name in bounds}
    assert len(bounds) >= 10


def test_messages_are_those_of_the_page() -> None:
    """Every message of the page exists with its fields in its order, and no other."""
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    for union in (wire.FromClient, wire.FromGateway):
        for kind in union.__args__:
            names = (f"| `{kind.__name__}`", "| `Status`, `Done`" if kind is wire.Done else "|||")
            row = next(line for line in page.splitlines() if line.startswith(names))
            places = [row.find(f"`{field}`", row.find("|", 3)) for field in kind.__struct_fields__]
            assert -1 not in places, (kind, places)
            assert places == sorted(places), kind
