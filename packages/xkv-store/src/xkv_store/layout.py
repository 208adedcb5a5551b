"""Struct formats, magics and versions of everything that is kept or shared as bytes.

Owns the formats of docs/format.md, and packing and parsing them. Must not know files, memory or policy.
Parsing raises `BadBytesError`, or its `OtherVersionError` for a version that this code does not know; what
that means (a miss, a card refused) is the caller's to say.
"""

import struct
from typing import NamedTuple, TypeAlias

import numpy as np
from xxhash import xxh3_64_intdigest

from .geometry import HEADER_BYTES, SUPERBLOCK_BYTES

Buffer: TypeAlias = bytes | bytearray | memoryview

FORMAT_VERSION = 1
CHECKSUM_XXH3_64 = 1

SLOT_MAGIC = b"XKVSLOT1"
DATABASE_MAGIC = b"XKVDBSE1"
TABLE_MAGIC = b"XKVTABL1"
CONTROL_MAGIC = b"XKVCTRL1"

_U64 = struct.Struct("<Q")
_CHECKSUM_BYTES = _U64.size
_HEADER_SUMMED_BYTES = HEADER_BYTES - _CHECKSUM_BYTES
_SUPERBLOCK_SUMMED_BYTES = SUPERBLOCK_BYTES - _CHECKSUM_BYTES

# magic, version, algorithm, key bytes, index, count, payload bytes, generation, length, payload checksum,
# card uuid, key, family, position, zeros
SLOT_HEADER = struct.Struct("<8sHBBIIIQQQ16s64sQI876x")
# magic, version, number, databases, slot bytes, slots, card uuid, database uuid, made at, zeros
SUPERBLOCK = struct.Struct("<8sHHH2xI4xQ16s16sQ4016x")
RECORD = struct.Struct("<QQQIH")  # generation, length, family, position, extents
EXTENT = struct.Struct("<HII")  # database, first slot, slots
_RECORD_PLACE = struct.Struct("<Q8xQI")  # of a record: generation, family, position
_RECORD_OF_ONE = struct.Struct(RECORD.format + EXTENT.format[1:])  # as nearly all of them are
ORDER_KEY = struct.Struct(">QIQ")  # family, inverted position, generation
# magic, version, entry bytes, capacity, entries, card uuid, boot id, highest confirmed generation
TABLE_HEADER = struct.Struct("<8sHH4xQQ16s16sQ")
TABLE_ENTRY = struct.Struct("<QQQII")  # tag, generation, ranks, fragments, asked
TABLE_ENTRIES_OFFSET = 4096
# magic, version, ranks, denials per rank, boot id, heartbeat, epoch, flags, attached ranks
CONTROL_HEADER = struct.Struct("<8sHHI16sQQQQ")

POSITION_MAX = (1 << 32) - 1
FAMILY_MAX = (1 << 64) - 1
AGAIN = 1 << 63  # in a family: the object was asked for again, and the rest says when…
OFTEN = AGAIN | 1 << 62  # …and so often that it is of the third kind
_KEY_FIELD_BYTES = 64

assert SLOT_HEADER.size == _HEADER_SUMMED_BYTES
assert SUPERBLOCK.size == _SUPERBLOCK_SUMMED_BYTES
assert TABLE_HEADER.size <= TABLE_ENTRIES_OFFSET


class BadBytesError(ValueError):
    """Bytes that are not what they were read as."""


class OtherVersionError(BadBytesError):
    """The right magic with a version that this code does not know."""

    def __init__(self, what: str, version: int) -> None:
        super().__init__(f"{what} of format version {version}; this program knows version {FORMAT_VERSION}")
        self.what = what
        self.version = version

    def __reduce__(self) -> tuple[type["OtherVersionError"], tuple[str, int]]:
        return (type(self), (self.what, self.version))


class SlotHeader(NamedTuple):
    """One fragment's header. `length` is the object's, `payload_bytes` this slot's."""

    key: bytes
    fragment: int
    fragments: int
    payload_bytes: int
    generation: int
    length: int
    payload_checksum: int
    card_uuid: bytes
    family: int
    position: int


class Superblock(NamedTuple):
    """What a database says of itself."""

    number: int
    databases: int
    slot_bytes: int
    slots: int
    card_uuid: bytes
    database_uuid: bytes
    made_at_s: int


class Extent(NamedTuple):
    """Neighbouring slots of one database."""

    database: int
    first: int
    slots: int


class Record(NamedTuple):
    """What the index holds of one object; the extents follow the order of its fragments."""

    generation: int
    length: int
    family: int
    position: int
    extents: tuple[Extent, ...]


def checksum(data: Buffer) -> int:
    """xxh3-64 with seed 0 (releases the interpreter lock for large data)."""
    return xxh3_64_intdigest(data)


def pack_slot_header(into: memoryview, header: SlotHeader) -> None:
    """Write `header`, with its checksum, into the first 1,024 bytes of a slot."""
    SLOT_HEADER.pack_into(
        into,
        0,
        SLOT_MAGIC,
        FORMAT_VERSION,
        CHECKSUM_XXH3_64,
        len(header.key),
        header.fragment,
        header.fragments,
        header.payload_bytes,
        header.generation,
        header.length,
        header.payload_checksum,
        header.card_uuid,
        header.key,
        header.family,
        header.position,
    )
    _U64.pack_into(into, _HEADER_SUMMED_BYTES, xxh3_64_intdigest(into[:_HEADER_SUMMED_BYTES]))


class SlotHeaders:
    """The headers of one object's slots: all but a few bytes of them are alike. For one thread."""

    def __init__(self, first: SlotHeader) -> None:
        """`first`: any of them."""
        self._count, self._generation, self._length = first.fragments, first.generation, first.length
        self._bytes = bytearray(HEADER_BYTES)
        self._summed = memoryview(self._bytes)[:_HEADER_SUMMED_BYTES]
        pack_slot_header(memoryview(self._bytes), first)

    def of(self, fragment: int, payload_bytes: int, payload_checksum: int) -> bytes:
        """The whole header of one fragment."""
        _HEADER_NUMBERS.pack_into(
            self._bytes,
            _HEADER_NUMBERS_AT,
            fragment,
            self._count,
            payload_bytes,
            self._generation,
            self._length,
            payload_checksum,
        )
        _U64.pack_into(self._bytes, _HEADER_SUMMED_BYTES, xxh3_64_intdigest(self._summed))
        return bytes(self._bytes)


def parse_slot_header(data: Buffer) -> SlotHeader:
    """The header in the first 1,024 bytes of `data`; its own checksum is verified, the payload's is not."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise BadBytesError(f"a slot header of {len(view)} bytes")
    (
        magic,
        version,
        algorithm,
        key_bytes,
        index,
        count,
        payload_bytes,
        generation,
        length,
        payload_checksum,
    ) = _HEADER_FRONT.unpack_from(view)
    if magic != SLOT_MAGIC:
        raise BadBytesError("no slot header: wrong magic")
    if version != FORMAT_VERSION:
        raise OtherVersionError("a slot header", version)
    if xxh3_64_intdigest(view[:_HEADER_SUMMED_BYTES]) != _U64.unpack_from(view, _HEADER_SUMMED_BYTES)[0]:
        raise BadBytesError("a slot header with a wrong checksum")
    if algorithm != CHECKSUM_XXH3_64 or key_bytes > _KEY_FIELD_BYTES:
        raise BadBytesError(f"a slot header with checksum algorithm {algorithm} and a key of {key_bytes} bytes")
    card_uuid, key, family, position = _HEADER_BACK.unpack_from(view, _HEADER_FRONT.size)
    return SlotHeader(
        key[:key_bytes],
        index,
        count,
        payload_bytes,
        generation,
        length,
        payload_checksum,
        card_uuid,
        family,
        position,
    )


def place_in_slot_header(data: Buffer) -> tuple[int, int]:
    """(family, position) in the bytes of a slot header, whatever else they are."""
    _, _, family, position = _HEADER_BACK.unpack_from(data, _HEADER_FRONT.size)
    return family, position


_HEADER_FRONT = struct.Struct("<8sHBBIIIQQQ")
_HEADER_NUMBERS = struct.Struct("<IIIQQQ")  # the end of _HEADER_FRONT
_HEADER_NUMBERS_AT = _HEADER_FRONT.size - _HEADER_NUMBERS.size
_HEADER_BACK = struct.Struct("<16s64sQI")
_FRAGMENT_AT, _PAYLOAD_BYTES_AT, _PAYLOAD_CHECKSUM_AT = (_HEADER_NUMBERS_AT + at for at in (0, 8, 28))
_PLACE_BYTES = 12
SLOT_HEADER_FORM = struct.pack(
    "=6Q",
    HEADER_BYTES,
    _FRAGMENT_AT,
    _PAYLOAD_BYTES_AT,
    _PAYLOAD_CHECKSUM_AT,
    _HEADER_FRONT.size + _HEADER_BACK.size - _PLACE_BYTES,
    _PLACE_BYTES,
)
"""For the optional library (`native`): where in a header stands what differs among an object's slots.

Bytes of a header, of which the last 8 are its checksum; where the fragment's index, the payload's bytes and its
checksum are; where its place (family and position) is, and how long that is. Numbers of this machine.
"""
SLOT_HEADER_SAYS = np.dtype(
    {
        "names": ["magic", "version", "key_bytes", "fragment", "generation", "key"],
        "formats": ["<u8", "<u2", "u1", "<u4", "<u8", (np.uint8, _KEY_FIELD_BYTES)],
        "offsets": [0, 8, 11, _HEADER_NUMBERS_AT, _HEADER_NUMBERS_AT + 12, _HEADER_FRONT.size + 16],
        "itemsize": _HEADER_FRONT.size + _HEADER_BACK.size,
    }
)
"""What tells one fragment of one object from all others, of many slots at once."""


def pack_superblock(superblock: Superblock) -> bytes:
    """The 4,096 bytes of a superblock."""
    body = SUPERBLOCK.pack(
        DATABASE_MAGIC,
        FORMAT_VERSION,
        superblock.number,
        superblock.databases,
        superblock.slot_bytes,
        superblock.slots,
        superblock.card_uuid,
        superblock.database_uuid,
        superblock.made_at_s,
    )
    return body + _U64.pack(xxh3_64_intdigest(body))


def parse_superblock(data: Buffer) -> Superblock:
    """The superblock in the first 4,096 bytes of `data`.

    The version is looked at before the checksum, so that a newer format is named as such.
    """
    view = memoryview(data)
    if len(view) < SUPERBLOCK_BYTES:
        raise BadBytesError(f"a superblock of {len(view)} bytes")
    magic, version, *fields = SUPERBLOCK.unpack_from(view)
    if magic != DATABASE_MAGIC:
        raise BadBytesError("no superblock: wrong magic")
    if version != FORMAT_VERSION:
        raise OtherVersionError("a database", version)
    if xxh3_64_intdigest(view[:_SUPERBLOCK_SUMMED_BYTES]) != _U64.unpack_from(view, _SUPERBLOCK_SUMMED_BYTES)[0]:
        raise BadBytesError("a superblock with a wrong checksum")
    return Superblock(*fields)


def pack_record(record: Record) -> bytes:
    """A record's bytes, as the index holds them."""
    if len(record.extents) == 1:
        return _RECORD_OF_ONE.pack(*record[:4], 1, *record.extents[0])
    return RECORD.pack(*record[:4], len(record.extents)) + b"".join(EXTENT.pack(*e) for e in record.extents)


def parse_record(data: Buffer) -> Record:
    """The record with these bytes."""
    if len(data) < RECORD.size:
        raise BadBytesError(f"a record of {len(data)} bytes")
    if len(data) == _RECORD_OF_ONE.size:
        generation, length, family, position, extents, *extent = _RECORD_OF_ONE.unpack(data)
        if extents == 1:
            return Record(generation, length, family, position, (Extent._make(extent),))
    generation, length, family, position, extents = RECORD.unpack_from(data)
    if len(data) != RECORD.size + extents * EXTENT.size:
        raise BadBytesError(f"a record of {len(data)} bytes with {extents} extents")
    found = tuple(map(Extent._make, EXTENT.iter_unpack(data[RECORD.size :])))
    return Record(generation, length, family, position, found)


def order_key_of(packed: bytes) -> bytes:
    """Where an object with this packed record stands in the order; its extents are not looked at. BadBytesError."""
    if len(packed) < RECORD.size:
        raise BadBytesError(f"a record of {len(packed)} bytes")
    generation, family, position = _RECORD_PLACE.unpack_from(packed)
    return ORDER_KEY.pack(family, POSITION_MAX - position, generation)


def pack_order_key(family: int, position: int, generation: int) -> bytes:
    """Where an object stands in the order of eviction: the latest chunk of a family comes first."""
    return ORDER_KEY.pack(family, POSITION_MAX - position, generation)


def parse_order_key(data: Buffer) -> tuple[int, int, int]:
    """(family, position, generation) of a key of the order."""
    if len(data) != ORDER_KEY.size:
        raise BadBytesError(f"a key of the order of {len(data)} bytes")
    family, inverted, generation = ORDER_KEY.unpack(data)
    return family, POSITION_MAX - inverted, generation
