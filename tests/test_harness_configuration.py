"""What an engine is told at its start of a chunk that it would not get.

If this goes, nothing shows any more that a release which reads `block_size` alone does not store block by block,
unsaid, what was asked for in larger chunks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from harness.shapes import Shape, full
from harness.story import prompt
from xkv_compat.features import detect_live
from xkv_offload.copy import HostMover
from xkv_store.client import Client
from xkv_store.errors import UserError

if TYPE_CHECKING:
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

ONE_BLOCK = Shape(groups=(full(),), blocks=32)
BLOCK = ONE_BLOCK.groups[0].block_tokens


def test_blocks_per_chunk_alone_is_read_or_refused(rig: Rig) -> None:
    extra = {"blocks_per_chunk": 2}
    if not detect_live()["blocks_per_chunk_key"]:
        with pytest.raises(UserError, match=rf"blocks_per_chunk = 2 .* block_size = {2 * BLOCK} \(tokens\)"):
            rig.launch(ONE_BLOCK, extra=extra)
        extra = {"block_size": 2 * BLOCK}
    rig.launch(ONE_BLOCK, extra=extra).serve("one", prompt(tokens=4 * BLOCK + 1, seed=1))
    assert rig.gateway.await_objects(2)["objects"] == 2


def test_both_given(rig: Rig) -> None:
    """Where vLLM reads both it is vLLM's own error; where it reads one, the other must say the same."""
    extra = {"blocks_per_chunk": 2, "block_size": 2 * BLOCK}
    if detect_live()["blocks_per_chunk_key"]:
        with pytest.raises(ValueError, match="Specify only one of 'block_size' or 'blocks_per_chunk'"):
            rig.launch(ONE_BLOCK, extra=extra)
        return
    with pytest.raises(UserError, match=f"give block_size = {3 * BLOCK} "):
        rig.launch(ONE_BLOCK, extra={**extra, "blocks_per_chunk": 3})
    rig.launch(ONE_BLOCK, extra=extra).serve("one", prompt(tokens=4 * BLOCK + 1, seed=1))
    assert rig.gateway.await_objects(2)["objects"] == 2


def test_a_start_that_fails_leaves_nothing_attached(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who starts an engine again in the same process has the gateway's place and the GPU's registration free."""
    closed: list[HostMover] = []

    def fail(_: Client, namespace: bytes, descriptor: str) -> None:
        raise UserError(f"{descriptor[:1]} is refused, and {len(namespace)} bytes with it")

    monkeypatch.setattr(HostMover, "close", lambda mover: closed.append(mover))  # noqa: PLW0108 - it is to be bound
    monkeypatch.setattr(Client, "publish_namespace", fail)
    with pytest.raises(UserError, match="16 bytes with it"):
        rig.launch(ONE_BLOCK)
    assert len(closed) == 1
    end = time.monotonic() + 5
    while any(session["role"] != "tool" for session in rig.gateway.status()["sessions"]):
        assert time.monotonic() < end, "the rank is attached still"
        time.sleep(0.01)
