"""A real engine of two ranks: each stores and restores its own pages, and what fails on one is computed by both.

If this goes, nothing shows any more that ranks in processes of their own agree: on what is held, on what has failed,
and on going on after that; nor that a rank's death leaves the gateway clean.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stand.cases import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    RETURN_S_MAX,
    assert_canary,
    assert_missed,
    assert_restored,
    generate,
    prompts,
    restore_after_return,
    store,
    target,
)
from stand.engines import STOP_S_MAX, EngineError, await_end
from stand.gateways import Gateway, leftovers
from stand.models import LLAMA
from stand.parallel import FREED_S_MAX, PARALLEL, RANKS, kill_rank, two_ranks
from xkv_store.geometry import DATA_OFFSET, HEADER_BYTES, SLOT_BYTES
from xkv_store.key import ObjectKey
from xkv_store.layout import BadBytesError, parse_slot_header

if TYPE_CHECKING:
    from pathlib import Path

    from stand.cases import Stand
    from stand.engines import Engine
    from stand.pools import Pool

pytest_plugins = ("stand.fixtures",)
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(450)]

BLOCKS_PER_CHUNK = 2
CHUNKS = PROMPT_TOKENS // (32 * BLOCKS_PER_CHUNK)
OWN_CONNECTOR = ("XkvOffloadingConnector", "xkv_offload.connector")
DAMAGED = 9  # the chunk of which one rank's object is damaged: what comes before it stays a prefix
FRESH_SEED = 10_000  # of a prompt that nobody has stored
REFUSED = "pages are identical on every rank only where every layer of every group is MLA"

Prompts = list[list[int]]


def hears_of_failed_loads() -> bool:
    """Whether this release can be told by blocks or requests; elsewhere hits are verified before they are given."""
    return not {"abort_safe", "request_error_reporting"} <= set(target().lacks)


def damage(card: Path, *, rank: int, position: int) -> None:
    """Change a byte of one rank's object of the chunk at this place of its prompt, on the medium."""
    found = 0
    for path in sorted(card.glob("db-*.xkv")):
        with path.open("r+b", buffering=0) as file:
            for at in range(DATA_OFFSET, path.stat().st_size, SLOT_BYTES):
                file.seek(at)
                try:
                    header = parse_slot_header(file.read(HEADER_BYTES))
                except BadBytesError:
                    continue  # never written
                if (ObjectKey.decode(header.key).rank, header.position) == (rank, position):
                    found += 1
                    file.seek(at + HEADER_BYTES + header.payload_bytes // 2)
                    byte = file.read(1)[0]
                    file.seek(-1, 1)
                    file.write(bytes([byte ^ 0xFF]))
    assert found == 1


def ask_again(engine: Engine, asked: Prompts, expected: Prompts) -> int:
    """A right answer, with nothing of the engine's own; the objects that it restored."""
    engine.settle()
    engine.reset_prefix()
    answer = generate(engine, asked)
    assert answer.tokens == expected
    assert answer.counters.product["load_failures"] == 0, "what had failed was hit again"
    return answer.counters.product["load_objects"]


@pytest.fixture(scope="module")
def pool(stand: Stand) -> Pool:
    """Three prompts with their answers."""
    return stand.decided(LLAMA, 3)


def test_each_rank_restores_its_own(stand: Stand, pool: Pool, tmp_path: Path) -> None:
    """One test, since each start takes long: vLLM spawns the ranks, and each imports everything."""
    # One prompt for most of it, and one for each end while it is loaded: what a ring still holds is not read again.
    asked, other_asked, last_asked = ([prompt] for prompt in pool.prompts)
    expected, other_expected, _ = ([answer] for answer in pool.answers)
    with Gateway(tmp_path) as gateway:
        config = stand.offloading(
            LLAMA, gateway, blocks_per_chunk=BLOCKS_PER_CHUNK, llm=PARALLEL, load_failure_policy="fail"
        )
        with two_ranks(stand, config) as first:
            assert first.description["own_connector_methods"], "vLLM's own class hears of failed loads"
            assert store(first, asked, expected) == RANKS * CHUNKS
            assert gateway.status()["objects"] == RANKS * CHUNKS, "an object for each rank"
            _one_ranks_object_is_damaged(first, tmp_path / "card", asked, expected)
            store(first, pool.prompts[1:], pool.answers[1:])

        other = replace(config, load_failure_policy="recompute", connector=OWN_CONNECTOR)
        with two_ranks(stand, other) as second:
            assert second.description["own_connector_methods"] == [], "ours does, and vLLM's class stays as it is"
            _all_is_restored(second, asked, expected)
            for rank in range(RANKS):
                assert_canary(second, asked, expected, rank=rank, ranks=RANKS)
            _the_gateway_is_killed(second, gateway, other_asked, other_expected)
            _a_rank_is_killed(second, gateway, last_asked)

        _one_rank_alone_misses(stand, gateway, asked, expected)
        with two_ranks(stand, config) as third:
            _all_is_restored(third, asked, expected)
            _the_engine_is_killed(third, gateway)


def _all_is_restored(engine: Engine, asked: Prompts, expected: Prompts) -> None:
    restored = generate(engine, asked)
    assert_restored(restored, expected)
    assert restored.counters.product["load_objects"] == RANKS * CHUNKS
    assert restored.cached_tokens == [CHUNKS * 64]


def _one_ranks_object_is_damaged(engine: Engine, card: Path, asked: Prompts, expected: Prompts) -> None:
    """By the policy to fail the request ends, the engine lives; then a prefix, and all of it once stored anew."""
    damage(card, rank=1, position=DAMAGED)
    engine.reset_prefix()
    answer = generate(engine, asked)
    counted = answer.counters.product
    if hears_of_failed_loads():
        assert answer.finish_reasons == ["error"]
        assert counted["load_failures"] == 1, "the other rank's object was sound"
        assert ask_again(engine, asked, expected) == RANKS * DAMAGED
    else:
        assert answer.tokens == expected
        assert (counted["verify_failures"], counted["load_failures"]) == (1, 0)
        assert counted["load_objects"] == RANKS * DAMAGED
    assert ask_again(engine, asked, expected) == RANKS * CHUNKS


def _the_gateway_is_killed(engine: Engine, gateway: Gateway, asked: Prompts, expected: Prompts) -> None:
    """By the policy to recompute nobody notices, and all goes on with the next gateway."""
    engine.reset_prefix()
    gateway.hold("get.read")
    engine.begin_generate(asked, max_tokens=OUTPUT_TOKENS)
    gateway.await_point("get.read")
    gateway.kill()
    answer = engine.finish_generate()
    assert answer.tokens == expected
    assert answer.counters.product["load_objects"] == 0
    assert bool(answer.counters.product["load_failures"]) == hears_of_failed_loads()
    gateway.start()
    restore_after_return(engine, asked, expected)


def _a_rank_is_killed(engine: Engine, gateway: Gateway, asked: Prompts) -> None:
    """While the gateway is about to read what it loads: nothing of the engine is left after that read."""
    engine.settle()
    engine.reset_prefix()
    gateway.hold("get.before_read")
    engine.begin_generate(asked, max_tokens=OUTPUT_TOKENS)
    gateway.await_point("get.before_read")
    kill_rank(engine, 1)
    assert gateway.status()["engines"] == 1, "its reads have not ended"
    gateway.let_go("get.before_read")
    assert leftovers(gateway.status, FREED_S_MAX) == ""


def _one_rank_alone_misses(stand: Stand, gateway: Gateway, asked: Prompts, expected: Prompts) -> None:
    """What two ranks have stored is nothing for an engine of another size; both sizes' objects lie side by side."""
    before = gateway.status()["objects"]
    with stand.engine(stand.offloading(LLAMA, gateway, blocks_per_chunk=BLOCKS_PER_CHUNK)) as alone:
        cold = generate(alone, asked)
        assert cold.tokens == expected
        assert_missed(cold)
        assert alone.settle().product["confirmed_objects"] == CHUNKS
    assert gateway.status()["objects"] == before + CHUNKS


def _the_engine_is_killed(engine: Engine, gateway: Gateway) -> None:
    """While its ranks store; they end with it, and a second after their last write nothing of it is left."""
    end = time.monotonic() + RETURN_S_MAX
    while sum(one["role"] in {"scheduler", "rank"} for one in gateway.status()["sessions"]) < 1 + RANKS:
        assert time.monotonic() < end, "a rank has not come back to the gateway"
        time.sleep(0.01)  # what was verified before needs no rank to be there; stores do
    gateway.hold("put.before_write")
    engine.begin_generate(prompts(LLAMA, FRESH_SEED), max_tokens=OUTPUT_TOKENS)
    gateway.await_point("put.before_write")
    engine.kill()
    for pid in engine.description["ranks"]:
        await_end(pid, STOP_S_MAX)
    assert gateway.status()["engines"] == 1, "its writes have not ended"
    gateway.let_go("put.before_write")
    assert leftovers(gateway.status, FREED_S_MAX) == ""


def test_one_object_for_both_ranks_is_refused(stand: Stand, tmp_path: Path) -> None:
    """Before anything is stored: the two ranks publish the same shapes, and their bytes differ."""
    with Gateway(tmp_path) as gateway:
        config = stand.offloading(LLAMA, gateway, blocks_per_chunk=BLOCKS_PER_CHUNK, llm=PARALLEL)
        assert config.extra is not None
        with pytest.raises(EngineError, match=REFUSED):
            stand.engine(replace(config, extra={**config.extra, "xkv.tp_layout": "replicated"}))
        assert leftovers(gateway.status, STOP_S_MAX) == ""
        assert gateway.status()["objects"] == 0


def test_a_gateway_for_each_rank(stand: Stand, pool: Pool, tmp_path: Path) -> None:
    """`xkv.port_per_rank`: a card has its own rank's objects; with one gateway gone nothing is hit, nor wrong."""
    asked, expected = pool.prompts[:1], pool.answers[:1]
    with Gateway(tmp_path / "0") as first, Gateway(tmp_path / "1", before=first) as second:
        config = stand.offloading(LLAMA, first, blocks_per_chunk=BLOCKS_PER_CHUNK, llm=PARALLEL)
        assert config.extra is not None
        with two_ranks(stand, replace(config, extra={**config.extra, "xkv.port_per_rank": True})) as engine:
            assert store(engine, asked, expected) == RANKS * CHUNKS
            assert [gateway.status()["objects"] for gateway in (first, second)] == [CHUNKS, CHUNKS]
            engine.reset_prefix()
            _all_is_restored(engine, asked, expected)
            for rank in range(RANKS):
                assert_canary(engine, asked, expected, rank=rank, ranks=RANKS)
            second.kill()
            engine.reset_prefix()
            missed = generate(engine, asked)
            assert missed.tokens == expected
            assert_missed(missed)
            second.start()
            restore_after_return(engine, asked, expected)
        for gateway in (first, second):
            assert leftovers(gateway.status, FREED_S_MAX) == ""
