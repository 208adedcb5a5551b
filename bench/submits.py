"""What `submit_store` and `submit_load` keep vLLM's thread for, on the real worker with a real gateway.

Owns: `submit_us`: the worst median of both, for jobs of one chunk and of several.
Must not know: how the worker does its work.

The pages are the host's (as on a CPU), so that the copies are the copy thread's, which takes the interpreter's lock
from the submitting thread as it would in an engine. Between two submits the thread asks for finished jobs and rests,
as a step does.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import numpy as np

from contexts import rank_context
from gateways import MIB, running
from report import Part, at_percent, percentiles
from xkv_offload.copy import HostMover
from xkv_offload.layout import ObjectLayout, Page
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_offload.transfer import XkvTransferSpec
from xkv_offload.worker import XkvWorker
from xkv_store.ring import RingUse

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_store.client import Client

LAYERS: Final = 8
PAGE_BYTES: Final = 16_384
BLOCKS_PER_CHUNK: Final = 16  # 2 MiB a chunk
BLOCKS: Final = 1_024
JOBS: Final = {1: 300, 8: 100, 32: 40}  # by the chunks of each: all of them together do not fill the card
JOBS_QUICK: Final = {1: 60, 8: 20, 32: 20}
RING_BYTES: Final = 512 * MIB
CAPACITY: Final = "8GiB"
STEP_S: Final = 0.005
WAIT_S_MAX: Final = 60.0
NAMESPACE: Final = b"bench-the-submit"


def run(folder: Path, *, quick: bool) -> Part:
    """Stores and loads in turn, jobs of each size."""
    part = Part()
    with running(folder, "--capacity", CAPACITY) as gateway, ExitStack() as own:
        worker = _worker(gateway.attach(ring_bytes=RING_BYTES, ring_use=RingUse.LEASED))
        own.callback(worker.shutdown)
        for chunks, jobs in (JOBS_QUICK if quick else JOBS).items():
            times = _submits(worker, chunks, jobs)
            for name, micros in times.items():
                part.worst("submit_us", at_percent(micros, 50))
                part.details.append(f"{name}, {chunks} chunks of 2 MiB: {percentiles(micros, 'µs')}")
    return part


def _worker(client: Client) -> XkvWorker:
    rows = [np.ones((BLOCKS, PAGE_BYTES), np.uint8) for _ in range(LAYERS)]
    layout = ObjectLayout(BLOCKS_PER_CHUNK, tuple(Page(number, PAGE_BYTES) for number in range(LAYERS)))
    context = rank_context(client, HostMover(rows), layout, load_timeout_s=WAIT_S_MAX)
    return XkvWorker(context=context, transfer_result=SimpleNamespace)


def _submits(worker: XkvWorker, chunks: int, jobs: int) -> dict[str, list[float]]:
    """Microseconds of each submit; a load follows the store of the same chunks."""
    times: dict[str, list[float]] = {"submit_store": [], "submit_load": []}
    count = chunks * BLOCKS_PER_CHUNK
    blocks = SimpleNamespace(
        block_ids=np.arange(1, count + 1, dtype=np.int32), group_sizes=[count], block_indices=[0]
    )  # block 0 is nobody's
    before = dict(PROCESS_COUNTERS)
    for job in range(jobs):
        spec = _spec(chunks, job)
        began = time.perf_counter()
        worker.submit_store(2 * job, blocks, spec)
        times["submit_store"].append((time.perf_counter() - began) * 1e6)
        _steps(worker, 2 * job, confirmed=before["confirmed_objects"] + (job + 1) * chunks)
        began = time.perf_counter()
        worker.submit_load(2 * job + 1, spec, blocks)
        times["submit_load"].append((time.perf_counter() - began) * 1e6)
        _steps(worker, 2 * job + 1)
    moved = [PROCESS_COUNTERS[name] - before[name] for name in ("confirmed_objects", "load_objects", "worker_errors")]
    if moved != [jobs * chunks, jobs * chunks, 0]:
        raise RuntimeError(f"{moved} objects were stored, were loaded, and errors: of {jobs * chunks} each")
    return times


def _steps(worker: XkvWorker, job: int, *, confirmed: int = 0) -> None:
    """Steps until the job is reported, and so many objects have been confirmed in all."""
    end = time.monotonic() + WAIT_S_MAX
    finished: list[int] = []
    while job not in finished or PROCESS_COUNTERS["confirmed_objects"] < confirmed:
        if time.monotonic() > end:
            raise TimeoutError(f"job {job} was not reported")
        time.sleep(STEP_S)
        finished += [result.job_id for result in worker.get_finished()]


def _spec(chunks: int, number: int) -> XkvTransferSpec:
    random = np.random.default_rng((chunks, number))
    keys = tuple(random.bytes(32) + bytes(4) for _ in range(chunks))
    return XkvTransferSpec(
        namespace=NAMESPACE,
        keys=keys,
        req_id="bench",
        positions=tuple(range(chunks)),
        replace=(False,) * chunks,
    )
