"""A scheduler's questions for objects that its gateway's card lacks.

Owns: how they are asked, in messages that fit. Must not know: sockets, threads, what a remote is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .flights import SoughtDelivery
from .wire_remote import SeekObject, SoughtObject, SoughtStatus, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .client_leases import Sender
    from .flights import Flights
    from .key import ObjectKey

__all__ = ["ClientSeeks", "SoughtObject", "SoughtStatus"]


class ClientSeeks:
    """All seeks of one client. Every method may be called from any thread; none blocks."""

    def __init__(self, sender: Sender, flights: Flights) -> None:
        self._sender = sender
        self._flights = flights
        self.usable = False
        """Whether the gateway has a remote, as its last Welcome said."""

    def ask(
        self, objects: Sequence[tuple[ObjectKey, int]], *, fetch: bool, on_answer: Callable[[SoughtObject], None]
    ) -> None:
        """Does the remote have these (key, fragments at the most)? With `fetch`: bring them to the card.

        Each is answered once, by its index; in this call, as failed, where there is no session.
        """
        items = [SeekObject(key.encode(), fragments) for key, fragments in objects]
        base = 0
        for piece in batches(items):
            if self._sender.fly(self._flights.seeking(piece, fetch=fetch, base=base, on_answer=on_answer)) is None:
                failed = [SoughtObject(base + index, SoughtStatus.FAILED) for index in range(len(piece))]
                self._sender.deliver([SoughtDelivery(answer, on_answer) for answer in failed])
            base += len(piece)
