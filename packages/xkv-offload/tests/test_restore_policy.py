"""Whether hits are restored: only what is measured declines them, one answer for a request, and a way back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from xkv_offload.restore_policy import (
    PROBE_SECONDS_MAX,
    PROBE_TOKENS,
    STEPS_MIN,
    ChunkFacts,
    RestorePolicy,
    Stage,
    StepClock,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_offload.meter import Totals

CHUNK_TOKENS = 256
TOKEN_BYTES = 1_000
FULL, WINDOW = 0, 1
PREFILL = 10_000.0  # tokens a second


def key(number: int, group: int = FULL) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


@dataclass
class World:
    """An engine whose medium restores `rate` tokens a second, and whose time passes only by what it does."""

    rate: float = 100_000.0
    ranks: int = 1
    now: float = 1_000.0
    totals: dict[int, Totals] = field(default_factory=dict)
    requests: int = 0
    windows: bool = False
    loads_in_steps: bool = False

    def __post_init__(self) -> None:
        self.policy = RestorePolicy(
            chunks={
                FULL: ChunkFacts(CHUNK_TOKENS, CHUNK_TOKENS * TOKEN_BYTES, is_prefix=True),
                WINDOW: ChunkFacts(CHUNK_TOKENS, CHUNK_TOKENS * TOKEN_BYTES, is_prefix=not self.windows),
            },
            stages=[Stage(self.loaded)],
            loads_in_steps=self.loads_in_steps,
            clock=lambda: self.now,
        )

    def loaded(self) -> Sequence[Totals]:
        return [self.totals.get(rank, (0, 0)) for rank in range(self.ranks)]

    def compute(self, tokens: int = 2_048, rate: float = PREFILL) -> None:
        self.policy.step_begins(tokens)
        self.now += tokens / rate
        self.policy.step_ends()

    def load(self, req_id: str, chunks: int, *, rate: float | None = None, moved: bool = True) -> None:
        """A load of so many chunks, from its beginning to its end."""
        self.policy.load_begins(req_id, [key(number) for number in range(chunks)])
        self.move(chunks * CHUNK_TOKENS, self.rate if rate is None else rate, moved=moved)
        self.policy.load_ended(req_id)

    def move(self, tokens: int, rate: float, *, moved: bool = True, rank: int = 0) -> None:
        seconds = tokens / rate
        self.now += seconds
        moved_before, busy_before = self.totals.get(rank, (0, 0))
        self.totals[rank] = moved_before + tokens * TOKEN_BYTES * moved, busy_before + int(seconds * 1e9)

    def request(self, chunks: int = 16) -> int:
        """One request with so many chunks on the card: how many of them it is given, and restores."""
        self.requests += 1
        req_id = f"r{self.requests}"
        given = [self.policy.allows(req_id, key(number)) for number in range(chunks)]
        assert given == sorted(given, reverse=True), "a prefix has no hole"
        assert given == [self.policy.allows(req_id, key(number)) for number in range(chunks)], "and does not change"
        if any(given):
            self.load(req_id, sum(given))
        else:
            self.compute(chunks * CHUNK_TOKENS)
        self.policy.request_ended(req_id)
        return sum(given)

    def slow_down(self, rate: float = 1_000.0) -> None:
        """A measured engine whose medium becomes slow, until it declines."""
        for _ in range(STEPS_MIN):
            self.compute()
        for _ in range(STEPS_MIN):
            assert self.request() == 16
        self.rate = rate
        for _ in range(10):
            if self.request() == 0:
                return
        pytest.fail("a slow medium was never declined")


def test_everything_is_restored_until_both_are_measured() -> None:
    world = World(rate=10.0)
    for _ in range(5):
        assert world.request() == 16  # never computed anything: nothing to compare with
    for _ in range(STEPS_MIN - 1):
        world.compute()
    assert world.request() == 16
    world.compute()
    assert world.request() == 0


def test_one_slow_load_of_many_seconds_is_enough() -> None:
    world = World(rate=100.0)
    for _ in range(STEPS_MIN):
        world.compute()
    assert world.request() == 16
    assert world.request() == 0


def test_a_load_that_stands_still_is_slow_before_it_ends() -> None:
    world = World()
    for _ in range(STEPS_MIN):
        world.compute()
    assert world.policy.allows("stuck", key(0))
    world.policy.load_begins("stuck", [key(0)])
    world.move(CHUNK_TOKENS, 100.0, moved=False)
    assert not world.policy.allows("next", key(0))


def test_a_fast_medium_is_never_declined_and_a_slightly_slow_one_not_either() -> None:
    world = World()
    for _ in range(STEPS_MIN):
        world.compute()
    for _ in range(50):
        assert world.request() == 16
    world.rate = PREFILL / 1.2
    for _ in range(50):
        assert world.request() == 16
    assert world.policy.take_probes() == 0


def test_small_steps_beside_answers_say_nothing_of_prompts() -> None:
    """Where all is hit, only tails are computed, in steps as long as any: the pace of prompts is not theirs."""
    world = World()
    for _ in range(STEPS_MIN):
        world.compute()
    world.rate = PREFILL / 10
    for _ in range(50):
        world.compute(20, rate=100.0)
    for _ in range(5):
        world.request()
    assert world.request() == 0


@pytest.mark.parametrize("loads_in_steps", [False, True])
def test_a_step_that_waits_for_a_load_is_not_slow_computing(loads_in_steps: bool) -> None:
    """Under vLLM's sync_load_budget_bytes; else loads run beside steps, and these are the only ones that are seen."""
    world = World(rate=1_000.0, loads_in_steps=loads_in_steps)
    for _ in range(STEPS_MIN):
        world.compute()
    for number in range(4):
        world.policy.load_begins(f"s{number}", [key(one) for one in range(16)])
        world.policy.step_begins(2_048)
        world.move(16 * CHUNK_TOKENS, world.rate)
        world.now += 2_048 / PREFILL
        world.policy.step_ends()
        world.policy.load_ended(f"s{number}")
    assert world.policy.allows("next", key(0)) is not loads_in_steps


def test_an_answer_holds_for_the_request_and_goes_with_it() -> None:
    world = World()
    assert world.policy.allows("early", key(0))
    world.slow_down()
    assert world.policy.allows("early", key(1)), "it was told so"
    world.policy.request_ended("early")
    assert not world.policy.allows("early", key(1))


def test_probes_are_few_short_and_rarer_each_time() -> None:
    world = World()
    world.slow_down()
    world.policy.take_probes()
    begun, probed, times = world.now, 0, []
    while world.now < begun + 2_000:
        given = world.request(16)
        if given:
            assert given == PROBE_TOKENS // CHUNK_TOKENS
            times.append(world.now)
            probed += 1
    assert probed == world.policy.take_probes()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(later > earlier for earlier, later in itertools.pairwise(gaps) if later < PROBE_SECONDS_MAX)
    assert gaps[0] < 10
    assert gaps[-1] >= PROBE_SECONDS_MAX
    assert 5 < probed < 20


def test_a_medium_that_is_fast_again_is_used_again() -> None:
    world = World()
    world.slow_down()
    world.rate = 100_000.0
    answers = [world.request() for _ in range(40)]
    assert answers[-1] == 16
    assert answers.count(PROBE_TOKENS // CHUNK_TOKENS) == 2
    world.rate = 1_000.0
    assert 0 in [world.request() for _ in range(10)], "and declined again where it is not"


def test_one_fast_probe_is_not_enough() -> None:
    world = World()
    world.slow_down()
    world.now += 10
    world.rate = 100_000.0
    assert world.request() == PROBE_TOKENS // CHUNK_TOKENS
    world.rate = 1_000.0
    assert world.request() == PROBE_TOKENS // CHUNK_TOKENS, "the second comes at once"
    assert world.request() == 0
    world.now += 10
    world.rate = 100_000.0
    assert world.request() == PROBE_TOKENS // CHUNK_TOKENS, "and it counts from the beginning"
    assert world.request() == PROBE_TOKENS // CHUNK_TOKENS
    assert world.request() == 16


def test_a_probe_is_one_at_a_time_and_waits_for_what_is_under_way() -> None:
    world = World()
    world.slow_down()
    world.policy.load_begins("old", [key(0)])
    world.now += 1_000
    assert not world.policy.allows("a", key(0))
    world.policy.load_ended("old")
    assert world.policy.allows("b", key(0))
    assert not world.policy.allows("c", key(0))
    world.policy.request_ended("b")  # aborted before it began
    assert not world.policy.allows("d", key(0))
    world.now += 1_000
    assert world.policy.allows("e", key(0))
    world.policy.load_begins("e", [key(0)])
    world.policy.reset()  # its end is never told
    world.now += 1_000
    assert world.policy.allows("f", key(0))


def test_a_probe_of_which_nothing_is_heard_says_nothing() -> None:
    """The control page of a gateway that has come back, to which no rank has written yet."""
    world = World()
    world.slow_down()
    world.totals[0] = (0, 0)
    for number in range(5):
        world.now += 1_000
        assert world.policy.allows(f"p{number}", key(0))
        world.policy.load_begins(f"p{number}", [key(0)])
        world.policy.load_ended(f"p{number}")
        assert not world.policy.allows(f"n{number}", key(0))


def test_probes_whose_reads_come_too_late_for_a_load_are_rarer_each_time() -> None:
    """Where hits are verified first, a read that takes too long is a miss: nothing is loaded, and all waited for it."""
    world = World()
    world.slow_down()
    waited = []
    names = (f"w{number}" for number in itertools.count())
    for _ in range(4):
        begun = world.now
        while not world.policy.allows(name := next(names), key(0)):
            world.now += 0.25
        waited.append(world.now - begun)
        world.move(256, 100.0, moved=False)
        world.policy.request_ended(name)
    assert waited == pytest.approx([1.0, 2.0, 4.0, 8.0], abs=0.3)


def test_a_probe_that_loads_nothing_does_not_keep_others_from_it() -> None:
    """As where none of its windows is on the card, or its objects cannot be read: it is computed, and then answers."""
    world = World()
    world.slow_down()
    world.rate = 100_000.0
    world.now += 1.1
    assert world.policy.allows("chatty", key(0))
    assert world.request() == 0
    world.now += PROBE_SECONDS_MAX + 1
    assert world.request() == 0
    world.now += 1.1
    assert [bool(world.request()) for _ in range(3)] == [True] * 3, "two fast probes, then all"
    world.policy.request_ended("chatty")


@pytest.mark.parametrize("windows", [False, True])
def test_a_probe_is_whole_where_a_shorter_prefix_may_have_no_window(windows: bool) -> None:
    world = World(windows=windows)
    world.slow_down()
    world.now += 1_000
    most = 8 if windows else PROBE_TOKENS // CHUNK_TOKENS
    for group in (FULL, WINDOW):
        given = [world.policy.allows("p", key(number, group)) for number in range(8)]
        assert given == [True] * most + [False] * (8 - most)


def test_the_slowest_rank_counts() -> None:
    world = World(ranks=2)
    for _ in range(STEPS_MIN):
        world.compute()
    for number in range(STEPS_MIN):
        world.policy.load_begins(f"l{number}", [key(0)])
        world.move(CHUNK_TOKENS, 100_000.0, rank=0)
        world.move(CHUNK_TOKENS, 1_000.0, rank=1)
        world.policy.load_ended(f"l{number}")
    assert not world.policy.allows("r", key(0))


def test_stages_follow_one_another() -> None:
    """Verified first, then copied: each alone is faster than computing, both together are not."""
    totals: list[list[Totals]] = [[(0, 0)], [(0, 0)]]
    now = [0.0]
    policy = RestorePolicy(
        chunks={FULL: ChunkFacts(CHUNK_TOKENS, CHUNK_TOKENS * TOKEN_BYTES, is_prefix=True)},
        stages=[Stage(lambda: totals[0]), Stage(lambda: totals[1], 2)],  # of two ranks' objects
        clock=lambda: now[0],
    )
    for _ in range(STEPS_MIN):
        policy.step_begins(1_000)
        now[0] += 0.1
        policy.step_ends()
    moved = CHUNK_TOKENS * TOKEN_BYTES
    for number in range(STEPS_MIN):
        assert policy.allows(f"r{number}", key(0))
        policy.load_begins(f"r{number}", [key(0)])
        totals[0] = [(totals[0][0][0] + moved, totals[0][0][1] + 20_000_000)]
        totals[1] = [(totals[1][0][0] + 2 * moved, totals[1][0][1] + 20_000_000)]
        policy.load_ended(f"r{number}")
    assert not policy.allows("next", key(0))


def test_a_new_control_page_that_says_less_is_passed_over() -> None:
    world = World()
    for _ in range(STEPS_MIN):
        world.compute()
        world.request()
    kept = world.totals[0]
    world.totals[0] = (0, 0)
    assert world.request() == 16
    world.totals[0] = kept
    assert world.request() == 16


def test_steps_that_are_scheduled_ahead_have_their_own_time() -> None:
    clock = StepClock()
    assert clock.end(0.0) == (0, 0.0)
    clock.begin(100, 10.0)
    clock.begin(200, 10.1)
    assert clock.end(11.0) == (100, 1.0)
    clock.begin(300, 11.1)
    assert clock.end(13.0) == (200, 2.0)
    assert clock.end(13.5) == (300, 0.5)
    clock.begin(0, 20.0)  # idle in between
    assert clock.end(20.5) == (0, 0.5)
