"""Where pages lie: groups on the same memory, and all pages of a block side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt

if TYPE_CHECKING:
    from harness.rig import Rig
    from harness.shapes import Group

pytest_plugins = ("harness.fixtures",)

GROUPS: dict[str, tuple[Group, ...]] = {
    "one group": (full(layers=3, padding_bytes=256),),
    "two groups": (full(), sliding(window=32, layers=3, padding_bytes=512)),
    "three groups": (full(layers=1), sliding(window=32, layers=2), sliding(window=64, layers=1, prefix="wide")),
}


def test_three_groups_of_unequal_length_on_the_same_memory(rig: Rig) -> None:
    # A tensor then belongs to all groups, to two of them, or to one; a block to whichever group has it.
    groups = (full(layers=1), sliding(window=32, layers=3), sliding(window=64, layers=2, prefix="wide"))
    shape = Shape(groups=groups, blocks=64, blocks_per_chunk=2, shared=True)
    first = rig.launch(shape)
    tensors = [[page.tensor for page in layout.pages] for layout in first.ranks[0].worker.context.layouts]
    assert tensors == [[0], [0, 1, 2], [0, 1]]
    tokens = prompt(tokens=16 * 10 + 3, seed=1)
    first.serve("cold", tokens)
    first.await_stores()
    restored = rig.relaunch(first).serve("restored", tokens, output_tokens=20)
    assert restored.loaded(0) == [tuple(range(10))]
    assert restored.loaded(1) == [(8, 9)]
    assert restored.loaded(2) == [(6, 7, 8, 9)]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_packed_pages_are_restored(rig: Rig, blocks_per_chunk: int, groups: str) -> None:
    # vLLM moves a block's whole row, whichever group the block belongs to.
    shape = Shape(groups=GROUPS[groups], blocks=48, blocks_per_chunk=blocks_per_chunk, packed=True)
    first = rig.launch(shape)
    layouts = first.ranks[0].worker.context.layouts
    assert [layout.block_bytes for layout in layouts] == [shape.packed_bytes] * len(shape.groups)
    tokens = prompt(tokens=16 * 8 + 3, seed=2)
    first.serve("cold", tokens)
    first.await_stores()
    status = rig.gateway.status()
    assert status["object_bytes"] == status["objects"] * shape.chunk_bytes(0)
    restored = rig.relaunch(first).serve("restored", tokens, output_tokens=20)
    assert restored.loaded(0) == [tuple(range(8))]


def test_packed_groups_on_the_same_memory_are_restored(rig: Rig) -> None:
    groups = (full(layers=2), sliding(window=32, layers=2))
    shape = Shape(groups=groups, blocks=48, blocks_per_chunk=2, packed=True, shared=True, ranks=2)
    tokens = prompt(tokens=16 * 8 + 3, seed=3)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    first.await_stores()
    restored = rig.relaunch(first).serve("restored", tokens, output_tokens=20)
    assert (restored.loaded(0), restored.loaded(1)) == ([tuple(range(8))], [(6, 7)])


def test_packed_latents_have_one_object_for_all_ranks(rig: Rig) -> None:
    groups = (mla(layers=2), mla(layers=1, prefix="indexer", latent=128))
    shape = Shape(groups=groups, blocks=48, blocks_per_chunk=2, packed=True, ranks=2)
    tokens = prompt(tokens=16 * 8 + 3, seed=4)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    rig.gateway.await_objects(2 * 4)
    restored = rig.relaunch(first).serve("restored", tokens, output_tokens=2)
    assert restored.loaded(0) == restored.loaded(1) == [tuple(range(8))]
