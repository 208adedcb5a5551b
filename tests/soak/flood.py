"""Puts as fast as the gateway takes them.

Owns: the numbers that were put, their answers. Must not know: what is judged by them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from soak.objects import Objects, object_key
from xkv_store.client import PutObject
from xkv_store.wire import StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_store.client import Client

BATCH: Final = 16  # objects of a message
REPLACED: Final = 29  # one in so many puts is of a key that the card has
REPLACED_BACK: Final = 400  # …and that was put so many objects before
SHED_PAUSE_S: Final = 0.002  # an engine drops what is shed and computes on; here the next one is tried a little later
WAIT_S_MAX: Final = 60.0


class Flood:
    """One rank that stores."""

    def __init__(self, client: Client, objects: Objects) -> None:
        self._client = client
        self._objects = objects
        self._changed = threading.Condition()
        self._out = 0
        self.statuses: Counter[StoreStatus] = Counter()
        self.next_number = 0
        self.put_slots = 0

    @property
    def confirmed(self) -> int:
        """Objects that the card has confirmed."""
        return self.statuses[StoreStatus.CONFIRMED]

    def put(self, count: int) -> float:
        """Put until so many more are confirmed; how many that were a second."""
        began, confirmed = time.monotonic(), self.confirmed
        while self.confirmed < confirmed + count:  # again where some were shed
            self.run(lambda: self.confirmed + self._out < confirmed + count)
        return (self.confirmed - confirmed) / (time.monotonic() - began)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Put until `goes_on` says no; then wait for every answer."""
        while goes_on():
            shed = self.statuses[StoreStatus.SHED]
            self._client.put([self._next() for _ in range(BATCH)], self._answered)
            if self.statuses[StoreStatus.SHED] > shed:
                time.sleep(SHED_PAUSE_S)
        with self._changed:
            if not self._changed.wait_for(lambda: self._out == 0, WAIT_S_MAX):
                raise TimeoutError(f"{self._out} puts were never answered")

    def _next(self) -> PutObject:
        again = self.next_number % REPLACED == 0 and self.next_number >= REPLACED_BACK
        number = self.next_number - REPLACED_BACK if again else self.next_number
        self.next_number += 1
        slots = self._take(self._objects.fragments(number))
        self._objects.fill(self._client.ring.array, slots, number)
        self.put_slots += len(slots)
        family, position = self._objects.place(number)
        return PutObject(object_key(number), self._objects.length(number), slots, family, position, again)

    def _take(self, count: int) -> list[int]:
        """Slots of the ring, as soon as there are so many."""
        with self._changed:
            end = time.monotonic() + WAIT_S_MAX
            while (slots := self._client.store_region.take(count)) is None:
                if not self._changed.wait(end - time.monotonic()):
                    raise TimeoutError("the gateway gives no slot of the ring back")
            self._out += 1
            return slots

    def _answered(self, answer: StoredObject) -> None:
        with self._changed:
            self._out -= 1
            self.statuses[answer.status] += 1
            self._changed.notify()
