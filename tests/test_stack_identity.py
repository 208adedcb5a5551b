"""Real engines of different configurations, one after the other, on the same card.

If this goes, nothing shows any more that an object is never taken for another configuration's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stand.cases import assert_missed, assert_restored, generate, prompts, store
from stand.gateways import Gateway
from stand.models import LLAMA

if TYPE_CHECKING:
    from pathlib import Path

    from stand.cases import Stand

pytest_plugins = ("stand.fixtures",)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_other_configurations_miss_and_the_first_one_hits_again(stand: Stand, tmp_path: Path) -> None:
    asked = prompts(LLAMA, 1, 2)
    expected = stand.baseline(LLAMA, asked)
    with Gateway(tmp_path) as gateway:
        first = stand.offloading(LLAMA, gateway, blocks_per_chunk=2)
        with stand.engine(first) as engine:
            objects = store(engine, asked, expected)

        others = {
            "model": stand.offloading(LLAMA.with_seed(1), gateway, blocks_per_chunk=2),
            "dtype": stand.offloading(LLAMA, gateway, blocks_per_chunk=2, dtype="bfloat16"),
            "block size": stand.offloading(LLAMA, gateway, blocks_per_chunk=2, block_size=64),
            "blocks per chunk": stand.offloading(LLAMA, gateway, blocks_per_chunk=4),
        }
        for what, config in others.items():
            with stand.engine(config) as engine:
                cold = generate(engine, asked)
                assert_missed(cold)
                stored = engine.settle().product["confirmed_objects"]
                assert stored > 0, what
                engine.reset_prefix()
                assert_restored(generate(engine, asked), cold.tokens)
            objects += stored
            assert gateway.status()["objects"] == objects, what

        with stand.engine(first) as engine:
            assert_restored(generate(engine, asked), expected)


def test_other_weights_under_the_same_name_miss(stand: Stand, tmp_path: Path) -> None:
    asked = prompts(LLAMA, 1)
    folder, other = tmp_path / "model", LLAMA.with_seed(2)
    stand.server.write_model(LLAMA, folder)
    with Gateway(tmp_path / "gateway") as gateway:
        config = stand.offloading(LLAMA, gateway, blocks_per_chunk=2, model=folder)
        with stand.engine(config) as engine:
            before = generate(engine, asked)
            assert engine.settle().product["confirmed_objects"] > 0

        folder.rename(tmp_path / "before")
        stand.server.write_model(other, folder)
        with stand.engine(config) as engine:
            after = generate(engine, asked)
            assert_missed(after)
            assert after.tokens != before.tokens
            engine.settle()
            engine.reset_prefix()
            assert_restored(generate(engine, asked), after.tokens)

        folder.rename(tmp_path / "after")
        (tmp_path / "before").rename(folder)
        with stand.engine(config) as engine:
            assert_restored(generate(engine, asked), before.tokens)
