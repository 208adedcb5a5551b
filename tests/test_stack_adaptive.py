"""A real engine on a medium that is slower than computing, and then fast again.

If this goes, nothing shows any more that `xkv.restore_policy` = `when_faster` spares an engine what `always` costs it
on such a medium, nor that it comes back.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import pytest

from stand.cases import prompts
from stand.gateways import Gateway
from stand.models import LLAMA
from xkv_store.testing import faulty_gateway
from xkv_store.testing.faults import Fault, FaultPlan, Kind, Operation

if TYPE_CHECKING:
    from pathlib import Path

    from stand.cases import Prompts, Stand
    from stand.engines import Engine, EngineConfig

pytest_plugins = ("stand.fixtures",)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT_TOKENS = 1_930  # whole chunks of 128 tokens, more than a probe restores, and a rest
WHOLE_TOKENS = PROMPT_TOKENS // 128 * 128
WARM_PROMPTS = 4  # computed first: steps are measured
PROMPTS = 20
READ_SECONDS = 0.5  # of each object's read; eight are read at once, so that a prompt's fifteen take two of them
RETURN_S_MAX = 60.0
SLOW = FaultPlan((Fault(operation=Operation.READ, kind=Kind.DELAY, probability=1.0, delay_s=READ_SECONDS),))


def seconds_each(engine: Engine, asked: Prompts, expected: list[list[int]]) -> list[float]:
    """Of each prompt, one after the other, from the first token on; the answers must be right."""
    seconds = []
    for one, right in zip(asked, expected, strict=True):
        answer = engine.generate([one], max_tokens=1)
        assert answer.tokens == [right]
        seconds.append(answer.seconds)
    return seconds


def with_policy(config: EngineConfig, policy: str) -> EngineConfig:
    """The engine with this restore policy."""
    assert config.extra is not None
    return replace(config, extra={**config.extra, "xkv.restore_policy": policy})


def test_a_slow_medium_costs_what_computing_costs_and_a_fast_one_is_used_again(stand: Stand, tmp_path: Path) -> None:
    asked = prompts(LLAMA, *range(1, PROMPTS + 1), tokens=PROMPT_TOKENS)
    warm = [prompts(LLAMA, *range(first, first + WARM_PROMPTS), tokens=PROMPT_TOKENS) for first in (101, 201, 301)]
    with stand.engine(stand.config(LLAMA)) as plain:
        seconds_each(plain, warm[0], plain_answers(plain, warm[0]))
        expected = plain_answers(plain, asked)
        plain.reset_prefix()
        computing = seconds_each(plain, asked, expected)
    with Gateway(tmp_path, faults=FaultPlan()) as gateway:
        config = stand.offloading(LLAMA, gateway, blocks_per_chunk=4)
        with stand.engine(config) as first:
            seconds_each(first, asked, expected)
            first.settle()
        slow_down(gateway, tmp_path, SLOW)
        with stand.engine(with_policy(config, "always")) as engine:
            engine.generate(warm[1], max_tokens=1)
            always = seconds_each(engine, asked, expected)
            assert engine.counters().product["lookup_declined"] == 0
        with stand.engine(with_policy(config, "when_faster")) as engine:
            for one in warm[2]:
                engine.generate([one], max_tokens=1)
            adaptive = seconds_each(engine, asked, expected)
            counted = engine.counters().product
            assert counted["lookup_declined"] > 0
            assert counted["restore_probes"] > 0
            for name, seconds in (("always", always), ("when_faster", adaptive)):
                whole, middle = sum(seconds) / sum(computing), median(seconds) / median(computing)
                sys.stderr.write(f"{name} / computing: {whole:.2f} together, {middle:.2f} median\n")
            assert median(always) > 3 * median(computing), "else the medium is not slow, and nothing is shown"
            assert median(adaptive) < 2 * median(computing)
            assert sum(adaptive) < sum(always) / 2, "with what finding out has cost"

            slow_down(gateway, tmp_path, FaultPlan())
            deadline = time.monotonic() + RETURN_S_MAX
            while True:
                engine.reset_prefix()
                answers = [engine.generate([one], max_tokens=1) for one in asked]
                assert [answer.tokens for answer in answers] == [[right] for right in expected]
                if answers[-1].cached_tokens == [WHOLE_TOKENS]:
                    break
                assert time.monotonic() < deadline, f"nothing is restored: {engine.counters().product}"


def plain_answers(plain: Engine, asked: Prompts) -> list[list[int]]:
    """What the engine answers without offloading."""
    return [plain.generate([one], max_tokens=1).tokens[0] for one in asked]


def slow_down(gateway: Gateway, folder: Path, plan: FaultPlan) -> None:
    """From now on the gateway's medium follows this plan."""
    gateway.stop()
    faulty_gateway.write_plan(folder / "faults", plan)
    gateway.start()
