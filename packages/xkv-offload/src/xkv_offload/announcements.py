"""Which chunks are said to be on the card, to whoever listens to vLLM's KV events.

Owns: what is waited for until the card confirms it, what was announced, and looking, a little at each step, for what
has left the card since.
Must not know: vLLM's events (they are made of what is found here), the lookup table, the gateway.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

WAITING_MAX = 1 << 16  # stored, not yet confirmed; beyond it the oldest are announced when a lookup finds them
WAITING_SECONDS = 10.0  # what is not confirmed by then has failed
# What was stored later waits so long for it, since a prefix is stored before what follows it and the card confirms in
# any order: a listener that builds a tree drops a chunk whose parent it has not heard of.
ORDERED_SECONDS = 1.0
ANNOUNCED_MAX = 1 << 18  # some 60 MB; beyond it the oldest are announced as removed: nobody looks after them any more
LOOKED_AT_MAX = 128  # of those that wait, and of those announced, at each step: 0.3 ms at the most
EVENT_KEYS_MAX = 1_024  # of one event


@dataclass(frozen=True, slots=True)
class News:
    """Keys of chunks that are held from now on, or are not held any more: what one event tells."""

    keys: list[bytes]
    removed: bool


class Announcements:
    """One thread (vLLM's scheduling thread). `held`: whether the card holds all of a chunk, and is believed."""

    def __init__(self, held: Callable[[bytes], bool]) -> None:
        self._held = held
        # Ordered, since a plain one whose first keys are taken out again and again is searched for its first key.
        self._waiting: OrderedDict[bytes, float] = OrderedDict()  # until when
        self._announced: OrderedDict[bytes, None] = OrderedDict()  # those first that were not looked at for longest
        self._new: dict[bytes, None] = {}
        self._gone: dict[bytes, None] = {}

    def stored(self, keys: Iterable[bytes]) -> None:
        """These are on their way to the card."""
        now = time.monotonic()
        for key in keys:
            self._waiting[key] = now
            self._waiting.move_to_end(key)
        while len(self._waiting) > WAITING_MAX:
            self._waiting.popitem(last=False)

    def found(self, key: bytes) -> None:
        """The card holds it, whoever stored it."""
        if key in self._announced:
            return
        self._announced[key] = None
        self._new[key] = None
        if len(self._announced) > ANNOUNCED_MAX:
            self._remove(next(iter(self._announced)))

    def poll(self) -> list[News]:
        """What is new since the last call. To be asked once in a step, while the card's gateway is there."""
        now = time.monotonic()
        for key, since in list(islice(self._waiting.items(), LOOKED_AT_MAX)):
            is_held = self._held(key)
            if is_held:
                self.found(key)
            if is_held or since + WAITING_SECONDS <= now:
                del self._waiting[key]
            elif since + ORDERED_SECONDS <= now:
                self._waiting.move_to_end(key)
            else:
                break
        for key in list(islice(self._announced, LOOKED_AT_MAX)):
            if self._held(key):
                self._announced.move_to_end(key)
            else:
                self._remove(key)
        # Removals first: what went and came back since the last call is there.
        gone, new = list(self._gone), list(self._new)
        self._gone.clear()
        self._new.clear()
        return [*_cut(gone, removed=True), *_cut(new, removed=False)]

    def reset(self) -> None:
        """Nothing of it is held any more, as far as this engine goes."""
        self._waiting.clear()
        for key in list(self._announced):
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        del self._announced[key]
        if key in self._new:
            del self._new[key]  # nobody has heard of it
        else:
            self._gone[key] = None


def _cut(keys: list[bytes], *, removed: bool) -> list[News]:
    return [
        News(keys[first : first + EVENT_KEYS_MAX], removed=removed) for first in range(0, len(keys), EVENT_KEYS_MAX)
    ]
