"""Any bytes on the medium: in the index's entries, in superblocks, in slots. A clean error or a miss, never more.

Each example damages a copy of one small card, opens it and lives with it: what was there comes back exactly or not
at all, new objects find room, and every slot is accounted for.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import lmdb
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xkv_store import database as database_module
from xkv_store import layout, verify, wire
from xkv_store.attendant import Attendant
from xkv_store.card import CardOptions, PutPlan
from xkv_store.database import Database
from xkv_store.errors import CorruptObject, PeerError, UserError
from xkv_store.fragment import Identity, ObjectSlots, prove
from xkv_store.geometry import DATA_OFFSET, HEADER_BYTES, SUPERBLOCK_COPY_OFFSET, Geometry
from xkv_store.index import NAMED_DATABASES
from xkv_store.key import ObjectKey
from xkv_store.layout import Extent, Record, SlotHeader
from xkv_store.testing.cards import CardDriver
from xkv_store.testing.effort import chances
from xkv_store.wire_tools import (
    ListedObject,
    ListedObjects,
    ListNamespaces,
    ListObjects,
    Purge,
    Purged,
    PurgeObject,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SLOT = 4_096
GEOMETRY = Geometry(SLOT)
PAYLOAD = GEOMETRY.fragment_bytes
SLOTS = (14, 10)
GRACE_MS = 20
MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
KEYS = [ObjectKey(bytes(16), n % 2, bytes([n]) * 9, n // 4) for n in range(8)]
NEW = [ObjectKey(b"n" * 16, 0, bytes([n]) * 9, 0) for n in range(18)]  # more than fits


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes((number % 3 + 1) * PAYLOAD - number)


class Original:
    """A card of eight objects, closed, with what its slots' headers say."""

    def __init__(self, folder: Path, options: CardOptions, headers: dict[tuple[int, int], SlotHeader]) -> None:
        self.folder, self.options, self.headers = folder, options, headers


@pytest.fixture(scope="module")
def original() -> Iterator[Original]:
    folder = Path(tempfile.mkdtemp(prefix="xkv-fuzz-", dir=MEMORY_FOLDER))
    options = CardOptions(
        folder=folder / "card",
        capacity_bytes=2 * (DATA_OFFSET + SLOTS[0] * SLOT),
        databases=2,
        slot_bytes=SLOT,
        grace_ms=GRACE_MS,
    )
    driver = CardDriver(options)
    for number, key in enumerate(KEYS):
        driver.put(key, content_of(number), family=number % 3, position=number)
    driver.card.contents.put_namespace(b"n" * 16, "{}")
    driver.commit()
    driver.close()
    options = replace(options, capacity_bytes=None, databases=None, slot_bytes=None, create=False)
    entries = entries_of(options.folder)
    headers = {}
    for database in range(2):
        data = (options.folder / f"db-{database}.xkv").read_bytes()[DATA_OFFSET:]
        for slot in range(len(data) // SLOT):
            if data[slot * SLOT : slot * SLOT + 8] == layout.SLOT_MAGIC:
                headers[database, slot] = layout.parse_slot_header(data[slot * SLOT : (slot + 1) * SLOT])
    assert len(entries[b"objects"]) == len(KEYS)
    yield Original(folder, options, headers)
    shutil.rmtree(folder)


@contextmanager
def environment(card: Path) -> Iterator[tuple[lmdb.Environment, dict[bytes, lmdb._Database]]]:
    env = lmdb.open(str(card / "index"), max_dbs=4, map_size=16 << 20, sync=False)
    try:
        yield env, {name: env.open_db(name) for name in NAMED_DATABASES}
    finally:
        env.close()


def entries_of(card: Path) -> dict[bytes, dict[bytes, bytes]]:
    with environment(card) as (env, databases), env.begin() as transaction:
        return {name: dict(transaction.cursor(db).iternext()) for name, db in databases.items()}


@contextmanager
def copied(original: Original) -> Iterator[CardOptions]:
    """A copy of the card to be damaged."""
    folder = Path(tempfile.mkdtemp(prefix="example-", dir=original.folder))
    try:
        shutil.copytree(original.options.folder, folder / "card")
        yield replace(original.options, folder=folder / "card")
    finally:
        shutil.rmtree(folder)


def live_on(options: CardOptions) -> CardDriver:
    """Open a damaged card and use it as a gateway does; everything that is promised is asserted."""
    driver = CardDriver(options)
    slots = driver.card.slots()
    assert (slots["in_flight"], slots["limbo"], sum(slots.values())) == (0, 0, driver.card.slots_total)
    listed_and_purged(driver)
    for number, key in enumerate(KEYS):
        assert driver.get_or_drop(key) in (None, content_of(number))
        driver.settle(0)
    for number, key in enumerate(NEW):
        data = content_of(number)
        for _ in range(40):
            if driver.put_or_fail(key, data):
                break
            driver.settle(GRACE_MS)
        else:
            raise AssertionError(f"no room is made for object {number}: {driver.card.status()}")
        assert driver.get(key) == data
    for _ in range(3):
        driver.settle(1_100)
    slots = driver.card.slots()
    assert (slots["in_flight"], slots["limbo"], sum(slots.values())) == (0, 0, driver.card.slots_total)
    assert min(slots.values()) >= 0
    driver.card.contents.descriptors()
    driver.close()
    return driver


def is_key(encoded: bytes) -> bool:
    with suppress(PeerError):
        return bool(ObjectKey.decode(encoded))
    return False


def listed_and_purged(driver: CardDriver) -> None:
    """Whatever lies in the index: answers are messages that a tool takes, and one that is listed can be purged."""
    attendant, start, listed = Attendant(driver.card), b"", list[ListedObject]()
    for _ in range(len(KEYS) + 100):
        for question in (ListObjects(1, b"", start), ListNamespaces(1, b"")):
            answer = attendant.answer(question, driver.now_ns)
            assert wire.decode_from_gateway(wire.encode(answer)) == answer
            if isinstance(answer, ListedObjects):
                listed += answer.objects
                start = answer.next
        if not start:
            break
    else:
        raise AssertionError("a list without an end")
    for one in [one for one in listed if is_key(one.key)][:1]:
        purged = attendant.answer(Purge(1, (PurgeObject(one.key, one.generation),), ()), driver.now_ns)
        assert isinstance(purged, Purged)
        assert (purged.objects, purged.later) == (1, ())
        driver.settle(GRACE_MS)


def live_and_verify(options: CardOptions) -> None:
    live_on(options)
    assert [one for one in verify.verify(options, drop=True) if one.problem] == []
    again = CardDriver(options)
    assert sum(again.get(key) is not None for key in NEW) > 0
    again.close()


# --- the index's entries ------------------------------------------------------------------------------------

u64 = st.integers(0, 2**64 - 1)
wild = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**53, 2**61, 2**63 - 1, 2**63, 2**64 - 1])
numbers = st.one_of(st.integers(0, 30), wild, u64)
any_bytes = st.binary(min_size=1, max_size=80)
extents = st.builds(
    Extent,
    st.integers(0, 3),
    st.one_of(st.integers(0, 16), wild.map(lambda n: n & 0xFFFFFFFF)),
    st.one_of(st.integers(0, 4), wild.map(lambda n: n & 0xFFFFFFFF)),
)
records = st.builds(
    Record,
    numbers,
    st.one_of(st.integers(0, 4 * PAYLOAD), numbers),
    numbers,
    numbers.map(lambda n: n & 0xFFFFFFFF),
    st.lists(extents, max_size=3).map(tuple),
)
known_keys = st.sampled_from([key.encode() for key in KEYS])
edits = st.tuples(st.integers(0, 200), st.integers(1, 255))


@dataclass(frozen=True)
class Tweak:
    """One field of a sound record is another; `ordered`: the order follows."""

    field: str
    number: int
    ordered: bool


tweaks = st.builds(
    Tweak, st.sampled_from(["generation", "generation", "length", "family", "position"]), numbers, st.booleans()
)
Value: TypeAlias = bytes | Record | Tweak | tuple[int, int]
Damage: TypeAlias = tuple[bytes, str, bytes, Value]  # named database, what happens, key, with what
TARGETS = (b"objects", b"objects", b"objects", b"order", b"order", b"meta", b"namespaces")


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    target = draw(st.sampled_from(TARGETS))
    what = draw(st.sampled_from(["put", "put", "edit", "remove", "record", "tweak", "tweak"]))
    if target == b"objects" and what == "tweak":
        return target, what, draw(known_keys), draw(tweaks)
    if target == b"objects":
        key = draw(st.one_of(known_keys, known_keys, any_bytes, st.binary(min_size=200, max_size=511)))
    elif target == b"meta":
        key = draw(
            st.sampled_from(
                [
                    b"format",
                    b"card_uuid",
                    b"slot_bytes",
                    b"databases",
                    b"generation_ceiling",
                    b"boots",
                    b"open_in",
                    b"else",
                ]
            )
        )
    else:
        key = draw(any_bytes)
    value: Value
    if what == "record":
        value = draw(records)
    elif what == "edit":
        value = draw(edits)
    else:
        value = draw(st.one_of(known_keys, st.binary(max_size=100), st.binary(min_size=8, max_size=8)))
    return target, what, key, value


def edited(data: bytes, edit: tuple[int, int]) -> bytes:
    at, flip = edit
    changed = bytearray(data)
    if changed:
        changed[at % len(changed)] ^= flip
    return bytes(changed)


def tweak(transaction: lmdb.Transaction[bytes], databases: dict[bytes, lmdb._Database], key: bytes, how: Tweak) -> None:
    try:
        old = layout.parse_record(transaction.get(key, db=databases[b"objects"]) or b"")
    except layout.BadBytesError:
        return  # the plan has spoilt it already
    number = how.number & 0xFFFFFFFF if how.field == "position" else how.number
    changed: dict[str, Any] = {how.field: number}
    new = old._replace(**changed)
    transaction.put(key, layout.pack_record(new), db=databases[b"objects"])
    if how.ordered:
        transaction.delete(layout.pack_order_key(old.family, old.position, old.generation), db=databases[b"order"])
        order = layout.pack_order_key(new.family, new.position, new.generation)
        transaction.put(order, key, db=databases[b"order"])


def damage(card: Path, plan: list[Damage], pick: int) -> None:
    with environment(card) as (env, databases), env.begin(write=True) as transaction:
        for target, what, key, value in plan:
            db = databases[target]
            present = list(transaction.cursor(db).iternext())
            if what in {"edit", "remove"} and target in {b"order", b"namespaces"} and present:
                key = present[pick % len(present)][0]  # noqa: PLW2901  a key that is there
            if isinstance(value, Tweak):
                tweak(transaction, databases, key, value)
            elif isinstance(value, Record):
                packed = layout.pack_record(value)
                transaction.put(key, packed, db=db)
                if target == b"objects":  # so that the counts agree, and the order leads to it
                    order = layout.pack_order_key(value.family, value.position, value.generation)
                    transaction.put(order, key, db=databases[b"order"])
            elif isinstance(value, tuple):
                old = transaction.get(key, db=db)
                if old is not None:
                    transaction.put(key, edited(old, value), db=db)
            elif what == "remove":
                transaction.delete(key, db=db)
            else:
                transaction.put(key, value, db=db)


def test_a_card_without_damage_passes(original: Original) -> None:
    """What the examples ask for can be had."""
    with copied(original) as options:
        live_and_verify(options)


def generation(number: int, *keys: ObjectKey) -> list[Damage]:
    return [(b"objects", "tweak", key.encode(), Tweak("generation", number, ordered=True)) for key in keys]


@chances(150)
@example(plan=generation(2**64 - 1, KEYS[0]), pick=0)  # the next one did not fit its field
@example(plan=generation(2**63 - 1, KEYS[0]), pick=0)  # the card could not be closed, nor opened without a rebuild
@example(plan=generation(5, *KEYS[:2]), pick=0)  # two objects of one generation: a slot was lost for ever
@given(plan=st.lists(damages(), min_size=1, max_size=6), pick=st.integers(0, 50))
def test_any_entries_in_the_index(original: Original, plan: list[Damage], pick: int) -> None:
    with copied(original) as options:
        damage(options.folder, plan, pick)
        try:
            live_and_verify(options)
        except UserError:
            # An index of another card or another format: it says what to do, and nothing is lost by it.
            assert any(target == b"meta" for target, *_ in plan)


# --- superblocks --------------------------------------------------------------------------------------------

# From some hundred slots to some thousand million nothing is claimed: it would be allocated, were there room.
claimed_slots = st.one_of(st.integers(0, 40), st.sampled_from([2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]))
forged = st.fixed_dictionaries(
    {},
    optional={
        "number": st.integers(0, 3),
        "databases": st.sampled_from([0, 1, 2, 3, 256, 65_535]),
        "slot_bytes": st.sampled_from([0, 1, SLOT, 2 * SLOT, SLOT + 1, 1 << 26, 2**32 - 1]),
        "slots": claimed_slots,
        "card_uuid": st.sampled_from([bytes(16), b"u" * 16]),
        "made_at_s": st.integers(0, 2**64 - 1),
    },
)
blocks = st.tuples(
    st.integers(0, 1),  # database
    st.sampled_from([0, 1, 2]),  # the copy, or both
    st.one_of(
        st.lists(st.tuples(st.integers(0, 4_095), st.integers(1, 255)), min_size=1, max_size=3),
        st.binary(max_size=200),
        forged,
        forged,
    ),
)


@chances(60)
@example(plan=[(0, 2, {"databases": 0})])  # no database at all
@given(plan=st.lists(blocks, min_size=1, max_size=3))
def test_any_superblocks(
    original: Original, plan: list[tuple[int, int, list[tuple[int, int]] | bytes | dict[str, Any]]]
) -> None:
    with copied(original) as options:
        for database, copy, what in plan:
            with (options.folder / f"db-{database}.xkv").open("r+b") as file:
                for offset in [0, SUPERBLOCK_COPY_OFFSET] if copy == 2 else [copy * SUPERBLOCK_COPY_OFFSET]:
                    file.seek(offset)
                    data = bytearray(file.read(4_096))
                    if isinstance(what, bytes):
                        data[: len(what)] = what
                    elif isinstance(what, dict):
                        with suppress(layout.BadBytesError):
                            data[:] = layout.pack_superblock(layout.parse_superblock(data)._replace(**what))
                    else:
                        for at, flip in what:
                            data[at] ^= flip
                    file.seek(offset)
                    file.write(data)
        with suppress(UserError):
            live_and_verify(options)


# --- slots --------------------------------------------------------------------------------------------------

header_changes = st.fixed_dictionaries(
    {},
    optional={
        "key": st.binary(max_size=64),
        "fragment": st.integers(0, 2**32 - 1) | st.integers(0, 3),
        "fragments": st.integers(0, 2**32 - 1) | st.integers(0, 3),
        "payload_bytes": st.integers(0, 2**32 - 1) | st.integers(0, PAYLOAD),
        "generation": numbers,
        "length": numbers | st.integers(0, 4 * PAYLOAD),
        "payload_checksum": u64,
        "family": numbers,
        "position": numbers.map(lambda n: n & 0xFFFFFFFF),
    },
)
SlotChange: TypeAlias = "dict[str, Any] | list[tuple[int, int]] | bytes"
slot_changes: st.SearchStrategy[SlotChange] = st.one_of(
    header_changes,
    header_changes,
    st.lists(st.tuples(st.integers(0, SLOT - 1), st.integers(1, 255)), min_size=1, max_size=3),
    st.binary(max_size=1_100),
)
slot_damages = st.tuples(
    st.integers(0, 50),  # which slot
    st.one_of(slot_changes, slot_changes, slot_changes, st.integers(0, 50)),  # or the bytes of that slot
)
SlotDamage: TypeAlias = "tuple[int, SlotChange | int]"


def damaged_slot(data: bytes, what: SlotChange) -> bytes:
    changed = bytearray(data)
    if isinstance(what, dict):
        with suppress(layout.BadBytesError):  # the slot is empty, or spoilt already
            header = layout.parse_slot_header(changed)._replace(**what)
            layout.pack_slot_header(memoryview(changed), header)
    elif isinstance(what, bytes):
        changed[: len(what)] = what
    else:
        for at, flip in what:
            changed[at] ^= flip
    return bytes(changed)


@chances(120)
@example(plan=[(0, {"generation": 2**64 - 1})], rebuilding=True)  # the index made of it could not be opened
@example(plan=[(0, {"generation": 2**63 - 1})], rebuilding=True)
@given(plan=st.lists(slot_damages, min_size=1, max_size=6), rebuilding=st.booleans())
def test_any_bytes_in_slots(original: Original, plan: list[SlotDamage], rebuilding: bool) -> None:
    places = [*sorted(original.headers), (0, 13), (1, 13)]
    with copied(original) as options:
        for which, what in plan:
            database, slot = places[which % len(places)]
            path = options.folder / f"db-{database}.xkv"
            with path.open("r+b") as file:
                file.seek(DATA_OFFSET + slot * SLOT)
                data = file.read(SLOT)
            if isinstance(what, int):
                other, at = places[what % len(places)]
                with (options.folder / f"db-{other}.xkv").open("rb") as file:
                    file.seek(DATA_OFFSET + at * SLOT)
                    data = file.read(SLOT)
            else:
                data = damaged_slot(data, what)
            with path.open("r+b") as file:
                file.seek(DATA_OFFSET + slot * SLOT)
                file.write(data)
        if rebuilding:
            verify.rebuild(options)
        live_and_verify(options)


# --- one slot -----------------------------------------------------------------------------------------------


def sealed(data: bytes, identity: Identity, fragment: int) -> bytearray:
    slot = bytearray(b"\xa5" * SLOT)
    part = data[fragment * PAYLOAD : (fragment + 1) * PAYLOAD]
    slot[HEADER_BYTES : HEADER_BYTES + len(part)] = part
    ObjectSlots(identity, GEOMETRY).seal([memoryview(slot)], fragment)
    return slot


identities = st.builds(
    Identity,
    st.binary(min_size=16, max_size=16),
    known_keys,
    st.integers(0, 2**64 - 1),
    st.integers(1, 3 * PAYLOAD),
    u64,
    st.integers(0, 2**32 - 1),
)


@chances(300)
@given(identity=identities, number=st.integers(0, 5), data=st.data())
def test_a_slot_proves_what_it_was_sealed_as_and_nothing_else(
    identity: Identity, number: int, data: st.DataObject
) -> None:
    content = random.Random(number).randbytes(identity.length)
    fragment = data.draw(st.integers(0, GEOMETRY.fragments(identity.length) - 1))
    whole = sealed(content, identity, fragment)
    prove(memoryview(whole), identity, GEOMETRY, fragment)
    slot = damaged_slot(bytes(whole), data.draw(slot_changes))
    wanted = data.draw(st.one_of(st.just(identity), identities))
    which = data.draw(st.one_of(st.just(fragment), st.integers(0, 3), st.integers(0, 2**32)))
    end = HEADER_BYTES + GEOMETRY.payload_bytes(identity.length, fragment)
    try:
        prove(memoryview(bytearray(slot)), wanted, GEOMETRY, which)
    except CorruptObject:
        assert slot[:end] != whole[:end] or (wanted, which) != (identity, fragment), "it is sound"
    else:
        assert slot[HEADER_BYTES:end] == whole[HEADER_BYTES:end]
        same = (wanted.card_uuid, wanted.key, wanted.generation, wanted.length, which)
        found = layout.parse_slot_header(slot)
        assert same == (found.card_uuid, found.key, found.generation, found.length, found.fragment)


@chances(40)
@given(
    scribbles=st.lists(st.tuples(st.integers(0, 3 * SLOT - 1), st.binary(min_size=1, max_size=40)), max_size=6),
    junk=st.binary(max_size=HEADER_BYTES),
    when=st.sampled_from(["before", "meanwhile", "after"]),
)
def test_what_a_client_does_to_its_slots_while_they_are_written_harms_its_object_alone(
    original: Original, scribbles: list[tuple[int, bytes]], junk: bytes, when: str
) -> None:
    """Any bytes where the header goes, and anything written over header and payload between seal and write."""
    content = content_of(2)

    def scribble(slots: list[memoryview]) -> None:
        for at, data in scribbles:
            slot = slots[at // SLOT % len(slots)]
            slot[at % SLOT : at % SLOT + len(data)] = data[: SLOT - at % SLOT]

    with copied(original) as options:
        driver = CardDriver(options)
        slots = driver.fill(3, content)
        for slot in slots:
            slot[: len(junk)] = junk
        expected = content
        if when == "before":
            scribble(slots)
            expected = driver.payloads(slots, len(content), 0)
        real = Database.write

        def write(database: Database, first_slot: int, buffers: Sequence[memoryview]) -> None:
            if when == "meanwhile":
                scribble(slots)
            real(database, first_slot, buffers)

        plan = driver.begin(NEW[0], len(content))
        assert isinstance(plan, PutPlan)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(database_module, "library", lambda: None)  # it would go past this
            patch.setattr(Database, "write", write)
            driver.card.write(plan, slots)
        if when == "after":
            scribble(slots)
        driver.card.finish_put(plan, None)
        driver.commit()
        found = driver.get_or_drop(NEW[0])
        assert found == expected or (found is None and when == "meanwhile")
        driver.close()
        live_on(options)
