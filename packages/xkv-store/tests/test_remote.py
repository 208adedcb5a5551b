"""Gateways with one remote: what one has confirmed the other fetches, proved, and whatever fails is a miss in time.

The pool is a folder, and the library that speaks to it a stand-in in a process of its own, as the real one is.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xkv_store import remote_link, remote_stores, wire
from xkv_store.attachment import Attachment
from xkv_store.card import Card, CardOptions
from xkv_store.client import Client
from xkv_store.embedded import EmbeddedCard
from xkv_store.errors import UserError
from xkv_store.gateway import Gateway, GatewayOptions
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.medium import Medium
from xkv_store.remote_address import RemoteAddress
from xkv_store.remote_format import remote_key
from xkv_store.remote_words import Lane
from xkv_store.testing import fake_library
from xkv_store.testing.peer import Peer
from xkv_store.tool import Tool
from xkv_store.wire import LoadStatus, Role, StoreStatus
from xkv_store.wire_remote import Seek, SeekObject, Sought, SoughtObject, SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOT_BYTES = 65_536
GEOMETRY = Geometry(SLOT_BYTES)
LENGTH = 3 * GEOMETRY.fragment_bytes + 17
FRAGMENTS = GEOMETRY.fragments(LENGTH)
URL = "mooncake://127.0.0.1:1?host=here&memory=4MiB"
WAIT_S_MAX = 20.0


def key_of(number: int) -> bytes:
    return ObjectKey(b"n" * 16, 0, number.to_bytes(32, "little"), 0).encode()


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(LENGTH)


class Served:
    """A gateway on a thread of its own, with a rank's session and a scheduler's."""

    def __init__(self, folder: Path, url: str | None) -> None:
        self.gateway = Gateway(
            GatewayOptions(
                socket=folder / "g.sock",
                card=CardOptions(folder=folder / "card", capacity_bytes=16 << 20, slot_bytes=SLOT_BYTES, grace_ms=200),
                remote=None if url is None else RemoteAddress.parse(url, "--remote"),
            )
        )
        self.socket = folder / "g.sock"
        opened = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(opened,))
        self.thread.start()
        assert opened.wait(WAIT_S_MAX)
        self.rank = Peer(folder / "g.sock", geometry=GEOMETRY)
        self.welcome = self.rank.attach()
        self.scheduler = Peer(folder / "g.sock", geometry=GEOMETRY)
        self.scheduler.hello(role=Role.SCHEDULER)
        assert self.scheduler.receive(wire.Welcome).has_remote is (url is not None)
        self._seeks = 0

    def _run(self, opened: threading.Event) -> None:
        try:
            self.gateway.open()
            opened.set()
            self.gateway.run()
        finally:
            self.gateway.close()

    def status(self) -> dict[str, Any]:
        self.rank.send(wire.AskStatus(1))
        value: dict[str, Any] = json.loads(self.rank.receive(wire.Status).text)
        return value

    def counted(self, name: str) -> int:
        return int(self.status()["counters"].get(name, 0))

    def seek(self, *numbers: int, fetch: bool, fragments: int = FRAGMENTS) -> list[SoughtStatus]:
        self._seeks += 1
        objects = tuple(SeekObject(key_of(number), fragments) for number in numbers)
        self.scheduler.send(Seek(self._seeks, objects, fetch))
        found: dict[int, SoughtStatus] = {}
        while len(found) < len(numbers):
            answer = self.scheduler.receive(Sought)
            assert answer.seek == self._seeks
            found.update({one.index: one.status for one in answer.objects})
        return [found[index] for index in range(len(numbers))]

    def put(self, *numbers: int) -> None:
        for number in numbers:
            assert self.rank.put(content_of(number), key_of(number)) is StoreStatus.CONFIRMED

    def close(self) -> None:
        self.rank.close()
        self.scheduler.close()
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

        def make(url: str | None = URL) -> Served:
            served = Served(tmp_path_factory.mktemp("g"), url)
            stack.callback(served.close)
            if url is not None and not (pool / "down").exists():
                wait_until(lambda: served.status()["remote"]["state"] == "up")
            return served

        yield make


def wait_until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not check():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


@contextmanager
def asked_for(pool: Path, name: str) -> Iterator[None]:
    (pool / name).touch()
    yield
    (pool / name).unlink()


def stored(pool: Path, number: int) -> Path:
    return pool / remote_key(key_of(number), GEOMETRY)


def test_what_one_has_confirmed_the_other_fetches_and_serves(serve: Callable[..., Served], pool: Path) -> None:
    one, other = serve(), serve()
    one.put(1, 2)
    wait_until(stored(pool, 1).exists)
    wait_until(lambda: one.counted("remote_stores") == 2)
    assert other.seek(1, 2, 3, fetch=False) == [SoughtStatus.FOUND, SoughtStatus.FOUND, SoughtStatus.ABSENT]
    assert other.rank.get(LENGTH, key_of(1))[0] is LoadStatus.MISS, "asking brings nothing"
    assert other.seek(1, 3, 2, fetch=True) == [SoughtStatus.FOUND, SoughtStatus.ABSENT, SoughtStatus.FOUND]
    for number in (1, 2):
        assert other.rank.get(LENGTH, key_of(number)) == (LoadStatus.OK, content_of(number))
    assert other.seek(1, fetch=True) == [SoughtStatus.FOUND], "the card has it: nothing is asked"
    assert other.counted("remote_fetches") == 2
    time.sleep(0.2)
    assert other.counted("remote_stores") == 0, "what came from there does not go there again"


def test_neither_way_needs_a_read_from_the_medium(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was just written goes from memory, and what has just come is loaded from there."""
    one, other = serve(), serve()

    def refused(*_: object) -> None:
        raise AssertionError("nobody reads the medium")

    monkeypatch.setattr(Medium, "read", refused)
    one.put(*range(1, 6))
    wait_until(lambda: one.counted("remote_stores") == 5)
    assert other.seek(*range(1, 6), fetch=True) == [SoughtStatus.FOUND] * 5
    for number in range(1, 6):
        assert other.rank.get(LENGTH, key_of(number)) == (LoadStatus.OK, content_of(number))
    assert other.counted("remote_nearby_reads") == 5
    assert other.status()["remote"]["memory_slots_free"] == (4 << 20) // SLOT_BYTES


def test_what_changes_in_memory_is_loaded_from_the_card(serve: Callable[..., Served]) -> None:
    """The library's process can write there, and so could a late write of its: nobody gets such bytes."""
    one, other = serve(), serve()
    one.put(1)
    wait_until(lambda: one.counted("remote_stores") == 1)
    assert other.seek(1, fetch=True) == [SoughtStatus.FOUND]
    assert other.gateway._loop is not None
    assert other.gateway._loop._remote is not None
    memory = other.gateway._loop._remote._parts.memory
    (kept,) = memory._kept.values()
    memory.views(kept.place, 2)[1][5_000] ^= 1
    for _ in range(2):
        assert other.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))
    assert other.counted("remote_nearby_reads") == 0
    assert not memory._kept


def test_more_than_the_memory_holds_goes_and_comes_by_way_of_the_medium(serve: Callable[..., Served]) -> None:
    one, other = serve(), serve()  # of 64 slots stores may have 32: eight objects
    numbers = range(1, 31)
    one.put(*numbers)
    wait_until(lambda: one.counted("remote_stores") == len(numbers))
    assert other.seek(*numbers, fetch=True) == [SoughtStatus.FOUND] * len(numbers)
    for number in numbers:
        assert other.rank.get(LENGTH, key_of(number)) == (LoadStatus.OK, content_of(number))
    assert 0 < other.counted("remote_nearby_reads") < len(numbers)


def test_what_leaves_the_card_before_its_turn_goes_from_its_copy(serve: Callable[..., Served], pool: Path) -> None:
    served = serve()
    with asked_for(pool, "hang-look"):
        served.put(1)
        with closing(Tool(served.socket)) as tool:
            assert tool.purge(list(tool.objects(b""))).objects == 1
    wait_until(lambda: served.counted("remote_stores") == 1)
    assert served.seek(1, fetch=True) == [SoughtStatus.FOUND]
    assert served.rank.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))


def test_a_card_in_memory_is_enough_for_a_machine_without_a_disk(serve: Callable[..., Served], tmp_path: Path) -> None:
    """It holds what is in use; what has left it comes back from the pool."""
    in_memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        served = Served(Path(folder), URL)
        try:
            wait_until(lambda: served.status()["remote"]["state"] == "up")
            numbers = range(1, 101)  # of four slots each; the card has 240
            for number in numbers:
                while served.rank.put(content_of(number), key_of(number)) is not StoreStatus.CONFIRMED:
                    time.sleep(0.05)  # it makes room
                wait_until(lambda number=number: served.counted("remote_stores") == number)  # type: ignore[misc]
            left = [number for number in numbers if served.rank.get(LENGTH, key_of(number))[0] is LoadStatus.MISS]
            assert len(left) > len(numbers) // 3
            for number in left:
                assert served.seek(number, fetch=True) == [SoughtStatus.FOUND]
                assert served.rank.get(LENGTH, key_of(number)) == (LoadStatus.OK, content_of(number))
        finally:
            served.close()


def test_what_the_remote_has_already_is_not_sent_again(serve: Callable[..., Served], pool: Path) -> None:
    one, other = serve(), serve()
    one.put(1)
    wait_until(lambda: one.counted("remote_stores") == 1)
    other.put(1)
    wait_until(lambda: other.counted("remote_stores_held") == 1)
    assert other.counted("remote_stores") == 0
    assert len(list(pool.glob("xkv1-*"))) == 1


def test_bytes_that_are_not_the_object_are_a_miss_and_forgotten(serve: Callable[..., Served], pool: Path) -> None:
    one, other = serve(), serve()
    one.put(1, 2, 3)
    wait_until(lambda: one.counted("remote_stores") == 3)
    flipped = bytearray(stored(pool, 1).read_bytes())
    flipped[2 * SLOT_BYTES + 5_000] ^= 1
    stored(pool, 1).write_bytes(flipped)
    stored(pool, 2).write_bytes(stored(pool, 3).read_bytes())
    assert other.seek(1, 2, 3, fetch=True) == [SoughtStatus.ABSENT, SoughtStatus.ABSENT, SoughtStatus.FOUND]
    assert other.counted("remote_fetches_corrupt") == 2
    assert [other.rank.get(LENGTH, key_of(number))[0] for number in (1, 2)] == [LoadStatus.MISS] * 2
    wait_until(lambda: not stored(pool, 1).exists() and not stored(pool, 2).exists())
    assert other.status()["slots"]["in_flight"] == 0


def test_an_object_larger_than_was_said_does_not_come(serve: Callable[..., Served]) -> None:
    one, other = serve(), serve()
    one.put(1)
    wait_until(lambda: one.counted("remote_stores") == 1)
    assert other.seek(1, fetch=True, fragments=FRAGMENTS - 1) == [SoughtStatus.FAILED]
    assert other.seek(1, fetch=True, fragments=1 << 20) == [SoughtStatus.FAILED], "no memory is that large"
    assert other.seek(1, fetch=True) == [SoughtStatus.FOUND]


@pytest.mark.parametrize(("lane", "fetch"), [(Lane.LOOK, False), (Lane.LOAD, True)])
def test_a_call_that_hangs_fails_in_time_and_the_next_process_works(
    serve: Callable[..., Served], pool: Path, monkeypatch: pytest.MonkeyPatch, lane: Lane, fetch: bool
) -> None:
    """The library cannot be called off: the process is ended, and with it whatever could still write into memory."""
    monkeypatch.setitem(remote_link.CALL_NS_MAX, lane, 300_000_000)
    one, other = serve(), serve()
    one.put(1)
    wait_until(lambda: one.counted("remote_stores") == 1)
    with asked_for(pool, f"hang-{lane.value}"):
        begun = time.monotonic()
        assert other.seek(1, fetch=fetch) == [SoughtStatus.FAILED]
        assert time.monotonic() - begun < 5.0
        assert other.seek(1, fetch=fetch) == [SoughtStatus.FAILED], "while there is none, or that one hangs, too"
        other.put(2)
        assert other.rank.get(LENGTH, key_of(2))[0] is LoadStatus.OK, "the card goes on"
    assert other.counted(f"remote_late_{lane.value}") >= 1
    wait_until(lambda: other.status()["remote"]["state"] == "up")
    wait_until(lambda: other.seek(1, fetch=True) == [SoughtStatus.FOUND])
    wait_until(lambda: other.status()["remote"]["memory_slots_free"] == (4 << 20) // SLOT_BYTES)


def test_without_a_master_the_card_serves_and_it_is_found_when_it_comes(
    serve: Callable[..., Served], pool: Path
) -> None:
    (pool / "down").touch()
    served = serve()
    served.put(1)
    assert served.seek(1, 2, fetch=False) == [SoughtStatus.FAILED] * 2
    assert served.seek(2, fetch=True) == [SoughtStatus.FAILED]
    wait_until(lambda: "code -900" in served.status()["remote"]["reason"])
    (pool / "down").unlink()
    wait_until(lambda: served.counted("remote_stores") == 1)
    assert served.seek(1, fetch=False) == [SoughtStatus.FOUND]


def test_a_killed_process_is_another_one_soon(serve: Callable[..., Served], pool: Path) -> None:
    served = serve(URL + "&segment=1MiB")
    wait_until(lambda: served.status()["remote"]["segment_state"] == "up")
    assert sorted(line.split()[0] for line in (pool / "setups").read_text().splitlines()) == ["0", str(1 << 20)]
    children = Path(f"/proc/{os.getpid()}/task/{served.thread.native_id}/children").read_text().split()
    ours = [child for child in children if b"remote_child" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(ours) == 2
    for child in ours:
        os.kill(int(child), signal.SIGKILL)
    wait_until(lambda: served.counted("remote_ends") == 1)
    wait_until(lambda: served.status()["remote"]["state"] == "up")
    wait_until(lambda: served.status()["remote"]["segment_state"] == "up")
    served.put(1)
    wait_until(lambda: served.counted("remote_stores") == 1)


def test_a_gateway_without_a_remote_knows_nothing_of_one(serve: Callable[..., Served]) -> None:
    served = serve(None)
    assert served.seek(1, fetch=False) == [SoughtStatus.FAILED]
    assert "remote" not in served.status()
    assert not [name for name in served.status()["counters"] if name.startswith("remote")]


def test_a_rank_may_not_seek(serve: Callable[..., Served]) -> None:
    served = serve(None)
    served.rank.send(Seek(1, (SeekObject(key_of(1), 1),), True))
    assert served.rank.receive(wire.Refused).code is wire.RefusedCode.PROTOCOL


def test_without_the_library_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_link, "LIBRARY", "no_such_library_for_a_remote")
    options = GatewayOptions(
        socket=tmp_path / "g.sock",
        card=CardOptions(folder=tmp_path / "card", capacity_bytes=16 << 20),
        remote=RemoteAddress.parse(URL, "--remote"),
    )
    gateway = Gateway(options)
    with pytest.raises(UserError, match=r"xkv-store\[mooncake\]") as error:
        gateway.open()
    assert "\n" not in str(error.value)
    gateway.close()


def test_an_embedded_card_has_one_too(tmp_path: Path, pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.is_dir()
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    monkeypatch.setenv("VLLM_OTHER", "1")
    embedded = EmbeddedCard(
        folder=tmp_path / "card", capacity_bytes=16 << 20, linger_s=1.0, slot_bytes=SLOT_BYTES, remote=URL
    )
    socket = tmp_path / "s" / "card.sock"
    attachment = Attachment(
        socket=socket,
        engine_id="e",
        role=Role.SCHEDULER,
        rank=0,
        world_size=1,
        ring_bytes=16 * SLOT_BYTES,
        load_reserve_bytes=4 * SLOT_BYTES,
        staged_bytes=0,
        fragment_bytes=GEOMETRY.fragment_bytes,
        connect_timeout_ms=20_000,
        heartbeat_timeout_ms=3_000,
        embedded=embedded,
    )
    client = Client.attach(attachment)
    try:
        assert client.seeks.usable
        with closing(Tool(socket)) as tool:
            wait_until(lambda: json.loads(tool.status())["remote"]["state"] == "up")
            pid = json.loads(tool.status())["pid"]
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        given = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        assert b"MC_TCP_BIND_ADDRESS=127.0.0.1" in given, "the library's settings reach it"
        assert b"VLLM_OTHER=1" not in given
        answers: list[SoughtObject] = []
        key = ObjectKey.decode(key_of(1))
        client.seeks.ask([(key, FRAGMENTS)] * 1_500, fetch=False, on_answer=answers.append)
        wait_until(lambda: len(answers) == 1_500)
        assert sorted(one.index for one in answers) == list(range(1_500)), "three messages, one batch of the caller's"
        assert {one.status for one in answers} == {SoughtStatus.ABSENT}
    finally:
        client.close()
    wait_until(lambda: not socket.exists())
    client.seeks.ask([(key, FRAGMENTS)] * 3, fetch=True, on_answer=answers.append)
    assert [one.status for one in answers[1_500:]] == [SoughtStatus.FAILED] * 3, "there is no session any more"


def test_what_comes_for_one_request_is_of_one_family(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each is a request of its own: the beginning of a prompt would leave the card before its end."""
    one, other = serve(), serve()
    one.put(*range(5))
    wait_until(lambda: one.counted("remote_stores") == 5)
    families: list[int] = []
    real = Card.begin_put

    def begin_put(card: Card, key: ObjectKey, length: int, family: int, *rest: Any, **more: Any) -> Any:
        families.append(family)
        return real(card, key, length, family, *rest, **more)

    monkeypatch.setattr(Card, "begin_put", begin_put)
    assert other.seek(*range(5), fetch=True) == [SoughtStatus.FOUND] * 5
    assert len(families) == 5
    assert len(set(families)) == 1


def test_a_full_card_makes_room_for_what_comes(serve: Callable[..., Served]) -> None:
    """Else whoever needs the remote most, a machine whose card is full, would have nothing of it."""
    one, other = serve(), serve()
    one.put(*range(20))
    wait_until(lambda: one.counted("remote_stores") == 20)
    for number in range(100, 160):  # of four slots each: all 240
        other.rank.put(content_of(number), key_of(number))
    assert other.status()["slots"]["free"] < 20 * FRAGMENTS
    found = [other.seek(number, fetch=True)[0] for number in range(20)]
    assert found == [SoughtStatus.FOUND] * 20, other.status()["counters"]


def test_what_finds_no_room_is_tried_again_and_then_given_up(
    serve: Callable[..., Served], pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_stores, "RETRY_NS", 50_000_000)
    served = serve()
    with asked_for(pool, "full"):
        served.put(1)
        wait_until(lambda: served.counted("remote_stores_failed") == 1)
        assert served.status()["remote"]["storing"] == 0
    monkeypatch.setattr(remote_stores, "RETRY_NS", 1_000_000_000)
    (pool / "full").touch()
    served.put(2)
    wait_until(lambda: served.status()["remote"]["storing"] == 1)
    time.sleep(0.3)
    (pool / "full").unlink()
    wait_until(lambda: served.counted("remote_stores") == 1)
    assert stored(pool, 2).exists()
    assert served.counted("remote_stores_failed") == 1
    assert served.status()["remote"]["memory_slots_free"] == (4 << 20) // SLOT_BYTES


def test_what_cannot_go_is_counted_and_nobody_waits_for_it(
    serve: Callable[..., Served], pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that is full, an object that has left the card before its turn, and one that the memory does not hold."""
    monkeypatch.setattr(remote_stores, "QUEUED_MAX", 2)
    (pool / "down").touch()
    served = serve()
    served.put(1, 2, 3)
    assert served.counted("remote_stores_shed") == 1
    with closing(Tool(served.socket)) as tool:
        (held,) = [one for one in tool.objects(b"") if one.key == key_of(1)]
        assert tool.purge([held]).objects == 1
    (pool / "down").unlink()
    wait_until(lambda: served.counted("remote_stores_gone") == 1)
    wait_until(lambda: served.counted("remote_stores") == 1)
    assert [stored(pool, number).exists() for number in (1, 2, 3)] == [False, True, False]
    large = random.Random(9).randbytes(40 * GEOMETRY.fragment_bytes)  # of 64 slots stores may take half
    assert served.rank.put(large, key_of(9)) is StoreStatus.CONFIRMED
    assert served.counted("remote_stores_too_large") == 1


def test_a_scheduler_that_goes_before_its_answer_is_nobodys_trouble(serve: Callable[..., Served], pool: Path) -> None:
    """Its connection is closed by then: an answer that touched it would end the gateway."""
    served = serve()
    with asked_for(pool, "hang-look"):
        served.scheduler.send(Seek(1, (SeekObject(key_of(1), FRAGMENTS),), False))
        wait_until(lambda: served.status()["sessions_total"] == 2)
        served.scheduler.close()
        wait_until(lambda: served.status()["sessions_total"] == 1)
    wait_until(lambda: served.counted("remote_asked_absent") + served.counted("remote_asked_failed") == 1)
    served.put(2)
    assert served.thread.is_alive()


# --- all at once: schedulers that come, ask and go, a library, a master and a pool that fail in every way -----------

STORM_S = 6.0
STEPS = {"put": 2, "fail": 1, "spoil": 2, "drop": 1, "come": 5, "go": 3, "kill": 1, "ask": 60, "wait": 25}
FAILURES = ("hang-look", "hang-load", "hang-store", "down", "full")
SCHEDULERS_MAX = 5


class Storm:
    """One gateway that is put to, another that is asked."""

    def __init__(self, seed: int, put: Served, asked: Served, pool: Path) -> None:
        self._rng = random.Random(seed)
        self._put, self._asked, self._pool = put, asked, pool
        self._schedulers: list[Peer] = []
        self._numbers = 0
        self.objects = 0

    def step(self) -> None:
        what = self._rng.choices(list(STEPS), list(STEPS.values()))[0]
        getattr(self, what)()
        for scheduler in self._schedulers:
            with suppress(TimeoutError):
                while scheduler.next(0.0001) is not None:
                    pass

    def put(self) -> None:
        self.objects += 1
        self._put.rank.put(content_of(self.objects), key_of(self.objects))

    def fail(self) -> None:
        sign = self._pool / self._rng.choice(FAILURES)
        sign.touch()
        threading.Timer(self._rng.random() / 2, sign.unlink, kwargs={"missing_ok": True}).start()

    def spoil(self) -> None:
        if found := sorted(self._pool.glob("xkv1-*")):
            path = self._rng.choice(found)
            data = bytearray(path.read_bytes())
            data[self._rng.randrange(len(data))] ^= 1
            path.write_bytes(data)

    def drop(self) -> None:
        for path in self._pool.glob("xkv1-*"):
            if self._rng.random() < 0.1:
                path.unlink(missing_ok=True)

    def come(self) -> None:
        if len(self._schedulers) < SCHEDULERS_MAX:
            self._numbers += 1
            scheduler = Peer(self._asked.socket, geometry=GEOMETRY)
            scheduler.hello(engine=f"e{self._numbers}", role=Role.SCHEDULER, ring_slots=16)
            scheduler.receive(wire.Welcome)
            self._schedulers.append(scheduler)

    def go(self) -> None:
        if self._schedulers:
            self._schedulers.pop(self._rng.randrange(len(self._schedulers))).close()

    def kill(self) -> None:
        place = f"/proc/{os.getpid()}/task/{self._asked.thread.native_id}/children"
        if children := Path(place).read_text().split():
            os.kill(int(self._rng.choice(children)), signal.SIGKILL)

    def ask(self) -> None:
        if self._schedulers and self.objects:
            self._numbers += 1
            keys = [key_of(self._rng.randint(1, self.objects + 3)) for _ in range(self._rng.randint(1, 30))]
            objects = tuple(SeekObject(key, FRAGMENTS) for key in keys)
            self._rng.choice(self._schedulers).send(Seek(self._numbers, objects, self._rng.random() < 0.6))

    def wait(self) -> None:
        time.sleep(0.002)

    def end(self) -> None:
        while self._schedulers:
            self._schedulers.pop().close()
        time.sleep(0.6)  # the last failure's time
        for name in FAILURES:
            (self._pool / name).unlink(missing_ok=True)


def is_at_rest(served: Served) -> bool:
    status = served.status()
    remote = status["remote"]
    return (
        remote["state"] == "up"
        and not remote["fetching"] + remote["storing"] + status["slots"]["in_flight"]
        and remote["memory_slots_free"] == (4 << 20) // GEOMETRY.slot_bytes
    )


def test_whatever_fails_nothing_is_wrong_and_nothing_is_left(
    serve: Callable[..., Served],
    pool: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for lane in Lane:
        monkeypatch.setitem(remote_link.CALL_NS_MAX, lane, 200_000_000)
    monkeypatch.setattr(remote_link, "RESTART_NS_MIN", 50_000_000)
    monkeypatch.setattr(remote_link, "RESTART_NS_MAX", 200_000_000)
    monkeypatch.setattr(remote_stores, "RETRY_NS", 100_000_000)
    put, asked = serve(URL), serve(URL)
    storm = Storm(1, put, asked, pool)
    deadline = time.monotonic() + STORM_S
    while time.monotonic() < deadline or (
        not asked.counted("remote_fetches") and time.monotonic() < deadline + WAIT_S_MAX
    ):
        storm.step()
    storm.end()
    wait_until(lambda: is_at_rest(put) and is_at_rest(asked))
    right = 0
    for number in range(1, storm.objects + 1):
        status, content = asked.rank.get(LENGTH, key_of(number))
        assert status in (LoadStatus.OK, LoadStatus.MISS)
        if status is LoadStatus.OK:
            assert content == content_of(number)
            right += 1
    assert right > 0
    assert asked.counted("remote_ends") > 0
