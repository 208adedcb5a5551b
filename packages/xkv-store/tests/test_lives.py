"""Processes that end or stand still, and what comes after them: gateways that are back sooner than anybody looks,
gateways that are stopped, engines that are killed and followed at once.

If these go, an answer of a life that is over may be taken for one of the present, or a slot be used that a copy of
that life still lands in.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_store import client as client_module
from xkv_store import client_connection, wire
from xkv_store.attachment import RETRY_MS_MAX, RETRY_MS_MIN, Attachment
from xkv_store.client import Client, GetObject, PutObject
from xkv_store.errors import UserError
from xkv_store.geometry import HEADER_BYTES, Geometry
from xkv_store.key import ObjectKey
from xkv_store.ring import memory_identity
from xkv_store.testing.processes import GatewayProcess, running_gateway
from xkv_store.tool import Tool
from xkv_store.wire import LoadedObject, LoadStatus, Role, StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GEOMETRY = Geometry(65_536)
SLOTS = 64
LENGTH = 2 * GEOMETRY.fragment_bytes + 100  # three slots
WAIT_S_MAX = 20.0
SECOND = 1.0  # the promise: so soon is a dead client's place free

STOP_VARIABLE = "XKV_STOP_S"
# Seconds that a stopped gateway stands still. Nothing on either side counts further than the bounds of the client
# (heartbeat, back-off, connecting) and the five seconds of a Hello; the default is beyond every one that is set
# below, so that a minute meets the same states. `XKV_STOP_S=60` proves it by the clock.
STOP_S = float(os.environ.get(STOP_VARIABLE, "1.5"))
HEARTBEAT_MS = 300
CONNECT_MS = 400


def wait_until(check: Callable[[], object], wait_s: float = WAIT_S_MAX) -> None:
    deadline = time.monotonic() + wait_s
    while not check():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


def attachment_to(gateway: GatewayProcess, *, engine_id: str = "e", heartbeat_timeout_ms: int = 3_000) -> Attachment:
    return Attachment(
        socket=Path(gateway.ready["socket"]),
        engine_id=engine_id,
        role=Role.RANK,
        rank=0,
        world_size=1,
        ring_bytes=SLOTS * GEOMETRY.slot_bytes,
        load_reserve_bytes=SLOTS // 2 * GEOMETRY.slot_bytes,
        staged_bytes=0,
        fragment_bytes=GEOMETRY.fragment_bytes,
        connect_timeout_ms=5_000,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )


@contextmanager
def attached(attachment: Attachment) -> Iterator[Client]:
    client = Client.attach(attachment)
    try:
        yield client
    finally:
        client.close()


def key_of(number: int) -> ObjectKey:
    return ObjectKey(b"l" * 16, 0, random.Random(number).randbytes(32), 0)


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(LENGTH)


def put(client: Client, number: int, answers: list[StoredObject]) -> None:
    """Begin to put an object; exactly one answer has to come."""
    content = content_of(number)
    slots = client.store_region.take(3)
    assert slots is not None
    step = GEOMETRY.fragment_bytes
    for place, slot in enumerate(slots):
        part = content[place * step : (place + 1) * step]
        client.ring.slot(slot)[HEADER_BYTES : HEADER_BYTES + len(part)] = part
    client.put([PutObject(key_of(number), LENGTH, slots, 1, number, replace=False)], answers.append)


def get(client: Client, number: int, answers: list[LoadedObject]) -> list[int]:
    """Begin to get an object into poisoned slots, which are returned."""
    slots = client.load_region.take(3)
    assert slots is not None
    for slot in slots:
        client.ring.array[slot] = 0xEE
    client.get([GetObject(key_of(number), slots, 0)], answers.append)
    return slots


def content_in(client: Client, slots: list[int]) -> bytes:
    return b"".join(bytes(client.ring.slot(slot)[HEADER_BYTES:]) for slot in slots)[:LENGTH]


def read(client: Client, number: int) -> bytes | None:
    answers: list[LoadedObject] = []
    slots = get(client, number, answers)
    wait_until(lambda: answers)
    (answer,) = answers
    assert answer.status in (LoadStatus.OK, LoadStatus.MISS)
    found = content_in(client, slots) if answer.status is LoadStatus.OK else None
    client.load_region.give(slots)
    return found


def status_of(gateway: GatewayProcess) -> dict[str, object]:
    with contextlib.closing(Tool(Path(gateway.ready["socket"]))) as tool:
        status = json.loads(tool.status())
    assert isinstance(status, dict)
    return status


# --- gateways that are back at once --------------------------------------------------------------------------


def await_life(client: Client, life: int) -> None:
    wait_until(lambda: client.epoch == life and client.alive())


def put_whole(client: Client, number: int) -> None:
    answers: list[StoredObject] = []
    put(client, number, answers)
    wait_until(lambda: answers)
    assert answers == [StoredObject(0, StoreStatus.CONFIRMED)]


@contextmanager
def answered_as_lost(gateway: GatewayProcess, client: Client, *, puts: int, gets: int) -> Iterator[None]:
    """A put and a get that have begun when the gateway is killed in this block: each is answered once."""
    gateway.hold("put.before_write")
    gateway.hold("get.before_read")
    reached = gateway.times_reached("get.before_read")
    stored: list[StoredObject] = []
    loaded: list[LoadedObject] = []
    put(client, puts, stored)
    slots = get(client, gets, loaded)
    gateway.await_point("get.before_read", reached + 1)
    yield
    wait_until(lambda: stored and loaded)
    assert stored == [StoredObject(0, StoreStatus.SHED)]
    assert loaded == [LoadedObject(0, LoadStatus.FAILED, 0, 0)]
    client.load_region.give(slots)


def test_lives_that_follow_each_other_faster_than_any_heartbeat_tells(tmp_path: Path) -> None:
    """The heartbeat's bound is an hour: the end of the connection, boot id and epoch alone tell the lives apart."""
    lives = 3
    boots = set()
    with ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(tmp_path))
        client = stack.enter_context(attached(attachment_to(gateway, heartbeat_timeout_ms=3_600_000)))
        ring, page = client.ring, client.control
        for life in range(1, 1 + lives):
            await_life(client, life)
            assert page.epoch == life
            boots.add(page.boot_id)
            for earlier in range(1, life):
                assert client.table.lookup(key_of(earlier).tag) is not None
                assert read(client, earlier) == content_of(earlier), "confirmed by an earlier life"
            put_whole(client, life)
            table = client.table
            with answered_as_lost(gateway, client, puts=100 + life, gets=life):
                gateway.kill()
                gateway = stack.enter_context(running_gateway(tmp_path))
            await_life(client, life + 1)
            assert client.table is not table, "the former life's table says nothing any more"
            assert client.store_region.free == client.store_region.count
            assert client.load_region.free == client.load_region.count
            assert client.ring is ring
            assert client.control is page
        assert len(boots) == lives


def test_back_off_is_bounded_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a busy loop while there is no gateway, nor one that is back for long and unnoticed."""
    attempts: list[float] = []  # the pause before each
    pause, dial = Client._pause, client_connection.dial
    asked_ms = 0.0

    def noted_pause(client: Client, pause_ms: float) -> None:
        nonlocal asked_ms
        asked_ms += pause_ms
        pause(client, pause_ms)

    def noted_dial(attachment: Attachment) -> object:
        nonlocal asked_ms
        attempts.append(asked_ms)
        asked_ms = 0.0
        return dial(attachment)

    with ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(tmp_path))
        client = stack.enter_context(attached(attachment_to(gateway)))
        monkeypatch.setattr(Client, "_pause", noted_pause)
        monkeypatch.setattr(client_module, "dial", noted_dial)
        for life in (2, 3):
            attempts.clear()
            gateway.kill()
            wait_until(lambda: len(attempts) >= 6)
            assert all(RETRY_MS_MIN / 2 <= pause_ms <= RETRY_MS_MAX for pause_ms in attempts), "one without a pause"
            assert attempts[0] <= RETRY_MS_MIN, "it may be back at once"
            assert attempts[5] >= RETRY_MS_MAX / 2, "the pauses grow"
            gateway = stack.enter_context(running_gateway(tmp_path))
            await_life(client, life)


# --- gateways that stand still -------------------------------------------------------------------------------


@contextmanager
def stopped(gateway: GatewayProcess) -> Iterator[None]:
    gateway.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        gateway.signal(signal.SIGCONT)


@pytest.mark.timeout(120 + STOP_S)
def test_a_gateway_that_stands_still(tmp_path: Path) -> None:
    """No lookup believes it, nobody waits for it, its slots stay its own; then it answers, late, and all goes on."""
    with (
        running_gateway(tmp_path) as gateway,
        attached(attachment_to(gateway, heartbeat_timeout_ms=HEARTBEAT_MS)) as client,
    ):
        put_whole(client, 1)
        stored: list[StoredObject] = []
        loaded: list[LoadedObject] = []
        with stopped(gateway):
            begun = time.monotonic()
            wait_until(lambda: not client.alive(), HEARTBEAT_MS / 1_000 + 3.0)
            calls_begun = time.monotonic()
            put(client, 2, stored)
            slots = get(client, 1, loaded)
            assert time.monotonic() - calls_begun < STOP_S, "the calls have waited for the gateway"
            with pytest.raises(UserError, match=rf"pid {gateway.pid}\) does not answer"):
                Client.attach(replace(attachment_to(gateway, engine_id="comes then"), connect_timeout_ms=CONNECT_MS))
            time.sleep(max(0.0, begun + STOP_S - time.monotonic()))
            assert (stored, loaded) == ([], []), "nobody has answered"
            assert client.store_region.free == client.store_region.count - 3, "its slots would be used again"
            assert client.load_region.free == client.load_region.count - 3
        wait_until(lambda: stored and loaded)
        assert stored == [StoredObject(0, StoreStatus.CONFIRMED)]
        assert [answer.status for answer in loaded] == [LoadStatus.OK]
        assert content_in(client, slots) == content_of(1)
        client.load_region.give(slots)
        wait_until(client.alive)
        assert client.epoch == 1, "it is the same life"
        assert read(client, 2) == content_of(2)
        with attached(attachment_to(gateway, engine_id="comes then")) as other:
            assert read(other, 2) == content_of(2)


# --- engines that are killed ---------------------------------------------------------------------------------


@contextmanager
def engine_process(attachment: Attachment, number: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """A process that has attached and begun to put an object, and waits to be killed: its id, its ring's identity."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        try:
            os.close(ours)
            client = Client.attach(attachment)
            put(client, number, [])
            os.write(theirs, json.dumps(memory_identity(client.ring.fd)).encode())
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(theirs)
    try:
        device, inode = json.loads(os.read(ours, 100))
        yield pid, (device, inode)
    finally:
        os.close(ours)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("heir", ["e", "another"])
def test_a_new_engine_right_after_the_old_ones_kill(tmp_path: Path, heir: str) -> None:
    """Under the same name or another: it has its place within a second, and never the dead one's ring."""
    with running_gateway(tmp_path) as gateway, engine_process(attachment_to(gateway), number=1) as (pid, ring):
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        with attached(attachment_to(gateway, engine_id=heir)) as client:
            assert time.monotonic() - begun < SECOND
            assert memory_identity(client.ring.fd) != ring
            assert read(client, 1) in (None, content_of(1))
            wait_until(lambda: sessions(gateway) == [heir], SECOND)
            wait_until(lambda: not is_mapped(gateway, ring), SECOND)
            put_whole(client, 2)
            assert read(client, 2) == content_of(2)


def test_a_dead_engines_ring_outlives_its_last_write(tmp_path: Path) -> None:
    """The write that has begun ends in the old ring; who has the same name waits for that; others do not wait."""
    with running_gateway(tmp_path) as gateway:
        gateway.hold("put.before_write")
        with engine_process(attachment_to(gateway), number=1) as (pid, ring):
            gateway.await_point("put.before_write")
            os.kill(pid, signal.SIGKILL)
            begun = time.monotonic()
            with attached(attachment_to(gateway, engine_id="another")) as other:
                assert time.monotonic() - begun < SECOND
                assert is_mapped(gateway, ring)
                gateway.let_go("put.before_write")
                begun = time.monotonic()
                with attached(attachment_to(gateway)) as heir:
                    assert time.monotonic() - begun < SECOND
                    assert memory_identity(heir.ring.fd) != ring
                    wait_until(lambda: sessions(gateway) == ["another", "e"], SECOND)
                    wait_until(lambda: not is_mapped(gateway, ring), SECOND)
                    assert read(other, 1) in (None, content_of(1)), "whole or not there"


def sessions(gateway: GatewayProcess) -> list[str]:
    found = status_of(gateway)["sessions"]
    assert isinstance(found, list)
    return sorted(one["engine"] for one in found if one["role"] != wire.Role.TOOL.value)


def is_mapped(gateway: GatewayProcess, ring: tuple[int, int]) -> bool:
    """Whether the gateway has this ring (device and inode) mapped."""
    maps = Path(f"/proc/{gateway.pid}/maps").read_text().splitlines()
    return any("xkv-ring" in line and line.split()[4] == str(ring[1]) for line in maps)
