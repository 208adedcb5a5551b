"""What one machine has stored another restores, on every release: two gateways with one remote, an engine on each.

If these go, nothing shows any more that each release waits for what is being fetched and then hits, group by group and
rank by rank, nor that a remote that hangs costs a request its bound and no more. The pool is a folder.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from harness.gateway import Gateway
from harness.offered import offered
from harness.shapes import Shape, full, mla, sliding
from harness.story import prompt
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_store.testing import fake_library

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

PLAIN = Shape(groups=(mla(),), blocks=128, blocks_per_chunk=2)
GROUPS = Shape(groups=(full(), sliding(window=48)), blocks=128, blocks_per_chunk=1)
RANKS = Shape(groups=(full(),), blocks=128, blocks_per_chunk=2, ranks=2)
BLOCKS = 20
TOKENS = prompt(tokens=16 * BLOCKS + 3, seed=1)
OTHERS = prompt(tokens=16 * BLOCKS + 3, seed=2)
REMOTE = ("--remote", "mooncake://127.0.0.1:1?host=here&memory=16MiB")
PENDING_MS = 400
WAIT_S_MAX = 20.0


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "library"), *sys.path])
    return fake_library.make(tmp_path / "library")


@pytest.fixture
def hosts(tmp_path: Path, pool: Path) -> Iterator[tuple[Gateway, Gateway]]:
    """Two gateways with one remote."""
    assert pool.is_dir()
    with (
        closing(Gateway(tmp_path / "one", options=REMOTE)) as one,
        closing(Gateway(tmp_path / "other", options=REMOTE)) as other,
    ):
        yield one, other


def await_count(gateway: Gateway, name: str, count: int) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while gateway.status()["counters"].get(name, 0) < count:
        assert time.monotonic() < deadline, gateway.status()["remote"]
        time.sleep(0.01)


def stored(rig: Rig, shape: Shape, gateway: Gateway) -> int:
    """Objects of TOKENS that an engine has stored through this gateway, when the remote has them."""
    engine = rig.launch(shape, extra=gateway.extra)
    engine.serve("cold", TOKENS)
    objects = shape.ranks * sum(map(len, offered(shape, len(TOKENS))))
    gateway.await_objects(objects)
    await_count(gateway, "remote_stores", objects)
    rig.end(engine)
    return objects


@pytest.mark.parametrize("shape", [PLAIN, GROUPS, RANKS], ids=["one group", "windows", "ranks"])
def test_what_one_machine_has_stored_another_restores(rig: Rig, hosts: tuple[Gateway, Gateway], shape: Shape) -> None:
    one, other = hosts
    stored(rig, shape, one)
    engine = rig.launch(shape, extra=other.extra)
    await_up(other)
    waited = PROCESS_COUNTERS["lookup_remote"]
    restored = engine.serve("across", TOKENS, output_tokens=20)
    assert restored.loaded(0) == [tuple(range(BLOCKS))]
    assert PROCESS_COUNTERS["lookup_remote"] > waited
    # Some releases look up more of a window's group than they load, while they wait.
    assert other.status()["counters"]["remote_fetches"] >= other.status()["counters"]["get_ok"] > 0
    engine.forget()
    asked = other.status()["counters"]["remote_asked_found"]
    again = engine.serve("again", TOKENS, output_tokens=20)
    assert again.loaded(0) == [tuple(range(BLOCKS))]
    assert other.status()["counters"]["remote_asked_found"] == asked, "the card has it now"


def await_up(gateway: Gateway) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while gateway.status()["remote"]["state"] != "up":
        assert time.monotonic() < deadline, gateway.status()["remote"]
        time.sleep(0.01)


def test_what_the_remote_lacks_is_computed_and_asked_for_once(rig: Rig, hosts: tuple[Gateway, Gateway]) -> None:
    """The prefix rule: one batch for all keys of the prompt, and nothing more once the first is surely missing."""
    one, _ = hosts
    await_up(one)
    engine = rig.launch(PLAIN, extra=one.extra)
    computed = engine.serve("cold", TOKENS)
    assert computed.loads == []
    assert computed.computed_tokens >= len(TOKENS)
    asked = one.status()["counters"]["remote_asked_absent"]
    assert asked == BLOCKS // PLAIN.blocks_per_chunk
    assert one.status()["counters"].get("remote_fetches_absent", 0) == 0, "what is not there is not fetched"


@pytest.mark.parametrize("lane", ["look", "load"])
def test_a_remote_that_hangs_costs_a_request_its_bound(
    rig: Rig, hosts: tuple[Gateway, Gateway], pool: Path, lane: str
) -> None:
    one, other = hosts
    stored(rig, PLAIN, one)
    await_up(other)
    engine = rig.launch(PLAIN, extra={**other.extra, "xkv.pending_timeout_ms": PENDING_MS})
    (pool / f"hang-{lane}").touch()
    began = time.monotonic()
    computed = engine.serve("hangs", TOKENS, output_tokens=3)
    assert computed.loads == []
    assert time.monotonic() - began < PENDING_MS / 1000 + 5.0
    await_count(other, f"remote_late_{lane}", 1)
    (pool / f"hang-{lane}").unlink()
    await_up(other)
    served = engine.serve("others", OTHERS, output_tokens=3)
    assert served.loads == []
    engine.await_stores()
    engine.forget()
    assert engine.serve("held", OTHERS, output_tokens=3).loaded(0) == [tuple(range(BLOCKS))], "the card is as ever"


def test_wrong_bytes_of_the_remote_are_computed(rig: Rig, hosts: tuple[Gateway, Gateway], pool: Path) -> None:
    one, other = hosts
    stored(rig, PLAIN, one)
    for path in pool.glob("xkv1-*"):
        spoilt = bytearray(path.read_bytes())
        spoilt[-5_000] ^= 1
        path.write_bytes(spoilt)
    await_up(other)
    engine = rig.launch(PLAIN, extra=other.extra)
    computed = engine.serve("spoilt", TOKENS, output_tokens=3)
    assert computed.loads == []
    assert computed.computed_tokens >= len(TOKENS)
    assert other.status()["counters"]["remote_fetches_corrupt"] > 0


def test_an_engine_of_a_gateway_without_a_remote_asks_nothing(rig: Rig) -> None:
    engine = rig.launch(PLAIN)
    waited = PROCESS_COUNTERS["lookup_remote"]
    engine.serve("cold", TOKENS)
    assert PROCESS_COUNTERS["lookup_remote"] == waited
    assert not [name for name in rig.gateway.status()["counters"] if name.startswith("remote")]
