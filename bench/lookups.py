"""Lookups as vLLM makes them, on a real gateway's table of millions of objects; idle, written, and stopped.

Owns: `lookup_us_*`, `prefix_1024_ms`, and a bare LMDB get on the same index for comparison.
Must not know: how the manager looks up.

Every figure that is given is the worst median of those states; all of them are in the details.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import lmdb

import small_puts
from cards import GROUP, GROUP_OF_RANKS, NAMESPACE, RANKS
from gateways import HEARTBEAT_MS_MAX, MIB
from report import Part, at_percent, percentiles
from xkv_offload.attachment import SchedulerCard
from xkv_offload.manager import ManagerOptions, Words, XkvManager
from xkv_store.key import ObjectKey, chunk_tag, tag_salt
from xkv_store.wire import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cards import Bytes, Keys
    from gateways import BenchGateway
    from xkv_store.client import Client

RING_BYTES: Final = 64 * MIB  # nothing is moved through it
STEP_S: Final = 0.002  # between two prefix lookups: a scheduler has other things to do, and the gateway gets its turn
PREFIXES: Final = (512, 1_024)
SETTLE_S: Final = 0.05
HIT: Final = True
MISS: Final = False


def run(gateway: BenchGateway, keys: Keys, name: str, *, quick: bool) -> Part:
    """All of it, with the gateway idle, writing as fast as it can, and stopped."""
    part = Part()
    repeats, singles = (60, 20_000) if quick else (200, 200_000)
    chooser = random.Random(4)
    with ExitStack() as open_things:
        client = open_things.enter_context(_engine(gateway, 1))
        managers = {
            1: _Prefixes(open_things.enter_context(_manager(client, 1)), keys.single, GROUP),
            RANKS: _Prefixes(_many(open_things, gateway), keys.of_ranks, GROUP_OF_RANKS),
        }
        salt = tag_salt(NAMESPACE, GROUP, 0)
        tags = [chunk_tag(salt, keys.single[row].tobytes()) for row in _rows(chooser, keys.single, singles)]

        def measure(when: str, *, with_single: bool = True) -> None:
            if with_single:
                one = [value / 1e3 for value in _each_ns(client.table.lookup, tags)]
                part.worst(f"lookup_us_{name}", at_percent(one, 50))
                part.details.append(f"one tag, {when}: {percentiles(one, 'µs')} (the clock's own time included)")
            for ranks, prefixes in managers.items():
                for count in PREFIXES:
                    times = prefixes.measure(count, repeats, chooser)
                    if count == PREFIXES[-1]:
                        part.worst(f"prefix_{count}_ms", at_percent(times, 50))
                    part.details.append(f"{count} keys, {ranks} ranks, {when}: {percentiles(times, 'ms')}")

        measure("gateway idle")
        before = client.table.entries
        began = time.monotonic()
        with small_puts.putting(gateway.socket):
            measure("gateway writing")
        rate = (client.table.entries - before) / (time.monotonic() - began)
        part.details.append(f"the gateway wrote {rate:,.0f} table entries a second meanwhile")
        repeats = min(repeats, 60)  # to be done before its heartbeat is too old
        with gateway.stopped():
            time.sleep(SETTLE_S)
            measure("gateway stopped", with_single=False)
            time.sleep(HEARTBEAT_MS_MAX / 1e3)
            for ranks, prefixes in managers.items():
                late = f"{prefixes.miss_us():.1f} µs until the miss"
                part.details.append(f"one key, {ranks} ranks, gateway stopped for longer than is believed: {late}")
    return part


def bare_gets(index: Path, keys: Keys, *, quick: bool) -> str:
    """What an LMDB get of one key costs from Python, on the index of a card that nobody has open; a line to show."""
    chooser = random.Random(5)
    wanted = [
        ObjectKey(NAMESPACE, GROUP, keys.single[row].tobytes(), 0).encode()
        for row in _rows(chooser, keys.single, 20_000 if quick else 100_000)
    ]
    with (
        lmdb.open(str(index), max_dbs=8, readonly=True, lock=False, readahead=False) as environment,
        environment.begin(db=environment.open_db(b"objects", create=False)) as transaction,
    ):
        _each_ns(transaction.get, wanted)  # pages are mapped in, as the table's are
        times = [value / 1e3 for value in _each_ns(transaction.get, wanted)]
    return f"a bare LMDB get of one key, one transaction, nobody writing: {percentiles(times, 'µs')}"


class _Prefixes:
    """Whole prefixes asked for of one manager."""

    def __init__(self, manager: XkvManager, hashes: Bytes, group: int) -> None:
        self._manager = manager
        self._hashes = hashes
        self._group = group.to_bytes(4, "big")  # vLLM's keys are a block hash and the group's number
        self._request = SimpleNamespace(req_id="bench")

    def measure(self, count: int, repeats: int, chooser: random.Random) -> list[float]:
        """Milliseconds for each of `repeats` requests: a call for each key until one misses, as the scheduler does."""
        lookup, request = self._manager.lookup, self._request
        times = []
        for _ in range(repeats):
            keys = [self._hashes[row].tobytes() + self._group for row in _rows(chooser, self._hashes, count)]
            began = time.perf_counter()
            hits = 0
            for key in keys:
                if lookup(key, request) is not HIT:
                    break
                hits += 1
            times.append((time.perf_counter() - began) * 1e3)
            if hits != count:
                raise RuntimeError(f"{hits} of {count} keys hit")
            self._manager.on_schedule_end()
            time.sleep(STEP_S)
        return times

    def miss_us(self) -> float:
        """Microseconds of one lookup, which must miss."""
        key = self._hashes[0].tobytes() + self._group
        began = time.perf_counter()
        answer = self._manager.lookup(key, self._request)
        took_us = (time.perf_counter() - began) * 1e6
        if answer is not MISS:
            raise RuntimeError("a lookup hit though the gateway has not been heard for too long")
        return took_us


@contextmanager
def _engine(gateway: BenchGateway, ranks: int) -> Iterator[Client]:
    """The scheduler of an engine all of whose ranks are attached."""
    with ExitStack() as attached:
        roles = [(Role.SCHEDULER, 0), *((Role.RANK, rank) for rank in range(ranks))]
        clients = []
        for role, rank in roles:
            others = {"engine_id": f"bench-{ranks}", "rank": rank, "world_size": ranks}
            client = gateway.attach(role, ring_bytes=RING_BYTES, **others)
            attached.callback(client.close)
            clients.append(client)
        yield clients[0]


def _many(open_things: ExitStack, gateway: BenchGateway) -> XkvManager:
    return open_things.enter_context(_manager(open_things.enter_context(_engine(gateway, RANKS)), RANKS))


@contextmanager
def _manager(client: Client, ranks: int) -> Iterator[XkvManager]:
    options = ManagerOptions(
        namespace=NAMESPACE, ranks=ranks, group_bytes={GROUP: 1}, store_backlog_bytes=1, loads=True, stores=True
    )
    words = Words(
        miss=MISS,
        hit=HIT,
        pending=None,
        prepare_store_output=SimpleNamespace,
        request_context=SimpleNamespace,
        stats=SimpleNamespace,
        load_source=None,
        features={"labelled_stats": True, "histogram_stats": True},
    )
    manager = XkvManager(card=SchedulerCard(client), options=options, words=words)
    yield manager
    manager.shutdown()


def _rows(chooser: random.Random, hashes: Bytes, count: int) -> list[int]:
    return [chooser.randrange(len(hashes)) for _ in range(count)]


def _each_ns(lookup: Callable[[Any], object | None], keys: Sequence[object]) -> list[int]:
    clock = time.perf_counter_ns
    times = []
    for key in keys:
        began = clock()
        found = lookup(key)
        times.append(clock() - began)
        if found is None:
            raise RuntimeError("a key of the card is not found")
    return times
