"""Starting on cards of a million objects and of ten after kill -9, and what the gateway's memory holds then.

Owns: `start_s_*`, `resident_mib`, and running the lookups on the same gateways (such a card takes longest to make).
Must not know: how a start goes about it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import lookups
import small_puts
from cards import Keys, make_card
from gateways import BenchGateway, running
from report import Part

if TYPE_CHECKING:
    from pathlib import Path

MILLION: Final = 1_000_000
PUTS_BEFORE_KILL: Final = 1_000
READINGS: Final = 5


@dataclass(frozen=True, slots=True)
class Size:
    """A card of so many objects, and how often a gateway is started on it after a kill."""

    name: str
    objects: int
    starts: int


SIZES: Final = (Size("1m", MILLION, 4), Size("10m", 10 * MILLION, 2))
SIZES_QUICK: Final = (Size("1m", MILLION, 1), Size("10m", 10 * MILLION, 1))


def run(folder: Path, size: Size, *, quick: bool) -> Part:
    """Everything that is measured on a card of this size; the memory on the largest alone."""
    began = time.monotonic()
    keys = Keys.make(size.objects)
    make_card(folder / "card", keys)
    part = Part(details=[f"the card was made in {time.monotonic() - began:.1f} s"])
    part.details.append(lookups.bare_gets(folder / "card" / "index", keys, quick=quick))
    times = []
    for number in range(size.starts + 1):
        with running(folder) as gateway:  # ends with kill -9
            if gateway.ready["objects"] < size.objects:
                raise RuntimeError(f"{gateway.ready['objects']} objects on the card")
            if number:  # the first one warms the page cache, and does not come after a kill
                times.append(gateway.start_s)
            if number < size.starts:
                _be_killed_at_work(gateway, number)
                continue
            listed = " ".join(f"{value:.2f}" for value in times)
            part.details.append(f"starts after kill -9, page cache warm: {listed} s")
            part.figures[f"start_s_{size.name}"] = median(times)
            if size is (SIZES_QUICK if quick else SIZES)[-1]:
                part.add(_memory(gateway, puts=20_000 if quick else 100_000))
            part.add(lookups.run(gateway, keys, size.name, quick=quick))
    return part


def _be_killed_at_work(gateway: BenchGateway, number: int) -> None:
    """So that recovery has something to recover from: a session, and puts that were just committed."""
    client = gateway.attach(ring_bytes=small_puts.RING_BYTES)
    small_puts.put_many(client, number * PUTS_BEFORE_KILL, PUTS_BEFORE_KILL)
    logging.getLogger("xkv_store.client").setLevel(logging.ERROR)  # it says that the gateway is gone, as it should
    gateway.kill()
    client.close()


def _memory(gateway: BenchGateway, *, puts: int) -> Part:
    client = gateway.attach(ring_bytes=small_puts.RING_BYTES)
    at_start = gateway.resident()
    began = time.monotonic()
    readings = []
    for begin in range(0, puts, puts // READINGS):
        small_puts.put_many(client, MILLION + begin, puts // READINGS)
        readings.append(gateway.resident().own)
    rate = puts / (time.monotonic() - began)
    grown = " ".join(f"{mib:.1f}" for mib in readings)
    shared = ", ".join(f"{name} {mib:.0f}" for name, mib in gateway.resident().shared.items())
    client.close()
    return Part(
        {"resident_mib": max(readings)},
        [
            f"own resident memory after the start {at_start.own:.1f} MiB; over {puts:,} puts: {grown}",
            f"small puts a second: {rate:,.0f}",
            f"resident beside that, shared or the page cache's (MiB): {shared}",
        ],
    )
