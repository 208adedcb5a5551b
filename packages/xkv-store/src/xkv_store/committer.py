"""The one thread that commits to the index, so that the event loop never waits for it.

Owns: the thread, the batch in its hands, the eventfd that tells of its end.
Must not know: what a batch holds, sessions, sockets.

One batch at a time: while it is being committed the next one gathers, so batches grow with the load by themselves.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = TypeVar("Batch")

JOIN_S_MAX: Final = 30.0  # one commit with a sync on a slow device; then the process ends without it


class Committer(Generic[Batch]):
    """`begin` hands a batch over when `idle`; `fileno()` becomes readable when `ended()` has a result."""

    def __init__(self, commit: Callable[[Batch], None]) -> None:
        self._commit = commit
        self._wake = threading.Condition()
        self._batch: Batch | None = None
        self._result: tuple[Batch, Exception | None] | None = None
        self._stopping = False
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._work, name="xkv-commit", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """The eventfd to select on."""
        return self._eventfd

    @property
    def idle(self) -> bool:
        """Whether a batch may be handed over (called by the event loop only)."""
        return self._batch is None and self._result is None

    def begin(self, batch: Batch) -> None:
        """Commit this batch."""
        assert self.idle
        with self._wake:
            self._batch = batch
            self._wake.notify()

    def ended(self) -> tuple[Batch, Exception | None] | None:
        """The batch that has ended since the last call, and its error."""
        if self._result is None:
            return None
        try:
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return None  # it is about to be written
        result, self._result = self._result, None
        return result

    def close(self) -> bool:
        """End the thread after its present batch; False when that did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(JOIN_S_MAX)
        if self._thread.is_alive():
            return False
        os.close(self._eventfd)
        return True

    def _work(self) -> None:
        while True:
            with self._wake:
                while self._batch is None:
                    if self._stopping:
                        return
                    self._wake.wait()
                batch = self._batch
            error: Exception | None = None
            try:
                self._commit(batch)
            except Exception as caught:  # noqa: BLE001  the loop judges it; the thread lives on
                error = caught
            self._result = (batch, error)
            self._batch = None
            os.eventfd_write(self._eventfd, 1)
