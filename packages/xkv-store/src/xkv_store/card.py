"""A card: the medium side's one door, used by the gateway.

Owns what is on the card and who may use which slot: free, in flight, used, limbo; their sum is always the card.
Main-thread methods decide and never wait for the medium; `write`, `read` and `commit_batch` wait, on other
threads, and decide nothing. Must not know sockets, sessions, rings or vLLM.

A put: bytes in the ring, headers, slots on the medium, index committed, lookup table ("confirmed").
"""

import errno
import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .card_folder import GENERATIONS_PER_CEILING, Opened, open_folder
from .card_options import CardOptions
from .contents import Contents
from .departures import Reason
from .errors import MediumError
from .eviction import Budget, Chooser
from .extents import Run, SlotAllocator, place
from .geometry import EXTENTS_MAX, FRAGMENTS_MAX, NAMESPACE_BYTES
from .index import RemoveObject, SetObject
from .key import RANK_BYTES, ObjectKey, encoded_entry
from .layout import FAMILY_MAX, POSITION_MAX, Extent, Record
from .limbo import Ghost, Limbo
from .medium import Medium
from .overlay import CommitBatch, Overlay, Present
from .plans import GetPlan, PutPlan, PutRefusal
from .pressure import Pressure
from .quotas import STEPS_MIN, Account, Accounts
from .recency import Recency
from .sparse_log import SparseLog
from .table import CAPACITY_MIN, TableWriter
from .testing.points import reached

__all__ = ["Card", "CardOptions", "CommitBatch", "GetPlan", "PutPlan", "PutRefusal"]

log = logging.getLogger(__name__)

LIMBO_SHARE_MAX = 4  # limbo is at most this part (a quarter) of the slots: a burst must not empty the card
EVICTION_STEPS_MAX = 1_024  # entries of the order looked at from one tick to the next, however many puts are refused
COMMIT_RETRY_NS = 1_000_000_000  # after a failed commit: a full or failing device is not mended sooner
TICK_SOON_NS = 1_000_000  # more to evict than one call may: come back soon, but let others go first
PART_SLOTS_MIN = 16  # an object is spread over databases in parts of 4 MiB or more, which keep a device busy
TABLE_ENTRIES_PER_SLOT = 2  # half empty at most full: a probe or two for each lookup
PURGE_LIMBO_SHARE = 2  # of what limbo takes, a purge leaves so much (half) to evictions and replacements


class Card:
    """An open card. All methods are the main thread's, but `write`, `read` and `commit_batch`."""

    def __init__(self, options: CardOptions, opened: Opened) -> None:
        self.uuid, self.geometry = opened.card_uuid, opened.geometry
        self.boot_id, self.folder = uuid.uuid4().bytes, options.folder
        self._lock_fd, self._databases = opened.lock_fd, opened.databases
        for database in opened.databases:
            database.take_memory()
        self._medium = Medium(opened.databases, opened.geometry, opened.card_uuid)
        self._index, self._boots, self._rebuilt = opened.index, opened.boots, opened.rebuilt
        self._grace_ns = options.grace_ms * 1_000_000
        self._overlay, self._limbo = Overlay(opened.index), Limbo()
        self._allocators: list[SlotAllocator] = opened.loaded.allocators()
        self.slots_total = sum(allocator.slots for allocator in self._allocators)
        loaded, capacity = opened.loaded, max(CAPACITY_MIN, self.slots_total * TABLE_ENTRIES_PER_SLOT)
        self.table = TableWriter.create(capacity, self.uuid, self.boot_id)
        self.table.load_many(loaded.tags, loaded.generations, loaded.rank_bits, loaded.fragments)
        self._recency = Recency(self.slots_total, self.table, opened.generation, loaded.newest_family)
        self._chooser = Chooser(self._recency)
        self._budget, self._own_budget = Budget(EVICTION_STEPS_MAX), Budget(EVICTION_STEPS_MAX)
        self._flying: dict[bytes, PutPlan] = {}
        self._busy_chunks: Counter[bytes] = Counter()  # chunks with an object in flight or not yet committed
        self._uncommitted: dict[int, PutPlan] = {}  # by generation: finished, waiting for the index
        self._in_place: dict[int, bool] = {}  # of those, what the lookup table shows the former object of
        self._pins: Counter[int] = Counter()  # readers, by generation
        self._generation, self._generation_ceiling = opened.generation, opened.generation_ceiling
        self._ceiling_asked, self._next_database = False, 0
        self._objects, self._bytes = len(loaded.tags), int(loaded.lengths.sum())
        self._used_slots = self.slots_total - self._free_slots()
        self._pressure = Pressure(self.slots_total, self._grace_ns)
        self._accounts = Accounts(
            options.quotas, slot_bytes=self.geometry.slot_bytes, grace_ns=self._grace_ns, recency=self._recency
        )
        self._accounts.load(loaded.namespaces)
        self.contents = Contents(opened.index, self._overlay, self._accounts)
        self._flying_slots = self._commit_after_ns = 0
        self.departures, self._sparse_log, self._counters = opened.departures, SparseLog(log), Counter[str]()

    @classmethod
    def open(cls, options: CardOptions) -> "Card":
        """Lock, make or recover, and open the card; UserError with one line that says what to do."""
        return cls(options, open_folder(options))

    # --- puts: main thread --------------------------------------------------------------------------------

    def begin_put(  # noqa: PLR0917 -- the fields of a put, in the order of the protocol
        self, key: ObjectKey, length: int, family: int, position: int, replace: bool, now_ns: int
    ) -> PutPlan | PutRefusal:
        """Grant slots for an object, or say why not. With `replace` an object of that key gives way."""
        plan = self._begin_put(key, length, family, position, replace, now_ns)
        if plan is PutRefusal.BUSY or plan is PutRefusal.HELD:
            self._counters[f"puts_{plan.value}"] += 1
        elif isinstance(plan, Reason):
            self.departures.refused(key.encode(), plan)
            return PutRefusal.INVALID if plan is Reason.INVALID else PutRefusal.SHED
        return plan

    def _begin_put(  # noqa: PLR0917 -- as above
        self, key: ObjectKey, length: int, family: int, position: int, replace: bool, now_ns: int
    ) -> PutPlan | PutRefusal | Reason:
        fragments = self.geometry.fragments(length)
        fits = 0 <= family <= FAMILY_MAX and 0 <= position <= POSITION_MAX
        if length < 1 or fragments > FRAGMENTS_MAX or not fits:
            return Reason.INVALID
        encoded = key.encode()
        if encoded in self._flying:
            return PutRefusal.BUSY
        old = self._record(encoded, committed=self.table.holds(key.tag, key.bit))
        if old is not None and not replace:
            self._recency.touch(key.tag)
            return PutRefusal.HELD
        limbo_takes = old is None or self._limbo_takes(self.geometry.fragments(old.length))
        may_come = limbo_takes and not self._overlay.full and self._generation_left()
        if not (may_come and self._within_quota(key.namespace, fragments, now_ns)):
            return Reason.OVER_QUOTA if may_come else Reason.SHED
        self._pressure.advance(now_ns)
        self._pressure.put(fragments)
        runs = place(
            self._allocators, fragments, self._next_database, part_slots_min=PART_SLOTS_MIN, extents_max=EXTENTS_MAX
        )
        if runs is None:
            self._pressure.refused(fragments, one_in_the_way=self._objects == 1 and not self._flying)
            self._evict(now_ns)
            return Reason.SHED
        self._next_database = (self._next_database + 1) % len(self._allocators)
        self._generation += 1
        family = self._recency.came(key.tag, family, self._generation)
        extents = tuple(Extent(database, first, slots) for database, (first, slots) in runs)
        plan = PutPlan(key, encoded, self._generation, length, family, position, fragments, extents)
        self._flying[encoded] = plan
        self._flying_slots += fragments
        self._accounts.of(key.namespace).in_flight += fragments
        self._busy_chunks[encoded[:-RANK_BYTES]] += 1
        return plan

    def _within_quota(self, namespace: bytes, slots: int, now_ns: int) -> bool:
        """Whether the namespace may take `slots` more; where it may not, objects of its own leave."""
        account = self._accounts.of(namespace)
        if account.admits(slots, now_ns):
            return True
        self._evict_own(account, now_ns, self._own_budget)
        return False

    def finish_put(self, plan: PutPlan, error: MediumError | None, now_ns: int | None = None) -> None:
        """`write` has ended: queue the index entry, or give the slots back. `now_ns`: the latest known if None."""
        now_ns = self._pressure.now_ns if now_ns is None else now_ns
        del self._flying[plan.encoded_key]
        self._flying_slots -= plan.fragments
        (account := self._accounts.of(plan.key.namespace)).in_flight -= plan.fragments
        if error is not None:
            self.departures.refused(plan.encoded_key, Reason.FAILED)
            self._chunk_rests(plan.encoded_key)
            self._give(plan.extents)
            return
        is_listed = not self.table.is_exact or self.table.holds(plan.key.tag, plan.key.bit)  # no slot may be lost
        old = self._record(plan.encoded_key, committed=is_listed)
        ghost = None
        if old is not None:
            self.departures.left(plan.encoded_key, Reason.REPLACED, old.generation)
            ghost = self._to_limbo(plan.encoded_key, old, now_ns, readable=True)
            if old.generation not in self._uncommitted or old.generation in self._in_place:
                self._in_place[plan.generation] = True
        record = Record(plan.generation, plan.length, plan.family, plan.position, plan.extents)
        self._overlay.set(plan.encoded_key, record, ghost, is_new=old is None and not is_listed)
        self._uncommitted[plan.generation] = plan
        self._used_slots += plan.fragments
        account.came(plan.fragments)
        self._objects += 1
        self._bytes += plan.length

    # --- gets: main thread --------------------------------------------------------------------------------

    def begin_get(self, key: ObjectKey, now_ns: int) -> GetPlan | None:
        """Pin the object of this key; None if the card does not hold it, not even in limbo."""
        encoded = key.encode()
        record = self._record(encoded)
        if record is not None:
            self._recency.touch(key.tag)
        else:
            record = self._limbo.find(encoded, now_ns)
            if record is None:
                self._counters["gets_missed"] += 1
                return None
            self._counters["gets_from_limbo"] += 1
        self._counters["gets"] += 1
        return self._pinned(key, encoded, record)

    def begin_proof(self, key: ObjectKey) -> GetPlan | None:
        """Pin the object of this key to be proved, which counts as no use of it; None if the card does not hold it."""
        record = self._record(encoded := key.encode())
        return self._pinned(key, encoded, record) if record is not None else None

    def holds(self, plan: GetPlan) -> bool:
        """Whether the object of this plan is still the key's present one."""
        record = self._record(plan.encoded_key)
        return record is not None and record.generation == plan.generation

    def end_get(self, plan: GetPlan) -> None:
        """Unpin; the plan is of no use any more."""
        self._pins[plan.generation] -= 1
        if not self._pins[plan.generation]:
            self._pins.pop(plan.generation)

    def drop(self, key: ObjectKey, generation: int, reason: str) -> None:
        """That generation's bytes are bad: it is a miss from now on. Nothing happens to a newer one."""
        encoded = key.encode()
        self._limbo.condemn(encoded, generation)
        record = self._record(encoded)
        if record is None or record.generation != generation:
            return
        self._leave(encoded, record, 0, Reason(reason))

    def purge(self, encoded: bytes, generation: int, now_ns: int) -> int | None:
        """That object leaves as an evicted one does. Its length; 0: it is gone; None: limbo has no room. PeerError."""
        record = self._record(encoded)
        if record is None or record.generation != generation:
            return 0
        if self._overlay.full or not self._limbo_takes(self.geometry.fragments(record.length), PURGE_LIMBO_SHARE):
            return None
        self._leave(encoded, record, now_ns, Reason.PURGED)
        return record.length

    def touch(self, tags: Iterable[int]) -> None:
        """These chunks were looked up and hit."""
        self._recency.touch_all(tags)

    # --- time and commits: main thread --------------------------------------------------------------------

    def tick(self, now_ns: int) -> int | None:
        """Age limbo and evict ahead; in how many ns to call again at the latest (None: no need)."""
        self._pressure.advance(now_ns)
        self._recency.adapt(self._objects)
        for ghost in self._limbo.release(now_ns, self._pins):
            self._give(ghost.record.extents)
            self._accounts.of(ghost.key[:NAMESPACE_BYTES]).limbo -= ghost.slots
            reached("limbo.released")
        self._budget.left = self._own_budget.left = EVICTION_STEPS_MAX
        lacking = self._accounts.settle(now_ns)
        for account in lacking:
            self._evict_own(account, now_ns, Budget(max(STEPS_MIN, EVICTION_STEPS_MAX // len(lacking))))
        self._evict(now_ns)
        if (self._lacking_slots() > 0 or any(a.used and a.lacking_slots() > 0 for a in lacking)) and self._evictable():
            return TICK_SOON_NS
        ends_ns = self._limbo.next_end_ns()
        waits = [] if ends_ns is None else [ends_ns - now_ns]
        if len(self._limbo) or now_ns < self._commit_after_ns:
            waits.append(COMMIT_RETRY_NS)
        return max(TICK_SOON_NS, min(waits)) if waits else None

    def take_commit_batch(self) -> CommitBatch | None:
        """What is to be committed next; None while the last batch has not come back, or nothing waits.

        After a failed commit there is none for COMMIT_RETRY_NS.
        """
        return self._overlay.take() if self._pressure.now_ns >= self._commit_after_ns else None

    def confirmed(self, batch: CommitBatch) -> list[PutPlan]:
        """`batch` is committed: publish it to the table. Its puts, which can now be answered."""
        self._counters["commits"] += 1
        if batch.generation_ceiling is not None:
            self._generation_ceiling = batch.generation_ceiling
            self._ceiling_asked = False
        plans = list[PutPlan]()
        for order_key, key in batch.places:
            self._chooser.came(order_key, key)
            self._accounts.came(order_key, key)
        for _, generation, record in self._overlay.settle(batch):
            plan = self._uncommitted.pop(generation)
            self._chunk_rests(plan.encoded_key)
            replaces = self._in_place.pop(generation, False)
            if record is not None:  # neither dropped nor replaced in the meantime
                self.table.put(plan.key.tag, generation, plan.key.bit, plan.fragments, replaces=replaces)
                self._recency.confirmed(plan.key.tag, record.family)
            self._counters["puts_confirmed"] += 1
            self._counters["put_bytes"] += plan.length
            plans.append(plan)
        return plans

    def commit_failed(self, batch: CommitBatch, now_ns: int | None = None) -> list[PutPlan]:
        """`commit_batch` failed: its puts (returned) have failed; its removals are tried again."""
        now_ns = self._pressure.now_ns if now_ns is None else now_ns
        self._counters["commits_failed"] += 1
        self._commit_after_ns = now_ns + COMMIT_RETRY_NS
        plans = []
        for change, removal, record in self._overlay.undo(batch):
            assert isinstance(change, SetObject)
            if record is not None:
                plan = self._uncommitted[record.generation]
                self.table.remove_failed(plan.key.tag, plan.key.bit)
                removal.ghosts.append(self._to_limbo(change.key, record, now_ns, readable=False))
        for step in batch.steps:
            if step.generation:
                plan = self._uncommitted.pop(step.generation)
                self._in_place.pop(step.generation, None)
                self._chunk_rests(plan.encoded_key)
                self.departures.refused(plan.encoded_key, Reason.FAILED)
                plans.append(plan)
        return plans

    # --- what there is: main thread -----------------------------------------------------------------------

    def is_coming(self, encoded: bytes) -> bool:
        """Whether an object of this key's chunk is being put, or waits for its commit."""
        return encoded[:-RANK_BYTES] in self._busy_chunks

    @property
    def objects(self) -> int:
        """How many objects the card holds."""
        return self._objects

    @property
    def generation(self) -> int:
        """The last one that was given."""
        return self._generation

    def counters(self) -> dict[str, int]:
        """What has happened in this life of the card."""
        return {**self._counters, **self.departures.counters}

    def slots(self) -> dict[str, int]:
        """Where every slot is: free, in flight, used or in limbo; the four make up `slots_total`."""
        used, limbo = self._used_slots, self._limbo.slots
        return {"free": self._free_slots(), "in_flight": self._flying_slots, "used": used, "limbo": limbo}

    def status(self) -> dict[str, Any]:
        """For people and metrics: sizes, counts, how the card was opened."""
        return {
            "card_uuid": self.uuid.hex(),
            "boot_id": self.boot_id.hex(),
            "boots": self._boots,
            "index_rebuilt": self._rebuilt,
            "slot_bytes": self.geometry.slot_bytes,
            "slots_total": self.slots_total,
            "slots": self.slots(),
            "capacity_bytes": self.slots_total * self.geometry.slot_bytes,
            "objects": self._objects,
            "object_bytes": self._bytes,
            "generation": self._generation,
            "uncommitted": len(self._overlay),
            "limbo_objects": len(self._limbo),
            "table_entries": self.table.entries,
            "index_map_bytes": self._index.map_bytes(),
            **self._accounts.status(),
            "databases": [
                {"path": str(one.path), "slots": one.superblock.slots, "direct": one.direct, "memory": one.memory}
                for one in self._databases
            ],
            "counters": self.counters(),
        }

    # --- the medium: other threads ------------------------------------------------------------------------

    def write(self, plan: PutPlan, slots: Sequence[memoryview], sums: Sequence[int] | None = None) -> None:
        """See Medium.write."""
        self._medium.write(plan, slots, sums)

    def write_many(self, objects: Sequence[tuple[PutPlan, Sequence[memoryview]]]) -> list[Exception | None]:
        """See Medium.write_many."""
        return self._medium.write_many(objects)

    def read(self, plan: GetPlan, slots: Sequence[memoryview], first_fragment: int) -> None:
        """Read and prove as many fragments from `first_fragment` on as there are slots. MediumError, CorruptObject."""
        self._medium.read(plan, slots, first_fragment)

    def read_row(self, objects: Sequence[tuple[GetPlan, memoryview, int]]) -> list[Exception | None]:
        """See Medium.read_row."""
        return self._medium.read_row(objects)

    def copy(self, plan: GetPlan, source: Sequence[memoryview], slots: Sequence[memoryview], first: int) -> None:
        """Copy what `read` has brought into other slots, and prove it there. CorruptObject."""
        self._medium.copy(plan, source, slots, first)

    @property
    def deleted(self) -> bool:
        """Whether somebody has deleted the card's folder: what is written now is nobody's. Any thread may ask."""
        return os.fstat(self._lock_fd).st_nlink == 0

    def commit_batch(self, batch: CommitBatch) -> None:
        """Commit a batch to the index; then the main thread calls `confirmed`, or `commit_failed` on MediumError.

        MediumError also where the folder was deleted.
        """
        if self.deleted:
            raise MediumError(errno.ENOENT, f"the card's folder {self.folder} was deleted", "restart the gateway")
        self._index.apply(batch.changes, batch.generation_ceiling)
        if any(isinstance(step.change, RemoveObject) for step in batch.steps):
            reached("evict.committed")

    def close(self) -> None:
        """Commit what waits, make all durable, and let go of everything. No put or get may be in flight.

        MediumError if that fails; everything is let go of all the same. Of a deleted card nothing is written.
        """
        if self.deleted:
            self.abandon()
            return
        try:
            while (batch := self._overlay.take()) is not None:
                self.commit_batch(batch)
                self.confirmed(batch)
            reached("close.committed")
            for database in self._databases:
                database.sync()
            reached("close.synced")
            self._index.end_cleanly()
            self.departures.save(self.folder, self.uuid, self._boots)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of everything as a kill would: what waits for its commit is lost, nothing is synced."""
        self.table.close()
        self._index.close()
        for database in self._databases:
            database.close()
        os.close(self._lock_fd)

    # --- inside -------------------------------------------------------------------------------------------

    def _pinned(self, key: ObjectKey, encoded: bytes, record: Record) -> GetPlan:
        self._pins[record.generation] += 1
        fragments = self.geometry.fragments(record.length)
        return GetPlan(key, encoded, *record[:4], fragments, record.extents)

    def _record(self, encoded: bytes, *, committed: bool = True) -> Record | None:
        """The present record, of what waits alone if not `committed`; an index that cannot be read makes a miss."""
        try:
            return self._overlay.record(encoded, committed=committed)
        except MediumError as error:
            self._counters["index_errors"] += 1
            self._sparse_log.warning("%s", error)
            return None

    def _generation_left(self) -> bool:
        """Whether a generation may be given; asks for the next ceiling in time."""
        left = self._generation_ceiling - self._generation
        if left < GENERATIONS_PER_CEILING // 2 and not self._ceiling_asked:
            self._ceiling_asked = True
            self._overlay.raise_ceiling(self._generation + GENERATIONS_PER_CEILING)
        return left > 0

    def _free_slots(self) -> int:
        return sum([allocator.free for allocator in self._allocators])

    def _give(self, extents: Iterable[Extent]) -> None:
        for database, first, slots in extents:
            self._allocators[database].give(Run(first, slots))

    def _chunk_rests(self, encoded: bytes) -> None:
        chunk_key = encoded[:-RANK_BYTES]
        self._busy_chunks[chunk_key] -= 1
        if not self._busy_chunks[chunk_key]:
            self._busy_chunks.pop(chunk_key)

    def _limbo_takes(self, slots: int, share: int = 1) -> bool:
        """Whether limbo has room; a lone object always has, or a small card could never evict."""
        return not self._limbo.slots or self._limbo.slots + slots <= self.slots_total // LIMBO_SHARE_MAX // share

    def _to_limbo(self, encoded: bytes, record: Record, now_ns: int, *, readable: bool) -> Ghost:
        slots = self.geometry.fragments(record.length)
        ghost = Ghost(encoded, record, slots, now_ns + self._grace_ns, readable, left_ns=now_ns)
        self._limbo.add(ghost)
        self._used_slots -= slots
        self._accounts.of(encoded[:NAMESPACE_BYTES]).left(slots)
        self._objects -= 1
        self._bytes -= record.length
        return ghost

    def _leave(self, encoded: bytes, record: Record, now_ns: int, reason: Reason) -> None:
        """Out of the table and the index, into limbo."""
        self.table.remove_rank(*encoded_entry(encoded))
        readable = reason in (Reason.EVICTED, Reason.PURGED)
        self.departures.left(encoded, reason, record.generation)
        self._overlay.remove(encoded, self._to_limbo(encoded, record, now_ns, readable=readable))

    # --- eviction -----------------------------------------------------------------------------------------

    def _lacking_slots(self) -> int:
        return self._pressure.lacking_slots(free=self._free_slots(), on_their_way=self._limbo.slots)

    def _evictable(self) -> bool:
        return self._used_slots > 0 and self._limbo_takes(1) and not self._overlay.full

    def _evict(self, now_ns: int) -> None:
        """Send chunks to limbo until enough slots are free or on their way, within the tick's bound."""
        self._make_room(self._lacking_slots, self._chooser, self._objects, now_ns, self._budget)

    def _evict_own(self, account: Account, now_ns: int, budget: Budget) -> None:
        """The same for a namespace's quota, with its own chunks."""
        if account.chooser is not None:
            self._make_room(account.lacking_slots, account.chooser, account.objects, now_ns, budget)

    def _make_room(self, lacks: Callable[[], int], chooser: Chooser, objects: int, now_ns: int, budget: Budget) -> None:
        view = Present(self._index, self._overlay, self.table, self._busy_chunks, self._pins, objects)
        try:
            while lacks() > 0 and self._evictable():
                chunk = chooser.next_chunk(view, budget)
                if chunk is None:
                    return
                reached("evict.begin")
                self._counters["evicted_chunks"] += 1
                for encoded, record in chunk:
                    self._leave(encoded, record, now_ns, Reason.EVICTED)
                reached("evict.removed")
        except MediumError as error:
            self._counters["index_errors"] += 1
            log.warning("evicting: %s", error)
