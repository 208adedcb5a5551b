"""Warnings that may come a thousand times a second: one line in a while, and the counters tell how often.

Owns: when the last line was. Must not know: what is warned of.
"""

import logging
import time

INTERVAL_S = 10.0


class SparseLog:
    """One line in INTERVAL_S."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last_s = -INTERVAL_S

    def warning(self, text: str, *values: object) -> None:
        """As the logger's."""
        now_s = time.monotonic()
        if now_s - self._last_s >= INTERVAL_S:
            self._last_s = now_s
            self._log.warning(f"{text} (further ones are only counted for %.0f s)", *values, INTERVAL_S)
