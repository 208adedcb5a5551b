"""A sliding window as the engine's only group, and groups whose blocks differ in size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import release
from harness.shapes import Shape, full, sliding
from harness.story import prompt
from xkv_compat.features import detect_live
from xkv_offload.failures import LoadFailedError

if TYPE_CHECKING:
    from harness.engine import Engine
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)


def group_keys(engine: Engine, group: int) -> list[bytes]:
    """The keys of one group in an engine's stores, in order."""
    keys = [key for step in engine.steps for job in step.store_jobs.values() for key in release.sides(job)[1].keys]
    return [key for key in keys if int.from_bytes(key[-4:], "big") == group]


def lose(engine: Engine, key: bytes) -> None:
    """Let the engine's lookups miss this key, as if the card had given its object up."""
    lookup, miss = engine.manager.lookup, engine.manager._words.miss
    engine.manager.lookup = lambda one, context: miss if one == key else lookup(one, context)


# 48 is whole blocks; 40 and 50 end inside one.
@pytest.mark.parametrize("window", [40, 48, 50])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_window_alone_is_restored(rig: Rig, blocks_per_chunk: int, window: int) -> None:
    shape = Shape(groups=(sliding(window=window),), blocks=64, blocks_per_chunk=blocks_per_chunk)
    tokens = prompt(tokens=200, seed=1)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    first.await_stores()

    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=20)
    assert restored.loaded() == [tuple(range((192 - window + 1) // 16, 12))]
    assert restored.computed_tokens == 200 - 192 + 19


# Group sizes in blocks of both loads: of the whole prefix, and where its last chunk is gone from the card, so that
# the hit ends inside a chunk of the group with the larger blocks.
UNEQUAL = {
    "16 and 32": (
        Shape(groups=(full(layers=1), sliding(window=40, layers=1, block_tokens=32)), blocks=64, dense=True),
        12,
        11,
    ),
    "16 and 32, two blocks a chunk": (
        Shape(
            groups=(full(layers=1), sliding(window=40, layers=1, block_tokens=32)),
            blocks=64,
            blocks_per_chunk=2,
            dense=True,
        ),
        12,
        10,
    ),
    "32 and 16, two blocks a chunk": (
        Shape(
            groups=(full(layers=1, block_tokens=32), sliding(window=40, layers=1)),
            blocks=64,
            blocks_per_chunk=2,
            dense=True,
        ),
        12,
        10,
    ),
    "64 and 256": (
        Shape(
            groups=(full(layers=1, block_tokens=64), sliding(window=128, layers=1, block_tokens=256)),
            blocks=24,
            dense=True,
        ),
        12,
        11,
    ),
    "256 and 64": (
        Shape(
            groups=(full(layers=1, block_tokens=256), sliding(window=128, layers=1, block_tokens=64)),
            blocks=24,
            dense=True,
        ),
        3,
        2,
    ),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_groups_with_unequal_blocks_are_restored(rig: Rig, case: str) -> None:
    shape, whole, shorter = UNEQUAL[case]
    full_, window = shape.groups
    if shape.blocks_per_chunk > 1 and not detect_live()["blocks_per_chunk_key"]:
        with pytest.raises(AssertionError, match="all groups must have the same block size"):
            rig.launch(shape)
        return
    tokens = prompt(tokens=whole * full_.block_tokens + 9, seed=2)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    first.await_stores()

    def windowed(end: int) -> tuple[int, ...]:
        """The blocks that hold what the window sees after `end` tokens."""
        assert window.window is not None
        return tuple(range((end - window.window + 1) // window.block_tokens, -(-end // window.block_tokens)))

    second = rig.relaunch(first)
    restored = second.serve("restored", tokens, output_tokens=20)
    assert restored.loaded(0) == [tuple(range(whole))]
    assert restored.loaded(1) == [windowed(whole * full_.block_tokens)]

    second.forget()
    lose(second, group_keys(first, 0)[-1])
    restored = second.serve("inside a chunk", tokens, output_tokens=20)
    assert restored.loaded(0) == [tuple(range(shorter))]
    assert restored.loaded(1) == [windowed(shorter * full_.block_tokens)]


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "not stored"])
def test_a_window_that_reaches_a_chunk_nobody_looked_up(rig: Rig, is_stored: bool) -> None:
    # A hit that ends inside a window's chunk needs one chunk more than whole windows do. Older releases look up the
    # lesser number, and then stop at their own assertion, or load the chunk unseen.
    shape = Shape(groups=(full(layers=1), sliding(window=64, layers=1, block_tokens=32)), blocks=64, dense=True)
    tokens = prompt(tokens=16 * 6 + 3, seed=3)
    first = rig.launch(shape)
    held = first.manager._held
    if not is_stored:
        unseen = []

        def all_but_the_first(key: bytes, *, touch: bool) -> bool:
            """Take the window's first chunk for held: it is not stored then."""
            if key[-1] == 1 and key not in unseen:
                unseen.append(key)
                return len(unseen) == 1
            return bool(held(key, touch=touch))

        first.manager._held = all_but_the_first
    first.serve("cold", tokens)
    rig.gateway.await_objects(6 + 3 - (not is_stored))

    second = rig.relaunch(first)
    lose(second, group_keys(first, 0)[-1])
    request = second.submit("restored", tokens, output_tokens=2)
    if not release.reconciles_hits():
        with pytest.raises(AssertionError) as raised:
            second.run()
        assert raised.traceback[-1].name == "update_state_after_alloc"
    elif is_stored or release.looks_up_what_it_loads():
        second.run()
        assert (request.loaded(0), request.loaded(1)) == (([(0, 1, 2, 3, 4)], [(0, 1, 2)]) if is_stored else ([], []))
    else:
        with pytest.raises(LoadFailedError):
            second.run()
