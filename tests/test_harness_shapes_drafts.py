"""A draft model's layers (EAGLE, MTP): the last row of what is computed may change, so its chunk is not relied on.

A draft's row depends on the next token, too; a load that brought a chunk with another continuation would be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import release
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


def test_a_drafts_last_chunk_is_stored_and_not_loaded(rig: Rig) -> None:
    shape = Shape(groups=(full(), sliding(window=512, is_draft=True)), blocks=64, speculative=True)
    tokens = prompt(tokens=64, seed=1)
    first = rig.launch(shape)
    first.serve("cold", tokens, output_tokens=40)
    assert stores(first) == [([4, 4], [0, 0])]
    rig.gateway.await_objects(8)

    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=20)
    assert (restored.loaded(0), restored.loaded(1)) == ([(0, 1, 2)], [(0, 1, 2)])
    second.forget()
    parted = second.serve("parted at the last chunk's end", prompt(tokens=100, seed=2, after=tokens), output_tokens=2)
    assert (parted.loaded(0), parted.loaded(1)) == ([(0, 1, 2)], [(0, 1, 2)])


def test_a_draft_of_two_blocks_a_chunk(rig: Rig) -> None:
    groups = (full(layers=1), sliding(window=64, layers=1, is_draft=True))
    shape = Shape(groups=groups, blocks=64, blocks_per_chunk=2, speculative=True, shared=True, dense=True)
    tokens = prompt(tokens=200, seed=3)
    first = rig.launch(shape, batch_tokens=48)
    first.serve("cold", tokens, output_tokens=4)
    first.await_stores()
    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=20)
    assert (restored.loaded(0), restored.loaded(1)) == ([tuple(range(10))], [(6, 7, 8, 9)])


UNFLAGGED: dict[str, tuple[tuple[Group, ...], list[list[tuple[int, ...]]]]] = {
    "full attention": ((full(),), [[tuple(range(11))]]),
    "a window": ((full(), sliding(window=32)), [[tuple(range(11))], [(9, 10)]]),
    "states": ((full(padding_bytes=512), mamba()), [[], []]),
}


@pytest.mark.parametrize("case", UNFLAGGED)
def test_a_draft_that_no_group_is_named_for(rig: Rig, case: str) -> None:
    # Older releases then take every group for a draft's: one chunk less is hit, and with states none at all, since
    # two of them one after the other would be needed and only one in many is kept.
    groups, older = UNFLAGGED[case]
    shape = Shape(groups=groups, blocks=64, speculative=True, shared=len(groups) > 1)
    tokens = prompt(tokens=200, seed=4)
    first = rig.launch(shape)
    first.serve("cold", tokens, output_tokens=4)
    first.await_stores()
    assert rig.gateway.status()["objects"] >= 12
    restored = rig.relaunch(first).serve("restored", tokens, output_tokens=20)
    loaded = [restored.loaded(group) for group in range(len(groups))]
    if detect_live()["group_ids"]:
        assert loaded[0][0] >= tuple(range(11))
    else:
        assert loaded == older
