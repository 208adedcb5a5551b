"""A card on a medium that fails: a miss and counted, never wrong bytes, and the next put succeeds.

Every test ends with every slot accounted for, and the card whole again.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from xkv_store import index as index_module
from xkv_store.card import Card, CardOptions
from xkv_store.errors import MediumError, UserError
from xkv_store.geometry import DATA_OFFSET, HEADER_BYTES
from xkv_store.index import Index
from xkv_store.key import ObjectKey
from xkv_store.testing.cards import CardDriver
from xkv_store.testing.faults import Fault, FaultPlan, Injector, Kind, Operation, under

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SLOT = 4_096
PAYLOAD = SLOT - HEADER_BYTES
SLOTS = 40
RETRY_MS = 1_001  # after a failed commit
THREE = 3 * PAYLOAD - 100  # bytes of an object of three fragments
ERRNOS = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EINTR, errno.ENOMEM]


@pytest.fixture
def options(tmp_path: Path) -> CardOptions:
    return CardOptions(
        folder=tmp_path / "card", capacity_bytes=DATA_OFFSET + SLOTS * SLOT, databases=1, slot_bytes=SLOT, grace_ms=0
    )


def key_of(number: int) -> ObjectKey:
    return ObjectKey(bytes(16), 0, number.to_bytes(16, "big"), 0)


def content_of(number: int, length: int = THREE) -> bytes:
    return random.Random(number).randbytes(length)


def opened(options: CardOptions, *faults: Fault, seed: int = 0) -> tuple[CardDriver, Injector]:
    """A card with one object (number 0) that was put before anything failed."""
    driver = CardDriver(options)
    assert driver.put_or_fail(key_of(0), content_of(0))
    driver.close()
    with under(FaultPlan(faults, seed)) as injector:
        return CardDriver(options), injector


def crash(driver: CardDriver, injector: Injector) -> None:
    """The next life is on the same medium, which lets it start."""
    with under(injector):
        injector.healthy = True
        driver.crash()
        injector.healthy = False


def whole(driver: CardDriver) -> None:
    """All slots are accounted for, in this life and the next, and the card takes and gives as ever."""
    driver.settle(RETRY_MS)
    assert sum(driver.card.slots().values()) == SLOTS
    assert driver.put_or_fail(key_of(77), content_of(77))
    assert driver.get(key_of(77)) == content_of(77)
    driver.crash()
    assert driver.get(key_of(77)) == content_of(77)
    slots = driver.card.slots()
    assert (slots["in_flight"], slots["limbo"], sum(slots.values())) == (0, 0, SLOTS)
    driver.close()


# --- moves of slots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.FLIP, Kind.ZERO, Kind.CUT, Kind.SWAP, Kind.STALE])
@pytest.mark.parametrize("seed", range(3))
def test_a_write_that_lied_is_a_miss_at_the_first_read(options: CardOptions, kind: Kind, seed: int) -> None:
    at = {Kind.FLIP: (0, HEADER_BYTES + 5, 2 * SLOT + HEADER_BYTES)[seed], Kind.CUT: seed * SLOT}.get(kind)
    driver, injector = opened(options, Fault(operation=Operation.WRITE, kind=kind, nth=1, at=at), seed=seed)
    assert driver.put_or_fail(key_of(1), content_of(1)), "nothing was noticed"
    assert driver.get_or_drop(key_of(1)) is None
    assert injector.effects == {(Operation.WRITE, kind): 1}
    assert driver.card.counters()["dropped_corrupt"] == 1
    assert driver.get_or_drop(key_of(0)) in (None, content_of(0)), "a stray write may have hit it"
    assert driver.put_or_fail(key_of(1), content_of(1)), "a fresh put heals it"
    assert driver.get(key_of(1)) == content_of(1)
    whole(driver)


@pytest.mark.parametrize("kind", [Kind.STALE, Kind.CUT])
def test_a_replacement_that_never_arrived_does_not_show_the_former(options: CardOptions, kind: Kind) -> None:
    """The new slots hold an object of the same key that was evicted: all sound, and not what was asked for."""
    full_at = SLOTS // 3
    driver, injector = opened(options, Fault(operation=Operation.WRITE, kind=kind, nth=full_at, times=100, at=0))
    for number in range(1, 40):
        assert driver.put_or_fail(key_of(0), content_of(number))
        driver.settle(1)
    assert injector.effects.total() > full_at, "so many that slots of this very key were used again"
    assert driver.get_or_drop(key_of(0)) is None
    injector.healthy = True
    assert driver.put_or_fail(key_of(0), content_of(60))
    assert driver.get(key_of(0)) == content_of(60)
    whole(driver)


@pytest.mark.parametrize("error", ERRNOS)
@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.LATE_ERROR])
def test_a_write_that_fails_is_a_failed_put(options: CardOptions, kind: Kind, error: int) -> None:
    driver, _ = opened(options, Fault(operation=Operation.WRITE, kind=kind, nth=2, error=error))
    assert driver.put_or_fail(key_of(1), content_of(1))
    assert not driver.put_or_fail(key_of(1), content_of(2)), "the second write"
    assert driver.get(key_of(1)) == content_of(1), "what it should have replaced stays"
    assert not driver.get(key_of(2))
    assert driver.card.counters()["puts_failed"] == 1
    assert driver.put_or_fail(key_of(1), content_of(3))
    assert driver.get(key_of(1)) == content_of(3)
    whole(driver)


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
@pytest.mark.parametrize("cut_bytes", [1, SLOT, 2 * SLOT, 2 * SLOT + 100])
def test_a_short_move_goes_on(options: CardOptions, operation: Operation, cut_bytes: int) -> None:
    driver, injector = opened(options, Fault(operation=operation, kind=Kind.SHORT, nth=1, cut_bytes=cut_bytes))
    assert driver.put_or_fail(key_of(1), content_of(1))
    assert driver.get(key_of(1)) == content_of(1)
    assert injector.effects.total() == 1
    whole(driver)


@pytest.mark.parametrize("kind", [Kind.FLIP, Kind.ZERO, Kind.CUT, Kind.SWAP])
def test_a_read_that_lies_is_a_miss(options: CardOptions, kind: Kind) -> None:
    """One bad read and one bad medium look the same: the object leaves, and a fresh put brings it back."""
    driver, _ = opened(options, Fault(operation=Operation.READ, kind=kind, nth=1, at=SLOT + HEADER_BYTES))
    assert driver.get_or_drop(key_of(0)) is None
    assert driver.card.begin_get(key_of(0), driver.now_ns) is None
    assert driver.card.counters()["dropped_corrupt"] == 1
    assert driver.put_or_fail(key_of(0), content_of(1))
    assert driver.get(key_of(0)) == content_of(1)
    whole(driver)


@pytest.mark.parametrize("error", ERRNOS)
def test_a_read_that_fails_is_a_miss_and_an_unreadable_object_leaves(options: CardOptions, error: int) -> None:
    driver, _ = opened(options, Fault(operation=Operation.READ, kind=Kind.ERROR, nth=1, error=error))
    assert driver.get_or_drop(key_of(0)) is None
    assert driver.get_or_drop(key_of(0)) == (None if error == errno.EIO else content_of(0))
    assert driver.card.counters().get("dropped_unreadable", 0) == (error == errno.EIO)
    whole(driver)


# --- the index ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRNOS)
@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.LATE_ERROR])
@pytest.mark.parametrize("crash", [False, True])
def test_a_commit_that_fails_fails_its_puts(options: CardOptions, kind: Kind, error: int, crash: bool) -> None:
    driver, _ = opened(options, Fault(operation=Operation.COMMIT, kind=kind, nth=1, error=error))
    assert not driver.put_or_fail(key_of(1), content_of(1))
    assert driver.get(key_of(1)) is None
    assert driver.card.counters()["commits_failed"] == 1
    if crash:  # a commit that was done and not told of may show its object in the next life, whole
        driver.crash()
        assert driver.get(key_of(1)) == (content_of(1) if kind is Kind.LATE_ERROR else None)
    driver.tick(RETRY_MS)
    assert driver.put_or_fail(key_of(1), content_of(2))
    assert driver.get(key_of(1)) == content_of(2)
    assert driver.get(key_of(0)) == content_of(0)
    whole(driver)


@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.LATE_ERROR])
def test_a_commit_of_evictions_that_fails_frees_nothing_before_its_time(options: CardOptions, kind: Kind) -> None:
    """Slots given away while the index may still name them would be two objects' after a crash."""
    fault = Fault(operation=Operation.COMMIT, kind=kind, nth=1, times=1_000, error=errno.ENOSPC)
    driver, injector = opened(options, fault)
    injector.healthy = True
    for number in range(1, SLOTS // 3):
        assert driver.put_or_fail(key_of(number), content_of(number), family=number)
    injector.healthy = False
    for number in range(100, 120):
        driver.put_or_fail(key_of(number), content_of(number), family=number)
        driver.settle_or_fail(RETRY_MS)
        assert sum(driver.card.slots().values()) == SLOTS
    assert driver.card.counters()["evicted_objects"] > 0
    assert injector.effects[Operation.COMMIT, kind] > 10
    crash(driver, injector)
    found = [driver.get(key_of(number)) for number in range(SLOTS // 3)]
    if kind is Kind.ERROR:
        assert None not in found, "no removal was ever committed"
    assert all(one in (None, content_of(number)) for number, one in enumerate(found))
    injector.healthy = True
    driver.tick(RETRY_MS)
    for number in range(200, 230):
        driver.put_or_fail(key_of(number), content_of(number), family=number)
        driver.settle(1)
    assert driver.card.counters()["puts_confirmed"] > 20
    whole(driver)


def test_a_map_that_is_full_grows_and_at_its_bound_is_no_space(options: CardOptions) -> None:
    driver, _ = opened(options, Fault(operation=Operation.COMMIT, kind=Kind.FULL, nth=1, times=2))
    before = driver.card.status()["index_map_bytes"]
    assert driver.put_or_fail(key_of(1), content_of(1))
    assert driver.card.status()["index_map_bytes"] == 4 * before
    whole(driver)


def test_a_real_full_map_fails_puts_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB itself says that it is full; what is there stays readable, and the next start has a larger map."""
    slots = 3_000
    options = CardOptions(
        folder=tmp_path / "card", capacity_bytes=DATA_OFFSET + slots * SLOT, slot_bytes=SLOT, grace_ms=0
    )
    with monkeypatch.context() as small:
        small.setattr(index_module, "MAP_BYTES_MIN", 1 << 17)
        small.setattr(index_module, "INDEX_BYTES_PER_SLOT", 1)
        driver = CardDriver(options)
        driver.card._index._map_bytes_max = 0
        number = 0
        while driver.put_or_fail(key_of(number), content_of(number, 50)):
            number += 1
            assert number < slots - 100, "the map never filled"
        assert driver.card.counters()["commits_failed"] == 1
        assert driver.get(key_of(number)) is None
        assert [driver.get(key_of(n)) for n in range(number)] == [content_of(n, 50) for n in range(number)]
        assert sum(driver.card.slots().values()) == slots
        driver.card.abandon()
    driver = CardDriver(options)
    assert driver.card.status()["objects"] == number
    assert driver.put_or_fail(key_of(number), content_of(number, 50))
    assert driver.get(key_of(number)) == content_of(number, 50)
    driver.close()


def test_a_kernel_that_takes_no_more_of_the_index(options: CardOptions) -> None:
    """The limit of a file's size fails a real write of LMDB's, in the middle of a commit."""
    driver, _ = opened(options)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(1, 4):
        descriptor = str(number) * 20_000
        driver.card.contents.put_namespace(bytes([number]) * 16, descriptor)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, former[1]))
        try:
            driver.commit_or_fail()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        assert driver.card.counters()["commits_failed"] == number
        assert driver.get(key_of(0)) == content_of(0)
        driver.tick(RETRY_MS)
        assert driver.put_or_fail(key_of(number), content_of(number))
        assert driver.card.contents.descriptors()[bytes([number]) * 16] == descriptor, "it rides in the next commit"
        driver.tick(RETRY_MS)
    assert [driver.get(key_of(number)) for number in range(4)] == [content_of(number) for number in range(4)]
    whole(driver)


@pytest.mark.parametrize("reading", [False, True])
def test_an_index_that_lmdb_gives_up_is_opened_again(options: CardOptions, reading: bool) -> None:
    """One meta page that could not be written would be a card of misses until somebody restarts its gateway."""
    driver, injector = opened(options, Fault(operation=Operation.COMMIT, kind=Kind.DEAD, nth=2, times=2))
    assert driver.put_or_fail(key_of(1), content_of(1))
    for number in (2, 3):
        if reading:
            assert driver.get(key_of(0)) == content_of(0)
        assert not driver.put_or_fail(key_of(number), content_of(number))
        assert [driver.get(key_of(n)) for n in (0, 1, number)] == [content_of(0), content_of(1), None]
        driver.tick(RETRY_MS)
    assert injector.effects == {(Operation.COMMIT, Kind.DEAD): 2}
    assert driver.put_or_fail(key_of(2), content_of(4))
    assert driver.get(key_of(2)) == content_of(4)
    assert "index_errors" not in driver.card.counters()
    whole(driver)


def test_an_index_that_cannot_be_opened_again_is_tried_at_each_commit(
    options: CardOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = opened(options, Fault(operation=Operation.COMMIT, kind=Kind.DEAD, nth=1))

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(index_module, "_environment", failing)
        for _ in range(2):
            assert not driver.put_or_fail(key_of(1), content_of(1))
            assert driver.get(key_of(0)) is None, "a miss, and counted"
            driver.tick(RETRY_MS)
    assert driver.card.counters()["index_errors"] > 0
    driver.commit_or_fail()  # this one still fails, and opens it
    driver.tick(RETRY_MS)
    assert driver.put_or_fail(key_of(1), content_of(1))
    assert driver.get(key_of(0)) == content_of(0)
    whole(driver)


def test_an_index_that_cannot_be_read_is_a_miss(options: CardOptions) -> None:
    driver, _ = opened(options, Fault(operation=Operation.LOOKUP, kind=Kind.ERROR, nth=1))
    assert driver.get(key_of(0)) is None
    assert driver.card.counters()["index_errors"] == 1
    assert driver.get(key_of(0)) == content_of(0)
    whole(driver)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_clean_end_that_cannot_sync_says_so_and_loses_nothing(options: CardOptions, error: int) -> None:
    driver, _ = opened(options, Fault(operation=Operation.SYNC, kind=Kind.ERROR, nth=1, error=error))
    with pytest.raises(MediumError, match="syncing"):
        driver.close()
    driver = CardDriver(options)
    assert driver.get(key_of(0)) == content_of(0)
    whole(driver)


# --- the whole medium ---------------------------------------------------------------------------------------


def test_without_direct_io_all_is_the_same(options: CardOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _ = opened(options)
    driver.close()
    real = os.open

    def refusing(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    driver = CardDriver(options)
    assert [database["direct"] for database in driver.card.status()["databases"]] == [False]
    assert driver.get(key_of(0)) == content_of(0)
    assert driver.put_or_fail(key_of(1), content_of(1))
    whole(driver)


def test_a_medium_that_becomes_read_only_serves_what_it_has(options: CardOptions) -> None:
    faults = [
        Fault(operation=operation, kind=Kind.ERROR, nth=1, times=1_000, error=errno.EROFS)
        for operation in (Operation.WRITE, Operation.COMMIT, Operation.SYNC)
    ]
    driver, injector = opened(options, *faults)
    for number in range(5):
        assert not driver.put_or_fail(key_of(1), content_of(number))
        assert driver.get(key_of(0)) == content_of(0)
        driver.tick(RETRY_MS)
    injector.healthy = True
    assert driver.put_or_fail(key_of(1), content_of(9)), "mounted for writing again"
    whole(driver)


@pytest.mark.parametrize("there", [False, True])
def test_a_read_only_medium_is_one_line(options: CardOptions, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    if there:
        opened(options)[0].close()
    real_open, real_mkdir = os.open, os.mkdir

    def read_only(path: Path, flags: int, mode: int = 0o777, **rest: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real_open(path, flags, mode, **rest)

    def no_folder(path: Path, mode: int = 0o777) -> None:
        if not os.path.lexists(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        real_mkdir(path, mode)

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", read_only)
        broken.setattr(os, "mkdir", no_folder)
        with pytest.raises(UserError, match=r"Read-only file system; give a folder that this user can write") as caught:
            Card.open(options)
        assert "\n" not in str(caught.value)
    driver = CardDriver(options)
    whole(driver)


@pytest.mark.parametrize("what", ["database", "index"])
def test_a_newer_card_is_left_as_it_is(options: CardOptions, what: str) -> None:
    """An older release must not mend, rebuild or mark what it does not understand."""
    opened(options)[0].close()
    if what == "database":
        with (options.folder / "db-0.xkv").open("r+b") as file:
            for copy in (0, 4_096):
                file.seek(copy + 8)
                file.write(b"\x02\x00")
    else:
        index = Index.open(options.folder / "index", slots=SLOTS)
        with index._env.begin(write=True) as transaction:
            transaction.put(b"format", b"\x02\x00", db=index._meta)
        index.close()
    before = contents(options.folder)
    with pytest.raises(UserError, match=r"format version 2.*use the release of xkv that made it"):
        Card.open(replace(options, capacity_bytes=None))
    assert contents(options.folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    """All files but locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "lock.mdb")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- everything at once -------------------------------------------------------------------------------------


def everything(probability: float) -> tuple[Fault, ...]:
    moves = [Kind.ERROR, Kind.LATE_ERROR, Kind.SHORT, Kind.FLIP, Kind.ZERO, Kind.CUT, Kind.SWAP]
    kinds: dict[Operation, Sequence[Kind]] = {
        Operation.READ: moves,
        Operation.WRITE: [*moves, Kind.STALE],
        Operation.COMMIT: [Kind.ERROR, Kind.LATE_ERROR],
        Operation.LOOKUP: [Kind.ERROR],
    }
    return tuple(
        Fault(operation=operation, kind=kind, probability=probability)
        for operation, found in kinds.items()
        for kind in found
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_medium_that_does_everything_wrong_never_gives_wrong_bytes(options: CardOptions, seed: int) -> None:
    """What a key gives is what was put under it; what was confirmed last, unless a replacement was in doubt."""
    driver, injector = opened(options, *everything(0.02), seed=seed)
    rng = random.Random(seed)
    possible: dict[int, set[bytes]] = {0: {content_of(0)}}
    ever: dict[int, set[bytes]] = {0: {content_of(0)}}
    read = 0
    for step in range(1, 300):
        key, length = rng.randrange(12), rng.randint(1, 4 * PAYLOAD)
        match rng.choice(["put", "put", "get", "get", "get", "settle", "crash"] if step % 10 == 0 else ["put", "get"]):
            case "put":
                content = content_of(1_000 * seed + step, length)
                confirmed = driver.put_or_fail(key_of(key), content, family=step)
                ever.setdefault(key, set()).add(content)
                possible[key] = {content} if confirmed else possible.get(key, set()) | {content}
            case "get":
                found = driver.get_or_drop(key_of(key))
                assert found is None or found in possible.get(key, ())
                read += found is not None
            case "settle":
                driver.settle_or_fail(RETRY_MS)
            case _:
                crash(driver, injector)
        assert sum(driver.card.slots().values()) == SLOTS
    assert read > 20
    injector.healthy = True
    driver.card.abandon()
    shutil.rmtree(options.folder / "index")
    with under(FaultPlan(everything(0.02), seed)), suppress(UserError):  # made anew from slots that are hard to read
        CardDriver(options).card.abandon()
    driver = CardDriver(options)
    for key, put in ever.items():  # what had left the index may come back from its slots, whole
        assert driver.get_or_drop(key_of(key)) in {None, *put}
    whole(driver)
