"""The client and a real gateway in a process of its own: bytes, several threads, kill -9 with work in flight."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_store.attachment import Attachment
from xkv_store.client import Client, GetObject, PutObject
from xkv_store.errors import UserError
from xkv_store.geometry import HEADER_BYTES, Geometry
from xkv_store.key import ObjectKey
from xkv_store.testing.processes import PORT, GatewayProcess, running_gateway
from xkv_store.wire import LoadedObject, LoadStatus, Role, StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GEOMETRY = Geometry(65_536)
SLOTS = 96
WAIT_S_MAX = 20.0


def wait_until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not check():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


def attachment_to(gateway: GatewayProcess, **changes: object) -> Attachment:
    attachment = Attachment(
        socket=Path(gateway.ready["socket"]),
        engine_id="e",
        role=Role.RANK,
        rank=0,
        world_size=1,
        ring_bytes=SLOTS * GEOMETRY.slot_bytes,
        load_reserve_bytes=SLOTS // 3 * GEOMETRY.slot_bytes,
        staged_bytes=0,
        fragment_bytes=GEOMETRY.fragment_bytes,
        connect_timeout_ms=5_000,
        heartbeat_timeout_ms=3_000,
    )
    return replace(attachment, **changes)  # type: ignore[arg-type]


def key_of(number: int) -> ObjectKey:
    return ObjectKey(b"n" * 16, 0, random.Random(number).randbytes(32), 0)


def content_of(number: int) -> bytes:
    length = random.Random(number).choice([1, 100, GEOMETRY.fragment_bytes, 3 * GEOMETRY.fragment_bytes + 5])
    return random.Random(number).randbytes(length)


@dataclass
class Engine:
    """A client with what an engine does around it: copies in and out, slots taken and given."""

    client: Client
    stored: Counter[tuple[int, StoreStatus]] = field(default_factory=Counter)
    loaded: Counter[tuple[int, LoadStatus]] = field(default_factory=Counter)
    wrong: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, number: int) -> None:
        content = content_of(number)
        slots = self.slots(self.client.store_region.take, len(content))
        step = GEOMETRY.fragment_bytes
        for place, slot in enumerate(slots):
            part = content[place * step : (place + 1) * step]
            self.client.ring.slot(slot)[HEADER_BYTES : HEADER_BYTES + len(part)] = part

        def on_answer(answer: StoredObject) -> None:
            with self.lock:
                self.stored[number, answer.status] += 1

        self.client.put([PutObject(key_of(number), len(content), slots, 1, number, replace=False)], on_answer)

    def get(self, number: int) -> None:
        content = content_of(number)
        slots = self.slots(self.client.load_region.take, len(content))
        for slot in slots:
            self.client.ring.array[slot] = 0xEE  # so that every byte must have been read

        def on_answer(answer: LoadedObject) -> None:
            parts = (self.client.ring.slot(slot)[HEADER_BYTES:] for slot in slots)
            found = b"".join(bytes(part) for part in parts)[: answer.length]
            with self.lock:
                self.loaded[number, answer.status] += 1
                if answer.status is LoadStatus.OK and found != content:
                    self.wrong.append(number)
            self.client.load_region.give(slots)

        self.client.get([GetObject(key_of(number), slots, 0)], on_answer)

    def slots(self, take: Callable[[int], list[int] | None], length: int) -> list[int]:
        taken: list[list[int]] = []

        def try_to() -> bool:
            slots = take(GEOMETRY.fragments(length))
            if slots is not None:
                taken.append(slots)
            return slots is not None

        wait_until(try_to)
        return taken[0]

    def answers(self) -> int:
        return sum(self.stored.values()) + sum(self.loaded.values())


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path, slot_bytes=GEOMETRY.slot_bytes) as running:
        yield running


@pytest.fixture
def engine(gateway: GatewayProcess) -> Iterator[Engine]:
    client = Client.attach(attachment_to(gateway))
    yield Engine(client)
    client.close()


def test_threads_put_and_get_side_by_side(engine: Engine) -> None:
    """Every object comes back as it was, every call is answered once, every slot comes home."""

    def work(part: int) -> None:
        for number in range(part, 60, 3):
            engine.put(number)

    def read(part: int) -> None:
        for number in range(part, 60, 3):
            engine.get(number)

    for job in (work, read):
        threads = [threading.Thread(target=job, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: engine.answers() % 60 == 0 and engine.answers())
    wait_until(lambda: engine.answers() == 120)
    assert engine.stored == Counter({(number, StoreStatus.CONFIRMED): 1 for number in range(60)})
    assert engine.loaded == Counter({(number, LoadStatus.OK): 1 for number in range(60)})
    assert engine.wrong == []
    assert all(engine.client.table.lookup(key_of(number).tag) for number in range(60))
    wait_until(lambda: engine.client.store_region.free == engine.client.store_region.count)
    assert engine.client.load_region.free == engine.client.load_region.count


@pytest.mark.parametrize("point", ["put.written", "put.committed", "get.before_read", "get.read"])
def test_kill_with_work_in_flight(gateway: GatewayProcess, engine: Engine, tmp_path: Path, point: str) -> None:
    """All is answered, all slots come home, and what was confirmed is there after the restart."""
    for number in range(20):
        engine.put(number)
    wait_until(lambda: engine.answers() == 20)
    gateway.hold(point)
    reached = gateway.times_reached(point)
    for number in range(9):
        if point.startswith("get"):
            engine.get(number)
        else:
            engine.put(100 + number)
    gateway.await_point(point, reached + 1)
    gateway.kill()
    wait_until(lambda: engine.answers() == 29)
    assert not engine.client.alive()
    assert engine.client.store_region.free == engine.client.store_region.count
    assert engine.client.load_region.free == engine.client.load_region.count
    lost = {LoadStatus.FAILED, LoadStatus.OK, StoreStatus.SHED, StoreStatus.CONFIRMED}
    assert {status for _, status in [*engine.stored, *engine.loaded]} <= lost
    with running_gateway(tmp_path, slot_bytes=GEOMETRY.slot_bytes):
        wait_until(engine.client.alive)
        assert engine.client.epoch == 2
        engine.loaded.clear()
        for number in range(20):
            assert engine.client.table.lookup(key_of(number).tag), "confirmed before the kill"
            engine.get(number)
        wait_until(lambda: len(engine.loaded) == 20)
        assert engine.loaded == Counter({(number, LoadStatus.OK): 1 for number in range(20)})
        assert engine.wrong == []


def test_reasons_of_a_real_gateway(gateway: GatewayProcess) -> None:
    """What a person reads names both sides' numbers, or who has the place."""
    first = Client.attach(attachment_to(gateway))
    cases: dict[str, dict[str, object]] = {
        r"xkv\.fragment_bytes=261120 does not fit.*64512": {"engine_id": "f", "fragment_bytes": 261_120},
        r"rank 0 of engine 'e' is attached": {"connect_timeout_ms": 300},
        r"xkv\.ring_bytes": {"engine_id": "g", "ring_bytes": 65_536},
        "world_size": {"rank": 1, "world_size": 2},
    }
    for reason, changes in cases.items():
        with pytest.raises(UserError, match=reason):
            Client.attach(attachment_to(gateway, **changes))
    assert first.alive()
    first.close()
    path = Path(gateway.ready["socket"]).with_name(f"{PORT + 1}.sock")
    with pytest.raises(UserError, match=f"xkv gateway run --port {PORT + 1}"):
        Client.attach(attachment_to(gateway, socket=path, connect_timeout_ms=100))
