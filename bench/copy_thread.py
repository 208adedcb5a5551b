"""What an object costs our threads' CPU beside the calls into CUDA: with a GPU that does nothing.

Owns: microseconds of CPU for each object of the copy thread and the client's, for the shapes of bench/gpu_copy.py: by
a mover alone, and by a worker whose gateway is a real one, its card in memory. Needs torch, no GPU.
Must not know: vLLM, CUDA.

    python bench/copy_thread.py [--profile "2 MiB"] [--memory /dev/shm]
"""

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from contexts import rank_context
from gateways import MIB, running
from xkv_offload.copy import Bytes, Move, RingSlots
from xkv_offload.device_copy import DeviceMover
from xkv_offload.layout import ObjectLayout, Page
from xkv_offload.mapping import ChunkPart
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_offload.rows import TensorPlace, WavePlan
from xkv_offload.staging_area import WORD_BYTES, Copies, StagingSlot, Work, divide
from xkv_offload.transfer import XkvTransferSpec
from xkv_offload.worker import XkvWorker
from xkv_store.geometry import FRAGMENT_BYTES, SLOT_BYTES, Geometry
from xkv_store.ring import RingUse

LAYERS = 32
STAGING_BYTES = 256 * MIB
JOBS = 40
SHAPES = {
    "2 MiB": (1, 65_536, 160, 32),
    "2 MiB, pages of 4 KiB": (16, 4_096, 160, 32),
    "33.6 MB": (16, 65_536, 16, 3),
}
"""Blocks of an object, bytes of a page, objects of a mover's job, objects of a step."""
STEPS = 15
RING_BYTES = 512 * MIB
WAIT_S_MAX = 60.0


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


def moves_of(ring: Bytes, layout: ObjectLayout, objects: int) -> list[Move]:
    """Objects in slots that are neighbours, their blocks anywhere."""
    bpc, fragments = layout.blocks_per_chunk, Geometry(SLOT_BYTES).fragments(layout.chunk_bytes)
    blocks = np.random.default_rng(0).permutation(objects * bpc).reshape(objects, bpc).tolist()
    return [
        Move(
            ChunkPart(0, 0, 0, tuple(blocks[number])),
            layout,
            RingSlots(ring, list(range(number * fragments, (number + 1) * fragments))),
            0,
            0,
        )
        for number in range(objects)
    ]


def mover_of(page_bytes: int) -> DeviceMover:
    """A mover as an engine has it, of a GPU that does nothing."""
    return DeviceMover(
        device=NoDevice(),
        rows=NoRows(),
        division=divide(staging_bytes=STAGING_BYTES, slot_bytes=SLOT_BYTES),
        tensors=[TensorPlace(number << 32, page_bytes) for number in range(LAYERS)],
        fragment_bytes=FRAGMENT_BYTES,
    )


def alone(name: str, figures: dict[str, float], *, is_profiled: bool) -> None:
    """A mover's own work."""
    bpc, page_bytes, objects, _ = SHAPES[name]
    layout = ObjectLayout(bpc, tuple(Page(number, page_bytes) for number in range(LAYERS)))
    ring = np.empty((objects * Geometry(SLOT_BYTES).fragments(layout.chunk_bytes), SLOT_BYTES), np.uint8)
    mover = mover_of(page_bytes)
    mover.use_ring(ring, [range(len(ring))])
    moves = moves_of(ring, layout, objects)
    job_of(mover, moves, gather=True)
    if is_profiled:
        with cProfile.Profile() as profile:
            for _ in range(JOBS):
                job_of(mover, moves, gather=True)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    for gather in (True, False):
        jobs = [job_of(mover, moves, gather=gather) for _ in range(JOBS)]
        seconds, waves = statistics.median(taken for taken, _ in jobs), jobs[0][1]
        what = f"mover, {'store' if gather else 'load'}, {name}"
        figures[what] = round(1e6 * seconds / objects, 2)
        print(
            f"{what:<40} {1e6 * seconds / objects:7.1f} µs an object, {1e6 * seconds / waves:7.1f} µs a wave of "
            f"{objects / waves:.1f} objects",
            flush=True,
        )


def whole(name: str, figures: dict[str, float], folder: Path) -> None:
    """A worker's and its client's, as they store and load what one step computes."""
    bpc, page_bytes, _, objects = SHAPES[name]
    layout = ObjectLayout(bpc, tuple(Page(number, page_bytes) for number in range(LAYERS)))
    blocks = SimpleNamespace(
        block_ids=np.arange(1, 1 + objects * bpc, dtype=np.int32), group_sizes=[objects * bpc], block_indices=[0]
    )
    capacity = int(1.5 * STEPS * objects * layout.chunk_bytes) + 512 * MIB
    with running(folder, "--capacity", str(capacity)) as gateway:
        mover = mover_of(page_bytes)
        client = gateway.attach(ring_bytes=RING_BYTES, ring_use=RingUse.LEASED)
        context = rank_context(client, mover, layout, load_timeout_s=WAIT_S_MAX)
        worker = XkvWorker(context=context, transfer_result=SimpleNamespace)
        used: dict[tuple[str, str], list[float]] = {}
        for step in range(STEPS):
            random = np.random.default_rng(step)
            spec = XkvTransferSpec(
                namespace=b"bench-the-thread",
                keys=tuple(random.bytes(32) + bytes(4) for _ in range(objects)),
                req_id="bench",
                positions=tuple(range(objects)),
                replace=(False,) * objects,
            )
            for direction, submit in (
                ("store", partial(worker.submit_store, 2 * step, blocks, spec)),
                ("load", partial(worker.submit_load, 2 * step + 1, spec, blocks)),
            ):
                counter = "confirmed_objects" if direction == "store" else "load_objects"
                before, wanted = cpu_of_threads(), PROCESS_COUNTERS[counter] + objects
                submit()
                end = time.monotonic() + WAIT_S_MAX
                ended = 0
                while not ended or PROCESS_COUNTERS[counter] < wanted:
                    assert time.monotonic() < end, PROCESS_COUNTERS
                    time.sleep(0.002)
                    ended += len(worker.get_finished())
                for thread, seconds in cpu_of_threads().items():
                    used.setdefault((direction, thread), []).append(1e6 * (seconds - before.get(thread, 0.0)) / objects)
        assert PROCESS_COUNTERS["worker_errors"] == 0, PROCESS_COUNTERS
        worker.shutdown()
    for (direction, thread), micros in sorted(used.items()):
        what = f"{thread}, {direction}, {name}"
        figures[what] = round(statistics.median(micros[1:]), 1)
        print(f"{what:<40} {figures[what]:7.1f} µs an object", flush=True)


def cpu_of_threads() -> dict[str, float]:
    """Seconds of CPU of this process's Python threads, by name."""
    return {
        thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None
    }


def main() -> None:
    """A line for each shape, direction and thread, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=SHAPES, help="where the time of a mover with this shape goes")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for name in SHAPES:
        alone(name, figures, is_profiled=name == options.profile)
    for name in SHAPES:
        with tempfile.TemporaryDirectory(dir=options.memory, prefix="xkv-bench-") as folder:
            whole(name, figures, Path(folder))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
