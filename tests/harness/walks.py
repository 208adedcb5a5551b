"""One request's way through an engine, ended by its client at one of its moments.

Owns: the moments at which a core can hear of an abort, how a load is held up between them, which aborts end an
engine whose release is not safe for them, that release's own assertion, and the sweep over all moments.
Must not know: vLLM's own state, but for whether it still tracks a request.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness import ledger, release
from harness.engine import RUN_S_MAX
from harness.story import prompt
from xkv_compat.features import detect_live

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.engine import Engine, Request, Step
    from harness.gateway import Gateway
    from harness.rig import Rig
    from harness.shapes import Shape

BLOCK = 16
STORED_TOKENS = BLOCK * 10  # of a prompt's first part, where that is on the card
POLL_S = 0.001
BATCH_TOKENS = 96  # so that a prompt takes several steps
HELD = "get.before_read"


@dataclass
class Walk:
    """One request from its arrival to its end, unless it is aborted before: at the moment with this number.

    With an odd number, once more at the next moment. `stored`: whether the first part of `tokens` is on the card.
    """

    gateway: Gateway
    engine: Engine
    tokens: Sequence[int]
    number: int
    stored: bool
    aborted: str | None = None
    moments: int = 0
    steps: list[Step] = field(default_factory=list)
    was_there: bool = False
    is_doomed: bool = False
    _left: int = 0
    _is_settled: bool = False

    @property
    def name(self) -> str:
        """The request's."""
        return f"goes at {self.number}"

    def moment(self, what: str) -> None:
        """Now the client may go."""
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
        if release.channel(self.engine.shape) == "verified":
            self.load_verified()
            return
        gateway = self.gateway.process
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

    def load_verified(self) -> None:
        """The same where the bytes lie in the ring before there is a load, which copies them at once."""
        gateway = self.gateway.process
        before = gateway.times_reached(HELD)
        gateway.hold(HELD)
        try:
            self.turn("read begun")
            if self.aborted == "queued":
                return
            gateway.await_point(HELD, before + 1)
            self.turn("read under way")
        finally:
            gateway.let_go(HELD)
        await_reads(self.engine)
        self.moment("verified")
        self.turn("load begun")
        await_arrival(self.engine, set(self.steps[-1].load_jobs))
        self.moment("arrived")
        self.turn("load reported")

    def go(self) -> Request:
        """All the way, as far as it goes."""
        request = self.engine.submit(self.name, self.tokens, output_tokens=3)
        self.moment("queued")
        if self.stored:
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
    """Wait until every rank is done with these jobs, whether it has said so or not."""
    end = time.monotonic() + RUN_S_MAX
    while any(
        not job.done.is_set() for rank in engine.ranks for number, job in rank.worker._jobs.items() if number in jobs
    ):
        assert time.monotonic() < end, "the jobs do not end"
        time.sleep(POLL_S)


def await_reads(engine: Engine) -> None:
    """Wait until all that is read ahead of hits has come."""
    staging = engine.manager._staging
    end = time.monotonic() + RUN_S_MAX
    while any(chunk.outstanding for chunk in staging._chunks.values()):
        assert time.monotonic() < end, "the reads do not end"
        time.sleep(POLL_S)
        staging.poll()


def is_doomed(engine: Engine, name: str, steps: Sequence[Step]) -> bool:
    """Whether an abort now ends an engine whose release is not safe for it.

    It takes an aborted request for one with all of its tokens, and asserts that it was told of their blocks.
    """
    request = engine.scheduler.requests.get(name)
    if request is None or detect_live()["abort_safe"]:
        return False
    chunk = BLOCK * engine.shape.blocks_per_chunk
    scheduled = request.num_computed_tokens if any(name in step.scheduled.num_scheduled_tokens for step in steps) else 0
    hit = STORED_TOKENS if engine.requests[name].loads else 0
    return bool(request.num_prompt_tokens // chunk > max(scheduled // chunk, hit // chunk))


def is_own_assertion(error: AssertionError) -> bool:
    """Whether the release's connector asserted by itself where it builds a finished request's last stores."""
    return innermost(error) == "_build_store_jobs"


def innermost(error: BaseException) -> str | None:
    """The function of the release's connector, on the scheduler's side, that raised; None for any other."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return code.co_name if code.co_filename.endswith("offloading/scheduler.py") else None


@dataclass
class WalkAhead(Walk):
    """The same with an engine that schedules ahead: what it schedules is heard of two turns later."""

    def turn(self, what: str) -> None:
        """One turn of the core, with aborts between turns."""
        self._settle()
        self.steps.append(self.engine.step())
        self.moment(f"{what}, turn {len(self.steps)}")

    def load(self) -> None:
        """A load under way in the gateway for a turn after the rank has begun it, then its report."""
        before = self.gateway.process.times_reached(HELD)
        self.gateway.process.hold(HELD)
        try:
            self.turn("load scheduled")
            jobs = set(self.steps[-1].load_jobs)
            if not jobs:
                return
            self.turn("load begun")
            self.gateway.process.await_point(HELD, before + 1)
            self.turn("load under way")
        finally:
            self.gateway.process.let_go(HELD)
        await_arrival(self.engine, jobs)
        self.moment("arrived")


def sweep(rig: Rig, shape: Shape, kind: type[Walk], *, warm: bool, tail: int, **options: Any) -> list[str]:
    """A walk for each moment, each aborted there; the moments. After each, nothing is left and the prompt is served.

    `warm`: the prompt's first part is on the card, each walk's its own, or the ring would still hold it; `tail` are
    its tokens after that. `options`: of the launch.
    """

    def launch() -> Engine:
        engine = rig.launch(shape, batch_tokens=BATCH_TOKENS, **options)
        engine.serve("resident", prompt(tokens=BLOCK * 3, seed=2), output_tokens=1)
        return engine

    engine = launch()
    seen: list[str] = []
    for number in itertools.count():
        first = prompt(tokens=STORED_TOKENS, seed=10_000 + number) if warm else ()
        if warm:
            engine.serve(f"stored {number}", [*first, 1])
            engine.await_stores()
            engine.forget()
        assert engine.scheduler.reset_prefix_cache()
        tokens = prompt(tokens=STORED_TOKENS + tail, seed=100 + number, after=first)
        walk = kind(rig.gateway, engine, tokens, number, stored=warm)
        other = engine.submit(f"stays {number}", prompt(tokens=BLOCK * 5, seed=3), output_tokens=14)
        try:
            request = walk.go()
            engine.run()
        except AssertionError as error:
            if not is_own_assertion(error):
                raise
            assert walk.is_doomed, f"the engine ends by an abort at: {walk.aborted}"
            rig.end(engine)
            engine = launch()
        else:
            assert not walk.is_doomed, f"the engine survives an abort at: {walk.aborted}"
            assert other.finish_reason == "length"
            engine.await_stores()
            assert ledger.left(engine) == [], f"after an abort at: {walk.aborted}"
            assert request.finish_reason == (None if walk.was_there else "length"), walk.aborted
            engine.forget()
        again = engine.serve(f"again {number}", tokens, output_tokens=2)
        assert again.finish_reason == "length"
        assert not warm or len(again.loaded()[0]) >= STORED_TOKENS // BLOCK
        if walk.aborted is None:
            return seen
        seen.append(walk.aborted)
    raise AssertionError("a walk has an end")
