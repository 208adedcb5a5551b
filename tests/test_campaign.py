"""The fault campaign's own bookkeeping, without an engine: what is counted, for whom, and what a verdict needs."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from campaign.gateways import SLOT_BYTES, GatewayOfCampaign
from campaign.kinds import DAMAGES, Draw
from campaign.outcome import EACH_KIND_MIN, KINDS_MIN, LONG_S, Outcome
from stand.runs import Options
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.sockets import socket_for_port
from xkv_store.testing.peer import attached
from xkv_store.wire import StoreStatus

if TYPE_CHECKING:
    from pathlib import Path

GEOMETRY = Geometry(SLOT_BYTES)
KINDS = tuple(f"kind {number}" for number in range(KINDS_MIN + 2))
SHAPES = ("one", "two")


def put(gateway: GatewayOfCampaign, number: int) -> StoreStatus:
    """One object from a client of its own."""
    with attached(socket_for_port(gateway.sockets, gateway.extra["xkv.port"]), geometry=GEOMETRY) as peer:
        key = ObjectKey(bytes(16), 0, number.to_bytes(32, "little"), 0)
        return peer.put(b"x" * 3 * GEOMETRY.fragment_bytes, key.encode())


def test_effects_are_those_of_the_medium_that_had_them(tmp_path: Path) -> None:
    """An event of a batch may end a gateway: what its medium did before must not count for the next one's."""
    seen: Counter[str] = Counter(direct_refused=1)
    media = Draw(("medium_read_only", "direct_refused"), random.Random(1), seen)
    with closing(
        GatewayOfCampaign(tmp_path / "phase", capacity="8MiB", rng=random.Random(1), media=media, proves=True)
    ) as gateway:
        assert gateway.medium == "medium_read_only"
        assert put(gateway, 1) is StoreStatus.FAILED
        seen["medium_read_only"] = 2
        assert gateway.strike("restart_within_a_heartbeat") in (0, 1)
        assert gateway.medium == "direct_refused"
        found = gateway.take_effects()
        assert found["medium_read_only"] >= 1
        assert found["direct_refused"] == 2, "one for each database"
        assert not +gateway.take_effects(), "each effect is taken once"
        assert put(gateway, 2) is StoreStatus.CONFIRMED
        for number, kind in enumerate(DAMAGES, 3):
            if kind != "lies_stale":  # there is nothing older that it could be
                assert put(gateway, number) is StoreStatus.CONFIRMED
                assert gateway.strike(kind) > 0, kind


def outcome(seconds: int, *, each: int, kinds: int = len(KINDS), canary: bool = False) -> Outcome:
    found = Outcome("release", Options(seconds, 0, canary), KINDS, SHAPES, requests=9)
    found.faults.update(dict.fromkeys(KINDS[:kinds], each))
    found.restored.update(dict.fromkeys(SHAPES, 3))
    return found


def test_a_long_run_owes_every_kind_and_a_short_one_some() -> None:
    assert outcome(LONG_S, each=EACH_KIND_MIN).passed
    assert not outcome(LONG_S, each=EACH_KIND_MIN - 1).passed
    assert outcome(60, each=1, kinds=KINDS_MIN).passed
    assert not outcome(60, each=1, kinds=KINDS_MIN - 1).passed


@pytest.mark.parametrize("name", ["wrong", "engine_deaths", "stuck", "leaks"])
def test_one_thing_that_should_not_be_is_no_pass(name: str) -> None:
    found = outcome(60, each=1)
    setattr(found, name, 1)
    assert not found.passed
    assert f"{name} 1" in found.verdict()


def test_what_restored_nothing_proves_nothing() -> None:
    found = outcome(LONG_S, each=EACH_KIND_MIN)
    found.restored = Counter(one=5)
    assert not found.passed
    assert "nothing of two was restored" in found.verdict()
    short = outcome(60, each=1)
    short.restored = Counter()
    assert not short.passed


def test_a_canary_that_finds_nothing_is_no_pass() -> None:
    found = outcome(60, each=1, canary=True)
    assert not found.passed
    found.wrong = 1
    assert found.passed
