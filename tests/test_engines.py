"""The bookkeeping of the run of several engines, without an engine: what it owes, who is asked what, who is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import pytest

from engines.outcome import KILLS_MIN, Outcome
from engines.seat import Model, Seat
from stand.engines import Answer, Counters, Service, StandError
from stand.pools import Pool
from stand.runs import BAD, Options

if TYPE_CHECKING:
    from stand.engines import Request

SEATS = ("one", "two")
POOL = Pool([[1, 2], [3, 4], [5, 6]], [[7], [8], [9]], 0)


def outcome(*, canary: bool = False) -> Outcome:
    found = Outcome("release", Options(60, 0, canary), SEATS, kills=KILLS_MIN, requests=9)
    found.restored.update(dict.fromkeys(SEATS, 3))
    return found


@pytest.mark.parametrize("name", BAD)
def test_one_thing_that_should_not_be_is_no_pass(name: str) -> None:
    assert outcome().passed
    found = outcome()
    found.add(name)
    assert not found.passed
    assert f"{name} 1" in found.verdict()


def test_too_few_kills_or_an_engine_that_restored_nothing_prove_nothing() -> None:
    found = outcome()
    found.kills = KILLS_MIN - 1
    assert not found.passed
    found = outcome()
    found.restored = Counter(one=5)
    assert not found.passed
    assert "two restored nothing" in found.verdict()
    found = outcome()
    found.requests = 0
    assert not found.passed


def test_a_canary_that_finds_nothing_is_no_pass() -> None:
    found = outcome(canary=True)
    assert not found.passed
    found.add("wrong")
    assert found.passed


def test_engines_of_one_model_are_asked_the_same_while_both_are_there() -> None:
    model = Model(POOL, 2, seed=1)
    drawn: list[float] = []

    def meet() -> None:
        for _ in range(3):
            rng = model.meet()
            assert rng is not None
            drawn.append(rng.random())

    threads = [threading.Thread(target=meet) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(Counter(drawn).values()) == [2, 2, 2], "three rounds, each drawn alike by both"
    assert model.meet() is None, "the other has gone: each draws for himself"


class FakeEngine:
    """An engine that answers what it is told to, or has ended."""

    pid = 0

    def __init__(self, tokens: dict[tuple[int, ...], list[int]] | None, *, product: dict[str, int]) -> None:
        self._tokens = tokens
        self._product = {"load_objects": 2, "failed_load_jobs": 0, **product}
        self._requests: list[Request] = []

    def begin_serve(self, requests: list[Request], **_: Any) -> None:
        self._requests = requests

    def finish_serve(self, _seconds: float) -> Service:
        if self._tokens is None:
            raise StandError("ended by itself")
        answers = {
            one.id: Answer(tokens=self._tokens[tuple(one.prompt)], finish_reason="length", margin=None)
            for one in self._requests
        }
        return Service(answers=answers, drained=True, reset=True, counters=Counters(seen={}, product=self._product))

    def kill(self) -> None:
        """It has ended already."""

    def stop(self) -> None:
        """As it says."""


class FakeGateway:
    """With these sessions, for ever."""

    def __init__(self, *sessions: tuple[str, int]) -> None:
        self._sessions = [{"role": role, "pid": pid} for role, pid in sessions]

    def status(self) -> dict[str, Any]:
        return {"sessions": self._sessions}


def served(
    engine: FakeEngine, *, canary: bool = False, gateway: FakeGateway | None = None, killed: bool = False
) -> Outcome:
    """What one batch of this engine is counted as. `killed`: by us, before it."""
    found = Outcome("release", Options(60, 0, canary), SEATS)
    rounds = iter((False, True))
    seat = Seat(
        name="one",
        model=Model(POOL, 1, seed=1),
        make=lambda: cast("Any", engine),
        gateway=cast("Any", gateway or FakeGateway()),
        outcome=found,
        seed=1,
    )
    if killed:
        seat.start()
        assert seat.kill()
        assert not seat.kill(), "once is enough"
    seat.serve(lambda: next(rounds))
    return found


RIGHT = {tuple(prompt): answer for prompt, answer in zip(POOL.prompts, POOL.answers, strict=True)}


def test_what_an_engine_answers_is_judged() -> None:
    found = served(FakeEngine(RIGHT, product={}))
    assert (found.requests > 0, found.wrong, found.engine_deaths, found.restored["one"]) == (True, 0, 0, 2)
    found = served(FakeEngine({prompt: [0] for prompt in RIGHT}, product={}))
    assert found.wrong == found.requests > 0
    assert served(FakeEngine(RIGHT, product={"failed_load_jobs": 1})).wrong == 1
    assert served(FakeEngine(RIGHT, product={"failed_load_jobs": 1}), canary=True).wrong == 0


def test_an_end_that_was_not_ours_is_a_death() -> None:
    found = served(FakeEngine(None, product={}))
    assert (found.engine_deaths, found.wrong) == (1, 0)
    assert "the engine died" in found.reasons[0]


@pytest.mark.parametrize(
    ("session", "leaks"), [(("rank", 0), 1), (("scheduler", 0), 1), (("tool", 0), 0), (("rank", 1), 0)]
)
def test_a_session_of_an_engine_that_has_gone_is_a_leak(
    session: tuple[str, int], leaks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.seat.FREED_S_MAX", 0.1)
    found = served(FakeEngine(None, product={}), gateway=FakeGateway(session))
    assert found.leaks == leaks


def test_an_end_that_was_ours_is_no_death() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        engine = FakeEngine(None, product={})
        engine.pid = process.pid
        found = served(engine, killed=True)
        assert process.wait() == -signal.SIGKILL
    assert (found.engine_deaths, found.reasons) == (0, [])


def test_a_seat_without_an_engine_cannot_be_killed() -> None:
    rng = random.Random(1)
    seat = Seat(
        name="one",
        model=Model(POOL, 1, seed=rng.randrange(9)),
        make=lambda: cast("Any", None),
        gateway=cast("Any", FakeGateway()),
        outcome=outcome(),
        seed=1,
    )
    assert not seat.kill()
    assert not seat.serves
