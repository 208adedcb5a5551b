"""One campaign: engines in turn, a batch of requests and an event at a time, and every answer judged.

Owns: the order of things, what counts as wrong, stuck, dead or recomputed. Must not know: how an event is done.
"""

from __future__ import annotations

import random
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from campaign.gateways import GatewayOfCampaign
from campaign.kinds import EVENTS, KILL_POINTS, MEDIUM, Draw
from campaign.outcome import LONG_S, Outcome
from stand.cases import Stand, cannot_run, target
from stand.engines import Engine, EngineError, StandError, counted
from stand.models import GEMMA, LLAMA
from stand.pools import MARGIN_MIN, Pool, Stream, candidates, is_right

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stand.engines import Service
    from stand.models import Shape
    from stand.runs import Options

OUTPUT_TOKENS: Final = 12
STUCK_S: Final = 60.0  # a batch takes a second or two; the longest bound of the product in it is two seconds
ANSWER_S_MAX: Final = 150.0  # the engine's process says what is stuck before that
PAUSE_S_MAX: Final = 0.5  # from a batch's beginning to its event
RESET_OF: Final = 0.8  # how often an engine forgets its own prefixes, so that hits come from the card
BLOCKS_PER_CHUNK: Final = {LLAMA.name: 4, GEMMA.name: 2}
PROMPTS_SHORT: Final = 16
PROMPTS_LONG: Final = 32
# What a prompt adds to the pool's bytes, less than that of the card: so it cannot hold all of them.
CARD_MIB_OF_PROMPT: Final = {LLAMA.name: 0.8, GEMMA.name: 1.6}
PHASES: Final = ((LLAMA, "recompute"), (GEMMA, "fail"), (LLAMA, "fail"), (GEMMA, "recompute"))
ROUND_S: Final = 900  # one round of all phases

# Without verification only damage makes wrong answers, and only where headers are left as they were.
CANARY_EVENTS: Final = ("lies_flipped",)
CANARY_MEDIA: Final = ("read_flipped",)


class Campaign:
    """Runs the phases. `say` gets a line now and then."""

    def __init__(self, stand: Stand, folder: Path, options: Options, say: Callable[[str], None]) -> None:
        self._stand = stand
        self._folder = folder
        self._options = options
        self._say = say
        self._rng = random.Random(options.seed)
        aborts = "abort_safe" not in target().lacks  # elsewhere vLLM itself does not survive an abort
        events = [kind for kind in EVENTS if aborts or kind != "request_aborted"]
        media = list(MEDIUM)
        if options.canary:
            events, media = list(CANARY_EVENTS), list(CANARY_MEDIA)
        self._pools: dict[str, Pool] = {}
        self._phases = [phase for phase in PHASES if cannot_run(phase[0]) is None]
        self._shapes = {shape.name: shape for shape, _ in self._phases}
        self.outcome = Outcome(target().release, options, (*media, *events), tuple(self._shapes))
        self._events = Draw(events, self._rng, self.outcome.faults)
        self._media = Draw(media, self._rng, self.outcome.faults)
        self._prompts = PROMPTS_LONG if options.seconds >= LONG_S else PROMPTS_SHORT
        self._lives = 0

    def run(self) -> Outcome:
        """All phases, one after the other, until the time is over."""
        rounds = max(1, self._options.seconds // ROUND_S)
        for shape in self._shapes.values():
            self._pools[shape.name] = self._pool(shape)
        seconds = self._options.seconds / (rounds * len(self._phases))
        for shape, policy in self._phases * rounds:
            Phase(self, shape, policy, seconds).run()
            if self._options.canary and self.outcome.wrong:
                break  # that is all it has to show
        return self.outcome

    def _pool(self, shape: Shape) -> Pool:
        """Prompts whose answers nothing but other pages can turn, by an engine without offloading."""
        coming = candidates(shape, self._rng)
        with self._stand.engine(self._stand.config(shape)) as engine:
            pool = Pool.ask(engine, coming, wanted=self._prompts, output_tokens=OUTPUT_TOKENS)
        self._say(
            f"{shape.name}: {len(pool.prompts)} prompts, {pool.left_out} left out for a margin below {MARGIN_MIN}"
        )
        return pool

    def phase_parts(self, shape: Shape, policy: str) -> tuple[GatewayOfCampaign, Stream, Callable[[], Engine]]:
        """A card with its gateway, a stream of requests, and how an engine is made."""
        self._lives += 1
        gateway = GatewayOfCampaign(
            self._folder / f"phase-{self._lives}",
            capacity=f"{int(self._prompts * CARD_MIB_OF_PROMPT[shape.name])}MiB",
            rng=self._rng,
            media=self._media,
            proves=not self._options.canary,
        )
        config = self._stand.offloading(
            shape, gateway, blocks_per_chunk=BLOCKS_PER_CHUNK[shape.name], load_failure_policy=policy
        )
        if self._options.seconds >= LONG_S:
            gateway.long_stops = 1
        return gateway, Stream(self._pools[shape.name], self._rng), lambda: self._stand.engine(config)

    def deal(self) -> str:
        """The next event."""
        return self._events.deal()

    def say(self, line: str) -> None:
        """A line for whoever watches."""
        self._say(line)

    @property
    def rng(self) -> random.Random:
        """The campaign's one source of chance."""
        return self._rng


class Phase:
    """One shape under one policy: an engine, and another whenever it is killed or dies."""

    def __init__(self, campaign: Campaign, shape: Shape, policy: str, seconds: float) -> None:
        self._campaign = campaign
        self._outcome = campaign.outcome
        self._shape = shape
        self._policy = policy
        self._name = f"{shape.name} {policy}"
        self._seconds = seconds
        self._gateway, self._stream, self._make = campaign.phase_parts(shape, policy)
        self._engine: Engine | None = None  # none after one has died, until the next batch

    def run(self) -> None:
        """Batches until the time is over."""
        before = self._outcome.requests
        with closing(self._gateway):
            self._some_engine()
            end = time.monotonic() + self._seconds
            while time.monotonic() < end:
                self._gateway.revive()
                self._batch(self._some_engine())
            self._stop_engine()
            self._gateway.revive()
            left = self._gateway.leftovers()
            if left:
                self._outcome.leaks += 1
                self._complain(f"left of engines that have gone: {left}")
        self._campaign.say(f"{self._name}: {self._outcome.requests - before} requests; so far {self._outcome.so_far()}")

    def _some_engine(self) -> Engine:
        if self._engine is None:
            self._engine = self._make()
        return self._engine

    def _stop_engine(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        self._engine = None

    def _complain(self, what: str) -> None:
        self._outcome.complain(f"{self._name}, on {self._gateway.medium}: {what}")

    def _batch(self, engine: Engine) -> None:
        """One batch with its event."""
        rng = self._campaign.rng
        event = self._campaign.deal()
        requests, right = self._stream.batch(aborted=event == "request_aborted")
        deadly = event in KILL_POINTS and event not in ("kill_at_start", "kill_at_end")
        if deadly:
            self._gateway.arm(event)
        happened = 0
        try:
            engine.begin_serve(
                requests, max_tokens=OUTPUT_TOKENS, seconds_max=STUCK_S, reset_prefix=rng.random() < RESET_OF
            )
            time.sleep(rng.uniform(0, PAUSE_S_MAX))
            if event == "engine_killed":
                self._kill_engine(engine)
                happened = 1
            else:
                if not (deadly or event == "request_aborted"):
                    happened = self._gateway.strike(event)
                happened += self._finish(engine, event, right)
        except EngineError as error:
            self._died(engine, event, "; ".join(error.chain))
        except StandError as error:
            self._died(engine, event, str(error))
        if deadly:
            happened = int(self._gateway.has_died())
        self._count(event, happened)

    def _count(self, event: str, happened: int) -> None:
        self._gateway.revive()
        self._outcome.faults.update(self._gateway.take_effects())
        self._outcome.faults[event] += happened

    def _finish(self, engine: Engine, event: str, right: dict[str, list[int]]) -> int:
        """Take the answers and judge them; how many requests were aborted."""
        service = engine.finish_serve(ANSWER_S_MAX)
        aborted = self._judge(service, right, event)
        stuck = [name for name, answer in service.answers.items() if answer.finish_reason is None]
        if stuck or not service.drained:
            self._outcome.stuck += max(1, len(stuck))
            self._complain(f"{event}: {stuck or 'transfers'} did not end; {counted(service)}")
            engine.kill()
            self._engine = None
        return aborted

    def _judge(self, service: Service, right: dict[str, list[int]], event: str) -> int:
        outcome, product = self._outcome, service.counters.product
        errors = aborted = 0
        for name, answer in service.answers.items():
            outcome.requests += 1
            if answer.finish_reason == "abort":
                aborted += 1
            if answer.finish_reason == "error":
                errors += 1
            elif not is_right(answer, right[name]):
                outcome.wrong += 1
                self._complain(f"{event}: {name} got {answer.tokens}, not {right[name]}; {counted(service)}")
        outcome.aborted += aborted
        outcome.restored[self._shape.name] += product["load_objects"]
        outcome.unverified += product["verify_failures"]
        failed = product["failed_load_jobs"]
        if self._policy == "fail":
            outcome.failed_as_asked += errors
            if errors > failed:
                outcome.wrong += errors - failed
                self._complain(f"{event}: {errors} requests ended with an error, {failed} loads had failed")
        else:
            outcome.recomputed += failed
            if errors:
                outcome.wrong += errors
                self._complain(f"{event}: {errors} errors under recompute; {counted(service)}")
        return aborted

    def _kill_engine(self, engine: Engine) -> None:
        """Kill -9, and a new engine at once."""
        engine.kill()
        self._engine = self._make()

    def _died(self, engine: Engine, event: str, why: str) -> None:
        self._outcome.engine_deaths += 1
        self._complain(f"{event}: the engine died: {why}")
        engine.kill()
        self._engine = None
