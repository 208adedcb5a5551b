"""How fast something is moved, by whom does it.

Owns: the bytes that were moved so far and the time in which any of it was under way.
Must not know: what is moved, who asks for it.
"""

import threading
import time
from collections.abc import Callable, Hashable
from typing import TypeAlias

Totals: TypeAlias = tuple[int, int]  # bytes moved, ns in which something was under way


class Meter:
    """Bytes and busy time of what runs side by side: two loads of a second each at once are one second. Thread-safe.

    `publish` gets the totals at each change, one call at a time.
    """

    def __init__(self, publish: Callable[[int, int], None] = lambda _bytes, _ns: None) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._under_way: set[Hashable] = set()
        self._bytes = 0
        self._busy_ns = 0
        self._marked_ns = 0  # up to here the busy time is counted

    def begin(self, one: Hashable) -> None:
        """`one` is under way."""
        with self._lock:
            self._count(0)
            self._under_way.add(one)

    def moved(self, moved_bytes: int) -> None:
        """So much more has been moved."""
        with self._lock:
            self._count(moved_bytes)

    def end(self, one: Hashable) -> None:
        """`one` is over; it need not have begun."""
        with self._lock:
            self._count(0)
            self._under_way.discard(one)

    def mark(self) -> None:
        """Count the time up to now, though nothing has been moved: what stands still is slow, too."""
        with self._lock:
            if self._under_way:
                self._count(0)

    def totals(self) -> Totals:
        """Everything up to now."""
        with self._lock:
            self._count(0)
            return self._bytes, self._busy_ns

    def _count(self, moved_bytes: int) -> None:
        now_ns = time.monotonic_ns()
        if self._under_way:
            self._busy_ns += now_ns - self._marked_ns
        self._marked_ns = now_ns
        self._bytes += moved_bytes
        self._publish(self._bytes, self._busy_ns)
