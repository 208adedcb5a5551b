"""A card driven step by step in one thread, with a clock of its own, for tests.

Owns a ring of slots, the time that the card is told, and the steps of a put in their order. Must not know sockets.
"""

import errno
import mmap
from collections.abc import Sequence
from dataclasses import replace

from ..card import Card, CardOptions, CommitBatch, GetPlan, PutPlan, PutRefusal  # noqa: TID252 -- the package may be vendored
from ..errors import CorruptObject, MediumError  # noqa: TID252
from ..geometry import HEADER_BYTES  # noqa: TID252
from ..key import ObjectKey  # noqa: TID252

POISON = 0xA5


class CardDriver:
    """Opens a card and plays the gateway."""

    def __init__(self, options: CardOptions, *, ring_slots: int = 64) -> None:
        self.options = options
        self.now_ns = 1_000_000_000
        self.card = Card.open(options)
        slot_bytes = self.card.geometry.slot_bytes
        ring = memoryview(mmap.mmap(-1, ring_slots * slot_bytes))
        self.ring = [ring[at : at + slot_bytes] for at in range(0, len(ring), slot_bytes)]

    # --- puts -----------------------------------------------------------------------------------------------

    def begin(
        self, key: ObjectKey, length: int, *, family: int = 0, position: int = 0, replacing: bool = False
    ) -> PutPlan | PutRefusal:
        """`begin_put` at the present time."""
        return self.card.begin_put(key, length, family, position, replacing, self.now_ns)

    def write(self, plan: PutPlan, data: bytes) -> None:
        """The payload into the ring, and the slots to the medium."""
        self.card.write(plan, self.fill(plan.fragments, data))

    def fill(self, fragments: int, data: bytes) -> list[memoryview]:
        """Ring slots with `data` as their payloads, poisoned elsewhere."""
        payload = self.card.geometry.fragment_bytes
        slots = self.ring[:fragments]
        for number, slot in enumerate(slots):
            part = data[number * payload : (number + 1) * payload]
            slot[:] = bytes([POISON]) * len(slot)
            slot[HEADER_BYTES : HEADER_BYTES + len(part)] = part
        return slots

    def commit(self) -> list[PutPlan]:
        """Commit everything that waits; the puts that are confirmed."""
        plans: list[PutPlan] = []
        while (batch := self.card.take_commit_batch()) is not None:
            self.card.commit_batch(batch)
            plans += self.card.confirmed(batch)
        return plans

    def put(
        self, key: ObjectKey, data: bytes, *, family: int = 0, position: int = 0, replacing: bool = False
    ) -> PutPlan | PutRefusal:
        """All steps of a put, to its confirmation."""
        plan = self.begin(key, len(data), family=family, position=position, replacing=replacing)
        if isinstance(plan, PutPlan):
            self.write(plan, data)
            self.card.finish_put(plan, None)
            self.commit()
        return plan

    def put_or_fail(self, key: ObjectKey, data: bytes, *, family: int = 0, replacing: bool = True) -> bool:
        """As the gateway does, on a medium that may fail: whether the put is confirmed."""
        plan = self.begin(key, len(data), family=family, replacing=replacing)
        if isinstance(plan, PutRefusal):
            return False
        failed: MediumError | None = None
        try:
            self.write(plan, data)
        except MediumError as error:
            failed = error
        self.card.finish_put(plan, failed, self.now_ns)
        return plan in self.commit_or_fail()

    def commit_or_fail(self) -> list[PutPlan]:
        """Commit what waits, up to a commit that fails; the puts that are confirmed."""
        plans: list[PutPlan] = []
        while (batch := self.card.take_commit_batch()) is not None:
            plans += self._commit_or_fail(batch)
        return plans

    def _commit_or_fail(self, batch: CommitBatch) -> list[PutPlan]:
        try:
            self.card.commit_batch(batch)
        except MediumError:
            self.card.commit_failed(batch, self.now_ns)
            return []
        return self.card.confirmed(batch)

    # --- gets -----------------------------------------------------------------------------------------------

    def get(self, key: ObjectKey) -> bytes | None:
        """The object's bytes; None for a miss. CorruptObject and MediumError as the card raises them."""
        plan = self.card.begin_get(key, self.now_ns)
        if plan is None:
            return None
        try:
            return self.read(plan)
        finally:
            self.card.end_get(plan)

    def get_or_drop(self, key: ObjectKey) -> bytes | None:
        """As the gateway does: a corrupt or unreadable object leaves the card; that, and any other fault, is a miss."""
        plan = self.card.begin_get(key, self.now_ns)
        if plan is None:
            return None
        try:
            return self.read(plan)
        except CorruptObject:
            self.card.drop(key, plan.generation, "corrupt")
            return None
        except MediumError as error:
            if error.errno == errno.EIO:
                self.card.drop(key, plan.generation, "unreadable")
            return None
        finally:
            self.card.end_get(plan)

    def read(self, plan: GetPlan, first_fragment: int = 0, fragments: int | None = None) -> bytes:
        """Read a pinned object (or some of its fragments) into poisoned slots."""
        count = plan.fragments - first_fragment if fragments is None else fragments
        slots = self.ring[:count]
        for slot in slots:
            slot[:] = bytes([POISON]) * len(slot)
        self.card.read(plan, slots, first_fragment)
        return self.payloads(slots, plan.length, first_fragment)

    def payloads(self, slots: Sequence[memoryview], length: int, first_fragment: int) -> bytes:
        """What the slots hold of an object of `length` bytes."""
        geometry = self.card.geometry
        return b"".join(
            slot[HEADER_BYTES : HEADER_BYTES + geometry.payload_bytes(length, fragment)]
            for fragment, slot in enumerate(slots, first_fragment)
        )

    # --- time and death -------------------------------------------------------------------------------------

    def tick(self, ms: float = 0) -> int | None:
        """Let time pass, and tell the card, as the gateway does once in each of its rounds."""
        self.now_ns += 1
        self.card.tick(self.now_ns)
        self.now_ns += int(ms * 1_000_000)
        return self.card.tick(self.now_ns)

    def settle(self, ms: float = 0) -> None:
        """Let time pass, with all that the card wants to do and to commit."""
        self.tick(ms)
        self.commit()
        self.tick()

    def settle_or_fail(self, ms: float = 0) -> None:
        """`settle`, on a medium that may fail."""
        self.tick(ms)
        self.commit_or_fail()
        self.tick()

    def crash(self) -> None:
        """Die as by kill -9, and open the card again."""
        self.card.abandon()
        self.card = Card.open(replace(self.options, capacity_bytes=None, databases=None, slot_bytes=None))

    def fail_commit(self, error: MediumError) -> list[PutPlan]:
        """A batch whose commit fails; the puts that have failed with it."""
        batch = self.card.take_commit_batch()
        assert batch is not None
        assert error.errno
        return self.card.commit_failed(batch)

    def close(self) -> None:
        """Close the card."""
        self.card.close()
