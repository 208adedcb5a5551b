"""The stores of one rank.

Owns: from planned chunks to puts: ring slots, gather on the copy thread, the put, the bytes that are on their way.
An object that finds no slot or no gateway is simply one that the card does not hold.
Must not know: vLLM, what becomes of an object after its put but for the answer.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from xkv_store.client import PutObject
from xkv_store.geometry import HEADER_BYTES
from xkv_store.wire import StoredObject, StoreStatus

from .copy import Move
from .jobs import CopyQueue, Job, Plan, Priority
from .layout import fragment_range
from .mapping import ChunkPart
from .rank import RankContext
from .transfer import XkvTransferSpec

logger = logging.getLogger(__name__)


class ObjectDone(Protocol):
    """Called once for each object of a job."""

    def __call__(self, job: Job, moved_bytes: int, failed_blocks: Sequence[int] = ()) -> None:
        """`moved_bytes` were copied; the load of `failed_blocks` failed."""


@dataclass(frozen=True, slots=True)
class _Object:
    """One object of a store, of `size` bytes; its pages hold them after `mark`."""

    job: Job
    part: ChunkPart
    spec: XkvTransferSpec
    mark: object
    size: int


class Stores:
    """Puts of one rank; `submit` runs on vLLM's thread, the rest on the copy thread and the client's."""

    def __init__(self, context: RankContext, queue: CopyQueue, lock: threading.RLock, done: ObjectDone) -> None:
        self._context = context
        self._queue = queue
        self._lock = lock
        self._done = done
        self._bytes_in_flight = 0
        self._gathered_puts: list[PutObject] = []

    def submit(self, job: Job, plan: Plan, spec: XkvTransferSpec, mark: object) -> None:
        """Store what `plan` says, whose pages are written by `mark`: one copy per object, in order.

        The copy thread plans: vLLM's does not go through the objects one by one.
        """
        begin = partial(self._begin, job, plan, spec, mark)
        if not self._queue.push(Priority.STORE, job.job_id, partial(begin, is_own=True)):
            begin(is_own=False)

    def _begin(self, job: Job, plan: Plan, spec: XkvTransferSpec, mark: object, *, is_own: bool) -> None:
        try:
            objects = [
                _Object(job, part, spec, mark, len(part.blocks) * self._context.layouts[part.group].block_bytes)
                for part in plan()
            ]
            self._add_ring_bytes([stored.size for stored in objects])
            with self._lock:
                job.outstanding += len(objects)
            works = [partial(self._gather, stored) for stored in objects]
            taken = self._queue.push_all(Priority.STORE, job.job_id, works, is_own=is_own)
            for stored in objects[taken:]:
                self._shed(stored)
        finally:
            self._done(job, 0)
        with self._lock:
            is_hurried = job.hurried
        if is_hurried:
            self._queue.hurry({job.job_id})

    def _gather(self, stored: _Object) -> None:
        """On the copy thread: begin to copy one object into the ring."""
        context, part = self._context, stored.part
        slots = None
        if context.client.alive() and not stored.job.cancelled:
            slots = context.client.store_region.take(
                len(fragment_range(first_byte=0, length=stored.size, fragment_bytes=context.fragment_bytes))
            )
        if slots is None:
            self._shed(stored)
            return
        move = Move(part, context.layouts[part.group], context.slots(slots), 0, part.first)
        context.mover.start_gather(move, stored.mark, partial(self._gathered, stored, slots))

    def _gathered(self, stored: _Object, slots: Sequence[int], error: Exception | None) -> None:
        """On the copy thread: the object's bytes lie in the ring, or will not."""
        context, spec, key = self._context, stored.spec, stored.part.key
        if error is not None:
            self._context.count("worker_errors")
            logger.error("Gathering an object failed", exc_info=error)
        if error is not None or stored.job.cancelled:  # the pages may have changed while they were copied
            context.client.store_region.give(slots)
            self._shed(stored)
            return
        put = PutObject(
            key=context.object_key(spec.namespace, spec.keys[key]),
            length=stored.size,
            slots=slots,
            family=spec.family,
            position=spec.positions[key],
            replace=spec.replace[key],
        )
        self._gathered_puts.append(put)
        self._done(stored.job, stored.size)
        self._context.count("store_objects")
        self._context.count("store_bytes", stored.size)

    def flush(self) -> None:
        """On the copy thread, after each piece of work: what that has gathered is put, in one message."""
        puts, self._gathered_puts = self._gathered_puts, []
        if puts:
            self._context.client.put(puts, partial(self._answered, puts))

    def _answered(self, puts: Sequence[PutObject], answer: StoredObject) -> None:
        """On the client's thread: the gateway has one of these objects, or not; its slots are free again."""
        self._add_ring_bytes([puts[answer.index].length], sign=-1)
        held = answer.status in (StoreStatus.CONFIRMED, StoreStatus.HELD)
        self._context.count("confirmed_objects" if held else "refused_objects")

    def _shed(self, stored: _Object) -> None:
        self._add_ring_bytes([stored.size], sign=-1)
        self._context.count("shed_objects")
        self._context.client.control.add_shed(self._context.rank)
        self._done(stored.job, 0)

    def _add_ring_bytes(self, sizes: Sequence[int], *, sign: int = 1) -> None:
        """Objects of these sizes are on their way, or no more: each takes whole slots."""
        fragment_bytes = self._context.fragment_bytes
        slots = sum(len(fragment_range(first_byte=0, length=size, fragment_bytes=fragment_bytes)) for size in sizes)
        with self._lock:
            self._bytes_in_flight += sign * slots * (fragment_bytes + HEADER_BYTES)
            self._context.client.control.set_store_bytes(self._context.rank, self._bytes_in_flight)
