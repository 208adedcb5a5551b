"""Real engines and gateways that are killed while something is under way, at a point that the gateway has reached.

If these go, nothing shows any more that a crash leaves a miss, never wrong tokens, and that all goes on after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stand.cases import (
    OUTPUT_TOKENS,
    assert_restored,
    generate,
    prompts,
    restore_after_return,
    store,
    target,
)
from stand.engines import alive
from stand.gateways import Gateway
from stand.models import GEMMA, LLAMA

if TYPE_CHECKING:
    from pathlib import Path

    from stand.cases import Stand
    from stand.engines import Engine
    from stand.models import Shape

pytest_plugins = ("stand.fixtures",)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# An object's fragments lie in both databases, so that it can be written half: that takes many small slots.
DATABASES = 2
SLOT_BYTES = 65_536


def _store_up_to(
    engine: Engine, gateway: Gateway, asked: list[list[int]], expected: list[list[int]], point: str
) -> None:
    """Answer prompts while the gateway stands at `point` with their first objects."""
    gateway.hold(point)
    answer = generate(engine, asked)
    assert answer.tokens == expected
    assert answer.counters.product["store_objects"] > 0
    gateway.await_point(point)
    assert engine.counters().product["confirmed_objects"] == 0


def test_engine_killed_while_storing(stand: Stand, tmp_path: Path) -> None:
    asked = prompts(LLAMA, 1, 2)
    expected = stand.baseline(LLAMA, asked)
    with Gateway(tmp_path, databases=DATABASES, slot_bytes=SLOT_BYTES) as gateway:
        config = stand.offloading(LLAMA, gateway, blocks_per_chunk=16)
        with stand.engine(config) as first:
            _store_up_to(first, gateway, asked, expected, "put.mid_write")
            first.kill()
        gateway.let_go("put.mid_write")
        assert alive(gateway.pid)

        with stand.engine(config) as second:
            restore_after_return(second, asked, expected)
        with stand.engine(config) as third:
            assert_restored(generate(third, asked), expected)


@pytest.mark.parametrize("point", ["put.mid_write", "put.before_commit"])
def test_gateway_killed_while_storing(stand: Stand, tmp_path: Path, point: str) -> None:
    asked = prompts(LLAMA, 1, 2)
    expected = stand.baseline(LLAMA, asked)
    with Gateway(tmp_path, databases=DATABASES, slot_bytes=SLOT_BYTES) as gateway:
        config = stand.offloading(LLAMA, gateway, blocks_per_chunk=16)
        with stand.engine(config) as engine:
            _store_up_to(engine, gateway, asked, expected, point)
            gateway.kill()
            gateway.start()
            assert gateway.status()["objects"] == 0
            restore_after_return(engine, asked, expected)
        with stand.engine(config) as second:
            assert_restored(generate(second, asked), expected)


def hears_of_failed_loads(shape: Shape) -> bool:
    """Whether this release can be told; elsewhere no load fails (hits are verified first)."""
    return shape is LLAMA or "request_error_reporting" not in target().lacks


@pytest.mark.parametrize(
    ("shape", "point", "policy"),
    [
        (LLAMA, "get.before_read", "recompute"),
        (LLAMA, "get.read", "recompute"),
        (LLAMA, "get.read", "fail"),
        (GEMMA, "get.before_read", "recompute"),
        (GEMMA, "get.read", "fail"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_gateway_killed_while_loading(stand: Stand, tmp_path: Path, shape: Shape, point: str, policy: str) -> None:
    _killed_while_loading(stand, tmp_path, shape, point=point, policy=policy)


def test_gateway_killed_while_loading_with_the_connector_of_our_own(stand: Stand, tmp_path: Path) -> None:
    # vLLM's class stays as it is, and still hears of the failed load.
    own = ("XkvOffloadingConnector", "xkv_offload.connector")
    _killed_while_loading(stand, tmp_path, LLAMA, point="get.read", policy="recompute", connector=own)


def _killed_while_loading(
    stand: Stand, folder: Path, shape: Shape, *, point: str, policy: str, connector: tuple[str, str] | None = None
) -> None:
    asked = prompts(shape, 1)
    expected = stand.baseline(shape, asked)
    hears = hears_of_failed_loads(shape)
    with Gateway(folder, databases=DATABASES, slot_bytes=SLOT_BYTES) as gateway:
        chunk = 16 if shape is LLAMA else 2
        config = stand.offloading(
            shape, gateway, blocks_per_chunk=chunk, load_failure_policy=policy, connector=connector
        )
        with stand.engine(config) as engine:
            assert bool(engine.description["own_connector_methods"]) == (connector is None)
            store(engine, asked, expected)
            engine.reset_prefix()
            gateway.hold(point)
            engine.begin_generate(asked, max_tokens=OUTPUT_TOKENS)
            gateway.await_point(point)
            gateway.kill()
            answer = engine.finish_generate()
            assert bool(answer.counters.product["load_failures"]) == hears
            assert answer.counters.product["load_objects"] == 0
            if policy == "fail" and hears:
                assert answer.finish_reasons == ["error"]
            else:
                assert answer.tokens == expected

            gateway.start()
            restore_after_return(engine, asked, expected)
        with stand.engine(config) as second:
            assert_restored(generate(second, asked), expected)
