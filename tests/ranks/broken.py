"""A broken rule, for the canary: a lease that does not keep its slots, and a rank that does not look.

Owns: the two changes. Must not know: anything else of the run. A run that does not notice them is blind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xkv_offload.loads import Loads
from xkv_store.client_leases import ClientLeases
from xkv_store.transfers import Transfers
from xkv_store.wire import LoadStatus

if TYPE_CHECKING:
    from xkv_store.transfers import Party


def break_gateway() -> None:
    """What is answered is let go at once, so that its slots are used again while ranks copy from them."""
    real = Transfers._answer_lease

    def answer(self: Transfers, party: Party, name: tuple[int, int], status: LoadStatus, *about: Any) -> None:
        real(self, party, name, status, *about)
        if status is LoadStatus.OK and party.region is not None:
            party.region.let_go(party.held.pop(name))

    def drop(self: Transfers, party: Any, drop: Any) -> None:
        """They were let go long ago."""

    vars_of: Any = Transfers
    vars_of._answer_lease = answer
    vars_of.drop = drop


def break_rank() -> None:
    """What was copied is believed, whatever the slots say after it."""
    leases: Any = ClientLeases
    leases.holds = lambda *_: True
    loads: Any = Loads
    loads._holds = lambda *_: True
