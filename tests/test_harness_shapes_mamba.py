"""Groups of recurrent states (Mamba): a chunk is one state, kept where the engine's steps end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import release
from harness.memory import PagesError
from harness.refusals import refused
from harness.shapes import Shape, full, mamba
from harness.story import prompt
from xkv_compat.features import detect_live
from xkv_offload import description

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.engine import Engine
    from harness.rig import Rig
    from harness.shapes import StateMode

pytest_plugins = ("harness.fixtures", "harness.slow_copies")

TOKENS = prompt(tokens=200, seed=1)


def hybrid(*, mode: StateMode = "align", blocks: int = 64, blocks_per_chunk: int = 1, ranks: int = 1) -> Shape:
    """Full attention and states on the same memory, as vLLM lays them."""
    groups = (full(padding_bytes=512), mamba(mode=mode))
    return Shape(
        groups=groups, blocks=blocks, blocks_per_chunk=blocks_per_chunk, ranks=ranks, shared=True, dense=mode == "all"
    )


def state_stores(engine: Engine) -> list[tuple[int, int, int]]:
    """Of each job with states: blocks of full attention, states, and the first state's index."""
    pages = [release.sides(job)[0] for step in engine.steps for job in step.store_jobs.values()]
    return [
        (int(one.group_sizes[0]), int(one.group_sizes[1]), int(one.block_indices[1]))
        for one in pages
        if one.group_sizes[1]
    ]


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_state_is_restored_with_the_prefix(rig: Rig, blocks_per_chunk: int) -> None:
    shape = hybrid(blocks_per_chunk=blocks_per_chunk)
    if refused(rig, shape):
        return
    first = rig.launch(shape)
    first.serve("cold", TOKENS)
    # Where states are handed over one by one, each is a job; the state after 192 tokens is block 11's.
    assert state_stores(first) == [(0 if release.hands_states_over() else 12, 1, 11)]
    status = rig.gateway.await_objects(12 // blocks_per_chunk + 1)
    assert status["object_bytes"] == 12 * shape.block_bytes(0) + shape.block_bytes(1), "a lone state is a whole chunk"

    second = rig.relaunch(first)
    restored = second.serve("restored", TOKENS, output_tokens=20)
    assert (restored.loaded(0), restored.loaded(1)) == ([tuple(range(12))], [(11,)])
    assert restored.computed_tokens == 200 - 192 + 19


@pytest.mark.parametrize(("blocks_per_chunk", "batch_tokens"), [(1, 64), (2, 16), (4, 32)])
def test_the_last_state_that_was_kept_is_restored(rig: Rig, blocks_per_chunk: int, batch_tokens: int) -> None:
    # Another prompt parts after 150 tokens; the last state before that is the one after 128. With small steps a
    # release that stores from the block table offers states that stand between others in one chunk.
    shape = hybrid(blocks_per_chunk=blocks_per_chunk)
    if refused(rig, shape):
        return
    first = rig.launch(shape, batch_tokens=batch_tokens)
    first.serve("cold", TOKENS)
    first.await_stores()
    rig.gateway.await_objects(12 // blocks_per_chunk + 12 // max(blocks_per_chunk, batch_tokens // 16))
    second = rig.relaunch(first)
    parted = second.serve("parted", prompt(tokens=190, seed=2, after=TOKENS[:150]), output_tokens=20)
    assert (parted.loaded(0), parted.loaded(1)) == ([tuple(range(8))], [(7,)])


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_states_of_every_block(rig: Rig, blocks_per_chunk: int) -> None:
    # In this mode every block of a step has its state: chunks are whole, and a load takes the last state of one.
    shape = hybrid(mode="all", blocks_per_chunk=blocks_per_chunk)
    if detect_live()["manager_lock"]:  # the releases that have given the mode up
        with pytest.raises(AssertionError, match="Mamba prefix caching requires mamba_cache_mode='align'"):
            rig.launch(shape)
        return
    if refused(rig, shape):
        return
    first = rig.launch(shape, batch_tokens=64)
    first.serve("cold", TOKENS)
    assert state_stores(first) == [(4, 4, index) for index in (0, 4, 8)]
    status = rig.gateway.await_objects(2 * 12 // blocks_per_chunk)
    assert status["object_bytes"] == 12 * (shape.block_bytes(0) + shape.block_bytes(1))
    second = rig.relaunch(first)
    parted = second.serve("parted", prompt(tokens=190, seed=2, after=TOKENS[:150]), output_tokens=20)
    last = 150 // 16 // blocks_per_chunk * blocks_per_chunk
    assert (parted.loaded(0), parted.loaded(1)) == ([tuple(range(last))], [(last - 1,)])


def test_one_state_for_a_whole_request_is_refused_by_vllm(rig: Rig) -> None:
    # Its block is as long as the longest request, and no hash is finer.
    groups = (full(padding_bytes=512), mamba(mode="none", block_tokens=release.MODEL_TOKENS_MAX))
    with pytest.raises(AssertionError, match=r"block(_size)?=16 not divisible by \w+=4096"):
        rig.launch(Shape(groups=groups, blocks=64, shared=True))


def test_states_alone(rig: Rig) -> None:
    first = rig.launch(Shape(groups=(mamba(),), blocks=32, blocks_per_chunk=2), batch_tokens=96)
    first.serve("cold", TOKENS)
    rig.gateway.await_objects(2)
    parted = rig.relaunch(first).serve("parted", prompt(tokens=190, seed=2, after=TOKENS[:150]), output_tokens=20)
    assert (parted.loaded(), parted.computed_tokens) == ([(5,)], 190 - 96 + 19)


def test_every_rank_has_states_of_its_own(rig: Rig) -> None:
    shape = hybrid(blocks_per_chunk=2, ranks=2)
    if refused(rig, shape):
        return
    first = rig.launch(shape, batch_tokens=128)
    first.serve("cold", TOKENS)
    rig.gateway.await_objects(2 * (6 + 2))
    restored = rig.relaunch(first).serve("restored", TOKENS, output_tokens=20)
    assert (restored.loaded(0), restored.loaded(1)) == ([tuple(range(12))], [(11,)])


def test_states_give_their_blocks_away_while_they_are_stored(rig: Rig, slow_copies: Callable[[float], None]) -> None:
    # A state's block is free two steps later, long before the request ends.
    shape = hybrid(blocks=20)
    if refused(rig, shape):
        return
    slow_copies(0.01)
    first = rig.launch(shape, batch_tokens=32)
    prompts = [prompt(tokens=16 * 8 + 1, seed=seed) for seed in (3, 4, 5)]
    for number, tokens in enumerate(prompts):
        first.submit(str(number), tokens)
    first.run()
    assert any(step.flushed for step in first.steps), "no store was under way when its block was wanted"
    first.await_stores()
    second = rig.relaunch(first)
    for number, tokens in enumerate(prompts):
        second.forget()
        again = second.serve(f"again {number}", tokens, output_tokens=2)
        assert (again.loaded(0), again.loaded(1)) == ([tuple(range(8))], [(7,)])


def test_rows_that_reach_further_than_the_last_state(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # The engine itself has rows up to token 144 and a state after 128, and nothing comes from the card. Where a
    # release begins at 144 all the same, it reads a state that nobody has: wrong with any connector, ours or not.
    # There our refusal is taken away, to show what it is for.
    shape = hybrid(blocks_per_chunk=4)
    if refused(rig, shape):
        monkeypatch.setattr(description, "check_states", lambda *_: None)
    engine = rig.launch(shape, batch_tokens=64)
    engine.serve("first", TOKENS)
    engine.submit("second", prompt(tokens=190, seed=2, after=TOKENS[:150]))
    if detect_live()["state_hits_agree"]:
        engine.run()
        assert engine.requests["second"].computed_tokens == 190 - 128
    else:
        with pytest.raises(PagesError, match="second reads its state after 144 tokens in group 1 from the null block"):
            engine.run()
        engine.abort("second")
