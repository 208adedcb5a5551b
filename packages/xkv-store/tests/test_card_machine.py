"""Anything may happen to a card in any order, kills included: it never gives wrong bytes and never loses a slot.

A stateful test against a model: what was put under a key, which of it is confirmed, what left and when.
"""

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import TypeAlias

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xkv_store.card import CardOptions, CommitBatch, GetPlan, PutPlan
from xkv_store.errors import MediumError
from xkv_store.geometry import DATA_OFFSET, HEADER_BYTES
from xkv_store.key import RANK_BYTES, ObjectKey
from xkv_store.layout import Extent
from xkv_store.testing.cards import CardDriver

SLOT = 4_096
PAYLOAD = SLOT - HEADER_BYTES
GRACE_MS = 50
# Thousands of commits, each with its sync: on a busy disk that is minutes, and decisions are what is tested here.
MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
PUTS_PER_LIFE_MIN = 6  # else most lives would end before anything has happened

KEYS = [ObjectKey(bytes(16), 0, bytes([n]) * 9, rank) for n in range(6) for rank in ((0, 1) if n % 2 else (0,))]
keys = st.sampled_from(KEYS)
small = st.integers(0, 5)
lengths = st.sampled_from([1, PAYLOAD, PAYLOAD + 1, 3 * PAYLOAD])


Flight: TypeAlias = tuple[PutPlan, bytes]  # with the content
Reader: TypeAlias = tuple[GetPlan, bytes]


def data_of(version: int, length: int) -> bytes:
    return (version.to_bytes(4, "little") * (length // 4 + 1))[:length]


class CardMachine(RuleBasedStateMachine):
    """Each put has a version of its own, so that mixed or stale bytes show."""

    @initialize(slots=st.integers(5, 12), databases=st.integers(1, 2))
    def make(self, slots: int, databases: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="xkv-machine-", dir=MEMORY_FOLDER))
        self.driver = CardDriver(
            CardOptions(
                folder=self.folder / "card",
                capacity_bytes=databases * (DATA_OFFSET + slots * SLOT),
                databases=databases,
                slot_bytes=SLOT,
                grace_ms=GRACE_MS,
            ),
            ring_slots=8,
        )
        self.version = 0
        self.puts_of_life = 0
        self.flying: list[Flight] = []
        self.readers: list[Reader] = []
        self.batch: CommitBatch | None = None
        self.batch_applied = False
        self.contents: dict[ObjectKey, dict[int, bytes]] = {key: {} for key in KEYS}  # by generation, all lives
        self.dropped: set[int] = set()
        self.left_ns: dict[ObjectKey, tuple[int, int]] = {}  # evicted: (generation, when)

    def teardown(self) -> None:
        """In the end nothing is stuck: all that is not an object's is free again."""
        for flight in self.flying:
            self.finish(flight, fails=True)
        for plan, _ in self.readers:
            self.driver.card.end_get(plan)
        self.settle(fails=False)
        slots = self.driver.card.slots()
        for _ in range(self.driver.card.slots_total + 2):  # a small card goes on evicting ahead, object by object
            self.driver.settle(1_100)
            slots = self.driver.card.slots()
        assert (slots["in_flight"], slots["limbo"]) == (0, 0)
        self.driver.card.abandon()
        shutil.rmtree(self.folder)

    def shown(self) -> dict[ObjectKey, int]:
        """What the lookup table says: generation (the highest of the ranks) by key."""
        found = {}
        for key in KEYS:
            entry = self.driver.card.table.get(key.tag)
            if entry is not None and entry[1] & key.bit:
                found[key] = entry[0]
        return found

    def note_evictions(self, before: dict[ObjectKey, int]) -> None:
        after = self.shown()
        gone = before.keys() - after.keys()
        for key in gone:
            self.left_ns[key] = (before[key], self.driver.now_ns)
            siblings = [k for k in after if k.encode()[:-RANK_BYTES] == key.encode()[:-RANK_BYTES]]
            assert not siblings, "a chunk's ranks leave together"

    # --- puts -----------------------------------------------------------------------------------------------

    def begin(self, key: ObjectKey, length: int, position: int, replacing: bool) -> Flight | None:
        before = self.shown()
        plan = self.driver.begin(key, length, family=1, position=position, replacing=replacing)
        self.note_evictions(before)
        if not isinstance(plan, PutPlan):
            return None
        assert all(plan.generation not in versions for versions in self.contents.values())
        self.version += 1
        self.puts_of_life += 1
        self.contents[key][plan.generation] = data_of(self.version, length)
        return plan, self.contents[key][plan.generation]

    # Few rules with many branches: Hypothesis leaves some rules out of each example, and an example without
    # the end of a put would see nothing but keys that are in flight.

    @rule(
        key=keys,
        length=lengths,
        position=st.integers(0, 2),
        replacing=st.booleans(),
        until=st.sampled_from(["begun", "failed", "finished", "confirmed", "confirmed", "confirmed"]),
    )
    def put(self, key: ObjectKey, length: int, position: int, replacing: bool, until: str) -> None:
        flight = self.begin(key, length, position, replacing)
        if flight is None:
            return
        if until == "begun":
            self.flying.append(flight)
            return
        self.finish(flight, fails=until == "failed")
        if until == "confirmed":
            for _ in range(2):  # what was taken before, then this
                self.settle(fails=False)
                self.take(apply=True)
            self.settle(fails=False)

    @rule(step=st.sampled_from(["finish", "finish", "fail", "take", "apply", "settle", "settle", "lose"]), which=small)
    def go_on(self, step: str, which: int) -> None:
        """The next step of something that was begun."""
        if step in {"finish", "fail"} and self.flying:
            self.finish(self.flying.pop(which % len(self.flying)), fails=step == "fail")
        elif step in {"take", "apply"}:
            self.take(apply=step == "apply")
        elif step in {"settle", "lose"}:
            self.settle(fails=step == "lose")

    @rule(key=keys, then=st.sampled_from(["read", "pin", "pin", "drop", "purge"]))
    def get(self, key: ObjectKey, then: str) -> None:
        plan = self.driver.card.begin_get(key, self.driver.now_ns)
        if plan is None:
            return
        if then == "pin":
            self.readers.append((plan, self.contents[key][plan.generation]))
            return
        assert self.driver.read(plan) == self.contents[key][plan.generation]
        if then == "drop":
            self.driver.card.drop(key, plan.generation, "corrupt")
            self.left_ns.pop(key, None)
            assert key not in self.shown()
        elif then == "purge":
            self.purge(key, plan.generation)
        self.driver.card.end_get(plan)

    def purge(self, key: ObjectKey, generation: int) -> None:
        """It leaves the table at once, and can be read for the grace time, or stays as it is."""
        was_shown = key in self.shown()
        if self.driver.card.purge(key.encode(), generation, self.driver.now_ns):
            assert key not in self.shown()
            if was_shown:
                self.left_ns[key] = (generation, self.driver.now_ns)

    @rule(which=small)
    def end_get(self, which: int) -> None:
        """However long ago it was pinned, and whatever has happened to its object."""
        if self.readers:
            plan, data = self.readers.pop(which % len(self.readers))
            assert self.driver.read(plan) == data
            self.driver.card.end_get(plan)

    @rule(ms=st.sampled_from([1, GRACE_MS - 1, GRACE_MS, GRACE_MS, 1_100]), touched=st.lists(keys, max_size=3))
    def time_goes_on(self, ms: int, touched: list[ObjectKey]) -> None:
        self.driver.card.touch([key.tag for key in touched])
        before = self.shown()
        self.driver.tick(ms)
        self.note_evictions(before)

    # --- the steps ------------------------------------------------------------------------------------------

    def finish(self, flight: Flight, *, fails: bool) -> None:
        plan, data = flight
        if fails:
            self.driver.card.finish_put(plan, MediumError(errno.EIO, "test"))
        else:
            self.driver.write(plan, data)
            self.driver.card.finish_put(plan, None)

    def take(self, *, apply: bool) -> None:
        if self.batch is None:
            self.batch = self.driver.card.take_commit_batch()
            self.batch_applied = self.batch is not None and apply
            if self.batch is not None and apply:
                self.driver.card.commit_batch(self.batch)

    def settle(self, *, fails: bool) -> None:
        """The batch has come back; one that failed may have been applied all the same."""
        if self.batch is None:
            return
        batch, self.batch = self.batch, None
        if fails:
            before = self.shown()
            self.driver.card.commit_failed(batch)
            for key in before.keys() - self.shown().keys():
                self.left_ns.pop(key, None)
            return
        if not self.batch_applied:
            self.driver.card.commit_batch(batch)
        confirmed = self.driver.card.confirmed(batch)
        assert all(plan.generation in self.contents[plan.key] for plan in confirmed)

    # --- death ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.puts_of_life >= PUTS_PER_LIFE_MIN)
    @rule()
    def crash(self) -> None:
        shown = self.shown()
        overlay = self.driver.card._overlay
        waiting = {key for key in KEYS if key.encode() in overlay._entries}
        self.driver.crash()
        self.puts_of_life = 0
        self.flying.clear()
        self.readers.clear()
        self.batch = None
        self.left_ns.clear()
        after = self.shown()
        assert shown.keys() - waiting <= after.keys(), "what was confirmed survives"
        assert after.keys() <= shown.keys() | waiting, "what was never there does not appear"

    @precondition(lambda self: self.puts_of_life >= PUTS_PER_LIFE_MIN)
    @rule()
    def close_and_open(self) -> None:
        """A clean end. (What the gateway does first: no put, get or commit in flight.)"""
        if self.batch is not None or self.flying or self.readers:
            return
        expected = {key for key in KEYS if self.driver.card._overlay.record(key.encode()) is not None}
        self.driver.close()
        self.driver.card = self.driver.card.open(self.driver.options)
        self.puts_of_life = 0
        self.flying.clear()
        self.readers.clear()
        self.left_ns.clear()
        assert self.shown().keys() == expected

    # --- always ---------------------------------------------------------------------------------------------

    @invariant()
    def slots_add_up(self) -> None:
        card = self.driver.card
        assert sum(card.slots().values()) == card.slots_total
        assert min(card.slots().values()) >= 0

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        """Two owners would mix two objects' bytes; none would be lost for ever."""
        card = self.driver.card
        owned = [np.zeros(allocator.slots, np.int64) for allocator in card._allocators]

        def own(extents: tuple[Extent, ...]) -> None:
            for database, first, slots in extents:
                owned[database][first : first + slots] += 1

        for database, allocator in enumerate(card._allocators):
            own(tuple(Extent(database, *run) for run in allocator.free_runs()))
        for plan in card._flying.values():
            own(plan.extents)
        for ghost in [*card._limbo._aging.values(), *card._limbo._at_once.values()]:
            own(ghost.record.extents)
        for key in KEYS:
            record = card._overlay.record(key.encode())
            if record is not None:
                own(record.extents)
        assert all((slots == 1).all() for slots in owned)

    @invariant()
    def what_is_shown_is_there_with_the_right_bytes(self) -> None:
        for key in self.shown():
            self.read_now(key)

    @invariant()
    def what_has_just_left_can_still_be_read(self) -> None:
        """A hit that was given just before must not fail."""
        for key, (_, left_ns) in list(self.left_ns.items()):
            if self.driver.now_ns - left_ns < GRACE_MS * 1_000_000:
                self.read_now(key)
            else:
                del self.left_ns[key]

    def read_now(self, key: ObjectKey) -> None:
        plan = self.driver.card.begin_get(key, self.driver.now_ns)
        assert plan is not None
        assert self.driver.read(plan) == self.contents[key][plan.generation]
        self.driver.card.end_get(plan)


TestCardMachine = CardMachine.TestCase
TestCardMachine.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
