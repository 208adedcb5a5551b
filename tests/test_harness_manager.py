"""What a release does with the manager in a step: under its lock, up to its last call, and after a reset.

Each is asserted on every release: where the feature is absent, that nothing of it happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from harness.shapes import Shape, mla
from harness.story import prompt
from xkv_compat.features import detect_live
from xkv_compat.vllm_symbols import framework

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.engine import Engine
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures", "harness.slow_copies")

SHAPE = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2)
BLOCKS = 20
TOKENS = prompt(tokens=16 * BLOCKS + 3, seed=1)
METHODS = (
    "lookup",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "take_events",
    "has_pending_work",
    "reset_cache",
    "on_reset_flushed",
    "get_stats",
    "get_load_source",
)


class Lock:
    """A lock that nobody may take twice."""

    def __init__(self) -> None:
        self.held = False
        self.taken = 0

    def __enter__(self) -> None:
        assert not self.held, "the lock is taken by whoever holds it"
        self.held = True
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self.held = False


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the manager, as vLLM made it."""

    name: str
    arguments: tuple[Any, ...]
    answer: Any
    locked: bool


@dataclass(slots=True)
class Watch:
    """The calls of one manager, in their order."""

    lock: Lock = field(default_factory=Lock)
    calls: list[Call] = field(default_factory=list)

    def names(self, first: int = 0) -> list[str]:
        return [call.name for call in self.calls[first:]]


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Note every call from now on, and give the manager a lock of its own."""
    found = Watch()
    manager = engine.manager

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            locked = found.lock.held
            answer = method(*arguments, **more)
            found.calls.append(Call(name, (*arguments, *more.values()), answer, locked))
            return answer

        return call

    for name in METHODS:
        monkeypatch.setattr(manager, name, noted(name, getattr(manager, name)))
    monkeypatch.setattr(type(manager), "lock", property(lambda _: found.lock), raising=False)
    return found


def stored(rig: Rig) -> Engine:
    first = rig.launch(SHAPE)
    first.serve("cold", TOKENS)
    rig.gateway.await_objects(BLOCKS // 2)
    return rig.relaunch(first)


def test_a_lock_of_the_manager_is_held_for_every_call(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it, a thread of ours could not be: each call would race with it.
    engine = stored(rig)
    seen = watch(engine, monkeypatch)
    assert engine.serve("restored", TOKENS, output_tokens=2).loaded() == [tuple(range(BLOCKS))]
    engine.reset_connector()
    engine.serve("stored anew", TOKENS, output_tokens=2)
    assert {"lookup", "prepare_load", "prepare_store", "reset_cache"} <= set(seen.names())
    assert not seen.lock.held
    if detect_live()["manager_lock"]:
        assert {call.name for call in seen.calls if not call.locked} == set()
    else:
        assert seen.lock.taken == 0


def test_the_end_of_a_schedule_is_where_the_release_has_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether it comes after the stores of its step or before them, what was looked up in it has gone to the gateway.
    engine = rig.launch(SHAPE)
    seen = watch(engine, monkeypatch)
    engine.submit("cold", TOKENS)
    engine.schedule()
    names = seen.names()
    assert names.count("on_schedule_end") == names.count("prepare_store") == 1
    is_last = detect_live()["manager_lock"]  # they came with the same release
    assert (names.index("on_schedule_end") > names.index("prepare_store")) == is_last
    assert (names[-1] == "on_schedule_end") == is_last
    assert engine.manager._touched == []


def test_every_key_that_is_loaded_comes_from_the_card(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stored(rig)
    seen = watch(engine, monkeypatch)
    request = engine.submit("restored", TOKENS)
    engine.schedule()
    assert request.loaded() == [tuple(range(BLOCKS))]
    if detect_live()["load_source"]:
        disk = framework().CacheHitSource.DISK
        scheduler = engine.scheduler
        sources = scheduler.connector.get_external_cache_hit_sources(scheduler.requests["restored"], 16 * BLOCKS)
        assert sources == {disk: 16 * BLOCKS}
        assert {call.answer for call in seen.calls if call.name == "get_load_source"} == {disk}
    assert ("get_load_source" in seen.names()) == detect_live()["load_source"]


def test_a_reset_is_flushed_when_the_last_job_before_it_is_reported(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, slow_copies: Callable[[float], None]
) -> None:
    engine = rig.launch(SHAPE)
    slow_copies(0.02)
    seen = watch(engine, monkeypatch)
    engine.reset_connector()
    expected = 1 if detect_live()["reset_fence"] else 0
    assert seen.names().count("on_reset_flushed") == expected, "nothing was under way"

    engine.serve("cold", TOKENS)
    engine.submit("stores", prompt(tokens=16 * 8 + 3, seed=2))
    engine.step()
    assert engine.scheduler.connector.has_pending_push_work()
    engine.reset_connector()
    assert seen.names().count("on_reset_flushed") == expected, "a job is under way"
    engine.run()
    assert seen.names().count("on_reset_flushed") == 2 * expected


@pytest.mark.usefixtures("copies_across_steps")
def test_a_preempted_request_offers_its_chunks_again_where_the_release_does(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.launch(Shape(groups=(mla(layers=2),), blocks=20, blocks_per_chunk=1))
    monkeypatch.setattr(engine.manager, "lookup", lambda *_: engine.manager._words.miss)  # or it would be loaded
    seen = watch(engine, monkeypatch)
    engine.submit("stays", prompt(tokens=16 * 10, seed=1), output_tokens=20)
    engine.submit("goes", prompt(tokens=16 * 9, seed=2), output_tokens=20)
    engine.run()
    assert any("goes" in step.preempted for step in engine.steps)
    offers = [call.arguments for call in seen.calls if call.name == "prepare_store"]
    offered = [next(iter(keys)) for keys, context in offers if context.req_id == "goes"]
    again = detect_live()["manager_lock"]  # it begins anew with each match since the same release
    assert offered.count(offered[0]) == (2 if again else 1)
    rig.gateway.await_objects(19)
