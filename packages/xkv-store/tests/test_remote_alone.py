"""A card that is the remote alone: rings are put from and loaded into, and a slot is safe until a call is over.

The pool is a folder, and the library that speaks to it a stand-in in a process of its own, as the real one is.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xkv_store import remote_child, remote_format, remote_link, remote_puts, remote_reads, wire
from xkv_store.attachment import Attachment
from xkv_store.card import Card, CardOptions, PutPlan
from xkv_store.card_alone import CardAlone
from xkv_store.card_options import NO_FOLDER
from xkv_store.client import Client, PutObject
from xkv_store.doctor.round_trip import gather_trip
from xkv_store.embedded import EmbeddedCard
from xkv_store.errors import CorruptObject, UserError
from xkv_store.fragment import Identity, ObjectSlots, filled
from xkv_store.gateway import Gateway, GatewayOptions
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.layout import parse_slot_header
from xkv_store.remote_address import RemoteAddress
from xkv_store.remote_format import remote_key
from xkv_store.remote_rings import LOST_MAX
from xkv_store.remote_words import Call, Codes, Lane, unpack_answer
from xkv_store.ring import RingUse
from xkv_store.testing import fake_library
from xkv_store.testing.peer import Peer
from xkv_store.tool import Tool
from xkv_store.wire import LoadStatus, Role, StoreStatus
from xkv_store.wire_remote import Seek, SeekObject, Sought, SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOT_BYTES = 65_536
GEOMETRY = Geometry(SLOT_BYTES)
LENGTH = 3 * GEOMETRY.fragment_bytes + 17
FRAGMENTS = GEOMETRY.fragments(LENGTH)
URL = "mooncake://127.0.0.1:1?host=here&memory=4MiB"
MEMORY_SLOTS = (4 << 20) // SLOT_BYTES
STAGED_SLOTS = 16
WAIT_S_MAX = 20.0


def key_of(number: int) -> bytes:
    return ObjectKey(b"n" * 16, 0, number.to_bytes(32, "little"), 0).encode()


def content_of(number: int, length: int = LENGTH) -> bytes:
    return random.Random(number).randbytes(length)


def wait_until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not check():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


@contextmanager
def asked_for(pool: Path, name: str) -> Iterator[None]:
    (pool / name).touch()
    yield
    (pool / name).unlink(missing_ok=True)


class Served:
    """A gateway whose card is the remote alone, on a thread of its own, with a rank's session and a scheduler's."""

    def __init__(self, folder: Path, *, lists_slots: int = 1024) -> None:
        self.socket = folder / "g.sock"
        card = CardOptions(
            folder=NO_FOLDER,
            databases=0,
            capacity_bytes=lists_slots * SLOT_BYTES,
            slot_bytes=SLOT_BYTES,
            grace_ms=200,
        )
        remote = RemoteAddress.parse(URL, "--remote")
        self.gateway = Gateway(GatewayOptions(socket=self.socket, card=card, remote=remote))
        opened = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(opened,))
        self.thread.start()
        assert opened.wait(WAIT_S_MAX)
        self.rank, self.scheduler = self.attach("engine")
        self._seeks = 0
        self.tool = Peer(self.socket, geometry=GEOMETRY)
        self.tool.hello(role=Role.TOOL)
        self.tool.receive(wire.Welcome)

    def attach(self, engine: str) -> tuple[Peer, Peer]:
        rank = Peer(self.socket, geometry=GEOMETRY)
        rank.attach(engine=engine, staged_slots=STAGED_SLOTS)
        scheduler = Peer(self.socket, geometry=GEOMETRY)
        scheduler.hello(engine=engine, role=Role.SCHEDULER, staged_slots=STAGED_SLOTS)
        assert scheduler.receive(wire.Welcome).has_remote
        return rank, scheduler

    def _run(self, opened: threading.Event) -> None:
        try:
            self.gateway.open()
            opened.set()
            self.gateway.run()
        finally:
            self.gateway.close()

    def status(self) -> dict[str, Any]:
        self.tool.send(wire.AskStatus(1))
        value: dict[str, Any] = json.loads(self.tool.receive(wire.Status).text)
        return value

    def counted(self, name: str) -> int:
        return int(self.status()["counters"].get(name, 0))

    def seek(self, *numbers: int, fetch: bool = True, fragments: int = FRAGMENTS) -> list[SoughtStatus]:
        self._seeks += 1
        objects = tuple(SeekObject(key_of(number), fragments) for number in numbers)
        self.scheduler.send(Seek(self._seeks, objects, fetch))
        found: dict[int, SoughtStatus] = {}
        while len(found) < len(numbers):
            answer = self.scheduler.receive(Sought)
            found.update({one.index: one.status for one in answer.objects})
        return [found[index] for index in range(len(numbers))]

    def put(self, *numbers: int) -> None:
        for number in numbers:
            assert self.rank.put(content_of(number), key_of(number)) is StoreStatus.CONFIRMED

    def pids(self) -> list[int]:
        """The processes for the remote that this gateway has."""
        children = Path(f"/proc/{os.getpid()}/task/{self.thread.native_id}/children").read_text().split()
        return [int(one) for one in children if b"remote_child" in Path(f"/proc/{one}/cmdline").read_bytes()]

    def is_direct(self) -> bool:
        """Whether the remote's process has the ring."""
        return int(self.status()["remote"]["rings"]) == 1

    def close(self) -> None:
        for peer in (self.rank, self.scheduler, self.tool):
            peer.close()
        with suppress(OSError):  # it has ended
            self.gateway.stop()
        self.thread.join(WAIT_S_MAX)
        assert not self.thread.is_alive()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "library"), *sys.path])
    return fake_library.make(tmp_path / "library")


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory, pool: Path) -> Iterator[Callable[..., Served]]:
    with ExitStack() as stack:

        def make(**options: int) -> Served:
            served = Served(tmp_path_factory.mktemp("g"), **options)
            stack.callback(served.close)
            if not (pool / "down").exists():
                wait_until(lambda: served.status()["remote"]["state"] == "up")
            return served

        yield make


def stored(pool: Path, number: int) -> Path:
    return pool / remote_key(key_of(number), GEOMETRY)


def warm(served: Served) -> None:
    """Have the ring known to the remote's process."""
    served.put(10_000)
    wait_until(served.is_direct)


def test_a_put_is_confirmed_when_the_remote_has_it_and_nothing_is_kept(
    serve: Callable[..., Served], pool: Path
) -> None:
    served = serve()
    served.put(1)
    assert stored(pool, 1).exists(), "before it was answered"
    assert served.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))
    status = served.status()
    assert status["databases"] == []
    assert status["card"] == "mooncake://127.0.0.1:1"
    stored(pool, 1).unlink()
    assert served.rank.get(LENGTH, key_of(1))[0] is LoadStatus.MISS, "it is nowhere else"
    assert served.status()["objects"] == 0, "and not listed any more"
    assert served.seek(1, fetch=False) == [SoughtStatus.ABSENT]


def test_another_machine_lists_what_it_is_told_of_and_reads_it(serve: Callable[..., Served]) -> None:
    one, other = serve(), serve()
    one.put(1, 2)
    assert other.seek(1, 3, 2, fetch=False) == [SoughtStatus.FOUND, SoughtStatus.ABSENT, SoughtStatus.FOUND]
    assert other.rank.get(LENGTH, key_of(1))[0] is LoadStatus.MISS, "asking lists nothing"
    assert other.seek(1, 2) == [SoughtStatus.FOUND] * 2
    assert other.seek(1) == [SoughtStatus.FOUND], "it is listed: nothing is asked"
    for number in (1, 2):
        assert other.rank.get(LENGTH, key_of(number)) == (LoadStatus.OK, content_of(number))
    assert other.counted("remote_fetches") == 2


def test_the_ring_is_put_from_and_loaded_into_without_a_copy(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    warm(served)

    def refused(*_: object) -> None:
        raise AssertionError("nothing is copied")

    monkeypatch.setattr(remote_puts, "copied", refused)
    monkeypatch.setattr(remote_reads.RemoteReads, "_copy", refused)
    served.put(1, 2)
    for number in (1, 2):
        assert served.rank.get(LENGTH, key_of(number)) == (LoadStatus.OK, content_of(number))


def test_a_part_of_an_object_and_slots_apart_go_by_the_transfer_memory(serve: Callable[..., Served]) -> None:
    served = serve()
    warm(served)
    rank, first = served.rank, served.rank.welcome.store_region.first
    slots = (first + 7, first + 2, first + 30, first + 3)
    for fragment, slot in enumerate(slots):
        rank.fill(slot, content_of(1), fragment)
    rank.send(wire.Put(77, (wire.PutObject(key_of(1), LENGTH, slots, 1, 1, False),)))
    assert rank.receive(wire.Stored).objects[0].status is StoreStatus.CONFIRMED
    assert rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))
    begin = rank.welcome.load_region.first
    rank.send(wire.Get(78, (wire.GetObject(key_of(1), (begin + 9, begin + 1), 1),)))
    assert rank.receive(wire.Loaded).objects[0].status is LoadStatus.OK
    header, size = SLOT_BYTES - GEOMETRY.fragment_bytes, GEOMETRY.fragment_bytes
    assert rank.ring is not None
    for fragment, slot in ((1, begin + 9), (2, begin + 1)):
        assert rank.ring.slot(slot)[header:] == content_of(1)[fragment * size : (fragment + 1) * size]
    assert served.status()["remote"]["memory_slots_free"] == MEMORY_SLOTS


def test_what_is_not_the_object_is_a_miss_and_the_remote_forgets_it(serve: Callable[..., Served], pool: Path) -> None:
    served = serve()
    warm(served)
    served.put(1, 2, 3)
    flipped = bytearray(stored(pool, 1).read_bytes())
    flipped[2 * SLOT_BYTES + 5_000] ^= 1
    stored(pool, 1).write_bytes(flipped)
    stored(pool, 2).write_bytes(stored(pool, 3).read_bytes())
    for number in (1, 2):
        assert served.rank.get(LENGTH, key_of(number))[0] is LoadStatus.CORRUPT
    wait_until(lambda: not stored(pool, 1).exists() and not stored(pool, 2).exists())
    assert served.rank.get(LENGTH, key_of(1))[0] is LoadStatus.MISS
    assert served.rank.get(LENGTH, key_of(3)) == (LoadStatus.OK, content_of(3))
    assert served.counted("remote_fetches_corrupt") == 2


def test_an_engine_that_writes_into_slots_that_are_read_into_costs_nobody_the_object(
    serve: Callable[..., Served], pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong in an engine's memory is looked at in the gateway's own before the remote is told to forget it."""
    served = serve()
    warm(served)
    served.put(1)
    prove = remote_format.prove_received
    seen: list[int] = []

    def spoilt(slots: Any, header: Any, geometry: Any) -> list[int]:
        if not seen:
            slots[1][5_000] ^= 1
        seen.append(len(slots))
        return prove(slots, header, geometry)

    monkeypatch.setattr(remote_reads, "prove_received", spoilt)
    assert served.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))
    assert seen == [FRAGMENTS] * 2
    assert stored(pool, 1).exists()
    assert served.counted("remote_fetches_corrupt") == 0


def test_an_object_of_another_size_is_listed_as_it_is(serve: Callable[..., Served]) -> None:
    """A chunk whose last block alone was stored is shorter than whoever seeks it can know."""
    one, other = serve(), serve()
    short = content_of(1, LENGTH - 2 * GEOMETRY.fragment_bytes)
    assert one.rank.put(short, key_of(1)) is StoreStatus.CONFIRMED
    assert other.seek(1) == [SoughtStatus.FOUND]
    assert other.rank.get(LENGTH, key_of(1))[0] is LoadStatus.MISS, "it is not what was listed"
    wait_until(lambda: other.rank.get(len(short), key_of(1)) == (LoadStatus.OK, short))


def test_what_replaces_an_object_is_what_the_remote_has_then(serve: Callable[..., Served]) -> None:
    """The library lets what is there stay, and says that all is well: a put of another object was confirmed by that."""
    one, other = serve(), serve()
    short = content_of(1, LENGTH - 2 * GEOMETRY.fragment_bytes)
    assert one.rank.put(short, key_of(1)) is StoreStatus.CONFIRMED
    assert other.seek(1) == [SoughtStatus.FOUND]
    assert other.rank.get(LENGTH, key_of(1))[0] is LoadStatus.MISS
    assert other.rank.put(content_of(1), key_of(1), replace=True) is StoreStatus.CONFIRMED
    assert other.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))


def test_what_cannot_be_removed_is_not_replaced(serve: Callable[..., Served], pool: Path) -> None:
    """The library refuses to remove what somebody reads just now."""
    served = serve()
    served.put(1)
    with asked_for(pool, "in-use"):
        assert served.rank.put(content_of(2), key_of(1), replace=True) is StoreStatus.FAILED
    assert served.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))
    assert served.rank.put(content_of(2), key_of(1), replace=True) is StoreStatus.CONFIRMED
    assert served.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(2))


def test_each_rank_hears_how_long_what_it_shares_is(serve: Callable[..., Served]) -> None:
    """What was sought is listed as whole fragments; whoever finds it in the ring hears what it was proved to be."""
    one, other = serve(), serve()
    one.put(1)
    assert other.seek(1) == [SoughtStatus.FOUND]
    ranks = [Peer(other.socket, geometry=GEOMETRY) for _ in range(2)]
    for number, rank in enumerate(ranks):
        rank.attach(engine="two", rank=number, world_size=2, staged_slots=STAGED_SLOTS, ring_use=RingUse.LEASED)
    for rank in ranks:
        rank.send(wire.Lease(7, (wire.LeaseObject(key_of(1), 0, FRAGMENTS),)))
        (answer,) = rank.receive(wire.Leased).objects
        assert (answer.status, answer.length) == (LoadStatus.OK, LENGTH)
    assert other.counted("leases_found") == 1
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.STORE])
def test_slots_of_a_call_that_hangs_are_its_own_until_its_process_is_dead(
    serve: Callable[..., Served], pool: Path, monkeypatch: pytest.MonkeyPatch, lane: Lane
) -> None:
    monkeypatch.setitem(remote_link.CALL_NS_MAX, lane, 400_000_000)
    served = serve()
    warm(served)
    served.put(1)
    (pid,) = served.pids()
    with asked_for(pool, f"hang-{lane.value}"):
        begun = time.monotonic()
        if lane is Lane.LOAD:
            assert served.rank.get(LENGTH, key_of(1))[0] is LoadStatus.BUSY
        else:
            assert served.rank.put(content_of(2), key_of(2)) is StoreStatus.FAILED
        assert 0.3 < time.monotonic() - begun < 5.0
        assert pid not in served.pids(), "whoever could still touch them is dead"
    assert served.counted(f"remote_late_{lane.value}") == 1
    wait_until(lambda: served.status()["remote"]["state"] == "up")
    assert served.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1)), "it was never doubted"
    served.put(3)
    wait_until(served.is_direct)


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.STORE])
def test_a_process_that_is_killed_in_a_call_fails_it_and_the_next_knows_the_rings(
    serve: Callable[..., Served], pool: Path, lane: Lane
) -> None:
    served = serve()
    warm(served)
    served.put(1)
    (pid,) = served.pids()
    with asked_for(pool, f"hang-{lane.value}"):
        if lane is Lane.LOAD:
            served.rank.begin_get(LENGTH, key_of(1))
        else:
            served.rank.begin_put(content_of(2), key_of(2))
        wait_until(lambda: served.status()["remote"]["fetching" if lane is Lane.LOAD else "storing"] == 1)
        time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        if lane is Lane.LOAD:
            assert served.rank.receive(wire.Loaded).objects[0].status is LoadStatus.BUSY
        else:
            assert served.rank.receive(wire.Stored).objects[0].status is StoreStatus.FAILED
        assert served.rank.put(content_of(3), key_of(3)) is StoreStatus.SHED, "nothing waits for a remote that is away"
    wait_until(lambda: served.status()["remote"]["state"] == "up")
    served.put(4)
    wait_until(served.is_direct)
    assert served.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))


def test_a_late_write_into_slots_of_an_answer_is_found(serve: Callable[..., Served]) -> None:
    """The seal is made of the sums that were proved: bytes that change after the proof do not pass for the object's."""
    served = serve()
    warm(served)
    served.put(1)
    seal = served.gateway._card.seal  # type: ignore[union-attr]

    def late(plan: Any, slots: Any, sums: Any = None) -> None:
        slots[1][5_000] ^= 1
        seal(plan, slots, sums)

    served.gateway._card.seal = late  # type: ignore[union-attr]
    status, content = served.rank.get(LENGTH, key_of(1))
    assert status is LoadStatus.OK
    assert content != content_of(1)
    assert served.rank.ring is not None
    with pytest.raises(CorruptObject, match="checksum"):
        _prove(served, key_of(1))


def _prove(served: Served, key: bytes) -> None:
    ring, begin = served.rank.ring, served.rank.welcome.load_region.first
    assert ring is not None
    slots = [ring.slot(begin + number) for number in range(FRAGMENTS)]
    header = parse_slot_header(slots[0])
    own = Identity(header.card_uuid, key, header.generation, header.length, header.family, header.position)
    ObjectSlots(own, GEOMETRY).prove(filled(slots, LENGTH, GEOMETRY, 0), 0)


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.STORE])
def test_an_engine_that_dies_in_a_call_ends_with_it_and_its_ring_is_forgotten(
    serve: Callable[..., Served], pool: Path, monkeypatch: pytest.MonkeyPatch, lane: Lane
) -> None:
    monkeypatch.setitem(remote_link.CALL_NS_MAX, lane, 1_000_000_000)
    served = serve()
    warm(served)
    served.put(1)
    rank, scheduler = served.attach("other")
    assert rank.put(content_of(5), key_of(5)) is StoreStatus.CONFIRMED
    with asked_for(pool, f"hang-{lane.value}"):
        if lane is Lane.LOAD:
            rank.begin_get(LENGTH, key_of(1))
        else:
            rank.begin_put(content_of(2), key_of(2))
        wait_until(lambda: served.status()["remote"]["fetching" if lane is Lane.LOAD else "storing"] == 1)
        scheduler.close()
        rank.close()
        time.sleep(0.3)
        assert served.status()["engines"] == 2, "its slots may still be touched"
        wait_until(lambda: served.status()["engines"] == 1)
    wait_until(served.is_direct)
    assert served.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))


def test_the_process_lets_a_ring_go_when_its_engine_has_ended(serve: Callable[..., Served]) -> None:
    served = serve()
    warm(served)
    (pid,) = served.pids()

    def rings() -> int:
        return Path(f"/proc/{pid}/maps").read_text().count("/memfd:xkv-ring")

    mapped = rings()
    rank, scheduler = served.attach("other")
    assert rank.put(content_of(5), key_of(5)) is StoreStatus.CONFIRMED
    wait_until(lambda: rings() == 2 * mapped)
    scheduler.close()
    rank.close()
    wait_until(lambda: rings() == mapped)
    served.put(1)


def test_a_get_that_is_given_up_before_its_call_touches_nothing(serve: Callable[..., Served], pool: Path) -> None:
    served = serve()
    warm(served)
    served.put(1, 2, 3, 4)
    with asked_for(pool, "hang-load"):
        numbers = []
        for one in (1, 2, 3, 4):  # a call for each of the first two; the others wait for a third
            numbers.append(served.rank.begin_get(LENGTH, key_of(one), first_slot=4 * one))
            wait_until(lambda: served.status()["remote"]["fetching"] == len(numbers))
        served.rank.send(wire.Cancel(numbers[3]))
        answer = served.rank.receive(wire.Loaded)
        assert (answer.get, answer.objects[0].status) == (numbers[3], LoadStatus.CANCELLED)
        assert served.rank.content(LENGTH, first_slot=16) == b"\xdb" * LENGTH
    left = set(numbers[:3])
    while left:
        answer = served.rank.receive(wire.Loaded)
        left.discard(answer.get)
        assert answer.objects[0].status is LoadStatus.OK
    assert served.rank.content(LENGTH, first_slot=16) == b"\xdb" * LENGTH


def test_what_is_asked_for_together_comes_in_one_call(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the loop begins in one round: a call for each round's share would cost as much as a few objects."""
    served = serve()
    warm(served)
    length, numbers = GEOMETRY.fragment_bytes, range(1, 21)
    for number in numbers:
        assert served.rank.put(content_of(number, length), key_of(number)) is StoreStatus.CONFIRMED
    calls: list[int] = []
    call = remote_link.Process.call

    def counted(link: Any, lane: Lane, keys: Any, *rest: Any, **more: Any) -> None:
        if lane is Lane.LOAD:
            calls.append(len(keys))
        call(link, lane, keys, *rest, **more)

    monkeypatch.setattr(remote_link.Process, "call", counted)
    monkeypatch.setattr(remote_reads, "GATHER_NS_MAX", int(WAIT_S_MAX * 1e9))  # however slow this machine is
    begin = served.rank.welcome.load_region.first
    items = tuple(wire.GetObject(key_of(number), (begin + number,), 0) for number in numbers)
    served.rank.send(wire.Get(500, items))
    left = len(numbers)
    while left:
        left -= len(served.rank.receive(wire.Loaded).objects)
    assert calls == [len(numbers)]


def test_without_a_master_everything_is_a_miss_at_once(serve: Callable[..., Served], pool: Path) -> None:
    (pool / "down").touch()
    served = serve()
    assert served.rank.put(content_of(1), key_of(1)) is StoreStatus.SHED
    assert served.seek(1, fetch=False) == [SoughtStatus.FAILED]
    assert served.rank.get(LENGTH, key_of(1))[0] is LoadStatus.MISS
    (pool / "down").unlink()
    wait_until(lambda: served.status()["remote"]["state"] == "up")
    served.put(1)
    assert served.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))


def test_a_full_pool_fails_the_put_and_the_next_goes(serve: Callable[..., Served], pool: Path) -> None:
    served = serve()
    with asked_for(pool, "full"):
        assert served.rank.put(content_of(1), key_of(1)) is StoreStatus.FAILED
    served.put(1)
    assert served.status()["slots"]["in_flight"] == 0


def test_what_the_list_has_no_room_for_is_found_again(serve: Callable[..., Served]) -> None:
    served = serve(lists_slots=64)
    for number in range(40):
        while served.rank.put(content_of(number), key_of(number)) is not StoreStatus.CONFIRMED:
            time.sleep(0.02)
    left = [number for number in range(40) if served.rank.get(LENGTH, key_of(number))[0] is LoadStatus.MISS]
    assert left
    for number in left:
        wait_until(lambda number=number: served.seek(number) == [SoughtStatus.FOUND])  # type: ignore[misc]
        assert served.rank.get(LENGTH, key_of(number)) == (LoadStatus.OK, content_of(number))


def test_an_engine_that_does_not_verify_its_hits_is_told_to(serve: Callable[..., Served]) -> None:
    served = serve()
    other = Peer(served.socket, geometry=GEOMETRY)
    other.hello(engine="other")
    assert "xkv.verify_hits" in other.receive(wire.Refused).reason
    other.close()


def test_an_embedded_card_may_be_the_remote_alone(tmp_path: Path, pool: Path) -> None:
    embedded = EmbeddedCard(
        folder=tmp_path / "card", databases=0, linger_s=0.5, slot_bytes=SLOT_BYTES, remote=URL, grace_ms=100
    )
    socket = tmp_path / "s" / "card.sock"
    attachment = Attachment(
        socket=socket,
        engine_id="e",
        role=Role.RANK,
        rank=0,
        world_size=1,
        ring_bytes=16 * SLOT_BYTES,
        load_reserve_bytes=4 * SLOT_BYTES,
        staged_bytes=4 * SLOT_BYTES,
        fragment_bytes=GEOMETRY.fragment_bytes,
        connect_timeout_ms=20_000,
        heartbeat_timeout_ms=3_000,
        embedded=embedded,
    )
    with closing(Client.attach(attachment)) as client:
        with closing(Tool(socket)) as tool:
            wait_until(lambda: json.loads(tool.status())["remote"]["state"] == "up")
        answers: list[Any] = []
        slots = client.store_region.take(FRAGMENTS)
        assert slots is not None
        client.put([PutObject(ObjectKey.decode(key_of(1)), LENGTH, slots, 1, 1, replace=False)], answers.append)
        wait_until(lambda: answers)
        assert answers[0].status == StoreStatus.CONFIRMED
        assert stored(pool, 1).exists()
        trip = gather_trip(socket, slot_bytes=SLOT_BYTES)
        assert (trip.error, trip.stored, trip.loaded, trip.equal) == ("", StoreStatus.CONFIRMED, LoadStatus.OK, True)
    wait_until(lambda: not socket.exists())
    assert {path.name for path in (tmp_path / "card").iterdir()} == {"gateway.log", "lock", "starter.lock"}


def test_generations_go_on_in_the_next_life() -> None:
    """An engine lives on, and believes nothing of a chunk up to the generation that was denied it."""
    generations = []
    for _ in range(2):
        card = CardAlone.open(CardOptions(folder=NO_FOLDER, databases=0, slot_bytes=SLOT_BYTES))
        first = card.begin_put(ObjectKey.decode(key_of(1)), LENGTH, 1, 1, False, time.monotonic_ns())
        assert isinstance(first, PutPlan)
        generations.append(first.generation)
        card.finish_put(first, None)
        card.close()
    assert generations[0] < generations[1]


def test_a_ring_whose_descriptor_was_lost_on_its_way_is_not_there(pool: Path) -> None:
    """Where the process has no descriptor left, the kernel drops it. That is no word that the ring can be reached."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        lanes = remote_child._Lanes(fake_library.FakePool(str(pool)), theirs, None)
        lanes.take(Call(1, Lane.MAP, ("ring",), offsets=(1,), sizes=(SLOT_BYTES,)))
        answer = unpack_answer(ours.recv(1024))
        assert isinstance(answer, Codes)
        assert answer.codes != (0,)
        lanes.take(Call(2, Lane.MAP, ("ring",), offsets=(1,), sizes=(0,), remove=True))
        assert unpack_answer(ours.recv(1024)) == Codes(2, (0,))


def test_a_ring_whose_mapping_ends_each_process_is_given_up(
    serve: Callable[..., Served], pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pinning it takes longer than its bound, the process would be killed for it in each of its lives."""
    monkeypatch.setitem(remote_link.CALL_NS_MAX, Lane.MAP, 200_000_000)
    monkeypatch.setattr(remote_link, "RESTART_NS_MAX", 200_000_000)
    (pool / "slow-rings").touch()
    served = serve()
    wait_until(lambda: served.counted("remote_late_map") == LOST_MAX)
    wait_until(lambda: served.status()["remote"]["state"] == "up")
    time.sleep(0.6)
    assert served.counted("remote_late_map") == LOST_MAX
    served.put(1)
    assert served.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))
    assert not served.is_direct()


def test_a_folder_with_a_card_is_not_taken_for_none(tmp_path: Path) -> None:
    Card.open(CardOptions(folder=tmp_path / "card", capacity_bytes=4 << 20)).close()
    with pytest.raises(UserError, match="databases of its own"):
        CardAlone.open(CardOptions(folder=tmp_path / "card", databases=0))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--remote", URL], "--card is missing"),
        (["--databases", "0"], "give its address"),
        (["--databases", "0", "--remote", URL, "--card", "x"], "--card names a folder"),
        (["--databases", "0", "--remote", URL, "--capacity", "1KiB"], "how much of the remote"),
    ],
)
def test_what_the_command_takes(
    xkv: Callable[..., tuple[int, list[dict[str, Any]]]], tmp_path: Path, words: list[str], said: str
) -> None:
    code, lines = xkv("gateway", "run", "--socket-dir", tmp_path / "s", *words)
    assert code
    assert said in lines[-1]["error"]


def test_a_card_of_nothing_is_none(tmp_path: Path) -> None:
    card = CardOptions(folder=NO_FOLDER, databases=0)
    gateway = Gateway(GatewayOptions(socket=tmp_path / "g.sock", card=card))
    with pytest.raises(UserError, match="give its address"):
        gateway.open()
    gateway.close()


def test_the_gateway_ends_while_calls_hang(serve: Callable[..., Served], pool: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(remote_link.CALL_NS_MAX, Lane.STORE, 500_000_000)
    served = serve()
    with asked_for(pool, "hang-store"), suppress(TimeoutError):
        served.rank.begin_put(content_of(1), key_of(1))
        wait_until(lambda: served.status()["remote"]["storing"] == 1)
        served.gateway.stop()
        assert served.rank.receive(wire.Stored).objects[0].status is StoreStatus.FAILED
