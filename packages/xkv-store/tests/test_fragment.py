"""Fragments: pieces cover what was asked for, and a sealed slot proves itself and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xkv_store import fragment as fragment_module
from xkv_store.errors import CorruptObject
from xkv_store.fragment import Identity, ObjectSlots, erase, filled, hold, pieces, prove
from xkv_store.geometry import HEADER_BYTES, Geometry
from xkv_store.layout import Extent, SlotHeader, checksum, pack_slot_header

GEOMETRY = Geometry(8_192)
IDENTITY = Identity(b"u" * 16, b"k" * 40, 7, 17_000, 3, 4)
FRAGMENTS = GEOMETRY.fragments(IDENTITY.length)
extent = st.builds(Extent, st.integers(0, 3), st.integers(0, 1000), st.integers(1, 9))
extents = st.lists(extent, min_size=1, max_size=6)


@given(extents, st.data())
def test_pieces_are_exactly_the_fragments_asked_for(found: list[Extent], data: st.DataObject) -> None:
    places = [(e.database, e.first + n) for e in found for n in range(e.slots)]
    first = data.draw(st.integers(0, len(places) - 1))
    count = data.draw(st.integers(1, len(places) - first))
    covered = [
        (fragment, (database, slot + n))
        for database, slot, begin, slots in pieces(found, first, count)
        for n, fragment in enumerate(range(begin, begin + slots))
    ]
    assert covered == list(enumerate(places))[first : first + count]


def seal(slot: memoryview, identity: Identity, geometry: Geometry, fragment: int) -> memoryview:
    """One slot by itself: what `ObjectSlots` must make of it among others."""
    payload_bytes = geometry.payload_bytes(identity.length, fragment)
    payload_end = HEADER_BYTES + payload_bytes
    fill_bytes = geometry.slot_fill_bytes(identity.length, fragment)
    if fill_bytes > payload_end:
        slot[payload_end:fill_bytes] = bytes(fill_bytes - payload_end)
    header = SlotHeader(
        identity.key,
        fragment,
        geometry.fragments(identity.length),
        payload_bytes,
        identity.generation,
        identity.length,
        checksum(slot[HEADER_BYTES:payload_end]),
        identity.card_uuid,
        identity.family,
        identity.position,
    )
    pack_slot_header(slot, header)
    return slot[:fill_bytes]


def sealed(fragment: int, identity: Identity = IDENTITY) -> memoryview:
    slot = memoryview(bytearray(b"\xee" * 8_192))
    slot[HEADER_BYTES:] = bytes(range(256)) * 28
    return seal(slot, identity, GEOMETRY, fragment)


@pytest.mark.parametrize("fragment", range(FRAGMENTS))
def test_a_sealed_slot_proves_itself(fragment: int) -> None:
    slot = sealed(fragment)
    assert len(slot) == GEOMETRY.slot_fill_bytes(IDENTITY.length, fragment)
    prove(slot, IDENTITY, GEOMETRY, fragment)
    end = HEADER_BYTES + GEOMETRY.payload_bytes(IDENTITY.length, fragment)
    assert not any(slot[end:])


@given(st.integers(0, FRAGMENTS - 1), st.data(), st.integers(1, 255))
def test_any_changed_byte_is_noticed(fragment: int, data: st.DataObject, change: int) -> None:
    slot = sealed(fragment)
    end = HEADER_BYTES + GEOMETRY.payload_bytes(IDENTITY.length, fragment)
    slot[data.draw(st.integers(0, end - 1))] ^= change
    with pytest.raises(CorruptObject):
        prove(slot, IDENTITY, GEOMETRY, fragment)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (Identity(b"v" * 16, b"k" * 40, 7, 17_000, 3, 4), "card uuid"),
        (Identity(b"u" * 16, b"l" * 40, 7, 17_000, 3, 4), "key"),
        (Identity(b"u" * 16, b"k" * 39, 7, 17_000, 3, 4), "key"),
        (Identity(b"u" * 16, b"k" * 40, 8, 17_000, 3, 4), "generation"),
        (Identity(b"u" * 16, b"k" * 40, 7, 17_001, 3, 4), "object length"),
        (Identity(b"u" * 16, b"k" * 40, 7, 30_000, 3, 4), "fragment count"),
    ],
)
def test_a_sound_slot_of_something_else_is_named(other: Identity, names: str) -> None:
    with pytest.raises(CorruptObject, match=names):
        prove(sealed(1, other), IDENTITY, GEOMETRY, 1)


def test_another_fragment_of_the_same_object_is_refused() -> None:
    with pytest.raises(CorruptObject, match="fragment index"):
        prove(sealed(0), IDENTITY, GEOMETRY, 1)


def test_a_slot_never_written_is_refused() -> None:
    with pytest.raises(CorruptObject, match="magic"):
        prove(memoryview(bytearray(8_192)), IDENTITY, GEOMETRY, 0)


def test_only_the_last_slot_is_shorter() -> None:
    slots = [memoryview(bytearray(8_192)) for _ in range(FRAGMENTS)]
    sizes = [len(view) for view in filled(slots, IDENTITY.length, GEOMETRY, 0)]
    assert sizes[:-1] == [8_192] * (FRAGMENTS - 1)
    assert sizes[-1] == GEOMETRY.slot_fill_bytes(IDENTITY.length, FRAGMENTS - 1) < 8_192


def unsealed() -> memoryview:
    slot = memoryview(bytearray(b"\xee" * 8_192))
    slot[HEADER_BYTES:] = bytes(range(256)) * 28
    return slot


@pytest.mark.parametrize(("first", "count"), [(0, FRAGMENTS), (0, 1), (1, FRAGMENTS - 1), (FRAGMENTS - 1, 1)])
def test_an_objects_slots_are_sealed_as_one_by_one(first: int, count: int) -> None:
    own = ObjectSlots(IDENTITY, GEOMETRY)
    for _ in range(2):
        slots = own.seal([unsealed() for _ in range(count)], first)
        assert slots == [sealed(fragment) for fragment in range(first, first + count)]
        own.prove(slots, first)


@given(st.integers(0, FRAGMENTS - 1), st.data(), st.integers(1, 255))
def test_any_changed_byte_is_noticed_among_an_objects_slots(fragment: int, data: st.DataObject, change: int) -> None:
    own = ObjectSlots(IDENTITY, GEOMETRY)
    slots = [sealed(number) for number in range(FRAGMENTS)]
    end = HEADER_BYTES + GEOMETRY.payload_bytes(IDENTITY.length, fragment)
    slots[fragment][data.draw(st.integers(0, end - 1))] ^= change
    with pytest.raises(CorruptObject, match=f"fragment {fragment}"):
        own.prove(slots, 0)


def test_swapped_slots_are_noticed() -> None:
    with pytest.raises(CorruptObject, match="fragment 0"):
        ObjectSlots(IDENTITY, GEOMETRY).prove([sealed(1), sealed(0)], 0)


def test_what_a_header_says_beside_its_identity_is_no_fault() -> None:
    other_place = Identity(b"u" * 16, b"k" * 40, 7, 17_000, 30, 40)
    ObjectSlots(IDENTITY, GEOMETRY).prove([sealed(1, other_place)], 1)


def test_what_was_filed_elsewhere_since_is_proved_with_one_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is every object which is asked for often."""
    payloads: list[int] = []

    def counting(payload: memoryview) -> int:
        payloads.append(len(payload))
        return checksum(payload)

    def counting_many(buffers: list[memoryview], skip: int, payload_bytes: list[int]) -> list[int]:
        return [counting(buffer[skip : skip + n]) for buffer, n in zip(buffers, payload_bytes, strict=True)]

    monkeypatch.setattr(fragment_module, "checksum", counting)
    monkeypatch.setattr(fragment_module, "payload_checksums", counting_many)
    slots = [sealed(number) for number in range(FRAGMENTS)]
    ObjectSlots(replace(IDENTITY, family=1 << 63 | 9, position=5), GEOMETRY).prove(slots, 0)
    assert len(payloads) == FRAGMENTS


def test_slots_hold_the_fragments_that_were_sealed_in_them() -> None:
    key, generation = IDENTITY.key, IDENTITY.generation
    ring = np.zeros((4, GEOMETRY.slot_bytes), np.uint8)
    for slot, fragment in enumerate((2, 0, 1, 1)):
        seal(memoryview(ring[slot]), IDENTITY, GEOMETRY, fragment)
    assert hold(ring, [1, 2, 0], key, generation, 0)
    assert hold(ring, [3, 0], key, generation, 1)
    assert hold(ring, (), key, generation, 0)
    assert not hold(ring, [2, 1], key, generation, 0), "swapped"
    assert not hold(ring, [1, 2], key, generation, 1)
    assert not hold(ring, [1, 2], key, generation + 1, 0)
    assert not hold(ring, [1], key[:-1], generation, 0)
    assert not hold(ring, [1], key + b"\0", generation, 0), "a longer key that only fills the field as well"
    assert not hold(ring, [1], b"K" + key[1:], generation, 0)
    ring[1, 8] += 1  # the format's version
    assert not hold(ring, [1], key, generation, 0)
    erase(memoryview(ring[2]))
    assert not hold(ring, [2], key, generation, 1)
