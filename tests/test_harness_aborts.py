"""A client goes away at every moment of a request's life, and nothing of the request is left behind.

Where a release asserts on an abort of its own accord, exactly the moments at which it does are pinned.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from harness import ledger
from harness.engine import RUN_S_MAX
from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt
from xkv_compat.features import detect_live
from xkv_offload.copy import HostMover

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from harness.engine import Engine, Request, Step
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

BLOCK = 16
STORED = prompt(tokens=BLOCK * 10, seed=1)  # on the card before the first request that goes
BATCH_TOKENS = 96  # so that a prompt takes several steps
COPY_S = 0.002  # of one object: longer than a step of this engine, so that stores are under way across steps
POLL_S = 0.001
HELD = "get.before_read"

SHAPES = {
    "one group": Shape(groups=(mla(layers=1),), blocks=64, blocks_per_chunk=2),
    "two groups": Shape(groups=(full(layers=1), sliding(window=40, layers=1)), blocks=96, blocks_per_chunk=2),
    "two ranks": Shape(groups=(full(layers=1),), blocks=64, blocks_per_chunk=2, ranks=2),
}


@dataclass
class Walk:
    """One request from its arrival to its end, unless it is aborted before: at the moment with this number.

    With an odd number, once more at the next moment.
    """

    rig: Rig
    engine: Engine
    tokens: Sequence[int]
    number: int
    aborted: str | None = None
    moments: int = 0
    steps: list[Step] = field(default_factory=list)
    was_there: bool = False
    is_doomed: bool = False
    _left: int = 0
    _is_settled: bool = False

    @property
    def name(self) -> str:
        return f"goes at {self.number}"

    def moment(self, what: str) -> None:
        if self.moments == self.number:
            self.aborted = what
            self._left = 1 + self.number % 2
            self.was_there = self.name in self.engine.scheduler.requests
            self.is_doomed = is_doomed(self.engine, self.name, self.steps)
        self.moments += 1
        if self._left:
            self._left -= 1
            self.engine.abort(self.name)

    def turn(self, what: str) -> None:
        """One step, with the moments at which a core may hear of an abort."""
        self._settle()
        step = self.engine.schedule()
        self.steps.append(step)
        self.moment(f"{what}, scheduled")
        output = self.engine.execute(step)
        self.moment(f"{what}, executed")
        self.engine.update(step, output)
        self.moment(f"{what}, done")

    def load(self) -> None:
        """Turns with the load under way in the gateway, then with its bytes in the pages, then its report."""
        gateway = self.rig.gateway.process
        before = gateway.times_reached(HELD)
        gateway.hold(HELD)
        try:
            self.turn("load begun")
            if not self.steps[-1].load_jobs:
                return
            gateway.await_point(HELD, before + 1)
            self.turn("load under way")
        finally:
            gateway.let_go(HELD)
        await_arrival(self.engine, set(self.steps[0].load_jobs))
        self.moment("arrived")
        self.turn("load reported")

    def go(self) -> Request:
        request = self.engine.submit(self.name, self.tokens, output_tokens=4)
        self.moment("queued")
        if self.tokens[: len(STORED)] == STORED:
            self.load()
        while self.name in self.engine.scheduler.requests and self.aborted is None:
            self.turn(f"after {self.engine.scheduler.requests[self.name].num_computed_tokens} tokens")
        self.moment("finished")
        if self._left:
            self.turn("gone")
        self._settle()
        return request

    def _settle(self) -> None:
        """An aborted request whose last job is reported before the next step is forgotten: nothing asserts on it."""
        if self.aborted is not None and not self._is_settled:
            self._is_settled = True
            tracked = self.engine.scheduler.connector.connector_scheduler._req_status
            self.is_doomed = self.is_doomed and self.name in tracked


def await_arrival(engine: Engine, jobs: set[int]) -> None:
    """Wait until every rank has the bytes of these loads in its pages, and has not said so."""
    end = time.monotonic() + RUN_S_MAX
    while not all(rank.worker._jobs[job].done.is_set() for rank in engine.ranks for job in jobs):
        assert time.monotonic() < end, "the load does not end"
        time.sleep(POLL_S)


def is_doomed(engine: Engine, name: str, steps: Sequence[Step]) -> bool:
    """Whether an abort now ends an engine whose release is not safe for it.

    It takes an aborted request for one with all of its tokens, and asserts that it was told of their blocks.
    """
    request = engine.scheduler.requests.get(name)
    if request is None or detect_live()["abort_safe"]:
        return False
    chunk = BLOCK * engine.shape.blocks_per_chunk
    scheduled = request.num_computed_tokens if any(name in step.scheduled.num_scheduled_tokens for step in steps) else 0
    hit = len(STORED) if engine.requests[name].loads else 0
    return bool(request.num_prompt_tokens // chunk > max(scheduled // chunk, hit // chunk))


def is_own_assertion(error: AssertionError) -> bool:
    """Whether the release's connector asserted by itself where it builds a finished request's last stores."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return code.co_name == "_build_store_jobs" and code.co_filename.endswith("offloading/scheduler.py")


def launch(rig: Rig, shape: Shape) -> Engine:
    engine = rig.launch(shape, batch_tokens=BATCH_TOKENS)
    engine.serve("resident", prompt(tokens=BLOCK * 3, seed=2), output_tokens=1)
    return engine


@pytest.mark.parametrize("tail", [70, 5], ids=["chunks after the hit", "all hit"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_abort_at_every_moment(rig: Rig, monkeypatch: pytest.MonkeyPatch, shape: str, warm: bool, tail: int) -> None:
    slow_copies(monkeypatch)
    engine = launch(rig, SHAPES[shape])
    if warm:
        engine.serve("stored", [*STORED, 1])
        engine.await_stores()
    seen = []
    for number in itertools.count():
        engine.forget()
        length = len(STORED) + tail
        tokens = prompt(tokens=length, seed=100 + number, after=STORED if warm else ())
        walk = Walk(rig, engine, tokens, number)
        others = engine.submit(f"stays {number}", prompt(tokens=BLOCK * 5, seed=3), output_tokens=14)
        try:
            request = walk.go()
            engine.run()
        except AssertionError as error:
            if not is_own_assertion(error):
                raise
            assert walk.is_doomed, f"the engine ends by an abort at: {walk.aborted}"
            rig.end(engine)
            engine = launch(rig, SHAPES[shape])
        else:
            assert not walk.is_doomed, f"the engine survives an abort at: {walk.aborted}"
            assert others.finish_reason == "length"
            engine.await_stores()
            assert ledger.left(engine) == [], f"after an abort at: {walk.aborted}"
            engine.forget()
            assert request.finish_reason == (None if walk.was_there else "length"), walk.aborted
        again = engine.serve(f"again {number}", tokens, output_tokens=2)
        assert again.finish_reason == "length"
        assert not warm or len(again.loaded()[0]) >= len(STORED) // BLOCK
        if walk.aborted is None:
            break
        seen.append(walk.aborted)
    assert len(set(seen)) == len(seen) >= 14, seen
    assert not warm or {"load under way, done", "arrived", "load reported, executed"} <= set(seen)


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that take longer to read their pages than a step takes."""
    gather = HostMover.gather

    def slowly(self: HostMover, move: Any) -> None:
        time.sleep(COPY_S)
        gather(self, move)

    monkeypatch.setattr(HostMover, "gather", slowly)
