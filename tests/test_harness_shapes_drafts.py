"""A draft model's layers (EAGLE, MTP): the last row of what is computed may change, so its chunk is not relied on.

A draft's row depends on the next token, too; a load that brought a chunk with another continuation would be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import release
from harness.refusals import refused
from harness.shapes import Shape, full, mamba, sliding
from harness.story import prompt
from xkv_compat.features import detect_live

if TYPE_CHECKING:
    from harness.engine import Engine
    from harness.rig import Rig
    from harness.shapes import Group

pytest_plugins = ("harness.fixtures",)


def stores(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Group sizes and indices of an engine's store jobs."""
    pages = [release.sides(job)[0] for step in engine.steps for job in step.store_jobs.values()]
    return [([int(size) for size in one.group_sizes], [int(index) for index in one.block_indices]) for one in pages]


def stores_last_chunks() -> bool:
    """Whether a draft's last chunk is stored; the oldest releases leave out the last of each step, for good."""
    return detect_live()["normalized_config"]


def test_a_drafts_last_chunk_is_stored_and_not_loaded(rig: Rig) -> None:
    shape = Shape(groups=(full(), sliding(window=512, is_draft=True)), blocks=64, speculative=True)
    tokens = prompt(tokens=64, seed=1)
    first = rig.launch(shape)
    first.serve("cold", tokens, output_tokens=40)
    stored = 4 if stores_last_chunks() else 3
    assert stores(first) == [([4, stored], [0, 0])]
    rig.gateway.await_objects(4 + stored)

    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=20)
    assert restored.loaded(0) == restored.loaded(1) == [tuple(range(stored - 1))]
    second.forget()
    parted = second.serve("parted at the last chunk's end", prompt(tokens=100, seed=2, after=tokens), output_tokens=2)
    assert parted.loaded(0) == parted.loaded(1) == [tuple(range(stored - 1))]


def test_a_draft_of_two_blocks_a_chunk(rig: Rig) -> None:
    groups = (full(layers=1), sliding(window=64, layers=1, is_draft=True))
    shape = Shape(groups=groups, blocks=64, blocks_per_chunk=2, speculative=True, shared=True, dense=True)
    tokens = prompt(tokens=200, seed=3)
    first = rig.launch(shape, batch_tokens=48)
    first.serve("cold", tokens, output_tokens=4)
    first.await_stores()
    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=20)
    whole = ([tuple(range(10))], [(6, 7, 8, 9)])
    assert (restored.loaded(0), restored.loaded(1)) == (whole if stores_last_chunks() else ([], []))


UNFLAGGED: dict[str, tuple[Group, ...]] = {
    "full attention": (full(),),
    "a window": (full(), sliding(window=32)),
    "states": (full(padding_bytes=512), mamba()),
}


@pytest.mark.parametrize("case", UNFLAGGED)
def test_a_draft_that_no_group_is_named_for(rig: Rig, case: str) -> None:
    # Older releases then take every group for a draft's: one chunk less is hit, and with states none at all, since
    # two of them one after the other would be needed and only one in many is kept.
    groups = UNFLAGGED[case]
    shape = Shape(groups=groups, blocks=64, speculative=True, shared=len(groups) > 1)
    if refused(rig, shape):
        return
    tokens = prompt(tokens=200, seed=4)
    first = rig.launch(shape)
    first.serve("cold", tokens, output_tokens=4)
    first.await_stores()
    assert rig.gateway.status()["objects"] >= 10
    restored = rig.relaunch(first).serve("restored", tokens, output_tokens=20)
    loaded = [restored.loaded(group) for group in range(len(groups))]
    if detect_live()["group_ids"]:
        # All of them; with states, those of the block before the last, since the engine itself drops a draft's last.
        hit = 11 if case == "states" else 12
    else:
        hit = 0 if case == "states" else 11 if stores_last_chunks() else 10
    last = {"a window": tuple(range(hit - 2, hit)), "states": (hit - 1,)}
    wanted = [tuple(range(hit)), *([last[case]] if case in last else [])]
    assert loaded == ([[blocks] for blocks in wanted] if hit else [[] for _ in wanted])


def test_a_draft_beside_states_and_their_tails(rig: Rig) -> None:
    # The newest releases look for a tail in the block after the chunk that a draft gives up as well.
    groups = (full(padding_bytes=512, is_draft=True), mamba())
    shape = Shape(groups=groups, blocks=64, speculative=True, shared=True, hash_tokens=4)
    if refused(rig, shape):
        return
    tokens = prompt(tokens=206, seed=6)
    first = rig.launch(shape)
    first.serve("cold", tokens, output_tokens=3)
    first.await_stores()
    second = rig.relaunch(first)
    for name, more in (("restored", tokens), ("longer", prompt(tokens=246, seed=7, after=tokens))):
        second.forget()
        request = second.serve(name, more, output_tokens=20)
        assert request.finish_reason == "length"
        assert [blocks[-1:] for blocks in request.loaded(0)] == request.loaded(1), "the state after the rows, alone"
