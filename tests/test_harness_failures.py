"""Loads that fail: the request is computed anew with the right bytes, and what failed is not hit again.

Where a release has no way to hear of a failed load, none can fail: what is not verified is not hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import release
from harness.failing import BLOCKS, TOKENS, damage, serve_again
from harness.offered import offered
from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt
from xkv_compat.features import detect_live
from xkv_store.geometry import SLOT_BYTES

if TYPE_CHECKING:
    from harness.engine import Engine, Step
    from harness.rig import Rig
    from harness.shapes import Group

pytest_plugins = ("harness.fixtures",)


def stored(rig: Rig, shape: Shape, *, policy: str = "recompute") -> Engine:
    """An engine in its second launch, with the prompt on the card."""
    first = rig.launch(shape)
    first.serve("cold", TOKENS)
    objects = sum(map(len, offered(shape, len(TOKENS))))
    rig.gateway.await_objects(objects * (1 if shape.identical_ranks else shape.ranks))
    return rig.relaunch(first, policy=policy)


def loads_around(shape: Shape, before: int) -> list[tuple[int, ...]]:
    """What is loaded for a prompt whose object after `before` blocks is bad, in the first group."""
    whole, good = tuple(range(BLOCKS)), tuple(range(before))
    # A failed load of a request is followed by another lookup; one of blocks keeps the prefix; one that is verified
    # first does not happen.
    return {"request_errors": [whole, good], "block_errors": [whole], "verified": [good]}[release.channel(shape)]


def is_mended_at_once(shape: Shape) -> bool:
    """Whether the request that met the bad object stores it anew.

    With block errors vLLM goes on behind what it believes to be stored, so it is the next request that does.
    """
    return release.channel(shape) != "block_errors"


def after(shape: Shape, before: int) -> list[tuple[int, ...]]:
    """What the next request loads."""
    return [tuple(range(BLOCKS if is_mended_at_once(shape) else before))]


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_corrupt_object_is_computed_anew_and_stored_again(rig: Rig, blocks_per_chunk: int) -> None:
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=blocks_per_chunk)
    engine = stored(rig, shape)
    damage(rig, shape, block=11)
    request = engine.serve("hit by it", TOKENS, output_tokens=2)
    assert request.finish_reason == "length"
    before = 11 // blocks_per_chunk * blocks_per_chunk
    assert request.loaded() == loads_around(shape, before)
    assert request.computed_tokens == len(TOKENS) + 1 - before * 16, "the prefix before it is kept"
    assert serve_again(engine, "after it") == after(shape, before)
    assert serve_again(engine, "whole again") == [tuple(range(BLOCKS))]


def test_a_corrupt_first_object_is_looked_up_again_and_misses(rig: Rig) -> None:
    # With nothing of the prefix left, vLLM asks again at once: a second hit on it would go round for ever.
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2)
    engine = stored(rig, shape)
    damage(rig, shape, block=0)
    request = engine.serve("hit by it", TOKENS)
    assert request.finish_reason == "length"
    assert len(request.loads) == 1
    assert request.computed_tokens == len(TOKENS)


def test_a_gateway_killed_between_hit_and_load(rig: Rig) -> None:
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2)
    engine = stored(rig, shape)

    def kill(step: Step) -> None:
        if step.load_jobs:
            rig.gateway.kill()

    request = engine.submit("hit", TOKENS)
    engine.step(before_execute=kill)
    engine.run()
    assert request.finish_reason == "length"
    assert request.loaded() == [tuple(range(BLOCKS))]
    assert request.computed_tokens == len(TOKENS)
    engine.forget()
    assert engine.serve("without it", TOKENS).loads == []

    rig.gateway.start()
    engine.await_gateway()
    engine.forget()
    assert engine.serve("what failed is not believed", TOKENS).loads == []
    assert serve_again(engine, "stored anew") == [tuple(range(BLOCKS))]


@pytest.mark.parametrize("point", ["put.before_write", "put.before_commit", "put.committed"])
def test_a_gateway_killed_while_storing(rig: Rig, point: str) -> None:
    # For vLLM the store is done when its bytes have left the pages; what the card did not confirm is a miss.
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2)
    first = rig.launch(shape)
    rig.gateway.process.hold(point)
    first.serve("cold", TOKENS, output_tokens=2)
    rig.gateway.process.await_point(point)
    rig.gateway.kill()
    first.serve("without it", TOKENS, output_tokens=2)
    rig.gateway.start()
    first.await_gateway()

    second = rig.relaunch(first)
    survived = second.serve("whatever is left", TOKENS, output_tokens=2)
    assert survived.finish_reason == "length"
    assert sum(map(len, survived.loaded())) <= 2 * rig.gateway.status()["objects"]
    second.await_stores()
    second.forget()
    assert second.serve("stored anew", TOKENS, output_tokens=2).loaded() == [tuple(range(BLOCKS))]


def test_the_policy_to_fail_ends_the_request_alone(rig: Rig) -> None:
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2)
    engine = stored(rig, shape, policy="fail")
    damage(rig, shape, block=11)
    request = engine.serve("hit by it", TOKENS)
    assert request.finish_reason == "error"
    assert request.computed_tokens == 0
    assert serve_again(engine, "the next one") == [tuple(range(10))]


def test_a_failed_load_on_two_ranks(rig: Rig) -> None:
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2, ranks=2)
    engine = stored(rig, shape)
    damage(rig, shape, block=11)
    request = engine.serve("hit by it", TOKENS, output_tokens=2)
    assert request.finish_reason == "length"
    assert request.loaded() == loads_around(shape, 10)
    assert request.computed_tokens == len(TOKENS) + 1 - 10 * 16
    assert serve_again(engine, "after it") == after(shape, 10)


def test_a_load_that_fails_on_one_of_two_ranks(rig: Rig) -> None:
    # Objects of their own: the other rank's load succeeds, and both must compute anew.
    shape = Shape(groups=(full(),), blocks=64, blocks_per_chunk=2, ranks=2)
    engine = stored(rig, shape)
    damage(rig, shape, block=11, rank=1)
    request = engine.serve("hit by it", TOKENS, output_tokens=2)
    failed = {"request_errors": [], "block_errors": [11, 12], "verified": []}[release.channel(shape)]
    assert [sorted(rank.failed_blocks) for rank in engine.ranks] == [[], failed]
    assert request.loaded() == loads_around(shape, 10)
    assert request.computed_tokens == len(TOKENS) + 1 - 10 * 16
    assert serve_again(engine, "after it") == after(shape, 10)
    assert serve_again(engine, "whole again") == [tuple(range(BLOCKS))]


HYBRID = (full(), sliding(window=48))


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("groups", [HYBRID, (sliding(window=48),)], ids=["two groups", "a window alone"])
def test_a_bad_object_of_groups_that_blocks_say_nothing_of(rig: Rig, groups: tuple[Group, ...], policy: str) -> None:
    shape = Shape(groups=groups, blocks=64, blocks_per_chunk=2)
    engine = stored(rig, shape, policy=policy)
    damage(rig, shape, block=BLOCKS - 1)
    request = engine.serve("hit by it", TOKENS, output_tokens=2)
    told = release.channel(shape) == "request_errors"
    if told and policy == "fail":
        assert request.finish_reason == "error"
        assert request.computed_tokens == 0
    else:
        assert request.finish_reason == "length"
        assert BLOCKS - 1 not in {block for blocks in request.loaded()[-1:] for block in blocks} or told
    again = [BLOCKS - 1 in blocks for blocks in serve_again(engine, "after it")]
    # Told by request, vLLM has the whole prompt computed, and most releases store what they took for stored only with
    # the next one; a window's chunks are kept where a prompt ends alone, so that no shorter prefix can be loaded.
    offers_again = detect_live()["manager_lock"] and policy == "recompute"  # with each match, since the same release
    assert again == ([True] if not told or offers_again else [])
    assert [BLOCKS - 1 in blocks for blocks in serve_again(engine, "whole again")] == [True]


@pytest.mark.parametrize("point", ["get.before_read", "get.answered"])
def test_a_gateway_killed_while_a_hybrid_is_read(rig: Rig, point: str) -> None:
    shape = Shape(groups=HYBRID, blocks=64, blocks_per_chunk=2)
    engine = stored(rig, shape)
    rig.gateway.process.hold(point)
    request = engine.submit("hit", TOKENS, output_tokens=2)
    engine.step()
    rig.gateway.process.await_point(point)
    rig.gateway.kill()
    engine.run()
    assert request.finish_reason == "length"
    engine.forget()
    assert engine.serve("without it", TOKENS).loads == []
    rig.gateway.start()
    engine.await_gateway()
    serve_again(engine, "stored anew where it was denied")
    assert serve_again(engine, "whole again") == [tuple(range(BLOCKS))]


def test_a_prompt_larger_than_the_staged_region_restores_what_fits(rig: Rig) -> None:
    shape = Shape(groups=HYBRID, blocks=64, blocks_per_chunk=2, dense=True)
    first = rig.launch(shape, extra={"xkv.staged_bytes": 8 * SLOT_BYTES})
    first.serve("cold", TOKENS)
    first.await_stores()
    restored = rig.relaunch(first, extra={"xkv.staged_bytes": 8 * SLOT_BYTES}).serve("restored", TOKENS)
    # Of eight slots, six are for the prefix and two for the window at its end.
    blocks = 12 if release.channel(shape) == "verified" else BLOCKS
    assert restored.loaded(0) == [tuple(range(blocks))]
    assert restored.loaded(1) == [tuple(range(blocks - 3, blocks))]


def test_many_equal_and_unequal_prompts_at_once_in_a_small_staged_region(rig: Rig) -> None:
    # Where hits are verified first they share the room in the ring in turns; elsewhere the load region does.
    shape = Shape(groups=HYBRID, blocks=160, blocks_per_chunk=2)
    first = rig.launch(shape, extra={"xkv.ring_bytes": 32 << 20})
    prompts = [prompt(tokens=16 * BLOCKS + 3, seed=seed) for seed in (1, 2, 3)]
    for number, tokens in enumerate(prompts):
        first.serve(f"cold {number}", tokens)
        first.await_stores()
    engine = rig.relaunch(first)
    requests = [engine.submit(f"r{number}", prompts[number % 3], output_tokens=2) for number in range(9)]
    engine.run()
    assert {request.finish_reason for request in requests} == {"length"}
    assert all(request.loads or request.computed_tokens < 60 for request in requests), "loaded, or reused"
