"""Limbo: objects that have left the index, whose slots may not be used again yet.

Owns the waiting records: how long they stay readable, and when their slots are free (grace over, removal
committed, nobody reading). Pure: the clock comes with each call. Must not know files or the index.
"""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from itertools import islice

from .layout import Record

RELEASES_PER_CALL_MAX = 1_024  # entries looked at in one call, so that the event loop stays quick


@dataclass(slots=True, eq=False)
class Ghost:
    """One object in limbo. `settled`: the index no longer names its slots, also not after a crash.

    `left_ns`: the clock as it was read some time before the object left, until a later clock is known: its grace begins
    with that one, so that no busy moment is taken off it.
    """

    key: bytes
    record: Record
    slots: int
    expires_ns: int
    readable: bool
    settled: bool = False
    left_ns: int | None = None


class Limbo:
    """Everything in limbo, in order of arrival; the grace is one for all, so that is the order of ends, too."""

    def __init__(self) -> None:
        self.slots = 0
        self._aging: dict[int, Ghost] = {}  # by generation
        self._at_once: dict[int, Ghost] = {}  # those without a grace: free as soon as nothing holds them
        self._readable: dict[bytes, Ghost] = {}  # the newest of each key
        self._undated: deque[Ghost] = deque()  # those with a `left_ns`

    def __len__(self) -> int:
        return len(self._aging) + len(self._at_once)

    def add(self, ghost: Ghost) -> None:
        """Take an object in. Without `readable` it has no grace."""
        (self._aging if ghost.readable else self._at_once)[ghost.record.generation] = ghost
        self.slots += ghost.slots
        if ghost.readable:
            self._readable[ghost.key] = ghost
            if ghost.left_ns is not None and ghost.expires_ns > ghost.left_ns:
                self._undated.append(ghost)
            else:
                ghost.left_ns = None  # without a grace there is none to begin later

    def find(self, key: bytes, now_ns: int) -> Record | None:
        """The object that this key had, while its grace lasts."""
        ghost = self._readable.get(key)
        if ghost is None or (now_ns >= ghost.expires_ns and ghost.left_ns is None):
            return None
        return ghost.record

    def condemn(self, key: bytes, generation: int) -> None:
        """That object's bytes are bad: it is readable no more, and its slots need no grace."""
        ghost = self._aging.get(generation)
        if ghost is not None and ghost.key == key:
            self._forget(ghost)
            del self._aging[generation]
            self._at_once[generation] = ghost

    def release(self, now_ns: int, pinned: Container[int]) -> list[Ghost]:
        """Let go of what nothing holds any more (a bounded number); its slots are the caller's to give."""
        while self._undated and (left_ns := self._undated[0].left_ns or 0) < now_ns:
            ghost = self._undated.popleft()
            ghost.expires_ns += now_ns - left_ns
            ghost.left_ns = None
        at_once = islice(self._at_once.values(), RELEASES_PER_CALL_MAX)
        free = [ghost for ghost in at_once if ghost.settled and ghost.record.generation not in pinned]
        for ghost in islice(self._aging.values(), RELEASES_PER_CALL_MAX):
            if ghost.expires_ns > now_ns or ghost.left_ns is not None:
                break
            self._forget(ghost)
            if ghost.settled and ghost.record.generation not in pinned:
                free.append(ghost)
        for ghost in free:
            self._at_once.pop(ghost.record.generation, None)
            self._aging.pop(ghost.record.generation, None)
            self.slots -= ghost.slots
        return free

    def next_end_ns(self) -> int | None:
        """When the oldest grace ends."""
        return next(iter(self._aging.values())).expires_ns if self._aging else None

    def _forget(self, ghost: Ghost) -> None:
        if self._readable.get(ghost.key) is ghost:
            del self._readable[ghost.key]
