"""What a client holds of its engine's shared memory, and how it takes it from a Welcome.

Owns: the checks that ring, control page and lookup table are what the Welcome says, and that after a
reconnect they are those of before. Must not know: sockets, sessions, threads. What is not as it should be
raises `PeerError`; all descriptors are taken over or closed in any case.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .control import ControlPage
from .errors import PeerError
from .ring import Ring, RingUse, SlotBudget, SlotRegion, memory_identity, staged_slots
from .table import TableReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .wire import Welcome


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One engine's ring and control page, this session's regions, and the gateway's present lookup table.

    `lease_budget`: where ranks share the load region, what this one may hold of it.
    """

    card_uuid: bytes
    ring: Ring
    control: ControlPage
    store_region: SlotRegion
    load_region: SlotRegion
    lease_budget: SlotBudget
    ring_use: RingUse
    table: TableReader

    def use_huge_pages(self, *, staged_bytes: int) -> None:
        """Take the memory of this session's slots, and of those that the scheduler stages in: a rank's GPU pins them as
        well, and the scheduler comes after it. Pinned pages cannot be moved together any more.
        """
        ring = self.ring
        staged = staged_slots(staged_bytes=staged_bytes, slot_bytes=ring.slot_bytes)
        ring.use_huge_pages(
            [self.store_region.numbers, self.load_region.numbers, range(ring.slots - staged, ring.slots)]
        )

    def close(self) -> None:
        """Give the descriptors back; mappings go with their last user."""
        self.ring.close()
        self.control.close()


def take_memory(
    welcome: Welcome, fds: Sequence[int], *, world_size: int, previous: EngineMemory | None
) -> EngineMemory:
    """The memory behind a Welcome's descriptors (ring, control page, lookup table).

    With `previous`, ring and control page must be the same memory files, the regions the same slots and the
    card the same card; only the lookup table is new.
    """
    with contextlib.ExitStack() as unclosed:
        for fd in fds:
            unclosed.callback(os.close, fd)
        ring_fd, control_fd, table_fd = fds
        table = _attach_table(table_fd, welcome.card_uuid)
        if previous is not None:
            _check_same(welcome, ring_fd, control_fd, previous)
            return replace(previous, table=table)
        unclosed.pop_all()
        os.close(table_fd)
        return _adopt(welcome, ring_fd, control_fd, world_size=world_size, table=table)


def _adopt(welcome: Welcome, ring_fd: int, control_fd: int, *, world_size: int, table: TableReader) -> EngineMemory:
    try:
        control = ControlPage.attach(control_fd, ranks=world_size)
    except BaseException:
        os.close(ring_fd)
        raise
    try:
        ring = Ring.adopt(ring_fd, slots=welcome.ring_slots, slot_bytes=welcome.slot_bytes)
    except BaseException:
        control.close()
        raise
    return EngineMemory(
        card_uuid=welcome.card_uuid,
        ring=ring,
        control=control,
        store_region=SlotRegion(welcome.store_region.first, welcome.store_region.count),
        load_region=SlotRegion(welcome.load_region.first, welcome.load_region.count),
        lease_budget=SlotBudget(welcome.lease_slots),
        ring_use=welcome.ring_use,
        table=table,
    )


def _attach_table(fd: int, card_uuid: bytes) -> TableReader:
    try:
        return TableReader.attach(fd, check_card_uuid=card_uuid)
    except (OSError, ValueError) as error:
        raise PeerError(f"the lookup table cannot be mapped: {error}") from error


def _check_same(welcome: Welcome, ring_fd: int, control_fd: int, previous: EngineMemory) -> None:
    if welcome.card_uuid != previous.card_uuid:
        raise PeerError(
            f"the gateway serves another card now ({welcome.card_uuid.hex()}, before "
            f"{previous.card_uuid.hex()}); restart the engine to use it"
        )
    if memory_identity(ring_fd) != previous.ring.identity:
        raise PeerError("the gateway did not take this engine's ring over")
    if memory_identity(control_fd) != previous.control.identity:
        raise PeerError("the gateway did not take this engine's control page over")
    stores, loads = previous.store_region, previous.load_region
    leases = (previous.ring_use, previous.lease_budget.count)
    before = (stores.first, stores.count, loads.first, loads.count, *leases)
    store, load = welcome.store_region, welcome.load_region
    if (store.first, store.count, load.first, load.count, welcome.ring_use, welcome.lease_slots) != before:
        raise PeerError("the gateway divides the ring otherwise than before")
