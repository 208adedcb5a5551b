"""The state of one transfer job on a worker.

Owns: `Job`: which objects of it are outstanding, which blocks failed, when it is done; the order in which copies run.
Must not know: tensors, slots, the gateway, vLLM.
"""

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from .mapping import ChunkPart

Plan = Callable[[], Sequence[ChunkPart]]
"""Makes a job's plan; run once, on the copy thread."""
COPY_QUEUE_MAX = 1 << 16  # copies waiting: far above what the ring's slots allow, so reaching it is a fault


class Priority(IntEnum):
    """Lower is sooner: what vLLM waits for, then loads, then stores."""

    WAITED_ON = 0
    LOAD = 1
    STORE = 2


@dataclass(slots=True)
class Job:
    """One job. All fields but `done` are guarded by the worker's lock.

    `outstanding`: its plan, until that is made, and objects. `hurried`: vLLM waits for it.
    """

    job_id: int
    is_store: bool
    outstanding: int
    req_id: str = ""  # of a load
    deadline: float = float("inf")
    expedited: bool = False
    started: float = field(default_factory=time.monotonic)
    moved_bytes: int = 0
    failed_blocks: list[int] = field(default_factory=list)
    cancelled: bool = False
    hurried: bool = False
    gets: set[int] = field(default_factory=set)
    done: threading.Event = field(default_factory=threading.Event)


class CopyQueue:
    """A bounded priority queue for one consuming thread; `hurry` moves a job's copies to the front."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[int, int, int]] = []
        self._work: dict[int, tuple[int, Callable[[], None]]] = {}
        self._sequence = 0
        self._closed = False

    def push(self, priority: Priority, job_id: int, work: Callable[[], None]) -> bool:
        """Queue `work`; False if the queue is full or closed."""
        return self.push_all(priority, job_id, [work]) == 1

    def push_all(
        self, priority: Priority, job_id: int, works: Sequence[Callable[[], None]], *, is_own: bool = False
    ) -> int:
        """Queue `works` in order, as many of them as there is room for; how many; 0 where it is closed.

        `is_own`: by what the consuming thread runs, which runs these as well before it ends.
        """
        with self._condition:
            taken = 0 if self._closed and not is_own else min(len(works), COPY_QUEUE_MAX - len(self._work))
            for work in works[:taken]:
                self._sequence += 1
                self._work[self._sequence] = (job_id, work)
                heapq.heappush(self._heap, (priority, self._sequence, job_id))
            if taken:
                self._condition.notify()
            return taken

    def hurry(self, job_ids: set[int]) -> None:
        """Let the queued copies of these jobs run before all others, in their order."""
        with self._condition:
            for number, (job_id, _) in self._work.items():
                if job_id in job_ids:
                    heapq.heappush(self._heap, (Priority.WAITED_ON, number, job_id))

    def pop(self) -> Callable[[], None] | None:
        """The next copy; blocks; None when the queue has been closed."""
        with self._condition:
            while (work := self._next()) is None and not self._closed:
                self._condition.wait()
            return work

    def pop_now(self) -> Callable[[], None] | None:
        """The next copy; None where there is none at this moment."""
        with self._condition:
            return self._next()

    def _next(self) -> Callable[[], None] | None:
        while self._heap:
            _, number, _ = heapq.heappop(self._heap)
            entry = self._work.pop(number, None)
            if entry is not None:
                return entry[1]
        return None

    def close(self) -> None:
        """Let what is queued run, then end."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
