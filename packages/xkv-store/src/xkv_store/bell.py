"""What wakes a thread that polls: any thread rings it.

Owns: one eventfd. Must not know: who waits, or for what.
"""

from __future__ import annotations

import contextlib
import os
import select


class Bell:
    """Rung once or many times, it wakes once."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """For polling."""
        return self._fd

    def ring(self) -> None:
        """Wake whoever waits, or the next who does."""
        with contextlib.suppress(BlockingIOError):  # it rings
            os.eventfd_write(self._fd, 1)

    def silence(self) -> None:
        """It has been heard."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def wait(self, wait_ms: float) -> None:
        """Until it rings, or for so long."""
        poll = select.poll()  # select() takes no descriptor above 1,023, and an engine may have more
        poll.register(self._fd, select.POLLIN)
        poll.poll(wait_ms)
        self.silence()

    def close(self) -> bool:
        """Give the descriptor back; False where it was given back before."""
        if self._fd < 0:
            return False
        os.close(self._fd)
        self._fd = -1
        return True
