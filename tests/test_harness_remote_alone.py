"""A card that is the remote alone, on every release: an engine hits what lies proved in its ring, and no load fails.

If these go, nothing shows any more that each release verifies hits there, restores what another machine has stored, and
computes what the remote has dropped or spoilt between a lookup and its load. The pool is a folder.
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
REMOTE = ("--remote", "mooncake://127.0.0.1:1?host=here&memory=16MiB")
PENDING_MS = 400
WAIT_S_MAX = 20.0


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "library"), *sys.path])
    return fake_library.make(tmp_path / "library")


@pytest.fixture
def hosts(tmp_path: Path, pool: Path) -> Iterator[tuple[Gateway, Gateway]]:
    """Two gateways that are there for one remote, and nothing else."""
    assert pool.is_dir()
    with (
        closing(Gateway(tmp_path / "one", options=REMOTE, alone=True)) as one,
        closing(Gateway(tmp_path / "other", options=REMOTE, alone=True)) as other,
    ):
        for gateway in (one, other):
            await_up(gateway)
        yield one, other


def await_up(gateway: Gateway) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while gateway.status()["remote"]["state"] != "up":
        assert time.monotonic() < deadline, gateway.status()["remote"]
        time.sleep(0.01)


def stored(rig: Rig, shape: Shape, gateway: Gateway) -> int:
    """Objects of TOKENS that an engine has stored through this gateway, which the remote has."""
    engine = rig.launch(shape, extra=gateway.extra)
    engine.serve("cold", TOKENS)
    objects = shape.ranks * sum(map(len, offered(shape, len(TOKENS))))
    gateway.await_objects(objects)
    assert gateway.status()["counters"]["remote_stores"] == objects
    rig.end(engine)
    return objects


@pytest.mark.parametrize("shape", [PLAIN, GROUPS, RANKS], ids=["one group", "windows", "ranks"])
def test_what_one_machine_has_stored_another_restores(
    rig: Rig, hosts: tuple[Gateway, Gateway], pool: Path, shape: Shape
) -> None:
    one, other = hosts
    assert stored(rig, shape, one) == len(list(pool.glob("xkv1-*"))), "all of it lies there, and nothing lies here"
    engine = rig.launch(shape, extra=other.extra)
    waited, failed = PROCESS_COUNTERS["lookup_remote"], PROCESS_COUNTERS["load_failures"]
    restored = engine.serve("across", TOKENS, output_tokens=20)
    assert restored.loaded(0) == [tuple(range(BLOCKS))]
    assert PROCESS_COUNTERS["lookup_remote"] > waited
    counters = other.status()["counters"]
    assert counters["remote_fetches"] == counters["get_ok"] > 0
    engine.forget()
    asked = counters["remote_asked_found"]
    again = engine.serve("again", TOKENS, output_tokens=20)
    assert again.loaded(0) == [tuple(range(BLOCKS))]
    assert other.status()["counters"]["remote_asked_found"] == asked, "it is listed now"
    assert PROCESS_COUNTERS["load_failures"] == failed


def test_what_is_listed_is_not_stored_again(rig: Rig, hosts: tuple[Gateway, Gateway]) -> None:
    one, _ = hosts
    objects = stored(rig, PLAIN, one)
    engine = rig.launch(PLAIN, extra=one.extra)
    assert engine.serve("again", TOKENS, output_tokens=3).loaded(0) == [tuple(range(BLOCKS))]
    engine.await_stores()
    counters = one.status()["counters"]
    assert counters["remote_stores"] == objects
    assert counters.get("put_held", 0) == 0, "no page was copied for it"


def test_what_the_remote_has_dropped_is_computed_and_stored_anew(
    rig: Rig, hosts: tuple[Gateway, Gateway], pool: Path
) -> None:
    """It is listed, and gone: the read that comes before the hit says so, and no load fails."""
    one, _ = hosts
    objects = stored(rig, PLAIN, one)
    for path in pool.glob("xkv1-*"):
        path.unlink()
    engine = rig.launch(PLAIN, extra=one.extra)
    failed = PROCESS_COUNTERS["load_failures"]
    computed = engine.serve("dropped", TOKENS, output_tokens=3)
    assert computed.loads == []
    assert computed.computed_tokens >= len(TOKENS)
    engine.await_stores()
    one.await_objects(objects)
    engine.forget()
    assert engine.serve("again", TOKENS, output_tokens=3).loaded(0) == [tuple(range(BLOCKS))]
    assert PROCESS_COUNTERS["load_failures"] == failed


def test_wrong_bytes_are_computed(rig: Rig, hosts: tuple[Gateway, Gateway], pool: Path) -> None:
    one, other = hosts
    stored(rig, PLAIN, one)
    for path in pool.glob("xkv1-*"):
        spoilt = bytearray(path.read_bytes())
        spoilt[-5_000] ^= 1
        path.write_bytes(spoilt)
    engine = rig.launch(PLAIN, extra=other.extra)
    computed = engine.serve("spoilt", TOKENS, output_tokens=3)
    assert computed.loads == []
    assert computed.computed_tokens >= len(TOKENS)
    assert other.status()["counters"]["remote_fetches_corrupt"] > 0


@pytest.mark.parametrize("lane", ["look", "load"])
def test_a_remote_that_hangs_costs_a_request_its_bounds(
    rig: Rig, hosts: tuple[Gateway, Gateway], pool: Path, lane: str
) -> None:
    one, other = hosts
    stored(rig, PLAIN, one)
    engine = rig.launch(PLAIN, extra={**other.extra, "xkv.pending_timeout_ms": PENDING_MS})
    (pool / f"hang-{lane}").touch()
    began = time.monotonic()
    computed = engine.serve("hangs", TOKENS, output_tokens=3)
    assert computed.loads == []
    assert time.monotonic() - began < 2 * PENDING_MS / 1000 + 5.0
    deadline = time.monotonic() + WAIT_S_MAX
    while not other.status()["counters"].get(f"remote_late_{lane}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (pool / f"hang-{lane}").unlink()
    await_up(other)
    engine.forget()
    deadline = time.monotonic() + WAIT_S_MAX
    while not engine.serve("there", TOKENS, output_tokens=3).loads:  # what came to nothing is not asked again for 1 s
        assert time.monotonic() < deadline
        engine.forget()
