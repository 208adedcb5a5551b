"""Slots by their numbers are the memory that a list of views would be, and reach no further."""

import ctypes
import gc
import struct
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xkv_store.slots import Sizes, Slots

SLOT = 16
MEMORY = bytearray(range(SLOT)) * 10
numbers_of = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def plain(numbers: list[int], last_bytes: int) -> list[memoryview]:
    views = [memoryview(MEMORY)[number * SLOT : (number + 1) * SLOT] for number in numbers]
    return [*views[:-1], views[-1][:last_bytes]]


@given(numbers_of, st.integers(1, SLOT), st.data())
def test_they_are_what_a_list_of_views_is(numbers: list[int], last_bytes: int, data: st.DataObject) -> None:
    slots, wanted = Slots(memoryview(MEMORY), SLOT, numbers).cut(last_bytes), plain(numbers, last_bytes)
    assert (list(slots), len(slots), list(slots.sizes)) == (wanted, len(wanted), [len(view) for view in wanted])
    assert [slots[at] for at in range(-len(wanted), len(wanted))] == wanted + wanted
    for at in (len(wanted), -len(wanted) - 1):
        with pytest.raises(IndexError):
            slots[at]
    some = slice(data.draw(st.integers(-7, 7) | st.none()), data.draw(st.integers(-7, 7) | st.none()))
    assert (list(slots[some]), list(slots[some].sizes)) == (wanted[some], [len(view) for view in wanted[some]])
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in wanted[some]]
    assert slots[some].addresses() == struct.pack(f"={len(addresses)}Q", *addresses)


def test_a_write_to_one_is_seen_in_the_memory() -> None:
    memory = bytearray(4 * SLOT)
    Slots(memoryview(memory), SLOT, (2, 1))[0][:3] = b"abc"
    assert memory[2 * SLOT :][:3] == b"abc"


@pytest.mark.parametrize("numbers", [(10,), (0, 10), (-1,), (3, -1, 4), range(8, 11)])
def test_a_number_that_is_not_in_the_memory_is_refused(numbers: tuple[int, ...]) -> None:
    """The library would reach there."""
    with pytest.raises(IndexError, match="of 10"):
        Slots(memoryview(MEMORY), SLOT, numbers)


def test_none_are_none() -> None:
    slots = Slots(memoryview(MEMORY), SLOT, ())
    assert (list(slots), list(slots.sizes), slots.sizes.packed(), slots.addresses()) == ([], [], b"", b"")


def test_they_keep_their_memory() -> None:
    class Memory(bytearray):
        """One that can be watched."""

    memory = Memory(SLOT)
    watched = weakref.ref(memory)
    slots = Slots(memoryview(memory), SLOT, (0,))[:1].cut(SLOT)
    del memory
    gc.collect()
    assert watched() is not None
    del slots
    gc.collect()
    assert watched() is None


@given(
    st.integers(0, 5), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3), st.lists(st.integers(0, 12), max_size=5)
)
def test_sizes_are_a_list_of_numbers(count: int, each: int, last: int, skip: int, others: list[int]) -> None:
    sizes = Sizes(count, each, last)
    plainly = [each] * (count - 1) + [last] if count else []
    assert (list(sizes), len(sizes), sizes[:], sizes[1:]) == (plainly, count, plainly, plainly[1:])
    assert sizes.packed() == struct.pack(f"={count}Q", *plainly)
    fits = len(others) == count and all(skip + other <= own for own, other in zip(plainly, others, strict=False))
    assert sizes.hold(skip, others) == fits
    if len(set(others[:-1])) < 2 and others:
        assert sizes.hold(skip, Sizes(len(others), others[0], others[-1])) == fits
