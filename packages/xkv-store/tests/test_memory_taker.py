"""A database on a tmpfs: its memory is there before a put comes to it, and the thread that takes it ends when asked."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_store.database import Database, aligned_slots
from xkv_store.errors import UserError
from xkv_store.geometry import DATA_OFFSET
from xkv_store.huge_pages import HUGE_PAGE_BYTES, Mapping, is_memory
from xkv_store.layout import Superblock
from xkv_store.memory_limit import GroupLimit
from xkv_store.memory_taker import MemoryTaker

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = Path("/dev/shm")
SIZE = 5 * HUGE_PAGE_BYTES
SLOT = 4_096
WAIT_S = 30
GROUPS = Path("/sys/fs/cgroup")
LIMIT = 256 << 20  # of a control group, half of which is less than…
LARGE = 448 << 20  # …a database that was made outside it


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this process's control group holds."""
    monkeypatch.setattr("xkv_store.memory_taker.groups_have_room", lambda: True)


@pytest.fixture
def mapping() -> Iterator[Mapping]:
    """A file in memory that is allocated, and of which no page was ever touched."""
    with tempfile.NamedTemporaryFile(dir=MEMORY, prefix="xkv-test-") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
        if not is_memory(file.fileno()):
            pytest.fail("/dev/shm is no tmpfs here")
        yield Mapping(file.fileno(), SIZE)


def test_of_a_file_on_a_disk_there_is_nothing_to_take(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        assert not is_memory(file.fileno())
    assert not is_memory(file_descriptor_that_is_none())
    taker = MemoryTaker(None)
    taker.begin()
    assert taker.word is None
    taker.close()


def file_descriptor_that_is_none() -> int:
    fd = os.memfd_create("xkv-test")
    os.close(fd)
    return fd


def test_everything_is_taken_and_nothing_is_changed(mapping: Mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping.memory[HUGE_PAGE_BYTES + 7 : HUGE_PAGE_BYTES + 13] = b"before"
    looked_at: list[int] = []
    genuine = Mapping._use_huge_page

    def piece(self: Mapping, number: int) -> int:
        looked_at.append(number)
        return genuine(self, number)

    monkeypatch.setattr(Mapping, "_use_huge_page", piece)
    taker = MemoryTaker(mapping)
    taker.begin()
    assert taker.word in {"taking", "taken"}
    assert taker._thread is not None
    taker._thread.join(WAIT_S)
    assert taker.word == "taken"
    assert looked_at == list(range(5))
    assert bytes(mapping.memory[HUGE_PAGE_BYTES + 7 : HUGE_PAGE_BYTES + 13]) == b"before"
    taker.close()


def test_its_end_is_that_of_the_present_piece(mapping: Mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, pieces = threading.Event(), threading.Event(), []

    def piece(_: Mapping, number: int) -> int:
        pieces.append(number)
        begun.set()
        assert go_on.wait(WAIT_S)
        return 0

    monkeypatch.setattr(Mapping, "_use_huge_page", piece)
    taker = MemoryTaker(mapping)
    taker.begin()
    assert begun.wait(WAIT_S)
    assert taker.word == "taking"
    taker._unwanted.set()
    go_on.set()
    taker.close()
    assert (pieces, taker.word) == ([0], "partly")


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EINVAL], ids=["none free", "an old kernel"])
def test_where_there_are_no_huge_pages_it_is_taken_in_small_ones(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(Mapping, "_use_huge_page", lambda *_: error)
    taker = MemoryTaker(mapping)
    taker.begin()
    assert taker._thread is not None
    taker._thread.join(WAIT_S)
    assert taker.word == "taken"
    assert resident_bytes(mapping) == SIZE
    taker.close()


def test_where_the_group_has_no_room_nothing_is_charged_to_it(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []

    def piece(_: Mapping, number: int) -> int:
        pieces.append(number)
        return 0

    monkeypatch.setattr(Mapping, "_use_huge_page", piece)
    monkeypatch.setattr("xkv_store.memory_taker.groups_have_room", lambda: len(pieces) < 2)
    monkeypatch.setattr("xkv_store.memory_taker.PIECES_PER_LOOK", 1)
    taker = MemoryTaker(mapping)
    taker.begin()
    taker.close()
    assert len(pieces) in range(1, 3)
    monkeypatch.setattr("xkv_store.memory_taker.groups_have_room", lambda: False)
    taker = MemoryTaker(mapping)
    taker.begin()
    assert taker._thread is not None
    taker._thread.join(WAIT_S)
    assert (len(pieces) in range(1, 3), taker.word) == (True, "taken")


def test_what_the_kernel_does_not_give_is_not_taken(mapping: Mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mapping, "_use_huge_page", lambda *_: errno.EINVAL)
    monkeypatch.setattr("xkv_store.huge_pages._POPULATE_READ", 255)
    taker = MemoryTaker(mapping)
    taker.begin()
    assert taker._thread is not None
    taker._thread.join(WAIT_S)
    assert taker.word == "partly"
    taker.close()


def resident_bytes(mapping: Mapping) -> int:
    """Of its pages, those in this process's page table."""
    with Path("/proc/self/smaps").open(encoding="utf-8") as file:
        lines = iter(file)
        for line in lines:
            if line.startswith(f"{mapping.address:x}-"):
                return next(int(one.split()[1]) << 10 for one in lines if one.startswith("Rss:"))
    raise AssertionError


def test_where_no_thread_is_to_be_had_nothing_is_lost(mapping: Mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    taker = MemoryTaker(mapping)
    taker.begin()
    taker.close()
    assert taker.word is None


def new_database(folder: str) -> Path:
    path = Path(folder) / "db"
    Database.make(path, Superblock(0, 1, SLOT, SIZE // SLOT, bytes(16), bytes(16), 0))
    return path


def test_a_database_in_memory_is_taken_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xkv_store.database._use_huge_pages", lambda _fd, _needed: None)  # nothing of it before
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="xkv-test-") as folder:
        with closing(Database.open(new_database(folder))) as database:
            words = [database.memory]
            database.take_memory()
            words.append(database.memory)
        assert words in ([None, "taking"], [None, "taken"])
        assert database.memory in {"taken", "partly"}


@pytest.mark.parametrize("how", ["cut", "a hole"])
def test_what_was_taken_from_a_file_is_not_taken_again(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Others may have that memory by now: it comes with what is put there, or not."""
    monkeypatch.setattr("xkv_store.database._use_huge_pages", lambda _fd, _needed: None)
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="xkv-test-") as folder:
        path = new_database(folder)
        with closing(Database.open(path)) as database:
            size = path.stat().st_size
            os.truncate(path, size - SLOT)
            if how == "a hole":
                os.truncate(path, size)
            held = path.stat().st_blocks
            database.take_memory()
            assert database.memory is None
            assert path.stat().st_blocks == held


@pytest.mark.parametrize("room", [True, False])
def test_a_copy_with_holes_gets_what_it_lacks_when_it_is_opened(monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    """`cp` leaves out what was never written: later there may be no room for it. Where there is none, it is used so."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="xkv-test-") as folder:
        path = new_database(folder)
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(DATA_OFFSET)
            file.write(b"some object" + bytes(SLOT - 11))
        os.truncate(path, DATA_OFFSET + SLOT)
        os.truncate(path, size)
        if not room:
            monkeypatch.setattr("xkv_store.database._use_huge_pages", full)
        with closing(Database.open(path)) as database:
            database.take_memory()
            assert (database.memory is not None) is room
            assert (path.stat().st_blocks * 512 >= size) is room
            slots = aligned_slots(1, SLOT)
            database.read(0, slots)
            assert bytes(slots[0][:11]) == b"some object"


def test_a_database_that_the_control_group_cannot_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """To allocate it would end the process, at each start anew."""
    found = GroupLimit(limit_bytes=SIZE, file=GROUPS / "some" / "memory.max")
    monkeypatch.setattr("xkv_store.database.group_limit", lambda _: found)
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="xkv-test-") as folder:
        path = Path(folder) / "db"
        with pytest.raises(UserError, match=rf"control group may have {SIZE} .*memory.max.*smaller capacity"):
            Database.make(path, Superblock(0, 1, SLOT, SIZE // SLOT, bytes(16), bytes(16), 0))
        assert not path.exists()
        Database.make(path, Superblock(0, 1, SLOT, (SIZE - DATA_OFFSET) // SLOT, bytes(16), bytes(16), 0))


def test_what_a_database_on_a_disk_takes_is_nobodys_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("xkv_store.database.group_limit", lambda _: GroupLimit(limit_bytes=1, file=GROUPS))
    Database.make(tmp_path / "db", Superblock(0, 1, SLOT, SIZE // SLOT, bytes(16), bytes(16), 0))


CHILD = """
import sys
from pathlib import Path
from os import getpid
Path(sys.argv[1]).write_text(str(getpid()))
from xkv_store.database import Database
database = Database.open(Path(sys.argv[2]))
database.take_memory()
database._memory._thread.join()
room = bytearray(int(sys.argv[3]))
print(database.memory)
database.close()
"""


def test_a_gateway_in_a_smaller_group_than_the_one_that_made_the_card_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A huge page is charged to who asks for it, though the small ones were another group's: that was its end."""
    version_1 = (GROUPS / "memory").is_dir()
    group = (GROUPS / "memory" if version_1 else GROUPS) / f"xkv-test-{os.getpid()}"
    if not os.access(group.parent, os.W_OK):  # not root, or a container that has its groups read-only
        return
    monkeypatch.setattr("xkv_store.database._use_huge_pages", lambda _fd, _needed: None)
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="xkv-test-") as folder:
        path = Path(folder) / "db"
        Database.make(path, Superblock(0, 1, SLOT, LARGE // SLOT, bytes(16), bytes(16), 0))
        group.mkdir()
        try:
            limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
            limit.write_text(str(LIMIT), encoding="utf-8")
            words = [sys.executable, "-c", CHILD, str(group / "cgroup.procs"), str(path), str(LIMIT // 4)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode != -signal.SIGKILL, "the kernel ended it"
            assert (done.returncode, done.stdout) == (0, "taken\n"), done.stderr
        finally:
            group.rmdir()


def test_a_database_that_cannot_be_mapped_is_one_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(12, "no memory")

    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="xkv-test-") as folder:
        path = new_database(folder)
        monkeypatch.setattr("xkv_store.database.Mapping", refused)
        with closing(Database.open(path)) as database:
            database.take_memory()
            assert database.memory is None
            assert database.place(3, 2).address == 0
        monkeypatch.undo()
        with closing(Database.open(path)) as database:
            assert database.place(3, 2).address
