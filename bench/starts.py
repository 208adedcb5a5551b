"""Starting on a card of a million objects after kill -9, and what the gateway's memory holds then.

Owns: `start_s_1m`, `resident_mib`, and running the lookups on the same card (it takes longest to make).
Must not know: how a start goes about it.
"""

from __future__ import annotations

import logging
import time
from statistics import median
from typing import TYPE_CHECKING

import lookups
import million
import small_puts
from gateways import BenchGateway, running
from report import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def run(folder: Path, *, quick: bool) -> list[tuple[str, Callable[[], Part]]]:
    """The parts on this card, to be run one after the other; the card is made by the first."""
    hashes = million.block_hashes()

    def start() -> Part:
        began = time.monotonic()
        million.make_card(folder / "card", hashes)
        made_s = time.monotonic() - began
        return _start(folder, runs=1 if quick else 5, made_s=made_s)

    return [
        ("start", start),
        ("lookups", lambda: _with_gateway(folder, hashes, quick=quick)),
        ("memory", lambda: _memory(folder, puts=4_000 if quick else 50_000)),
    ]


def _start(folder: Path, *, runs: int, made_s: float) -> Part:
    times = []
    for number in range(runs + 1):
        with running(folder) as gateway:  # ends with kill -9
            if gateway.ready["objects"] < million.OBJECTS:
                raise RuntimeError(f"{gateway.ready['objects']} objects on the card")
            if number:  # the first one warms the page cache, and does not come after a kill
                times.append(gateway.start_s)
            _be_killed_at_work(gateway, number)
    listed = " ".join(f"{value:.2f}" for value in times)
    return Part(
        {"start_s_1m": median(times)},
        [f"the card was made in {made_s:.1f} s; starts after kill -9, page cache warm: {listed} s"],
    )


def _be_killed_at_work(gateway: BenchGateway, number: int) -> None:
    """So that recovery has something to recover from: a session, and puts that were just committed."""
    client = gateway.attach(ring_bytes=small_puts.RING_BYTES)
    small_puts.put_many(client, small_puts.OBJECTS_MAX + 1_000 * number, 1_000)
    logging.getLogger("xkv_store.client").setLevel(logging.ERROR)  # it says that the gateway is gone, as it should
    gateway.kill()
    client.close()


def _with_gateway(folder: Path, hashes: Sequence[bytes], *, quick: bool) -> Part:
    with running(folder) as gateway:
        return lookups.run(gateway, hashes, quick=quick)


def _memory(folder: Path, *, puts: int) -> Part:
    with running(folder) as gateway:
        client = gateway.attach(ring_bytes=small_puts.RING_BYTES)
        at_start = gateway.resident()
        began = time.monotonic()
        first = 2 * small_puts.OBJECTS_MAX
        readings = []
        for begin in range(0, puts, puts // 4):
            small_puts.put_many(client, first + begin, puts // 4)
            readings.append(gateway.resident().own)
        rate = puts / (time.monotonic() - began)
        grown = " ".join(f"{mib:.1f}" for mib in readings)
        shared = ", ".join(f"{name} {mib:.0f}" for name, mib in gateway.resident().shared.items())
        client.close()
    return Part(
        {"resident_mib": readings[-1]},
        [
            f"own resident memory after the start {at_start.own:.1f} MiB; over {puts:,} puts: {grown}",
            f"small puts a second: {rate:,.0f}",
            f"resident beside that, shared or the page cache's (MiB): {shared}",
        ],
    )
