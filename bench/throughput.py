"""Puts and gets through a real gateway against fio: same file system, bytes, block size, O_DIRECT, regime.

Owns: `put_*_vs_fio`, `get_*_vs_fio`, `small_*_vs_fio`, `cpu_s_per_gb`, and which loads are measured on which cards.
Must not know: how objects are put and got (`transfers`), vLLM.

The regime is overwriting on both sides: every byte of fio's file and of the card's databases has been written once
before, as on a card that has been full. Puts end when they are confirmed, gets when they are verified.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from fio import Fio
from gateways import MIB, BenchGateway, running
from report import Part
from transfers import BATCH, RING_BYTES, SIDES, Load, Side, fill
from xkv_store.database import aligned
from xkv_store.geometry import DATA_OFFSET, FRAGMENT_BYTES, SLOT_BYTES

if TYPE_CHECKING:
    from xkv_store.client import Client

OVERFILL: Final = 1.3  # the card over what is put: it evicts ahead, which is not measured here
WRITE_BYTES: Final = 8 * MIB
FIO_JOBS: Final = (1, 4)  # the queue's depth in one thread, or shared by four as in the gateway: the better counts


@dataclass(frozen=True, slots=True)
class Group:
    """Loads that share a card of so many databases; those with a key give a figure."""

    databases: int
    loads: tuple[Load, ...]
    repeats: int
    counts_cpu: bool = False  # in `cpu_s_per_gb`

    @property
    def has_figures(self) -> bool:
        """Whether it is not for the details alone."""
        return any(load.is_figure for load in self.loads)


LARGE: Final = Load("32m", size=32 * MIB, block=32 * MIB, depth=8, total=1024 * MIB)
MEDIUM: Final = Load("2m", size=2 * MIB, block=2 * MIB, depth=32, total=1024 * MIB)
SMALL: Final = Load("small", size=FRAGMENT_BYTES, block=SLOT_BYTES, depth=32, total=10_000 * SLOT_BYTES, batch=BATCH)
HALF: Final = 512 * MIB  # a run, where only the details have it
FIGURES_S_MAX: Final = 150.0  # where the figures alone take longer, the machine is too slow for details besides
GROUPS: Final = (
    Group(1, (LARGE,), 5, counts_cpu=True),
    Group(1, (MEDIUM,), 5, counts_cpu=True),
    Group(1, (SMALL,), 3),
    Group(
        1, (LARGE.other(depth=1, total=HALF), MEDIUM.other(depth=1, total=HALF), MEDIUM.other(depth=8, total=HALF)), 2
    ),
    Group(4, (LARGE.other(total=HALF), MEDIUM.other(total=HALF)), 2),
)
QUICK: Final = (Group(1, (LARGE, MEDIUM), 3, counts_cpu=True), Group(1, (SMALL,), 1))


@dataclass(frozen=True, slots=True)
class Rig:
    """What every comparison on one card has in common; the first of `runs` is the warm-up."""

    gateway: BenchGateway
    client: Client
    fio: Fio
    runs: int
    fio_jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """One load in one direction: each run's seconds, ours and fio's by number of jobs, and our CPU seconds.

    `huge`: of fio with its buffers in huge pages, in one thread.
    """

    ours: list[float]
    theirs: dict[int, list[float]]
    huge: list[float]
    cpu_s: float


def run(folder: Path, *, quick: bool) -> Part:
    """All loads, both directions, turn and turn about with fio."""
    groups = QUICK if quick else GROUPS
    fio = Fio.prepare(folder, max(load.total for group in groups for load in group.loads))
    part = Part(details=[f"overwriting, fio by {fio.engine}"])
    cpu_s, moved = 0.0, 0
    began_s = time.monotonic()
    for group in groups:
        if not group.has_figures and time.monotonic() - began_s > FIGURES_S_MAX:
            sizes = ", ".join(f"{load.block >> 10} KiB at depth {load.depth}" for load in group.loads)
            part.details.append(f"left out, as this machine is slow: {group.databases} databases, {sizes}")
            continue
        with tempfile.TemporaryDirectory(dir=folder) as own:
            compared = _group(Path(own), group, fio, FIO_JOBS[:1] if quick else FIO_JOBS, part)
        if group.counts_cpu:
            cpu_s += sum(one.cpu_s for one in compared)
            moved += len(SIDES) * group.repeats * sum(load.total for load in group.loads)
    part.figures["cpu_s_per_gb"] = cpu_s / (moved / 1e9)
    return part


def _group(folder: Path, group: Group, fio: Fio, fio_jobs: tuple[int, ...], part: Part) -> list[Compared]:
    capacity = int(sum(load.total for load in group.loads) * (group.repeats + 1) * OVERFILL)
    with running(folder, "--capacity", str(capacity), "--databases", str(group.databases)):
        pass  # makes the card
    for number in range(group.databases):
        _write_once(folder / "card" / f"db-{number}.xkv")
    found = []
    with running(folder) as gateway:
        if not gateway.ready["direct"]:
            raise RuntimeError(f"no O_DIRECT in {folder}: give --folder on a disk")
        client = gateway.attach(ring_bytes=RING_BYTES)
        fill(client)
        rig = Rig(gateway, client, fio, group.repeats + 1, fio_jobs)
        for load in group.loads:
            for side in SIDES:
                compared = _compare(rig, load, side)
                found.append(compared)
                _report(part, compared, load, side, group.databases)
        client.close()
    return found


def _compare(rig: Rig, load: Load, side: Side) -> Compared:
    compared_ours: list[float] = []
    theirs: dict[int, list[float]] = {jobs: [] for jobs in rig.fio_jobs}
    huge: list[float] = []
    cpu_s = 0.0
    for number in range(rig.runs):
        began_s = rig.gateway.cpu_s() + time.process_time()
        ours = side.measure(rig.client, load, number)
        used_s = rig.gateway.cpu_s() + time.process_time() - began_s
        fio_s = partial(rig.fio.seconds, side.kind, block=load.block, total=load.total, depth=load.depth)
        fios = {jobs: fio_s(jobs=jobs) for jobs in rig.fio_jobs}
        with_huge_s = fio_s(jobs=1, huge_pages=True)
        if number:
            cpu_s += used_s
            compared_ours.append(ours)
            huge.append(with_huge_s)
            for jobs, seconds in fios.items():
                theirs[jobs].append(seconds)
    return Compared(compared_ours, theirs, huge, cpu_s)


def _report(part: Part, compared: Compared, load: Load, side: Side, databases: int) -> None:
    jobs, theirs = min(compared.theirs.items(), key=lambda item: median(item[1]))
    ratios = sorted(fio_s / ours_s for ours_s, fio_s in zip(compared.ours, theirs, strict=True))
    of_huge = [fio_s / ours_s for ours_s, fio_s in zip(compared.ours, compared.huge, strict=True)]
    if load.is_figure:
        name = f"small_{side.name}" if load is SMALL else f"{side.name}_{load.name}"
        part.figures[f"{name}_vs_fio"] = median(ratios)
    ours_rate, fio_rate = (load.total / MIB / median(seconds) for seconds in (compared.ours, theirs))
    part.details.append(
        f"{side.name} {load.block >> 10:5} KiB at depth {load.depth:2}, {databases} databases: {ours_rate:5.0f} MiB/s, "
        f"fio {fio_rate:5.0f} ({jobs} jobs), CPU {compared.cpu_s / (len(theirs) * load.total / 1e9):.3f} s/GB; "
        f"ratios {' '.join(f'{ratio:.2f}' for ratio in ratios)} (median {median(ratios):.2f}); fio in huge pages "
        f"{load.total / MIB / median(compared.huge):5.0f}, ours of it {median(of_huge):.2f}"
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
