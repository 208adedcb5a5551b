"""What a remote has done on threads: reading objects from the card, proving what came and writing it to the card.

Owns: its own few threads, and who hears of each job's end. Must not know: objects, cards, what a job does.

Its own, so that what goes to and from the remote takes no engine's place in the gateway's pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .io_pool import IoPool, Job, Lane

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS: Final = 4  # some make checksums; one is always left for what was fetched, for which somebody waits


class RemoteWork:
    """Jobs, each with somebody who is told of its end on the event loop's thread."""

    def __init__(self) -> None:
        self._pool = IoPool(THREADS)
        self._then: dict[Job, Callable[[Exception | None], None]] = {}

    def fileno(self) -> int:
        """Readable when `poll` has something."""
        return self._pool.fileno()

    def __len__(self) -> int:
        return len(self._then)

    def submit(
        self, run: Callable[[], None], then: Callable[[Exception | None], None], *, is_store: bool, cost: int
    ) -> bool:
        """Run this on a thread; False where there is no room. `cost`: slots."""
        job = Job(Lane.STORE if is_store else Lane.LOAD, run, cost=cost)
        if not self._pool.submit(job):
            return False
        self._then[job] = then
        return True

    def poll(self) -> None:
        """Tell of what has ended."""
        for job in self._pool.finished_jobs():
            self._then.pop(job)(job.error)

    def close(self) -> bool:
        """End the threads; False where one hangs in an I/O call."""
        return self._pool.close()
