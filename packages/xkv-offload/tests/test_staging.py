"""Verified before hit: who gets slots, who waits, when slots are let go, and that no wait is for ever."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_offload import staging as staging_module
from xkv_offload.staging import Answer, Chunk, ReadDone, Staging

NAMESPACE = b"n" * 16


@dataclass
class FakeReads:
    """A staged region of so many slots; reads end when the test says so."""

    slots: int
    taken: set[int] = field(default_factory=set)
    started: list[Chunk] = field(default_factory=list)
    sent: list[Chunk] = field(default_factory=list)
    done: list[ReadDone] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.slots - len(self.taken)

    def take(self, count: int) -> list[int] | None:
        if count > self.free:
            return None
        found = [slot for slot in range(self.slots) if slot not in self.taken][:count]
        self.taken.update(found)
        return found

    def give(self, slots: Sequence[int]) -> None:
        assert self.taken >= set(slots), "given back twice"
        self.taken.difference_update(slots)

    def start(self, chunk: Chunk) -> None:
        self.started.append(chunk)

    def send(self) -> None:
        self.sent += self.started
        self.started = []

    def loaded(self) -> Sequence[tuple[int, int]]:
        return [(0, 0)]

    def finished(self) -> Iterable[ReadDone]:
        taken, self.done = self.done, []
        return taken

    def end(self, *, ok: bool = True, denied: bool = False) -> None:
        for chunk in self.sent:
            for number in range(len(chunk.slots)):
                self.done.append(ReadDone(chunk, number, 7, 100, ok, denied))
        self.sent = []


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(staging_module, "time", made)
    return made


@dataclass
class Rig:
    reads: FakeReads
    staging: Staging
    objects: int = 1
    fragments: int = 1

    def ask(self, req_id: str, *keys: int) -> str:
        """One pass of lookups: H(it), P(ending), M(iss) for each key."""
        answers = [
            self.staging.lookup(
                req_id=req_id,
                namespace=NAMESPACE,
                key=name(key),
                objects=self.objects,
                fragments=lambda: self.fragments,
            )
            for key in keys
        ]
        return "".join(answer.name[0] for answer in answers)

    def step(self, *, ok: bool = True, denied: bool = False) -> None:
        """A step ends, and then all reads."""
        self.staging.end_step()
        self.reads.end(ok=ok, denied=denied)


def rig(slots: int, *, objects: int = 1, fragments: int = 1, groups: int = 1) -> Rig:
    reads = FakeReads(slots)
    return Rig(reads, Staging(reads, pending_seconds=2.0, groups=groups), objects, fragments)


def name(key: int) -> bytes:
    """An offload key: a hash, and the number of its group."""
    return key.to_bytes(4, "big") * 8 + bytes(4)


def test_a_hit_is_given_only_for_what_has_been_read(clock: Clock) -> None:
    one = rig(8, objects=2, fragments=2)
    assert one.ask("a", 1, 2) == "PP"
    assert len(one.reads.started) == 2, "nothing goes out before the step is planned"
    one.step()
    assert one.ask("a", 1, 2) == "HH"
    staged = one.staging.take_for_load("a", [name(1), name(2)])
    assert [[part.slots for part in parts] for parts in staged] == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]
    assert staged[0][0].generation == 7
    assert staged[0][0].length == 100
    assert one.reads.free == 0
    one.staging.loaded("a", {name(1)})
    assert one.reads.free == 4
    one.staging.loaded("a", {name(2), name(1)})
    assert one.reads.free == 8
    assert one.staging.staged == 0


def test_what_is_looked_up_and_not_loaded_is_let_go_with_the_load(clock: Clock) -> None:
    one = rig(8)
    one.ask("a", 1, 2, 3)
    one.step()
    assert one.ask("a", 1, 2, 3) == "HHH"
    one.staging.take_for_load("a", [name(2)])
    assert one.reads.taken == {1}


def test_a_failed_read_is_a_miss_for_good(clock: Clock) -> None:
    one = rig(8, objects=2)
    one.ask("a", 1)
    one.step(ok=False, denied=True)
    assert one.ask("a", 1) == "M"
    assert one.ask("a", 1) == "M"
    assert one.reads.started == [], "it is not read again for this request"
    assert one.staging.take_denied() == [(NAMESPACE, name(1), number, 7) for number in range(2)]
    assert one.reads.free == 8


def test_a_read_that_ends_after_everybody_has_gone_gives_its_slots_back(clock: Clock) -> None:
    one = rig(4)
    one.ask("a", 1)
    one.staging.end_step()
    one.staging.forget("a")
    assert one.reads.free == 3, "the gateway may still write there"
    assert one.ask("b", 1) == "P", "and nobody joins a read that nobody waits for"
    one.step()
    one.staging.poll()
    assert one.reads.free == 3
    assert one.ask("b", 1) == "H"


def test_equal_prompts_are_read_once(clock: Clock) -> None:
    one = rig(8)
    names = [f"r{number}" for number in range(50)]
    assert [one.ask(req_id, 1, 2, 3) for req_id in names] == ["PPP"] * 50
    reads = len(one.reads.started)
    one.step()
    for _ in range(3):
        answers = [one.ask(req_id, 1, 2, 3) for req_id in names]
        one.step()
    assert answers == ["HHH"] * 50
    assert reads == 3
    for req_id in names:
        one.staging.take_for_load(req_id, [name(1), name(2), name(3)])
        one.staging.loaded(req_id, {name(1), name(2), name(3)})
    assert one.reads.free == 8


def test_requests_wait_in_order_and_hold_nothing_meanwhile(clock: Clock) -> None:
    one = rig(4)
    assert one.ask("a", 1, 2, 3) == "PPP"
    assert one.ask("b", 4, 5) == "PP"
    assert one.ask("c", 6) == "P"
    assert one.reads.taken == {0, 1, 2, 3}, "b is next in order and has what there was; c has nothing"
    one.step()
    assert (one.ask("a", 1, 2, 3), one.ask("b", 4, 5), one.ask("c", 6)) == ("HHH", "HP", "P")
    one.staging.take_for_load("a", [name(1), name(2), name(3)])
    one.staging.loaded("a", {name(1), name(2), name(3)})
    one.step()
    assert (one.ask("b", 4, 5), one.ask("c", 6)) == ("HP", "P")
    one.step()
    assert (one.ask("b", 4, 5), one.ask("c", 6)) == ("HH", "H")


def test_a_request_that_wants_more_than_there_is_has_its_verified_prefix(clock: Clock) -> None:
    one = rig(3)
    assert one.ask("a", 1, 2, 3, 4, 5) == "PPPMM"
    one.step()
    assert one.ask("a", 1, 2, 3, 4, 5) == "HHHMM"


def test_one_group_leaves_room_for_the_windows_of_others(clock: Clock) -> None:
    # A prefix that takes all the room could never be hit: the other group's window at its end must be there as well.
    one = rig(4, groups=2)
    assert one.ask("a", 1, 2, 3, 4) == "PPPM"
    other = name(9)[:-4] + b"\x00\x00\x00\x01"

    def window() -> Answer:
        return one.staging.lookup(req_id="a", namespace=NAMESPACE, key=other, objects=1, fragments=lambda: 1)

    assert window() is Answer.PENDING
    one.step()
    assert one.ask("a", 1, 2, 3, 4) == "HHHM"
    assert window() is Answer.HIT


def test_windows_of_a_longer_prefix_than_there_is_make_room(clock: Clock) -> None:
    # While the prefix is pending, vLLM looks up the window at the prompt's end; then the one where the prefix ends.
    one = rig(4, groups=2)

    def window(key: int) -> Answer:
        other = name(key)[:-4] + b"\x00\x00\x00\x01"
        return one.staging.lookup(req_id="a", namespace=NAMESPACE, key=other, objects=1, fragments=lambda: 1)

    assert (one.ask("a", 1, 2, 3, 4), window(4)) == ("PPPM", Answer.PENDING)
    one.step()
    assert (one.ask("a", 1, 2, 3, 4), window(3)) == ("HHHM", Answer.PENDING)
    one.step()
    assert (one.ask("a", 1, 2, 3, 4), window(3)) == ("HHHM", Answer.HIT)


def test_a_chunk_larger_than_the_region_misses_at_once(clock: Clock) -> None:
    one = rig(3, fragments=4)
    assert one.ask("a", 1) == "M"


def test_waiting_ends(clock: Clock) -> None:
    one = rig(2)
    assert one.ask("a", 1, 2) == "PP"
    assert one.ask("b", 3) == "P"
    one.staging.end_step()
    clock.now += 2.1
    assert (one.ask("a", 1, 2), one.ask("b", 3)) == ("MM", "M")
    assert one.staging.take_timeouts() == 2
    one.reads.end()
    assert one.ask("a", 1, 2) == "HH", "what has come after all is good"
    assert one.ask("b", 3) == "M"


def test_a_request_that_is_asked_for_no_more_loses_what_it_holds(clock: Clock) -> None:
    one = rig(2)
    one.ask("a", 1, 2)
    one.step()
    assert one.ask("a", 1, 2) == "HH"
    clock.now += staging_module.LEASE_SECONDS + 0.1
    one.step()
    assert one.reads.free == 2
    assert one.ask("b", 3) == "P"
    assert one.staging.take_for_load("a", [name(1)]) == ((),), "it is read again, by the workers"


def test_a_chunk_that_was_not_looked_up_is_left_to_the_workers(clock: Clock) -> None:
    one = rig(4)
    one.ask("a", 1)
    one.step()
    one.ask("a", 1)
    taken = one.staging.take_for_load("a", [name(1), name(2)])
    assert [len(objects) for objects in taken] == [1, 0]
    one.staging.loaded("a", {name(1), name(2)})
    assert one.reads.free == 4


def test_the_number_of_requests_is_bounded(clock: Clock) -> None:
    one = rig(2)
    for number in range(staging_module.REQUESTS_MAX):
        one.ask(f"r{number}", number)
    assert one.ask("one more", 1) == "M"


@pytest.mark.parametrize("told", [True, False])
def test_slots_of_jobs_from_before_a_reset_are_kept_until_no_copy_can_run(clock: Clock, told: bool) -> None:
    one = rig(2)
    one.ask("a", 1)
    one.step()
    one.ask("a", 1)
    one.staging.take_for_load("a", [name(1)])
    one.ask("b", 2)
    one.step()
    one.staging.reset()
    assert one.reads.taken == {0, 1}
    one.staging.poll()
    assert one.reads.taken == {0}
    if told:
        one.staging.reset_flushed()
    else:
        one.step()
        assert one.reads.taken == {0}
        clock.now += staging_module.QUARANTINE_SECONDS + 0.1
        one.step()
    assert one.reads.taken == set()
    one.staging.loaded("a", {name(1)})
    assert one.reads.taken == set()


@settings(max_examples=150, deadline=None)
@given(
    slots=st.integers(2, 6),
    wants=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=5),
    aborted=st.sets(st.integers(0, 4)),
    failing=st.sets(st.integers(0, 12), max_size=4),
)
def test_everybody_is_served_or_missed_and_nothing_leaks(
    slots: int, wants: list[list[int]], aborted: set[int], failing: set[int]
) -> None:
    """As vLLM goes about it: ask all in order each step; load the prefix that hits once nothing is pending."""
    one = rig(slots)
    waiting = {f"r{number}": keys for number, keys in enumerate(wants)}
    jobs: list[tuple[str, list[bytes]]] = []
    for step in range(60):
        if not waiting and not jobs:
            break
        for req_id, keys in list(waiting.items()):
            answers = one.ask(req_id, *keys)
            if step == 2 and int(req_id[1:]) in aborted:
                one.staging.forget(req_id)
                del waiting[req_id]
            elif "P" not in answers:
                hits = [name(key) for key in keys[: (answers + "M").index("M")]]
                if hits:
                    staged = one.staging.take_for_load(req_id, hits)
                    assert {slot for parts in staged for part in parts for slot in part.slots} <= one.reads.taken
                    jobs.append((req_id, hits))
                else:
                    one.staging.forget(req_id)
                del waiting[req_id]
        one.step(ok=step not in failing)
        for req_id, hits in jobs[:1]:
            one.staging.loaded(req_id, set(hits))
            one.staging.forget(req_id)
        jobs = jobs[1:]
    assert not waiting, "nobody waits for ever"
    one.staging.poll()
    assert one.reads.taken == set()
    assert one.staging.staged == 0
