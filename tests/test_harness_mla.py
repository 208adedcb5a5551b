"""MLA through the release's real scheduler and connector: two releases cannot run it on a CPU.

Each case stores, starts anew with poisoned memory, and restores; the harness compares every byte of every rank in
every step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from harness.shapes import Shape, mla
from harness.story import prompt
from xkv_offload.metrics import PROCESS_COUNTERS

if TYPE_CHECKING:
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)


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
    assert restored.loaded() == [tuple(range(chunks * blocks_per_chunk))]
    assert restored.computed_tokens == len(tokens) + 2 - chunks * blocks_per_chunk * 16


def test_several_groups_are_restored(rig: Rig) -> None:
    # As with a sparse indexer: two kinds of latent, of different sizes, in groups of different length.
    groups = (mla(layers=2), mla(layers=1, prefix="indexer", latent=128))
    shape = Shape(groups=groups, blocks=64, blocks_per_chunk=2)
    tokens = prompt(tokens=16 * 12 + 9, seed=2)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    status = rig.gateway.await_objects(12)
    assert status["object_bytes"] == 6 * (shape.chunk_bytes(0) + shape.chunk_bytes(1))

    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=4)
    assert restored.loaded(0) == restored.loaded(1) == [tuple(range(12))]


def test_pages_across_slots_are_restored(small_slots_rig: Rig) -> None:
    # A page is 36,864 bytes and a fragment 7,168: neither pages nor chunks begin where fragments do.
    shape = Shape(groups=(mla(layers=2),), blocks=32, blocks_per_chunk=3)
    tokens = prompt(tokens=16 * 11, seed=3)
    first = small_slots_rig.launch(shape)
    first.serve("cold", tokens)
    small_slots_rig.gateway.await_objects(3)
    second = small_slots_rig.relaunch(first)
    assert second.serve("restored", tokens).loaded() == [tuple(range(9))]


def test_a_load_can_begin_inside_a_chunk(small_slots_rig: Rig) -> None:
    # Only part of the first object is asked for, and must land in the right blocks, with the engine's own left alone.
    shape = Shape(groups=(mla(layers=2),), blocks=48, blocks_per_chunk=4)
    tokens = prompt(tokens=16 * 10 + 3, seed=4)
    first = small_slots_rig.launch(shape)
    first.serve("cold", tokens)
    small_slots_rig.gateway.await_objects(2)

    second = small_slots_rig.relaunch(first)
    head = second.serve("head", prompt(tokens=16 * 3 + 2, seed=5, after=tokens[: 16 * 3]))
    assert head.loads == []
    rest = second.serve("rest", tokens)
    assert rest.loaded() == [tuple(range(3, 8))]


def test_a_hit_on_the_whole_prompt_computes_its_last_token_alone(rig: Rig) -> None:
    # The engine then writes into a block that a load has just filled.
    shape = Shape(groups=(mla(layers=2),), blocks=48, blocks_per_chunk=4)
    tokens = prompt(tokens=16 * 8, seed=6)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    rig.gateway.await_objects(2)
    second = rig.relaunch(first)
    restored = second.serve("restored", tokens)
    assert (restored.loaded(), restored.computed_tokens) == ([tuple(range(8))], 1)


@pytest.mark.parametrize("layout", ["auto", "replicated", "per_rank"])
def test_two_ranks_share_one_copy_where_pages_are_identical(rig: Rig, layout: str) -> None:
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2, ranks=2)
    tokens = prompt(tokens=16 * 21 + 1, seed=7)
    copies = 2 if layout == "per_rank" else 1
    extra = {"xkv.tp_layout": layout}
    put = PROCESS_COUNTERS["store_objects"]
    first = rig.launch(shape, extra=extra)
    first.serve("cold", tokens)
    status = rig.gateway.await_objects(10 * copies)
    assert PROCESS_COUNTERS["store_objects"] - put == 10 * copies, "one rank alone puts what is the same on both"
    assert status["object_bytes"] == 10 * shape.chunk_bytes(0) * copies

    second = rig.relaunch(first, extra=extra)
    restored = second.serve("restored", tokens, output_tokens=3)
    assert restored.loaded() == [tuple(range(20))]
    assert rig.gateway.status()["counters"]["reads"] == 10 * copies, "what both ranks restore is read once"


def test_ranks_need_not_keep_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second rank copies so late that the first has long reported: it reads by itself, and nothing times out.
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2, ranks=2)
    tokens = prompt(tokens=16 * 20 + 1, seed=8)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    rig.gateway.await_objects(10)

    second = rig.relaunch(first)
    mover = second.ranks[1].worker.context.mover
    scatter = mover.scatter

    def late(move: Any) -> None:
        time.sleep(0.05)
        scatter(move)

    monkeypatch.setattr(mover, "scatter", late)
    restored = second.submit("restored", tokens, output_tokens=2)
    second.run(lambda: not second.ranks[0].loads and bool(restored.loads))
    assert second.ranks[1].loads, "both ranks were done at once"
    assert restored.computed_tokens == 0
    second.run()
    assert (restored.finish_reason, restored.loaded()) == ("length", [tuple(range(20))])
