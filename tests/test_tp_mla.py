"""A real engine of two ranks whose pages are identical: one copy serves both, or the release says that it cannot.

If this goes, nothing shows any more, with a model that answers, that what rank 0 alone has stored is what every rank
needs, and that it is chosen by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stand.cases import (
    PROMPT_TOKENS,
    assert_canary,
    assert_missed,
    assert_restored,
    cannot_run,
    generate,
    store,
)
from stand.engines import EngineError
from stand.gateways import Gateway
from stand.models import MLA
from stand.parallel import PARALLEL, RANKS, two_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from stand.cases import Stand
    from stand.engines import Engine

pytest_plugins = ("stand.fixtures",)
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(450)]

BLOCKS_PER_CHUNK = 4
CHOSEN = f"xkv.tp_layout = auto: replicated, one object for all {RANKS} ranks, since every layer of every group is MLA"

Prompts = list[list[int]]


def test_one_copy_serves_both_ranks_or_the_release_says_that_it_cannot(stand: Stand, tmp_path: Path) -> None:
    if words := cannot_run(MLA):
        with pytest.raises(EngineError) as refusal:
            stand.engine(stand.config(MLA, llm=PARALLEL))
        said = "; ".join(refusal.value.chain) + refusal.value.log.read_text(errors="replace")
        assert words in said, "vLLM's own error, of a rank's process"
        return
    pool = stand.decided(MLA, 1)
    asked, expected = pool.prompts, pool.answers
    with Gateway(tmp_path) as gateway:
        config = stand.offloading(MLA, gateway, blocks_per_chunk=BLOCKS_PER_CHUNK, llm=PARALLEL)
        with two_ranks(stand, config) as first:
            stored = store(first, asked, expected)
            chunk_tokens = first.description["block_size"] * BLOCKS_PER_CHUNK
            assert stored == PROMPT_TOKENS // chunk_tokens, "one rank puts what is the same on both"
            _the_log_says_so_once(first)
        both = gateway.status()
        _one_rank_misses_and_stores_as_much(stand, gateway, asked, expected)

        with two_ranks(stand, config) as second:
            before = gateway.status()["counters"].get("reads", 0)
            restored = generate(second, asked)
            assert_restored(restored, expected)
            assert restored.counters.product["load_objects"] == RANKS * stored
            assert restored.cached_tokens == [stored * chunk_tokens]
            assert gateway.status()["counters"]["reads"] - before == stored, "what both ranks restore is read once"
            for rank in range(RANKS):
                assert_canary(second, asked, expected, rank=rank, ranks=RANKS)
        assert gateway.status()["objects"] == 2 * both["objects"], "of one rank and of two; nothing was stored again"


def _the_log_says_so_once(engine: Engine) -> None:
    lines = [line for line in engine.log.read_text(errors="replace").splitlines() if "xkv.tp_layout" in line]
    assert len(lines) == 1, lines
    assert CHOSEN in lines[0]


def _one_rank_misses_and_stores_as_much(stand: Stand, gateway: Gateway, asked: Prompts, expected: Prompts) -> None:
    """What an engine of one rank stores of the same prompt tells how much one copy is."""
    before = gateway.status()
    with stand.engine(stand.offloading(MLA, gateway, blocks_per_chunk=BLOCKS_PER_CHUNK)) as alone:
        cold = generate(alone, asked)
        assert cold.tokens == expected
        assert_missed(cold)
        assert alone.settle().product["confirmed_objects"] == before["objects"]
    after = gateway.status()
    for what in ("objects", "object_bytes"):
        assert after[what] - before[what] == before[what] > 0, f"{what} of two ranks are those of one"
    assert after["slots"]["used"] == 2 * before["slots"]["used"]
