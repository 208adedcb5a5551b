"""Puts and gets through a real gateway against fio: same file system, bytes, block size, O_DIRECT, regime.

Owns: `put_*_vs_fio`, `get_*_vs_fio`, `cpu_s_per_gb`.
Must not know: vLLM; anything of the gateway that its client does not show.

The regime is overwriting on both sides: every byte of fio's file and of the card's database has been written once
before, as on a card that has been full. One database; puts end when they are confirmed, gets when they are verified.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from fio import Fio, Kind
from gateways import MIB, BenchGateway, object_key, running
from report import Part
from xkv_store.client import Client, GetObject, PutObject
from xkv_store.database import aligned
from xkv_store.geometry import DATA_OFFSET, SLOT_BYTES, Geometry
from xkv_store.wire import LoadedObject, LoadStatus, StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xkv_store.key import ObjectKey

WAIT_S_MAX: Final = 120.0
RING_BYTES: Final = 1024 * MIB  # half for puts, half for gets: 16 objects of 32 MiB each
OVERFILL: Final = 1.3  # the card over what is put: it evicts ahead, which is not measured here
WRITE_BYTES: Final = 8 * MIB
FIO_JOBS: Final = (1, 4)  # the queue's depth in one thread, or shared by four as in the gateway: the better counts
GEOMETRY: Final = Geometry()


@dataclass(frozen=True, slots=True)
class Load:
    """Objects of `size` bytes, `depth` of them outstanding, on both sides."""

    name: str
    size: int
    depth: int


LOADS: Final = (Load("32m", 32 * MIB, 8), Load("2m", 2 * MIB, 32))


@dataclass(slots=True)
class Meter:
    """Counts answers; holds the sender back at the queue's depth."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    statuses: list[int] = field(default_factory=list)

    def answer(self, status: int) -> None:
        """One object is done."""
        with self.changed:
            self.statuses.append(status)
            self.changed.notify()

    def wait(self, count: int) -> None:
        """Until so many objects are done."""
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.statuses) >= count, WAIT_S_MAX):
                raise TimeoutError(f"{len(self.statuses)} of {count} objects were answered")


@dataclass(frozen=True, slots=True)
class Side:
    """One direction: how ours is measured, and fio's word for it."""

    name: str
    kind: Kind
    measure: Callable[[Client, Load, int, int], float]


@dataclass(frozen=True, slots=True)
class Rig:
    """What every comparison of one run of the benchmarks has in common; the first of `runs` is the warm-up."""

    gateway: BenchGateway
    client: Client
    fio: Fio
    total: int
    runs: int
    fio_jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """One load in one direction: each run's seconds, ours and fio's by number of jobs, and our CPU seconds."""

    ours: list[float]
    theirs: dict[int, list[float]]
    cpu_s: float


def run(folder: Path, *, quick: bool) -> Part:
    """All loads, both directions, turn and turn about with fio."""
    total, repeats = (512 * MIB, 3) if quick else (1024 * MIB, 5)
    runs = repeats + 1
    capacity = int(total * runs * len(LOADS) * OVERFILL)
    with running(folder, "--capacity", str(capacity)):
        pass  # makes the card
    _write_once(folder / "card" / "db-0.xkv")
    fio = Fio.prepare(folder, total)
    part = Part(details=[f"overwriting, {total // MIB} MiB a run, {repeats} runs, 1 database, fio by {fio.engine}"])
    with running(folder) as gateway:
        if not gateway.ready["direct"]:
            raise RuntimeError(f"no O_DIRECT in {folder}: give --folder on a disk")
        client = gateway.attach(ring_bytes=RING_BYTES)
        client.ring.array[:] = np.random.default_rng(1).integers(0, 256, client.ring.array.shape[1], np.uint8)
        rig = Rig(gateway, client, fio, total, runs, FIO_JOBS[:1] if quick else FIO_JOBS)
        cpu_s = 0.0
        for load in LOADS:
            for side in SIDES:
                compared = _compare(rig, load, side)
                cpu_s += compared.cpu_s
                _report(part, compared, load, side, total)
        client.close()
    part.figures["cpu_s_per_gb"] = cpu_s / (len(LOADS) * len(SIDES) * repeats * total / 1e9)
    return part


def _compare(rig: Rig, load: Load, side: Side) -> Compared:
    compared_ours: list[float] = []
    theirs: dict[int, list[float]] = {jobs: [] for jobs in rig.fio_jobs}
    cpu_s = 0.0
    for number in range(rig.runs):
        began_s = rig.gateway.cpu_s() + time.process_time()
        ours = side.measure(rig.client, load, rig.total // load.size, number)
        used_s = rig.gateway.cpu_s() + time.process_time() - began_s
        fios = {
            jobs: rig.fio.seconds(side.kind, block=load.size, total=rig.total, depth=load.depth, jobs=jobs)
            for jobs in rig.fio_jobs
        }
        if number:
            cpu_s += used_s
            compared_ours.append(ours)
            for jobs, seconds in fios.items():
                theirs[jobs].append(seconds)
    return Compared(compared_ours, theirs, cpu_s)


def _report(part: Part, compared: Compared, load: Load, side: Side, total: int) -> None:
    jobs, theirs = min(compared.theirs.items(), key=lambda item: median(item[1]))
    ratios = sorted(fio_s / ours_s for ours_s, fio_s in zip(compared.ours, theirs, strict=True))
    part.figures[f"{side.name}_{load.name}_vs_fio"] = median(ratios)
    ours_rate, fio_rate = (total / MIB / median(seconds) for seconds in (compared.ours, theirs))
    part.details.append(
        f"{side.name} {load.size // MIB:2} MiB at depth {load.depth:2}: {ours_rate:5.0f} MiB/s, fio {fio_rate:5.0f} "
        f"({jobs} jobs), CPU {compared.cpu_s / (len(theirs) * total / 1e9):.3f} s/GB; "
        f"ratios {' '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )


def _write_once(path: Path) -> None:
    """Write every slot of a new database: allocated space that was never written is slower, and no steady state."""
    data = aligned(WRITE_BYTES)
    data[:] = np.random.default_rng(2).bytes(WRITE_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        offset, end = DATA_OFFSET, os.lseek(fd, 0, os.SEEK_END)
        while offset < end:
            offset += os.pwrite(fd, data[: end - offset], offset)
    finally:
        os.close(fd)


def _key(load: Load, number: int, index: int) -> ObjectKey:
    return object_key(b"bench-throughput", load.size, number, index)


def _put(client: Client, load: Load, count: int, number: int) -> float:
    """Seconds until every object is confirmed."""
    meter = Meter()
    slots_each = GEOMETRY.fragments(load.size)
    started = time.monotonic()
    for index in range(count):
        meter.wait(index + 1 - load.depth)
        slots = client.store_region.take(slots_each)
        assert slots is not None, "the region holds the queue's depth"
        item = PutObject(_key(load, number, index), load.size, slots, 1, index, False)

        def on_answer(answer: StoredObject) -> None:
            meter.answer(answer.status)

        client.put([item], on_answer)
    meter.wait(count)
    took_s = time.monotonic() - started
    _check(meter, StoreStatus.CONFIRMED)
    return took_s


def _get(client: Client, load: Load, count: int, number: int) -> float:
    """Seconds until every object is in the ring, verified."""
    meter = Meter()
    slots_each = GEOMETRY.fragments(load.size)
    started = time.monotonic()
    for index in range(count):
        meter.wait(index + 1 - load.depth)
        slots = client.load_region.take(slots_each)
        assert slots is not None, "the region holds the queue's depth"

        def on_answer(answer: LoadedObject, slots: list[int] = slots) -> None:
            client.load_region.give(slots)
            meter.answer(answer.status)

        client.get([GetObject(_key(load, number, index), slots, 0)], on_answer)
    meter.wait(count)
    took_s = time.monotonic() - started
    _check(meter, LoadStatus.OK)
    return took_s


def _check(meter: Meter, wanted: int) -> None:
    others = [status for status in meter.statuses if status != wanted]
    if others:
        raise RuntimeError(f"{len(others)} of {len(meter.statuses)} objects were answered {set(others)}")


SIDES: Final = (Side("put", "write", _put), Side("get", "read", _get))

assert max(load.depth * GEOMETRY.fragments(load.size) for load in LOADS) * SLOT_BYTES <= RING_BYTES // 2
