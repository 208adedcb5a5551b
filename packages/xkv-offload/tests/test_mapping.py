"""Mapping of blocks to chunks: the examples of vLLM's behaviour, and the formula against a direct count."""

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xkv_offload.mapping import ChunkPart, MappingError, plan_load, plan_store


def test_a_whole_store_of_three_chunks() -> None:
    plan = plan_store(
        key_groups=[0, 0, 0],
        block_ids=range(1, 10),
        group_sizes=[9],
        block_indices=[0],
        blocks_per_chunk=3,
        lone_last_block=[False],
    )
    assert [part.blocks for part in plan.parts] == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    assert not plan.left_out


def test_a_load_after_two_blocks_that_the_engine_has() -> None:
    parts = plan_load(
        key_groups=[0, 0, 0], block_ids=range(13, 20), group_sizes=[7], block_indices=[2], blocks_per_chunk=3
    )
    assert parts[0] == ChunkPart(key=0, group=0, first=2, blocks=(13,))
    assert parts[2] == ChunkPart(key=2, group=0, first=0, blocks=(17, 18, 19))


def test_a_sliding_window_load_begins_inside_a_chunk() -> None:
    parts = plan_load(
        key_groups=[0] * 6 + [1] * 2,
        block_ids=range(1, 16),
        group_sizes=[12, 3],
        block_indices=[0, 9],
        blocks_per_chunk=2,
    )
    assert parts[6] == ChunkPart(key=6, group=1, first=1, blocks=(13,))
    assert parts[7] == ChunkPart(key=7, group=1, first=0, blocks=(14, 15))


def test_a_load_that_ends_inside_a_chunk() -> None:
    parts = plan_load(key_groups=[0, 0], block_ids=[5, 6, 7], group_sizes=[3], block_indices=[4], blocks_per_chunk=2)
    assert [(part.first, part.blocks) for part in parts] == [(0, (5, 6)), (0, (7,))]


def test_a_headless_first_chunk_is_left_out_and_the_rest_is_kept() -> None:
    plan = plan_store(
        key_groups=[1, 1, 1],
        block_ids=[4, 5, 6, 7, 8],
        group_sizes=[0, 5],
        block_indices=[0, 9],
        blocks_per_chunk=2,
        lone_last_block=[False, False],
    )
    assert plan.left_out == (0,)
    assert [part.blocks for part in plan.parts] == [(5, 6), (7, 8)]


def test_a_hole_that_cannot_be_placed_stores_nothing_of_its_group() -> None:
    plan = plan_store(
        key_groups=[0, 0, 1, 1],
        block_ids=[1, 2, 3, 4, 5, 6, 7],
        group_sizes=[4, 3],
        block_indices=[0, 0],
        blocks_per_chunk=2,
        lone_last_block=[False, False],
    )
    assert plan.left_out == (2, 3)
    assert [part.group for part in plan.parts] == [0, 0]


def test_mambas_lone_last_block_is_whole_by_design_and_only_there() -> None:
    given_: dict[str, Any] = {
        "key_groups": [1],
        "block_ids": [9],
        "group_sizes": [0, 1],
        "block_indices": [0, 7],
        "blocks_per_chunk": 4,
    }
    plan = plan_store(**given_, lone_last_block=[False, True])
    assert plan.parts == (ChunkPart(key=0, group=1, first=3, blocks=(9,)),)
    assert plan_store(**given_, lone_last_block=[False, False]).left_out == (0,)


@pytest.mark.parametrize(
    ("blocks", "index"),
    [([9], 7), ([8, 9], 6), ([6, 9], 4), ([6, 7, 9], 4), ([5, 9], 1)],
    ids=["alone", "with the one before", "hole inside", "hole before the last", "one of the chunk before"],
)
def test_mambas_last_block_is_certain_whatever_is_missing(blocks: list[int], index: int) -> None:
    # Releases that store states from the block table offer a chunk with whichever states were kept.
    keys = 2 if index < 4 else 1
    plan = plan_store(
        key_groups=[0] * keys,
        block_ids=blocks,
        group_sizes=[len(blocks)],
        block_indices=[index],
        blocks_per_chunk=4,
        lone_last_block=[True],
    )
    assert plan.parts == (ChunkPart(key=keys - 1, group=0, first=3, blocks=(9,)),)
    assert plan.left_out == tuple(range(keys - 1))


def test_more_blocks_than_keys_have_room_for_store_nothing() -> None:
    plan = plan_store(
        key_groups=[0],
        block_ids=[1, 2, 3],
        group_sizes=[3],
        block_indices=[0],
        blocks_per_chunk=2,
        lone_last_block=[True],
    )
    assert (plan.parts, plan.left_out) == ((), (0,))


def test_a_headless_first_chunk_of_states_is_its_last_block() -> None:
    plan = plan_store(
        key_groups=[0, 0],
        block_ids=[3, 4, 5, 6, 7],
        group_sizes=[5],
        block_indices=[1],
        blocks_per_chunk=3,
        lone_last_block=[True],
    )
    assert [(part.first, part.blocks) for part in plan.parts] == [(2, (4,)), (0, (5, 6, 7))]
    assert not plan.left_out


@pytest.mark.parametrize(
    "change",
    [
        {"key_groups": [0, 0]},
        {"key_groups": [0, 0, 0, 0]},
        {"key_groups": [0, 0, 1]},
        {"group_sizes": [8]},
        {"block_indices": [0, 0]},
        {"block_ids": [0, *range(2, 10)]},
    ],
)
def test_a_load_that_contradicts_itself_is_refused(change: dict[str, list[int]]) -> None:
    good: dict[str, list[int]] = {
        "key_groups": [0, 0, 0],
        "block_ids": list(range(1, 10)),
        "group_sizes": [9],
        "block_indices": [0],
    }
    with pytest.raises(MappingError):
        plan_load(**(good | change), blocks_per_chunk=3)


def test_null_blocks_are_never_stored() -> None:
    plan = plan_store(
        key_groups=[0, 0],
        block_ids=[1, 0],
        group_sizes=[2],
        block_indices=[0],
        blocks_per_chunk=1,
        lone_last_block=[False],
    )
    assert plan.left_out == (0, 1)


@given(
    bpc=st.integers(1, 7),
    groups=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=4),
)
def test_every_block_of_a_load_goes_where_counting_says(bpc: int, groups: list[tuple[int, int]]) -> None:
    """Block j of a group is block index+j of the request: chunk and sub-block follow from that alone."""
    sizes = [size for size, _ in groups]
    indices = [index if size else 0 for size, index in groups]
    keys: list[tuple[int, int]] = []
    wanted: dict[int, tuple[int, int, int]] = {}
    block = 0
    for group, (size, index) in enumerate(zip(sizes, indices, strict=True)):
        places = [(index + j) for j in range(size)]
        keys += [(group, chunk) for chunk, _ in groupby(place // bpc for place in places)]
        for place in places:
            block += 1
            wanted[block] = (group, place // bpc, place % bpc)
    parts = plan_load(
        key_groups=[group for group, _ in keys],
        block_ids=range(1, block + 1),
        group_sizes=sizes,
        block_indices=indices,
        blocks_per_chunk=bpc,
    )
    got = {
        block: (part.group, keys[part.key][1], part.first + at)
        for part in parts
        for at, block in enumerate(part.blocks)
    }
    assert got == wanted
