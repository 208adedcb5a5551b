"""Puts and gets with the card's databases in memory (tmpfs), against one core that copies memory.

Owns: `put_mem_vs_copy`, `get_mem_vs_copy`: the worse of 2 MiB and 32 MiB objects, one database.
Must not know: how objects are put and got (`transfers`), vLLM.

Checksums are made and verified as ever. Objects of 2 MiB go some in a message, as an engine sends those of a job,
and, for the details, each in one of its own (at another depth, so that the keys differ). The other side copies the
same bytes from one part of memory that was touched before to another, by one thread that calls memcpy for as much as
an object's size at a time; turn and turn about.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from gateways import MIB, running
from report import Part
from transfers import BATCH, RING_BYTES, SIDES, Load, fill

MEMORY: Final = Path("/dev/shm")
OVERFILL: Final = 1.3
LOADS: Final = (
    Load("32m", size=32 * MIB, block=32 * MIB, depth=8, total=512 * MIB),
    Load("2m", size=2 * MIB, block=2 * MIB, depth=32, total=512 * MIB, batch=BATCH),
)
ALONE: Final = Load("2m", size=2 * MIB, block=2 * MIB, depth=16, total=512 * MIB, is_figure=False)
DATABASES: Final = (1, 4)


def run(*, quick: bool) -> Part:
    """Both sizes, on one database and, for the details, on four."""
    part = Part(details=[f"{LOADS[0].total // MIB} MiB a run; the other side: memcpy on one core"])
    copy = Copy(LOADS[0].total)
    runs = 3 if quick else 6
    for databases in DATABASES:
        with tempfile.TemporaryDirectory(dir=MEMORY, prefix="xkv-bench-") as own:
            _card(Path(own), databases, runs, copy, part)
    return part


class Copy:
    """Memory copied by one thread, all of it touched beforehand."""

    def __init__(self, total: int) -> None:
        self._source = np.random.default_rng(5).integers(0, 256, total, np.uint8)
        self._target = np.zeros_like(self._source)

    def seconds(self, step: int) -> float:
        """Seconds for all of it, `step` bytes at a time."""
        began = time.monotonic()
        for at in range(0, len(self._source), step):
            np.copyto(self._target[at : at + step], self._source[at : at + step])
        return time.monotonic() - began


def _card(folder: Path, databases: int, runs: int, copy: Copy, part: Part) -> None:
    capacity = int(sum(load.total for load in (*LOADS, ALONE)) * runs * OVERFILL)
    words = ("--capacity", str(capacity), "--databases", str(databases))
    with running(folder, *words) as gateway:
        gateway.await_memory()
        client = gateway.attach(ring_bytes=RING_BYTES)
        fill(client)
        for load in (*LOADS, ALONE):
            for side in SIDES:
                runs_cpu_s = 0.0
                pairs = []
                for number in range(runs):
                    began_s = gateway.cpu_s() + time.process_time()
                    ours = side.measure(client, load, number)
                    runs_cpu_s += gateway.cpu_s() + time.process_time() - began_s
                    pairs.append((ours, copy.seconds(load.block)))
                del pairs[0]
                cpu_s = runs_cpu_s / (runs * load.total / 1e9)
                ratios = sorted(copied / ours for ours, copied in pairs)
                if databases == 1 and load.is_figure:
                    part.worst(f"{side.name}_mem_vs_copy", median(ratios))
                rates = [load.total / 1e9 / median(column) for column in zip(*pairs, strict=True)]
                part.details.append(
                    f"{side.name} {load.block // MIB:2} MiB at depth {load.depth:2}, {load.batch} in a message, "
                    f"{databases} databases: {rates[0]:.1f} GB/s, copy {rates[1]:.1f}, CPU {cpu_s:.2f} s/GB; "
                    f"ratios {' '.join(f'{ratio:.2f}' for ratio in ratios)} (median {median(ratios):.2f})"
                )
        client.close()
