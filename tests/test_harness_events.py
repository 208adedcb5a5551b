"""KV events: vLLM's own publisher sends what the card holds, and a subscriber that speaks its protocol reads it.

If these go, nothing shows any more that a router that listens to an engine hears of what its card has confirmed, and of
what has left it.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from harness import release
from harness.offered import offered
from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt
from xkv_compat.features import detect_live
from xkv_store import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.engine import Engine
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

STORAGE = "STORAGE"
CHUNK_BLOCKS = 2
SHAPE = Shape(groups=(mla(),), blocks=96, blocks_per_chunk=CHUNK_BLOCKS)
GROUPS = Shape(groups=(full(), sliding(window=48)), blocks=96, blocks_per_chunk=1)
BLOCKS = 20
TOKENS = prompt(tokens=16 * BLOCKS + 3, seed=1)
HEARD_S_MAX = 10.0


class Subscriber:
    """What vLLM's documentation tells a subscriber to do: topic, number and payload, the batch decoded by its class."""

    def __init__(self, endpoint: str) -> None:
        zmq = importlib.import_module("zmq")  # vLLM's own dependency
        self._events = importlib.import_module("vllm.distributed.kv_events")
        self._decoder: Any = msgspec.msgpack.Decoder(type=self._events.KVEventBatch)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "kv")
        self._next = 0
        self.seen: list[Any] = []

    def await_joined(self, engine: Engine) -> None:
        """A subscription takes a moment, and what was published before is not sent."""
        publisher, batch = engine.scheduler.kv_event_publisher, self._events.KVEventBatch
        end = time.monotonic() + HEARD_S_MAX
        while not self._socket.poll(20):
            publisher.publish(batch(ts=0.0, events=[]))
            assert time.monotonic() < end
        time.sleep(0.2)
        self._next = self._numbers()[-1] + 1

    def _numbers(self) -> list[int]:
        numbers = []
        while self._socket.poll(0):
            topic, number, payload = self._socket.recv_multipart()
            assert topic == b"kv"
            self.seen += self._decoder.decode(payload).events
            numbers.append(int.from_bytes(number, "big"))
        return numbers

    def take(self) -> list[Any]:
        """The events of our medium since the last call; none was lost."""
        time.sleep(0.25)  # the publisher's thread looks every tenth of a second
        for number in self._numbers():
            assert number == self._next
            self._next += 1
        seen, self.seen = self.seen, []
        return [one for one in seen if getattr(one, "medium", None) == STORAGE]

    def close(self) -> None:
        self._socket.close(0)


@contextmanager
def listened(rig: Rig, shape: Shape, **options: Any) -> Iterator[tuple[Engine, Subscriber]]:
    """An engine that publishes, and who listens to it."""
    with tempfile.TemporaryDirectory(prefix="xkv-") as folder:
        endpoint = f"ipc://{Path(folder) / 'events'}"
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": "kv"}
        engine = rig.launch(shape, events=events, **options)
        subscriber = Subscriber(endpoint)
        try:
            subscriber.await_joined(engine)
            yield engine, subscriber
        finally:
            subscriber.close()
            rig.end(engine)


def await_events(engine: Engine, subscriber: Subscriber, wanted: int) -> list[Any]:
    """Steps of a request that is too short to be stored, until so many hashes are told of."""
    found: list[Any] = []
    end = time.monotonic() + HEARD_S_MAX
    while sum(len(one.block_hashes) for one in found) < wanted:
        assert time.monotonic() < end, found
        engine.serve(f"short {time.monotonic_ns()}", prompt(tokens=5, seed=99))
        found += subscriber.take()
    return found


def hashes(events: list[Any]) -> list[Any]:
    return [one for event in events for one in event.block_hashes]


def stored_hashes(engine: Engine) -> list[Any]:
    """As a subscriber sees the keys that were given to be stored."""
    utils = release.names().kv_cache_utils
    keys = [key for step in engine.steps for job in step.store_jobs.values() for key in release.sides(job)[1].keys]
    return [utils.maybe_convert_block_hash(utils.BlockHash(key[:-4])) for key in keys]


def kinds(events: list[Any]) -> set[str]:
    return {type(one).__name__ for one in events}


@pytest.mark.parametrize("shape", [SHAPE, GROUPS], ids=["one group", "windows"])
def test_stored_once_confirmed_and_removed_once_purged(rig: Rig, shape: Shape) -> None:
    objects = sum(map(len, offered(shape, len(TOKENS))))
    with listened(rig, shape) as (engine, subscriber):
        engine.serve("cold", TOKENS)
        status = rig.gateway.await_objects(objects)
        events = await_events(engine, subscriber, objects)
        assert kinds(events) == {"BlockStored"}
        wanted = stored_hashes(engine)
        assert sorted(map(repr, hashes(events))) == sorted(map(repr, wanted))
        assert {one.group_idx for one in events} == set(range(len(shape.groups)))
        if detect_live()["event_locality"]:
            assert {one.locality for one in events} == {"LOCAL"}

        engine.serve("warm", TOKENS)
        assert subscriber.take() == [], "they were announced"

        assert cli.main(["purge", "--socket", str(status["socket"]), "--all", "--yes", "--json"]) == 0
        events = await_events(engine, subscriber, objects)
        assert kinds(events) == {"BlockRemoved"}
        assert sorted(map(repr, hashes(events))) == sorted(map(repr, wanted))


def test_what_another_engine_has_stored_is_announced_when_it_is_found(rig: Rig) -> None:
    first = rig.launch(SHAPE)
    first.serve("cold", TOKENS)
    rig.gateway.await_objects(BLOCKS // CHUNK_BLOCKS)
    wanted = stored_hashes(first)
    rig.end(first)
    with listened(rig, SHAPE) as (engine, subscriber):
        assert engine.serve("restored", TOKENS).loads
        events = await_events(engine, subscriber, BLOCKS // CHUNK_BLOCKS)
        assert kinds(events) == {"BlockStored"}
        assert sorted(map(repr, hashes(events))) == sorted(map(repr, wanted))


def test_a_reset_takes_back_what_was_announced(rig: Rig) -> None:
    with listened(rig, SHAPE) as (engine, subscriber):
        engine.serve("cold", TOKENS)
        rig.gateway.await_objects(BLOCKS // CHUNK_BLOCKS)
        told = hashes(await_events(engine, subscriber, BLOCKS // CHUNK_BLOCKS))
        engine.reset_connector()
        events = await_events(engine, subscriber, BLOCKS // CHUNK_BLOCKS)
        assert kinds(events) == {"BlockRemoved"}
        assert sorted(map(repr, hashes(events))) == sorted(map(repr, told))


def test_events_that_describe_themselves_have_tokens_and_parents(rig: Rig) -> None:
    """Each chunk as all its blocks' hashes with all its tokens, by the framework's own word for each."""
    with listened(rig, SHAPE, extra={"self_describing_kv_events": True}) as (engine, subscriber):
        engine.serve("cold", TOKENS)
        rig.gateway.await_objects(BLOCKS // CHUNK_BLOCKS)
        events = await_events(engine, subscriber, BLOCKS)
        assert [token for one in events for token in one.token_ids] == list(TOKENS[: 16 * BLOCKS])
        assert {one.block_size for one in events} == {16}
        chained = hashes(events)
        assert [one.parent_block_hash for one in events] == [None, *chained[1:-1:CHUNK_BLOCKS]]
        status = rig.gateway.status()
        assert cli.main(["purge", "--socket", str(status["socket"]), "--all", "--yes", "--json"]) == 0
        assert sorted(map(repr, hashes(await_events(engine, subscriber, BLOCKS)))) == sorted(map(repr, chained))


def test_without_events_nothing_is_kept(rig: Rig) -> None:
    engine = rig.launch(SHAPE)
    engine.serve("cold", TOKENS)
    assert engine.manager._announced is None
