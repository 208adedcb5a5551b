"""MLA through the release's real scheduler and connector, which cannot be run on a CPU on every release."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from harness import release
from harness.rig import Rig
from harness.shapes import Shape, mla
from harness.story import prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    release.names()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with closing(Rig(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 16])
def test_one_group_is_restored_after_a_restart(rig: Rig, blocks_per_chunk: int) -> None:
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=blocks_per_chunk)
    tokens = prompt(tokens=16 * 37 + 5, seed=1)
    chunks = 37 // blocks_per_chunk

    first = rig.launch(shape)
    cold = first.serve("cold", tokens, output_tokens=3)
    assert (cold.loads, cold.finish_reason) == ([], "length")
    status = rig.gateway.await_objects(chunks)
    assert status["object_bytes"] == chunks * shape.chunk_bytes(0)

    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=3)
    assert restored.loaded_blocks == [tuple(range(chunks * blocks_per_chunk))]
    assert restored.computed_tokens == len(tokens) + 2 - chunks * blocks_per_chunk * 16
