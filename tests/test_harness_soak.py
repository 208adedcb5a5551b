"""Many requests over a few prompts, in an order that nobody planned: every byte is compared in every step.

Prefixes are shared, blocks are scarce (preemption, reuse while stores are under way), requests are aborted where the
release survives it, the connector is reset (between jobs where need be), the gateway is killed. A failing seed is a
case to keep.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt
from xkv_compat.features import detect_live
from xkv_offload.metrics import PROCESS_COUNTERS

if TYPE_CHECKING:
    from harness.engine import Engine
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

SEEDS = (6,)  # others are for whoever changes the code: a dozen takes three minutes
LAUNCHES = 3
STEPS = 160  # of each launch
WAITING_MAX = 6  # requests that are not finished: more than the blocks allow at once

SHAPES = {
    "mla": Shape(groups=(mla(layers=1),), blocks=40, blocks_per_chunk=2),
    "two ranks": Shape(groups=(mla(layers=1),), blocks=40, blocks_per_chunk=3, ranks=2),
    "window": Shape(groups=(full(layers=1), sliding(window=40, layers=1)), blocks=80, blocks_per_chunk=2, shared=True),
}


def prompts(random_: random.Random) -> list[list[int]]:
    """Three families of prompts; the members of one share prefixes of many lengths."""
    found = []
    for family in range(3):
        trunk = prompt(tokens=16 * 14, seed=100 + family)
        for member in range(4):
            length = random_.randint(5, len(trunk))
            seed = 1000 + 10 * family + member
            found.append(prompt(tokens=length + random_.randint(1, 60), seed=seed, after=trunk[:length]))
    return found


class Soak:
    """What happens between the steps of one engine."""

    def __init__(self, rig: Rig, engine: Engine, random_: random.Random) -> None:
        self.rig = rig
        self.engine = engine
        self.random = random_
        self.prompts = prompts(random_)
        # A failed load of several groups ends the engine on these releases, so nothing may fail there.
        self.reset_at = random_.randrange(STEPS)
        self.kill_at = random_.randrange(STEPS)
        self.may_fail = len(engine.shape.groups) == 1 and (engine.shape.ranks == 1 or detect_live()["abort_safe"])

    def unfinished(self) -> list[str]:
        return [name for name in self.engine.requests if name in self.engine.scheduler.requests]

    def happen(self, step: int) -> None:
        chance = self.random.random()
        if chance < 0.35 and len(self.unfinished()) < WAITING_MAX:
            name = f"r{len(self.engine.requests)}"
            self.engine.submit(name, self.random.choice(self.prompts), output_tokens=self.random.randint(1, 12))
        elif chance < 0.40 and self.unfinished() and detect_live()["abort_safe"]:
            self.engine.abort(self.random.choice(self.unfinished()))
        elif chance < 0.45 and self.engine.is_idle():
            self.engine.forget()
        if step == self.reset_at:
            if not detect_live()["reset_safe"]:  # vLLM does not survive one with a job under way
                self.engine.run(lambda: not self.engine.scheduler.connector.has_pending_push_work())
            self.engine.reset_connector()
        if step == self.kill_at and self.may_fail:
            self.rig.gateway.kill()
            self.rig.gateway.start()
            if self.random.random() < 0.5:
                self.engine.await_gateway()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_ever_wrong(rig: Rig, shape: str, seed: int) -> None:
    random_ = random.Random(f"{shape} {seed}")
    before = dict(PROCESS_COUNTERS)
    engine = rig.launch(SHAPES[shape], batch_tokens=96)
    for launch in range(LAUNCHES):
        soak = Soak(rig, engine, random_)
        for step in range(STEPS):
            soak.happen(step)
            engine.step()
        engine.run()
        engine.await_stores()
        if launch < LAUNCHES - 1:
            engine = rig.relaunch(engine, batch_tokens=96)
    assert PROCESS_COUNTERS["store_objects"] > before["store_objects"]
    assert PROCESS_COUNTERS["load_objects"] > before["load_objects"]
    assert PROCESS_COUNTERS["worker_errors"] == before["worker_errors"]
    assert PROCESS_COUNTERS["manager_errors"] == before["manager_errors"]
