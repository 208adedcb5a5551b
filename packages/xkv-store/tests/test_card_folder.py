"""Opening: locks, what was made is found again, contradictions say what to do, damage mends itself."""

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from xkv_store import card_folder
from xkv_store.card import Card, CardOptions, PutPlan
from xkv_store.card_folder import open_folder
from xkv_store.card_lock import CardInUseError
from xkv_store.errors import MediumError, UserError
from xkv_store.geometry import DATA_OFFSET, HEADER_BYTES
from xkv_store.index import Index, Meta, SetObject
from xkv_store.key import ObjectKey
from xkv_store.layout import Extent, Record, pack_record
from xkv_store.testing.cards import CardDriver

SLOT = 4_096
PAYLOAD = SLOT - HEADER_BYTES


@pytest.fixture
def options(tmp_path: Path) -> CardOptions:
    return CardOptions(
        folder=tmp_path / "card",
        capacity_bytes=2 * (DATA_OFFSET + 20 * SLOT),
        databases=2,
        slot_bytes=SLOT,
        grace_ms=0,
    )


def key_of(number: int) -> ObjectKey:
    return ObjectKey(bytes(16), 0, number.to_bytes(16, "big"), 0)


def filled(options: CardOptions, numbers: range = range(10)) -> CardDriver:
    driver = CardDriver(options)
    for number in numbers:
        assert isinstance(driver.put(key_of(number), bytes([number]) * (number * 700 + 1), family=number), PutPlan)
    return driver


def held(driver: CardDriver, numbers: range = range(10)) -> list[int]:
    found = []
    for number in numbers:
        data = driver.get_or_drop(key_of(number))
        if data is not None:
            assert data == bytes([number]) * (number * 700 + 1)
            found.append(number)
    return found


def any_of(options: CardOptions) -> CardOptions:
    """The same folder with nothing else said."""
    return CardOptions(folder=options.folder)


# --- lock and modes ---------------------------------------------------------------------------------------------


def test_a_second_opening_is_refused_and_told_who(options: CardOptions) -> None:
    driver = CardDriver(options)
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} "):
        Card.open(any_of(options))
    driver.close()
    CardDriver(any_of(options)).close()


def test_a_dead_holders_lock_is_no_obstacle(options: CardOptions) -> None:
    """The text in the file stays behind; the kernel's lock does not."""
    CardDriver(options).close()
    program = (
        "import sys, os, signal; from pathlib import Path; from xkv_store.card import Card, CardOptions\n"
        "card = Card.open(CardOptions(folder=Path(sys.argv[1]))); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", program, str(options.folder)], env=environment, check=False)
    assert ended.returncode == -9
    CardDriver(any_of(options)).close()


def test_the_lock_is_not_inherited(options: CardOptions) -> None:
    """A child that outlives the gateway must not keep the card locked."""
    driver = CardDriver(options)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        driver.close()
        CardDriver(any_of(options)).close()
        child.kill()


def test_all_is_private(options: CardOptions) -> None:
    driver = filled(options)
    assert options.folder.stat().st_mode & 0o777 == 0o700
    for path in options.folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    driver.close()


@pytest.mark.parametrize("create", [True, False])
def test_a_folder_that_cannot_be_is_a_clear_error(tmp_path: Path, create: bool) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="give"):
        Card.open(CardOptions(folder=tmp_path / "file" / "card", create=create))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_create_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no card"):
        Card.open(CardOptions(folder=tmp_path / "card", create=False))
    assert not (tmp_path / "card").exists()


# --- making -----------------------------------------------------------------------------------------------------


def test_the_default_takes_a_share_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_folder, "_free_bytes", lambda _: 10 << 20)
    driver = CardDriver(CardOptions(folder=tmp_path / "card", slot_bytes=SLOT))
    assert driver.card.slots_total == ((8 << 20) - DATA_OFFSET) // SLOT
    driver.close()
    monkeypatch.setattr(card_folder, "_free_bytes", lambda _: 1 << 50)
    monkeypatch.setattr(card_folder, "CAPACITY_BYTES_DEFAULT_MAX", 4 << 20)
    driver = CardDriver(CardOptions(folder=tmp_path / "other", slot_bytes=SLOT))
    assert driver.card.slots_total == ((4 << 20) - DATA_OFFSET) // SLOT
    driver.close()


def test_no_space_is_an_error_that_leaves_nothing(options: CardOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate
    calls: list[int] = []

    def second_fails(fd: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "full")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", second_fails)
    with pytest.raises(UserError, match="give a smaller capacity"):
        Card.open(options)
    assert [path.name for path in options.folder.iterdir()] == ["lock"]
    monkeypatch.undo()
    filled(options).close()


@pytest.mark.parametrize("moment", ["before", "databases", "index", "end"])
def test_a_making_that_was_killed_is_made_anew(
    options: CardOptions, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    class Killed(BaseException):
        """As good as a kill: what was made stays behind."""

    def killed(*_: object, **__: object) -> None:
        raise Killed

    target = {
        "before": (card_folder, "_plan_slots"),
        "databases": (Index, "create"),
        "index": (card_folder, "_sync_folder"),
        "end": (Path, "unlink"),
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(card_folder._Making, "undo", lambda *_: None)
        if moment == "index":
            real, calls = card_folder._sync_folder, []

            def second(folder: Path) -> None:
                calls.append(folder)
                if len(calls) == 2:
                    raise Killed
                real(folder)

            patch.setattr(card_folder, "_sync_folder", second)
        else:
            patch.setattr(*target, killed)
        with pytest.raises(Killed):
            Card.open(options)
    assert (options.folder / "making").exists()
    driver = filled(options)
    assert not (options.folder / "making").exists()
    driver.crash()
    assert held(driver) == list(range(10))
    driver.close()


def test_databases_elsewhere_are_found_again_by_the_folder_alone(options: CardOptions, tmp_path: Path) -> None:
    paths = (tmp_path / "nvme0", tmp_path / "nvme1")
    driver = filled(replace(options, databases=paths))
    assert all(path.stat().st_size == DATA_OFFSET + 20 * SLOT for path in paths)
    driver.crash()
    assert held(driver) == list(range(10))
    driver.close()
    moved = (tmp_path / "moved0", paths[1])
    paths[0].rename(moved[0])
    with pytest.raises(UserError, match="missing"):
        Card.open(any_of(options))
    driver = CardDriver(replace(any_of(options), databases=moved))
    assert held(driver) == list(range(10))
    driver.close()
    with pytest.raises(UserError, match="in order"):
        Card.open(replace(any_of(options), databases=moved[::-1]))


def test_somebody_elses_file_is_not_taken(options: CardOptions, tmp_path: Path) -> None:
    (tmp_path / "diary").write_bytes(b"dear diary")
    with pytest.raises(UserError, match="holds something already"):
        Card.open(replace(options, databases=(tmp_path / "new", tmp_path / "diary")))
    assert (tmp_path / "diary").read_bytes() == b"dear diary"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity_bytes": 1 << 30}, "capacity"),
        ({"databases": 3}, "databases"),
        ({"slot_bytes": 8_192}, "slots of 4096 bytes"),
    ],
)
def test_a_contradiction_says_what_to_do(options: CardOptions, change: dict[str, int], message: str) -> None:
    filled(options).close()
    with pytest.raises(UserError, match=f"{message}.*leave that option out"):
        Card.open(replace(options, **change))  # type: ignore[arg-type]
    for same in (options, any_of(options)):
        driver = CardDriver(same)
        assert held(driver) == list(range(10))
        driver.close()


@pytest.mark.parametrize(
    "change", [{"grace_ms": -1}, {"databases": -1}, {"databases": 1_000}, {"capacity_bytes": 0}, {"slot_bytes": 5_000}]
)
def test_options_out_of_range(tmp_path: Path, change: dict[str, int]) -> None:
    with pytest.raises(UserError):
        CardOptions(folder=tmp_path / "card", **change)  # type: ignore[arg-type]


def test_a_capacity_too_small_says_how_much(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give 1052672 bytes or more"):
        Card.open(CardOptions(folder=tmp_path / "card", capacity_bytes=DATA_OFFSET, slot_bytes=SLOT))


# --- mending ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "foreign", "meta"])
def test_a_lost_index_is_made_anew_from_the_slots(options: CardOptions, damage: str) -> None:
    driver = filled(options)
    replaced = driver.put(key_of(3), bytes([3]) * (3 * 700 + 1), family=3, replacing=True)
    assert isinstance(replaced, PutPlan)
    driver.card.abandon()
    index = options.folder / "index"
    if damage == "missing":
        shutil.rmtree(index)
    elif damage == "empty":
        (index / "data.mdb").write_bytes(b"")
    elif damage == "cut":
        os.truncate(index / "data.mdb", 3 * 4_096)
    elif damage == "foreign":
        (index / "data.mdb").write_bytes(os.urandom(100_000))
    else:
        with lmdb.open(str(index), max_dbs=4) as env, env.begin(write=True) as transaction:
            transaction.delete(b"card_uuid", db=env.open_db(b"meta", transaction))
    driver = CardDriver(any_of(options))
    assert driver.card.status()["index_rebuilt"]
    assert held(driver) == list(range(10))
    plan = driver.card.begin_get(key_of(3), driver.now_ns)
    assert plan is not None
    assert plan.generation == replaced.generation, "the newest complete generation wins"
    fresh = driver.begin(key_of(99), 1)
    assert isinstance(fresh, PutPlan)
    assert fresh.generation > replaced.generation
    assert sum(driver.card.slots().values()) == driver.card.slots_total
    driver.card.abandon()


@pytest.mark.parametrize(
    ("end", "boot", "rebuilt"),
    [("kill", "same", False), ("kill", "other", True), ("clean", "same", False), ("clean", "other", False)],
)
def test_an_index_that_a_machine_left_open_is_made_anew(
    options: CardOptions, monkeypatch: pytest.MonkeyPatch, end: str, boot: str, rebuilt: bool
) -> None:
    # Commits are not synced: what a power loss leaves of the index may look sound and be none.
    driver = filled(options)
    if end == "clean":
        driver.close()
    else:
        driver.card.abandon()
    if boot == "other":
        monkeypatch.setattr(card_folder, "kernel_boot_id", lambda: b"another machine!")
    driver = CardDriver(any_of(options))
    assert driver.card.status()["index_rebuilt"] is rebuilt
    assert held(driver) == list(range(10))
    driver.close()


def test_an_incomplete_generation_is_not_rebuilt(options: CardOptions) -> None:
    driver = filled(options, range(1))
    plan = driver.put(key_of(20), b"x" * 3 * PAYLOAD)
    assert isinstance(plan, PutPlan)
    torn = driver.begin(key_of(20), 3 * PAYLOAD, replacing=True)
    assert isinstance(torn, PutPlan)
    driver.write(torn, b"y" * 3 * PAYLOAD)
    driver.card.abandon()
    extent = torn.extents[0]
    with (options.folder / f"db-{extent.database}.xkv").open("r+b") as file:
        file.seek(DATA_OFFSET + (extent.first + 1) * SLOT)
        file.write(bytes(SLOT))
    shutil.rmtree(options.folder / "index")
    driver = CardDriver(any_of(options))
    assert driver.get(key_of(20)) == b"x" * 3 * PAYLOAD
    driver.close()


def test_a_killed_rebuild_is_done_again(options: CardOptions) -> None:
    filled(options).close()
    shutil.rmtree(options.folder / "index")
    (options.folder / "index.new").mkdir()
    (options.folder / "index.new" / "data.mdb").write_bytes(b"half")
    driver = CardDriver(any_of(options))
    assert held(driver) == list(range(10))
    driver.close()


def test_entries_that_claim_the_same_slots_are_all_removed(options: CardOptions) -> None:
    """Which of them is right only a read could say; none may take the other's slots when it leaves."""
    driver = filled(options)
    driver.close()
    index = Index.open(options.folder / "index", slots=40)
    rows = {
        40: Record(50, 1, 0, 0, (Extent(0, 10, 1),)),
        41: Record(51, PAYLOAD + 1, 0, 0, (Extent(0, 10, 2),)),
        42: Record(52, 1, 0, 0, (Extent(0, 20, 1),)),  # out of range
        43: Record(53, 1, 0, 0, (Extent(2, 0, 1),)),  # no such database
        44: Record(54, 9 * PAYLOAD, 0, 0, (Extent(0, 12, 1),)),  # too few slots
        45: Record(55, 1, 0, 0, ()),
    }
    index.apply([SetObject(key_of(number).encode(), pack_record(record)) for number, record in rows.items()])
    index.apply([SetObject(b"not a key", pack_record(Record(56, 1, 0, 0, (Extent(0, 13, 1),))))])
    index.close()
    driver = CardDriver(any_of(options))
    assert driver.card.status()["objects"] == 10
    assert held(driver, range(10)) == list(range(10))
    assert sum(driver.card.slots().values()) == 40
    driver.crash()
    assert driver.card.status()["objects"] == 10
    driver.close()


def test_a_lost_order_is_made_anew(options: CardOptions) -> None:
    driver = filled(options)
    driver.close()
    with lmdb.open(str(options.folder / "index"), max_dbs=4) as env, env.begin(write=True) as transaction:
        transaction.drop(env.open_db(b"order", transaction), delete=False)
    driver = CardDriver(any_of(options))
    assert len(driver.card._index.order_from(b"", 100)) == 10
    driver.close()


def test_a_cut_database_loses_only_what_was_cut(options: CardOptions) -> None:
    driver = filled(options)
    driver.close()
    os.truncate(options.folder / "db-1.xkv", DATA_OFFSET + 2 * SLOT)
    driver = CardDriver(any_of(options))
    found = held(driver)
    assert 0 < len(found) < 10
    assert sum(driver.card.slots().values()) == 40
    driver.close()


def test_a_missing_database_says_what_to_do(options: CardOptions) -> None:
    filled(options).close()
    (options.folder / "db-1.xkv").unlink()
    with pytest.raises(UserError, match=r"db-1.xkv is missing: bring it back"):
        Card.open(any_of(options))


def test_a_database_of_another_card_is_refused(options: CardOptions, tmp_path: Path) -> None:
    filled(options).close()
    other = replace(options, folder=tmp_path / "other")
    filled(other).close()
    shutil.copy(other.folder / "db-1.xkv", options.folder / "db-1.xkv")
    with pytest.raises(UserError, match="belongs to another card"):
        Card.open(any_of(options))
    shutil.copy(other.folder / "db-0.xkv", options.folder / "db-0.xkv")
    with pytest.raises(UserError, match=r"index .* belongs to another card"):
        Card.open(any_of(options))


def test_a_newer_card_is_refused_by_name(options: CardOptions) -> None:
    filled(options).close()
    with (options.folder / "db-0.xkv").open("r+b") as file:
        for offset in (8, 4_096 + 8):
            file.seek(offset)
            file.write(b"\x07")
    with pytest.raises(UserError, match=r"format version 7.*use the release of xkv that made it"):
        Card.open(options)


def test_a_medium_that_fails_at_the_start_is_one_line(options: CardOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(options).close()

    def failing(*_: object) -> None:
        raise MediumError(errno.EIO, "writing the index")

    monkeypatch.setattr(Index, "set_meta", failing)
    with pytest.raises(UserError, match=r"cannot open the card .* Input/output error"):
        open_folder(any_of(options))
    monkeypatch.undo()
    CardDriver(any_of(options)).close()


@pytest.mark.parametrize("at", ["objects", "first write"])
def test_damage_that_ends_the_process_is_mended_by_the_next_start(
    options: CardOptions, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """LMDB aborts on some pages: without a mark every start would die of the same page."""
    filled(options).card.abandon()

    class DeadError(BaseException):
        """As good as an abort."""

    def died(*_: object) -> None:
        raise DeadError

    with monkeypatch.context() as patch:
        if at == "objects":
            patch.setattr(card_folder, "load", died)
        else:
            patch.setattr(Index, "set_meta", died)
        patch.setattr(card_folder, "trust", lambda _: None)  # a dead process takes nothing away
        with pytest.raises(DeadError):
            open_folder(any_of(options))
    driver = CardDriver(any_of(options))
    assert driver.card.status()["index_rebuilt"]
    assert held(driver) == list(range(10))
    driver.card.abandon()
    driver = CardDriver(any_of(options))
    assert not driver.card.status()["index_rebuilt"], "a kill of a sound gateway is no damage"
    driver.close()


@pytest.mark.parametrize("name", [b"boots", b"generation_ceiling"])
def test_counters_beyond_all_counting_are_damage(options: CardOptions, name: bytes) -> None:
    filled(options).close()
    with lmdb.open(str(options.folder / "index"), max_dbs=4) as env, env.begin(write=True) as transaction:
        transaction.put(name, b"\xff" * 8, db=env.open_db(b"meta", transaction))
    driver = CardDriver(any_of(options))
    assert driver.card.status()["index_rebuilt"]
    assert held(driver) == list(range(10))
    driver.close()


def test_damage_found_by_the_first_write_is_mended_at_once(
    options: CardOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(options).close()
    real, calls = Index.set_meta, []

    def first_fails(index: Index, meta: Meta) -> None:
        calls.append(meta)
        if len(calls) == 1:
            raise MediumError(errno.EIO, "MDB_CORRUPTED")
        real(index, meta)

    monkeypatch.setattr(Index, "set_meta", first_fails)
    driver = CardDriver(any_of(options))
    assert driver.card.status()["index_rebuilt"]
    assert held(driver) == list(range(10))
    driver.close()


@pytest.mark.parametrize(("error", "rebuilt"), [(lmdb.CorruptedError("x"), True), (lmdb.DiskError("full"), False)])
def test_damage_met_at_run_time_is_mended_by_the_next_start(
    options: CardOptions, monkeypatch: pytest.MonkeyPatch, error: lmdb.Error, rebuilt: bool
) -> None:
    """That is what the error's text promises."""
    driver = filled(options)

    def failing(*_: object) -> bool:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_try", failing)
        with pytest.raises(MediumError):
            driver.card._index.apply([SetObject(b"k", b"r")])
    driver.card.abandon()
    driver = CardDriver(any_of(options))
    assert driver.card.status()["index_rebuilt"] is rebuilt
    driver.close()


# --- what is somebody's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "00" * 16])
def test_a_stray_marker_of_making_destroys_no_card(options: CardOptions, text: str) -> None:
    filled(options).close()
    (options.folder / "making").write_text(text)
    with pytest.raises(UserError, match="remove the file making"):
        Card.open(options)
    (options.folder / "making").unlink()
    driver = CardDriver(any_of(options))
    assert not driver.card.status()["index_rebuilt"]
    assert held(driver) == list(range(10))
    driver.close()


@pytest.mark.parametrize("name", ["db-1.xkv", "db-7.xkv"])
def test_making_a_card_removes_nobodys_database(options: CardOptions, name: str) -> None:
    options.folder.mkdir()
    (options.folder / name).write_bytes(b"dear diary")
    (options.folder / "db-old.xkv").write_bytes(b"dear diary")
    with pytest.raises(UserError, match="is not of the card being made"):
        Card.open(options)
    assert (options.folder / name).read_bytes() == b"dear diary"
    assert not (options.folder / "making").exists()
    (options.folder / name).unlink()
    filled(options).close()
    assert (options.folder / "db-old.xkv").read_bytes() == b"dear diary"


def test_two_folders_do_not_share_a_database(options: CardOptions, tmp_path: Path) -> None:
    options = replace(options, databases=1)
    driver = filled(options)
    other = tmp_path / "other"
    other.mkdir()
    (other / "db-0.xkv").symlink_to(options.folder / "db-0.xkv")
    with pytest.raises(CardInUseError, match="in use"):
        Card.open(CardOptions(folder=other))
    assert held(driver) == list(range(10))
    driver.close()


def test_one_database_given_twice_is_refused_before_anything_is_made(options: CardOptions, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(tmp_path / "nvme0")
    with pytest.raises(UserError, match="the same database"):
        Card.open(replace(options, databases=(tmp_path / "nvme0", tmp_path / "alias")))
    assert [path.name for path in options.folder.iterdir()] == ["lock"]


@pytest.mark.timeout(10)
def test_a_folder_or_a_fifo_for_a_database_is_one_line(options: CardOptions, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="neither a file nor"):
        Card.open(replace(options, databases=(tmp_path / "new", tmp_path / "fifo")))
    filled(options).close()
    (options.folder / "db-1.xkv").unlink()
    (options.folder / "db-1.xkv").mkdir()
    with pytest.raises(UserError, match=r"db-1.xkv is neither a file nor"):
        Card.open(any_of(options))
    (options.folder / "db-0.xkv").unlink()
    shutil.rmtree(options.folder / "index")
    with pytest.raises(UserError, match=r"db-1.xkv is not of the card"):
        Card.open(any_of(options))


def test_a_card_that_has_lost_everything_does_not_say_that_nothing_is_missing(options: CardOptions) -> None:
    driver = CardDriver(options)
    assert driver.card.departures.since_ms == (0, 0)
    driver.close()
    (options.folder / "index" / "data.mdb").unlink()  # and no slot has anything
    driver = CardDriver(options)
    assert driver.card.status()["index_rebuilt"]
    assert all(driver.card.departures.since_ms)
    driver.close()


def test_an_index_that_is_no_folder_is_made_anew(options: CardOptions) -> None:
    filled(options).close()
    index = options.folder / "index"
    for _ in range(2):  # the second meets what the first has put aside
        shutil.rmtree(index)
        index.write_bytes(b"x")
        driver = CardDriver(any_of(options))
        assert held(driver) == list(range(10))
        driver.close()


def test_a_relative_path_is_the_same_as_an_absolute_one(
    options: CardOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = replace(options, folder=Path("card"), databases=(Path("card/db-0.xkv"), Path("nvme1")))
    filled(relative).close()
    assert not (tmp_path / "card" / "db-0.xkv").is_symlink()
    for same in (relative, replace(relative, folder=tmp_path / "card"), any_of(options)):
        driver = CardDriver(same)
        assert held(driver) == list(range(10))
        driver.close()


@pytest.mark.parametrize("name", ["\udcff", "a\0b"])
def test_a_path_that_cannot_be_told_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is no path"):
        CardOptions(folder=tmp_path / name)
    with pytest.raises(UserError, match="is no path"):
        CardOptions(folder=tmp_path, databases=(tmp_path / name,))


STARTS_WITH_A_ZERO_PAGE = """
import os, shutil, signal, sys
from pathlib import Path
from xkv_store.card import Card, CardOptions

folder = Path(sys.argv[1])
index = folder / "index"
sound = (index / "data.mdb").read_bytes()
for at in range(2 * 4096, len(sound), 4096):
    if not sound[at : at + 4096].strip(bytes(1)):
        continue
    shutil.rmtree(index)
    index.mkdir()
    (index / "data.mdb").write_bytes(sound[:at] + bytes(4096) + sound[at + 4096 :])
    for start in range(2):
        if os.fork() == 0:
            assert len(Card.open(CardOptions(folder=folder)).contents.keys_after(b"", 1_000)) == 300
            os.kill(os.getpid(), signal.SIGKILL)
        print(os.WTERMSIG(os.wait()[1]), end=" ")
    print()
"""


def test_a_page_that_lmdb_dies_of_costs_one_start(tmp_path: Path) -> None:
    """For every page of a real index: the start after a death has all objects, whatever the page was."""
    options = CardOptions(folder=tmp_path / "card", capacity_bytes=DATA_OFFSET + 400 * SLOT, slot_bytes=SLOT)
    driver = CardDriver(options)
    for number in range(300):
        driver.put(key_of(number), b"x", family=number)
    driver.card.abandon()
    command = [sys.executable, "-c", STARTS_WITH_A_ZERO_PAGE, str(options.folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    starts = [tuple(line.split()) for line in ended.stdout.splitlines()]
    assert set(starts) == {("9", "9"), ("6", "9")}, "without (6, 9) no page was one that LMDB dies of"
