"""Both of vLLM's policies for failed loads: on two ranks, with steps ahead, and where a gateway only stands still.

If these go, a policy that is honoured in the plain case may end the engine, or be ignored, in the others.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from harness import ledger, release
from harness.failing import BLOCKS, TOKENS, damage, serve_again
from harness.offered import offered
from harness.pipeline import WAYS
from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt

if TYPE_CHECKING:
    from harness.engine import Engine, Request
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

SHAPES = {
    "one group": Shape(groups=(mla(layers=2),), blocks=64, blocks_per_chunk=2),
    "two groups": Shape(groups=(full(), sliding(window=40)), blocks=96, blocks_per_chunk=2, shared=True),
    "two ranks": Shape(groups=(full(),), blocks=64, blocks_per_chunk=2, ranks=2),
}
DAMAGED = 11  # a block in the prompt's middle
WHOLE = [tuple(range(BLOCKS))]

# Bounds of the real settings, shortened: whatever is waited for, it is for these and nothing else.
SOON = {"xkv.load_timeout_ms": 400, "xkv.pending_timeout_ms": 300, "xkv.heartbeat_timeout_ms": 1_500}
DISBELIEF_S_MAX = 5.0

every_policy = pytest.mark.parametrize("policy", ["recompute", "fail"])


def store(rig: Rig, shape: Shape) -> Engine:
    """An engine that has left the prompt on the card."""
    engine = rig.launch(shape)
    engine.serve("cold", TOKENS)
    rig.gateway.await_objects(sum(map(len, offered(shape, len(TOKENS)))) * shape.ranks)
    return engine


def ends_with_an_error(shape: Shape, policy: str) -> bool:
    """Where vLLM hears of failed loads, and is told to end the request."""
    return policy == "fail" and release.channel(shape) != "verified"


def assert_honoured(request: Request, shape: Shape, policy: str) -> None:
    if ends_with_an_error(shape, policy):
        assert (request.finish_reason, request.said) == ("error", [])
    else:
        assert request.finish_reason == "length"


def assert_heals(engine: Engine) -> None:
    """Not hit again as it was, stored anew by who computes it, and whole then."""
    loaded = [serve_again(engine, f"again {number}") for number in range(3)]
    assert loaded[-1] == WHOLE, loaded


def await_disbelief(engine: Engine) -> None:
    end = time.monotonic() + DISBELIEF_S_MAX
    while engine.manager._card.alive():
        assert time.monotonic() < end, "a gateway without a heartbeat is believed"
        time.sleep(0.01)


@every_policy
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["one group", "two groups"])
def test_with_steps_ahead(rig: Rig, name: str, way: str, policy: str) -> None:
    shape = SHAPES[name]
    engine = rig.relaunch(store(rig, shape), policy=policy, batch_tokens=96, **WAYS[way])
    damage(rig, shape, block=DAMAGED)
    request = engine.submit("hit by it", TOKENS, output_tokens=3)
    beside = engine.submit("beside", prompt(tokens=90, seed=2), output_tokens=9)
    engine.run()
    assert_honoured(request, shape, policy)
    assert beside.finish_reason == "length"
    assert ledger.left(engine) == []
    assert_heals(engine)


@every_policy
def test_on_one_of_two_ranks(rig: Rig, policy: str) -> None:
    shape = SHAPES["two ranks"]
    engine = rig.relaunch(store(rig, shape), policy=policy)
    damage(rig, shape, block=DAMAGED, rank=1)
    request = engine.submit("hit by it", TOKENS, output_tokens=3)
    beside = engine.submit("beside", prompt(tokens=90, seed=2), output_tokens=9)
    engine.run()
    assert_honoured(request, shape, policy)
    assert beside.finish_reason == "length"
    assert_heals(engine)


@every_policy
@pytest.mark.parametrize("name", SHAPES)
def test_a_gateway_that_stands_still(rig: Rig, name: str, policy: str) -> None:
    """It has just beaten its heart, so it is believed; nothing waits longer for it than the bounds say."""
    shape = SHAPES[name]
    engine = rig.relaunch(store(rig, shape), policy=policy, extra=SOON)
    rig.gateway.process.signal(signal.SIGSTOP)
    try:
        request = engine.submit("hit", TOKENS, output_tokens=2)
        engine.run()
        assert bool(request.loads) == (release.channel(shape) != "verified"), (
            "a load was promised, or only a read begun"
        )
        assert_honoured(request, shape, policy)
        engine.forget()
        await_disbelief(engine)
        without = engine.serve("without it", TOKENS, output_tokens=2)
        assert (without.finish_reason, without.loads) == ("length", [])
    finally:
        rig.gateway.process.signal(signal.SIGCONT)
    engine.await_gateway()
    assert_heals(engine)
    assert ledger.left(engine) == []
