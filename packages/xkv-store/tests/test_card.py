"""The card: order of a put, what it holds, what it refuses, limbo, and damage on the medium."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xkv_store.card import COMMIT_RETRY_NS, CardOptions, PutPlan, PutRefusal
from xkv_store.errors import CorruptObject, MediumError, PeerError
from xkv_store.geometry import DATA_OFFSET, HEADER_BYTES, Geometry
from xkv_store.index import MoveObject, doubt
from xkv_store.key import ObjectKey
from xkv_store.layout import AGAIN, Record, pack_record, parse_slot_header
from xkv_store.recency import FAMILIES_AT_MAX
from xkv_store.testing.cards import CardDriver

SLOT = 4_096
PAYLOAD = SLOT - HEADER_BYTES
GRACE_MS = 100

Make = Callable[..., CardDriver]


def key_of(number: int, rank: int = 0, group: int = 0) -> ObjectKey:
    return ObjectKey(b"namespace-of-16b", group, number.to_bytes(4, "big") * 8, rank)


def data_of(number: int, length: int = PAYLOAD) -> bytes:
    return (number.to_bytes(4, "little") * (length // 4 + 1))[:length]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    drivers: list[CardDriver] = []

    def open_card(slots: int = 16, databases: int = 1, slot_bytes: int = SLOT, grace_ms: int = GRACE_MS) -> CardDriver:
        capacity = databases * DATA_OFFSET + slots * slot_bytes
        folder = tmp_path / f"card-{len(drivers)}"
        drivers.append(
            CardDriver(
                CardOptions(
                    folder=folder,
                    capacity_bytes=capacity,
                    databases=databases,
                    slot_bytes=slot_bytes,
                    grace_ms=grace_ms,
                )
            )
        )
        return drivers[-1]

    yield open_card
    for driver in drivers:
        driver.card.abandon()


def flip(driver: CardDriver, plan: PutPlan, fragment: int, at: int) -> None:
    """Change one byte of a fragment on the medium."""
    extent = plan.extents[0]
    with (driver.options.folder / f"db-{extent.database}.xkv").open("r+b") as file:
        file.seek(DATA_OFFSET + (extent.first + fragment) * driver.card.geometry.slot_bytes + at)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def put(driver: CardDriver, number: int, *, length: int = PAYLOAD, rank: int = 0, position: int = 0) -> PutPlan:
    plan = driver.put(key_of(number, rank), data_of(number, length), family=number, position=position)
    assert isinstance(plan, PutPlan)
    return plan


def hits(driver: CardDriver, numbers: range) -> list[int]:
    """Numbers that the lookup table shows."""
    return [n for n in numbers if (found := driver.card.table.get(key_of(n).tag)) and found[1] & 1]


# --- puts and gets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, 5 * PAYLOAD, 5 * PAYLOAD + 7])
def test_what_is_put_is_got_also_by_the_next_life(make: Make, length: int) -> None:
    driver = make()
    put(driver, 1, length=length)
    assert driver.get(key_of(1)) == data_of(1, length)
    driver.crash()
    assert driver.get(key_of(1)) == data_of(1, length)
    assert driver.card.slots()["used"] == Geometry(SLOT).fragments(length)


def test_chunks_of_one_tag_take_no_slots_that_nobody_gives_back(make: Make) -> None:
    """The lookup table tells them not apart: with one of them the bit of both goes."""
    driver = make()
    one, other = (ObjectKey(b"namespace-of-16b", 0, b"the same" + bytes([n]) * 24, 0) for n in range(2))
    assert one.tag == other.tag
    for number, key in enumerate((one, other, one, other, one, other)):
        driver.put(key, data_of(number))
        plan = driver.card.begin_get(one, driver.now_ns)
        assert plan is not None
        driver.card.end_get(plan)
        driver.card.purge(one.encode(), plan.generation, driver.now_ns)
        driver.commit()
    driver.settle(2 * GRACE_MS)
    held = sum(key is not None for key in map(driver.get, (one, other)))
    assert driver.card.objects == driver.card.slots()["used"] == held


@pytest.mark.parametrize("met", ["in one batch", "in a former life", "in a commit that fails"])
def test_chunks_of_one_tag_that_the_table_forgets_are_still_found_by_the_next_put(make: Make, met: str) -> None:
    """Each in another way comes to be there without its bit: its slots must come free when it is put again."""
    driver = make()
    one, other = (ObjectKey(b"namespace-of-16b", 0, b"the same" + bytes([n]) * 24, 0) for n in range(2))
    fails = met == "in a commit that fails"
    if fails:
        driver.put(other, data_of(1))
    plans = [driver.begin(key, PAYLOAD) for key in ((one,) if fails else (one, other))]
    first = plans[0]
    for plan in plans:
        assert isinstance(plan, PutPlan)
        driver.write(plan, data_of(1))
        driver.card.finish_put(plan, None)
    if fails:
        assert driver.fail_commit(MediumError(errno.ENOSPC, "a test's")) == plans
        driver.settle(COMMIT_RETRY_NS / 1e6)
    else:
        assert driver.commit() == plans
        if met == "in a former life":
            driver.crash()
        assert isinstance(first, PutPlan)
        driver.card.purge(one.encode(), first.generation, driver.now_ns)
        driver.commit()
    assert not driver.card.table.holds(other.tag, other.bit)
    assert driver.get(other) == data_of(1)
    assert isinstance(driver.put(other, data_of(2)), PutPlan)
    assert driver.card.objects == driver.card.slots()["used"] == 1


@pytest.mark.parametrize("puts", [2, 3])
def test_a_chunk_of_one_tag_that_is_replaced_before_its_commit_loses_no_slots(make: Make, puts: int) -> None:
    """The table has never shown what it replaces: the bit that is set there is the other chunk's."""
    driver = make()
    one, other = (ObjectKey(b"namespace-of-16b", 0, b"the same" + bytes([n]) * 24, 0) for n in range(2))
    first = driver.put(one, data_of(1))
    assert isinstance(first, PutPlan)
    for number in range(puts):
        plan = driver.card.begin_put(other, PAYLOAD, 0, 0, replace=bool(number), now_ns=driver.now_ns)
        assert isinstance(plan, PutPlan)
        driver.write(plan, data_of(number))
        driver.card.finish_put(plan, None)
    driver.settle(2 * GRACE_MS)
    assert driver.card.purge(one.encode(), first.generation, driver.now_ns)
    driver.settle(2 * GRACE_MS)
    assert driver.get(other) == data_of(puts - 1)
    assert isinstance(driver.put(other, data_of(9)), PutPlan)
    driver.settle(2 * GRACE_MS)
    assert driver.card.objects == driver.card.slots()["used"] == 1


def test_what_is_replaced_again_and_again_leaves_the_table_exact(make: Make) -> None:
    driver = make()
    driver.put(key_of(0), data_of(0))
    for number in range(3):
        plan = driver.card.begin_put(key_of(0), PAYLOAD, 0, 0, replace=True, now_ns=driver.now_ns)
        assert isinstance(plan, PutPlan)
        driver.write(plan, data_of(number))
        driver.card.finish_put(plan, None)
    driver.commit()
    assert driver.card.table.is_exact
    assert not driver.card._in_place


def test_a_usual_slot_works_with_direct_io(make: Make) -> None:
    """The default geometry, so that alignment is that of production."""
    driver = make(slots=12, slot_bytes=262_144)
    length = 3 * 261_120 + 1
    put(driver, 1, length=length)
    assert driver.get(key_of(1)) == data_of(1, length)
    assert driver.card.status()["databases"][0]["direct"] in {True, False}


def test_nothing_is_loadable_before_the_index_is_committed(make: Make) -> None:
    """If the table ran ahead of the index, a crash would leave a hit that nothing stands behind."""
    driver = make()
    key = key_of(1)
    plan = driver.begin(key, 10)
    assert isinstance(plan, PutPlan)
    assert driver.get(key) is None
    driver.write(plan, data_of(1, 10))
    assert driver.get(key) is None
    driver.card.finish_put(plan, None)
    batch = driver.card.take_commit_batch()
    assert batch is not None
    driver.card.commit_batch(batch)
    assert driver.card.table.get(key.tag) is None
    assert driver.card.confirmed(batch) == [plan]
    assert driver.card.table.get(key.tag) == (plan.generation, 1)


@pytest.mark.parametrize("step", ["begun", "written", "finished", "taken", "committed"])
def test_a_crash_at_any_step_leaves_a_miss_or_the_object(make: Make, step: str) -> None:
    driver = make()
    put(driver, 7)
    plan = driver.begin(key_of(1), PAYLOAD)
    assert isinstance(plan, PutPlan)
    if step != "begun":
        driver.write(plan, data_of(1))
    if step in {"finished", "taken", "committed"}:
        driver.card.finish_put(plan, None)
    if step in {"taken", "committed"}:
        batch = driver.card.take_commit_batch()
        assert batch is not None
        if step == "committed":
            driver.card.commit_batch(batch)
    driver.crash()
    assert driver.get(key_of(1)) == (data_of(1) if step == "committed" else None)
    assert driver.get(key_of(7)) == data_of(7)
    assert sum(driver.card.slots().values()) == driver.card.slots_total


def test_generations_are_never_given_twice(make: Make) -> None:
    """A torn slot of an older life with the same number would pass for a new one's."""
    driver = make()
    seen = set()
    for _ in range(3):
        plan = driver.begin(key_of(1), 1)
        assert isinstance(plan, PutPlan)
        assert plan.generation not in seen
        seen.add(plan.generation)
        driver.crash()


def test_a_new_ceiling_is_durable_before_it_is_used(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xkv_store.card_folder.GENERATIONS_PER_CEILING", 4)
    monkeypatch.setattr("xkv_store.card.GENERATIONS_PER_CEILING", 4)
    driver = make()
    outcomes = []
    for number in range(5):
        plan = driver.begin(key_of(number), 1)
        outcomes.append(isinstance(plan, PutPlan))
    assert outcomes == [True] * 4 + [False]
    driver.commit()
    plan = driver.begin(key_of(9), 1)
    assert isinstance(plan, PutPlan)
    driver.crash()
    again = driver.begin(key_of(9), 1)
    assert isinstance(again, PutPlan)
    assert again.generation > plan.generation


def test_refusals(make: Make) -> None:
    driver = make()
    put(driver, 1)
    assert driver.begin(key_of(1), 5) is PutRefusal.HELD
    assert driver.begin(key_of(2), 0) is PutRefusal.INVALID
    assert driver.begin(key_of(2), 5, position=1 << 32) is PutRefusal.INVALID
    assert driver.begin(key_of(2), 1 << 50) is PutRefusal.INVALID
    assert driver.begin(key_of(2), 17 * PAYLOAD) is PutRefusal.SHED
    assert isinstance(driver.begin(key_of(3), 5), PutPlan)
    assert driver.begin(key_of(3), 5) is PutRefusal.BUSY
    counters = driver.card.counters()
    assert [counters[f"puts_{name}"] for name in ("held", "invalid", "shed", "busy")] == [1, 3, 1, 1]


def test_an_object_too_large_drives_nothing_out(make: Make) -> None:
    """One absurd request must not empty the card."""
    driver = make(slots=16)
    for number in range(14):
        put(driver, number)
    driver.settle(10 * GRACE_MS)
    before = hits(driver, range(14))
    for _ in range(20):
        assert driver.begin(key_of(99), 12 * PAYLOAD) is PutRefusal.SHED
        driver.settle(2 * GRACE_MS)
    assert len(hits(driver, range(14))) >= len(before) - 2


def test_a_failed_write_is_a_miss_and_frees_its_slots(make: Make) -> None:
    driver = make()
    plan = driver.begin(key_of(1), 3 * PAYLOAD)
    assert isinstance(plan, PutPlan)
    driver.card.finish_put(plan, MediumError(errno.EIO, "writing"))
    assert driver.get(key_of(1)) is None
    assert driver.card.slots() == {"free": 16, "in_flight": 0, "used": 0, "limbo": 0}
    assert driver.card.take_commit_batch() is None
    put(driver, 1)
    assert driver.get(key_of(1)) == data_of(1)


def test_an_object_is_spread_over_databases(make: Make) -> None:
    driver = make(slots=160, databases=2)
    large = driver.begin(key_of(1), 41 * PAYLOAD)
    assert isinstance(large, PutPlan)
    assert [(e.database, e.slots) for e in large.extents] == [(0, 21), (1, 20)]
    driver.write(large, data_of(1, 41 * PAYLOAD))
    driver.card.finish_put(large, None)
    assert {p.extents[0].database for p in (put(driver, 2), put(driver, 3))} == {0, 1}
    assert driver.get(key_of(1)) == data_of(1, 41 * PAYLOAD)


def test_part_of_an_object_is_read_alone(make: Make) -> None:
    driver = make()
    put(driver, 1, length=4 * PAYLOAD + 5)
    plan = driver.card.begin_get(key_of(1), driver.now_ns)
    assert plan is not None
    whole = data_of(1, 4 * PAYLOAD + 5)
    assert driver.read(plan, 1, 2) == whole[PAYLOAD : 3 * PAYLOAD]
    assert driver.read(plan, 4, 1) == whole[4 * PAYLOAD :]
    with pytest.raises(PeerError):
        driver.read(plan, 4, 2)
    with pytest.raises(PeerError):
        driver.read(plan, 0, 0)


def test_ranks_share_an_entry_and_those_from_64_on_have_their_own(make: Make) -> None:
    driver = make()
    for rank in (0, 5, 64, 69):
        put(driver, 1, rank=rank)
    for rank, bits in ((0, 0b100001), (64, 0b100001)):
        found = driver.card.table.get(key_of(1, rank).tag)
        assert found is not None
        assert found[1] == bits
    driver.card.drop(key_of(1, 64), 3, "corrupt")
    found = driver.card.table.get(key_of(1, 69).tag)
    assert found is not None
    assert found[1] == 0b100000
    driver.commit()
    driver.crash()
    found = driver.card.table.get(key_of(1, 5).tag)
    assert found == (2, 0b100001)


@pytest.mark.parametrize("fails", [False, True])
def test_a_replacement_that_waits_for_its_commit_is_not_filed_anew_with_its_chunk(make: Make, fails: bool) -> None:
    """It would not be in the table once it is committed; and its slots would be lost where the commit fails."""
    driver = make()
    for rank in (0, 1):
        put(driver, 1, rank=rank)
    driver.card.touch([key_of(1).tag])
    new = driver.begin(key_of(1, 1), PAYLOAD, family=2, replacing=True)
    assert isinstance(new, PutPlan)
    driver.write(new, data_of(2))
    driver.card.finish_put(new, None)
    flying = [driver.begin(key_of(number), PAYLOAD) for number in range(100, 113)]
    assert driver.begin(key_of(99), PAYLOAD) is PutRefusal.SHED
    driver.tick()  # a hand comes by the other rank's object, which was asked for
    if fails:
        assert driver.fail_commit(MediumError(errno.ENOSPC, "no room")) == [new]
        driver.tick(2_000)
    driver.commit()
    assert driver.card.table.get(key_of(1).tag) == ((2, 0b01) if fails else (new.generation, 0b11))
    for plan in flying:
        assert isinstance(plan, PutPlan)
        driver.card.finish_put(plan, MediumError(errno.EIO, "broken"))
    for _ in range(4):
        driver.settle(2 * GRACE_MS)
    used = driver.card.status()["objects"]
    assert driver.card.slots() == {"free": 16 - used, "in_flight": 0, "used": used, "limbo": 0}
    driver.crash()
    assert driver.card.slots() == {"free": 16 - used, "in_flight": 0, "used": used, "limbo": 0}


# --- damage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 8, 12, 24, 40, 50, 64, 200, 1016, HEADER_BYTES, HEADER_BYTES + PAYLOAD - 1])
@pytest.mark.parametrize("fragment", [0, 2])
def test_any_flipped_bit_is_a_miss(make: Make, at: int, fragment: int) -> None:
    driver = make()
    plan = put(driver, 1, length=3 * PAYLOAD)
    flip(driver, plan, fragment, at)
    with pytest.raises(CorruptObject):
        driver.get(key_of(1))
    assert driver.get_or_drop(key_of(1)) is None
    assert driver.card.table.get(key_of(1).tag) is None
    driver.crash()  # the removal was not committed: the object is back, and is caught again
    assert driver.get_or_drop(key_of(1)) is None
    driver.settle()
    assert driver.card.slots() == {"free": 16, "in_flight": 0, "used": 0, "limbo": 0}
    driver.crash()
    assert driver.card.table.get(key_of(1).tag) is None


def copy_slot(driver: CardDriver, source: PutPlan, target: PutPlan, fragment: int) -> None:
    with (driver.options.folder / "db-0.xkv").open("r+b") as file:
        file.seek(DATA_OFFSET + (source.extents[0].first + fragment) * SLOT)
        slot = file.read(SLOT)
        file.seek(DATA_OFFSET + target.extents[0].first * SLOT)
        file.write(slot)


@pytest.mark.parametrize("what", ["fragment index", "key", "generation"])
def test_a_sound_slot_of_something_else_is_a_miss(make: Make, what: str) -> None:
    """Swapped fragments, another object's slot, a slot of an older put of the same key: all are well-formed."""
    driver = make()
    old = put(driver, 1, length=2 * PAYLOAD)
    if what == "generation":
        new = driver.put(key_of(1), data_of(1, 2 * PAYLOAD), family=1, replacing=True)
        assert isinstance(new, PutPlan)
        copy_slot(driver, old, new, 0)
    elif what == "key":
        copy_slot(driver, put(driver, 2, length=2 * PAYLOAD), old, 0)
    else:
        copy_slot(driver, old, old, 1)
    with pytest.raises(CorruptObject, match=what):
        driver.get(key_of(1))


def test_a_slot_of_another_card_is_a_miss(make: Make) -> None:
    """Databases restored from a copy of another card made alike."""
    one, two = make(), make()
    plans = [put(driver, 1) for driver in (one, two)]
    assert plans[0].generation == plans[1].generation
    with (two.options.folder / "db-0.xkv").open("rb") as file:
        file.seek(DATA_OFFSET)
        slot = file.read(SLOT)
    with (one.options.folder / "db-0.xkv").open("r+b") as file:
        file.seek(DATA_OFFSET)
        file.write(slot)
    with pytest.raises(CorruptObject, match="card uuid"):
        one.get(key_of(1))


def test_a_file_cut_while_open_is_a_miss(make: Make) -> None:
    driver = make()
    put(driver, 1, length=4 * PAYLOAD)
    with (driver.options.folder / "db-0.xkv").open("r+b") as file:
        file.truncate(DATA_OFFSET + 2 * SLOT)
    with pytest.raises(CorruptObject):
        driver.get(key_of(1))


def test_what_lies_behind_a_payload_is_not_written(make: Make) -> None:
    """The ring slot may hold another object's bytes there."""
    driver = make()
    plan = put(driver, 1, length=100)
    with (driver.options.folder / "db-0.xkv").open("rb") as file:
        file.seek(DATA_OFFSET + plan.extents[0].first * SLOT)
        slot = file.read(SLOT)
    assert parse_slot_header(slot).payload_bytes == 100
    assert slot[HEADER_BYTES + 100 :] == bytes(PAYLOAD - 100)


# --- replacing and limbo ----------------------------------------------------------------------------------------


def test_replacing_keeps_the_old_bytes_for_readers(make: Make) -> None:
    driver = make()
    put(driver, 1)
    held = driver.card.begin_get(key_of(1), driver.now_ns)
    assert held is not None
    fuller = data_of(5, 2 * PAYLOAD)
    assert isinstance(driver.put(key_of(1), fuller, replacing=True), PutPlan)
    assert driver.get(key_of(1)) == fuller
    driver.settle(10 * GRACE_MS)
    assert driver.read(held) == data_of(1)
    assert driver.card.slots()["limbo"] == 1
    driver.card.end_get(held)
    driver.settle()
    assert driver.card.slots() == {"free": 14, "in_flight": 0, "used": 2, "limbo": 0}


def test_the_evicted_stays_readable_for_the_grace_and_no_longer(make: Make) -> None:
    driver = make(slots=4)
    for number in range(4):
        put(driver, number)
    assert driver.begin(key_of(9), 1) is PutRefusal.SHED
    assert hits(driver, range(4)) == [1, 2, 3]
    driver.commit()
    driver.tick(GRACE_MS - 1)
    assert driver.get(key_of(0)) == data_of(0)
    assert driver.begin(key_of(9), 1) is PutRefusal.SHED
    driver.tick(1)
    assert driver.get(key_of(0)) is None
    assert isinstance(driver.begin(key_of(9), 1), PutPlan)


def test_slots_are_not_reused_before_the_removal_is_committed(make: Make) -> None:
    """Else a crash would leave two index entries that claim the same slots."""
    driver = make(slots=4)
    for number in range(4):
        put(driver, number)
    driver.begin(key_of(9), 1)
    driver.tick(10 * GRACE_MS)
    assert driver.card.slots()["limbo"] == 1
    assert driver.begin(key_of(9), 1) is PutRefusal.SHED
    driver.settle()
    assert driver.card.slots() == {"free": 1, "in_flight": 0, "used": 3, "limbo": 0}


def test_limbo_is_bounded(make: Make) -> None:
    driver = make(slots=64)
    for number in range(64):
        driver.put(key_of(number), data_of(number), family=number)
    for number in range(100, 200):
        driver.begin(key_of(number), 20 * PAYLOAD)
        driver.commit()
        driver.tick()
        assert driver.card.slots()["limbo"] <= 16


def test_a_dropped_object_is_not_found_in_limbo(make: Make) -> None:
    driver = make(slots=4)
    for number in range(4):
        put(driver, number)
    driver.begin(key_of(9), 1)
    plan = driver.card.begin_get(key_of(0), driver.now_ns)
    assert plan is not None
    driver.card.drop(key_of(0), plan.generation, "corrupt")
    driver.card.end_get(plan)
    assert driver.get(key_of(0)) is None


def test_dropping_an_old_generation_leaves_the_new_one(make: Make) -> None:
    driver = make()
    old = put(driver, 1)
    driver.put(key_of(1), data_of(2), replacing=True)
    driver.card.drop(key_of(1), old.generation, "corrupt")
    assert driver.get(key_of(1)) == data_of(2)


# --- eviction ---------------------------------------------------------------------------------------------------


def test_what_is_touched_stays(make: Make) -> None:
    driver = make(slots=4)
    for number in range(4):
        put(driver, number)
    driver.card.touch([key_of(0).tag, key_of(1).tag])
    driver.begin(key_of(9), 1)
    assert hits(driver, range(4)) == [0, 1, 3]


def test_the_end_of_a_prefix_leaves_before_its_beginning(make: Make) -> None:
    """A prefix without its beginning can never be hit: its end would lie there for nothing."""
    driver = make(slots=8)
    for number in range(8):
        driver.put(key_of(number), data_of(number), family=1, position=number)
    for wanted in (1, 2, 3):
        assert driver.begin(key_of(99), wanted * PAYLOAD) is PutRefusal.SHED
        driver.settle(2 * GRACE_MS)
        assert hits(driver, range(8)) == list(range(8 - wanted))


def test_what_came_while_an_engines_clock_was_ahead_leaves_in_its_turn(make: Make) -> None:
    """Also where the gateway was killed, and the index made anew, before the clock was set back."""
    driver = make(slots=8)
    year_us = 365 * 24 * 3_600 * 1_000_000
    for number in range(2):
        driver.put(key_of(number), data_of(number), family=year_us + number)
    driver.crash()
    driver.put(key_of(2), data_of(2), family=2)
    driver.put(key_of(3), data_of(3), family=2 * year_us)
    doubt(driver.options.folder / "index")
    driver.crash()
    for number in range(4, 8):
        driver.put(key_of(number), data_of(number), family=number)
    for left in range(1, 8):
        assert driver.begin(key_of(99), 1) is PutRefusal.SHED
        driver.settle(2 * GRACE_MS)
        assert hits(driver, range(8)) == list(range(left, 8))
        assert isinstance(driver.put(key_of(99 + left), data_of(left), family=100 + left), PutPlan)


@pytest.mark.parametrize("latest", [9, 400 * 365 * 24 * 3_600 * 1_000_000, AGAIN - 1 - 1_700_000_000_000_000])
def test_what_comes_to_a_card_of_an_earlier_version_stands_behind_what_is_there(make: Make, latest: int) -> None:
    """Its families are what engines' clocks said; the last one's said nothing that can be."""
    driver = make(slots=8)
    now_us = 1_700_000_000_000_000
    for number, family in enumerate((now_us + 7, now_us, now_us + latest, now_us + 3)):
        plan = driver.put(key_of(number), data_of(number))
        assert isinstance(plan, PutPlan)
        record = Record(plan.generation, plan.length, family, 0, plan.extents)
        driver.card._index.apply([MoveObject(key_of(number).encode(), pack_record(record))])
    for life in range(2):
        driver.crash()
        for number in (4 + 2 * life, 5 + 2 * life):
            assert isinstance(driver.put(key_of(number), data_of(number), family=number), PutPlan)
    orderly = [1, 3, 0, 2, 4, 5, 6, 7] if now_us + latest < FAMILIES_AT_MAX else [1, 3, 0, 4, 5, 6, 7]
    for left in range(1, len(orderly)):
        assert driver.begin(key_of(99), 1) is PutRefusal.SHED
        driver.settle(2 * GRACE_MS)
        assert hits(driver, range(8)) == sorted({*range(8)} - {*orderly[:left]})
        driver.put(key_of(99 + left), b"x", family=100 + left)


def test_a_chunks_ranks_leave_together(make: Make) -> None:
    driver = make(slots=16)
    for number in range(4):
        for rank in range(4):
            driver.put(key_of(number, rank), data_of(number), family=number)
    driver.begin(key_of(9), 1)
    assert [driver.card.table.get(key_of(n).tag) is None for n in range(4)] == [True, False, False, False]
    assert driver.card.counters()["evicted_objects"] == 4


def test_pinned_and_uncommitted_chunks_stay(make: Make) -> None:
    driver = make(slots=4)
    for number in range(3):
        put(driver, number)
    held = driver.card.begin_get(key_of(0), driver.now_ns)
    assert held is not None
    found = driver.card.table.stamp_of(key_of(0).tag)
    assert found is not None
    driver.card.table.stamp(found[0], 0)  # as if it had not been asked for: only the pin protects it
    plan = driver.begin(key_of(3), 1)
    assert isinstance(plan, PutPlan)
    driver.write(plan, b"x")
    driver.card.finish_put(plan, None)
    driver.begin(key_of(9), 1)
    assert hits(driver, range(4)) == [0, 2]
    driver.commit()
    assert hits(driver, range(4)) == [0, 2, 3]


def test_later_chunks_of_a_request_leave_next_where_its_turn_has_come(make: Make) -> None:
    """The hand had been there: they stayed until it began anew, while what others stand behind left."""
    driver = make(slots=8)
    for number in range(8):
        driver.put(key_of(number), data_of(number), family=number // 3, position=number)
    for late in (10, 11):
        assert driver.begin(key_of(99), 1) is PutRefusal.SHED
        driver.settle(2 * GRACE_MS)
        left = hits(driver, range(12))
        driver.put(key_of(late), b"x", family=0, position=late)
        assert driver.begin(key_of(99), 1) is PutRefusal.SHED
        driver.settle(2 * GRACE_MS)
        assert hits(driver, range(12)) == left
        driver.put(key_of(20 + late), b"x", family=late)
    assert left == [0, *range(3, 8)]


def test_what_was_read_while_its_turn_came_leaves_within_two_turns_of_a_small_card(make: Make) -> None:
    """It stood behind the hand, which began anew after 2,048 objects: hundreds of turns of this one."""
    driver = make(slots=8)
    for number in range(8):
        put(driver, number)
    held = driver.card.begin_proof(key_of(0))
    assert held is not None
    assert driver.begin(key_of(99), 1) is PutRefusal.SHED
    assert hits(driver, range(8)) == [0, *range(2, 8)]
    driver.card.end_get(held)
    for number in range(8, 8 + 2 * 8):
        driver.settle(2 * GRACE_MS)
        put(driver, number)
        assert driver.begin(key_of(99), 1) is PutRefusal.SHED
    assert hits(driver, range(1)) == []


def test_eviction_goes_ahead_of_a_steady_stream(make: Make) -> None:
    """Puts at a steady rate, below what the reserve can serve, are not shed once the card has seen the rate."""
    driver = make(slots=256)
    shed = 0
    for number in range(600):
        outcome = driver.begin(key_of(number), PAYLOAD, family=number)
        if isinstance(outcome, PutPlan):
            driver.card.finish_put(outcome, None)
        else:
            shed += number > 300
        driver.settle(GRACE_MS / 16)
    assert shed == 0
    assert driver.card.slots()["used"] > 192


def test_a_chunk_with_a_rank_in_flight_stays(make: Make) -> None:
    """Else its ranks would never be complete, and the rank that comes would lie there for nothing."""
    driver = make(slots=4)
    for number in range(3):
        put(driver, number)
    assert isinstance(driver.begin(key_of(0, rank=1), 1), PutPlan)
    driver.begin(key_of(9), 1)
    assert hits(driver, range(3)) == [0, 2]


# --- changes that overtake each other -------------------------------------------------------------------------------


def test_a_drop_overtakes_a_put_that_is_being_committed(make: Make) -> None:
    """The table must not show what the index is about to forget."""
    driver = make()
    plan = driver.begin(key_of(1), PAYLOAD)
    assert isinstance(plan, PutPlan)
    driver.write(plan, data_of(1))
    driver.card.finish_put(plan, None)
    batch = driver.card.take_commit_batch()
    assert batch is not None
    driver.card.drop(key_of(1), plan.generation, "corrupt")
    driver.card.commit_batch(batch)
    assert driver.card.confirmed(batch) == [plan]
    assert driver.card.table.get(key_of(1).tag) is None
    assert driver.get(key_of(1)) is None
    driver.settle()
    assert driver.card.slots()["free"] == 16
    driver.crash()
    assert driver.get(key_of(1)) is None


@pytest.mark.parametrize("fails", [True, False])
def test_a_new_put_overtakes_the_removal_of_the_old(make: Make, fails: bool) -> None:
    """A removal that is tried again must not remove what was put since."""
    driver = make()
    old = put(driver, 1)
    driver.card.drop(key_of(1), old.generation, "corrupt")
    batch = driver.card.take_commit_batch()
    assert batch is not None
    plan = driver.begin(key_of(1), PAYLOAD)
    assert isinstance(plan, PutPlan)
    driver.write(plan, data_of(2))
    driver.card.finish_put(plan, None)
    if fails:
        assert driver.card.commit_failed(batch) == []
        driver.tick(1_100)
    else:
        driver.card.commit_batch(batch)
        assert driver.card.confirmed(batch) == []
    assert driver.get(key_of(1)) == data_of(2)
    assert driver.commit() == [plan]
    driver.crash()
    assert driver.get(key_of(1)) == data_of(2)
    assert driver.card.slots()["used"] == 1


# --- the index fails ------------------------------------------------------------------------------------------------


def test_a_failed_commit_fails_its_puts_and_keeps_its_removals(make: Make) -> None:
    driver = make(slots=8)
    put(driver, 1)
    put(driver, 2)
    plan = driver.begin(key_of(3), PAYLOAD)
    assert isinstance(plan, PutPlan)
    driver.write(plan, data_of(3))
    driver.card.finish_put(plan, None)
    driver.card.drop(key_of(1), 1, "corrupt")
    assert driver.fail_commit(MediumError(errno.ENOSPC, "index")) == [plan]
    assert driver.get(key_of(3)) is None
    assert driver.get(key_of(1)) is None
    assert driver.get(key_of(2)) == data_of(2)
    assert driver.card.take_commit_batch() is None  # not at once again
    driver.tick(1_100)
    driver.settle(GRACE_MS)
    assert driver.card.slots() == {"free": 7, "in_flight": 0, "used": 1, "limbo": 0}
    driver.crash()
    assert [driver.get(key_of(n)) for n in (1, 2, 3)] == [None, data_of(2), None]


def test_a_failed_commit_of_a_replacement_leaves_a_miss(make: Make) -> None:
    driver = make(slots=8)
    put(driver, 1)
    plan = driver.begin(key_of(1), 2 * PAYLOAD, replacing=True)
    assert isinstance(plan, PutPlan)
    driver.write(plan, data_of(9, 2 * PAYLOAD))
    driver.card.finish_put(plan, None)
    assert driver.fail_commit(MediumError(errno.EIO, "index")) == [plan]
    assert driver.card.table.get(key_of(1).tag) is None
    driver.tick(1_100)
    driver.settle(10 * GRACE_MS)
    assert driver.card.slots() == {"free": 8, "in_flight": 0, "used": 0, "limbo": 0}


def test_an_index_that_does_not_keep_up_sheds(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xkv_store.overlay.CHANGES_QUEUED_MAX", 2)
    driver = make()
    for number in range(2):
        plan = driver.begin(key_of(number), 1)
        assert isinstance(plan, PutPlan)
        driver.write(plan, b"x")
        driver.card.finish_put(plan, None)
    assert driver.begin(key_of(5), 1) is PutRefusal.SHED
    driver.commit()
    assert isinstance(driver.begin(key_of(5), 1), PutPlan)


def test_namespaces_are_kept(make: Make) -> None:
    driver = make()
    driver.card.contents.put_namespace(b"n" * 16, '{"model": "m"}')
    driver.commit()
    driver.crash()
    assert driver.card.contents.descriptors() == {b"n" * 16: '{"model": "m"}'}
    with pytest.raises(PeerError):
        driver.card.contents.put_namespace(b"n" * 16, "x" * 70_000)
