"""What a copy costs the copy thread's CPU beside the calls into CUDA: a mover whose GPU does nothing.

Owns: microseconds of CPU for each object and for each wave, for the shapes of bench/gpu_copy.py. Needs torch, no GPU.
Must not know: vLLM, CUDA, the gateway.

    python bench/copy_thread.py [--profile "2 MiB"]
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from xkv_offload.copy import Bytes, Move, RingSlots
from xkv_offload.device_copy import DeviceMover
from xkv_offload.layout import ObjectLayout, Page
from xkv_offload.mapping import ChunkPart
from xkv_offload.rows import TensorPlace, WavePlan
from xkv_offload.staging_area import WORD_BYTES, Copies, StagingSlot, Work, divide
from xkv_store.geometry import FRAGMENT_BYTES, SLOT_BYTES, Geometry

MIB = 1 << 20
LAYERS = 32
STAGING_BYTES = 256 * MIB
JOBS = 40
SHAPES = {"2 MiB": (1, 65_536, 160), "2 MiB, pages of 4 KiB": (16, 4_096, 160), "33.6 MB": (16, 65_536, 16)}
"""Blocks of an object, bytes of a page, objects of a job."""


class NoStream:
    """Nothing waits for anything."""

    def wait_event(self, event: object) -> None:
        """At once."""

    def synchronize(self) -> None:
        """At once."""


class NoEvent:
    """Reached before it is recorded; `waves` of them were."""

    waves = 0

    def record(self, stream: object) -> None:  # noqa: ARG002 - as Event has it
        """One of a wave's two."""
        NoEvent.waves += 1

    def query(self) -> bool:
        """It is."""
        return True

    def synchronize(self) -> None:
        """At once."""


class NoDevice:
    """A GPU that calls no work and copies nothing."""

    def zeros(self, size_bytes: int) -> Any:
        """Memory that nobody touches."""
        return torch.empty(size_bytes, dtype=torch.int8)

    def pinned_words(self, count: int) -> Any:
        """Plans are written in earnest."""
        return torch.zeros(count, dtype=torch.int64)

    def host_bytes(self, array: Bytes) -> Any:
        """As CudaDevice's."""
        return torch.from_numpy(array.reshape(-1).view(np.int8))

    def stream(self, *, urgent: bool) -> NoStream:  # noqa: ARG002 - as Device has it
        """One that does nothing."""
        return NoStream()

    def event(self) -> NoEvent:
        """One that is always reached."""
        return NoEvent()

    def mark(self) -> object:
        """As event."""
        return NoEvent()

    def enqueue(self, stream: object, work: Work) -> None:
        """Forget the work."""

    def copy(self, stream: object, copies: Sequence[Copies], *, into_device: bool) -> None:
        """Forget the copies."""

    def await_all(self) -> None:
        """At once."""

    def register(self, parts: Sequence[Bytes]) -> None:
        """The ring stays as it is."""

    def unregister(self) -> None:
        """The ring stays as it is."""


class NoRows:
    """The plan is written, as Triton's rows write it, and nothing is launched."""

    def prepare(self, plan: WavePlan, slot: StagingSlot, *, into_pages: bool) -> tuple[int, Work]:  # noqa: ARG002
        """See RowCopier."""
        written = plan.write(slot.host_words, staging_address=slot.address, slot_bytes=slot.slot_bytes)
        return written.words * WORD_BYTES, lambda: None


def job_of(mover: DeviceMover, moves: Sequence[Move], *, gather: bool) -> tuple[float, int]:
    """Seconds of CPU, and waves."""
    ends: list[Exception | None] = []
    start = mover.start_gather if gather else mover.start_scatter
    NoEvent.waves = 0
    began = time.thread_time()
    mark = mover.ready_mark()
    for move in moves:
        start(move, mark, ends.append)
    while mover.advance():
        pass
    taken = time.thread_time() - began
    assert ends == [None] * len(moves), ends
    return taken, NoEvent.waves // 2


def main() -> None:
    """A line for each shape and direction, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=SHAPES, help="where the time of this shape's stores goes")
    profiled = parser.parse_args().profile
    figures = {}
    for name, (bpc, page_bytes, objects) in SHAPES.items():
        layout = ObjectLayout(bpc, tuple(Page(number, page_bytes) for number in range(LAYERS)))
        fragments = Geometry(SLOT_BYTES).fragments(layout.chunk_bytes)
        ring = np.empty((objects * fragments, SLOT_BYTES), np.uint8)
        mover = DeviceMover(
            device=NoDevice(),
            rows=NoRows(),
            division=divide(staging_bytes=STAGING_BYTES, slot_bytes=SLOT_BYTES),
            tensors=[TensorPlace(number << 32, page_bytes) for number in range(LAYERS)],
            fragment_bytes=FRAGMENT_BYTES,
        )
        mover.use_ring(ring, [range(len(ring))])
        blocks = np.random.default_rng(0).permutation(objects * bpc).reshape(objects, bpc).tolist()
        moves = [
            Move(
                ChunkPart(0, 0, 0, tuple(blocks[number])),
                layout,
                RingSlots(ring, list(range(number * fragments, (number + 1) * fragments))),
                0,
                0,
            )
            for number in range(objects)
        ]
        job_of(mover, moves, gather=True)
        if name == profiled:
            with cProfile.Profile() as profile:
                for _ in range(JOBS):
                    job_of(mover, moves, gather=True)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            return
        for gather in (True, False):
            jobs = [job_of(mover, moves, gather=gather) for _ in range(JOBS)]
            seconds, waves = statistics.median(taken for taken, _ in jobs), jobs[0][1]
            direction = "store" if gather else "load"
            figures[f"{direction}, {name}"] = round(1e6 * seconds / objects, 2)
            print(
                f"{direction}, {name:<24} {1e6 * seconds / objects:7.1f} µs an object, {1e6 * seconds / waves:7.1f} µs "
                f"a wave of {objects / waves:.1f} objects"
            )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
