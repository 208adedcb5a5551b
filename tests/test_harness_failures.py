"""Loads that fail: the request is computed anew with the right bytes, and what failed is not hit again.

Where a release has no way to hear of a failed load, the engine must end rather than serve what is in the pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness.offered import offered
from harness.shapes import Shape, full, mla, sliding
from harness.story import Story, prompt
from xkv_compat.features import detect_live
from xkv_offload.failures import LoadFailedError

if TYPE_CHECKING:
    from harness.engine import Engine, Step
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

BLOCKS = 20
TOKENS = prompt(tokens=16 * BLOCKS + 3, seed=1)


def stored(rig: Rig, shape: Shape, *, policy: str = "recompute") -> Engine:
    """An engine in its second launch, with the prompt on the card."""
    first = rig.launch(shape)
    first.serve("cold", TOKENS)
    objects = sum(map(len, offered(shape, len(TOKENS))))
    rig.gateway.await_objects(objects * (1 if shape.identical_ranks else shape.ranks))
    return rig.relaunch(first, policy=policy)


def damage(rig: Rig, shape: Shape, block: int, *, rank: int = 0) -> None:
    """Change a byte of what the card holds of one block's second layer."""
    group = shape.groups[0]
    layer = group.layers[1]
    first = block * group.block_tokens
    content = Story(TOKENS).rows(
        layer=layer, rank=rank, start=first, end=first + group.block_tokens, row_bytes=group.row_bytes
    )
    # Within one slot's payload, wherever the object's fragments are cut.
    pieces = [content.reshape(-1)[at : at + 4096] for at in range(0, content.size, 4096)]
    assert sum(rig.gateway.damage(piece) for piece in pieces[:1]) == 1


def is_told(shape: Shape) -> bool:
    """Whether this release hears of a failed load with several ranks (aborts are safe there)."""
    return shape.ranks == 1 or detect_live()["abort_safe"]


def serve_again(engine: Engine, name: str) -> list[tuple[int, ...]]:
    engine.await_stores()
    engine.forget()
    request = engine.serve(name, TOKENS, output_tokens=2)
    assert request.finish_reason == "length"
    return request.loaded()


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_corrupt_object_is_computed_anew_and_stored_again(rig: Rig, blocks_per_chunk: int) -> None:
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=blocks_per_chunk)
    engine = stored(rig, shape)
    damage(rig, shape, block=11)
    request = engine.serve("hit by it", TOKENS, output_tokens=2)
    assert request.finish_reason == "length"
    assert request.loaded() == [tuple(range(BLOCKS))]
    before = 11 // blocks_per_chunk * blocks_per_chunk
    assert request.computed_tokens == len(TOKENS) + 1 - before * 16, "the prefix before it is kept"
    rig.gateway.await_objects(BLOCKS // blocks_per_chunk - 1)
    assert serve_again(engine, "misses it") == [tuple(range(before))]
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
    if not is_told(shape):
        with pytest.raises(LoadFailedError, match="several ranks"):
            engine.serve("hit by it", TOKENS)
        return
    request = engine.serve("hit by it", TOKENS, output_tokens=2)
    assert request.finish_reason == "length"
    assert request.computed_tokens == len(TOKENS) + 1 - 10 * 16
    assert serve_again(engine, "misses it") == [tuple(range(10))]


def test_a_load_that_fails_on_one_of_two_ranks(rig: Rig) -> None:
    # Objects of their own: the other rank's load succeeds, and both must compute anew.
    shape = Shape(groups=(full(),), blocks=64, blocks_per_chunk=2, ranks=2)
    engine = stored(rig, shape)
    damage(rig, shape, block=11, rank=1)
    if not is_told(shape):
        with pytest.raises(LoadFailedError, match="several ranks"):
            engine.serve("hit by it", TOKENS)
        return
    request = engine.serve("hit by it", TOKENS, output_tokens=2)
    assert [sorted(rank.failed_blocks) for rank in engine.ranks] == [[], [11, 12]]
    assert request.computed_tokens == len(TOKENS) + 1 - 10 * 16
    assert serve_again(engine, "misses it") == [tuple(range(10))]
    assert serve_again(engine, "whole again") == [tuple(range(BLOCKS))]


def test_a_failed_load_with_several_groups_ends_the_engine(rig: Rig) -> None:
    # No release of these can be told; wrong pages must not be served either.
    shape = Shape(groups=(full(), sliding(window=48)), blocks=64, blocks_per_chunk=2)
    engine = stored(rig, shape)
    damage(rig, shape, block=3)
    with pytest.raises(LoadFailedError, match="2"):
        engine.serve("hit by it", TOKENS)
