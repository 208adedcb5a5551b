"""A gateway's process on a medium that fails, by a plan and by the kernel: what clients hear, and that it heals."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xkv_store import wire
from xkv_store.geometry import DATA_OFFSET, Geometry
from xkv_store.key import ObjectKey
from xkv_store.testing import faulty_gateway
from xkv_store.testing.faults import Fault, FaultPlan, Kind, Operation
from xkv_store.testing.faulty_gateway import write_plan
from xkv_store.testing.peer import Peer, attached
from xkv_store.testing.processes import GatewayProcess, running_gateway
from xkv_store.wire import LoadStatus, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

GEOMETRY = Geometry(16_384)
LENGTH = 5 * GEOMETRY.fragment_bytes - 77
CAPACITY = str(DATA_OFFSET + 64 * GEOMETRY.slot_bytes)
HEAL_S_MAX = 20.0


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(LENGTH)


def key_of(number: int) -> bytes:
    return ObjectKey(b"m" * 16, 0, number.to_bytes(32, "little"), 0).encode()


@contextmanager
def serving(folder: Path, *faults: Fault) -> Iterator[tuple[GatewayProcess, Peer]]:
    plan = FaultPlan(faults) if faults else None
    options = ("--grace-ms", "0")
    with (
        running_gateway(
            folder, capacity=CAPACITY, slot_bytes=GEOMETRY.slot_bytes, options=options, faults=plan
        ) as gateway,
        attached(Path(gateway.ready["socket"]), geometry=GEOMETRY) as peer,
    ):
        yield gateway, peer


def read(peer: Peer, number: int) -> bytes | None:
    status, content = peer.get(LENGTH, key_of(number))
    return content if status is LoadStatus.OK else None


def put_until_confirmed(peer: Peer, number: int) -> None:
    deadline = time.monotonic() + HEAL_S_MAX
    while peer.put(content_of(number), key_of(number), replace=True) is not StoreStatus.CONFIRMED:
        assert time.monotonic() < deadline, "it does not heal"
        time.sleep(0.02)
    assert read(peer, number) == content_of(number)


def status_of(peer: Peer) -> dict[str, Any]:
    peer.send(wire.AskStatus(1))
    found: dict[str, Any] = json.loads(peer.receive(wire.Status).text)
    assert sum(found["slots"].values()) == found["slots_total"]
    return found


@pytest.mark.parametrize(
    ("operation", "kind"),
    [(Operation.WRITE, Kind.ERROR), (Operation.COMMIT, Kind.ERROR), (Operation.COMMIT, Kind.DEAD)],
)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_fault_at_the_third_put_is_one_failed_put(
    tmp_path: Path, operation: Operation, kind: Kind, error: int
) -> None:
    fault = Fault(operation=operation, kind=kind, nth=3, error=error)
    with serving(tmp_path, fault) as (gateway, peer):
        heard = [peer.put(content_of(number), key_of(number)) for number in range(3)]
        assert heard == [StoreStatus.CONFIRMED, StoreStatus.CONFIRMED, StoreStatus.FAILED]
        assert gateway.effects() == {(operation, kind): 1}
        assert [read(peer, number) for number in range(3)] == [content_of(0), content_of(1), None]
        put_until_confirmed(peer, 2)
        status = status_of(peer)
        assert status["counters"]["puts_failed"] == 1
        assert (status["objects"], status["slots"]["used"]) == (3, 15)
        gateway.kill()
    with serving(tmp_path) as (_, peer):
        assert [read(peer, number) for number in range(3)] == [content_of(number) for number in range(3)]


@pytest.mark.parametrize("kind", [Kind.FLIP, Kind.ZERO, Kind.CUT, Kind.SWAP, Kind.STALE])
def test_a_write_that_lied_is_said_to_be_corrupt_once(tmp_path: Path, kind: Kind) -> None:
    fault = Fault(operation=Operation.WRITE, kind=kind, nth=2, at=2 * GEOMETRY.slot_bytes + 2_000)
    with serving(tmp_path, fault) as (gateway, peer):
        for number in range(2):
            assert peer.put(content_of(number), key_of(number)) is StoreStatus.CONFIRMED
        assert peer.get(LENGTH, key_of(1))[0] is LoadStatus.CORRUPT
        assert peer.get(LENGTH, key_of(1))[0] is LoadStatus.MISS
        assert gateway.effects() == {(Operation.WRITE, kind): 1}
        assert status_of(peer)["counters"]["dropped_corrupt"] == 1
        put_until_confirmed(peer, 1)
        assert read(peer, 0) in (content_of(0), None), "a stray write may have hit it"


@pytest.mark.parametrize("limit_bytes", [DATA_OFFSET + 7 * GEOMETRY.slot_bytes + 1_000, 4_096])
def test_a_kernel_that_takes_no_more_bytes(tmp_path: Path, limit_bytes: int) -> None:
    """The file size limit is a real error of real writes: one is cut short in a slot, the index's fail, too."""
    with serving(tmp_path) as (gateway, peer):
        put_until_confirmed(peer, 0)
        former = resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (limit_bytes, former[1]))
        heard = {peer.put(content_of(number), key_of(number)) for number in range(1, 4)}
        assert heard <= {StoreStatus.FAILED, StoreStatus.SHED}
        assert StoreStatus.FAILED in heard
        assert [read(peer, number) for number in range(4)] == [content_of(0), None, None, None]
        resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, former)
        for number in range(1, 4):
            put_until_confirmed(peer, number)
        status_of(peer)
        gateway.kill()
    with serving(tmp_path) as (_, peer):
        assert [read(peer, number) for number in range(4)] == [content_of(number) for number in range(4)]


def test_calls_that_signals_interrupt_go_on(tmp_path: Path) -> None:
    """A process that is stopped and continued sees its waits and moves end with EINTR."""
    with serving(tmp_path) as (gateway, peer):
        over = threading.Event()

        def disturb() -> None:
            while not over.wait(0.002):
                gateway.signal(signal.SIGSTOP)
                gateway.signal(signal.SIGCONT)

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            for number in range(30):
                put_until_confirmed(peer, number)
        finally:
            over.set()
            thread.join()
            gateway.signal(signal.SIGCONT)
        assert not {name for name in status_of(peer)["counters"] if "failed" in name or "errors" in name}


def test_the_faulty_gateway_is_a_command(tmp_path: Path) -> None:
    """As docs/reliability.md says it: for whoever does not start gateways from Python."""
    plan = FaultPlan((Fault(operation=Operation.WRITE, kind=Kind.ERROR, nth=1, error=errno.ENOSPC),))
    write_plan(tmp_path / "plan", plan)
    command = [sys.executable, "-m", faulty_gateway.__name__, "gateway", "run", "--json"]
    command += ["--card", str(tmp_path / "card"), "--socket-dir", str(tmp_path / "sockets")]
    command += ["--capacity", CAPACITY, "--slot-bytes", str(GEOMETRY.slot_bytes)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, faulty_gateway.ENVIRONMENT_NAME: str(tmp_path / "plan")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            peer = Peer(Path(json.loads(process.stdout.readline())["socket"]), geometry=GEOMETRY)
            peer.attach()
            assert peer.put(content_of(1), key_of(1)) is StoreStatus.FAILED
            put_until_confirmed(peer, 1)
            peer.close()
            assert faulty_gateway.effects(tmp_path / "plan") == {(Operation.WRITE, Kind.ERROR): 1}
            process.terminate()
            assert process.wait(HEAL_S_MAX) == 0
        finally:
            process.kill()


def test_of_two_gateways_at_once_one_has_the_card(tmp_path: Path) -> None:
    """Both stand at the lock and are let go together: within the time of one look, 5 ms."""
    points = tmp_path / "points"
    points.mkdir()
    hold = points / "open.before_lock.hold"
    hold.touch()
    outcome: dict[str, GatewayProcess | RuntimeError] = {}

    def start(name: str) -> None:
        options = ["--capacity", CAPACITY, "--slot-bytes", str(GEOMETRY.slot_bytes)]
        try:
            outcome[name] = GatewayProcess(
                card=tmp_path / "card", socket_dir=tmp_path / name, points=points, options=options
            )
        except RuntimeError as error:
            outcome[name] = error

    threads = [threading.Thread(target=start, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    mark = points / "open.before_lock.reached"
    deadline = time.monotonic() + 30
    while not mark.exists() or len(mark.read_bytes().splitlines()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    hold.unlink()
    for thread in threads:
        thread.join()
    served = [found for found in outcome.values() if isinstance(found, GatewayProcess)]
    try:
        assert len(outcome) == 2
        assert len(served) == 1, "one serves, the other is told"
        assert (points / "open.locked.reached").read_bytes().count(b"\n") == 1
        peer = Peer(Path(served[0].ready["socket"]), geometry=GEOMETRY)
        peer.attach()
        put_until_confirmed(peer, 1)
        peer.close()
        holder = (tmp_path / "card" / "lock").read_text(encoding="utf-8")
        assert f"process {served[0].pid} on" in holder
        assert os.path.lexists(tmp_path / "card" / "index")
    finally:
        for gateway in served:
            gateway.end()
