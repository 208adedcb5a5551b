"""The loads of one rank.

Owns: from planned chunks to leases: the rank's share of the load region (waiting in order where none of it is left),
the lease, scatter on the copy thread, deadlines. A failed object is denied before its load is reported.
Must not know: vLLM, how a failure is told to it.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from xkv_store.client import Leased, LeaseObject
from xkv_store.fragment import hold
from xkv_store.key import ObjectKey
from xkv_store.wire import LoadStatus

from .copy import Move
from .jobs import CopyQueue, Job, Plan, Priority
from .layout import fragment_range
from .mapping import ChunkPart
from .rank import RankContext
from .stores import ObjectDone
from .transfer import StagedObject, XkvTransferSpec

logger = logging.getLogger(__name__)


class LostSlotsError(Exception):
    """A leased slot holds something else: an error of ours, and no page is served for it."""


@dataclass(slots=True)
class _Fetch:
    """One object of a load, from its submission to its last byte.

    `base`: the sub-block that the object's bytes are taken to begin with (see `Loads._base`). `mark`: before it, vLLM's
    own kernels may still write what the pages held for another request. `share`: how many slots it has of the rank's
    share. `leased`: where it lies.
    """

    job: Job
    part: ChunkPart
    key: ObjectKey
    base: int
    mark: object
    share: int = 0
    leased: Leased | None = None
    settled: bool = False


class Loads:
    """Leases of one rank. `submit`, `expire` and `give_up` run on vLLM's thread."""

    def __init__(self, context: RankContext, queue: CopyQueue, lock: threading.RLock, done: ObjectDone) -> None:
        self._context = context
        self._queue = queue
        self._lock = lock
        self._done = done
        self._waiting: deque[_Fetch] = deque()
        self._open: dict[int, list[_Fetch]] = {}
        self._scattered_had: list[tuple[int, Leased | None]] = []
        self._feeding = False

    def submit(self, job: Job, plan: Plan, spec: XkvTransferSpec, mark: object, blocks: npt.NDArray[np.int64]) -> None:
        """Fetch the objects of `plan` in order, as the rank's share has room; copy those that are staged already.

        `blocks`: all that the job is to fill; they have failed where there is no plan. The copy thread does it: vLLM's
        neither goes through the objects one by one nor waits for a socket.
        """
        begin = partial(self._begin, job, plan, spec, mark, blocks)
        if not self._queue.push(Priority.LOAD, job.job_id, begin):
            begin()

    def _begin(self, job: Job, plan: Plan, spec: XkvTransferSpec, mark: object, blocks: npt.NDArray[np.int64]) -> None:
        object_key = self._context.object_key
        try:
            found = [
                _Fetch(job, part, object_key(spec.namespace, spec.keys[part.key]), self._base(part), mark)
                for part in plan()
            ]
            staged = [spec.staged[fetch.part.key] if spec.staged else () for fetch in found]
        except Exception:
            self._done(job, 0, blocks.tolist())
            raise
        with self._lock:
            job.outstanding += len(found)
        self._done(job, 0)  # the plan is made
        fetches = []
        for fetch, own in zip(found, staged, strict=True):
            if own:
                self._copy_staged(fetch, own[self._context.object_rank])
            else:
                fetches.append(fetch)
        if not fetches:
            return
        with self._lock:
            self._open[job.job_id] = fetches
            self._waiting.extend(fetches)
            if job.cancelled:  # it was given up before it began
                self.give_up([job])
        self._feed()

    def _copy_staged(self, fetch: _Fetch, own: StagedObject) -> None:
        """Copy a verified object out of the ring. The slots are the scheduler's, until the job is over."""
        if own.length != self._length(fetch):
            fetch.base = 0
        copy = partial(self._scatter_staged, fetch, own)
        if own.length != self._length(fetch) or not self._queue.push(Priority.LOAD, fetch.job.job_id, copy):
            self._fail_staged(fetch)

    def _scatter_staged(self, fetch: _Fetch, own: StagedObject) -> None:
        """On the copy thread: begin to copy one object, if it is still there; it must be there after that, too."""
        context = self._context
        if fetch.job.cancelled or not self._holds(fetch, own, 0):
            self._fail_staged(fetch)
            return
        fragments = self._fragments(fetch)
        move = Move(
            fetch.part,
            context.layouts[fetch.part.group],
            context.slots(own.slots[fragments.start : fragments.stop]),
            fragments.start,
            fetch.base,
        )
        context.mover.start_scatter(move, fetch.mark, partial(self._staged_scattered, fetch, own))

    def _staged_scattered(self, fetch: _Fetch, own: StagedObject, error: Exception | None) -> None:
        """On the copy thread: the pages hold what the slots held, if those still are the object's."""
        self._count_error(error)
        if error is not None or not self._holds(fetch, own, 0):
            self._fail_staged(fetch)
            return
        self._succeed(fetch)

    def _succeed(self, fetch: _Fetch) -> None:
        size = len(fetch.part.blocks) * self._context.layouts[fetch.part.group].block_bytes
        self._context.count("load_objects")
        self._context.count("load_bytes", size)
        self._done(fetch.job, size)

    def _holds(self, fetch: _Fetch, own: StagedObject | Leased, first_fragment: int) -> bool:
        """Whether the ring still holds what the gateway has proved."""
        ring = self._context.client.ring.array
        return hold(ring, own.slots, fetch.key.encode(), own.generation, first_fragment)

    def _fail_staged(self, fetch: _Fetch) -> None:
        """A verified object that is not there is an error of ours; wrong pages are not served for it."""
        self._context.count("load_failures")
        self._done(fetch.job, 0, fetch.part.blocks)

    def expire(self, jobs: Iterable[Job], now: float) -> None:
        """Give up the loads whose deadline has passed. The lock is held."""
        late = [job for job in jobs if not (job.is_store or job.done.is_set() or job.cancelled) and now > job.deadline]
        if late:
            self._context.count("load_timeouts", len(late))
            self.give_up(late)

    def give_up(self, jobs: Iterable[Job]) -> None:
        """Fail what is outstanding of these loads, but for a copy that is under way. The lock is held."""
        for job in jobs:
            job.cancelled = True
            for get in job.gets:
                self._context.client.cancel(get)
            for fetch in self._open.get(job.job_id, ()):
                self._fail(fetch)

    def _base(self, part: ChunkPart) -> int:
        """The last sub-block where the object may be a lone last block, else 0.

        Whether it is one, its length tells; if it is a whole chunk after all, it is fetched again as such.
        """
        last = self._context.blocks_per_chunk - 1
        return last if self._context.lone_last_block[part.group] and part.first == last else 0

    def _length(self, fetch: _Fetch) -> int:
        """The bytes that the object has if it begins with its base."""
        layout = self._context.layouts[fetch.part.group]
        return layout.chunk_bytes - fetch.base * layout.block_bytes

    def _fragments(self, fetch: _Fetch) -> range:
        """The fragments that hold the part's bytes."""
        block_bytes = self._context.layouts[fetch.part.group].block_bytes
        return fragment_range(
            first_byte=(fetch.part.first - fetch.base) * block_bytes,
            length=len(fetch.part.blocks) * block_bytes,
            fragment_bytes=self._context.fragment_bytes,
        )

    def _feed(self) -> None:
        """Send what the rank's share has room for, in order. Any thread; one at a time does it.

        A lease may be answered within its own call, and the answer feeds again: that must not nest.
        """
        with self._lock:
            if self._feeding:
                return
            self._feeding = True
        while batch := self._next_batch():
            wanted = [LeaseObject(fetch.key, self._fragments(fetch).start, fetch.share) for fetch in batch]
            try:
                number = self._context.client.leases.take(wanted, partial(self._answered_of, batch))
            except Exception:
                with self._lock:
                    self._feeding = False
                    for fetch in batch:
                        self._fail(fetch)
                raise
            with self._lock:
                job = batch[0].job
                job.gets.add(number)
                if job.cancelled:
                    self._context.client.cancel(number)

    def _next_batch(self) -> list[_Fetch]:
        """The next fetches of one job, with their share; none, and nobody feeds, if there is no room for one."""
        budget = self._context.client.lease_budget
        batch: list[_Fetch] = []
        with self._lock:
            while self._waiting:
                fetch = self._waiting[0]
                needed = len(self._fragments(fetch))
                if needed > budget.count:
                    self._fail(fetch)
                if fetch.settled:
                    self._waiting.popleft()
                    continue
                if batch and fetch.job is not batch[0].job:
                    break
                if not budget.take(needed):
                    break
                self._waiting.popleft()
                fetch.share = needed
                batch.append(fetch)
            self._feeding = bool(batch)
            return batch

    def _answered_of(self, batch: Sequence[_Fetch], answer: Leased) -> None:
        """On the client's thread: an answer to one of a lease's objects."""
        self._answered(batch[answer.index], answer)

    def _answered(self, fetch: _Fetch, answer: Leased) -> None:
        """On the client's thread: slots hold the proved bytes, or there are none."""
        if answer.status == LoadStatus.OK:
            fetch.leased = answer
        if answer.status == LoadStatus.OK and answer.length == self._length(fetch):
            if self._queue.push(Priority.LOAD, fetch.job.job_id, partial(self._scatter, fetch)):
                return
        elif answer.status == LoadStatus.OK and fetch.base:
            with self._lock:
                had = self._taken(fetch)
                fetch.base = 0
                self._waiting.appendleft(fetch)  # one that was given up meanwhile is passed over there
            self._return(*had)
            return
        with self._lock:
            self._fail(fetch)
        self._give_back(fetch)

    def _scatter(self, fetch: _Fetch) -> None:
        """On the copy thread. A fetch that was given up meanwhile touches no page."""
        with self._lock:
            is_late = fetch.settled
            fetch.settled = True  # from here on only this thread settles it
        if is_late:
            self._give_back(fetch)
            return
        context, leased = self._context, fetch.leased
        assert leased is not None, "it was answered"
        layout = context.layouts[fetch.part.group]
        move = Move(fetch.part, layout, context.slots(leased.slots), self._fragments(fetch).start, fetch.base)
        context.mover.start_scatter(move, fetch.mark, partial(self._scattered, fetch, leased))

    def _scattered(self, fetch: _Fetch, leased: Leased, error: Exception | None) -> None:
        """On the copy thread: the pages hold what the slots held, if the lease has held until now; or never will."""
        if error is None:
            is_whole = self._holds(fetch, leased, self._fragments(fetch).start)
            if not self._context.client.leases.holds(leased):
                self._again(fetch)
                return
            if not is_whole:
                error = LostSlotsError(f"slots {leased.slots} of {fetch.key} are another's, and the lease holds")
        try:
            if error is None:
                self._forget(fetch)
                self._succeed(fetch)
            else:
                self._count_error(error)
                self._settle_failed(fetch)
        finally:
            self._scattered_had.append(self._taken(fetch))

    def flush(self) -> None:
        """On the copy thread, after each piece of work: what its copies have read is given back, and given out anew."""
        had, self._scattered_had = self._scattered_had, []
        if had:
            self._context.client.leases.release(*(leased for _, leased in had if leased is not None))
            self._context.client.lease_budget.give(sum(share for share, _ in had))
            self._feed()

    def _again(self, fetch: _Fetch) -> None:
        """Ask once more for what this thread has settled, before all others; the job's deadline bounds how often."""
        self._context.count("load_rereads")
        with self._lock:
            had = self._taken(fetch)
            fetch.settled = False
            if fetch.job.cancelled:
                self._fail(fetch)
            else:
                self._waiting.appendleft(fetch)
        self._return(*had)

    def _fail(self, fetch: _Fetch) -> None:
        """Settle a fetch as failed unless it is settled. The lock is held."""
        if not fetch.settled:
            fetch.settled = True
            self._settle_failed(fetch)

    def _settle_failed(self, fetch: _Fetch) -> None:
        self._context.count("load_failures")
        self._context.deny(fetch.key)
        self._forget(fetch)
        self._done(fetch.job, 0, fetch.part.blocks)

    def _forget(self, fetch: _Fetch) -> None:
        with self._lock:
            fetches = self._open.get(fetch.job.job_id)
            if fetches is not None and all(one.settled for one in fetches):
                del self._open[fetch.job.job_id]

    def _give_back(self, fetch: _Fetch) -> None:
        """The lease and the share of a fetch that the gateway has answered."""
        self._return(*self._taken(fetch))

    def _taken(self, fetch: _Fetch) -> tuple[int, Leased | None]:
        """What a fetch has, which has it no more: from the moment it waits again, any thread may give it anew."""
        had = fetch.share, fetch.leased
        fetch.share, fetch.leased = 0, None
        return had

    def _return(self, share: int, leased: Leased | None) -> None:
        if leased is not None:
            self._context.client.leases.release(leased)
        if share:
            self._context.client.lease_budget.give(share)
            self._feed()

    def _count_error(self, error: Exception | None) -> None:
        if error is not None:
            self._context.count("worker_errors")
            logger.error("Scattering an object failed", exc_info=error)
