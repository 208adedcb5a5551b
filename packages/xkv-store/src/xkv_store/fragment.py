"""An object and its fragments: where each lies, how a slot is sealed, how it is proved.

Owns the plan of an object's pieces, and making and checking slot headers and payload checksums. Pure (memory in,
memory out). Must not know files, the index or threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .errors import CorruptObject, OtherObject
from .geometry import FRAGMENTS_MAX, HEADER_BYTES, Geometry
from .layout import (
    FORMAT_VERSION,
    SLOT_HEADER_SAYS,
    SLOT_MAGIC,
    BadBytesError,
    Extent,
    SlotHeader,
    SlotHeaders,
    checksum,
    parse_slot_header,
    place_in_slot_header,
)
from .native import Headers, payload_checksums
from .slots import Sizes, Slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Identity:
    """What every slot of one object must say."""

    card_uuid: bytes
    key: bytes
    generation: int
    length: int
    family: int
    position: int


class Piece(NamedTuple):
    """Neighbouring fragments of an object in neighbouring slots of one database."""

    database: int
    slot: int
    fragment: int
    slots: int


def pieces(
    extents: Iterable[Extent], first_fragment: int, fragments: int, slots_max: int = FRAGMENTS_MAX
) -> list[Piece]:
    """Where `fragments` fragments from `first_fragment` on lie, in their order; at most `slots_max` in a piece."""
    found = []
    end_fragment = first_fragment + fragments
    at = 0
    for database, slot, slots in extents:
        begin, end = max(at, first_fragment), min(at + slots, end_fragment)
        found += [
            Piece(database, slot + start - at, start, min(slots_max, end - start))
            for start in range(begin, end, slots_max)
        ]
        at += slots
    return found


def prove(slot: memoryview, identity: Identity, geometry: Geometry, fragment: int) -> None:
    """CorruptObject unless `slot` holds exactly this fragment of this object, undamaged."""
    try:
        header = parse_slot_header(slot)
    except BadBytesError as error:
        raise CorruptObject(f"fragment {fragment}: {error}") from error
    payload_bytes = geometry.payload_bytes(identity.length, fragment)
    found = (
        header.card_uuid,
        header.key,
        header.generation,
        header.fragment,
        header.fragments,
        header.length,
        header.payload_bytes,
    )
    wanted = (
        identity.card_uuid,
        identity.key,
        identity.generation,
        fragment,
        geometry.fragments(identity.length),
        identity.length,
        payload_bytes,
    )
    if found != wanted:
        differing = [name for name, one, two in zip(_PROVED, found, wanted, strict=True) if one != two]
        raise OtherObject(f"fragment {fragment}: the slot holds another {', '.join(differing)}")
    if checksum(slot[HEADER_BYTES : HEADER_BYTES + payload_bytes]) != header.payload_checksum:
        raise CorruptObject(f"fragment {fragment}: the payload's checksum is wrong")


class ObjectSlots:
    """Seals and proves the slots of one object, many at once.

    All but a few bytes of their headers are alike, and what is done for each slot is little beside its checksum: of
    many threads that do this, hardly one waits for the interpreter. For one thread.
    """

    def __init__(self, identity: Identity, geometry: Geometry) -> None:
        self._identity = identity
        self._geometry = geometry
        self._place = identity.family, identity.position
        self._made = self._make_headers()

    def _make_headers(self) -> SlotHeaders:
        identity, fragments = self._identity, self._geometry.fragments(self._identity.length)
        return SlotHeaders(
            SlotHeader(
                identity.key,
                0,
                fragments,
                0,
                identity.generation,
                identity.length,
                0,
                identity.card_uuid,
                *self._place,
            )
        )

    def seal(
        self, slots: Sequence[memoryview], first_fragment: int, sums: Sequence[int] | None = None
    ) -> Sequence[memoryview]:
        """Make the headers of the fragments from `first_fragment` on, whose payloads are in `slots`, in place.

        `sums`: the payloads' checksums, where they were made before: what has changed since is then found by whoever
        proves it.

        Returns the parts that are to be written. What lies behind a payload in them is zeroed: it may be another's.
        """
        views = filled(slots, self._identity.length, self._geometry, first_fragment)
        payload_bytes = self.payload_bytes(len(slots), first_fragment)
        end = HEADER_BYTES + payload_bytes.last
        if len(views[-1]) > end:
            views[-1][end:] = bytes(len(views[-1]) - end)
        if sums is None:
            sums = payload_checksums(views, HEADER_BYTES, payload_bytes)
        for view, header in zip(views, self._headers(payload_bytes, sums, first_fragment), strict=True):
            view[:HEADER_BYTES] = header
        return views

    def prove(self, slots: Sequence[memoryview], first_fragment: int, sums: Sequence[int] | None = None) -> None:
        """As `prove`. Headers are made anew and compared; where one differs, `prove` says why, or that it may.

        `sums`: the payloads' checksums, where they were made as they came.

        Its place in the order of eviction may be another by now than when it was sealed: it is taken from the slots.
        """
        if (place := place_in_slot_header(slots[0])) != self._place:
            self._place = place
            self._made = self._make_headers()
        payload_bytes = self.payload_bytes(len(slots), first_fragment)
        if sums is None:
            sums = payload_checksums(slots, HEADER_BYTES, payload_bytes)
        headers = self._headers(payload_bytes, sums, first_fragment)
        for fragment, (slot, header) in enumerate(zip(slots, headers, strict=True), first_fragment):
            if bytes(slot[:HEADER_BYTES]) != header:
                prove(slot, self._identity, self._geometry, fragment)

    def payload_bytes(self, count: int, first_fragment: int) -> Sizes:
        """Payload bytes of each of these fragments; all but an object's last are full."""
        geometry, last = self._geometry, first_fragment + count - 1
        return Sizes(count, geometry.fragment_bytes, geometry.payload_bytes(self._identity.length, last))

    def headers(self, count: int, first_fragment: int) -> Headers:
        """For the library: what `count` slots from this fragment on must say."""
        return Headers(self._made.of(first_fragment, 0, 0), self.payload_bytes(count, first_fragment))

    def _headers(self, payload_bytes: Sequence[int], sums: Sequence[int], first_fragment: int) -> list[bytes]:
        """The headers of slots with these payloads."""
        of = self._made.of
        pairs = zip(payload_bytes, sums, strict=True)
        return [of(fragment, *pair) for fragment, pair in enumerate(pairs, first_fragment)]


def headers_in_row(row: Sequence[tuple[ObjectSlots, int]]) -> Headers:
    """As `ObjectSlots.headers`, of slots of several objects: of each its object, and which of that one's fragments."""
    each = [own.headers(1, fragment) for own, fragment in row]
    return Headers(b"".join(one.templates for one in each), [count for one in each for count in one.payload_bytes])


def hold(ring: npt.NDArray[np.uint8], slots: Sequence[int], key: bytes, generation: int, first_fragment: int) -> bool:
    """Whether headers in these slots of a ring still say: the object's fragments from `first_fragment` on.

    What was proved there once has then not been given away since; so the headers' own checksums are not made again.
    `ring`: shape (slots, bytes of a slot). All at once, since a thread that asks between copies is waited for.
    """
    said = ring[list(slots), : SLOT_HEADER_SAYS.itemsize].view(SLOT_HEADER_SAYS)[:, 0]
    return bool(
        (said["magic"] == int.from_bytes(SLOT_MAGIC, "little")).all()
        and (said["version"] == FORMAT_VERSION).all()
        and (said["generation"] == generation).all()
        and (said["fragment"] == np.arange(first_fragment, first_fragment + len(slots))).all()
        and (said["key_bytes"] == len(key)).all()
        and (said["key"][:, : len(key)] == np.frombuffer(key, np.uint8)).all()
    )


def erase(slot: memoryview) -> None:
    """Take the header away, so that `hold` is false from now on whatever comes into the slot."""
    slot[: len(SLOT_MAGIC)] = bytes(len(SLOT_MAGIC))


def filled(slots: Sequence[memoryview], length: int, geometry: Geometry, first_fragment: int) -> Sequence[memoryview]:
    """Each slot as far as its fragment of an object of `length` bytes fills it."""
    end = first_fragment + len(slots)
    if isinstance(slots, Slots) and len(slots) > 0 and end <= geometry.fragments(length):
        return slots.cut(geometry.slot_fill_bytes(length, end - 1))
    full = max(0, min(end, geometry.fragments(length) - 1) - first_fragment)  # all but an object's last are
    rest = enumerate(slots[full:], first_fragment + full)
    return [*slots[:full], *(slot[: geometry.slot_fill_bytes(length, fragment)] for fragment, slot in rest)]


_PROVED = (
    "card uuid",
    "key",
    "generation",
    "fragment index",
    "fragment count",
    "object length",
    "payload length",
)
