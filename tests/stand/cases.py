"""What the stack's tests share: one engine server, its models, the baselines, and the judgement of an answer.

Owns: which models exist, the baseline of each prompt (the same engine without offloading), and what counts as
restored. Must not know: how engines or gateways are run.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from stand.engines import Engine, EngineConfig, EngineServer, Generation
from stand.models import Shape, prompt
from stand.pools import Pool
from xkv_matrix.targets import Target, find_target

if TYPE_CHECKING:
    from pathlib import Path


TARGET_VARIABLE = "XKV_TARGET"  # the release as matrix/targets.toml calls it; nox sets it
PROMPT_TOKENS = 900  # 28 whole blocks of 32 and a rest; more than one chunk of 16 blocks
OUTPUT_TOKENS = 16
RETURN_S_MAX = 30.0  # until an engine uses a gateway that has come back

Prompts = list[list[int]]


class Card(Protocol):
    """A card that a gateway serves."""

    @property
    def extra(self) -> dict[str, Any]:
        """The keys by which an engine finds it."""


def target() -> Target:
    """The release that these tests run against."""
    release = os.environ.get(TARGET_VARIABLE)
    assert release, f"say which release is installed: {TARGET_VARIABLE}=…"
    return find_target(release)


def cannot_run(shape: Shape) -> str | None:
    """The release's own words where it cannot run this shape on a CPU."""
    errors = [row.error for row in target().cannot_run if row.shape == shape.name]
    return errors[0] if errors else None


def prompts(shape: Shape, *seeds: int, tokens: int = PROMPT_TOKENS) -> Prompts:
    """Prompts without a common prefix."""
    return [prompt(shape, tokens=tokens, seed=seed) for seed in seeds]


@dataclass
class Stand:
    """One target's engines, models and baselines, for the whole run."""

    server: EngineServer
    folder: Path
    _plain_engines: dict[str, Engine] = field(default_factory=dict)

    def model(self, shape: Shape) -> Path:
        """The folder of a shape's model."""
        return self.server.write_model(shape, self.folder / shape.name)

    def config(self, shape: Shape, **settings: Any) -> EngineConfig:
        """An engine without offloading."""
        return EngineConfig(**{"model": self.model(shape), **settings})

    def offloading(self, shape: Shape, card: Card, *, blocks_per_chunk: int, **settings: Any) -> EngineConfig:
        """An engine that stores to and restores from `card`."""
        config = self.config(shape, **settings)
        chunk = {"blocks_per_chunk": blocks_per_chunk}
        if "blocks_per_chunk_key" in target().lacks:
            chunk = {"block_size": blocks_per_chunk * config.block_size}
        return replace(config, extra={**chunk, **card.extra})

    def engine(self, config: EngineConfig) -> Engine:
        """A new engine in a new process."""
        return self.server.engine(config)

    def baseline(self, shape: Shape, asked: Prompts, **settings: Any) -> list[list[int]]:
        """What the same engine answers without offloading, computed from the first token on."""
        config = self.config(shape, **settings)
        name = repr(config)
        if name not in self._plain_engines:
            self._plain_engines[name] = self.engine(config)
        engine = self._plain_engines[name]
        engine.reset_prefix()
        answer = engine.generate(asked, max_tokens=OUTPUT_TOKENS)
        for tokens in answer.tokens:
            assert len(set(tokens)) >= OUTPUT_TOKENS // 4, f"a baseline that repeats itself proves little: {tokens}"
        return answer.tokens

    def decided(self, shape: Shape, wanted: int) -> Pool:
        """Prompts of the usual length with one rank's answers, which any number of ranks has to give as well."""
        coming = (prompt(shape, tokens=PROMPT_TOKENS, seed=seed) for seed in count(1))
        with self.engine(self.config(shape)) as engine:
            return Pool.ask(engine, coming, wanted=wanted, output_tokens=OUTPUT_TOKENS)


def generate(engine: Engine, asked: Prompts) -> Generation:
    """Greedy answers of the usual length."""
    return engine.generate(asked, max_tokens=OUTPUT_TOKENS)


def store(engine: Engine, asked: Prompts, expected: list[list[int]]) -> int:
    """Answer prompts that the card does not hold, and wait until it holds them; the objects it confirmed."""
    cold = generate(engine, asked)
    assert cold.tokens == expected
    assert cold.counters.seen["load_blocks"] == 0
    assert cold.counters.product["load_objects"] == 0
    assert cold.counters.seen["store_blocks"] > 0
    assert cold.counters.product["store_objects"] > 0
    totals = engine.settle().product
    assert totals["refused_objects"] == totals["shed_objects"] == 0
    return totals["confirmed_objects"]


def assert_restored(answer: Generation, expected: list[list[int]]) -> None:
    """The same tokens, and pages that really came from the card, by the product's count and by the stand's."""
    assert answer.tokens == expected
    assert answer.counters.product["load_objects"] > 0
    assert answer.counters.product["load_failures"] == 0
    assert answer.counters.seen["load_blocks"] > 0


def assert_missed(answer: Generation) -> None:
    """Nothing came from the card."""
    assert answer.counters.product["load_objects"] == 0
    assert answer.counters.product["lookup_hits"] == 0
    assert answer.counters.seen["load_jobs"] == 0


def restore_after_return(engine: Engine, asked: Prompts, expected: list[list[int]]) -> Generation:
    """Ask until the engine restores again; every answer on the way must be right as well."""
    deadline = time.monotonic() + RETURN_S_MAX
    while True:
        engine.reset_prefix()
        answer = generate(engine, asked)
        assert answer.tokens == expected
        if answer.counters.product["load_objects"] > 0:
            assert_restored(answer, expected)
            return answer
        engine.settle()
        assert time.monotonic() < deadline, f"nothing is restored: {answer.counters}"


def assert_canary(
    engine: Engine, asked: Prompts, expected: list[list[int]], *, rank: int | None = None, ranks: int = 1
) -> None:
    """Zeroed pages must give other tokens for every prompt, or the shape proves nothing. `rank`: on one of `ranks`."""
    engine.reset_prefix()
    engine.zero_loads(on=True, rank=rank)
    answer = generate(engine, asked)
    engine.zero_loads(on=False)
    part = 1 if rank is None else ranks
    assert part * answer.counters.seen["zeroed_blocks"] == answer.counters.seen["load_blocks"] > 0
    for zeroed, right in zip(answer.tokens, expected, strict=True):
        assert zeroed != right, "the answer does not depend on the restored pages"
