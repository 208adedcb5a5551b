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

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAGIC: Final = b"XKV1"
PROTOCOL_VERSION: Final = 3

MESSAGE_BYTES_MAX: Final = 65_536
"""Below the default socket buffer, so that the kernel keeps a message whole and takes several at once."""
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
KEY_BYTES_MAX: Final = 55
"""An encoded object key with a hash of 32 bytes."""
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


_U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_U64 = Annotated[int, msgspec.Meta(ge=0)]
_Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=KEY_BYTES_MAX)]
_Slots = Annotated[tuple[_U32, ...], msgspec.Meta(min_length=1, max_length=SLOTS_PER_OBJECT_MAX)]
_Namespace = Annotated[bytes, msgspec.Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
_Uuid = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class _Part(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """A piece of a message."""


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """One packet's content."""


class SlotRange(_Part, frozen=True):
    """`count` neighbouring ring slots from `first` on."""

    first: _U32
    count: _U32


class PutObject(_Part, frozen=True):
    """One object of a put: its encoded key, its length in bytes, its ring slots in fragment order."""

    key: _Key
    length: _U64
    slots: _Slots
    family: _U64
    position: _U32
    replace: bool


class GetObject(_Part, frozen=True):
    """One object of a get: its encoded key and the ring slots of its fragments from `first_fragment` on."""

    key: _Key
    slots: _Slots
    first_fragment: _U32


class LeaseObject(_Part, frozen=True):
    """One object of a lease: its encoded key, and which of its fragments are wanted."""

    key: _Key
    first_fragment: _U32
    fragments: Annotated[int, msgspec.Meta(ge=1, le=SLOTS_PER_OBJECT_MAX)]


class LeasedObject(_Part, frozen=True):
    """The answer to object `index` of a lease: where its fragments lie, one slot each; none unless it is `OK`."""

    index: _U32
    status: LoadStatus
    generation: _U64
    length: _U64
    slots: Annotated[tuple[_U32, ...], msgspec.Meta(max_length=SLOTS_PER_OBJECT_MAX)]


class StoredObject(_Part, frozen=True):
    """The answer to object `index` of a put."""

    index: _U32
    status: StoreStatus


class LoadedObject(_Part, frozen=True):
    """The answer to object `index` of a get; generation and length (bytes) are 0 unless it is held."""

    index: _U32
    status: LoadStatus
    generation: _U64
    length: _U64


class DamagedObject(_Part, frozen=True):
    """One object that a proof has found damaged; `dropped`: it is off the card."""

    key: _Key
    generation: _U64
    length: _U64
    problem: str
    dropped: bool


class RankNamespace(_Part, frozen=True):
    """What one rank has published."""

    rank: _U32
    namespace: _Namespace
    descriptor: str


class Hello(_Message, frozen=True):
    """The first message of a client. A tool gives 0 for ring, reserve, staged and fragment.

    `staged_bytes`: the scheduler's part of the ring; `ring_use`: how its ranks load; None from a scheduler that takes
    what its ranks have said.
    """

    version: _U32
    engine_id: Annotated[str, msgspec.Meta(max_length=ENGINE_ID_BYTES_MAX)]
    role: Role
    rank: _U32
    world_size: _U32
    ring_bytes: _U64
    load_reserve_bytes: _U64
    staged_bytes: _U64 | None
    fragment_bytes: _U32
    pid: _U32
    ring_use: RingUse | None = RingUse.OWN


class PublishNamespace(_Message, frozen=True):
    """A rank's namespace and the JSON text of the identity that it stands for."""

    namespace: _Namespace
    descriptor: Annotated[str, msgspec.Meta(max_length=DESCRIPTOR_BYTES_MAX)]


class AskNamespaces(_Message, frozen=True):
    """What have this engine's ranks published?"""

    ask: _U64


class Put(_Message, frozen=True):
    """Write these objects from the ring to the card."""

    put: _U64
    objects: Annotated[tuple[PutObject, ...], msgspec.Meta(min_length=1)]


class Get(_Message, frozen=True):
    """Read these objects from the card into the ring."""

    get: _U64
    objects: Annotated[tuple[GetObject, ...], msgspec.Meta(min_length=1)]


class Lease(_Message, frozen=True):
    """Bring these objects into the region that the engine's ranks share, and leave them there until released."""

    lease: _U64
    objects: Annotated[tuple[LeaseObject, ...], msgspec.Meta(min_length=1)]


class Release(_Message, frozen=True):
    """These objects of a lease are copied: their slots may be used again."""

    lease: _U64
    indexes: Annotated[tuple[_U32, ...], msgspec.Meta(min_length=1)]


class Touch(_Message, frozen=True):
    """These chunks were looked up."""

    tags: tuple[_U64, ...]


class Cancel(_Message, frozen=True):
    """Answer what is outstanding of this get, or lease."""

    get: _U64


class AskStatus(_Message, frozen=True):
    """How is the gateway?"""

    ask: _U64


class Stop(_Message, frozen=True):
    """Drain and end."""

    ask: _U64


class Verify(_Message, frozen=True):
    """Prove every object of the card; with `drop` the damaged leave it."""

    ask: _U64
    drop: bool


class Welcome(_Message, frozen=True):
    """The session is attached. A tool gets no ring, so no slots and no descriptors.

    `lease_slots`: where it is not 0, the load region is shared with the engine's other ranks, and the session may hold
    so many slots of it.
    """

    version: _U32
    session: _U64
    boot_id: _Uuid
    card_uuid: _Uuid
    epoch: _U64
    slot_bytes: _U32
    ring_slots: _U32
    store_region: SlotRange
    load_region: SlotRange
    heartbeat_ms: _U32
    ring_use: RingUse = RingUse.OWN
    lease_slots: _U32 = 0


class Refused(_Message, frozen=True):
    """The session is over."""

    code: RefusedCode
    reason: str


class Namespaces(_Message, frozen=True):
    """Some of the ranks' namespaces; several messages where one does not hold them."""

    ask: _U64
    ranks: tuple[RankNamespace, ...]


class Stored(_Message, frozen=True):
    """Answers to objects of a put."""

    put: _U64
    objects: tuple[StoredObject, ...]


class Loaded(_Message, frozen=True):
    """Answers to objects of a get."""

    get: _U64
    objects: tuple[LoadedObject, ...]


class Leased(_Message, frozen=True):
    """Answers to objects of a lease."""

    lease: _U64
    objects: tuple[LeasedObject, ...]


class Status(_Message, frozen=True):
    """JSON text: counters, capacity, sessions."""

    ask: _U64
    text: str


class Done(_Message, frozen=True):
    """What was asked for is under way."""

    ask: _U64
    text: str


class Verifying(_Message, frozen=True):
    """How a proof goes: objects and bytes proved so far, objects that were gone, what was found since the last one."""

    ask: _U64
    state: VerifyState
    objects: _U64
    objects_total: _U64
    gone: _U64
    proved_bytes: _U64
    damaged: tuple[DamagedObject, ...]
    reason: str


FromClient = (
    Hello | PublishNamespace | AskNamespaces | Put | Get | Lease | Release | Touch | Cancel | AskStatus | Stop | Verify
)
FromGateway = Welcome | Refused | Namespaces | Stored | Loaded | Leased | Status | Done | Verifying

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
