"""Steps that are scheduled before the last one's result is known: what ranks report comes two schedules later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import ledger
from harness.pipeline import WAYS, PipelinedEngine
from harness.resets import outlives_its_reset
from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt
from harness.walks import WalkAhead, sweep

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.engine import Engine
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures", "harness.slow_copies")

BLOCKS = 20
TOKENS = prompt(tokens=16 * BLOCKS + 3, seed=1)
ONE = Shape(groups=(mla(layers=2),), blocks=64, blocks_per_chunk=2)
TWO = Shape(groups=(full(), sliding(window=40)), blocks=96, blocks_per_chunk=2, shared=True)
RANKS = Shape(groups=(full(layers=1),), blocks=64, blocks_per_chunk=2, ranks=2)

every_way = pytest.mark.parametrize("way", WAYS)


@every_way
@pytest.mark.parametrize("shape", [ONE, TWO, RANKS], ids=["one group", "two groups", "two ranks"])
def test_what_is_stored_with_steps_ahead_is_restored(rig: Rig, shape: Shape, way: str) -> None:
    first = rig.launch(shape, batch_tokens=96, **WAYS[way])
    assert isinstance(first, PipelinedEngine)
    assert first.scheduler.scheduler_config.async_scheduling == ("async_scheduling" in WAYS[way])
    cold = first.submit("cold", TOKENS, output_tokens=6)
    beside = first.submit("beside", prompt(tokens=90, seed=2), output_tokens=9)
    lags, unknown = [], 0
    while not first.is_idle():
        step = first.step()
        if first.under_way:
            jobs = {job for one in first.steps[:-1] for job in one.store_jobs}
            lags.append(len(jobs & first.scheduler.connector.connector_scheduler._jobs.keys()))
            unknown += sum(one.num_output_placeholders for one in first.scheduler.requests.values())
        assert step is not None
    assert {cold.finish_reason, beside.finish_reason} == {"length"}
    assert max(lags) > 0, "every store was heard of before the next schedule"
    assert (unknown > 0) == ("async_scheduling" in WAYS[way]), "tokens were scheduled before they were known, or not"
    first.await_stores()
    assert ledger.left(first) == []

    second = rig.relaunch(first, batch_tokens=96, **WAYS[way])
    warm = second.submit("warm", TOKENS, output_tokens=6)
    second.submit("beside", prompt(tokens=90, seed=2), output_tokens=9)
    second.run()
    assert warm.loaded() == [tuple(range(BLOCKS))]
    assert warm.finish_reason == "length"
    assert ledger.left(second) == []


@every_way
def test_preempted_with_steps_ahead(rig: Rig, slow_copies: Callable[[float], None], way: str) -> None:
    slow_copies(0.01)
    shape = Shape(groups=(mla(layers=2),), blocks=20, blocks_per_chunk=1)
    engine = rig.launch(shape, **WAYS[way])
    stays = engine.submit("stays", prompt(tokens=16 * 10, seed=1), output_tokens=20)
    goes = engine.submit("goes", prompt(tokens=16 * 9, seed=2), output_tokens=20)
    engine.run()
    preempting = [step for step in engine.steps if step.preempted]
    assert "goes" in preempting[0].preempted
    assert preempting[0].flushed, "its store was not under way"
    assert {stays.finish_reason, goes.finish_reason} == {"length"}
    rig.gateway.await_objects(19)
    assert ledger.left(engine) == []

    again = rig.relaunch(engine)
    assert again.serve("stays", prompt(tokens=16 * 10, seed=1), output_tokens=2).loaded() == [tuple(range(10))]
    assert again.serve("goes", prompt(tokens=16 * 9, seed=2), output_tokens=2).loaded() == [tuple(range(9))]


@every_way
def test_a_reset_between_a_schedule_and_its_result(rig: Rig, way: str) -> None:
    engine = rig.launch(ONE, batch_tokens=96, **WAYS[way])
    running = engine.submit("running", TOKENS, output_tokens=4)
    while not any(step.store_jobs for step in engine.steps):
        engine.step()
    engine.reset_connector()
    if not outlives_its_reset(engine):
        return
    assert running.finish_reason == "length"
    engine.await_stores()
    assert ledger.left(engine) == []
    engine.forget()
    assert engine.serve("after", TOKENS, output_tokens=2).loads == [], "what was stored before the reset was hit"
    engine.await_stores()
    engine.forget()
    assert engine.serve("stored after the reset", TOKENS, output_tokens=2).loaded() == [tuple(range(BLOCKS))]


@every_way
def test_a_load_that_fails_with_steps_ahead(rig: Rig, way: str) -> None:
    first = rig.launch(ONE)
    first.serve("cold", TOKENS)
    rig.gateway.await_objects(BLOCKS // 2)
    engine = rig.relaunch(first, batch_tokens=96, **WAYS[way])
    request = engine.submit("hit", TOKENS, output_tokens=3)
    beside = engine.submit("beside", prompt(tokens=90, seed=2), output_tokens=9)
    kill_at_load(rig, engine)
    engine.run()
    assert request.loaded() == [tuple(range(BLOCKS))]
    assert request.computed_tokens == len(TOKENS) + 2
    assert {request.finish_reason, beside.finish_reason} == {"length"}
    assert ledger.left(engine) == []


def kill_at_load(rig: Rig, engine: Engine) -> None:
    """The gateway is gone when the ranks hear of their load."""
    step = engine.step(before_execute=lambda _: rig.gateway.kill())
    assert step.load_jobs


@pytest.mark.usefixtures("copies_across_steps")
@every_way
def test_an_abort_after_every_schedule(rig: Rig, way: str) -> None:
    seen = sweep(rig, ONE, WalkAhead, warm=True, tail=70, **WAYS[way])
    assert len(set(seen)) == len(seen) >= 10, seen
    assert {"load under way, turn 3", "arrived"} <= set(seen)
