"""A client's outstanding puts and gets: whom to tell what.

Owns: what is put and got, numbers, the callers' callbacks, and that each object is answered exactly once.
Must not know: sockets, messages' encoding, threads (its user holds a lock around every call, and none around a
delivery).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .client_session import GetAnswered, LeaseAnswered, PutAnswered, SeekAnswered
from .wire import LeasedObject, LoadedObject, LoadStatus, StoredObject, StoreStatus
from .wire_remote import SoughtObject, SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from . import wire
    from .client_session import ClientAction, ClientSession, Lost
    from .key import ObjectKey
    from .ring import SlotRegion
    from .wire_remote import SeekObject

    OnStored = Callable[[StoredObject], None]
    OnLoaded = Callable[[LoadedObject], None]
    OnLeased = Callable[["Leased"], None]
    OnSought = Callable[[SoughtObject], None]
    Begin = Callable[[ClientSession, int], wire.FromClient]

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
class LeaseObject:
    """One object to have a lease of: `fragments` of its fragments from `first_fragment` on."""

    key: ObjectKey
    first_fragment: int
    fragments: int


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to an object of a lease. Where it is OK the fragments lie in `slots`, until it is released.

    `index`: in the caller's batch. `epoch`, `term`: of the session; on no other does the lease hold. `number`, `place`:
    what the gateway knows it by.
    """

    index: int
    status: LoadStatus
    generation: int
    length: int
    slots: tuple[int, ...] = ()
    epoch: int = 0
    term: int = 0
    number: int = 0
    place: int = 0


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


@dataclass(frozen=True, slots=True)
class LeasedDelivery:
    """An answer on its way to a caller."""

    answer: Leased
    on_answer: OnLeased


@dataclass(frozen=True, slots=True)
class SoughtDelivery:
    """An answer on its way to a caller."""

    answer: SoughtObject
    on_answer: OnSought


Delivery = StoredDelivery | LoadedDelivery | LeasedDelivery | SoughtDelivery


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


@dataclass(slots=True)
class _Lease:
    get: int  # what the caller knows it by
    base: int
    indexes: set[int]
    epoch: int
    term: int
    on_answer: OnLeased


@dataclass(slots=True)
class _Seek:
    base: int
    indexes: set[int]
    on_answer: OnSought


class Flights:
    """Puts, gets, leases and seeks by the number of their message; messages of gets and leases by the caller's, too."""

    def __init__(self) -> None:
        self._puts: dict[int, _Put] = {}
        self._gets: dict[int, _Get] = {}
        self._leases: dict[int, _Lease] = {}
        self._seeks: dict[int, _Seek] = {}
        self._messages: dict[int, set[int]] = {}

    def add_put(self, number: int, *, base: int, slots: Sequence[tuple[int, ...]], on_answer: OnStored) -> None:
        """A put's message is under way."""
        self._puts[number] = _Put(base, dict(enumerate(slots)), on_answer)

    def add_get(self, number: int, *, get: int, base: int, count: int, on_answer: OnLoaded) -> None:
        """A get's message is under way."""
        self._gets[number] = _Get(get, base, set(range(count)), on_answer)
        self._messages.setdefault(get, set()).add(number)

    def add_lease(
        self, number: int, *, get: int, base: int, count: int, of_session: tuple[int, int], on_answer: OnLeased
    ) -> None:
        """A lease's message is under way, on the connection of this epoch and term."""
        self._leases[number] = _Lease(get, base, set(range(count)), *of_session, on_answer)
        self._messages.setdefault(get, set()).add(number)

    # --- the same, with the message: what to call with a session and a number when it is sent -----------------

    def putting(self, piece: tuple[wire.PutObject, ...], *, base: int, on_answer: OnStored) -> Begin:
        """A put of these objects, the first of which is number `base` of the caller's."""

        def begin(session: ClientSession, number: int) -> wire.FromClient:
            self.add_put(number, base=base, slots=[item.slots for item in piece], on_answer=on_answer)
            return session.put(number, piece)

        return begin

    def getting(self, piece: tuple[wire.GetObject, ...], *, get: int, base: int, on_answer: OnLoaded) -> Begin:
        """A get of these objects; `get`: what the caller knows it by, 0 for the message's own number."""

        def begin(session: ClientSession, number: int) -> wire.FromClient:
            self.add_get(number, get=get or number, base=base, count=len(piece), on_answer=on_answer)
            return session.get(number, piece)

        return begin

    def leasing(
        self,
        piece: tuple[wire.LeaseObject, ...],
        *,
        get: int,
        base: int,
        of_session: Callable[[], tuple[int, int]],
        on_answer: OnLeased,
    ) -> Begin:
        """A lease of these objects."""

        def begin(session: ClientSession, number: int) -> wire.FromClient:
            self.add_lease(
                number, get=get or number, base=base, count=len(piece), of_session=of_session(), on_answer=on_answer
            )
            return session.lease(number, piece)

        return begin

    def seeking(self, piece: tuple[SeekObject, ...], *, fetch: bool, base: int, on_answer: OnSought) -> Begin:
        """A seek of these objects."""

        def begin(session: ClientSession, number: int) -> wire.FromClient:
            self._seeks[number] = _Seek(base, set(range(len(piece))), on_answer)
            return session.seek(number, piece, fetch=fetch)

        return begin

    def answered(self, action: ClientAction) -> list[Delivery]:
        """Whom to tell of what has come; nobody where it is no answer to any of these."""
        match action:
            case PutAnswered(put, stored):
                return self.stored(put, stored)
            case GetAnswered(get, loaded):
                return self.loaded(get, loaded)
            case LeaseAnswered(lease, leased):
                return self.leased(lease, leased)
            case SeekAnswered(seek, sought):
                return self.sought(seek, sought)
            case _:
                return []

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
            self._message_over(flight.get, number)
        return deliveries

    def leased(self, number: int, objects: Iterable[LeasedObject]) -> list[Delivery]:
        """Answers have come."""
        flight = self._leases[number]
        deliveries: list[Delivery] = []
        for answer in objects:
            flight.indexes.remove(answer.index)
            leased = Leased(
                index=flight.base + answer.index,
                status=answer.status,
                generation=answer.generation,
                length=answer.length,
                slots=answer.slots,
                epoch=flight.epoch,
                term=flight.term,
                number=number,
                place=answer.index,
            )
            deliveries.append(LeasedDelivery(leased, flight.on_answer))
        if not flight.indexes:
            del self._leases[number]
            self._message_over(flight.get, number)
        return deliveries

    def sought(self, number: int, objects: Iterable[SoughtObject]) -> list[Delivery]:
        """Answers have come."""
        flight = self._seeks[number]
        deliveries: list[Delivery] = []
        for answer in objects:
            flight.indexes.remove(answer.index)
            moved = SoughtObject(flight.base + answer.index, answer.status)
            deliveries.append(SoughtDelivery(moved, flight.on_answer))
        if not flight.indexes:
            del self._seeks[number]
        return deliveries

    def _message_over(self, get: int, number: int) -> None:
        messages = self._messages[get]
        messages.remove(number)
        if not messages:
            del self._messages[get]

    def lost(self, lost: Lost) -> list[Delivery]:
        """No answers will come: the connection has ended, and with it the gateway's hold on the slots."""
        deliveries: list[Delivery] = []
        for number, index in lost.puts:
            deliveries += self.stored(number, [StoredObject(index, StoreStatus.SHED)])
        for number, index in lost.gets:
            deliveries += self.loaded(number, [LoadedObject(index, LoadStatus.FAILED, 0, 0)])
        for number, index in lost.leases:
            deliveries += self.leased(number, [LeasedObject(index, LoadStatus.FAILED, 0, 0, ())])
        for number, index in lost.seeks:
            deliveries += self.sought(number, [SoughtObject(index, SoughtStatus.FAILED)])
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
    match delivery:
        case StoredDelivery():
            delivery.on_answer(delivery.answer)
        case LoadedDelivery():
            delivery.on_answer(delivery.answer)
        case LeasedDelivery():
            delivery.on_answer(delivery.answer)
        case SoughtDelivery():
            delivery.on_answer(delivery.answer)
