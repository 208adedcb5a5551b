"""What one GPU's memory and link can do, whatever we do with them: the figures that others are compared with.

Owns: figures and how they are shown, ceilings by plain copies and by the driver's batches.
Must not know: xkv's movers, jobs, vLLM.
"""

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from xkv_offload import cuda_batch
from xkv_offload.cuda_batch import BatchedCopies
from xkv_store.geometry import SLOT_BYTES

GB = 1e9
MIB = 1 << 20
JOB_BYTES = 1_000_000_000
REPEATS = 7
WAVE_BYTES = 31 * MIB  # of a staging slot, as 256 MiB are divided


@dataclass
class Figures:
    """What was measured, and the lines of the table."""

    values: dict[str, float] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)

    def add(self, key: str, what: str, value: float, text: str) -> None:
        """Keep a figure and show it."""
        self.values[key] = value
        self.lines.append((what, text))
        print(f"{what:<64} {text}", flush=True)


def seconds_on_gpu(work: Callable[[], None], repeats: int = REPEATS) -> float:
    """The median of some runs, by events, after one to warm up."""
    work()
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1_000)
    return float(statistics.median(taken))


def _copies_alone(source: Any, target: Any, size: int) -> float:
    """Bytes a second of copies of this size, one after the other, each of other bytes; no launch between them."""
    places = [slice(at, at + size) for at in range(0, len(source), size)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for place in places:
            target[place].copy_(source[place])
    return len(source) / seconds_on_gpu(graph.replay)


def ceilings(figures: Figures, ring: Any) -> None:
    """Device to device (bytes copied, so half the traffic); the registered ring in copies of some sizes, one by one."""
    source = torch.randint(-128, 127, (2 << 30,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    rate = len(source) / seconds_on_gpu(lambda: target.copy_(source)) / GB
    figures.add("d2d", "device to device, 2 GiB", rate, f"{rate:,.0f} GB/s")
    for size in (32 * MIB, 128 * MIB):
        rate = _copies_alone(source, target, size) / GB
        figures.add(f"d2d_{size // MIB}m", f"device to device, copies of {size // MIB} MiB", rate, f"{rate:,.0f} GB/s")
    for size, pitch in (
        (256 * MIB, 256 * MIB),
        (32 * MIB, 32 * MIB),
        (8 * MIB, 33 * SLOT_BYTES),
        (2 * MIB, 9 * SLOT_BYTES),
    ):
        count = JOB_BYTES // size + 1
        places = [slice(number * pitch, number * pitch + size) for number in range(count)]

        def out(places: Sequence[slice] = places) -> None:
            for place in places:
                ring[place].copy_(source[place], non_blocking=True)

        def back(places: Sequence[slice] = places) -> None:
            for place in places:
                target[place].copy_(ring[place], non_blocking=True)

        for name, key, work in (("device to ring", "out", out), ("ring to device", "back", back)):
            rate = count * size / seconds_on_gpu(work) / GB
            figures.add(f"{key}_{size // MIB}m", f"{name}, copies of {size // MIB} MiB", rate, f"{rate:.1f} GB/s")


def batches(figures: Figures, ring: Any) -> None:
    """The same copies by the driver's batches, a wave's in one call; with the hint to leave multiprocessors alone (as
    waves are copied) and without.
    """
    device = torch.empty(2 * JOB_BYTES, dtype=torch.int8, device="cuda")
    stream = torch.cuda.Stream()
    for flags, hint in ((cuda_batch.BESIDE_KERNELS, ""), (0, ", without the hint")):
        made = BatchedCopies(ctypes.PyDLL(cuda_batch.LIBRARY), flags=flags)
        for size, pitch in ((32 * MIB, 32 * MIB), (8 * MIB, 33 * SLOT_BYTES), (2 * MIB, 9 * SLOT_BYTES)):
            count = JOB_BYTES // size + 1
            for name, key, into, source in (
                ("device to ring", "out", ring, device),
                ("ring to device", "back", device, ring),
            ):
                places = range(0, count * pitch, pitch)
                work = partial(copy_in_batches, made, stream, into=into, source=source, places=places, size=size)
                with torch.cuda.stream(stream):
                    rate = count * size / seconds_on_gpu(work) / GB
                ratio = rate / figures.values[f"{key}_256m"]
                figures.add(
                    f"batch_{key}_{size // MIB}m_{flags}",
                    f"{name}, batches of {size // MIB} MiB{hint}",
                    ratio,
                    f"{ratio:.3f} of pinned ({rate:.1f} GB/s)",
                )


def copy_in_batches(
    made: BatchedCopies, stream: Any, *, into: Any, source: Any, places: Sequence[int], size: int
) -> None:
    """As many copies in a call as a wave has."""
    at_once = max(1, WAVE_BYTES // size)
    for first in range(0, len(places), at_once):
        part = places[first : first + at_once]
        to, at = into.data_ptr(), source.data_ptr()
        made.copy(stream.cuda_stream, [to + n for n in part], [at + n for n in part], [size] * len(part))
