"""Real engines: what one process stored, another restores, and answers as if it had computed everything.

If these go, nothing shows any more that the bytes on the card are the pages that the model needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stand.cases import (
    PROMPT_TOKENS,
    assert_canary,
    assert_restored,
    cannot_run,
    generate,
    prompts,
    store,
)
from stand.engines import EngineError
from stand.gateways import Gateway
from stand.models import GEMMA, LLAMA, MLA, Shape

if TYPE_CHECKING:
    from pathlib import Path

    from stand.cases import Stand

pytest_plugins = ("stand.fixtures",)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK_TOKENS = 32
PREFIX_TOKENS = 100  # three blocks of 32 and a rest
LONG_TOKENS = 1900  # three chunks of 16 blocks and a rest: vLLM asks for nothing that is less than a chunk


def _stored_then_restored(stand: Stand, folder: Path, shape: Shape, *, blocks_per_chunk: int, groups: int) -> None:
    asked = prompts(shape, 1, 2)
    expected = stand.baseline(shape, asked)
    with Gateway(folder) as gateway:
        config = stand.offloading(shape, gateway, blocks_per_chunk=blocks_per_chunk)
        with stand.engine(config) as first:
            assert first.description["groups"] == groups
            stored = store(first, asked, expected)
        assert gateway.status()["objects"] == stored

        with stand.engine(config) as second:
            assert second.pid != first.pid
            answer = generate(second, asked)
            assert_restored(answer, expected)
            chunk_tokens = second.description["block_size"] * blocks_per_chunk
            restored_tokens = PROMPT_TOKENS // chunk_tokens * chunk_tokens
            assert answer.cached_tokens == [restored_tokens] * len(asked)
            assert answer.computed_prompt_tokens == (PROMPT_TOKENS - restored_tokens) * len(asked)
            assert_canary(second, asked, expected)
        assert gateway.status()["objects"] == stored


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 16])
def test_llama(stand: Stand, tmp_path: Path, blocks_per_chunk: int) -> None:
    _stored_then_restored(stand, tmp_path, LLAMA, blocks_per_chunk=blocks_per_chunk, groups=1)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_gemma_with_sliding_windows(stand: Stand, tmp_path: Path, blocks_per_chunk: int) -> None:
    _stored_then_restored(stand, tmp_path, GEMMA, blocks_per_chunk=blocks_per_chunk, groups=3)


def test_mla_or_the_release_says_that_it_cannot(stand: Stand, tmp_path: Path) -> None:
    if words := cannot_run(MLA):
        with pytest.raises(EngineError, match=words):
            stand.engine(stand.config(MLA))
        return
    _stored_then_restored(stand, tmp_path, MLA, blocks_per_chunk=4, groups=1)


def test_a_hit_that_begins_or_ends_inside_what_the_engine_has(stand: Stand, tmp_path: Path) -> None:
    asked = prompts(LLAMA, 1, tokens=LONG_TOKENS)
    expected = stand.baseline(LLAMA, asked)
    prefix_blocks, chunks = PREFIX_TOKENS // BLOCK_TOKENS, LONG_TOKENS // (16 * BLOCK_TOKENS)
    with Gateway(tmp_path) as gateway:
        config = stand.offloading(LLAMA, gateway, blocks_per_chunk=16)
        with stand.engine(config) as first:
            assert store(first, asked, expected) == chunks

        with stand.engine(config) as second:
            computed = generate(second, [asked[0][:PREFIX_TOKENS]])
            assert computed.counters.seen["load_jobs"] == 0

            # the engine has the first blocks of the first chunk: the others are asked for
            begins_inside = generate(second, asked)
            assert_restored(begins_inside, expected)
            assert begins_inside.counters.product["load_objects"] == chunks
            assert begins_inside.counters.seen["load_blocks"] == chunks * 16 - prefix_blocks
            assert begins_inside.cached_tokens == [chunks * 16 * BLOCK_TOKENS]

            # the engine has every whole block now, and the card's hit ends before that
            ends_inside = generate(second, asked)
            assert ends_inside.tokens == expected
            assert ends_inside.counters.seen["load_jobs"] == 0
            assert ends_inside.computed_prompt_tokens == LONG_TOKENS % BLOCK_TOKENS
