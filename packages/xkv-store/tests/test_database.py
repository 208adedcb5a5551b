"""A database: slots come back as written in runs, short moves go on, and bad files are the user's error."""

import errno
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from xkv_store import database as module
from xkv_store.database import Database, aligned, new_superblock, read_superblock
from xkv_store.errors import CorruptObject, MediumError, UserError
from xkv_store.geometry import DATA_OFFSET
from xkv_store.huge_pages import HUGE_PAGE_BYTES, Mapping
from xkv_store.layout import Superblock
from xkv_store.ring import make_sealed_memory

SLOT = 8_192
UUID = b"card-uuid-16byte"


def superblock(slots: int = 8, card_uuid: bytes = UUID) -> Superblock:
    return new_superblock(
        number=0, databases=1, slot_bytes=SLOT, slots=slots, card_uuid=card_uuid, database_uuid=b"d" * 16
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "db-0.xkv"
    Database.make(path, superblock())
    return path


def buffers(count: int, seed: int = 0) -> list[memoryview]:
    memory = aligned(count * SLOT)
    for at in range(count):
        memory[at * SLOT : (at + 1) * SLOT] = bytes([seed + at + 1]) * SLOT
    return [memory[at * SLOT : (at + 1) * SLOT] for at in range(count)]


def test_slots_come_back_as_written(path: Path) -> None:
    database = Database.open(path)
    written = buffers(5)
    database.write(2, [*written[:4], written[4][:4096]])
    read = buffers(5, seed=100)
    database.read(2, [*read[:4], read[4][:4096]])
    assert read[:4] == written[:4]
    assert read[4][:4096] == written[4][:4096]
    assert read[4][4096:] == buffers(1, seed=104)[0][4096:]
    with path.open("rb") as file:
        file.seek(DATA_OFFSET + 2 * SLOT)
        assert file.read(SLOT) == written[0]
    database.sync()
    database.close()


def test_the_file_is_private_and_allocated_in_full(path: Path) -> None:
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == DATA_OFFSET + 8 * SLOT
    assert status.st_blocks * 512 >= status.st_size


@pytest.mark.parametrize("step", [4096, 12_288, 5_000])
def test_short_moves_go_on(path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A signal or a full device may end a call early; the rest must neither be lost nor land elsewhere."""
    database = Database.open(path)
    if not database.direct:
        step = 5_000

    def short(call: module.Mover) -> module.Mover:
        def moved(fd: int, views: Sequence[memoryview], offset: int) -> int:
            first = memoryview(views[0])[:step] if database.direct is False else views[0][: step // 4096 * 4096]
            return call(fd, [first], offset)

        return moved

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    written = buffers(4)
    database.write(1, written)
    monkeypatch.undo()
    read = buffers(4, seed=100)
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    database.read(1, read)
    assert read == written
    database.close()


def test_after_a_short_move_direct_io_goes_on_at_a_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses an unaligned rest; the object would be lost for nothing."""
    offsets: list[int] = []
    real = os.pwritev

    def short(fd: int, views: Sequence[memoryview], offset: int) -> int:
        offsets.append(offset)
        return real(fd, [views[0][:5_000]], offset)

    fd = os.open(path, os.O_RDWR)
    database = Database(path, fd, read_superblock(path), direct=True, claim_fd=fd)
    monkeypatch.setattr(os, "pwritev", short)
    written = buffers(2)
    database.write(0, written)
    read = buffers(2, seed=50)
    database.read(0, read)
    assert read == written
    assert offsets == [DATA_OFFSET + at * 4_096 for at in range(4)]
    database.close()


def test_one_call_moves_neighbouring_slots_within_its_bounds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def counted(_: int, views: Sequence[memoryview], offset: int) -> int:
        calls.append((offset, len(views)))
        return sum(map(len, views))

    database = Database.open(path)
    monkeypatch.setattr(module, "IO_BYTES_MAX", 3 * SLOT)
    monkeypatch.setattr(os, "pwritev", counted)
    database.write(0, buffers(8))
    assert calls == [(DATA_OFFSET + at * SLOT, count) for at, count in ((0, 3), (3, 3), (6, 2))]
    calls.clear()
    monkeypatch.setattr(module, "IOV_MAX", 2)
    database.write(0, buffers(3))
    assert [count for _, count in calls] == [2, 1]
    database.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failing_device_is_the_mediums_error(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    database = Database.open(path)
    monkeypatch.setattr(os, "pwritev", failing)
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(MediumError) as caught:
        database.write(0, buffers(1))
    assert caught.value.errno == number
    with pytest.raises(MediumError) as caught:
        database.read(0, buffers(1))
    assert not isinstance(caught.value, CorruptObject)
    database.close()


def test_a_write_that_makes_no_progress_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database.open(path)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(MediumError):
        database.write(0, buffers(1))
    database.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("left", [0, 1_000, 4_096, 4_097])
def test_reading_behind_the_end_is_a_corrupt_object(path: Path, left: int) -> None:
    """An end within a step gives a part of it for ever."""
    database = Database.open(path)
    os.truncate(path, DATA_OFFSET + SLOT + left)
    with pytest.raises(CorruptObject):
        database.read(0, buffers(2))
    database.close()


def test_a_cut_file_is_made_whole_at_the_start(path: Path) -> None:
    os.truncate(path, DATA_OFFSET + SLOT)
    database = Database.open(path)
    assert path.stat().st_size == DATA_OFFSET + 8 * SLOT
    read = buffers(8)
    database.read(0, read)
    assert read[7] == bytes(SLOT)
    database.close()


def test_no_direct_io_is_a_stated_fallback(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refusing(name: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_open(name, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    database = Database.open(path)
    assert not database.direct
    database.write(0, buffers(2))
    read = buffers(2, seed=9)
    database.read(0, read)
    assert read == buffers(2)
    database.close()


def test_a_probe_that_reads_something_else_is_a_fallback(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 4096)
    database = Database.open(path)
    assert not database.direct
    database.close()


@pytest.mark.parametrize("offset", [0, 4096])
def test_one_damaged_superblock_is_mended_from_the_other(path: Path, offset: int) -> None:
    before = path.read_bytes()[:8192]
    with path.open("r+b") as file:
        file.seek(offset + 20)
        file.write(b"damage")
    Database.open(path).close()
    assert path.read_bytes()[:8192] == before


def test_two_damaged_superblocks_are_the_users_to_know(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(8192))
    with pytest.raises(UserError, match="not a database"):
        Database.open(path)


def test_a_newer_format_says_what_to_do(path: Path) -> None:
    with path.open("r+b") as file:
        for offset in (0, 4096):
            file.seek(offset + 8)
            file.write(b"\x02")
    with pytest.raises(UserError, match=r"format version 2.*use the release of xkv that made it"):
        read_superblock(path)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing: bring it back"):
        read_superblock(tmp_path / "nothing")


def test_somebody_elses_bytes_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"diary")
    with pytest.raises(UserError, match="holds something already"):
        Database.make(path, superblock())
    assert path.read_bytes() == b"diary"
    other = tmp_path / "other-card"
    Database.make(other, superblock(card_uuid=b"o" * 16))
    with pytest.raises(UserError, match="holds something already"):
        Database.make(other, superblock())


def test_no_space_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"no room .* give a smaller capacity"):
        Database.make(tmp_path / "db", superblock())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"\0" * 65_536 + b"_BHRfS_M", bytes(4_096), b"x"])
def test_a_file_that_is_not_empty_is_never_taken(tmp_path: Path, content: bytes) -> None:
    """A file system's superblock may lie anywhere, and zeros may be somebody's sparse image."""
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"holds something already.*remove it"):
        Database.make(path, superblock())
    assert path.read_bytes() == content


def test_a_making_cut_short_by_a_kill_goes_on(path: Path) -> None:
    os.truncate(path, 8_192)
    Database.make(path, superblock())
    assert path.stat().st_size == DATA_OFFSET + 8 * SLOT


def test_an_empty_file_is_empty_again_where_there_is_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be refused at the next try, as if it were somebody's."""
    path = tmp_path / "db"
    path.touch()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="no room"):
        Database.make(path, superblock())
    assert path.read_bytes() == b""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_cut_file_that_finds_no_room_is_refused_each_time(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """With its full size and a hole it would look whole, and puts would meet the full file system."""

    def full(*_: int) -> None:
        raise OSError(number, "full")

    os.truncate(path, DATA_OFFSET + SLOT)
    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        with pytest.raises(UserError):
            Database.open(path)
    assert path.stat().st_size == DATA_OFFSET + SLOT


@pytest.mark.timeout(10)
def test_what_is_neither_a_file_nor_a_device_is_refused(tmp_path: Path) -> None:
    """To open a fifo would wait for ever."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "folder", tmp_path / "fifo"):
        for use in (read_superblock, module.device_bytes, lambda path: Database.make(path, superblock())):
            with pytest.raises(UserError, match="neither a file nor a block device"):
                use(path)


@pytest.mark.parametrize(("at", "refused"), [(None, False), (65_600, True), (DATA_OFFSET - 1, True)])
def test_a_device_is_taken_only_blank_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int | None, refused: bool
) -> None:
    """Signatures of file systems lie up to 64 KiB in (btrfs); a mounted device opens, but not with O_EXCL."""
    path = tmp_path / "device"
    with path.open("wb") as file:
        file.truncate(DATA_OFFSET + 8 * SLOT)
        if at is not None:
            os.pwrite(file.fileno(), b"\1", at)
    flags: list[int] = []
    real_open = os.open

    def opened(name: Path, how: int, *rest: int) -> int:
        flags.append(how)
        return real_open(name, how & ~os.O_EXCL, *rest)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(stat, "S_ISBLK", lambda _: True)
    if refused:
        with pytest.raises(UserError, match="wipefs"):
            Database.make(path, superblock())
        assert read_zeros(path) == 1
    else:
        Database.make(path, superblock())
        assert read_superblock(path).card_uuid == UUID
    assert any(how & os.O_EXCL for how in flags), "the kernel keeps others away"
    assert not any(how & os.O_CREAT for how in flags)


def read_zeros(path: Path) -> int:
    """Bytes that are not zero."""
    return len(path.read_bytes().replace(b"\0", b""))


def test_a_file_is_one_databases_only(path: Path, tmp_path: Path) -> None:
    """Two cards that write the same slots would destroy each other's objects."""
    (tmp_path / "alias").symlink_to(path)
    database = Database.open(path)
    for use in (Database.open, lambda path: Database.make(path, superblock())):
        with pytest.raises(module.BusyDatabaseError, match="in use"):
            use(tmp_path / "alias")
    database.close()
    Database.open(tmp_path / "alias").close()


def test_a_file_in_memory_lies_in_huge_pages_and_has_no_hole() -> None:
    """On a tmpfs; `Mapping`'s own tests say what a kernel can do at all."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "db-0.xkv")
        Database.make(path, superblock(slots=1_000))
        with path.open("r+b") as file:
            size = path.stat().st_size
            assert path.stat().st_blocks * 512 >= size == DATA_OFFSET + 1_000 * SLOT
            mapping = Mapping(file.fileno(), size)
        before = [bytes(mapping.memory[at : at + 4_096]) for at in range(0, size, HUGE_PAGE_BYTES)]
        found = re.search(
            rf"{re.escape(str(path))}\n(?:[A-Z]\w+:[^\n]*\n)+", Path("/proc/self/smaps").read_text("utf-8")
        )
        assert found is not None
        (mapped,) = re.findall(r"^ShmemPmdMapped: +(\d+) kB", found[0], re.MULTILINE)
        probe = make_sealed_memory("probe", HUGE_PAGE_BYTES)
        given = Mapping(probe, HUGE_PAGE_BYTES).use_huge_pages([range(HUGE_PAGE_BYTES)])
        os.close(probe)
        assert int(mapped) << 10 == (size // HUGE_PAGE_BYTES) * given
        assert read_superblock(path).slots == 1_000
        assert any(before[0]), "the superblock, written before, is still there"
        assert not any(map(any, before[1:]))


def test_a_file_on_a_disk_is_left_in_small_pages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel refuses at the first piece: nothing is read, nothing waits."""
    caplog.set_level("DEBUG", "xkv_store")
    path = tmp_path / "db-0.xkv"
    Database.make(path, superblock(slots=1_000))
    assert path.stat().st_blocks * 512 >= DATA_OFFSET + 1_000 * SLOT
    assert "huge pages" not in caplog.text  # nobody has asked
