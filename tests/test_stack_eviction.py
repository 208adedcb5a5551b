"""Real engines on a card that is too small for what they store.

If this goes, nothing shows any more that a prefix of which a part was evicted is restored as far as it goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stand.cases import PROMPT_TOKENS, generate, prompts
from stand.gateways import Gateway
from stand.models import LLAMA

if TYPE_CHECKING:
    from pathlib import Path

    from stand.cases import Stand

pytest_plugins = ("stand.fixtures",)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNK_TOKENS = 64
WHOLE_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS


def test_prefix_restored_as_far_as_it_was_kept(stand: Stand, tmp_path: Path) -> None:
    asked = [prompts(LLAMA, seed) for seed in range(1, 9)]
    expected = [stand.baseline(LLAMA, one) for one in asked]
    with Gateway(tmp_path, capacity="32MiB") as gateway:  # 128 slots for 8 × 14 chunks of two slots
        config = stand.offloading(LLAMA, gateway, blocks_per_chunk=2)
        with stand.engine(config) as first:
            for one, right in zip(asked, expected, strict=True):
                assert generate(first, one).tokens == right
                first.settle()
            assert first.counters().product["store_objects"] > 0
        assert 0 < gateway.status()["objects"] < 8 * WHOLE_TOKENS // CHUNK_TOKENS

        restored = []
        with stand.engine(config) as second:
            # The last first: in the order of storing, each would store its own over what the next ones have left.
            for one, right in zip(reversed(asked), reversed(expected), strict=True):
                answer = generate(second, one)
                assert answer.tokens == right
                loaded_tokens = answer.counters.product["load_objects"] * CHUNK_TOKENS
                assert answer.cached_tokens == [loaded_tokens]
                assert answer.computed_prompt_tokens == PROMPT_TOKENS - loaded_tokens
                restored.append(loaded_tokens)
                second.settle()
        assert any(0 < tokens < WHOLE_TOKENS for tokens in restored), restored
