"""Sizes: an object's fragments add up to its bytes, and bad sizes are the user's error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xkv_store.errors import UserError
from xkv_store.geometry import FRAGMENT_BYTES, IO_STEP_BYTES, Geometry

lengths = st.integers(0, 1 << 40)
slot_bytes = st.integers(1, 1 << 10).map(lambda n: n * IO_STEP_BYTES)


@given(lengths, slot_bytes)
def test_fragments_hold_exactly_the_object(length: int, slot: int) -> None:
    geometry = Geometry(slot)
    count = geometry.fragments(length)
    last = geometry.payload_bytes(length, count - 1)
    assert count >= 1
    assert (count - 1) * geometry.fragment_bytes + last == length
    assert last > 0 or length == 0
    assert geometry.payload_bytes(length, count) == 0


@given(lengths, slot_bytes, st.integers(0, 3))
def test_fill_covers_header_and_payload_in_whole_steps(length: int, slot: int, from_end: int) -> None:
    geometry = Geometry(slot)
    fragment = max(0, geometry.fragments(length) - 1 - from_end)
    fill = geometry.slot_fill_bytes(length, fragment)
    assert fill % IO_STEP_BYTES == 0
    assert 1024 + geometry.payload_bytes(length, fragment) <= fill <= slot


def test_default_is_the_documented_size() -> None:
    assert Geometry().fragment_bytes == FRAGMENT_BYTES == 261_120
    assert Geometry.of_fragment_bytes(FRAGMENT_BYTES) == Geometry()


@pytest.mark.parametrize("fragment_bytes", [0, -1024, 1024, 261_121, 4096, 1 << 40])
def test_bad_fragment_bytes_say_what_is_allowed(fragment_bytes: int) -> None:
    with pytest.raises(UserError, match="multiple of 4096 less 1024"):
        Geometry.of_fragment_bytes(fragment_bytes)


@pytest.mark.parametrize("slot", [0, 1, 4095, 6000, -4096, 1 << 30])
def test_bad_slot_bytes_say_what_is_allowed(slot: int) -> None:
    with pytest.raises(UserError, match="multiple of 4096"):
        Geometry(slot)
