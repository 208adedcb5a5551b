"""Proving a closed card and mending its index: damage is named, nothing changes unasked, a rebuild makes it sound."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
from typing import TYPE_CHECKING, Any

import lmdb
import pytest

from xkv_store import cli
from xkv_store.card import CardOptions, PutPlan
from xkv_store.errors import UserError
from xkv_store.geometry import DATA_OFFSET, SUPERBLOCK_BYTES
from xkv_store.index import Index, RemoveObject, SetObject, doubt
from xkv_store.key import ObjectKey
from xkv_store.layout import Extent, Record, pack_record
from xkv_store.testing.cards import CardDriver
from xkv_store.verify import DamagedIndex, Unnamed, Verified, rebuild, verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SLOT = 4_096
SLOTS = 150


def key_of(number: int, rank: int = 0) -> ObjectKey:
    return ObjectKey(bytes(16), 0, number.to_bytes(16, "big"), rank)


def content_of(number: int, slots: int = 2) -> bytes:
    return random.Random(number).randbytes(slots * 3_072 - 100)


class Made:
    """A closed card, and what it holds."""

    def __init__(self, folder: Path) -> None:
        self.options = CardOptions(folder=folder, capacity_bytes=DATA_OFFSET + SLOTS * SLOT, slot_bytes=SLOT)
        self.plans: dict[ObjectKey, PutPlan] = {}
        self.contents: dict[ObjectKey, bytes] = {}

    def put(self, driver: CardDriver, key: ObjectKey, content: bytes, *, replacing: bool = False) -> PutPlan:
        plan = driver.put(key, content, replacing=replacing)
        assert isinstance(plan, PutPlan)
        self.plans[key], self.contents[key] = plan, content
        return plan

    @property
    def index(self) -> Path:
        return self.options.folder / "index"

    def flip(self, key: ObjectKey, fragment: int = 0, at: int = 2_000) -> None:
        with (self.options.folder / "db-0.xkv").open("r+b") as file:
            offset = DATA_OFFSET + (self.plans[key].extents[0].first + fragment) * SLOT + at
            byte = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), offset)

    def edit_index(self, change: Callable[[Index], None]) -> None:
        index = Index.open(self.index, slots=SLOTS)
        change(index)
        index.end_cleanly()
        index.close()

    def found(self, *, drop: bool = False) -> tuple[dict[ObjectKey, Verified], list[DamagedIndex], int]:
        """Objects, what is wrong with the index, objects that it does not name."""
        objects, damage, unnamed = {}, [], 0
        for one in verify(self.options, drop=drop):
            if isinstance(one, Verified):
                objects[ObjectKey.decode(one.key)] = one
            elif isinstance(one, DamagedIndex):
                damage.append(one)
            elif isinstance(one, Unnamed):
                unnamed = one.whole
        return objects, damage, unnamed

    def problems(self, *, drop: bool = False) -> dict[ObjectKey, str]:
        return {key: one.problem for key, one in self.found(drop=drop)[0].items()}

    def assert_sound(self, contents: dict[ObjectKey, bytes]) -> None:
        """Exactly these objects are there, proved and read."""
        objects, damage, _ = self.found()
        assert damage == []
        assert {key: one.problem for key, one in objects.items()} == dict.fromkeys(contents, "")
        driver = CardDriver(CardOptions(folder=self.options.folder, create=False), ring_slots=100)
        assert {key: driver.get(key) for key in contents} == contents
        driver.close()


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A card of one object of 100 fragments and nine of two."""
    made = Made(tmp_path / "card")
    driver = CardDriver(made.options, ring_slots=100)
    made.put(driver, key_of(0), content_of(0, 100))
    for number in range(1, 10):
        made.put(driver, key_of(number), content_of(number))
    driver.close()
    return made


def snapshot(folder: Path) -> dict[str, bytes]:
    """All bytes of the card. LMDB's lock file is its reader table, which every opening makes anew."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "lock.mdb")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_damage_is_named_and_leaves_when_asked(made: Made) -> None:
    made.flip(key_of(2))
    made.flip(key_of(0), fragment=80)
    before = snapshot(made.options.folder)
    for drop in (False, True):
        found, damage, unnamed = made.found(drop=drop)
        assert {key for key, one in found.items() if one.problem} == {key_of(0), key_of(2)}
        assert "fragment 80: the payload's checksum" in found[key_of(0)].problem
        assert [found[key_of(0)].dropped, found[key_of(1)].dropped] == [drop, False]
        assert (damage, unnamed) == ([], 0)
        if not drop:
            assert snapshot(made.options.folder) == before, "looking changes nothing"
    sound = {key: content for key, content in made.contents.items() if key not in (key_of(0), key_of(2))}
    made.assert_sound(sound)


def test_a_drop_after_a_kill_leaves_the_index_as_open_as_it_was(made: Made) -> None:
    """Marked as cleanly closed by us, it would be trusted after a power loss that took its pages."""
    driver = CardDriver(made.options, ring_slots=100)
    driver.card.abandon()
    made.flip(key_of(3))
    before = Index.open(made.index, slots=SLOTS)
    open_in = before.meta().open_in
    before.close()
    assert any(open_in)
    assert sum(bool(problem) for problem in made.problems(drop=True).values()) == 1
    after = Index.open(made.index, slots=SLOTS)
    assert after.meta().open_in == open_in
    after.close()


def test_a_card_in_use_is_left_alone(made: Made) -> None:
    driver = CardDriver(made.options)
    with pytest.raises(UserError, match="in use"):
        made.found(drop=True)
    with pytest.raises(UserError, match="in use"):
        rebuild(made.options)
    driver.close()


def test_stopping_half_way_lets_go_of_the_card(made: Made) -> None:
    run = verify(made.options, drop=False)
    next(run)
    run.close()
    CardDriver(made.options).close()


# --- the index --------------------------------------------------------------------------------------------------


def _delete(made: Made) -> None:
    shutil.rmtree(made.index)


def _cut(made: Made) -> None:
    os.truncate(made.index / "data.mdb", 3 * 4_096)


def _cut_to_nothing(made: Made) -> None:
    os.truncate(made.index / "data.mdb", 0)


def _zero(made: Made) -> None:
    size = (made.index / "data.mdb").stat().st_size
    (made.index / "data.mdb").write_bytes(bytes(size))


def _garbage(made: Made) -> None:
    size = (made.index / "data.mdb").stat().st_size
    (made.index / "data.mdb").write_bytes(random.Random(1).randbytes(size))


def _garbage_behind_the_front(made: Made) -> None:
    """LMDB takes it for an index, and dies, or finds its pages damaged."""
    path = made.index / "data.mdb"
    data = path.read_bytes()
    path.write_bytes(data[:8_192] + random.Random(2).randbytes(len(data) - 8_192))


def _no_meta(made: Made) -> None:
    env = lmdb.open(str(made.index), max_dbs=4)
    with env.begin(write=True) as transaction:
        transaction.drop(env.open_db(b"meta", txn=transaction), delete=False)
    env.close()


def _another_cards(made: Made) -> None:
    other = Made(made.options.folder.with_name("other"))
    CardDriver(other.options).close()
    shutil.rmtree(made.index)
    shutil.copytree(other.index, made.index)


def _of_a_machine_that_lost_its_power(made: Made) -> None:
    def another_boot(index: Index) -> None:
        env = index._env
        with env.begin(write=True) as transaction:
            transaction.put(b"open_in", b"another machine!", db=index._meta)

    index = Index.open(made.index, slots=SLOTS)
    another_boot(index)
    index.close()


def _doubted(made: Made) -> None:
    doubt(made.index)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (_delete, "missing"),
        (_cut, "cut off"),
        (_cut_to_nothing, "does not begin like an index"),
        (_zero, "does not begin like an index"),
        (_garbage, "does not begin like an index"),
        (_garbage_behind_the_front, "dies of it|pages are damaged|reading the index|meta entries|MDB_"),
        (_no_meta, "meta entries are missing"),
        (_another_cards, "belongs to another card"),
        (_of_a_machine_that_lost_its_power, "the machine ended while it was open"),
        (_doubted, "died of it"),
    ],
)
def test_an_index_that_cannot_be_used_is_named_and_made_anew(
    made: Made, harm: Callable[[Made], None], named: str, xkv: Callable[..., tuple[int, list[dict[str, Any]]]]
) -> None:
    harm(made)
    before = snapshot(made.options.folder)
    code, (said, total) = xkv("verify", made.options.folder)
    assert code == 1
    assert any(word in said["damaged_index"]["problem"] for word in named.split("|")), said
    assert said["damaged_index"]["whole_objects"] == 10
    assert any(f"xkv verify {made.options.folder} --rebuild" in line for line in total["advice"])
    assert snapshot(made.options.folder) == before, "looking changes nothing"
    code, (rebuilt, total) = xkv("verify", made.options.folder, "--rebuild")
    assert (code, rebuilt["rebuilt"]["objects"]) == (0, 10)
    assert (total["verified"]["objects"], total["verified"]["damaged"], total["advice"]) == (10, 0, [])
    made.assert_sound(made.contents)


def test_swapped_entries(made: Made, xkv: Callable[..., tuple[int, list[dict[str, Any]]]]) -> None:
    """Each leads to the other's slots: both are sound on the medium, and neither may be served."""

    def swap(index: Index) -> None:
        one, two = key_of(1).encode(), key_of(2).encode()
        records = [index.get(two), index.get(one)]
        index.apply([SetObject(key, record) for key, record in zip((one, two), records, strict=True) if record])

    made.edit_index(swap)
    found = made.found()[0]
    assert {key for key, one in found.items() if one.misplaced} == {key_of(1), key_of(2)}
    assert "another key" in found[key_of(1)].problem
    code, lines = xkv("verify", made.options.folder)
    assert (code, lines[-1]["verified"]["misplaced"], lines[-1]["verified"]["unnamed"]) == (1, 2, 0)
    assert "--rebuild" in lines[-1]["advice"][0]
    assert xkv("verify", made.options.folder, "--rebuild")[0] == 0
    made.assert_sound(made.contents)


def test_entries_that_claim_each_others_slots_or_slots_that_are_none(made: Made) -> None:
    def point(number: int, extent: Extent) -> SetObject:
        plan = made.plans[key_of(number)]
        return SetObject(key_of(number).encode(), pack_record(Record(plan.generation, plan.length, 0, 0, (extent,))))

    doubled = made.plans[key_of(2)].extents[0]
    beyond = Extent(0, SLOTS - 1, 2)
    made.edit_index(lambda index: index.apply([point(1, doubled), point(3, beyond), point(4, Extent(7, 0, 2))]))
    wrong = {key for key, one in made.found()[0].items() if one.misplaced}
    assert {key_of(1), key_of(3), key_of(4)} <= wrong
    assert wrong <= {key_of(1), key_of(2), key_of(3), key_of(4)}
    rebuild(made.options)
    made.assert_sound(made.contents)


def test_a_record_and_a_key_that_are_none(made: Made) -> None:
    record = pack_record(Record(99, 10, 0, 0, (Extent(0, SLOTS - 1, 1),)))
    index = Index.open(made.index, slots=SLOTS)
    with index._env.begin(write=True) as transaction:
        transaction.put(key_of(5).encode(), b"no record", db=index._objects)
        transaction.put(b"no key", record, db=index._objects)
    index.close()
    found = {one.key: one for one in verify(made.options, drop=False) if isinstance(one, Verified)}
    assert {key for key, one in found.items() if one.misplaced} == {key_of(5).encode(), b"no key"}
    rebuild(made.options)
    made.assert_sound(made.contents)


def test_entries_that_are_missing(made: Made, xkv: Callable[..., tuple[int, list[dict[str, Any]]]]) -> None:
    """They may have been evicted, so it is no damage; but it is said, and so is what brings them back."""
    made.edit_index(lambda index: index.apply([RemoveObject(key_of(number).encode()) for number in (0, 4, 7)]))
    code, (total,) = xkv("verify", made.options.folder)
    assert (code, total["verified"]["objects"], total["verified"]["unnamed"]) == (0, 7, 3)
    assert "--rebuild" in total["advice"][0]
    code, (_, total) = xkv("verify", made.options.folder, "--rebuild")
    assert (code, total["verified"]["objects"], total["verified"]["unnamed"]) == (0, 10, 0)
    made.assert_sound(made.contents)


def test_of_two_generations_the_newest_whole_one_wins(tmp_path: Path) -> None:
    """One key was replaced by a whole object, one by an object that lost a slot since, one by one not committed."""
    made = Made(tmp_path / "card")
    driver = CardDriver(made.options)
    for number in (1, 2, 3):
        made.put(driver, key_of(number), content_of(number))
    old = dict(made.contents)
    for number in (1, 2):
        made.put(driver, key_of(number), content_of(10 + number), replacing=True)
    plan = driver.begin(key_of(3), len(content_of(13)), replacing=True)
    assert isinstance(plan, PutPlan)
    driver.write(plan, content_of(13))
    driver.card.finish_put(plan, None)
    driver.card.abandon()  # before its commit
    assert made.found()[2] == 1, "the newer one of the third key is whole, and the index does not name it"
    made.flip(key_of(2), fragment=1, at=30)  # in the header: the newer one is whole no more
    found = made.found()
    assert {key for key, one in found[0].items() if one.problem} == {key_of(2)}
    assert found[2] == 2, "the older one of the second key would mend it"
    shutil.rmtree(made.index)
    rebuild(made.options)
    made.assert_sound({key_of(1): content_of(11), key_of(2): old[key_of(2)], key_of(3): content_of(13)})


def test_half_of_a_chunks_ranks_evicted(tmp_path: Path) -> None:
    """Two of four ranks have left, and the slots of one of these are another's: three can come back, no fourth."""
    made = Made(tmp_path / "card")
    driver = CardDriver(made.options)
    for rank in range(4):
        made.put(driver, key_of(1, rank), content_of(rank))
    driver.close()
    made.edit_index(lambda index: index.apply([RemoveObject(key_of(1, rank).encode()) for rank in (1, 2)]))
    made.flip(key_of(1, 2), at=30)  # as where a slot was given away: no sound header of it
    objects, _, unnamed = made.found()
    assert ({key: one.problem for key, one in objects.items()}, unnamed) == ({key_of(1, 0): "", key_of(1, 3): ""}, 1)
    rebuild(made.options)
    made.assert_sound({key_of(1, rank): made.contents[key_of(1, rank)] for rank in (0, 1, 3)})


def test_generations_go_on_behind_a_rebuild(made: Made) -> None:
    """One that is given twice would let a late fragment of the old object into the new one."""
    highest = max(plan.generation for plan in made.plans.values())
    shutil.rmtree(made.index)
    rebuild(made.options)
    driver = CardDriver(CardOptions(folder=made.options.folder, create=False))
    plan = driver.put(key_of(1), content_of(1), replacing=True)
    assert isinstance(plan, PutPlan)
    assert plan.generation > highest
    driver.close()


# --- the command ------------------------------------------------------------------------------------------------


def test_the_command_names_damage_and_drops_it(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    made.flip(key_of(2))
    assert cli.main(["verify", str(made.options.folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"damaged: namespace {bytes(16).hex()} group 0 block_hash {key_of(2).block_hash.hex()}")
    assert lines[1].startswith("10 objects proved")
    assert "--drop" in lines[2]
    assert cli.main(["verify", str(made.options.folder), "--drop", "--json"]) == 1
    said, total = map(json.loads, capsys.readouterr().out.splitlines())
    assert said["damaged"]["dropped"]
    assert (total["verified"]["dropped"], total["advice"]) == (1, [])
    assert cli.main(["verify", str(made.options.folder)]) == 0
    assert "all sound" in capsys.readouterr().out


def test_a_terminal_sees_a_bar_and_a_file_only_lines(
    made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made.flip(key_of(2))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["verify", str(made.options.folder)]) == 1
    output, errors = capsys.readouterr()
    assert "proving" in errors
    assert "10/10" in errors
    assert output.splitlines()[0].startswith("damaged: ")
    assert "\x1b" not in output


def test_a_rebuild_proves_payloads_too(made: Made, xkv: Callable[..., tuple[int, list[dict[str, Any]]]]) -> None:
    """Headers alone tell of an object; whether its bytes are those that were put only a read can say."""
    made.flip(key_of(6))
    _delete(made)
    code, lines = xkv("verify", made.options.folder, "--rebuild", "--drop")
    assert (code, lines[1]["damaged"]["block_hash"], lines[1]["damaged"]["dropped"]) == (
        1,
        key_of(6).block_hash.hex(),
        True,
    )
    made.assert_sound({key: content for key, content in made.contents.items() if key != key_of(6)})


def test_mistakes_are_one_line(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made.options.folder
    (folder.parent / "empty").mkdir()
    socket_dir = ("--socket-dir", str(folder.parent / "sockets"))
    for words, said in (
        ([], "type the folder of the card"),
        ([str(folder.parent / "none")], "there is no card"),
        ([str(folder.parent / "empty")], "there is no card"),
        ([str(folder / "db-0.xkv")], "cannot use"),
        ([""], "CARD is empty"),
        ([str(folder), "--port", "5557", *socket_dir], "no gateway answers"),
        ([str(folder), "--rebuild", "--port", "5557", *socket_dir], "--rebuild is for a card that no gateway has"),
    ):
        assert cli.main(["verify", *words]) == 2, words
        output, errors = capsys.readouterr()
        assert (output, len(errors.splitlines())) == ("", 1), (words, errors)
        assert said in errors, words
    with (folder / "db-0.xkv").open("r+b") as file:
        os.pwrite(file.fileno(), bytes(2 * SUPERBLOCK_BYTES), 0)
    assert cli.main(["verify", str(folder)]) == 2
    assert "not a database of a card" in capsys.readouterr().err


@pytest.mark.parametrize("lacking", [errno.EMFILE, errno.ENOMEM, errno.ENOSPC])
def test_what_is_lacking_is_no_damage(
    made: Made, xkv: Callable[..., tuple[int, list[dict[str, Any]]]], monkeypatch: pytest.MonkeyPatch, lacking: int
) -> None:
    """Descriptors, memory, room: neither is an index called damaged for want of them, nor is it made anew."""
    with monkeypatch.context() as patch:

        def refuse(path: str, **_: object) -> None:
            raise lmdb.Error(f"{path}: {os.strerror(lacking)}")

        patch.setattr(lmdb, "open", refuse)
        with pytest.raises(UserError, match=os.strerror(lacking)):
            CardDriver(CardOptions(folder=made.options.folder, create=False))
        code, lines = xkv("verify", made.options.folder)
        assert code == 2
        assert os.strerror(lacking) in lines[-1]["error"]
    assert sorted(path.name for path in made.options.folder.iterdir()) == ["db-0.xkv", "departures", "index", "lock"]
    assert sorted(path.name for path in made.index.iterdir()) == ["data.mdb", "lock.mdb"]  # and not doubted
    made.assert_sound(made.contents)
