"""Loads inside a step (`sync_load_budget_bytes`): over before the forward pass reads their pages, or made good after.

Where a release has none, the same key changes nothing: the same requests load beside the steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from harness import release
from harness.pipeline import Pipeline
from harness.shapes import Shape, full, mla, sliding
from harness.story import Story, prompt
from xkv_compat.features import detect_live
from xkv_offload import sync_loads
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_store.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.engine import Engine, Request, Step
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

BLOCKS = 20
CHUNKS = BLOCKS // 2
SHAPE = Shape(groups=(mla(),), blocks=128, blocks_per_chunk=2)
TOKENS = prompt(tokens=16 * BLOCKS + 3, seed=1)
LONGER = prompt(tokens=16 * 28 + 3, seed=2, after=TOKENS[: 16 * BLOCKS])  # four chunks more
UNBOUNDED = {"sync_load_budget_bytes": 1 << 40}
BAD_BLOCK = 11  # of the sixth chunk


def is_inside() -> bool:
    """Whether this release loads inside a step at all."""
    return detect_live()["sync_loads"]


def stored(rig: Rig, *, extra: Mapping[str, Any] = UNBOUNDED, **options: Any) -> Engine:
    """An engine in its second launch that may load inside steps, with TOKENS on the card."""
    first = rig.launch(SHAPE)
    first.serve("cold", TOKENS)
    rig.gateway.await_objects(CHUNKS)
    return rig.relaunch(first, extra=extra, **options)


def damage(rig: Rig) -> None:
    """Change a byte of what the card holds of BAD_BLOCK."""
    group = SHAPE.groups[0]
    first = BAD_BLOCK * group.block_tokens
    content = Story(TOKENS).rows(
        layer=group.layers[1], rank=0, start=first, end=first + group.block_tokens, row_bytes=group.row_bytes
    )
    assert rig.gateway.damage(content.reshape(-1)[:4096]) == 1


def loading_steps(engine: Engine) -> list[Step]:
    return [step for step in engine.steps if step.load_jobs]


def computed_in(step: Step, request: Request) -> int:
    tokens: int = step.scheduled.num_scheduled_tokens.get(request.req_id, 0)
    return tokens


def delay_copies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every copy into pages come late, so that nothing is there in time by luck."""
    mover = engine.ranks[0].worker.context.mover
    scatter = mover.scatter

    def late(move: Any) -> None:
        time.sleep(0.02)
        scatter(move)

    monkeypatch.setattr(mover, "scatter", late)


def note_expedited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each load that vLLM begins is one that it waits for."""
    worker, found = engine.ranks[0].worker, []
    submit = worker.submit_load

    def noted(*arguments: Any, expedited: bool = False) -> bool:
        found.append(expedited)
        done: bool = submit(*arguments, expedited=expedited)
        return done

    monkeypatch.setattr(worker, "submit_load", noted)
    return found


def test_a_load_is_over_before_its_step_reads_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stored(rig)
    delay_copies(engine, monkeypatch)
    expedited = note_expedited(engine, monkeypatch)
    request = engine.serve("restored", LONGER, output_tokens=2)
    assert request.loaded() == [tuple(range(BLOCKS))]
    assert request.computed_tokens == len(LONGER) + 1 - 16 * BLOCKS
    (step,) = loading_steps(engine)
    assert computed_in(step, request) == (len(LONGER) - 16 * BLOCKS if is_inside() else 0)
    assert expedited == [is_inside()]
    rig.gateway.await_objects(CHUNKS + 4)


def test_what_the_budget_has_no_room_for_loads_beside_the_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = CHUNKS * SHAPE.chunk_bytes(0)  # of one of the two
    other = prompt(tokens=16 * BLOCKS + 3, seed=3)
    first = rig.launch(SHAPE)
    first.serve("cold", TOKENS)
    first.serve("cold too", other)
    rig.gateway.await_objects(2 * CHUNKS)
    engine = rig.relaunch(first, extra={"sync_load_budget_bytes": budget})
    delay_copies(engine, monkeypatch)
    expedited = note_expedited(engine, monkeypatch)
    requests = [engine.submit("fits", TOKENS), engine.submit("does not fit", other)]
    engine.run()
    assert [request.loaded() for request in requests] == [[tuple(range(BLOCKS))]] * 2
    assert expedited == [is_inside(), False]
    (step,) = loading_steps(engine)
    assert [computed_in(step, request) for request in requests] == [3 if is_inside() else 0, 0]


def test_without_a_budget_nothing_loads_inside_a_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stored(rig, extra={"sync_load_budget_bytes": 0})
    expedited = note_expedited(engine, monkeypatch)
    assert engine.serve("restored", LONGER).loaded() == [tuple(range(BLOCKS))]
    assert expedited == [False]


def test_a_failed_load_is_computed_anew_and_nothing_that_followed_from_it_is_stored(rig: Rig) -> None:
    # The step has computed four chunks from pages that were never filled: stored, they would be hit for ever.
    engine = stored(rig)
    damage(rig)
    suspect = PROCESS_COUNTERS["suspect_chunks"]
    request = engine.serve("hit by it", LONGER, output_tokens=2)
    assert request.finish_reason == "length"
    # Told by request, vLLM looks the prompt up again, and stores what it then computes.
    told = not is_inside() and release.channel(SHAPE) == "request_errors"
    assert request.loaded() == [tuple(range(BLOCKS)), tuple(range(10))][: 1 + told]
    in_vain = len(LONGER) - 16 * BLOCKS if is_inside() else 0
    assert request.computed_tokens == in_vain + len(LONGER) + 1 - 16 * 10
    engine.await_stores()
    assert PROCESS_COUNTERS["suspect_chunks"] - suspect == (4 if is_inside() else 0)
    rig.gateway.await_objects(CHUNKS - 1 + told + (0 if is_inside() else 4))

    third = rig.relaunch(engine, extra=UNBOUNDED)
    assert third.serve("after it", LONGER, output_tokens=2).loaded() == [tuple(range(28 if told else 10))]
    rig.gateway.await_objects(CHUNKS + 4)
    third.forget()
    assert third.serve("whole again", LONGER, output_tokens=2).loaded() == [tuple(range(28))]


def test_a_request_that_shares_the_unfilled_blocks_leaves_nothing_on_the_card_either(rig: Rig) -> None:
    # vLLM counts blocks that are loaded inside a step as its own at once: another request of the step reads them, too.
    engine = stored(rig)
    damage(rig)
    requests = [
        engine.submit("hit by it", LONGER, output_tokens=2),
        engine.submit("shares it", prompt(tokens=16 * 26 + 5, seed=4, after=TOKENS[: 16 * BLOCKS]), output_tokens=2),
    ]
    engine.run()
    assert [request.finish_reason for request in requests] == ["length", "length"]
    if is_inside():
        assert [len(request.loads) for request in requests] == [1, 0]
        engine.await_stores()
        rig.gateway.await_objects(CHUNKS - 1)
    third = rig.relaunch(engine, extra=UNBOUNDED)
    for number in range(2):
        for request in requests:
            tokens = request.story.tokens(0, request.story.prompt_length)
            again = third.serve(f"{request.req_id} again, {number}", tokens, output_tokens=2)
            assert again.finish_reason == "length"
        third.await_stores()
        third.forget()


@pytest.mark.parametrize("batch_tokens", [2048, 48])
def test_a_step_that_was_scheduled_ahead_of_the_failure_leaves_nothing_behind(rig: Rig, batch_tokens: int) -> None:
    # Its forward pass goes on from the same pages before vLLM has heard of them.
    options: dict[str, Any] = {"batch_tokens": batch_tokens, "async_scheduling": True, "policy": "fail"}
    engine = stored(rig, pipeline=Pipeline(late=True), **options)
    damage(rig)
    request = engine.serve("hit by it", LONGER, output_tokens=2)
    assert (request.finish_reason, request.said) == ("error", [])
    engine.await_stores()
    third = rig.relaunch(engine, **options)
    for blocks in (10, 28):  # what the second time finds is what was stored before, where it was not stored anew
        again = third.serve(f"{blocks} again", LONGER, output_tokens=2)
        assert (again.finish_reason, again.loaded()) == ("length", [tuple(range(blocks))])
        rig.gateway.await_objects(14)
        third.forget()


def test_the_policy_to_fail_ends_the_request_alone(rig: Rig) -> None:
    engine = stored(rig, policy="fail")
    damage(rig)
    failed = engine.submit("hit by it", LONGER)
    other = engine.submit("not hit", prompt(tokens=16 * 8 + 3, seed=5))
    engine.run()
    assert (failed.finish_reason, failed.said) == ("error", [])
    assert other.finish_reason == "length"
    engine.await_stores()
    engine.forget()
    after = engine.serve("the next one", LONGER, output_tokens=2)
    assert (after.finish_reason, after.loaded()) == ("length", [tuple(range(10))])
    third = rig.relaunch(engine, extra=UNBOUNDED)
    for tokens in (LONGER, prompt(tokens=16 * 8 + 3, seed=5)):
        assert third.serve(f"{len(tokens)} again", tokens, output_tokens=2).finish_reason == "length"


def test_a_gateway_killed_between_hit_and_load(rig: Rig) -> None:
    engine = stored(rig)
    request = engine.submit("hit", LONGER)
    engine.step(before_execute=lambda _: rig.gateway.kill())
    engine.run()
    assert (request.finish_reason, len(request.loads)) == ("length", 1)
    rig.gateway.start()
    engine.await_gateway()
    third = rig.relaunch(engine, extra=UNBOUNDED)
    assert third.serve("restored", LONGER, output_tokens=2).loaded() == [tuple(range(BLOCKS))]


def test_a_step_waits_for_its_loads_no_longer_than_their_deadline(rig: Rig) -> None:
    engine = stored(rig, extra={**UNBOUNDED, "xkv.load_timeout_ms": 200})
    rig.gateway.process.hold("get.before_read")
    request = engine.submit("waits", LONGER)
    started = time.monotonic()
    engine.step()
    assert (0.2 <= time.monotonic() - started < 5.0) == is_inside()
    engine.run(lambda: request.finish_reason is not None)
    assert request.finish_reason == "length"
    rig.gateway.process.let_go("get.before_read")
    engine.run()


REFUSED: dict[str, tuple[Shape, dict[str, Any]]] = {
    "2 KV-cache groups": (Shape(groups=(full(), sliding(window=48)), blocks=64), {}),
    "2 ranks": (Shape(groups=(mla(),), blocks=64, ranks=2), {}),
    "not full attention": (Shape(groups=(sliding(window=48),), blocks=64), {}),
    "async scheduling": (SHAPE, {"async_scheduling": True}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_where_a_failed_load_could_not_be_made_good_it_is_refused_at_start(rig: Rig, words: str) -> None:
    shape, options = REFUSED[words]
    if not is_inside():
        rig.launch(shape, extra=UNBOUNDED, **options)  # nothing will load inside a step
        return
    with pytest.raises(UserError, match=f"sync_load_budget_bytes.*{words}"):
        rig.launch(shape, extra=UNBOUNDED, **options)
    rig.launch(shape, extra={"sync_load_budget_bytes": 0}, **options)


def test_why_recomputing_is_refused_where_a_step_runs_ahead(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM's own fault, with ours out of the way: when this fails, it is mended, and the refusal can go.
    monkeypatch.setattr(sync_loads, "check_launch", lambda *_, **__: None)
    engine = stored(rig, async_scheduling=True, pipeline=Pipeline(late=True))
    damage(rig)
    if is_inside():
        with pytest.raises(AssertionError, match="another token was said"):
            engine.serve("hit by it", LONGER, output_tokens=2)
        return
    assert engine.serve("hit by it", LONGER, output_tokens=2).finish_reason == "length"
