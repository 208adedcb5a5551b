"""kill -9 of the gateway at every named point, with work in flight, and a restart on the same card.

What was confirmed is readable, byte for byte; what was not is a miss, or whole; nothing else is possible.
"""

from __future__ import annotations

import random
import signal
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_store import wire
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.testing.peer import Peer
from xkv_store.testing.processes import running_gateway
from xkv_store.wire import LoadStatus, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xkv_store.testing.processes import GatewayProcess

GEOMETRY = Geometry(65_536)
LENGTH = 33 * GEOMETRY.fragment_bytes + 100  # two databases share an object from 32 slots on
SPREAD = ("--databases", "2")


def content_of(seed: int) -> bytes:
    return random.Random(seed).randbytes(LENGTH)


def key_of(number: int) -> bytes:
    return ObjectKey(b"k" * 16, 0, number.to_bytes(32, "little"), 0).encode()


@contextmanager
def attached(gateway: GatewayProcess, fds: tuple[int, ...] = ()) -> Iterator[Peer]:
    peer = Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY)
    try:
        peer.attach(fds=fds)
        yield peer
    finally:
        peer.close()


def read(gateway: GatewayProcess, number: int) -> bytes | None:
    """The object's bytes, None for a miss; nothing else may come."""
    with attached(gateway) as peer:
        status, content = peer.get(LENGTH, key_of(number))
    assert status in (LoadStatus.OK, LoadStatus.MISS), status
    return content if status is LoadStatus.OK else None


@pytest.mark.parametrize(
    ("point", "survives"),
    [
        ("put.received", False),
        ("put.before_write", False),
        ("put.mid_write", False),
        ("put.written", False),
        ("put.before_commit", False),
        ("put.committed", True),
        ("put.confirmed", True),
    ],
)
def test_killed_while_storing(tmp_path: Path, point: str, survives: bool) -> None:
    with running_gateway(tmp_path, options=SPREAD) as gateway, attached(gateway) as peer:
        assert peer.put(content_of(1), key_of(1)) is StoreStatus.CONFIRMED
        reached = gateway.times_reached(point)
        gateway.hold(point)
        peer.begin_put(content_of(2), key_of(2), first_slot=40)
        gateway.await_point(point, reached + 1)
        gateway.kill()
        assert peer.next() is None, "it was answered before it was confirmed"
    with running_gateway(tmp_path, options=SPREAD) as gateway:
        assert read(gateway, 1) == content_of(1)
        assert read(gateway, 2) == (content_of(2) if survives else None)
        again = StoreStatus.HELD if survives else StoreStatus.CONFIRMED
        with attached(gateway) as peer:
            assert peer.put(content_of(2), key_of(2)) is again
        assert read(gateway, 2) == content_of(2)


@pytest.mark.parametrize("point", ["put.mid_write", "put.written", "put.before_commit"])
def test_killed_while_replacing(tmp_path: Path, point: str) -> None:
    """The former content stays until the new one is confirmed."""
    with running_gateway(tmp_path, options=SPREAD) as gateway, attached(gateway) as peer:
        assert peer.put(content_of(1), key_of(1)) is StoreStatus.CONFIRMED
        reached = gateway.times_reached(point)
        gateway.hold(point)
        peer.begin_put(content_of(2), key_of(1), first_slot=40, replace=True)
        gateway.await_point(point, reached + 1)
        gateway.kill()
    with running_gateway(tmp_path, options=SPREAD) as gateway:
        assert read(gateway, 1) == content_of(1)


@pytest.mark.parametrize("point", ["get.received", "get.before_read", "get.read", "get.answered"])
def test_killed_while_loading(tmp_path: Path, point: str) -> None:
    with running_gateway(tmp_path, options=SPREAD) as gateway, attached(gateway) as peer:
        assert peer.put(content_of(1), key_of(1)) is StoreStatus.CONFIRMED
        gateway.hold(point)
        peer.begin_get(LENGTH, key_of(1))
        gateway.await_point(point)
        gateway.kill()
    with running_gateway(tmp_path, options=SPREAD) as gateway:
        assert read(gateway, 1) == content_of(1)


@pytest.mark.parametrize("point", ["evict.begin", "evict.committed"])
def test_killed_while_evicting(tmp_path: Path, point: str) -> None:
    """A card that is full; what is evicted is a miss afterwards, what is not is whole, and the card goes on."""
    options = (*SPREAD, "--grace-ms", "0")
    number = 0
    with running_gateway(tmp_path, capacity="16MiB", options=options) as gateway, attached(gateway) as peer:
        gateway.hold(point)
        while not gateway.times_reached(point):
            assert number < 200, "a card of 16 MiB took 200 objects of 2 MB and evicted nothing"
            number += 1
            peer.begin_put(content_of(number), key_of(number), first_slot=40 * (number % 3))
            wait_for_answer_or_point(gateway, peer, point)
        gateway.kill()
    with running_gateway(tmp_path, capacity="16MiB", options=options) as gateway:
        found = {one: read(gateway, one) for one in range(1, number + 1)}
        assert any(found.values())
        assert all(content in (None, content_of(one)) for one, content in found.items())
        with attached(gateway) as peer:
            put_until_confirmed(peer, number + 1)


def wait_for_answer_or_point(gateway: GatewayProcess, peer: Peer, point: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not gateway.times_reached(point):
        with suppress(TimeoutError):
            peer.next(0.05)
            return


def put_until_confirmed(peer: Peer, number: int) -> None:
    """A full card sheds until it has made room."""
    deadline = time.monotonic() + 20
    while (status := peer.put(content_of(number), key_of(number))) is not StoreStatus.CONFIRMED:
        assert status is StoreStatus.SHED
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_finishes_what_is_in_flight(tmp_path: Path) -> None:
    with running_gateway(tmp_path, options=SPREAD) as gateway, attached(gateway) as peer:
        gateway.hold("put.written")
        number = peer.begin_put(content_of(1), key_of(1))
        gateway.await_point("put.written")
        gateway.signal(signal.SIGTERM)
        time.sleep(0.2)
        assert gateway.alive, "it ended with a put in flight"
        gateway.let_go("put.written")
        assert peer.receive(wire.Stored) == wire.Stored(number, (wire.StoredObject(0, StoreStatus.CONFIRMED),))
        assert gateway.wait() == 0
        assert not Path(gateway.ready["socket"]).exists()
    with running_gateway(tmp_path, options=SPREAD) as gateway:
        assert read(gateway, 1) == content_of(1)


def test_a_ring_handed_over_goes_on_in_the_next_life(tmp_path: Path) -> None:
    """Nothing is pinned anew: the same memory serves both lives, and the epoch tells them apart."""
    with ExitStack() as stack:
        with running_gateway(tmp_path, options=SPREAD) as gateway:
            peer = stack.enter_context(attached(gateway))
            first = peer.welcome
            assert peer.put(content_of(1), key_of(1)) is StoreStatus.CONFIRMED
            gateway.kill()
        gateway = stack.enter_context(running_gateway(tmp_path, options=SPREAD))
        heir = stack.enter_context(attached(gateway, peer.fds[:2]))
        second = heir.welcome
        assert peer.ring is not None
        assert heir.ring is not None
        assert heir.ring.identity == peer.ring.identity
        assert (second.epoch, second.store_region) == (first.epoch + 1, first.store_region)
        assert second.boot_id != first.boot_id
        assert heir.get(LENGTH, key_of(1)) == (LoadStatus.OK, content_of(1))
        assert peer.content(LENGTH) == content_of(1), "the old mapping shows what the new life has read"
