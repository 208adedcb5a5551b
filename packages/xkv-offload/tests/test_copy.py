"""Gather and scatter in host memory: every byte arrives, nothing else changes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_offload.copy import HostMover, Move
from xkv_offload.layout import ObjectLayout, Page, fragment_range
from xkv_offload.mapping import ChunkPart
from xkv_store.geometry import HEADER_BYTES

POISON = 0xA5
BLOCKS = 9


@settings(deadline=None, max_examples=60)
@given(
    pages=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    bpc=st.integers(1, 4),
    fragment=st.integers(16, 900),
    padding=st.integers(0, 40),
    data=st.data(),
)
def test_a_part_of_a_chunk_comes_back_and_nothing_else_changes(
    pages: list[int], bpc: int, fragment: int, padding: int, data: st.DataObject
) -> None:
    """A whole chunk is gathered; a part of it is scattered into other blocks of poisoned tensors."""
    layout = ObjectLayout(bpc, tuple(Page(number, size) for number, size in enumerate(pages)))
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    source = [random.integers(0, 256, (BLOCKS, size + padding), dtype=np.uint8) for size in pages]
    blocks = tuple(random.permutation(BLOCKS)[:bpc].tolist())
    count = len(fragment_range(first_byte=0, length=layout.chunk_bytes, fragment_bytes=fragment))
    slots = np.full((count, HEADER_BYTES + fragment), POISON, np.uint8)
    whole = ChunkPart(0, 0, 0, blocks)
    HostMover(source).gather(Move(whole, layout, list(slots), 0, 0))
    assert (slots[:, :HEADER_BYTES] == POISON).all()

    first = data.draw(st.integers(0, bpc - 1))
    length = data.draw(st.integers(1, bpc - first))
    needed = fragment_range(
        first_byte=first * layout.block_bytes, length=length * layout.block_bytes, fragment_bytes=fragment
    )
    into = tuple(random.permutation(BLOCKS)[:length].tolist())
    target = [np.full_like(tensor, POISON) for tensor in source]
    HostMover(target).scatter(
        Move(ChunkPart(0, 0, first, into), layout, list(slots[needed.start : needed.stop]), needed.start, 0)
    )
    for tensor, (before, size) in zip(target, zip(source, pages, strict=True), strict=True):
        expected = np.full_like(before, POISON)
        for at, block in enumerate(into):
            expected[block, :size] = before[blocks[first + at], :size]
        assert (tensor == expected).all()


def test_a_lone_last_block_begins_the_objects_bytes() -> None:
    layout = ObjectLayout(4, (Page(0, 64),))
    source = np.arange(BLOCKS * 64, dtype=np.uint8).reshape(BLOCKS, 64)
    slots = np.zeros((1, HEADER_BYTES + 3072), np.uint8)
    part = ChunkPart(0, 0, 3, (5,))
    HostMover([source]).gather(Move(part, layout, list(slots), 0, 3))
    assert (slots[0, HEADER_BYTES : HEADER_BYTES + 64] == source[5]).all()
    target = np.zeros_like(source)
    HostMover([target]).scatter(Move(ChunkPart(0, 0, 3, (2,)), layout, list(slots), 0, 3))
    assert (target[2] == source[5]).all()
