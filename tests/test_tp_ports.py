"""A gateway for each rank (`xkv.port_per_rank`): two ranks, two gateways, two cards.

Each rank's objects are on its own card alone; what one of the cards lacks, or cannot give, is a miss, and the next
store puts it right. The harness compares every byte of every rank in every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import release
from harness.failing import BLOCKS, TOKENS, content_of, damage, serve_again
from harness.rig import RING_BYTES
from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt
from xkv_store.client import Client
from xkv_store.errors import UserError
from xkv_store.testing.processes import PORT

if TYPE_CHECKING:
    from harness.engine import Engine, Step
    from harness.gateway import Gateway
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

ALONE = Shape(groups=(full(),), blocks=64, blocks_per_chunk=2, ranks=2)
# Two groups, of which windows are kept at each block: up to 0.29 their hits are verified before they are given.
HYBRID = Shape(groups=(full(), sliding(window=48)), blocks=64, blocks_per_chunk=2, ranks=2, dense=True)
SHAPES = pytest.mark.parametrize("shape", [ALONE, HYBRID], ids=["one group", "two groups"])
RANKS = pytest.mark.parametrize("rank", [0, 1])

OTHER = prompt(tokens=16 * BLOCKS + 3, seed=2)
WHOLE = [tuple(range(BLOCKS))]
CHUNKS = BLOCKS // 2


def objects_of(shape: Shape) -> int:
    """What one card holds of the prompt: each chunk of each group."""
    return len(shape.groups) * CHUNKS


def await_all(rig: Rig, objects: int) -> None:
    for gateway in rig.gateways:
        gateway.await_objects(objects)


def stored(rig: Rig, shape: Shape) -> Engine:
    """An engine in its second launch, with the prompt on both cards."""
    first = rig.launch(shape)
    first.serve("cold", TOKENS)
    await_all(rig, objects_of(shape))
    return rig.relaunch(first)


def counted(gateway: Gateway, name: str) -> int:
    value: int = gateway.status()["counters"].get(name, 0)
    return value


@SHAPES
def test_both_ranks_are_restored_and_each_card_has_its_ranks_objects_alone(two_gateways_rig: Rig, shape: Shape) -> None:
    rig = two_gateways_rig
    engine = stored(rig, shape)
    size = CHUNKS * sum(map(shape.chunk_bytes, range(len(shape.groups))))
    assert [gateway.status()["object_bytes"] for gateway in rig.gateways] == [size, size]
    for block in (0, BLOCKS // 2, BLOCKS - 1):  # each is looked for in all of both cards
        found = [[gateway.copies(content_of(shape, block, rank=rank)) for gateway in rig.gateways] for rank in range(2)]
        assert found == [[1, 0], [0, 1]]

    restored = engine.serve("restored", TOKENS, output_tokens=3)
    assert restored.loaded() == WHOLE
    assert restored.computed_tokens == len(TOKENS) + 2 - BLOCKS * 16
    reads = [counted(gateway, "reads") for gateway in rig.gateways]
    assert reads[0] == reads[1] >= CHUNKS, "each rank's objects were read once, from its own card"


def test_the_rings_together_are_as_large_as_one_would_be(two_gateways_rig: Rig) -> None:
    engine = two_gateways_rig.launch(ALONE)
    rings = [rank.worker.context.client.ring for rank in engine.ranks]
    assert [ring.slots * ring.slot_bytes for ring in rings] == [RING_BYTES // 2] * 2
    assert rings[0].identity != rings[1].identity


def test_each_card_is_told_whose_objects_it_has(two_gateways_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # The adopted namespace with its text, which the card keeps; before it, what each rank says of itself.
    told: list[tuple[str, str, bytes]] = []
    publish = Client.publish_namespace

    def record(client: Client, namespace: bytes, descriptor: str) -> None:
        told.append((client._attachment.role.value, client._attachment.socket.stem, namespace))
        publish(client, namespace, descriptor)

    monkeypatch.setattr(Client, "publish_namespace", record)
    engine = two_gateways_rig.launch(ALONE)
    adopted = engine.manager._namespace
    assert told[2:] == [("scheduler", str(port), adopted) for port in (PORT, PORT + 1)]
    assert [(role, port) for role, port, _ in told[:2]] == [("rank", str(port)) for port in (PORT, PORT + 1)]


@SHAPES
@RANKS
def test_a_killed_gateway_is_a_miss_until_it_is_back(two_gateways_rig: Rig, shape: Shape, rank: int) -> None:
    rig = two_gateways_rig
    engine = stored(rig, shape)
    rig.gateways[rank].kill()
    engine.await_no_gateway()
    down = engine.serve("without it", TOKENS, output_tokens=2)
    assert (down.loads, down.finish_reason) == ([], "length")
    other = engine.serve("nor is anything stored", OTHER, output_tokens=2)
    assert other.finish_reason == "length"
    assert rig.gateways[1 - rank].status()["objects"] == objects_of(shape)

    rig.gateways[rank].start()
    engine.await_gateway()
    engine.forget()
    assert engine.serve("what it held is there", TOKENS, output_tokens=2).loaded() == WHOLE
    engine.forget()
    assert engine.serve("stored now", OTHER, output_tokens=2).loads == []
    engine.await_stores()
    await_all(rig, 2 * objects_of(shape))
    engine.forget()
    assert engine.serve("and hit", OTHER, output_tokens=2).loaded() == WHOLE


@SHAPES
@RANKS
def test_a_gateway_killed_between_hit_and_load(two_gateways_rig: Rig, shape: Shape, rank: int) -> None:
    rig = two_gateways_rig
    engine = stored(rig, shape)
    gateway = rig.gateways[rank]
    request = engine.submit("hit", TOKENS, output_tokens=2)
    if release.channel(shape) == "verified":
        gateway.process.hold("get.before_read")
        engine.step()
        gateway.process.await_point("get.before_read")
        gateway.kill()
    else:

        def kill(step: Step) -> None:
            if step.load_jobs:
                gateway.kill()

        engine.step(before_execute=kill)
    engine.run()
    assert request.finish_reason == "length"
    engine.await_no_gateway()
    engine.forget()
    assert engine.serve("without it", TOKENS).loads == []

    gateway.start()
    engine.await_gateway()
    serve_again(engine, "stored anew where it was denied")
    assert serve_again(engine, "whole again") == WHOLE


@SHAPES
@RANKS
def test_one_shard_that_is_gone_is_a_miss_and_is_stored_again(two_gateways_rig: Rig, shape: Shape, rank: int) -> None:
    rig = two_gateways_rig
    engine = stored(rig, shape)
    damage(rig, shape, block=11, rank=rank)
    assert [gateway.drop_damaged() for gateway in rig.gateways] == [1 - rank, rank]
    rig.gateways[rank].await_objects(objects_of(shape) - 1)
    before = [counted(gateway, "puts_confirmed") for gateway in rig.gateways]

    request = engine.serve("met it", TOKENS, output_tokens=2)
    assert (request.finish_reason, request.loaded()) == ("length", [tuple(range(10))])
    assert [sorted(one.failed_blocks) for one in engine.ranks] == [[], []], "a miss, and no failed load"
    engine.await_stores()
    await_all(rig, objects_of(shape))
    stored_again = [counted(gateway, "puts_confirmed") - was for gateway, was in zip(rig.gateways, before, strict=True)]
    assert stored_again == [1 - rank, rank], "what is there already is not written again"
    assert serve_again(engine, "whole again") == WHOLE


@SHAPES
@RANKS
def test_a_corrupt_shard_is_denied_and_stored_anew(two_gateways_rig: Rig, shape: Shape, rank: int) -> None:
    rig = two_gateways_rig
    engine = stored(rig, shape)
    damage(rig, shape, block=11, rank=rank)
    request = engine.serve("hit by it", TOKENS, output_tokens=2)
    assert request.finish_reason == "length"
    whole, good = WHOLE[0], tuple(range(10))
    expected = {"request_errors": [whole, good], "block_errors": [whole], "verified": [good]}[release.channel(shape)]
    assert request.loaded() == expected
    assert [counted(gateway, "dropped_corrupt") for gateway in rig.gateways] == [1 - rank, rank]
    serve_again(engine, "after it")
    assert serve_again(engine, "whole again") == WHOLE


def test_mla_has_a_copy_on_each_card(two_gateways_rig: Rig) -> None:
    # `auto` would choose one object for both; each rank reads its own gateway, so each writes.
    shape = Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2, ranks=2)
    engine = stored(two_gateways_rig, shape)
    assert engine.serve("restored", TOKENS).loaded() == WHOLE


def test_one_rank_needs_no_second_gateway(rig: Rig) -> None:
    shape = Shape(groups=(full(),), blocks=64, blocks_per_chunk=2)
    first = rig.launch(shape, extra={"xkv.port_per_rank": True})
    first.serve("cold", TOKENS)
    rig.gateway.await_objects(CHUNKS)
    for extra in ({}, {"xkv.port_per_rank": True}):
        first = rig.relaunch(first, extra=extra)
        assert first.serve("restored", TOKENS).loaded() == WHOLE, "with the key and without it, they are the same"


def test_a_gateway_that_is_missing_at_the_start_is_named(rig: Rig) -> None:
    with pytest.raises(UserError, match=f"{PORT + 1}.sock.*xkv gateway run --port {PORT + 1}.*xkv.port_per_rank"):
        rig.launch(ALONE, extra={"xkv.port_per_rank": True, "xkv.connect_timeout_ms": 300})
    assert [session["role"] for session in rig.gateway.status()["sessions"]] == ["tool"], "rank 0 has left"


def test_one_object_for_all_ranks_is_refused(two_gateways_rig: Rig) -> None:
    with pytest.raises(UserError, match=r"xkv\.tp_layout = 'replicated'.*xkv\.port_per_rank"):
        two_gateways_rig.launch(Shape(groups=(mla(),), blocks=64, ranks=2), extra={"xkv.tp_layout": "replicated"})
