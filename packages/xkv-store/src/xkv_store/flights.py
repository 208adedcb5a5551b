"""A client's outstanding puts and gets: whom to tell what.

Owns: what is put and got, numbers, the callers' callbacks, and that each object is answered exactly once.
Must not know: sockets, messages' encoding, threads (its user holds a lock around every call, and none around a
delivery).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .wire import LoadedObject, LoadStatus, StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .client_session import Lost
    from .key import ObjectKey
    from .ring import SlotRegion

    OnStored = Callable[[StoredObject], None]
    OnLoaded = Callable[[LoadedObject], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PutObject:
    """One object to put: its payload lies in `slots` (of the store region), one fragment each, in order."""

    key: ObjectKey
    length: int
    slots: Sequence[int]
    family: int
    position: int
    replace: bool


@dataclass(frozen=True, slots=True)
class GetObject:
    """One object to get: its fragments from `first_fragment` on go to `slots` (of the load region)."""

    key: ObjectKey
    slots: Sequence[int]
    first_fragment: int


@dataclass(frozen=True, slots=True)
class StoredDelivery:
    """An answer on its way to a caller, with the slots that go back first."""

    slots: tuple[int, ...]
    answer: StoredObject
    on_answer: OnStored


@dataclass(frozen=True, slots=True)
class LoadedDelivery:
    """An answer on its way to a caller."""

    answer: LoadedObject
    on_answer: OnLoaded


Delivery = StoredDelivery | LoadedDelivery


@dataclass(slots=True)
class _Put:
    base: int  # what index 0 of the message is in the caller's batch
    slots: dict[int, tuple[int, ...]]
    on_answer: OnStored


@dataclass(slots=True)
class _Get:
    get: int  # what the caller knows it by
    base: int
    indexes: set[int]
    on_answer: OnLoaded


class Flights:
    """Puts and gets by the number of their message; a get's messages by the caller's number, too."""

    def __init__(self) -> None:
        self._puts: dict[int, _Put] = {}
        self._gets: dict[int, _Get] = {}
        self._messages: dict[int, set[int]] = {}

    def add_put(self, number: int, *, base: int, slots: Sequence[tuple[int, ...]], on_answer: OnStored) -> None:
        """A put's message is under way."""
        self._puts[number] = _Put(base, dict(enumerate(slots)), on_answer)

    def add_get(self, number: int, *, get: int, base: int, count: int, on_answer: OnLoaded) -> None:
        """A get's message is under way."""
        self._gets[number] = _Get(get, base, set(range(count)), on_answer)
        self._messages.setdefault(get, set()).add(number)

    def messages_of(self, get: int) -> tuple[int, ...]:
        """The messages of a get of which something is outstanding."""
        return tuple(sorted(self._messages.get(get, ())))

    def stored(self, number: int, objects: Iterable[StoredObject]) -> list[Delivery]:
        """Answers have come."""
        flight = self._puts[number]
        deliveries: list[Delivery] = [
            StoredDelivery(
                flight.slots.pop(answer.index),
                StoredObject(flight.base + answer.index, answer.status),
                flight.on_answer,
            )
            for answer in objects
        ]
        if not flight.slots:
            del self._puts[number]
        return deliveries

    def loaded(self, number: int, objects: Iterable[LoadedObject]) -> list[Delivery]:
        """Answers have come."""
        flight = self._gets[number]
        deliveries: list[Delivery] = []
        for answer in objects:
            flight.indexes.remove(answer.index)
            moved = LoadedObject(flight.base + answer.index, answer.status, answer.generation, answer.length)
            deliveries.append(LoadedDelivery(moved, flight.on_answer))
        if not flight.indexes:
            del self._gets[number]
            messages = self._messages[flight.get]
            messages.remove(number)
            if not messages:
                del self._messages[flight.get]
        return deliveries

    def lost(self, lost: Lost) -> list[Delivery]:
        """No answers will come: the connection has ended, and with it the gateway's hold on the slots."""
        deliveries: list[Delivery] = []
        for number, index in lost.puts:
            deliveries += self.stored(number, [StoredObject(index, StoreStatus.SHED)])
        for number, index in lost.gets:
            deliveries += self.loaded(number, [LoadedObject(index, LoadStatus.FAILED, 0, 0)])
        return deliveries


def deliver(deliveries: Iterable[Delivery], store_region: SlotRegion) -> None:
    """Give slots back and call callers. What a caller raises is logged: the next one is still told."""
    for delivery in deliveries:
        if isinstance(delivery, StoredDelivery):
            store_region.give(delivery.slots)
        try:
            _call(delivery)
        except Exception:
            log.exception("a callback of a put or get failed")


def _call(delivery: Delivery) -> None:
    if isinstance(delivery, StoredDelivery):
        delivery.on_answer(delivery.answer)
    else:
        delivery.on_answer(delivery.answer)
