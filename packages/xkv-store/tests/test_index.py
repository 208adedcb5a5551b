"""The index: what was applied is read, in the order of eviction, and damage is told before LMDB dies of it."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from xkv_store.errors import MediumError, UserError
from xkv_store.index import LOCK_BYTES, Index, Meta, RemoveObject, SetNamespace, SetObject
from xkv_store.index_file import DamagedIndexError
from xkv_store.key import ObjectKey
from xkv_store.layout import Extent, Record, pack_order_key, pack_record

META = Meta(b"card-uuid-16byte", 4_096, 1, 0, 0)


def key_of(number: int, rank: int = 0, hash_bytes: int = 16) -> ObjectKey:
    return ObjectKey(bytes(16), 0, number.to_bytes(hash_bytes, "big"), rank)


def record_of(generation: int, family: int = 0, position: int = 0) -> bytes:
    return pack_record(Record(generation, 5, family, position, (Extent(0, generation, 1),)))


def put(number: int, generation: int, family: int = 0, position: int = 0) -> SetObject:
    return SetObject(key_of(number).encode(), record_of(generation, family, position))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def index(folder: Path) -> Iterator[Index]:
    index = Index.create(folder, META, slots=100)
    yield index
    index.close()


def test_what_is_applied_is_there_after_a_kill(index: Index, folder: Path) -> None:
    index.apply([put(1, 1), SetNamespace(b"n" * 16, b"{}")])
    assert index.get(key_of(2).encode()) is None
    index.close()  # nothing is synced by it: the same as a kill for what is committed
    again = Index.open(folder, slots=100)
    assert again.meta() == META
    assert again.get(key_of(1).encode()) == record_of(1)
    assert again.namespaces() == {b"n" * 16: b"{}"}
    again.close()


def test_reads_are_of_one_snapshot_until_refreshed(index: Index) -> None:
    """The overlay stands for what is newer; both must change together."""
    assert index.get(key_of(1).encode()) is None
    index.apply([put(1, 1)])
    assert index.get(key_of(1).encode()) is None
    index.refresh()
    assert index.get(key_of(1).encode()) == record_of(1)


def test_the_order_follows_every_change(index: Index) -> None:
    """An entry left behind would be looked at in every lap; a missing one could never leave."""
    index.apply([put(1, 1, family=9), put(2, 2, family=3, position=1), put(3, 3, family=3, position=7)])
    index.apply([put(1, 4, family=1), RemoveObject(key_of(2).encode()), RemoveObject(key_of(8).encode())])
    index.refresh()
    expected = [(pack_order_key(1, 0, 4), key_of(1).encode()), (pack_order_key(3, 7, 3), key_of(3).encode())]
    assert index.order_from(b"", 10) == expected
    assert index.order_from(b"", 1) == expected[:1]
    assert index.order_from(expected[0][0] + b"\0", 10) == expected[1:]
    assert index.order_from(b"", 10, expected[-1][0]) == expected[:-1]
    assert index.counts() == (2, 2)


def test_a_chunks_ranks_are_found_and_no_others(index: Index) -> None:
    longer = ObjectKey(bytes(16), 0, key_of(1).block_hash + b"\0\0", 0)
    keys = [key_of(1, 0), key_of(1, 300), key_of(2, 0), longer]
    index.apply([SetObject(key.encode(), record_of(n)) for n, key in enumerate(keys, 1)])
    index.refresh()
    assert [key for key, _ in index.chunk(key_of(1).chunk_key, 10)] == [keys[0].encode(), keys[1].encode()]
    assert len(index.chunk(key_of(1).chunk_key, 1)) == 1


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_a_scan_gives_all_in_order(index: Index, batch: int) -> None:
    assert list(index.scan(batch)) == []
    index.apply([put(number, number + 1) for number in range(20)])
    index.refresh()
    found = [pair for keys, records in index.scan(batch) for pair in zip(keys, records, strict=True)]
    assert found == [(key_of(n).encode(), record_of(n + 1)) for n in range(20)]


def test_a_full_map_grows_under_readers(folder: Path) -> None:
    index = Index.create(folder, META, slots=10, map_bytes=1 << 16)
    stop = threading.Event()
    seen: list[bytes | None] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(index.get(key_of(0).encode()))
            index.refresh()

    index.apply([put(0, 1)])
    reader = threading.Thread(target=read)
    reader.start()
    for begin in range(0, 4_000, 500):
        index.apply([put(number, number + 1) for number in range(begin, begin + 500)])
    stop.set()
    reader.join()
    index.refresh()
    assert index.map_bytes() > 1 << 16
    assert index.counts() == (4_000, 4_000)
    assert seen[-1] == record_of(1)
    index.close()


def test_a_map_at_its_bound_is_the_mediums_error_and_applies_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xkv_store.index.MAP_BYTES_MIN", 1 << 12)
    index = Index.create(folder, META, slots=8, map_bytes=1 << 16)
    with pytest.raises(MediumError) as caught:
        index.apply([put(number, number + 1) for number in range(4_000)])
    assert caught.value.errno == errno.ENOSPC
    index.refresh()
    assert index.counts() == (0, 0)
    index.apply([put(1, 1)])
    index.close()


def test_a_lock_file_of_a_dead_process_is_no_obstacle(index: Index, folder: Path) -> None:
    """Its readers would keep old pages for ever, and its mutex may be of another pid namespace."""
    index.close()
    (folder / "lock.mdb").write_bytes(b"\xff" * 8_192)
    again = Index.open(folder, slots=100)
    again.apply([put(1, 1)])
    again.close()


def damage(folder: Path, at: int, content: bytes) -> None:
    with (folder / "data.mdb").open("r+b") as file:
        file.seek(at)
        file.write(content)


def test_a_full_file_system_cannot_end_the_process_by_the_lock_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB writes into a mapping of it: what was not allocated before that is a SIGBUS where there is no room."""
    seen: list[int] = []
    real = lmdb.open

    def watched(path: str, **options: Any) -> lmdb.Environment:
        seen.append(Path(path, "lock.mdb").stat().st_size)
        return real(path, **options)

    monkeypatch.setattr(lmdb, "open", watched)
    index = Index.create(folder, META, slots=100)
    index.apply([put(1, 1)])
    assert index.get(key_of(1).encode()) == record_of(1)
    assert seen == [LOCK_BYTES]
    assert (folder / "lock.mdb").stat().st_size == LOCK_BYTES  # it did not have to grow
    index.close()


def test_damage_is_told_and_not_died_of(index: Index, folder: Path) -> None:
    """LMDB maps the file: reading behind its end would be a SIGBUS, and the gateway could never start again."""
    index.apply([put(number, number + 1) for number in range(2_000)])
    index.close()
    whole = (folder / "data.mdb").read_bytes()
    for cut in (0, 100, 5_000, 50_000):
        (folder / "data.mdb").write_bytes(whole[:cut])
        with pytest.raises(DamagedIndexError):
            Index.open(folder, slots=100)
    for at in (16, 4_096 + 16, 40):
        (folder / "data.mdb").write_bytes(whole)
        damage(folder, at, b"\xff" * 4)
        with pytest.raises(DamagedIndexError):
            Index.open(folder, slots=100)
    (folder / "data.mdb").unlink()
    with pytest.raises(DamagedIndexError):
        Index.open(folder, slots=100)


def test_an_empty_environment_is_damage(folder: Path) -> None:
    folder.mkdir()
    with lmdb.open(str(folder), max_dbs=4) as env:
        env.open_db(b"meta")
    with pytest.raises(DamagedIndexError, match="meta"):
        Index.open(folder, slots=100)


def test_a_newer_format_says_what_to_do(index: Index, folder: Path) -> None:
    index.close()
    with lmdb.open(str(folder), max_dbs=4) as env, env.begin(write=True) as transaction:
        transaction.put(b"format", b"\x02\x00", db=env.open_db(b"meta", transaction))
    with pytest.raises(UserError, match=r"format version 2.*use the release"):
        Index.open(folder, slots=100)


def test_the_order_can_be_made_anew(index: Index) -> None:
    index.apply([put(number, number + 1, family=number) for number in range(10)])
    index.refresh()
    before = index.order_from(b"", 100)
    with index._env.begin(write=True) as transaction:
        transaction.delete(before[3][0], db=index._order)
        transaction.put(b"junk", b"junk", db=index._order)
    index.refresh()
    index.restore_order()
    assert index.order_from(b"", 100) == before


def test_a_ceiling_is_kept(index: Index) -> None:
    index.apply([], 77)
    index.refresh()
    assert index.meta().generation_ceiling == 77


def test_files_are_private(index: Index, folder: Path) -> None:
    index.end_cleanly()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_a_write_error_is_the_mediums(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    monkeypatch.setattr(index, "_apply_one", failing)
    with pytest.raises(MediumError) as caught:
        index.apply([put(1, 1)])
    assert caught.value.errno == errno.ENOSPC
    assert os.strerror(errno.ENOSPC) in str(caught.value)
