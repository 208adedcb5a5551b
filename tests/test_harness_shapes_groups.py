"""Groups that are no part of a prefix: kept from the connector, so that a group's number is not its position."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from harness import release
from harness.shapes import Shape, full, ring, sliding
from harness.story import prompt
from xkv_compat.features import detect_live
from xkv_compat.vllm_symbols import offloading_config_view

if TYPE_CHECKING:
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_groups_after_one_that_is_left_out(rig: Rig, blocks_per_chunk: int) -> None:
    groups = (ring(), full(layers=1), sliding(window=48, layers=2))
    shape = Shape(groups=groups, blocks=64, blocks_per_chunk=blocks_per_chunk)
    if not release.has_rings():
        with pytest.raises(AttributeError, match="CircularBufferSpec"):
            rig.launch(shape)
        return
    if release.offloaded_groups(shape) != (1, 2):
        with pytest.raises(AssertionError) as raised:
            rig.launch(shape)
        assert raised.traceback[-1].name == "get_sliding_window_size_in_chunks"
        return
    tokens = prompt(tokens=200, seed=1)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    first.await_stores()
    keys = [key for step in first.steps for job in step.store_jobs.values() for key in release.sides(job)[1].keys]
    assert {int.from_bytes(key[-4:], "big") for key in keys} == {1, 2}
    assert first.ranks[0].worker.context.positions == {1: 0, 2: 1}
    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=20)
    assert [restored.loaded(group) for group in (0, 1, 2)] == [[()], [tuple(range(12))], [(9, 10, 11)]]


def test_the_numbers_that_a_release_gives_are_taken(rig: Rig) -> None:
    engine = rig.launch(Shape(groups=(full(layers=1), sliding(window=48, layers=1)), blocks=16))
    spec = engine.ranks[0].connector.connector_worker.spec
    assert [group.group_id for group in spec._view.groups] == [0, 1]
    if detect_live()["group_ids"]:
        moved = dataclasses.replace(
            spec.config,
            groups=tuple(dataclasses.replace(one, group_id=one.group_id + 3) for one in spec.config.groups),
        )
        assert [group.group_id for group in offloading_config_view((moved,), {}).groups] == [3, 4]
