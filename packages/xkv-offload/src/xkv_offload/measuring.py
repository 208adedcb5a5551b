"""What the manager measures: its lookups, the waits of requests, the times and sizes of jobs.

Owns: what has begun and not ended, bounded. One thread.
Must not know: vLLM, cards, under which names it is shown.
"""

import time
from collections.abc import Collection, Mapping

from .metrics import Increments

BEGUN_MAX = 1 << 14  # jobs, or requests that wait: beyond it the oldest are not measured


class LookupTimes:
    """The lookups of a step together, and how long a request has to wait for its answers."""

    def __init__(self, counts: Increments) -> None:
        self._counts = counts
        self.step_seconds = 0.0  # added to by whoever looks up
        self.waiting: dict[str, float] = {}  # by request, since when
        self._asked: set[str] = set()  # of these, in this step
        self._put_off: set[str] = set()  # of those, once more

    def answered(self, begun: float, req_id: str, *, waits: bool) -> None:
        """A lookup that began at `begun` (`time.perf_counter`) is over; `waits`: it has to be asked again.

        Of a lookup that has its answer it is enough to tell where somebody waits.
        """
        if waits:
            self._put_off.add(req_id)
            self.waiting.setdefault(req_id, begun)
            if len(self.waiting) > BEGUN_MAX:
                del self.waiting[next(iter(self.waiting))]
        if self.waiting:
            self._asked.add(req_id)

    def end_step(self) -> None:
        """The step's lookups are over: who waited, and was put off no more in it, has its answers."""
        if self.step_seconds:
            self._counts.observe("lookup_seconds", self.step_seconds)
            self.step_seconds = 0.0
        if self._asked:
            now = time.perf_counter()
            for req_id in self._asked - self._put_off:
                if req_id in self.waiting:
                    self._counts.observe("wait_seconds", now - self.waiting.pop(req_id))
            self._asked.clear()
            self._put_off.clear()

    def forget(self, req_id: str) -> None:
        """The request has ended: what it waited for came too late, or never."""
        since = self.waiting.pop(req_id, None)
        if since is not None:
            self._counts.observe("wait_seconds", time.perf_counter() - since)


class JobTimes:
    """Jobs by kind ("load", "store") and key, from their preparation to the report of all ranks."""

    def __init__(self, counts: Increments, group_bytes: Mapping[int, int]) -> None:
        """`group_bytes`: of a whole chunk's slots on one rank, by vLLM's group number."""
        self._counts = counts
        self._group_bytes = group_bytes
        self._begun: dict[tuple[str, bytes], float] = {}

    def begin(self, kind: str, keys: Collection[bytes]) -> None:
        """A job of these chunks is prepared; one of none is none."""
        if not keys:
            return
        self._begun[kind, next(iter(keys))] = time.perf_counter()
        if len(self._begun) > BEGUN_MAX:
            del self._begun[next(iter(self._begun))]
        self._counts.observe(f"{kind}_chunks", len(keys))
        sizes = (self._group_bytes.get(int.from_bytes(key[-4:], "big"), 0) for key in keys)
        self._counts.observe(f"{kind}_job_bytes", sum(sizes))

    def end(self, kind: str, keys: Collection[bytes]) -> None:
        """All ranks have reported it. Some releases give its keys in another order."""
        for key in keys:
            begun = self._begun.pop((kind, key), None)
            if begun is not None:
                self._counts.observe(f"{kind}_seconds", time.perf_counter() - begun)
                return

    def clear(self) -> None:
        """Nothing of what has begun will be reported (after a reset)."""
        self._begun.clear()
