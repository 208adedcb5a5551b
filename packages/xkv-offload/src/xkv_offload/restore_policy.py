"""Whether a request's hits are restored, where restoring may take longer than computing (ADR 0013).

Owns: the paces of restoring and of computing, which of them is preferred, one answer for each request, and the probes
by which a medium that has become fast again is found out.
Must not know: vLLM, the lookup table, how anything is loaded or measured. One thread (vLLM's scheduling thread).
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .meter import Totals

# A child of vLLM's: only what has that one's handlers and level is seen in an engine's log below a warning.
logger = logging.getLogger(f"vllm.{__name__}")

WINDOW_SECONDS = 2.0  # of work: what lies further back counts little
STEP_TOKENS_MIN = 256  # of prompts in a step: fewer are computed beside answers, and say nothing of the pace of prompts
STEPS_MIN = 3  # so many steps, and as many loads, are seen before hits are declined
BUSY_SECONDS_MIN = 1.0  # of loading are enough, too, with whatever came of it
SLOWER = 1.25  # restoring must be so much slower than computing before hits are declined; to return, as fast
PROBE_TOKENS = 1024  # of a probe's prefix; the rest is computed
PROBE_SECONDS_MIN = 1.0  # between a probe and the next, doubled after each that was slow
PROBE_SECONDS_MAX = 300.0
PROBES_MIN = 2  # that were fast, one after the other, before hits are given again
REQUESTS_MAX = 1 << 16  # whose answers are remembered
STEPS_AHEAD_MAX = 16  # scheduled and not yet heard of; vLLM has as many as pipeline stages, or two


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """A whole chunk of one group: tokens, bytes of one rank's object, and whether lookups go on from its prefix."""

    tokens: int
    object_bytes: int
    is_prefix: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of each restore, done by several at once (all wait for the slowest); stages follow one another.

    `totals`: of each who does it. `objects`: how many objects of a chunk each of them moves.
    """

    totals: Callable[[], Sequence[Totals]]
    objects: int = 1


@dataclass(slots=True)
class Pace:
    """Amount and seconds of the last `WINDOW_SECONDS` of work, and of what came before it ever less."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Take in a measurement."""
        self.amount += amount
        self.seconds += seconds
        if self.seconds > WINDOW_SECONDS:
            self.amount *= WINDOW_SECONDS / self.seconds
            self.seconds = WINDOW_SECONDS

    @property
    def seconds_each(self) -> float:
        """Of one byte or token; infinite where nothing came of the time."""
        return self.seconds / self.amount if self.amount else float("inf")


class StepClock:
    """How long each step took. Steps may be scheduled before the one before them is heard of."""

    def __init__(self) -> None:
        self._scheduled: deque[tuple[float, int]] = deque(maxlen=STEPS_AHEAD_MAX)
        self._ended = 0.0

    def begin(self, tokens: int, now: float) -> None:
        """A step that computes so many prompt tokens is scheduled."""
        self._scheduled.append((now, tokens))

    def end(self, now: float) -> tuple[int, float]:
        """The oldest step that was scheduled is over: its tokens and seconds; nothing where there is none."""
        if not self._scheduled:
            return 0, 0.0
        begun, tokens = self._scheduled.popleft()
        seconds = now - max(begun, self._ended)
        self._ended = now
        return tokens, seconds


@dataclass(slots=True)
class _Probe:
    """A request that is restored to see how fast that is: the first chunks of its prefix, by group."""

    req_id: str
    chosen: float
    chunks: dict[int, set[bytes]] = field(default_factory=dict)


class RestorePolicy:
    """`when_faster`. Everything is restored until enough is measured."""

    def __init__(
        self,
        *,
        chunks: Mapping[int, ChunkFacts],
        stages: Sequence[Stage],
        loads_in_steps: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chunks`: by vLLM's group number; `loads_in_steps`: a step may wait for loads before it computes."""
        self._loads_in_steps = loads_in_steps
        self._chunks = chunks
        self._stages = stages
        self._clock = clock
        self._steps = StepClock()
        self._computed = Pace()  # tokens
        self._computed_steps = 0
        self._seen: list[dict[int, Totals]] = [{} for _ in stages]
        self._restored: list[dict[int, Pace]] = [{} for _ in stages]  # bytes, of each who does a stage
        self._restored_loads = 0
        self._object_bytes = Pace()  # `amount` tokens, `seconds` bytes: only their ratio is of use
        self._loading: set[str] = set()
        self._answers: dict[str, bool] = {}
        self._computing = False  # hits are declined
        self._probe: _Probe | None = None
        self._probes = 0
        self._fast_probes = 0
        self._next_probe = 0.0
        self._probe_seconds = PROBE_SECONDS_MIN

    # -- what vLLM does -------------------------------------------------------------------------------------

    def step_begins(self, prompt_tokens: int) -> None:
        """A step is scheduled. One that may wait for loads says nothing of the pace of prompts."""
        waits = self._loads_in_steps and bool(self._loading)
        self._steps.begin(0 if waits else prompt_tokens, self._clock())

    def step_ends(self) -> None:
        """The oldest scheduled step has been executed."""
        tokens, seconds = self._steps.end(self._clock())
        if tokens >= STEP_TOKENS_MIN:
            self._computed.add(tokens, seconds)
            self._computed_steps += 1

    def load_begins(self, req_id: str, keys: Collection[bytes]) -> None:
        """The chunks of `keys` are loaded for a request."""
        tokens: dict[int, int] = {}
        object_bytes = 0
        for key in keys:
            group = int.from_bytes(key[-4:], "big")
            if group in self._chunks:
                tokens[group] = tokens.get(group, 0) + self._chunks[group].tokens
                object_bytes += self._chunks[group].object_bytes
        if tokens:
            self._object_bytes = Pace(max(tokens.values()), object_bytes)
        self._loading.add(req_id)

    def load_ended(self, req_id: str) -> None:
        """All ranks have ended the request's load."""
        if req_id not in self._loading:
            return  # of before a reset
        self._loading.discard(req_id)
        self._restored_loads += 1
        if self._probe is not None and self._probe.req_id == req_id:
            self._judge_probe()

    def request_ended(self, req_id: str) -> None:
        """The request is over; its load may not be."""
        self._answers.pop(req_id, None)
        if self._probe is not None and self._probe.req_id == req_id and req_id not in self._loading:
            self._give_up_probe()

    def reset(self) -> None:
        """Nothing more is heard of the loads that are under way."""
        self._loading.clear()
        if self._probe is not None:
            self._end_probe()

    # -- what is asked --------------------------------------------------------------------------------------

    def allows(self, req_id: str, key: bytes) -> bool:
        """Whether a chunk that the card holds is a hit for this request.

        A request gets one answer, whatever it asks for and however often: a prefix would have a hole otherwise.
        """
        answer = self._answers.get(req_id)
        if answer is None:
            answer = self._answers[req_id] = self._decide(req_id)
            if len(self._answers) > REQUESTS_MAX:
                self._answers.pop(next(iter(self._answers)))
        probe = self._probe
        if answer and probe is not None and probe.req_id == req_id:
            return self._is_probed(probe, key)
        return answer

    def take_probes(self) -> int:
        """How many requests were probes, since the last call."""
        taken, self._probes = self._probes, 0
        return taken

    # -- inside ---------------------------------------------------------------------------------------------

    def _decide(self, req_id: str) -> bool:
        self._measure()
        if not self._computing:
            if not self._is_known() or self._restore_seconds() <= SLOWER * self._computed.seconds_each:
                return True
            self._turn(computing=True)
        now = self._clock()
        probe = self._probe
        if probe is not None and probe.req_id not in self._loading and now - probe.chosen > PROBE_SECONDS_MAX:
            self._give_up_probe()  # and it may answer for hours
            return False
        if probe is not None or self._loading or now < self._next_probe:
            return False
        self._probe = _Probe(req_id, now)
        self._probes += 1
        self._forget_restores()
        return True

    def _is_known(self) -> bool:
        busy = max((pace.seconds for stage in self._restored for pace in stage.values()), default=0.0)
        return self._computed_steps >= STEPS_MIN and (self._restored_loads >= STEPS_MIN or busy >= BUSY_SECONDS_MIN)

    def _restore_seconds(self) -> float:
        """Of one token: each stage's slowest, one after the other."""
        seconds = sum(
            stage.objects * max((pace.seconds_each for pace in paces.values() if pace.seconds), default=0.0)
            for stage, paces in zip(self._stages, self._restored, strict=True)
        )
        return seconds * self._bytes_each()

    def _bytes_each(self) -> float:
        """Bytes of a token on one rank: as the last load had them, or of a chunk of every group."""
        if self._object_bytes.amount:
            return self._object_bytes.seconds_each
        return sum(one.object_bytes / one.tokens for one in self._chunks.values())

    def _measure(self) -> None:
        """Take in what has been moved since the last time."""
        for stage, seen, paces in zip(self._stages, self._seen, self._restored, strict=True):
            for number, (moved, busy_ns) in enumerate(stage.totals()):
                moved_before, busy_before = seen.get(number, (0, 0))
                # A new control page says less until its rank writes to it.
                if busy_ns > busy_before and moved >= moved_before:
                    paces.setdefault(number, Pace()).add(moved - moved_before, (busy_ns - busy_before) / 1e9)
                    seen[number] = moved, busy_ns

    def _forget_restores(self) -> None:
        self._restored = [{} for _ in self._stages]
        self._restored_loads = 0

    def _turn(self, *, computing: bool) -> None:
        restored, computed = 1 / max(self._restore_seconds(), 1e-12), 1 / self._computed.seconds_each
        logger.info(
            "xkv: hits are %s from now on; restoring %.0f tokens a second, computing %.0f (xkv.restore_policy)",
            "declined (save for a probe now and then)" if computing else "given",
            restored,
            computed,
        )
        self._computing = computing
        self._fast_probes = 0
        self._probe_seconds = PROBE_SECONDS_MIN
        self._next_probe = self._clock() + PROBE_SECONDS_MIN
        if computing:
            self._forget_restores()

    def _is_probed(self, probe: _Probe, key: bytes) -> bool:
        """Whether a chunk belongs to the part of its prefix that a probe restores.

        All of it where a group has windows: the card may hold none that ends a shorter prefix, and nothing is restored.
        """
        group = int.from_bytes(key[-4:], "big")
        facts = self._chunks.get(group)
        if facts is None or not all(one.is_prefix for one in self._chunks.values()):
            return True
        chunks = probe.chunks.setdefault(group, set())
        if key not in chunks and len(chunks) < max(1, PROBE_TOKENS // facts.tokens):
            chunks.add(key)
        return key in chunks

    def _judge_probe(self) -> None:
        self._measure()
        if not any(self._restored):
            self._end_probe()  # nobody has said how fast it was
            return
        if self._was_slow():
            self._end_probe()
            return
        self._fast_probes += 1
        self._end_probe()
        self._next_probe = 0.0
        if self._fast_probes >= PROBES_MIN:
            self._turn(computing=False)

    def _give_up_probe(self) -> None:
        """It loads nothing. What was read to verify its hits may have been slow, and too late, all the same."""
        self._measure()
        if any(self._restored):
            self._was_slow()
        self._end_probe()

    def _was_slow(self) -> bool:
        """Whether what was measured since the probe began is slower than computing: then the next comes later."""
        if self._restore_seconds() <= self._computed.seconds_each:
            return False
        self._fast_probes = 0
        self._probe_seconds = min(2 * self._probe_seconds, PROBE_SECONDS_MAX)
        return True

    def _end_probe(self) -> None:
        self._probe = None
        self._next_probe = self._clock() + self._probe_seconds
