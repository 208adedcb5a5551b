"""The optional library: it gives what Python gives, bit for bit, and without it nothing is missing.

Where there is no C compiler, the tests of the library itself are of a build that says so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from xkv_store import database, native
from xkv_store import medium as medium_module
from xkv_store.database import (
    Database,
    aligned,
    aligned_slots,
    new_superblock,
    read_proving,
    seal_and_write,
)
from xkv_store.errors import CorruptObject, MediumError
from xkv_store.fragment import Identity, ObjectSlots
from xkv_store.geometry import DATA_OFFSET, HEADER_BYTES, Geometry
from xkv_store.key import ObjectKey
from xkv_store.layout import SLOT_HEADER_FORM, Extent, pack_slot_header, parse_slot_header
from xkv_store.medium import Medium
from xkv_store.plans import GetPlan, PutPlan
from xkv_store.testing.faults import Fault, FaultPlan, Injector, Kind, Operation, faulty_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BUILD: Final = Path(__file__).resolve().parents[1] / "native" / "build.py"
EXIT_NONE: Final = 3
GEOMETRY: Final = Geometry(8_192)
CARD: Final = b"card-uuid-16byte"
SAMPLE: Final = bytearray(random.Random(1).randbytes((2 << 20) + 64))
NEAR: Final = (0, 16, 128, 240, 1_024, 2_048, 261_120, 2 << 20)
EDGES: Final = sorted({max(0, at + n) for at in NEAR for n in range(-2, 3)})


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The library, compiled now; None where this machine has no compiler."""
    into = tmp_path_factory.mktemp("native") / native.LIBRARY.name
    done = subprocess.run([sys.executable, str(BUILD), str(into)], capture_output=True, text=True, check=False)
    assert (done.returncode, into.is_file()) in ((0, True), (EXIT_NONE, False)), done.stderr
    return into if into.is_file() else None


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, built: Path | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way; `native` is Python's, too, where there is no compiler."""
    found = native.Native(built) if built is not None and request.param == "native" else None
    monkeypatch.setattr(native, "library", lambda: found)
    return str(request.param)


def both(buffers: list[memoryview], skip: int, payload_bytes: list[int]) -> list[int]:
    return [xxh3_64_intdigest(view[skip : skip + n]) for view, n in zip(buffers, payload_bytes, strict=True)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("offset", [0, 1, 7, 63])
def test_checksums_are_those_of_python_at_every_edge(offset: int) -> None:
    view = memoryview(SAMPLE)[offset:]
    lengths = [length for length in EDGES if length <= 2 << 20]
    views = [view[: length + 3] for length in lengths]
    assert native.payload_checksums(views, 3, lengths) == both(views, 3, lengths)


@pytest.mark.usefixtures("way")
def test_checksums_of_every_length_to_three_blocks_are_those_of_python() -> None:
    lengths = list(range(3_100))
    views = [memoryview(SAMPLE)] * len(lengths)
    assert native.payload_checksums(views, 5, lengths) == both(views, 5, lengths)


@given(st.data())
def test_checksums_of_any_payloads_are_those_of_python(built: Path | None, data: st.DataObject) -> None:
    found = native.Native(built) if built is not None else None
    lengths = data.draw(st.lists(st.integers(0, 2 << 20) | st.integers(0, 5_000), max_size=5))
    skip = data.draw(st.integers(0, 20))
    views = []
    for length in lengths:
        at = data.draw(st.integers(0, len(SAMPLE) - length - skip))
        views.append(memoryview(SAMPLE)[at : at + length + skip])
    wanted = both(views, skip, lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: found)
        assert native.payload_checksums(views, skip, lengths) == wanted


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("buffer", [memoryview(bytes(5_000)), memoryview(bytearray(3_000))], ids=["read only", "short"])
def test_memory_that_may_not_be_reached_by_its_address_is_not(buffer: memoryview) -> None:
    """A buffer that is shorter than what is asked for is summed as far as it goes: nothing behind it is read."""
    assert native.payload_checksums([buffer], 1_000, [4_000]) == [xxh3_64_intdigest(buffer[1_000:])]


def test_each_kind_of_registers_gives_the_same(tmp_path: Path, built: Path | None) -> None:
    """A processor takes the widest registers that it has: the others are tried by taking the wider ones away."""
    if built is None:
        return
    text = BUILD.with_name("xkv.c").read_text()
    for gone in ([], ["avx512f"], ["avx512f", "avx2"]):
        source, library = tmp_path / "-".join(["xkv", *gone, ".c"]), tmp_path / ("-".join(gone) + ".so")
        changed = text
        for kind in gone:
            assert f'__builtin_cpu_supports("{kind}")' in changed
            changed = changed.replace(f'__builtin_cpu_supports("{kind}")', "0")
        source.write_text(changed)
        strictly = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
        subprocess.run([os.environ.get("CC", "cc"), *strictly, str(source), "-o", str(library)], check=True)
        lengths = [*range(241, 3_000, 7), 261_120]
        views = [memoryview(SAMPLE)] * len(lengths)
        assert native.Native(library).checksums(views, 1, lengths) == both(views, 1, lengths)


# --- copying ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_a_copy_is_the_same_and_summed_where_it_is() -> None:
    lengths = [0, 1, 240, 241, 1_024, 1_025, 65_536 - 4_096, 65_536, 131_072 + 77, 261_120]
    views = [memoryview(SAMPLE)[number * 3 :][: length + 4_096 + 9] for number, length in enumerate(lengths)]
    into = [memoryview(bytearray(len(view))) for view in views]
    assert native.copied(views, into, 4_096, lengths) == both(views, 4_096, lengths)
    assert [bytes(view) for view in into] == [bytes(view) for view in views]


@pytest.mark.usefixtures("way")
def test_a_copy_reaches_no_further_than_its_buffers() -> None:
    large, small = memoryview(bytearray(SAMPLE[:9_000])), memoryview(bytearray(8_999))
    with pytest.raises(ValueError, match=r"9000|\(9000,\)"):
        native.copied([large], [small], 0, [9_000])
    fixed = memoryview(bytes(SAMPLE[:9_000]))  # read only: by Python
    into = memoryview(bytearray(9_000))
    assert native.copied([fixed], [into], 0, [9_000]) == [xxh3_64_intdigest(fixed)]
    assert into == fixed


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["on a disk", "in memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where a database is a file for the kernel to read, and where it is mapped."""
    if request.param == "on a disk":
        yield tmp_path
        return
    with TemporaryDirectory(dir="/dev/shm", prefix="xkv-test-") as found:
        yield Path(found)


@pytest.fixture
def opened(folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A database of 12 slots of 8 KiB, read by each way in small parts."""
    monkeypatch.setattr(database, "library", native.library)
    monkeypatch.setattr(database, "SUMMED_BYTES", 5 * 4_096)
    path = folder / "db-0.xkv"
    numbers = {"number": 0, "databases": 1, "slot_bytes": GEOMETRY.slot_bytes, "slots": 12}
    Database.make(path, new_superblock(**numbers, card_uuid=CARD, database_uuid=b"d" * 16))
    found = Database.open(path)
    yield found
    found.close()


@pytest.fixture(params=[1, 240, 8_000, 7 * GEOMETRY.fragment_bytes, 7 * GEOMETRY.fragment_bytes + 1])
def plan(request: pytest.FixtureRequest, opened: Database) -> GetPlan:
    """An object of so many bytes, in two extents of that database where it has two fragments."""
    length: int = request.param
    fragments = GEOMETRY.fragments(length)
    half = fragments // 2
    extents = tuple(one for one in (Extent(0, 9 - half, half), Extent(0, 0, fragments - half)) if one.slots)
    whole = (ObjectKey(CARD, 0, b"h" * 32, 0), b"k" * 40, 7, length, 3, 4, fragments, extents)
    found = GetPlan(*whole)
    write(opened, found)
    return found


def write(opened: Database, plan: GetPlan, number: int = 0) -> list[memoryview]:
    """Write the object with other bytes for each number: its slots, sealed."""
    slots = [bytearray_slot(number + fragment) for fragment in range(plan.fragments)]
    Medium([opened], GEOMETRY, CARD).write(PutPlan(*plan), slots)
    return slots


def bytearray_slot(number: int) -> memoryview:
    slot = aligned(GEOMETRY.slot_bytes)
    slot[:] = SAMPLE[number * 999 :][: len(slot)]
    return slot


def read(opened: Database, plan: GetPlan) -> bytes:
    """The object's bytes, read from its second fragment on where it has one, as a resumed load does."""
    medium = Medium([opened], GEOMETRY, CARD)
    first = min(1, plan.fragments - 1)
    slots = aligned_slots(plan.fragments - first, GEOMETRY.slot_bytes)
    medium.read(plan, slots, first)
    return b"".join(
        bytes(slot[HEADER_BYTES:][: GEOMETRY.payload_bytes(plan.length, fragment)])
        for fragment, slot in enumerate(slots, first)
    )


def content(plan: GetPlan, number: int = 0) -> bytes:
    first = min(1, plan.fragments - 1)
    return b"".join(
        bytes(bytearray_slot(number + fragment)[HEADER_BYTES:][: GEOMETRY.payload_bytes(plan.length, fragment)])
        for fragment in range(first, plan.fragments)
    )


def spoil(opened: Database, plan: GetPlan, change: Callable[[bytearray], None]) -> None:
    """Change the slot of the object's last fragment on the medium."""
    extent = plan.extents[-1]
    with opened.path.open("r+b") as file:
        file.seek(DATA_OFFSET + (extent.first + extent.slots - 1) * GEOMETRY.slot_bytes)
        slot = bytearray(file.read(GEOMETRY.slot_bytes))
        change(slot)
        file.seek(-len(slot), os.SEEK_CUR)
        file.write(slot)


@pytest.mark.parametrize("direct", [True, False], ids=["in large parts", "in small parts"])
def test_each_way_reads_and_writes_the_same(opened: Database, plan: GetPlan, direct: bool) -> None:
    opened.direct = direct  # only how much is moved at a time: buffers are aligned
    opened._in_memory = False
    assert read(opened, plan) == content(plan)
    write(opened, plan, 7)
    assert read(opened, plan) == content(plan, 7)


def test_a_library_that_is_there_is_what_reads_and_writes(
    opened: Database, plan: GetPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests above would pass by Python's way alone."""
    found = native.library()

    def refused(*_: object) -> int:
        raise AssertionError

    if found is not None:
        monkeypatch.setattr(os, "preadv", refused)
        monkeypatch.setattr(os, "pwritev", refused)
        if plan.length > native.INPUT_BYTES_MIN:  # a short last slot is Python's to prove
            monkeypatch.setattr(ObjectSlots, "prove", refused)
        monkeypatch.setattr(ObjectSlots, "seal", refused)
    write(opened, plan, 7)
    if plan.length % GEOMETRY.fragment_bytes not in range(1, native.INPUT_BYTES_MIN):
        assert read(opened, plan) == content(plan, 7)


def test_a_damaged_byte_is_found_wherever_it_is(opened: Database, plan: GetPlan) -> None:
    payload = GEOMETRY.payload_bytes(plan.length, plan.fragments - 1)
    for at in {0, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + payload // 2, HEADER_BYTES + payload - 1}:

        def flip(slot: bytearray, at: int = at) -> None:
            slot[at] ^= 4

        spoil(opened, plan, flip)
        with pytest.raises(CorruptObject, match=f"fragment {plan.fragments - 1}"):
            read(opened, plan)
        spoil(opened, plan, flip)
        assert read(opened, plan) == content(plan)


def test_what_lies_behind_a_payload_is_no_matter(opened: Database, plan: GetPlan) -> None:
    def poison(slot: bytearray) -> None:
        end = HEADER_BYTES + GEOMETRY.payload_bytes(plan.length, plan.fragments - 1)
        slot[end:] = b"\xee" * (len(slot) - end)

    spoil(opened, plan, poison)
    assert read(opened, plan) == content(plan)


def test_a_file_that_was_cut_is_a_corrupt_object(opened: Database, plan: GetPlan) -> None:
    extent = plan.extents[0] if plan.fragments < 2 else plan.extents[1]
    os.truncate(opened.path, DATA_OFFSET + extent.first * GEOMETRY.slot_bytes + 100)
    with pytest.raises(CorruptObject, match="cut off"):
        read(opened, plan)


def test_a_hole_in_a_file_is_not_touched(opened: Database, plan: GetPlan) -> None:
    """Where a tmpfs is full, touching one that is mapped would end the process (SIGBUS); the kernel says ENOSPC."""
    if not opened._in_memory:
        return
    held = opened.path.stat().st_blocks
    punch(opened, 0, 12)
    holed = opened.path.stat().st_blocks
    assert holed < held
    with pytest.raises(CorruptObject):
        read(opened, plan)
    assert opened.path.stat().st_blocks == holed, "it was read by the kernel, which makes no page for that"
    write(opened, plan, 7)
    assert read(opened, plan) == content(plan, 7)


def punch(opened: Database, slot: int, count: int) -> None:
    """Give the memory of some slots back, as `fallocate --punch-hole` does."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    offset, size = DATA_OFFSET + slot * GEOMETRY.slot_bytes, count * GEOMETRY.slot_bytes
    assert fallocate(opened._fd, 3, offset, size) == 0, os.strerror(ctypes.get_errno())


def test_a_device_that_fails_is_the_mediums_error(opened: Database, plan: GetPlan) -> None:
    """The descriptor is another: of something that cannot be read at a place."""
    kept = opened._fd
    pipe = os.pipe()
    try:
        opened._fd = pipe[0]
        with pytest.raises(MediumError, match=rf"reading \d+ bytes at \d+ of .*db-0.xkv: {os.strerror(errno.ESPIPE)}"):
            read(opened, plan)
    finally:
        opened._fd = kept
        for fd in pipe:
            os.close(fd)


def test_the_systems_errors_and_short_moves_are_told_apart(
    opened: Database, plan: GetPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO is the medium's error at once; what was interrupted or moved less is moved again by Python."""
    found = native.library()
    if found is None:
        return
    answers = [0]
    monkeypatch.setattr(found, "_read", lambda *_: answers[0])
    monkeypatch.setattr(found, "_write", lambda *_: answers[0])
    for code in (errno.EINTR, 0xFFFF):
        answers[0] = -code
        write(opened, plan, code % 7)
        assert read(opened, plan) == content(plan, code % 7)
    answers[0] = -errno.EIO
    for act in (read, write):
        with pytest.raises(MediumError) as caught:
            act(opened, plan)
        assert (caught.value.errno, type(caught.value)) == (errno.EIO, MediumError)


def test_an_error_says_where_it_was(opened: Database, plan: GetPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object may lie in many databases: the last place of this one fails."""
    found = native.library()
    if found is None:
        return
    last, fills = plan.extents[-1], GEOMETRY.slot_fill_bytes(plan.length, plan.fragments - 1)
    monkeypatch.setattr(found, "_read", lambda *_: -((len(plan.extents) - 1) << 16 | errno.ENODEV))
    wanted = fills + (last.slots - 1) * GEOMETRY.slot_bytes
    with pytest.raises(MediumError, match=f"reading {wanted} bytes at {DATA_OFFSET + last.first * 8_192} of"):
        Medium([opened], GEOMETRY, CARD).read(plan, aligned_slots(plan.fragments, GEOMETRY.slot_bytes), 0)


def test_a_database_of_a_test_is_read_by_its_own_means(opened: Database, plan: GetPlan) -> None:
    """Faults that tests put under a card strike in the same places, with the library and without."""
    injector = Injector(FaultPlan((Fault(operation=Operation.READ, kind=Kind.ERROR, nth=1),)))
    fd, kind = opened._fd, faulty_database(injector)
    faulty = kind(opened.path, fd, opened.superblock, direct=opened.direct, claim_fd=fd)
    with pytest.raises(MediumError):
        read(faulty, plan)
    assert read(faulty, plan) == content(plan)


# --- headers --------------------------------------------------------------------------------------------------------

IDENTITY: Final = Identity(CARD, b"k" * 40, 7, 6 * GEOMETRY.fragment_bytes + 5_000, 3, 4)
COUNT: Final = GEOMETRY.fragments(IDENTITY.length)


def sealed(identity: Identity = IDENTITY, *, first: int = 0, count: int = COUNT) -> list[memoryview]:
    """Slots as Python seals them."""
    slots = [memoryview(bytearray(SAMPLE[n * 999 :][: GEOMETRY.slot_bytes])) for n in range(first, first + count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        return list(ObjectSlots(identity, GEOMETRY).seal(slots, first))


def verdict(slots: Sequence[memoryview], fd: int, found: native.Native | None, first: int = 0) -> list[str]:
    """What is said of an object's slots that are copied, and that are read from a file."""
    own, said = ObjectSlots(IDENTITY, GEOMETRY), []
    os.pwrite(fd, b"".join(slots), 0)
    place = native.FilePlace(fd, 0, len(slots), 5_000)
    for how in ("copied", "read"):
        into = [memoryview(bytearray(len(slot))) for slot in slots]
        proved = 0
        if found is None:
            for one, other in zip(slots, into, strict=True):
                other[:] = one
        elif how == "copied":
            proved = found.copy_proving(slots, into, own.headers(len(slots), first))
        else:
            answer = found.read([place], into, own.headers(len(slots), first))
            assert answer is not None
            proved = answer
        assert into == slots
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            try:
                if proved < len(slots):
                    own.prove(into[proved:], first + proved)
                said.append("sound")
            except CorruptObject as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.fixture(scope="module")
def memory_file() -> Iterator[int]:
    fd = os.memfd_create("test-native")
    yield fd
    os.close(fd)


def change_bytes(slot: memoryview, data: st.DataObject) -> None:
    """Some bytes anywhere in a header, or in a payload's front."""
    at = data.draw(st.integers(0, HEADER_BYTES + 100) | st.sampled_from([0, 8, 12, 24, 100, 136, 148, 1_015, 1_016]))
    slot[at] ^= data.draw(st.integers(1, 255))


def change_field(slot: memoryview, data: st.DataObject) -> None:
    """One field of a header, which is sound again."""
    header = parse_slot_header(slot)
    field = data.draw(st.sampled_from(header._fields))
    value = getattr(header, field)
    drawn: Any
    if isinstance(value, bytes):
        size = len(value) if field == "card_uuid" else data.draw(st.integers(0, 64))
        drawn = data.draw(st.binary(min_size=size, max_size=size))
    else:
        bits = 64 if field in {"generation", "length", "payload_checksum", "family"} else 32
        drawn = data.draw(st.integers(0, (1 << bits) - 1) | st.integers(max(0, value - 1), value + 1))
    pack_slot_header(slot, header._replace(**{field: drawn}))


def change_front(slot: memoryview, data: st.DataObject) -> None:
    """The magic, the version, the algorithm, the key's length, or zeros that nobody uses: the checksum is right."""
    at = data.draw(st.sampled_from([0, 7, 8, 9, 10, 11, 148, 500, 1_015]))
    slot[at] ^= data.draw(st.integers(1, 255))
    slot[HEADER_BYTES - 8 : HEADER_BYTES] = xxh3_64_intdigest(slot[: HEADER_BYTES - 8]).to_bytes(8, "little")


@given(data=st.data())
def test_both_ways_say_the_same_of_any_slots(built: Path | None, memory_file: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, COUNT - 1))
    slots = sealed(first=first, count=data.draw(st.integers(1, COUNT - first)))
    changes = data.draw(st.lists(st.sampled_from([change_field, change_bytes, change_front]), max_size=2))
    for change in sorted(changes, key=[change_field, change_bytes, change_front].index):  # only a sound one has fields
        change(slots[data.draw(st.integers(0, len(slots) - 1))], data)
    found = native.Native(built) if built is not None else None
    wanted = verdict(slots, memory_file, None, first)
    assert verdict(slots, memory_file, found, first) == wanted
    if not changes:
        assert wanted == ["sound", "sound"]


def test_each_byte_of_a_header_is_proved(built: Path | None, memory_file: int) -> None:
    if built is None:
        return
    slots, found, own = sealed(), native.Native(built), ObjectSlots(IDENTITY, GEOMETRY).headers(COUNT, 0)
    for at in range(HEADER_BYTES):
        slots[3][at] ^= 0x10
        said = verdict(slots, memory_file, found)
        assert all(one.startswith("CorruptObject: fragment 3: ") for one in said), at
        assert found.copy_proving(slots, [memoryview(bytearray(len(slot))) for slot in slots], own) == 3, at
        slots[3][at] ^= 0x10
    assert verdict(slots, memory_file, found) == ["sound", "sound"]


def test_a_short_payload_is_not_proved_by_a_header_that_says_nothing_of_it(
    built: Path | None, memory_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library makes no checksum of it, and 0 is what it has then."""
    if built is None:
        return
    monkeypatch.setattr(sys.modules[__name__], "IDENTITY", replace(IDENTITY, length=GEOMETRY.fragment_bytes + 100))
    slots, found = sealed(IDENTITY, count=2), native.Native(built)
    assert verdict(slots, memory_file, found) == ["sound", "sound"]
    pack_slot_header(slots[1], parse_slot_header(slots[1])._replace(payload_checksum=0))
    wrong = "CorruptObject: fragment 1: the payload's checksum is wrong"
    assert verdict(slots, memory_file, found) == [wrong, wrong]


def test_what_was_filed_elsewhere_since_is_proved_at_once(built: Path | None, memory_file: int) -> None:
    """That is every object which is asked for often: also where its slots say different places."""
    if built is None:
        return
    found = native.Native(built)
    slots = sealed()
    for number, slot in enumerate(slots[1:]):
        pack_slot_header(slot, parse_slot_header(slot)._replace(family=1 << 63 | number, position=number))
    own = ObjectSlots(IDENTITY, GEOMETRY).headers(COUNT, 0)
    assert found.copy_proving(slots, [memoryview(bytearray(len(slot))) for slot in slots], own) == COUNT
    assert verdict(slots, memory_file, found) == ["sound", "sound"]


@given(data=st.data())
def test_what_is_sealed_is_what_python_seals(built: Path | None, memory_file: int, data: st.DataObject) -> None:
    """In memory and in the file, whatever lies where and is moved at a time; known checksums are taken as they are."""
    if built is None:
        return
    length = data.draw(st.integers(1, IDENTITY.length) | st.sampled_from([1, 240, 241, GEOMETRY.fragment_bytes]))
    identity = replace(IDENTITY, length=length, family=data.draw(st.integers(0, (1 << 64) - 1)))
    count = GEOMETRY.fragments(length)
    first = data.draw(st.integers(0, count - 1))
    wanted = sealed(identity, first=first, count=count - first)
    skip = data.draw(st.integers(0, 9))  # not aligned
    slots = [
        memoryview(bytearray(skip) + SAMPLE[n * 999 :][: GEOMETRY.slot_bytes])[skip:][: len(view)]
        for n, view in enumerate(wanted, first)
    ]
    places, offset, left = [], data.draw(st.integers(0, 5_000)), len(slots)
    begin = offset
    while left:
        some = data.draw(st.integers(1, left))
        places.append(native.FilePlace(memory_file, offset, some, data.draw(st.integers(1_000, 40_000))))
        offset, left = offset + some * GEOMETRY.slot_bytes, left - some
    sums = [parse_slot_header(view).payload_checksum for view in wanted]
    if data.draw(st.booleans()):
        sums[0] ^= 1  # it is not made anew
        pack_slot_header(wanted[0], parse_slot_header(wanted[0])._replace(payload_checksum=sums[0]))
        known: list[int] | None = sums
    else:
        known = data.draw(st.sampled_from([None, sums]))
    found, headers = native.Native(built), ObjectSlots(identity, GEOMETRY).headers(len(slots), first)
    assert found.write(places, slots, headers, known)
    assert slots == wanted
    assert os.pread(memory_file, sum(map(len, wanted)), begin) == b"".join(wanted)
    into = [memoryview(bytearray(len(view))) for view in wanted]
    proved = found.read(places, into, headers)
    assert into == wanted
    short = wanted[-1] if 0 < (length - 1) % GEOMETRY.fragment_bytes + 1 < native.INPUT_BYTES_MIN else None
    assert proved == (
        0 if known is sums and sums[0] != xxh3_64_intdigest(payload_of(wanted[0])) else len(slots) - (short is not None)
    )


def payload_of(slot: memoryview) -> memoryview:
    return slot[HEADER_BYTES:][: parse_slot_header(slot).payload_bytes]


@pytest.fixture
def row(opened: Database) -> list[GetPlan]:
    """Four objects of one slot that lie behind one another."""
    lengths = (6_500, GEOMETRY.fragment_bytes, 2_000, 10)  # the last but one ends its row: its slot is not filled
    return [
        GetPlan(ObjectKey(CARD, 0, bytes([n]) * 32, 0), bytes([n]) * 40, 7 + n, length, n, 4, 1, (Extent(0, 2 + n, 1),))
        for n, length in enumerate(lengths)
    ]


def test_objects_in_a_row_are_written_and_read_by_each_way(
    opened: Database, row: list[GetPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    medium, numbers = Medium([opened], GEOMETRY, CARD), range(len(row))
    calls: list[int] = []
    monkeypatch.setattr(medium_module, "seal_and_write", watched(seal_and_write, calls))
    monkeypatch.setattr(medium_module, "read_proving", watched(read_proving, calls))
    slots = [bytearray_slot(number) for number in numbers]
    assert medium.write_many([(PutPlan(*plan), [slot]) for plan, slot in zip(row, slots, strict=True)]) == [None] * 4
    assert calls == [3, 1]
    into = list(aligned_slots(3, GEOMETRY.slot_bytes))
    assert medium.read_row([(plan, slot, 0) for plan, slot in zip(row, into, strict=False)]) == [None] * 3
    assert calls == [3, 1, 3]
    assert [payload_of(slot) for slot in into] == [payload_of(slot) for slot in slots[:3]]
    for plan in row:
        medium.read(plan, aligned_slots(1, GEOMETRY.slot_bytes), 0)


def watched(function: Callable[..., object], calls: list[int]) -> Callable[..., object]:
    def watch(places: object, buffers: Sequence[memoryview], *more: object) -> object:
        calls.append(len(buffers))
        return function(places, buffers, *more)

    return watch


@pytest.mark.parametrize("damaged", [(0,), (1,), (2,), (0, 2)])
def test_of_objects_in_a_row_each_is_judged_by_itself(
    opened: Database, row: list[GetPlan], damaged: tuple[int, ...]
) -> None:
    medium = Medium([opened], GEOMETRY, CARD)
    medium.write_many([(PutPlan(*plan), [bytearray_slot(number)]) for number, plan in enumerate(row)])
    for number in damaged:

        def flip(slot: bytearray) -> None:
            slot[HEADER_BYTES + 77] ^= 4

        spoil(opened, row[number], flip)
    into = list(aligned_slots(3, GEOMETRY.slot_bytes))
    errors = medium.read_row([(plan, slot, 0) for plan, slot in zip(row, into, strict=False)])
    assert [number for number, error in enumerate(errors) if isinstance(error, CorruptObject)] == list(damaged)
    assert [error for error in errors if not isinstance(error, CorruptObject)] == [None] * (3 - len(damaged))


def test_the_library_reaches_no_further_than_its_buffers(built: Path | None, memory_file: int) -> None:
    if built is None:
        return
    found, slots = native.Native(built), sealed()
    headers = ObjectSlots(IDENTITY, GEOMETRY).headers(COUNT, 0)
    place = native.FilePlace(memory_file, 0, COUNT, 5_000)
    into = [memoryview(bytearray(len(slot))) for slot in slots]
    for wrong in (
        [*slots[:-1], slots[-1][:5_000]],
        [slots[0][:8_000], *slots[1:]],
        [memoryview(bytes(8_192)), *slots[1:]],
    ):
        with pytest.raises(native.UnreachableError):
            found.write([place], wrong, headers)
        with pytest.raises(native.UnreachableError):
            found.copy_proving(slots, wrong, headers)
    for wrong_count in (COUNT - 1, COUNT + 1):
        with pytest.raises(ValueError, match="zip"):
            found.copy_proving(slots, into[:1], headers)
        with pytest.raises(AssertionError, match="beyond"):
            found.read([place._replace(slots=wrong_count)], into, headers)
        some = headers._replace(templates=headers.templates * wrong_count)
        with pytest.raises(AssertionError, match="beyond"):
            found.read([place], into, some)
        with pytest.raises(AssertionError, match="beyond"):
            found.copy_proving(slots, into, some)
        with pytest.raises(AssertionError, match="beyond"):
            found.write([place], into, headers, [1] * wrong_count)
    even = aligned_slots(COUNT, GEOMETRY.slot_bytes)
    with pytest.raises(native.UnreachableError):
        found.read([place], even.cut(4_096), headers)


# --- whether it is used ---------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the library is looked for: a folder of the test's."""
    place = tmp_path / native.LIBRARY.name
    monkeypatch.setattr(native, "LIBRARY", place)
    monkeypatch.delenv(native.ENVIRONMENT_NAME, raising=False)
    native.library.cache_clear()
    yield place
    native.library.cache_clear()


def test_it_is_used_where_it_is_and_not_where_it_is_turned_off(
    fresh: Path, built: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.path_word() == "python"
    if built is not None:
        fresh.write_bytes(built.read_bytes())
    native.library.cache_clear()
    assert native.path_word() == ("python" if built is None else "native")
    monkeypatch.setenv(native.ENVIRONMENT_NAME, "0")
    native.library.cache_clear()
    assert native.path_word() == "python"


def test_what_cannot_be_loaded_is_not_used(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh.write_bytes(b"no library")
    assert native.path_word() == "python"
    assert "is not used" in caplog.text


@pytest.mark.parametrize("kept", [0, 63, 64, 1_000, 4_096, 8_192, -2_000, -700, -1])
def test_a_library_that_was_cut_short_is_not_used(
    fresh: Path, built: Path | None, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    """To load one would be the end of this process."""
    if built is None:
        return
    fresh.write_bytes(built.read_bytes()[:kept])
    assert native.path_word() == "python"
    assert "is not used" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        (("checksum", lambda _: 1), "its checksums are wrong"),
        (("SLOT_HEADER_FORM", SLOT_HEADER_FORM[:8] + b"\x10" + SLOT_HEADER_FORM[9:]), "its headers are wrong"),
        (("SLOT_HEADER_FORM", SLOT_HEADER_FORM[:32] + b"\x10" + SLOT_HEADER_FORM[33:]), "its headers are wrong"),
        (("os", SimpleNamespace(**{**vars(os), "memfd_create": lambda *_: no_memory_file()})), "it cannot be tried"),
        (("os", SimpleNamespace(**{**vars(os), "pread": lambda *_: b""})), "its headers are wrong"),
    ],
    ids=["a checksum", "a fragment's place", "another place", "no memory files", "what is in the file"],
)
def test_a_library_that_is_wrong_is_not_used(
    fresh: Path,
    built: Path | None,
    wrong: tuple[tuple[str, object], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another compiler's mistake, or another machine's library, must not make every object a damaged one."""
    change, problem = wrong
    if built is not None:
        fresh.write_bytes(built.read_bytes())
        monkeypatch.setattr(native, *change)
    assert native.path_word() == "python"
    assert built is None or problem in caplog.text


def no_memory_file(*_: object) -> int:
    raise OSError(errno.ENOSYS, "no memory files here")


def test_a_build_without_a_compiler_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    into = tmp_path / native.LIBRARY.name
    for environment in ({"CC": "no-such-compiler"}, {"CC": "false"}, {"XKV_NATIVE": "0"}):
        done = subprocess.run(
            [sys.executable, str(BUILD), str(into)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == EXIT_NONE
        assert "Python does its work" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_a_build_of_the_same_source_is_not_repeated_and_of_another_is(tmp_path: Path, built: Path | None) -> None:
    if built is None:
        return
    into = tmp_path / native.LIBRARY.name
    into.write_bytes(built.read_bytes())
    before = into.stat().st_mtime_ns, into.stat().st_ino
    subprocess.run([sys.executable, str(BUILD), str(into)], check=True)
    assert (into.stat().st_mtime_ns, into.stat().st_ino) == before
    into.write_bytes(b"of another source")
    subprocess.run([sys.executable, str(BUILD), str(into)], check=True)
    assert into.read_bytes() == built.read_bytes(), "the same bytes, wherever and whenever"
