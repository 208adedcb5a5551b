"""What a remote keeps of an object: its key, its bytes, and that nothing else passes for it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from xkv_store.errors import CorruptObject
from xkv_store.fragment import Identity, ObjectSlots
from xkv_store.geometry import HEADER_BYTES, Geometry
from xkv_store.key import ObjectKey
from xkv_store.remote_format import header_of, prove_received, remote_bytes, remote_key

if TYPE_CHECKING:
    from collections.abc import Callable

GEOMETRY = Geometry(8_192)
KEY = ObjectKey(b"n" * 16, 3, b"h" * 32, 1).encode()


def sealed(length: int, *, card: bytes = b"c" * 16, generation: int = 7, key: bytes = KEY) -> bytearray:
    """An object as a card has it, slot after slot."""
    content = random.Random(length).randbytes(length)
    fragments, step = GEOMETRY.fragments(length), GEOMETRY.fragment_bytes
    memory = bytearray(fragments * GEOMETRY.slot_bytes)
    slots = slots_of(memory, fragments)
    for number, slot in enumerate(slots):
        part = content[number * step : (number + 1) * step]
        slot[HEADER_BYTES : HEADER_BYTES + len(part)] = part
    ObjectSlots(Identity(card, key, generation, length, 5, 6), GEOMETRY).seal(slots, 0)
    return memory


def slots_of(memory: bytearray, fragments: int) -> list[memoryview]:
    size = GEOMETRY.slot_bytes
    return [memoryview(memory)[number * size : (number + 1) * size] for number in range(fragments)]


def received(memory: bytearray, length: int, received_bytes: int | None = None, key: bytes = KEY) -> None:
    slots = slots_of(memory, GEOMETRY.fragments(length))
    count = remote_bytes(length, GEOMETRY) if received_bytes is None else received_bytes
    header = header_of(slots[0], key, count, GEOMETRY)
    assert header.length == length
    prove_received(slots, header, GEOMETRY)


LENGTHS = (1, 100, GEOMETRY.fragment_bytes, GEOMETRY.fragment_bytes + 1, 5 * GEOMETRY.fragment_bytes - 3)


@pytest.mark.parametrize("length", LENGTHS)
def test_what_a_card_has_sealed_is_proved_elsewhere(length: int) -> None:
    received(sealed(length), length)
    last = GEOMETRY.fragments(length) - 1
    assert remote_bytes(length, GEOMETRY) <= (last + 1) * GEOMETRY.slot_bytes
    assert remote_bytes(length, GEOMETRY) >= length + (last + 1) * HEADER_BYTES


def flip(memory: bytearray) -> bytearray:
    memory[3 * GEOMETRY.slot_bytes + 2_000] ^= 1
    return memory


def mixed(**other: object) -> Callable[[bytearray], bytearray]:
    """The second slot is of another put of the same key."""

    def change(memory: bytearray) -> bytearray:
        size = GEOMETRY.slot_bytes
        memory[size : 2 * size] = sealed(LENGTHS[-1], **other)[size : 2 * size]  # type: ignore[arg-type]
        return memory

    return change


def torn(memory: bytearray) -> bytearray:
    memory[2 * GEOMETRY.slot_bytes :] = bytes(len(memory) - 2 * GEOMETRY.slot_bytes)
    return memory


@pytest.mark.parametrize(
    "spoil", [flip, torn, mixed(generation=8), mixed(card=b"d" * 16)], ids=["flipped", "torn", "two puts", "two cards"]
)
def test_anything_else_is_corrupt(spoil: Callable[[bytearray], bytearray]) -> None:
    """Else bytes of two machines, or half an object, would be served as one."""
    with pytest.raises(CorruptObject):
        received(spoil(sealed(LENGTHS[-1])), LENGTHS[-1])


def test_another_keys_object_and_a_wrong_number_of_bytes_are_corrupt() -> None:
    other = ObjectKey(b"n" * 16, 3, b"i" * 32, 1).encode()
    with pytest.raises(CorruptObject, match="another key"):
        received(sealed(100, key=other), 100)
    with pytest.raises(CorruptObject, match="bytes"):
        received(sealed(100), 100, received_bytes=remote_bytes(100, GEOMETRY) - 1)
    with pytest.raises(CorruptObject):
        received(bytearray(GEOMETRY.slot_bytes), 100)


def test_the_key_is_a_digest_of_version_slot_size_and_key() -> None:
    """Drawn in docs/format.md: another version of this program finds it, or does not look for it."""
    assert remote_key(KEY, GEOMETRY) == "xkv1-e812bf584df245437fe03b0c7319b9a537ffd15b"
    assert len(remote_key(KEY, GEOMETRY)) == 45
    assert remote_key(KEY, GEOMETRY) != remote_key(KEY, Geometry())
    assert remote_key(KEY, GEOMETRY) != remote_key(KEY[:-1] + b"\0", GEOMETRY)


def test_what_changes_after_its_proof_is_found_although_it_is_sealed_anew() -> None:
    """A late write of the library's: sealed by new checksums, it would be right for ever."""
    length, size = LENGTHS[-1], GEOMETRY.slot_bytes
    memory = sealed(length)
    slots = slots_of(memory, GEOMETRY.fragments(length))
    header = header_of(slots[0], KEY, remote_bytes(length, GEOMETRY), GEOMETRY)
    sums = prove_received(slots, header, GEOMETRY)
    own = ObjectSlots(Identity(b"o" * 16, KEY, 99, length, 5, 6), GEOMETRY)
    own.prove(own.seal(slots, 0, sums), 0)
    memory[3 * size + 2_000] ^= 1
    with pytest.raises(CorruptObject):
        own.prove(own.seal(slots, 0, sums), 0)
