"""`xkv.restore_policy` = `when_faster`: what each release tells of its steps, and a request whose hits are declined.

If these go, nothing shows any more that a release tells the manager what its steps compute, each of them once, nor that
declined hits leave neither a hole nor a second copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from harness import release
from harness.offered import offered
from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt
from xkv_offload import restore_policy
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_offload.restore_policy import STEP_TOKENS_MIN, RestorePolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.engine import Engine
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

WHEN_FASTER = {"xkv.restore_policy": "when_faster"}
PLAIN = Shape(groups=(mla(),), blocks=128, blocks_per_chunk=2)
GROUPS = Shape(groups=(full(), sliding(window=48)), blocks=128, blocks_per_chunk=1)
RANKS = Shape(groups=(full(),), blocks=128, blocks_per_chunk=2, ranks=2)


@pytest.fixture(autouse=True)
def own_class() -> Iterator[None]:
    """VLLM's class, as it was before."""
    connector = release.names().connector.OffloadingConnector
    before = dict(vars(connector))
    yield
    if "build_connector_meta" in before:
        connector.build_connector_meta = before["build_connector_meta"]
    elif "build_connector_meta" in vars(connector):
        del connector.build_connector_meta


def heard(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the manager is told from now on: a step's prompt tokens at its beginning, None at its end."""
    told: list[Any] = []
    policy = engine.manager._policy
    begins, ends = policy.step_begins, policy.step_ends

    def step_begins(tokens: int) -> None:
        told.append(tokens)
        begins(tokens)

    def step_ends() -> None:
        told.append(None)
        ends()

    monkeypatch.setattr(policy, "step_begins", step_begins)
    monkeypatch.setattr(policy, "step_ends", step_ends)
    return told


def test_each_step_is_told_once_with_what_it_computes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):  # a second engine of the process finds the method in its place
        engine = rig.launch(PLAIN, extra=WHEN_FASTER, batch_tokens=300)
        told = heard(engine, monkeypatch)
        steps = len(engine.steps)
        engine.serve("long", prompt(tokens=700, seed=3 + 10 * number), output_tokens=5)
        engine.serve("short", prompt(tokens=20, seed=4 + 10 * number), output_tokens=3)
        scheduled = [step.scheduled.num_scheduled_tokens for step in engine.steps[steps:]]
        assert told[::2] == [sum(tokens - 1 for tokens in step.values()) for step in scheduled]
        assert told[1::2] == [None] * len(scheduled)
        assert engine.manager._policy._computed_steps == sum(tokens >= STEP_TOKENS_MIN for tokens in told[::2]) == 2
        assert 0 < engine.manager._policy._computed.seconds_each < 1


def test_what_an_engine_with_steps_ahead_is_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ends as beginnings, in whatever order."""
    engine = rig.launch(PLAIN, extra=WHEN_FASTER, async_scheduling=True)
    told = heard(engine, monkeypatch)
    engine.serve("a", prompt(tokens=700, seed=3), output_tokens=5)
    assert len(told) == 2 * told.count(None) > 0


def test_without_it_vllms_class_stays_as_it_is(rig: Rig) -> None:
    before = release.names().connector.OffloadingConnector.build_connector_meta
    engine = rig.launch(PLAIN)
    assert release.names().connector.OffloadingConnector.build_connector_meta is before
    assert engine.manager._policy is None


@pytest.mark.parametrize("shape", [PLAIN, GROUPS, RANKS], ids=["one group", "windows", "ranks"])
def test_declined_hits_are_computed_and_not_stored_again(
    rig: Rig, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(tokens=16 * 20 + 3, seed=1)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    objects = shape.ranks * sum(map(len, offered(shape, len(tokens))))
    before = rig.gateway.await_objects(objects)

    second = rig.relaunch(first, extra=WHEN_FASTER)
    answers = {"declined": False}
    monkeypatch.setattr(RestorePolicy, "allows", lambda _policy, req_id, _key: answers.get(req_id, True), raising=True)
    declined = PROCESS_COUNTERS["lookup_declined"]
    computed = second.serve("declined", tokens, output_tokens=20)
    assert computed.loads == []
    assert computed.computed_tokens >= len(tokens)
    second.run()
    assert PROCESS_COUNTERS["lookup_declined"] > declined
    second.await_stores()
    assert rig.gateway.await_objects(objects)["object_bytes"] == before["object_bytes"]

    second.forget()
    restored = second.serve("restored", tokens, output_tokens=20)
    assert restored.loaded(0) == [tuple(range(20))]


@pytest.mark.parametrize(("shape", "blocks"), [(PLAIN, 8), (GROUPS, 20)], ids=["one group", "windows"])
def test_a_probe_restores_a_prefix_without_its_tail(
    rig: Rig, shape: Shape, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole hit where there are windows: a release may have stored none that ends a shorter prefix."""
    tokens = prompt(tokens=16 * 20 + 3, seed=1)
    first = rig.launch(shape)
    first.serve("cold", tokens)
    rig.gateway.await_objects(sum(map(len, offered(shape, len(tokens)))))
    second = rig.relaunch(first, extra=WHEN_FASTER)
    monkeypatch.setattr(restore_policy, "PROBE_TOKENS", 16 * 8)
    policy = second.manager._policy
    policy._computing, policy._next_probe = True, 0.0
    policy._computed.add(1, 1e6)  # so slow that any restore is fast
    probed = second.serve("probe", tokens, output_tokens=2)
    assert probed.loaded(0) == [tuple(range(blocks))]
    second.forget()
    assert second.serve("next", tokens, output_tokens=2).loaded(0) == [tuple(range(blocks))], "the second comes at once"
    second.forget()
    assert second.serve("all", tokens, output_tokens=2).loaded(0) == [tuple(range(20))]
    assert policy.take_probes() == 0, "they were taken at the steps' ends"
