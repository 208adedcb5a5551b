"""The worker's side: jobs of one rank.

Owns: submit, wait and report, as vLLM calls them on its thread; the copy thread; when a job is done and what of it
failed. Nothing of ours escapes: submits answer True, results say success, failures travel by `failures`.
Must not know: how bytes are ordered in an object (layout), how blocks map to chunks (mapping), how copies are made
(copy), vLLM's classes (they come in as arguments).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .failures import LoadFailedError
from .jobs import CopyQueue, Job
from .loads import Loads
from .mapping import ChunkPart, MappingError, plan_load, plan_store
from .meter import Meter
from .rank import RankContext
from .stores import Stores
from .transfer import XkvTransferSpec

logger = logging.getLogger(__name__)

WAIT_SECONDS_MAX = 30.0  # for copies out of or into KV pages, which move at memory speed: longer is a fault
SHUTDOWN_SECONDS_MAX = 10.0  # for the copy thread to end
IDLE_STEP_SECONDS = 0.001  # no step that runs a model is as short
PAUSE_SECONDS = 0.001
SUSPECT_STEPS = 2  # a step's stores are begun in the next one, and vLLM may have scheduled one more by then


@dataclass(frozen=True, slots=True)
class _Span:
    """What vLLM says of a job's blocks, as it was when it was said."""

    block_ids: npt.NDArray[np.int64]
    group_sizes: npt.NDArray[np.int64]
    block_indices: npt.NDArray[np.int64]


class XkvWorker:
    """OffloadingWorker of xkv for one rank. vLLM's methods run on the worker's main thread."""

    def __init__(self, *, context: RankContext, transfer_result: Callable[..., object]) -> None:
        self._context = context
        self._result = transfer_result
        self._lock = threading.RLock()
        self._jobs: dict[int, Job] = {}
        self._ended = threading.Event()  # some job has, since vLLM asked last
        self._asked = -IDLE_STEP_SECONDS  # when vLLM was last told of jobs that have
        self._suspect_steps = 0  # for so long, pages may have been computed from a load that failed inside a step
        self._meter = Meter(lambda moved, busy_ns: context.client.control.set_loaded(context.rank, moved, busy_ns))
        self._queue = CopyQueue()
        self._stores = Stores(context, self._queue, self._lock, self._object_done)
        self._loads = Loads(context, self._queue, self._lock, self._object_done)
        self._thread = threading.Thread(target=self._copy, name="xkv-copy", daemon=True)
        self._thread.start()

    @property
    def context(self) -> RankContext:
        """What this rank is; `context.failures` is what vLLM's connector asks for failed blocks."""
        return self._context

    # -- called by vLLM --------------------------------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: XkvTransferSpec) -> bool:
        """Begin to store; the pages may be overwritten once the job is reported or waited for."""
        try:
            if not self._context.writes:
                self._begin(job_id, is_store=True, objects=0)
                return True
            plan = partial(self._store_parts, _span(src_spec), dst_spec, is_suspect=self._suspect_steps > 0)
            mark = self._context.mover.ready_mark()
            self._stores.submit(self._begin(job_id, is_store=True, objects=1), plan, dst_spec, mark)
        except Exception:  # noqa: BLE001 - whatever it is, it must not reach vLLM
            self._survive(job_id, "submit_store", is_store=True, blocks=())
        return True

    def submit_load(self, job_id: int, src_spec: XkvTransferSpec, dst_spec: Any, expedited: bool = False) -> bool:
        """Begin to load; done or failed within the load's deadline. `expedited` jobs are waited for by vLLM.

        Raises ValueError or TypeError where the block ids are none: what cannot be read cannot be reported as failed.
        """
        blocks = _integers(dst_spec.block_ids)
        try:
            plan = partial(self._load_parts, src_spec, _span(dst_spec))
            mark = self._context.mover.ready_mark()
            job = self._begin(job_id, is_store=False, objects=1, req_id=src_spec.req_id)
            job.deadline = time.monotonic() + self._context.load_timeout_s
            job.expedited = expedited
            self._meter.begin(job_id)
            self._loads.submit(job, plan, src_spec, mark, blocks)
        except Exception:  # noqa: BLE001 - whatever it is, it must not reach vLLM
            self._survive(
                job_id, "submit_load", is_store=False, blocks=blocks, req_id=src_spec.req_id, expedited=expedited
            )
        return True

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """Begin to load or to store, by which side is the card: one worker handles both where vLLM asks handlers."""
        source, destination = spec
        submit = self.submit_load if isinstance(source, XkvTransferSpec) else self.submit_store
        return submit(job_id, source, destination)

    def get_finished(self) -> list[Any]:
        """Results of the jobs that ended since the last call.

        Raises LoadFailedError where a load of verified objects failed, and this vLLM has no way to hear of it: the
        engine ends rather than serve wrong pages. Where one failed inside its step, the forward pass has read its
        blocks: what the step left in any request's pages may follow from them, and is not stored.
        """
        self._pause_where_nothing_else_runs()
        now = time.monotonic()
        self._meter.mark()
        self._guarded(lambda: self._loads.expire(self._jobs.values(), now))
        with self._lock:
            if any(job.expedited and not job.done.is_set() for job in self._jobs.values()):
                raise LoadFailedError(
                    f"A load inside a step did not end its copy within {WAIT_SECONDS_MAX} s: the engine ends rather "
                    "than serve what the step computed from its pages"
                )
            ended = [job for job in self._jobs.values() if job.done.is_set()]
            for job in ended:
                del self._jobs[job.job_id]
        self._suspect_steps = max(0, self._suspect_steps - 1)
        for job in ended:
            if job.failed_blocks:
                self._report_failure(job)
                if job.expedited:
                    self._suspect_steps = SUSPECT_STEPS
        self._asked = time.monotonic()
        return [self._transfer_result(job) for job in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Return once the pages of these jobs may be overwritten (stores) or read (expedited loads).

        Other loads, which vLLM names after a reset, go on: their blocks stay their request's until they are
        reported, and a load that is given up is a failed one. Unknown, finished and duplicate ids are ignored.
        """
        with self._lock:
            known = [job for job in (self._jobs.get(number) for number in set(job_ids)) if job is not None]
            jobs = [job for job in known if job.is_store or job.expedited]
            for job in jobs:
                job.hurried = True
        self._queue.hurry({job.job_id for job in jobs})
        end = time.monotonic() + WAIT_SECONDS_MAX
        late = [job for job in jobs if not job.done.wait(max(0.0, min(job.deadline, end) - time.monotonic()))]
        self._guarded(lambda: self._loads.give_up(job for job in late if not job.is_store))
        for job in late:
            if not job.done.wait(max(0.0, end - time.monotonic())):
                job.cancelled = True  # a store of pages that vLLM may overwrite from now on is none
                self._context.count("worker_errors")
                logger.error("Job %d did not end its copy within %s s", job.job_id, WAIT_SECONDS_MAX)

    def shutdown(self) -> None:
        """End the copies and detach from the gateway."""
        self._queue.close()
        self._thread.join(SHUTDOWN_SECONDS_MAX)
        try:
            if not self._thread.is_alive():
                self._context.mover.close()
                self._flush()
        except Exception:
            self._context.count("worker_errors")
            logger.exception("Ending the copies failed")
        finally:
            self._context.client.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _store_parts(self, span: _Span, spec: XkvTransferSpec, *, is_suspect: bool) -> Sequence[ChunkPart]:
        """On the copy thread: what of a job is stored. `is_suspect`: its pages may follow from a load that failed."""
        context = self._context
        try:
            plan = plan_store(
                key_groups=context.key_groups(spec.keys),
                block_ids=span.block_ids.tolist(),
                group_sizes=span.group_sizes.tolist(),
                block_indices=span.block_indices.tolist(),
                blocks_per_chunk=context.blocks_per_chunk,
                lone_last_block=context.lone_last_block,
            )
        except MappingError:
            context.count("partial_chunks", len(spec.keys))
            logger.exception("A store's keys and blocks do not match; nothing of it is stored")
            return ()
        context.count("partial_chunks", len(plan.left_out))
        parts = tuple(part for part in plan.parts if context.layouts[part.group].block_bytes)
        if is_suspect:
            context.count("suspect_chunks", len(parts))
        return () if is_suspect else parts

    def _load_parts(self, spec: XkvTransferSpec, span: _Span) -> Sequence[ChunkPart]:
        """On the copy thread: where each object of a job belongs."""
        return plan_load(
            key_groups=self._context.key_groups(spec.keys),
            block_ids=span.block_ids.tolist(),
            group_sizes=span.group_sizes.tolist(),
            block_indices=span.block_indices.tolist(),
            blocks_per_chunk=self._context.blocks_per_chunk,
        )

    def _pause_where_nothing_else_runs(self) -> None:
        """Let the copy thread have the interpreter where vLLM's does nothing but ask for loads.

        An engine whose requests all wait for their loads steps without a pause, and its thread then gives the
        interpreter up only every few milliseconds (`sys.getswitchinterval`): each of the copy thread's calls that
        releases it waits as long to have it back.
        """
        with self._lock:
            self._ended.clear()
            is_loading = any(not job.is_store and not job.done.is_set() for job in self._jobs.values())
            has_news = any(job.done.is_set() for job in self._jobs.values())
        if is_loading and not has_news and time.monotonic() - self._asked < IDLE_STEP_SECONDS:
            self._ended.wait(PAUSE_SECONDS)

    def _begin(self, job_id: int, *, is_store: bool, objects: int, req_id: str = "") -> Job:
        job = Job(job_id, is_store, objects, req_id=req_id)
        if not objects:
            job.done.set()
        with self._lock:
            self._jobs[job_id] = job
        return job

    def _object_done(self, job: Job, moved_bytes: int, failed_blocks: Iterable[int] = ()) -> None:
        """One object of `job` has been copied, or will not be."""
        with self._lock:
            job.moved_bytes += moved_bytes
            job.failed_blocks += failed_blocks
            job.outstanding -= 1
            if not job.is_store:
                self._meter.moved(moved_bytes)
            if job.outstanding == 0:
                self._meter.end(job.job_id)
                job.done.set()
                self._ended.set()

    def _survive(
        self,
        job_id: int,
        where: str,
        *,
        is_store: bool,
        blocks: Iterable[int],
        req_id: str = "",
        expedited: bool = False,
    ) -> None:
        """Keep an error of ours from vLLM: the job is over, and a load has failed; nothing of it moves any more."""
        self._context.count("worker_errors")
        logger.exception("%s of job %d failed", where, job_id)  # noqa: LOG004 - called in handlers only
        with self._lock:
            begun = self._jobs.get(job_id)
        if begun is not None:
            self.wait({job_id})
        self._meter.end(job_id)
        job = self._begin(job_id, is_store=is_store, objects=0, req_id=req_id)
        job.expedited = expedited
        job.failed_blocks += blocks

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run `work` with the lock held; an error of ours is counted, not raised into vLLM."""
        try:
            with self._lock:
                work()
        except Exception:
            self._context.count("worker_errors")
            logger.exception("Giving up loads failed")

    def _report_failure(self, job: Job) -> None:
        self._context.count("failed_load_jobs")
        if self._context.recomputes:
            self._context.count("recomputed_jobs")
        plan = self._context.failure_plan
        if plan.channel == "verified":
            raise LoadFailedError(
                f"A load of {len(job.failed_blocks)} blocks failed though its objects had been verified, and vLLM "
                f"cannot be told ({plan.reason}): the engine ends rather than serve wrong KV pages"
            )
        if plan.channel == "request_errors" and not job.expedited:
            self._context.failures.add_request(job.req_id)
        else:
            self._context.failures.add(job.failed_blocks)

    def _transfer_result(self, job: Job) -> Any:
        return self._result(
            job_id=job.job_id,
            success=True,
            transfer_size=job.moved_bytes,
            transfer_time=max(time.monotonic() - job.started, 1e-9),
        )

    def _copy(self) -> None:
        """The copy thread: begins copies as they come, and ends those under way where there is none to begin."""
        while True:
            try:
                self._flush()
                work = self._queue.pop_now()
                if work is None:
                    if self._context.mover.advance():
                        continue
                    self._flush()  # the copies that it ended may have been the last
                    work = self._queue.pop()
                    if work is None:
                        return
                work()
            except Exception:
                self._context.count("worker_errors")
                logger.exception("A copy failed")

    def _flush(self) -> None:
        """Tell the gateway what the last piece of work has ended: many objects at once, where many end at once."""
        self._stores.flush()
        self._loads.flush()


def _span(spec: Any) -> _Span:
    """Raises ValueError, TypeError or AttributeError where it is none."""
    return _Span(_integers(spec.block_ids), _integers(spec.group_sizes), _integers(spec.block_indices))


def _integers(numbers: Any) -> npt.NDArray[np.int64]:
    """Integers of an array or a list of any kind, which its owner may use again."""
    return np.array(numbers, np.int64)
