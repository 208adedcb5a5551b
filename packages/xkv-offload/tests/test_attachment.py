"""What sessions attach as: one gateway for all ranks, or one for each with its part of the ring."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xkv_compat.vllm_symbols import ConfigView
from xkv_offload import attachment as attachment_module
from xkv_offload.asked_card import NO_DENIALS
from xkv_offload.attachment import (
    SchedulerCard,
    attach_rank,
    attach_scheduler,
    attachment,
    await_descriptors,
    gateways,
    rank_region,
)
from xkv_offload.config import Config, parse
from xkv_store.client import Client
from xkv_store.errors import UserError
from xkv_store.ring import RingUse
from xkv_store.sockets import socket_for_port
from xkv_store.testing.processes import PORT, running_gateway
from xkv_store.tool import Tool
from xkv_store.wire import Role

SLOT = 65_536


def view(*, rank: int = 0, world_size: int = 4) -> ConfigView:
    return ConfigView(
        engine_id="e",
        extra_config={},
        model="m",
        cache_dtype="float32",
        groups=(),
        tokens_per_hash=16,
        blocks_per_chunk=1,
        rank=rank,
        world_size=world_size,
        tp_size=world_size,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        replicated_hint=None,
        canonical_layout=False,
        kv_cache_layout=None,
        kv_bytes_per_block=None,
    )


def config(folder: Path, **extra: Any) -> Config:
    keys = {name.replace("__", "."): value for name, value in extra.items()}
    return parse(
        {
            "xkv.port": PORT,
            "xkv.socket_dir": str(folder),
            "xkv.fragment_bytes": SLOT - 1024,
            "xkv.ring_bytes": 128 * SLOT,
            "xkv.load_reserve_bytes": 64 * SLOT,
            "xkv.staged_bytes": 32 * SLOT,
            "xkv.connect_timeout_ms": 5000,
            **keys,
        }
    )


def test_ranks_share_one_gateway_and_its_ring(tmp_path: Path) -> None:
    one = config(tmp_path)
    assert gateways(view(), one) == 1
    rank = attachment(view=view(rank=2), config=one, staged_bytes=SLOT, ring_use=RingUse.LEASED)
    assert (rank.socket.name, rank.rank, rank.world_size) == (f"{PORT}.sock", 2, 4)
    assert (rank.ring_bytes, rank.load_reserve_bytes) == (128 * SLOT, 64 * SLOT)
    scheduler = attachment(view=view(rank=2), config=one, is_scheduler=True)
    assert (scheduler.role, scheduler.rank, scheduler.world_size) == (Role.SCHEDULER, 0, 4)


def test_a_rank_with_a_gateway_of_its_own_is_alone_there_with_its_part_of_the_ring(tmp_path: Path) -> None:
    one = replace(config(tmp_path), port_per_rank=True)
    assert gateways(view(), one) == 4
    rank = attachment(view=view(rank=2), config=one, gateway=2, staged_bytes=SLOT, ring_use=RingUse.LEASED)
    assert (rank.socket.name, rank.rank, rank.world_size) == (f"{PORT + 2}.sock", 0, 1)
    scheduler = attachment(view=view(), config=one, gateway=2, is_scheduler=True)
    assert (scheduler.socket, scheduler.rank, scheduler.world_size) == (rank.socket, 0, 1)
    for own in (rank, scheduler):
        assert (own.ring_bytes, own.load_reserve_bytes) == (32 * SLOT, 16 * SLOT), "the sum is what the keys say"


def test_one_rank_has_all_of_it_either_way(tmp_path: Path) -> None:
    shared, own = (
        attachment(
            view=view(world_size=1),
            config=replace(config(tmp_path), port_per_rank=each),
            staged_bytes=SLOT,
            ring_use=RingUse.LEASED,
        )
        for each in (False, True)
    )
    assert shared == own


@pytest.mark.parametrize("is_verified", [False, True])
def test_a_rank_has_as_much_of_its_own_ring_as_of_a_shared_one(tmp_path: Path, is_verified: bool) -> None:
    shared, own = (
        rank_region(
            view=view(),
            config=replace(config(tmp_path), port_per_rank=each),
            is_verified=is_verified,
            use=RingUse.LEASED,
        )
        for each in (False, True)
    )
    assert (own.store_slots, own.lease_slots) == (shared.store_slots, shared.lease_slots)
    assert own.load_slots == own.lease_slots


@pytest.mark.parametrize("each", [False, True])
def test_a_ring_too_small_for_its_ranks_is_an_error_that_speaks_of_the_whole(tmp_path: Path, each: bool) -> None:
    small = replace(config(tmp_path), ring_bytes=6 * SLOT, port_per_rank=each)
    with pytest.raises(UserError, match=f"xkv.ring_bytes is {6 * SLOT}: 4 ranks need at least {8 * SLOT}"):
        rank_region(view=view(), config=small, is_verified=False, use=RingUse.LEASED)


def test_a_gateway_that_is_missing_is_named_and_the_others_are_left(tmp_path: Path) -> None:
    with running_gateway(tmp_path):
        one = replace(config(tmp_path / "sockets"), port_per_rank=True, connect_timeout_ms=300)
        with closing(attach_rank(view=view(world_size=2), config=one, staged_bytes=0, use=RingUse.LEASED)):
            with pytest.raises(UserError, match=f"{PORT + 1}.sock.*ports {PORT} to {PORT + 1}"):
                attach_scheduler(view=view(world_size=2), config=one)
            with pytest.raises(UserError, match=f"xkv gateway run --port {PORT + 1}"):
                attach_rank(view=view(rank=1, world_size=2), config=one, staged_bytes=0, use=RingUse.LEASED)
            with closing(Tool(socket_for_port(tmp_path / "sockets", PORT))) as tool:
                sessions = json.loads(tool.status())["sessions"]
        assert [session["role"] for session in sessions] == ["rank", "tool"]


def test_a_scheduler_that_is_back_before_its_ranks_neither_hits_nor_stores(tmp_path: Path) -> None:
    """After a restart of the gateway each comes back by itself; what one rank cannot load, the engine cannot."""
    one = config(tmp_path / "sockets")

    def rank_client(rank: int) -> Client:
        return attach_rank(view=view(rank=rank, world_size=2), config=one, staged_bytes=0, use=RingUse.LEASED)

    def becomes(wanted: bool, asked: Callable[[], bool]) -> bool:
        end = time.monotonic() + 10
        while asked() is not wanted and time.monotonic() < end:
            time.sleep(0.001)
        return asked() is wanted

    with ExitStack() as stack:
        with running_gateway(tmp_path):
            first, second = (stack.enter_context(closing(rank_client(rank))) for rank in range(2))
            (client,) = attach_scheduler(view=view(world_size=2), config=one)
            card = SchedulerCard(stack.enter_context(closing(client)))
            assert becomes(True, card.alive)
        assert becomes(False, card.alive)
        second.close()
        with running_gateway(tmp_path):
            assert becomes(True, client.alive)
            assert becomes(True, first.alive)
            assert not card.alive(), "rank 1 is not there"
            assert card.denials() is NO_DENIALS
            first.control.deny(0, 5, 6)
            assert card.denials() == (((5, 6),), {}), "the page is that of the gateway's life before"
            assert card.denials() is NO_DENIALS
            with closing(rank_client(1)):
                assert becomes(True, card.alive)
            assert becomes(False, card.alive)


@dataclass
class FakeClient:
    """Its only rank has published, or never will."""

    text: str
    waited: float = -1.0

    def await_namespaces(self, world_size: int, timeout_s: float) -> Mapping[int, tuple[bytes, str]]:
        assert world_size == 1
        self.waited = timeout_s
        if not self.text:
            raise UserError("no namespace from rank 0 of 1")
        return {0: (bytes(16), self.text)}


def test_what_ranks_publish_is_collected_from_each_gateway() -> None:
    clients: list[Any] = [FakeClient(text) for text in ("zero", "one", "two")]
    assert await_descriptors(clients, world_size=3, timeout_s=2) == ["zero", "one", "two"]


def test_ranks_that_publish_nothing_are_named_after_one_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[Any] = [FakeClient(text) for text in ("", "one", "")]
    now = iter([100.0, 100.0, 200.0, 200.0])
    monkeypatch.setattr(attachment_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with pytest.raises(UserError, match=r"no namespace from rank 0, 2 of 3 within 2\.0 s"):
        await_descriptors(clients, world_size=3, timeout_s=2)
    assert [client.waited for client in clients] == [2.0, 0.5, 0.5]
