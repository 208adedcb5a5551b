"""Blocks that change hands while a store or a reset is under way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from harness import release
from harness.offered import offered
from harness.resets import outlives_its_reset
from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt
from xkv_offload.copy import HostMover

if TYPE_CHECKING:
    from harness.engine import Engine
    from harness.rig import Rig
    from harness.shapes import Group

pytest_plugins = ("harness.fixtures",)

COPY_S = 0.02  # of one object, so that a store is certainly under way when its blocks are wanted


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that take long to read their pages."""
    gather = HostMover.gather

    def slowly(self: HostMover, move: Any) -> None:
        time.sleep(COPY_S)
        gather(self, move)

    monkeypatch.setattr(HostMover, "gather", slowly)


def preempted_while_storing(engine: Engine) -> tuple[list[int], list[int]]:
    """Two prompts that fill all blocks but the null block: their first output tokens want more, and one must go."""
    first, second = prompt(tokens=16 * 10, seed=1), prompt(tokens=16 * 9, seed=2)
    engine.submit("stays", first, output_tokens=20)
    engine.submit("goes", second, output_tokens=20)
    engine.step()
    step = engine.step()
    assert step.preempted == {"goes"}
    assert step.flushed, "its store was not under way"
    engine.run()
    return first, second


@pytest.mark.usefixtures("slow_copies")
def test_preemption_waits_for_the_store_to_leave_the_pages(rig: Rig) -> None:
    shape = Shape(groups=(mla(layers=2),), blocks=20, blocks_per_chunk=1)
    engine = rig.launch(shape)
    first, second = preempted_while_storing(engine)
    assert {one.finish_reason for one in engine.requests.values()} == {"length"}
    rig.gateway.await_objects(19)

    again = rig.relaunch(engine)
    assert again.serve("first", first, output_tokens=2).loaded() == [tuple(range(10))]
    assert again.serve("second", second, output_tokens=2).loaded() == [tuple(range(9))]


@pytest.mark.usefixtures("slow_copies")
def test_a_finished_request_gives_its_blocks_away_while_they_are_stored(rig: Rig) -> None:
    shape = Shape(groups=(mla(layers=2),), blocks=12, blocks_per_chunk=2)
    engine = rig.launch(shape)
    prompts = [prompt(tokens=16 * 8 + 1, seed=seed) for seed in (3, 4, 5)]
    for number, tokens in enumerate(prompts):
        engine.submit(str(number), tokens)
    engine.run()
    assert any(step.flushed for step in engine.steps), "no store was under way when its blocks were wanted"
    rig.gateway.await_objects(12)

    again = rig.relaunch(engine)
    for number, tokens in enumerate(prompts):
        assert again.serve(f"again {number}", tokens, output_tokens=2).loaded() == [tuple(range(8))]


@pytest.mark.usefixtures("slow_copies")
def test_a_reset_with_a_store_under_way_forgets_it_in_this_launch_alone(rig: Rig) -> None:
    shape = Shape(groups=(mla(layers=2),), blocks=48, blocks_per_chunk=2)
    tokens = prompt(tokens=16 * 10 + 1, seed=6)
    engine = rig.launch(shape)
    engine.submit("before", tokens)
    step = engine.step()
    assert step.store_jobs
    engine.forget_all()
    engine.run()
    assert serve(engine, "after") == [], "what was stored before the reset was hit"
    assert serve(engine, "stored after the reset") == [tuple(range(10))]
    rig.gateway.await_objects(10)

    again = rig.relaunch(engine)
    assert again.serve("a new launch", tokens, output_tokens=2).loaded() == [tuple(range(10))]


@pytest.mark.usefixtures("slow_copies")
def test_a_reset_that_preempts_running_requests(rig: Rig) -> None:
    shape = Shape(groups=(mla(layers=2),), blocks=48, blocks_per_chunk=2)
    tokens = prompt(tokens=16 * 10 + 1, seed=7)
    engine = rig.launch(shape)
    request = engine.submit("running", tokens, output_tokens=4)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    if not outlives_its_reset(engine):
        return
    assert request.finish_reason == "length"
    assert request.loads == []
    assert serve(engine, "after") == [], "a request that was there at the reset stores nothing more"
    assert serve(engine, "stored after the reset") == [tuple(range(10))]


@pytest.mark.parametrize("groups", [(mla(layers=2),), (full(), sliding(window=48))], ids=["one group", "two groups"])
def test_a_reset_with_a_load_under_way(rig: Rig, groups: tuple[Group, ...]) -> None:
    # The load was promised before the reset and its blocks are the request's: to fail it would end the request,
    # and with several groups the engine.
    shape = Shape(groups=groups, blocks=64, blocks_per_chunk=2)
    tokens = prompt(tokens=16 * 10 + 1, seed=8)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    rig.gateway.await_objects(sum(map(len, offered(shape, len(tokens)))))

    second = rig.relaunch(first, policy="fail")
    rig.gateway.process.hold("get.before_read")
    request = second.submit("loading", tokens, output_tokens=2)
    verifies = release.channel(shape) == "verified"
    assert bool(second.step().load_jobs) != verifies
    rig.gateway.process.await_point("get.before_read")
    second.reset_connector()
    assert bool(second.step().flushed) != verifies
    rig.gateway.process.let_go("get.before_read")
    if verifies:
        second.run()  # no job was under way
    elif not outlives_its_reset(second):
        return
    assert request.finish_reason == "length"
    # What was only being read into the ring was promised to nobody, and is of before the reset.
    assert request.loaded(0) == ([] if verifies else [tuple(range(10))])
    assert serve(second, "after") == [], "what was stored before the reset was hit"


def test_a_reset_while_others_own_the_blocks_before_a_window(rig: Rig) -> None:
    # vLLM then offers the running request's chunks from the first one, with blocks that it gave away long ago.
    shape = Shape(groups=(full(), sliding(window=40)), blocks=40, blocks_per_chunk=2, shared=True)
    tokens = prompt(tokens=200, seed=9)
    engine = rig.launch(shape, batch_tokens=96)
    engine.submit("running", tokens, output_tokens=12)
    for _ in range(4):
        engine.step()
    engine.submit("taker", prompt(tokens=150, seed=10))
    for _ in range(4):
        engine.step()
    engine.reset_connector()
    engine.run()
    assert {one.finish_reason for one in engine.requests.values()} == {"length"}
    engine.await_stores()
    engine.forget()
    branch = engine.serve("branch", prompt(tokens=100, seed=11, after=tokens[:96]), output_tokens=2)
    assert branch.loads == []
    assert serve(engine, "from what the branch has stored") == [tuple(range(6))]
    assert serve(engine, "whole") == [tuple(range(12))]


def serve(engine: Engine, name: str) -> list[tuple[int, ...]]:
    """Serve the prompt of the first request again, with nothing in the engine itself."""
    engine.await_stores()
    engine.forget()
    first = next(iter(engine.requests.values())).story
    request = engine.serve(name, first.tokens(0, first.prompt_length), output_tokens=2)
    assert request.finish_reason == "length"
    return request.loaded()
