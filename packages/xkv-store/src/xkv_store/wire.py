"""The messages between a gateway and its clients, as docs/protocol.md draws them.

Owns: the message types, their encoding, the bounds of the protocol, and the planners that cut batches so
that each message fits. Must not know: sockets, sessions, slots' owners, or what a gateway does with a
message. Whatever a peer sent is checked here and raises `PeerError`.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from .errors import PeerError
from .ring import RingUse
from .wire_remote import Seek, Sought
from .wire_tools import (
    Explain,
    Explained,
    ListedNamespace,
    ListedNamespaces,
    ListedObjects,
    ListNamespaces,
    ListObjects,
    Purge,
    Purged,
)
from .wire_types import MESSAGE_BYTES_MAX, U32, U64, Key, Message, Namespace, Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAGIC: Final = b"XKV1"
PROTOCOL_VERSION: Final = 4

SESSIONS_MAX: Final = 1_024
"""Each session costs the gateway file descriptors."""
TOOL_SESSIONS_MAX: Final = 64
"""Of these at most so many are tools': forgotten ones must not keep engines out."""
OBJECTS_PER_SESSION_MAX: Final = 8_192
"""Objects in flight of one session: bounds what one client makes the gateway remember."""
RANKS_MAX: Final = 4_096
"""Bounds the control page."""
HEARTBEAT_MS: Final = 100
"""How often a gateway writes the control page's heartbeat; small against the 3 s that a client waits."""
OUTBOX_MESSAGES_MAX: Final = 4_096
"""Answers kept for a client that does not read; more ends its session."""
OUTBOX_BYTES_MAX: Final = 16 << 20
"""The same in bytes: statuses are long. The namespaces of an engine of 4,096 ranks, at 4 KB each, are the most."""
SLOTS_PER_OBJECT_MAX: Final = 12_288
"""At most 5 bytes each, so that the largest object's message still fits (an object of 3 GiB)."""
ENGINE_ID_BYTES_MAX: Final = 256
"""Engine ids are UUIDs or short names."""
NAMESPACE_BYTES: Final = 16
DESCRIPTOR_BYTES_MAX: Final = 60_000
"""A namespace's JSON: one message holds it."""
TEXT_BYTES_MAX: Final = 60_000
"""A status's or a refusal's text: one message holds it."""
PROBLEM_CHARS_MAX: Final = 200
"""Of what is wrong with an object: 64 of them fit a message."""
DESCRIPTORS_MAX: Final = 3
"""File descriptors beside one message: ring, control page, lookup table."""

_NUMBER_MAX: Final = 2**64 - 1
_ARRAY_HEADER_GROWTH_BYTES: Final = 4  # an array's header takes 1 byte when empty and 5 at the most


class Role(str, Enum):
    """What a session is for."""

    SCHEDULER = "scheduler"
    RANK = "rank"
    TOOL = "tool"


class RefusedCode(str, Enum):
    """Why a gateway ends a session."""

    VERSION = "version"
    PEER = "peer"
    RANK_TAKEN = "rank_taken"
    FRAGMENT_BYTES = "fragment_bytes"
    RING = "ring"
    SESSIONS = "sessions"
    DRAINING = "draining"
    PROTOCOL = "protocol"


class StoreStatus(IntEnum):
    """What became of one object of a put."""

    CONFIRMED = 0
    HELD = 1
    SHED = 2
    FAILED = 3
    INVALID = 4


class LoadStatus(IntEnum):
    """What became of one object of a get."""

    OK = 0
    MISS = 1
    CORRUPT = 2
    FAILED = 3
    TIMEOUT = 4
    CANCELLED = 5
    BUSY = 6


class VerifyState(str, Enum):
    """Where a proof of the card stands; every state but `RUNNING` is its last."""

    RUNNING = "running"
    ENDED = "ended"
    STOPPED = "stopped"  # the gateway is ending
    FAILED = "failed"  # the index could not be read
    BUSY = "busy"  # another tool has one under way


_Slots = Annotated[tuple[U32, ...], msgspec.Meta(min_length=1, max_length=SLOTS_PER_OBJECT_MAX)]
_Uuid = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class SlotRange(Part, frozen=True):
    """`count` neighbouring ring slots from `first` on."""

    first: U32
    count: U32


class PutObject(Part, frozen=True):
    """One object of a put: its encoded key, its length in bytes, its ring slots in fragment order.

    `family`: any number, one for all objects of a request; `position`: its place among them.
    """

    key: Key
    length: U64
    slots: _Slots
    family: U64
    position: U32
    replace: bool


class GetObject(Part, frozen=True):
    """One object of a get: its encoded key and the ring slots of its fragments from `first_fragment` on."""

    key: Key
    slots: _Slots
    first_fragment: U32


class LeaseObject(Part, frozen=True):
    """One object of a lease: its encoded key, and which of its fragments are wanted."""

    key: Key
    first_fragment: U32
    fragments: Annotated[int, msgspec.Meta(ge=1, le=SLOTS_PER_OBJECT_MAX)]


class LeasedObject(Part, frozen=True):
    """The answer to object `index` of a lease: where its fragments lie, one slot each; none unless it is `OK`."""

    index: U32
    status: LoadStatus
    generation: U64
    length: U64
    slots: Annotated[tuple[U32, ...], msgspec.Meta(max_length=SLOTS_PER_OBJECT_MAX)]


class StoredObject(Part, frozen=True):
    """The answer to object `index` of a put."""

    index: U32
    status: StoreStatus


class LoadedObject(Part, frozen=True):
    """The answer to object `index` of a get; generation and length (bytes) are 0 unless it is held."""

    index: U32
    status: LoadStatus
    generation: U64
    length: U64


class DamagedObject(Part, frozen=True):
    """One object that a proof has found damaged; `dropped`: it is off the card."""

    key: Key
    generation: U64
    length: U64
    problem: str
    dropped: bool


class RankNamespace(Part, frozen=True):
    """What one rank has published."""

    rank: U32
    namespace: Namespace
    descriptor: str


class Hello(Message, frozen=True):
    """The first message of a client. A tool gives 0 for ring, reserve, staged and fragment.

    `staged_bytes`: the scheduler's part of the ring; `ring_use`: how its ranks load; None from a scheduler that takes
    what its ranks have said.
    """

    version: U32
    engine_id: Annotated[str, msgspec.Meta(max_length=ENGINE_ID_BYTES_MAX)]
    role: Role
    rank: U32
    world_size: U32
    ring_bytes: U64
    load_reserve_bytes: U64
    staged_bytes: U64 | None
    fragment_bytes: U32
    pid: U32
    ring_use: RingUse | None = RingUse.OWN


class PublishNamespace(Message, frozen=True):
    """A rank's namespace and the JSON text of the identity that it stands for."""

    namespace: Namespace
    descriptor: Annotated[str, msgspec.Meta(max_length=DESCRIPTOR_BYTES_MAX)]


class AskNamespaces(Message, frozen=True):
    """What have this engine's ranks published?"""

    ask: U64


class Put(Message, frozen=True):
    """Write these objects from the ring to the card."""

    put: U64
    objects: Annotated[tuple[PutObject, ...], msgspec.Meta(min_length=1)]


class Get(Message, frozen=True):
    """Read these objects from the card into the ring."""

    get: U64
    objects: Annotated[tuple[GetObject, ...], msgspec.Meta(min_length=1)]


class Lease(Message, frozen=True):
    """Bring these objects into the region that the engine's ranks share, and leave them there until released."""

    lease: U64
    objects: Annotated[tuple[LeaseObject, ...], msgspec.Meta(min_length=1)]


class Release(Message, frozen=True):
    """These objects of a lease are copied: their slots may be used again."""

    lease: U64
    indexes: Annotated[tuple[U32, ...], msgspec.Meta(min_length=1)]


class Touch(Message, frozen=True):
    """These chunks were looked up."""

    tags: tuple[U64, ...]


class Cancel(Message, frozen=True):
    """Answer what is outstanding of this get, or lease."""

    get: U64


class AskStatus(Message, frozen=True):
    """How is the gateway?"""

    ask: U64


class Stop(Message, frozen=True):
    """Drain and end."""

    ask: U64


class Verify(Message, frozen=True):
    """Prove every object of the card; with `drop` the damaged leave it."""

    ask: U64
    drop: bool


class Welcome(Message, frozen=True):
    """The session is attached. A tool gets no ring, so no slots and no descriptors.

    `lease_slots`: where it is not 0, the load region is shared with the engine's other ranks, and the session may hold
    so many slots of it. `has_remote`: `Seek` is of use.
    """

    version: U32
    session: U64
    boot_id: _Uuid
    card_uuid: _Uuid
    epoch: U64
    slot_bytes: U32
    ring_slots: U32
    store_region: SlotRange
    load_region: SlotRange
    heartbeat_ms: U32
    ring_use: RingUse = RingUse.OWN
    lease_slots: U32 = 0
    has_remote: bool = False


class Refused(Message, frozen=True):
    """The session is over."""

    code: RefusedCode
    reason: str


class Namespaces(Message, frozen=True):
    """Some of the ranks' namespaces; several messages where one does not hold them."""

    ask: U64
    ranks: tuple[RankNamespace, ...]


class Stored(Message, frozen=True):
    """Answers to objects of a put."""

    put: U64
    objects: tuple[StoredObject, ...]


class Loaded(Message, frozen=True):
    """Answers to objects of a get."""

    get: U64
    objects: tuple[LoadedObject, ...]


class Leased(Message, frozen=True):
    """Answers to objects of a lease."""

    lease: U64
    objects: tuple[LeasedObject, ...]


class Status(Message, frozen=True):
    """JSON text: counters, capacity, sessions."""

    ask: U64
    text: str


class Done(Message, frozen=True):
    """What was asked for is under way."""

    ask: U64
    text: str


class Verifying(Message, frozen=True):
    """How a proof goes: objects and bytes proved so far, objects that were gone, what was found since the last one."""

    ask: U64
    state: VerifyState
    objects: U64
    objects_total: U64
    gone: U64
    proved_bytes: U64
    damaged: tuple[DamagedObject, ...]
    reason: str


FromRank = Hello | PublishNamespace | AskNamespaces | Put | Get | Lease | Release | Touch | Cancel | AskStatus
FromClient = FromRank | Seek | Stop | Verify | ListNamespaces | ListObjects | Purge | Explain
ToEngine = Welcome | Refused | Namespaces | Stored | Loaded | Leased | Sought | Status
FromGateway = ToEngine | Done | Verifying | ListedNamespaces | ListedObjects | Purged | Explained

_Wire = TypeVar("_Wire")
_Item = TypeVar("_Item")

_encoder: Final = msgspec.msgpack.Encoder()
_client_decoder: Final[msgspec.msgpack.Decoder[FromClient]] = msgspec.msgpack.Decoder(FromClient)
_gateway_decoder: Final[msgspec.msgpack.Decoder[FromGateway]] = msgspec.msgpack.Decoder(FromGateway)


def encode(message: FromClient | FromGateway) -> bytes:
    """One packet. A message that does not fit is our own fault: its sender has a planner for that."""
    packet = MAGIC + _encoder.encode(message)
    assert len(packet) <= MESSAGE_BYTES_MAX, f"{type(message).__name__} of {len(packet)} bytes"
    return packet


def decode_from_client(packet: bytes) -> FromClient:
    """What a client sent; raises PeerError for everything that is not a message of a client."""
    return _decode(packet, _client_decoder)


def decode_from_gateway(packet: bytes) -> FromGateway:
    """What a gateway sent; raises PeerError for everything that is not a message of a gateway."""
    return _decode(packet, _gateway_decoder)


def foreign_version(packet: bytes) -> int | None:
    """The version of a Hello that this version cannot read, so that its sender hears why; else None."""
    if packet[:4] != MAGIC or len(packet) > MESSAGE_BYTES_MAX:
        return None
    try:
        content = msgspec.msgpack.decode(packet[4:])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not isinstance(content, list) or len(content) < 2 or content[0] != "Hello":
        return None
    version = content[1]
    if type(version) is not int or version == PROTOCOL_VERSION:
        return None
    return version


def _decode(packet: bytes, decoder: msgspec.msgpack.Decoder[_Wire]) -> _Wire:
    if len(packet) > MESSAGE_BYTES_MAX:
        raise PeerError(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
    if packet[:4] != MAGIC:
        raise PeerError(f"a message that does not begin with {MAGIC!r} but {packet[:4]!r}")
    try:
        return decoder.decode(memoryview(packet)[4:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"a malformed message: {error}") from error


# --- planners: batches that fit ---------------------------------------------------------------------------


def split_puts(objects: Sequence[PutObject]) -> list[tuple[PutObject, ...]]:
    """Cut a batch in order; each piece fits one Put of any number."""
    return _split(objects, empty=Put(_NUMBER_MAX, ()))


def split_gets(objects: Sequence[GetObject]) -> list[tuple[GetObject, ...]]:
    """Cut a batch in order; each piece fits one Get of any number."""
    return _split(objects, empty=Get(_NUMBER_MAX, ()))


def split_leases(objects: Sequence[LeaseObject]) -> list[tuple[LeaseObject, ...]]:
    """Cut a batch in order; each piece fits one Lease of any number."""
    return _split(objects, empty=Lease(_NUMBER_MAX, ()))


def split_touches(tags: Sequence[int]) -> list[Touch]:
    """Touches of all tags, in order."""
    return [Touch(piece) for piece in _split(tags, empty=Touch(()))]


def split_stored(put: int, objects: Sequence[StoredObject]) -> list[Stored]:
    """Answers of all objects, in order."""
    return [Stored(put, piece) for piece in _split(objects, empty=Stored(_NUMBER_MAX, ()))]


def split_loaded(get: int, objects: Sequence[LoadedObject]) -> list[Loaded]:
    """Answers of all objects, in order."""
    return [Loaded(get, piece) for piece in _split(objects, empty=Loaded(_NUMBER_MAX, ()))]


def split_leased(lease: int, objects: Sequence[LeasedObject]) -> list[Leased]:
    """Answers of all objects, in order."""
    return [Leased(lease, piece) for piece in _split(objects, empty=Leased(_NUMBER_MAX, ()))]


def split_namespaces(ask: int, ranks: Sequence[RankNamespace]) -> list[Namespaces]:
    """Answers with all ranks; one empty answer where there are none."""
    pieces = _split(ranks, empty=Namespaces(_NUMBER_MAX, ()))
    return [Namespaces(ask, piece) for piece in pieces] or [Namespaces(ask, ())]


def split_listed_namespaces(namespaces: Sequence[ListedNamespace]) -> tuple[ListedNamespace, ...]:
    """As many of them, from the first on, as one answer holds."""
    pieces = _split(namespaces, empty=ListedNamespaces(_NUMBER_MAX, (), more=True, reason=""))
    return pieces[0] if pieces else ()


def bounded_text(text: str) -> str:
    """The text, or as much of its beginning as a message holds."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= TEXT_BYTES_MAX:
        return encoded.decode()
    return encoded[:TEXT_BYTES_MAX].decode("utf-8", "ignore")


def _split(items: Sequence[_Item], *, empty: FromClient | FromGateway) -> list[tuple[_Item, ...]]:
    if not items:
        return []
    room = MESSAGE_BYTES_MAX - len(MAGIC) - len(_encoder.encode(empty)) - _ARRAY_HEADER_GROWTH_BYTES
    items = tuple(items)
    if len(_encoder.encode(items)) <= room:
        return [items]
    return _split_sized(items, sizes=(len(_encoder.encode(item)) for item in items), room=room)


def _split_sized(items: Sequence[_Item], *, sizes: Iterable[int], room: int) -> list[tuple[_Item, ...]]:
    pieces: list[tuple[_Item, ...]] = []
    piece: list[_Item] = []
    used = 0
    for item, size in zip(items, sizes, strict=True):
        assert size <= room, f"one item of {size} bytes does not fit a message"
        if used + size > room:
            pieces.append(tuple(piece))
            piece, used = [], 0
        piece.append(item)
        used += size
    pieces.append(tuple(piece))
    return pieces
