"""Fault plans: what they may say, that they strike when they say, and what each fault leaves on the medium."""

from __future__ import annotations

import errno
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from xkv_store.card import Card, CardOptions
from xkv_store.database import Database, aligned, new_superblock
from xkv_store.errors import CorruptObject, MediumError, UserError
from xkv_store.key import ObjectKey
from xkv_store.testing.cards import CardDriver
from xkv_store.testing.faults import POISON, Fault, FaultPlan, Injector, Kind, Operation, faulty_database, under

if TYPE_CHECKING:
    from pathlib import Path

SLOT = 8_192
SLOTS = 8
OLD, NEW = b"o", b"n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "db-0.xkv"
    superblock = new_superblock(
        number=0, databases=1, slot_bytes=SLOT, slots=SLOTS, card_uuid=b"c" * 16, database_uuid=b"d" * 16
    )
    Database.make(path, superblock)
    database = Database.open(path)
    database.write(0, slots_of(OLD * SLOTS))
    database.close()
    return path


def slots_of(letters: bytes) -> list[memoryview]:
    """A slot full of each letter."""
    memory = aligned(len(letters) * SLOT)
    for number, letter in enumerate(letters):
        memory[number * SLOT : (number + 1) * SLOT] = bytes([letter]) * SLOT
    return [memory[at : at + SLOT] for at in range(0, len(memory), SLOT)]


def content(path: Path) -> bytes:
    return path.read_bytes()[1 << 20 :]


def written(path: Path, fault: Fault) -> bytes:
    """The medium after two slots were written at slot 2 with a fault."""
    injector = Injector(FaultPlan((fault,), seed=1))
    with closing(faulty_database(injector).open(path)) as database:
        database.write(2, slots_of(NEW * 2))
    assert injector.effects == {(fault.operation, fault.kind): 1}
    return content(path)


def read(path: Path, fault: Fault) -> bytes:
    buffers = slots_of(b"xx")
    with closing(faulty_database(Injector(FaultPlan((fault,), seed=1))).open(path)) as database:
        database.read(2, buffers)
    return b"".join(buffers)


RIGHT = (OLD * 2 + NEW * 2 + OLD * 4).replace(OLD, OLD * SLOT).replace(NEW, NEW * SLOT)


def differing(found: bytes, wanted: bytes) -> list[int]:
    return [at for at, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other]


def write_fault(kind: Kind, at: int | None = None) -> Fault:
    return Fault(operation=Operation.WRITE, kind=kind, nth=1, at=at)


def test_each_bad_write_leaves_what_its_name_says(path: Path) -> None:
    found = written(path, write_fault(Kind.FLIP, at=100))
    (place,) = differing(found, RIGHT)
    assert place == 2 * SLOT + 100
    assert (found[place] ^ RIGHT[place]).bit_count() == 1
    assert written(path, write_fault(Kind.SHORT)) == RIGHT, "the rest comes with the next call"
    zeroed = differing(written(path, write_fault(Kind.ZERO)), RIGHT)
    assert len(zeroed) == SLOT
    assert zeroed[0] in (2 * SLOT, 3 * SLOT)


def test_a_torn_and_a_lost_write_leave_old_bytes(path: Path) -> None:
    assert differing(written(path, write_fault(Kind.CUT, at=5_000)), RIGHT) == list(range(2 * SLOT + 4_096, 4 * SLOT))
    assert content(path) == written(path, write_fault(Kind.STALE))


def test_a_write_that_goes_astray_hits_other_slots_only(path: Path) -> None:
    found = written(path, write_fault(Kind.SWAP))
    assert found.count(NEW) == 2 * SLOT
    assert found[2 * SLOT : 4 * SLOT] != NEW * 2 * SLOT


def test_each_bad_read_gives_what_its_name_says(path: Path) -> None:
    def fault(kind: Kind, at: int | None = None) -> Fault:
        return Fault(operation=Operation.READ, kind=kind, nth=1, at=at)

    database = Database.open(path)
    database.write(2, slots_of(NEW * 2))
    database.close()
    right = NEW * 2 * SLOT
    assert differing(read(path, fault(Kind.FLIP, at=7)), right) == [7]
    assert len(differing(read(path, fault(Kind.ZERO)), right)) == SLOT
    assert read(path, fault(Kind.SWAP)) != right
    found = read(path, fault(Kind.SHORT))
    assert found == right
    assert POISON not in found
    with pytest.raises(CorruptObject):
        read(path, fault(Kind.CUT))
    assert content(path) == RIGHT, "reading changes nothing"


@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.LATE_ERROR])
def test_an_error_before_and_after_the_deed(path: Path, kind: Kind) -> None:
    fault = Fault(operation=Operation.WRITE, kind=kind, nth=1, error=errno.ENOSPC)
    with pytest.raises(MediumError) as caught:
        written(path, fault)
    assert caught.value.errno == errno.ENOSPC
    assert (content(path) == RIGHT) == (kind is Kind.LATE_ERROR)
    failing = Injector(FaultPlan((Fault(operation=Operation.SYNC, kind=kind, nth=1),)))
    database = faulty_database(failing).open(path)
    with pytest.raises(MediumError, match="syncing"):
        database.sync()
    database.sync()
    database.close()


def test_a_delay_is_late_and_right(path: Path) -> None:
    begun = time.monotonic()
    found = written(path, Fault(operation=Operation.WRITE, kind=Kind.DELAY, nth=1, delay_s=0.05))
    assert found == RIGHT
    assert time.monotonic() - begun >= 0.05


def test_a_fault_strikes_when_it_says(path: Path) -> None:
    plan = FaultPlan((Fault(operation=Operation.WRITE, kind=Kind.ERROR, nth=2, times=2),))
    injector = Injector(plan)
    database = faulty_database(injector).open(path)

    def write() -> str:
        try:
            database.write(0, slots_of(NEW))
        except MediumError:
            return "failed"
        return "done"

    assert [write() for _ in range(5)] == ["done", "failed", "failed", "done", "done"]
    assert injector.calls[Operation.WRITE] == 5
    injector.healthy = True
    database.close()


def test_the_same_seed_is_the_same_fate() -> None:
    plan = FaultPlan((Fault(operation=Operation.READ, kind=Kind.FLIP, probability=0.3),), seed=5)

    def fate(plan: FaultPlan) -> list[bool]:
        injector = Injector(plan)
        return [injector.strike(Operation.READ) is not None for _ in range(100)]

    assert fate(plan) == fate(FaultPlan.from_json(plan.to_json()))
    assert FaultPlan.from_json(FaultPlan(proves=False).to_json()) == FaultPlan(proves=False)
    assert fate(plan) != fate(FaultPlan(plan.faults, seed=6))
    assert 10 < sum(fate(plan)) < 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"operation": Operation.READ, "kind": Kind.STALE, "nth": 1},
        {"operation": Operation.SYNC, "kind": Kind.FLIP, "nth": 1},
        {"operation": Operation.READ, "kind": Kind.FLIP},
        {"operation": Operation.READ, "kind": Kind.FLIP, "nth": 1, "probability": 0.1},
        {"operation": Operation.READ, "kind": Kind.FLIP, "probability": 2.0},
        {"operation": Operation.READ, "kind": Kind.DELAY, "nth": 1},
        {"operation": Operation.READ, "kind": Kind.SHORT, "nth": 1, "cut_bytes": 0},
    ],
)
def test_a_plan_without_sense_is_refused(wrong: dict[str, object]) -> None:
    """It would strike nothing, and a test would pass for that."""
    with pytest.raises(ValueError, match=r".+"):
        Fault(**wrong)  # type: ignore[arg-type]


def test_only_cards_opened_under_a_plan_have_its_medium(tmp_path: Path) -> None:
    options = CardOptions(folder=tmp_path / "card", capacity_bytes=2 << 20, slot_bytes=SLOT)
    full = FaultPlan((Fault(operation=Operation.ALLOCATE, kind=Kind.ERROR, nth=1, error=errno.ENOSPC),))
    with under(full) as injector, pytest.raises(UserError, match="no room for a database"):
        Card.open(options)
    assert injector.effects == {(Operation.ALLOCATE, Kind.ERROR): 1}
    Card.open(options).close()


def test_a_plan_that_proves_nothing_serves_what_is_damaged(tmp_path: Path) -> None:
    """Without this a campaign's canary would show nothing."""
    options = CardOptions(folder=tmp_path / "card", capacity_bytes=2 << 20, slot_bytes=SLOT)
    key, data = ObjectKey(b"n" * 16, 0, b"h" * 32, 0), b"x" * 5_000
    flip = Fault(operation=Operation.READ, kind=Kind.FLIP, nth=1, at=2_000)
    with closing(CardDriver(options)) as driver:
        driver.put(key, data)
    with under(FaultPlan((flip,), proves=False)), closing(CardDriver(options)) as driver:
        found = driver.get(key)
        assert found is not None
        assert found != data
    with under(FaultPlan((flip,))), closing(CardDriver(options)) as driver, pytest.raises(CorruptObject):
        driver.get(key)


def test_direct_io_may_be_refused(path: Path) -> None:
    injector = Injector(FaultPlan((Fault(operation=Operation.DIRECT, kind=Kind.ERROR, nth=1),)))
    made = faulty_database(injector)
    assert [_direct(made, path) for _ in range(2)] == [False, _direct(Database, path)]


def _direct(made: type[Database], path: Path) -> bool:
    with closing(made.open(path)) as database:
        return database.direct
