"""The ring: sealed shared memory, the free list, and the plan that divides it over ranks."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_store.errors import PeerError, UserError
from xkv_store.ring import SEALS, Ring, SlotRegion, regions

SLOT = 4_096


@pytest.fixture
def ring() -> Ring:
    return Ring.create(8, SLOT)


def memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_both_sides_see_the_same_bytes(ring: Ring) -> None:
    other = Ring.adopt(os.dup(ring.fd), slots=8, slot_bytes=SLOT)
    ring.slot(3)[:3] = b"abc"
    other.array[7, -1] = 9
    assert bytes(other.slot(3)[:4]) == b"abc\0"
    assert ring.slot(7)[SLOT - 1] == 9
    assert ring.array.shape == (8, SLOT)
    assert ring.array.ctypes.data % 4_096 == 0, "O_DIRECT needs it"
    assert ring.identity == other.identity


def test_some_of_its_slots_are_the_same_memory(ring: Ring) -> None:
    views = ring.views((5, 2))
    views[1][:3] = b"abc"
    assert (bytes(ring.slot(2)[:3]), [len(view) for view in views]) == (b"abc", [SLOT, SLOT])
    for wrong in ((8,), (-1, 2)):
        with pytest.raises(IndexError):
            ring.views(wrong)


def test_nobody_can_make_it_shorter(ring: Ring) -> None:
    """A shorter file would kill the other process with SIGBUS."""
    for size in (0, 100 * SLOT):
        with pytest.raises(PermissionError):
            os.ftruncate(ring.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(ring.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_is_no_ring_is_the_peers_error() -> None:
    """The gateway maps descriptors that clients hand over: none may harm it, and none may leak."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    with tempfile.TemporaryFile() as file:
        file.truncate(8 * SLOT)
        wrong = {
            "unsealed": memfd(8 * SLOT, 0),
            "half sealed": memfd(8 * SLOT, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW),
            "too short": memfd(7 * SLOT, SEALS),
            "too long": memfd(9 * SLOT, SEALS),
            "not to be written": memfd(8 * SLOT, SEALS | fcntl.F_SEAL_WRITE),
            "a pipe": read_end,
            "a file": os.dup(file.fileno()),
        }
    for name, fd in wrong.items():
        with pytest.raises(PeerError):
            Ring.adopt(fd, slots=8, slot_bytes=SLOT)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert name
    for slots, slot_bytes in ((0, SLOT), (8, SLOT + 1), (8, 0), (2**40, SLOT)):
        with pytest.raises(PeerError):
            Ring.adopt(memfd(8 * SLOT, SEALS), slots=slots, slot_bytes=slot_bytes)


def test_views_outlive_the_ring(ring: Ring) -> None:
    """A copy that is under way when an engine ends must not fault."""
    view = ring.slot(1)
    ring.close()
    ring.close()
    view[0] = 1
    assert ring.array[1, 0] == 1


# --- the free list ---------------------------------------------------------------------------------------


def test_neighbours_are_preferred() -> None:
    region = SlotRegion(100, 10)
    assert region.take(3) == [100, 101, 102]
    assert region.take(2) == [103, 104]
    region.give([100, 101, 102])
    assert region.take(4) == [105, 106, 107, 108], "the run that is long enough"
    assert region.take(4) == [100, 101, 102, 109], "pieces, where there is none"
    assert region.take(1) is None
    assert region.free == 0


def test_giving_back_twice_or_what_is_not_ours_is_our_bug() -> None:
    region = SlotRegion(10, 4)
    taken = region.take(2)
    assert taken is not None
    region.give(taken)
    for slots in (taken, [9], [14], [12], [8, 9], [13, 14], [10, 12]):
        with pytest.raises(AssertionError):
            region.give(slots)
    assert SlotRegion(0, 0).take(1) is None


@pytest.mark.parametrize("again", [[1], [2, 3], [3, 4, 5]])
def test_a_run_of_which_one_is_free_is_not_given_back(again: list[int]) -> None:
    region = SlotRegion(0, 6)
    assert region.take(6) is not None
    region.give([1, 4, 3])
    with pytest.raises(AssertionError, match="twice"):
        region.give(again)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60), st.integers(1, 40))
def test_no_slot_is_out_twice_and_none_is_lost(steps: list[tuple[bool, int]], count: int) -> None:
    region = SlotRegion(5, count)
    out: list[list[int]] = []
    for is_take, number in steps:
        held = {slot for slots in out for slot in slots}
        if is_take:
            slots = region.take(number)
            if slots is None:
                assert number > region.free
                continue
            assert len(slots) == number == len(set(slots))
            assert slots == sorted(slots)
            assert not held.intersection(slots)
            assert all(5 <= slot < 5 + count for slot in slots)
            out.append(slots)
        elif out:
            region.give(out.pop(number % len(out)))
        assert region.free == count - sum(map(len, out))


def test_threads_share_a_region() -> None:
    region = SlotRegion(0, 64)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(500):
                slots = region.take(5)
                if slots is not None:
                    region.give(slots)
        except AssertionError as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert region.free == 64


# --- the plan --------------------------------------------------------------------------------------------


@given(st.integers(1, 600), st.integers(1, 9), st.integers(0, 700 * SLOT))
def test_ranks_never_share_a_slot(slots: int, world_size: int, reserve: int) -> None:
    try:
        plan = regions(ring_bytes=slots * SLOT + 17, slot_bytes=SLOT, world_size=world_size, load_reserve_bytes=reserve)
    except UserError:
        assert slots < 2 * world_size
        return
    used = [slot for own in plan for slot in range(own.first, own.first + own.store_slots + own.load_slots)]
    assert len(used) == len(set(used))
    assert max(used) < slots
    assert len(used) > slots - world_size, "what is not used is less than a slot a rank"
    for own in plan:
        assert own.load_first == own.first + own.store_slots
        assert own.store_slots >= 1
        assert own.load_slots >= 1
    if reserve <= (slots // world_size - 1) * world_size * SLOT:
        assert sum(own.load_slots for own in plan) * SLOT >= reserve


def test_a_ring_that_is_too_small_says_how_large_it_must_be() -> None:
    with pytest.raises(UserError, match=r"xkv\.ring_bytes.*at least 8192"):
        regions(ring_bytes=SLOT, slot_bytes=SLOT, world_size=1, load_reserve_bytes=0)
    with pytest.raises(UserError, match="4 ranks need at least 32768"):
        regions(ring_bytes=7 * SLOT, slot_bytes=SLOT, world_size=4, load_reserve_bytes=0)
