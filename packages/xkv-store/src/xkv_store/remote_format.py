"""How an object is kept by a remote: under which key, as which bytes, and how it is proved (docs/format.md).

Owns: the digest, the bytes' order and number, and the proof of what came. Pure (memory in, memory out). Must not know
the remote, its library, cards.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from .errors import CorruptObject
from .fragment import Identity, ObjectSlots, filled
from .geometry import HEADER_BYTES
from .layout import BadBytesError, SlotHeader, parse_slot_header
from .native import payload_checksums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .geometry import Geometry

REMOTE_FORMAT_VERSION: Final = 1
PREFIX: Final = f"xkv{REMOTE_FORMAT_VERSION}-"  # of every remote key, so that people see whose it is
DIGEST_BYTES: Final = 20  # two keys in 2^80 collide, and then the key in the header tells them apart

_HASHED: Final = struct.Struct("<HI")  # format version, slot bytes


def remote_key(encoded_key: bytes, geometry: Geometry) -> str:
    """The remote's key of the object with this key, cut like this: 45 characters."""
    front = _HASHED.pack(REMOTE_FORMAT_VERSION, geometry.slot_bytes)
    return PREFIX + blake2b(front + encoded_key, digest_size=DIGEST_BYTES).hexdigest()


def remote_bytes(length: int, geometry: Geometry) -> int:
    """Bytes that the remote keeps of an object of `length` bytes: whole slots, the last as far as it is filled."""
    last = geometry.fragments(length) - 1
    return last * geometry.slot_bytes + geometry.slot_fill_bytes(length, last)


def header_of(first_slot: memoryview, encoded_key: bytes, received_bytes: int, geometry: Geometry) -> SlotHeader:
    """What came for `encoded_key`, as its first slot says. CorruptObject, also for a wrong number of bytes."""
    try:
        header = parse_slot_header(first_slot)
    except BadBytesError as error:
        raise CorruptObject(f"from the remote: {error}") from error
    if header.key != encoded_key:
        raise CorruptObject("from the remote: another key's object")
    if header.fragment or header.length < 1 or received_bytes != remote_bytes(header.length, geometry):
        raise CorruptObject(f"from the remote: {received_bytes} bytes of an object of {header.length}")
    return header


def prove_received(slots: Sequence[memoryview], header: SlotHeader, geometry: Geometry) -> list[int]:
    """CorruptObject unless `slots`, whole ones, hold all of that object, of that one generation of that one card.

    The checksums of their payloads.
    """
    identity = Identity(header.card_uuid, header.key, header.generation, header.length, header.family, header.position)
    own, views = ObjectSlots(identity, geometry), filled(slots, header.length, geometry, 0)
    sums = payload_checksums(views, HEADER_BYTES, own.payload_bytes(len(views), 0))
    own.prove(views, 0, sums)
    return sums
