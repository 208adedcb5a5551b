"""A rank's leases of slots in the region that its engine's ranks share.

Owns: how leases are asked for, whether one still holds, how they are given back. Must not know: sockets, threads,
what lies in a slot. Every method may be called from any thread; none blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from . import wire
from .flights import Leased, LeasedDelivery, LeaseObject
from .wire import LoadStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .client_session import ClientSession
    from .control import ControlPage
    from .flights import Begin, Delivery, Flights

__all__ = ["ClientLeases", "LeaseObject", "Leased"]


class Sender(Protocol):
    """The client, as far as leases need it."""

    def fly(self, begin: Begin) -> int | None:
        """Send what `begin` makes, with a new number; that number, or None where there is no session."""

    def say(self, epoch: int, make: Callable[[ClientSession], wire.FromClient]) -> None:
        """Send what `make` makes, if that session is still there; also to a gateway that does not keep up."""

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Call callers."""

    @property
    def control(self) -> ControlPage:
        """The engine's control page."""

    @property
    def epoch(self) -> int:
        """The present session's number."""


class ClientLeases:
    """All leases of one client."""

    def __init__(self, sender: Sender, flights: Flights, rank: int) -> None:
        self._sender = sender
        self._flights = flights
        self._rank = rank
        self.term = 0
        """Of the present session: its leases hold as long as the control page says the same."""

    def take(self, objects: Sequence[LeaseObject], on_answer: Callable[[Leased], None]) -> int:
        """Ask for objects. Each is answered once, by its index; those that are `OK` are to be released once copied.

        What they take was taken from the client's `lease_budget` before. Returns the number to cancel it by.
        """
        items = [wire.LeaseObject(o.key.encode(), o.first_fragment, o.fragments) for o in objects]
        get = 0
        base = 0
        for piece in wire.split_leases(items):
            number = self._sender.fly(
                self._flights.leasing(piece, get=get, base=base, of_session=self._session, on_answer=on_answer)
            )
            get = get or number or 0
            if number is None:
                refused = [Leased(base + index, LoadStatus.FAILED, 0, 0) for index in range(len(piece))]
                self._sender.deliver([LeasedDelivery(answer, on_answer) for answer in refused])
            base += len(piece)
        return get

    def holds(self, leased: Leased) -> bool:
        """Whether the slots have been this lease's all the time: to be asked after they were copied."""
        return self._sender.control.term(self._rank) == leased.term

    def release(self, *objects: Leased) -> None:
        """Their slots are copied. Nothing happens where a lease's session has ended: so have its leases."""
        places: dict[tuple[int, int], list[int]] = {}
        for leased in objects:
            places.setdefault((leased.epoch, leased.number), []).append(leased.place)
        for (epoch, number), released in places.items():
            self._sender.say(epoch, _releasing(number, tuple(released)))

    def _session(self) -> tuple[int, int]:
        return self._sender.epoch, self.term


def _releasing(lease: int, places: tuple[int, ...]) -> Callable[[ClientSession], wire.FromClient]:
    return lambda session: session.release(lease, places)
