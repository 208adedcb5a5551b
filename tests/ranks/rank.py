"""One rank in a process of its own: `python -m ranks.rank PLACE`. It replays jobs until its time is over.

Owns: the order and pace of its jobs, and holding every byte of every page against what was stored.
Must not know: other ranks, or how a load comes about. It tells of itself in lines of JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ranks import broken
from ranks.objects import (
    BLOCKS_PER_CHUNK,
    FRAGMENT_BYTES,
    LAYOUT,
    MISSING,
    NAMESPACE,
    OBJECTS,
    PAGE_BYTES,
    content,
    is_held,
    offload_key,
)
from ranks.place import Place
from xkv_offload.copy import HostMover
from xkv_offload.failures import FailureLog, Plan
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_offload.rank import RankContext
from xkv_offload.transfer import XkvTransferSpec
from xkv_offload.worker import XkvWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_offload.copy import Move

JOBS_AT_ONCE: Final = 4
CHUNKS_MAX: Final = 6  # of a job
JOBS_PER_ROUND: Final = 48
POISON: Final = 0xA5
PAUSE_S_MAX: Final = 0.01
STALLS: Final = 0.01  # of all jobs begin after a stall
STALL_S: Final = (0.5, 2.5)
COPY_S_MAX: Final = 0.003  # a copy to a GPU takes its time, and slots are held for as long
CANARY_COPY_S_MAX: Final = 0.03  # so that a canary finds what is broken in a short run, too
STUCK_S: Final = 90.0
LOAD_TIMEOUT_S: Final = 60.0
TELL_S: Final = 0.5


@dataclass
class Blocks:
    """The part of vLLM's GPULoadStoreSpec that a worker reads."""

    block_ids: Any
    group_sizes: Sequence[int]
    block_indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class Result:
    """The part of vLLM's TransferResult that is looked at."""

    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float
    transfer_type: Any = None


@dataclass(slots=True)
class Report:
    """What has happened since the last line."""

    jobs: int = 0
    wrong: int = 0
    stuck: int = 0
    timeouts: int = 0
    rereads: int = 0
    misses: int = 0
    loaded: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class SlowMover(HostMover):
    """Copies that take as long as one to a GPU may."""

    def __init__(self, rows: Sequence[Any], pace: random.Random, copy_s_max: float) -> None:
        super().__init__(rows)
        self._pace = pace
        self._copy_s_max = copy_s_max

    def scatter(self, move: Move) -> None:
        """See Mover."""
        time.sleep(self._pace.random() * self._copy_s_max)
        super().scatter(move)


@dataclass(slots=True)
class Running:
    """One job: its objects, and where the first block of each is."""

    numbers: list[int]
    places: list[int]
    since: float


class Rank:
    """The worker and what is held against it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._pace = random.Random(f"{place.seed}/{place.rank}/{place.life}")
        chunks = JOBS_AT_ONCE * CHUNKS_MAX
        self._pages = np.full((1 + chunks * BLOCKS_PER_CHUNK, PAGE_BYTES), POISON, np.uint8)
        self._free = [1 + number * BLOCKS_PER_CHUNK for number in range(chunks)]  # block 0 is vLLM's null block
        self._running: dict[int, Running] = {}
        self._report = Report()
        self._told = time.monotonic()
        self._counted = dict(PROCESS_COUNTERS)
        self._next = 0
        self._failed: set[int] = set()
        self._worker = XkvWorker(
            context=RankContext(
                client=place.attach(),
                rank=place.rank,
                object_rank=0,
                writes=place.rank == 0,
                blocks_per_chunk=BLOCKS_PER_CHUNK,
                fragment_bytes=FRAGMENT_BYTES,
                layouts=[LAYOUT],
                lone_last_block=[False],
                positions={0: 0},
                mover=SlowMover([self._pages], self._pace, CANARY_COPY_S_MAX if place.canary else COPY_S_MAX),
                load_timeout_s=LOAD_TIMEOUT_S,
                failure_plan=Plan("block_errors", ""),
                failures=FailureLog(),
            ),
            transfer_result=Result,
        )

    def replay(self) -> None:
        """Round after round: the same jobs on every rank, on each in another order."""
        number = 0
        self._tell()  # that it is here
        while not self._is_over():
            jobs = jobs_of(self._place.seed, number)
            self._pace.shuffle(jobs)
            for job in jobs:
                if self._is_over():
                    break
                self._pause()
                while len(self._running) >= JOBS_AT_ONCE:
                    self._look()
                self._begin(job)
            number += 1
        while self._running:
            self._look()
        self._worker.shutdown()
        self._tell()

    def _is_over(self) -> bool:
        return Path(self._place.end).exists()

    def _pause(self) -> None:
        pace = self._pace
        time.sleep(pace.uniform(*STALL_S) if pace.random() < STALLS else pace.random() * PAUSE_S_MAX)

    def _begin(self, numbers: list[int]) -> None:
        places = [self._free.pop(self._pace.randrange(len(self._free))) for _ in numbers]
        blocks = [block for first in places for block in range(first, first + BLOCKS_PER_CHUNK)]
        self._pages[blocks] = POISON
        spec = XkvTransferSpec(namespace=NAMESPACE, keys=tuple(map(offload_key, numbers)), req_id="r")
        self._next += 1
        self._running[self._next] = Running(numbers, places, time.monotonic())
        self._worker.submit_load(self._next, spec, Blocks(np.array(blocks, np.int32), [len(blocks)], [0]))

    def _look(self) -> None:
        results = self._worker.get_finished()
        self._failed |= self._worker.context.failures.take()
        for result in results:
            self._check(self._running.pop(result.job_id))
        if not results:
            time.sleep(0.001)
        for number, job in list(self._running.items()):
            if time.monotonic() - job.since > STUCK_S:
                self._report.stuck += 1
                self._complain(f"job {number} of objects {job.numbers} was not reported within {STUCK_S:.0f} s")
                del self._running[number]  # its pages are not used again
        if time.monotonic() - self._told > TELL_S:
            self._tell()

    def _check(self, job: Running) -> None:
        self._report.jobs += 1
        for number, first in zip(job.numbers, job.places, strict=True):
            blocks = range(first, first + BLOCKS_PER_CHUNK)
            failed = self._failed & set(blocks)
            self._failed -= failed
            if not is_held(number):
                self._report.misses += 1
                if len(failed) != BLOCKS_PER_CHUNK:
                    self._wrong(f"object {number} is not on the card, and was reported as loaded")
            elif failed:
                self._wrong(f"object {number} is on the card, and its load failed")
            elif not np.array_equal(self._pages[first : first + BLOCKS_PER_CHUNK], content(number)):
                self._wrong(f"the pages of object {number} hold something else")
            else:
                self._report.loaded.append(number)
            self._free.append(first)

    def _wrong(self, what: str) -> None:
        self._report.wrong += 1
        self._complain(what)

    def _complain(self, what: str) -> None:
        self._report.reasons.append(f"rank {self._place.rank}: {what}")

    def _tell(self) -> None:
        now = dict(PROCESS_COUNTERS)
        report = self._report
        report.timeouts = now["load_timeouts"] - self._counted["load_timeouts"]
        report.rereads = now["load_rereads"] - self._counted["load_rereads"]
        errors = now["worker_errors"] - self._counted["worker_errors"]
        if errors:
            self._wrong(f"{errors} errors of the worker's own")
        report.loaded = sorted(set(report.loaded))
        print(json.dumps(asdict(report)), flush=True)
        self._report, self._counted, self._told = Report(), now, time.monotonic()


def jobs_of(seed: int, number: int) -> list[list[int]]:
    """The jobs of a round: the same for every rank. Some ask for what is not on the card."""
    draw = random.Random(f"{seed}/{number}")
    everything = OBJECTS + MISSING
    return [draw.sample(range(everything), draw.randint(1, CHUNKS_MAX)) for _ in range(JOBS_PER_ROUND)]


def main(arguments: list[str]) -> int:
    """Be the rank of that place."""
    place = Place.of(arguments[0])
    if place.canary:
        broken.break_rank()
    Rank(place).replay()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
