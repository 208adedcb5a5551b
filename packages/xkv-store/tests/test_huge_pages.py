"""Shared memory in huge pages: where it is mapped, what the kernel gives, and what becomes of a refusal."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from xkv_store import huge_pages
from xkv_store.huge_pages import HUGE_PAGE_BYTES, Mapping
from xkv_store.ring import make_sealed_memory

NAME = "xkv-huge-test"
SIZE = 4 * HUGE_PAGE_BYTES + 12_288
EVERYTHING = [range(SIZE)]


@pytest.fixture
def mapping() -> Mapping:
    fd = make_sealed_memory(NAME, SIZE)
    try:
        return Mapping(fd, SIZE)
    finally:
        os.close(fd)


def kernel_collapses() -> bool:
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    return release >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").is_dir()


def mapped_in_huge_pages() -> int:
    """Bytes of it, as the kernel says."""
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    mappings = re.findall(rf"memfd:{NAME}[^\n]*\n(?:[A-Z]\w+:[^\n]*\n)+", text)
    return sum(
        int(kib) << 10 for one in mappings for kib in re.findall(r"^ShmemPmdMapped: +(\d+) kB", one, re.MULTILINE)
    )


def is_mapped() -> bool:
    return f"memfd:{NAME}" in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_it_begins_where_a_huge_page_can(mapping: Mapping) -> None:
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping.memory))
    assert address % HUGE_PAGE_BYTES == 0
    assert len(mapping.memory) == SIZE


def test_what_a_large_file_costs_does_not_grow_with_it() -> None:
    """Databases have terabytes, and a disk's refuse at the first piece."""
    size = 1 << 42
    fd = make_sealed_memory(NAME, size)
    large = Mapping(fd, size)
    os.close(fd)
    tracemalloc.start()
    try:
        large.use_huge_pages([range(size)], seconds_max=0.0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([range(1), range(0), range(5, 6)], [0]),
        ([range(3 * HUGE_PAGE_BYTES, SIZE), range(HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES + 1)], [0, 1, 3]),
        ([range(HUGE_PAGE_BYTES, SIZE), range(SIZE)], [0, 1, 2, 3]),
    ],
)
def test_each_piece_is_asked_for_once(parts: list[range], wanted: list[int]) -> None:
    assert [number for some in huge_pages._pieces(parts, 4) for number in some] == wanted


def test_it_is_the_file_and_lives_as_long_as_a_view_of_it() -> None:
    fd = make_sealed_memory(NAME, SIZE)
    with mmap.mmap(fd, SIZE) as other:
        first = Mapping(fd, SIZE)
        os.close(fd)
        view = first.memory[SIZE - 5 :]
        view[:] = b"bytes"
        assert other[SIZE - 5 :] == b"bytes"
    del first
    gc.collect()
    assert bytes(view) == b"bytes"
    assert is_mapped()
    del view
    gc.collect()
    assert not is_mapped()


def test_nothing_is_mapped_where_the_kernel_refuses(tmp_path: Path) -> None:
    path = tmp_path / "read-only"
    path.write_bytes(b"x" * 4_096)
    before = len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    with path.open("rb") as file, pytest.raises(OSError, match="Permission denied"):
        Mapping(file.fileno(), 4_096)
    assert len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()) <= before + 1


def address_space() -> int:
    (kib,) = re.findall(r"^VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    return int(kib) << 10


def test_what_was_reserved_beside_it_is_given_back_at_once() -> None:
    before = address_space()
    mappings = []
    for _ in range(64):
        fd = make_sealed_memory(NAME, 4_096)
        mappings.append(Mapping(fd, 4_096))
        os.close(fd)
    assert address_space() - before < 32 * HUGE_PAGE_BYTES
    assert len(mappings) == 64


def test_what_is_there_stays_and_lies_in_huge_pages(mapping: Mapping) -> None:
    pattern = os.urandom(SIZE)
    mapping.memory[:] = pattern
    taken = mapping.use_huge_pages(EVERYTHING)
    assert bytes(mapping.memory) == pattern
    assert mapped_in_huge_pages() == taken
    assert taken == (4 * HUGE_PAGE_BYTES if kernel_collapses() else 0)
    assert mapping.use_huge_pages(EVERYTHING) == taken, "again is no harm"


def test_memory_that_was_never_touched_is_taken_and_is_zero(mapping: Mapping) -> None:
    taken = mapping.use_huge_pages([range(HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES + 2), range(0)])
    assert taken == (HUGE_PAGE_BYTES if kernel_collapses() else 0)
    assert mapped_in_huge_pages() == taken
    assert bytes(mapping.memory) == bytes(SIZE)


@dataclass
class Refusing:
    """The C library; each collapse fails with the next of `errors`, as long as there are any."""

    errors: list[int]
    asked: list[int] = field(default_factory=list)

    def madvise(self, address: int, length: int, advice: int) -> int:
        assert length in {4_096, HUGE_PAGE_BYTES}
        if advice != 25:
            return 0
        self.asked.append(address)
        code = self.errors.pop(0) if self.errors else 0
        ctypes.set_errno(code)
        return -1 if code else 0


@pytest.mark.parametrize(
    ("errors", "asked", "taken"),
    [
        ([errno.EAGAIN, 0, errno.EAGAIN], 4, 2),  # of one piece: the others are asked for
        ([0, errno.ENOMEM], 2, 1),  # there are none left
        ([0, errno.EBUSY], 2, 1),  # a control group's limit is reached: to touch one more page would end the process
        ([errno.EINVAL], 1, 0),  # an older kernel
    ],
)
def test_a_refusal(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch, errors: list[int], asked: int, taken: int
) -> None:
    libc = Refusing(errors)
    monkeypatch.setattr(huge_pages, "_libc", lambda: libc)
    assert mapping.use_huge_pages(EVERYTHING) == taken * HUGE_PAGE_BYTES
    assert len(libc.asked) == asked
    monkeypatch.undo()


def test_it_ends_in_time(mapping: Mapping) -> None:
    assert mapping.use_huge_pages(EVERYTHING, seconds_max=0) <= HUGE_PAGE_BYTES


def test_what_is_smaller_than_a_huge_page_stays_as_it_is() -> None:
    size = HUGE_PAGE_BYTES - 4_096
    fd = make_sealed_memory(NAME, size)
    try:
        small = Mapping(fd, size)
    finally:
        os.close(fd)
    assert small.use_huge_pages([range(size)]) == 0
    small.memory[-1] = 7
    assert mapped_in_huge_pages() == 0


def test_what_a_forked_child_drops_is_its_own_mapping_alone() -> None:
    fd = make_sealed_memory(NAME, SIZE)
    ours = Mapping(fd, SIZE)
    os.close(fd)
    child = os.fork()
    if child == 0:
        ours.memory[0] = 42
        del ours
        gc.collect()
        os._exit(is_mapped())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child still has it"
    assert ours.memory[0] == 42
    assert is_mapped()
