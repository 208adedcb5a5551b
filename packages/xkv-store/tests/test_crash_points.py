"""kill -9 of the gateway at every named point that the source has, under puts, replacements, evictions and gets.

After it: what is readable is exactly what was put, nothing is lost that was confirmed and not evicted, every slot is
accounted for, and the card goes on. The list of points is made from the source; one that is not hit fails.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xkv_store import wire
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.testing import markers
from xkv_store.testing.peer import Peer
from xkv_store.testing.processes import running_gateway
from xkv_store.wire import LoadStatus, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xkv_store.testing.processes import GatewayProcess

GEOMETRY = Geometry(16_384)
SLOTS = 112
CAPACITY = str(2 * (1 << 20) + SLOTS * GEOMETRY.slot_bytes)
OPTIONS = ("--databases", "2", "--grace-ms", "10")
KEYS = 16
LANES = 3  # puts in flight at once: while one dies the others are at other steps
LANE_SLOTS = 36
SPREAD = 33  # fragments that two databases share
LOAD_S_MAX = 20.0  # a busy machine sheds puts that would reach a step: so long, not so often
ROUNDS_BEFORE_END = 4


def key_of(number: int) -> bytes:
    return ObjectKey(b"c" * 16, 0, number.to_bytes(32, "little"), 0).encode()


@dataclass(slots=True)
class Load:
    """What was put, and what each key may hold now."""

    rng: random.Random
    lengths: dict[int, int] = field(default_factory=dict)  # of each version ever put
    possible: dict[int, set[int]] = field(default_factory=dict)  # versions that a key may hold
    confirmed: set[int] = field(default_factory=set)  # keys that hold something, if it was not evicted

    def content(self, version: int) -> bytes:
        return random.Random(version).randbytes(self.lengths[version])

    def run(self, peer: Peer, rounds: int) -> bool:
        """Rounds of puts and a get; False when the gateway dies meanwhile."""
        try:
            return all(self._puts(peer) and self._get(peer) for _ in range(rounds))
        except (BrokenPipeError, ConnectionResetError):
            return False

    def _puts(self, peer: Peer) -> bool:
        waiting: dict[int, tuple[int, int]] = {}
        for lane, key in enumerate(self.rng.sample(range(KEYS), LANES)):
            version = len(self.lengths) + 1
            fragments = SPREAD if self.rng.random() < 0.2 else self.rng.randint(1, 8)
            self.lengths[version] = fragments * GEOMETRY.fragment_bytes - self.rng.randint(0, 15_000)
            self.possible.setdefault(key, set()).add(version)
            number = peer.begin_put(
                self.content(version), key_of(key), first_slot=lane * LANE_SLOTS, replace=True, family=version
            )
            waiting[number] = key, version
        while waiting:
            answer = peer.next()
            if answer is None:
                return False
            assert isinstance(answer, wire.Stored)
            key, version = waiting.pop(answer.put)
            (stored,) = answer.objects
            if stored.status is StoreStatus.CONFIRMED:
                self.possible[key] = {version}
                self.confirmed.add(key)
            else:
                assert stored.status is StoreStatus.SHED, "nothing but a full card may stop a put here"
                self.possible[key].discard(version)
        return True

    def _get(self, peer: Peer) -> bool:
        key = self.rng.randrange(KEYS)
        if not self.possible.get(key):
            return True
        number = peer.begin_get(max(self.lengths[version] for version in self.possible[key]), key_of(key))
        answer = peer.next()
        if answer is None:
            return False
        assert isinstance(answer, wire.Loaded)
        assert answer.get == number
        self._check(peer, key, answer.objects[0])
        return True

    def _check(self, peer: Peer, key: int, loaded: wire.LoadedObject) -> int | None:
        """The version that was read."""
        if loaded.status is LoadStatus.MISS:
            return None
        assert loaded.status is LoadStatus.OK
        content = peer.content(loaded.length)
        versions = [version for version in self.possible[key] if self.content(version) == content]
        assert versions, f"{len(content)} bytes of key {key} that were never put, or were replaced"
        return versions[0]

    def read_all(self, peer: Peer) -> dict[int, int]:
        """Key: version of everything that is there; what is in doubt is settled by it."""
        found = {}
        for key, versions in self.possible.items():
            for length in sorted({self.lengths[version] for version in versions}, reverse=True):
                peer.begin_get(length, key_of(key))
                version = self._check(peer, key, peer.receive(wire.Loaded).objects[0])
                if version is not None:
                    found[key] = version
                    break
        return found


@contextmanager
def attached(gateway: GatewayProcess) -> Iterator[Peer]:
    peer = Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY)
    try:
        peer.attach()
        yield peer
    finally:
        peer.close()


@contextmanager
def gateway_on(folder: Path) -> Iterator[GatewayProcess]:
    with running_gateway(folder, capacity=CAPACITY, slot_bytes=GEOMETRY.slot_bytes, options=OPTIONS) as gateway:
        yield gateway


def status_of(peer: Peer) -> dict[str, Any]:
    peer.send(wire.AskStatus(1))
    found: dict[str, Any] = json.loads(peer.receive(wire.Status).text)
    return found


def marks(folder: Path, point: str) -> int:
    mark = folder / "points" / f"{point}.reached"
    return len(mark.read_bytes().splitlines()) if mark.exists() else 0


@dataclass(frozen=True, slots=True)
class Used:
    """A card that a killed gateway has left, and what is on it."""

    folder: Path
    load: Load

    def copy(self, folder: Path, seed: str) -> Load:
        shutil.copytree(self.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("sockets"))
        load = self.load
        return Load(
            random.Random(seed),
            dict(load.lengths),
            {key: set(versions) for key, versions in load.possible.items()},
            set(load.confirmed),
        )


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Used:
    folder = tmp_path_factory.mktemp("used")
    load = Load(random.Random(0))
    with gateway_on(folder) as gateway, attached(gateway) as peer:
        assert load.run(peer, 2)
        gateway.kill()
    return Used(folder, load)


def live_and_die(folder: Path, load: Load, point: str, times: int) -> None:
    """One life that must end with a kill at this point: at its start, under load, or at its clean end."""
    kill = folder / "points" / f"{point}.kill"
    kill.write_text(str(marks(folder, point) + times), encoding="ascii")
    try:
        with gateway_on(folder) as gateway:
            with attached(gateway) as peer:
                if point.startswith("close."):
                    load.run(peer, ROUNDS_BEFORE_END)
                else:
                    end = time.monotonic() + LOAD_S_MAX
                    while load.run(peer, 1) and time.monotonic() < end:
                        pass
            if gateway.alive and point.startswith("close."):
                gateway.signal(signal.SIGTERM)
            assert gateway.wait(10) == -signal.SIGKILL, f"{point} was never reached"
    except RuntimeError:
        assert point.startswith("open."), "it died before it served"
    kill.unlink()
    assert marks(folder, point) >= times, f"{point} was never reached"


@pytest.mark.parametrize("point", sorted(markers.in_source()))
def test_killed_at(tmp_path: Path, used: Used, point: str) -> None:
    load = used.copy(tmp_path, point)
    once = point.startswith(("open.", "close."))
    live_and_die(tmp_path, load, point, 1 if once else load.rng.randint(1, 3))
    evicted = marks(tmp_path, "evict.begin")
    with gateway_on(tmp_path) as gateway, attached(gateway) as peer:
        status = status_of(peer)
        found = load.read_all(peer)
        assert len(load.confirmed - set(found)) <= evicted, "what was confirmed and not evicted is there"
        # Whoever dies while it takes the index may have died of it: that one is not trusted, but made anew.
        assert status["index_rebuilt"] == (point == "open.taken")
        assert status["objects"] == len(found)
        fragments = sum(GEOMETRY.fragments(load.lengths[version]) for version in found.values())
        assert status["slots"] == {"free": SLOTS - fragments, "in_flight": 0, "used": fragments, "limbo": 0}
        load.possible = {key: {version} for key, version in found.items()}
        assert load.run(peer, 6), "the card goes on"
        status = status_of(peer)
        assert sum(status["slots"].values()) == status["slots_total"] == SLOTS
        assert status["counters"]["puts_confirmed"] > 0
        assert not {name for name in status["counters"] if name.startswith(("dropped", "puts_failed", "index_errors"))}
