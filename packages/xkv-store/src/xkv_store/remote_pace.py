"""How much one call to the remote carries: what the link has shown to bring in a part of the time that a call may take.

Owns: that number, and what makes it grow and shrink. Must not know: calls, objects, clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

BYTES_MAX: Final = 64 << 20  # more in one call is no faster
STRAIGHT_BYTES_MAX: Final = 128 << 20  # from and to rings, where less is done beside a call: each costs 4 ms by itself
BYTES_BEGIN: Final = 16 << 20  # of a link that has shown nothing: 3 s at 45 Mbit/s, and at its most after two calls
BYTES_MIN: Final = 1 << 20  # 3 s at 3 Mbit/s; an object that is larger goes alone


class Pace:
    """Of the loads or of the puts of one gateway, which come one after the other."""

    def __init__(self, *, call_ns: int, bytes_max: int = BYTES_MAX) -> None:
        """`call_ns`: longer than this no call should take."""
        self._call_ns = call_ns
        self._bytes_max = bytes_max
        self._ended_ns = 0
        self.bytes = BYTES_BEGIN
        """What the next call may carry."""

    def ended(self, sent_bytes: int, begun_ns: int, now_ns: int) -> None:
        """A call for so many bytes was answered. Its turn came when it was made, or when the one before it ended."""
        took_ns = now_ns - max(begun_ns, self._ended_ns)
        self._ended_ns = now_ns
        if took_ns > self._call_ns:
            self.bytes = max(BYTES_MIN, min(self.bytes, sent_bytes * self._call_ns // took_ns))
        elif 2 * took_ns < self._call_ns and 2 * sent_bytes >= self.bytes:  # less says nothing of so many
            self.bytes = min(self._bytes_max, 2 * self.bytes)

    def failed(self, now_ns: int) -> None:
        """A call came to nothing: it may have taken too long."""
        self._ended_ns = now_ns
        self.bytes = max(BYTES_MIN, self.bytes // 2)


class Expected:
    """How many bytes an object of so many slots is likely to bring: the most of one in the last call with such."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._bytes: dict[int, int] = {}  # by slots

    def of(self, slots: int) -> int:
        """All that they hold, where nothing has come yet."""
        return self._bytes.get(slots, slots * self._slot_bytes)

    def came(self, objects: Iterable[tuple[int, int]]) -> None:
        """A call has brought objects of so many slots with so many bytes each; 0 or less: nothing."""
        self._bytes.update(sorted((slots, size) for slots, size in objects if size > 0))  # the last of equals: the most

    def forget(self) -> None:
        """A call has failed: it may have been too large."""
        self._bytes.clear()
