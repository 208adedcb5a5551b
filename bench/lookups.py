"""Lookups as vLLM makes them, on a real gateway's table of a million objects; alone, and while it is written.

Owns: `lookup_us_1m`, `prefix_512_ms`, `prefix_1024_ms`.
Must not know: how the manager looks up.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import small_puts
from million import NAMESPACE
from report import Part
from xkv_offload.attachment import SchedulerCard
from xkv_offload.manager import ManagerOptions, Words, XkvManager
from xkv_store.key import chunk_tag, tag_salt
from xkv_store.wire import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateways import BenchGateway

GROUP: Final = bytes(4)  # vLLM's keys are a block hash and the group's number
STEP_S: Final = 0.002  # between two prefix lookups: a scheduler has other things to do, and the gateway gets its turn


def run(gateway: BenchGateway, hashes: Sequence[bytes], *, quick: bool) -> Part:
    """All of it, first alone, then with writes."""
    part = Part()
    repeats, singles = (60, 20_000) if quick else (300, 200_000)
    client = gateway.attach(Role.SCHEDULER, ring_bytes=small_puts.RING_BYTES)
    chooser = random.Random(4)
    salt = tag_salt(NAMESPACE, 0, 0)
    tags = [chunk_tag(salt, block_hash) for block_hash in chooser.choices(hashes, k=singles)]
    manager = _manager(SchedulerCard(client))

    def measure(when: str) -> tuple[float, float, float]:
        one = [value / 1e3 for value in _each_ns(client.table.lookup, tags)]
        some = _prefixes_ms(manager, hashes, 512, repeats, chooser)
        more = _prefixes_ms(manager, hashes, 1_024, repeats, chooser)
        part.details += [
            f"one tag, {when}: {_percentiles(one, 'µs')} (the clock's own time included)",
            f"512 keys, {when}: {_percentiles(some, 'ms')}; 1,024 keys: {_percentiles(more, 'ms')}",
        ]
        return _at(one, 50), _at(some, 50), _at(more, 50)

    figures = measure("gateway idle")
    part.figures = dict(zip(("lookup_us_1m", "prefix_512_ms", "prefix_1024_ms"), figures, strict=True))
    before = client.table.entries
    began = time.monotonic()
    with small_puts.putting(Path(gateway.ready["socket"]), first=0):
        measure("gateway writing")
    rate = (client.table.entries - before) / (time.monotonic() - began)
    part.details.append(f"the gateway wrote {rate:,.0f} table entries a second meanwhile")
    manager.shutdown()
    return part


def _manager(card: SchedulerCard) -> XkvManager:
    options = ManagerOptions(
        namespace=NAMESPACE, ranks=1, group_bytes={0: 1}, store_backlog_bytes=1, loads=True, stores=True
    )
    words = Words(
        miss=False,
        hit=True,
        pending=None,
        prepare_store_output=SimpleNamespace,
        request_context=SimpleNamespace,
        stats=SimpleNamespace,
        load_source=None,
        features={"labelled_stats": True, "histogram_stats": True},
    )
    return XkvManager(card=card, options=options, words=words)


def _each_ns(lookup: Any, tags: Sequence[int]) -> list[int]:
    clock = time.perf_counter_ns
    times = []
    for tag in tags:
        began = clock()
        found = lookup(tag)
        times.append(clock() - began)
        if found is None:
            raise RuntimeError("a tag of the card is not in its table")
    return times


def _prefixes_ms(
    manager: XkvManager, hashes: Sequence[bytes], count: int, repeats: int, chooser: random.Random
) -> list[float]:
    """Milliseconds for each of `repeats` requests: a call for each key until one misses, as the scheduler does."""
    request = SimpleNamespace(req_id="bench")
    times = []
    for _ in range(repeats):
        keys = [block_hash + GROUP for block_hash in chooser.choices(hashes, k=count)]
        began = time.perf_counter()
        hits = 0
        for key in keys:
            if not manager.lookup(key, request):
                break
            hits += 1
        times.append((time.perf_counter() - began) * 1e3)
        if hits != count:
            raise RuntimeError(f"{hits} of {count} keys hit")
        manager.on_schedule_end()
        time.sleep(STEP_S)
    return times


def _percentiles(values: Sequence[float], unit: str) -> str:
    return f"p50 {_at(values, 50):.2f}, p99 {_at(values, 99):.2f} {unit}"


def _at(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]
