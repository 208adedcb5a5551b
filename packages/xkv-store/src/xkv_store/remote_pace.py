"""How much one call to the remote carries: what the link has shown to bring in a part of the time that a call may take.

Owns: that number, and what makes it grow and shrink. Must not know: calls, objects, clocks.
"""

from __future__ import annotations

from typing import Final

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
