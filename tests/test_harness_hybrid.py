"""Full attention and a sliding window in one engine: two groups, null blocks, chunks that are not whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness.offered import offered
from harness.shapes import Shape, full, sliding
from harness.story import prompt
from xkv_compat.features import detect_live
from xkv_offload.metrics import PROCESS_COUNTERS

if TYPE_CHECKING:
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "overlaid"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_window_is_restored_with_the_prefix(rig: Rig, blocks_per_chunk: int, shared: bool) -> None:
    # The window reaches back into the last three blocks; with two blocks a chunk its load begins inside one.
    groups = (full(padding_bytes=512), sliding(window=48, padding_bytes=512))
    shape = Shape(groups=groups, blocks=64, blocks_per_chunk=blocks_per_chunk, shared=shared)
    tokens = prompt(tokens=200, seed=1)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    rig.gateway.await_objects(sum(map(len, offered(shape, 200))))

    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=20)
    assert restored.loaded(0) == [tuple(range(12))]
    assert restored.loaded(1) == [(9, 10, 11)]


def test_every_rank_has_objects_of_its_own(rig: Rig) -> None:
    shape = Shape(groups=(full(), sliding(window=32)), blocks=64, blocks_per_chunk=2, ranks=2, shared=True)
    tokens = prompt(tokens=16 * 8 + 1, seed=2)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    chunks = [len(group) for group in offered(shape, len(tokens))]
    status = rig.gateway.await_objects(2 * sum(chunks))
    assert status["object_bytes"] == 2 * sum(count * shape.chunk_bytes(group) for group, count in enumerate(chunks))
    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=2)
    assert restored.loaded(0) == [tuple(range(8))]


def test_a_load_can_end_inside_a_chunk(rig: Rig) -> None:
    # Blocks of 16 and 32 tokens, chunks of 32 and 64: where the prefix's last chunk is gone from the card, the hit
    # ends inside a chunk of the other group, whose object is loaded in part.
    shape = Shape(groups=(full(), sliding(window=32, block_tokens=32)), blocks=48, blocks_per_chunk=2)
    if not detect_live()["blocks_per_chunk_key"]:
        with pytest.raises(AssertionError, match="all groups must have the same block size"):
            rig.launch(shape)
        return
    tokens = prompt(tokens=128 + 1, seed=6)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    rig.gateway.await_objects(sum(map(len, offered(shape, 129))))
    (job,) = [job for step in first.steps for job in step.store_jobs.values()]
    gone = job.dst_spec.keys[3]

    second = rig.relaunch(first)
    lookup, miss = second.manager.lookup, second.manager._words.miss
    second.manager.lookup = lambda key, context: miss if key == gone else lookup(key, context)
    restored = second.serve("restored", tokens, output_tokens=2)
    assert restored.loaded(0) == [(0, 1, 2, 3, 4, 5)]
    assert restored.loaded(1) == [(2,)]


def test_a_chunk_with_a_hole_is_not_stored(rig: Rig) -> None:
    # The engine's own reuse leaves null blocks before the window: a chunk is then offered without its first block,
    # and stored as if it were whole it would be served to a request that needs both.
    shape = Shape(groups=(full(), sliding(window=48)), blocks=96, blocks_per_chunk=2)
    engine = rig.launch(shape)
    start = prompt(tokens=200, seed=3)
    engine.serve("first", start)
    engine.await_stores()
    before = rig.gateway.await_objects(sum(map(len, offered(shape, len(start)))))["objects"]
    engine.reset_connector()
    partial = PROCESS_COUNTERS["partial_chunks"]

    longer = prompt(tokens=232, seed=4, after=start)
    assert engine.serve("longer", longer).computed_tokens < 100
    engine.await_stores()
    is_offered = not detect_live()["window_store_mask"]  # no hit at this prompt's end needs what is before the hole
    assert PROCESS_COUNTERS["partial_chunks"] == partial + is_offered
    stored = rig.gateway.status()["objects"] - before
    assert stored == 7 + 2, "seven whole chunks of one group, two of the other"

    engine.forget()
    restored = engine.serve("restored", longer, output_tokens=2)
    assert restored.loaded(0) == [tuple(range(14))]
    assert restored.loaded(1) == [(11, 12, 13)]
    engine.forget()
    needs_the_hole = engine.serve("needs the hole", prompt(tokens=165, seed=5, after=longer[:160]), output_tokens=2)
    assert needs_the_hole.finish_reason == "length"
    assert 8 not in {index for load in needs_the_hole.loaded(1) for index in load}


def test_a_chunk_with_a_hole_that_a_hit_needs_half_of_is_not_stored(rig: Rig) -> None:
    # As above, but a hit at the prompt's end needs the other block of that chunk, so every release offers it.
    shape = Shape(groups=(full(), sliding(window=48)), blocks=96, blocks_per_chunk=2)
    engine = rig.launch(shape)
    start = prompt(tokens=200, seed=3)
    engine.serve("first", start)
    engine.await_stores()
    before = rig.gateway.await_objects(sum(map(len, offered(shape, len(start)))))["objects"]
    engine.reset_connector()
    partial = PROCESS_COUNTERS["partial_chunks"]

    longer = prompt(tokens=210, seed=4, after=start)
    assert engine.serve("longer", longer).computed_tokens < 100
    engine.await_stores()
    assert PROCESS_COUNTERS["partial_chunks"] == partial + 1
    assert rig.gateway.status()["objects"] - before == 6 + 1, "six whole chunks of one group, one of the other"

    engine.forget()
    assert engine.serve("nothing without the hole", longer, output_tokens=2).loads == []


def test_a_prompt_that_shares_a_part_of_a_stored_one(rig: Rig) -> None:
    # A release that offers only the window before a prompt's end has stored nothing of the window at the junction.
    shape = Shape(groups=(full(), sliding(window=48)), blocks=64, blocks_per_chunk=2)
    tokens = prompt(tokens=200, seed=1)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    rig.gateway.await_objects(sum(map(len, offered(shape, len(tokens)))))

    second = rig.relaunch(first)
    branch = second.serve("branch", prompt(tokens=150, seed=2, after=tokens[:100]), output_tokens=2)
    if detect_live()["window_store_mask"]:
        assert branch.loads == []
    else:
        assert (branch.loaded(0), branch.loaded(1)) == ([tuple(range(6))], [(3, 4, 5)])
