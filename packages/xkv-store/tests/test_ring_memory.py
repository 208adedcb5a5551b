"""An engine's ring is in memory once, however many of its ranks and whoever else map it."""

from __future__ import annotations

import multiprocessing
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from xkv_store.client import Attachment, Client
from xkv_store.doctor.limits import gather_huge_pages
from xkv_store.geometry import HEADER_BYTES
from xkv_store.ring import RingUse
from xkv_store.sockets import socket_for_port
from xkv_store.testing.processes import PORT, running_gateway
from xkv_store.wire import Role

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

RANKS = 8
RING_BYTES = 32 << 20
SLOT_BYTES = 65_536
ANSWER_S_MAX = 60.0
KIB = 1_024


def ring_of(process_id: int | str, figures: str = "Rss|Pss", *, inode: str = r"\d+") -> tuple[int, ...]:
    """Bytes of the ring that a process has in memory, and its share of them (Rss and Pss of the mapping)."""
    text = Path(f"/proc/{process_id}/smaps").read_text(encoding="utf-8")
    (mapping,) = re.findall(rf" {inode} +/memfd:xkv-ring[^\n]*\n(?:[A-Z]\w+:[^\n]*\n)+", text)
    return tuple(int(kib) * KIB for kib in re.findall(rf"^(?:{figures}): +(\d+) kB", mapping, re.MULTILINE))


def attached(folder: Path, rank: int, *, ranks: int, staged_bytes: int = 0) -> Client:
    """A rank."""
    return Client.attach(
        Attachment(
            socket=socket_for_port(folder / "sockets", PORT),
            engine_id="engine",
            role=Role.RANK,
            rank=rank,
            world_size=ranks,
            ring_bytes=RING_BYTES,
            load_reserve_bytes=RING_BYTES // 2,
            staged_bytes=staged_bytes,
            ring_use=RingUse.LEASED,
            fragment_bytes=SLOT_BYTES - HEADER_BYTES,
            connect_timeout_ms=30_000,
            heartbeat_timeout_ms=3_000,
            embedded=None,
        )
    )


def be_a_rank(rank: int, folder: Path, pipe: Connection) -> None:
    """Attach, use every slot of the ring as a rank may, and say what that took; end when told to."""
    client = attached(folder, rank, ranks=RANKS)
    own = client.store_region
    client.ring.array[own.first : own.first + own.count] = 1  # what a rank stores it writes there
    pipe.send("written")
    pipe.recv()
    total = int(client.ring.array.sum())  # and it may load from anywhere
    pipe.send(total)
    pipe.recv()
    pipe.send(ring_of("self"))
    pipe.recv()
    client.close()


def test_eight_ranks_have_one_ring_in_memory(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    with running_gateway(tmp_path, slot_bytes=SLOT_BYTES) as gateway:
        pipes, processes = [], []
        try:
            for rank in range(RANKS):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=be_a_rank, args=(rank, tmp_path, theirs))
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)

            def answers() -> list[object]:
                assert all(pipe.poll(ANSWER_S_MAX) for pipe in pipes)
                found = [pipe.recv() for pipe in pipes]
                for pipe in pipes:
                    pipe.send("go on")
                return found

            assert answers() == ["written"] * RANKS
            stored = RING_BYTES // 2
            assert answers() == [stored] * RANKS, "every rank sees what each has written"
            rss, pss = zip(*answers(), strict=True)
            assert set(rss) == {RING_BYTES}
            ours_too = ring_of(gateway.pid)[1]
            assert abs(sum(pss) + ours_too - RING_BYTES) < RANKS * os.sysconf("SC_PAGE_SIZE"), "it is there once"
        finally:
            for process in processes:
                process.join(ANSWER_S_MAX)
                process.kill()
                process.join()
        assert [process.exitcode for process in processes] == [0] * RANKS


def test_a_rank_that_has_attached_has_all_that_its_gpu_will_pin_in_huge_pages(tmp_path: Path) -> None:
    """What the scheduler stages in as well: pages that a GPU has pinned stay as small as they are."""
    with running_gateway(tmp_path, slot_bytes=SLOT_BYTES):
        client = attached(tmp_path, 0, ranks=1, staged_bytes=RING_BYTES // 4)
        try:
            assert client.load_region.numbers.stop < client.ring.slots, "the staged slots are behind them"
            inode = str(os.fstat(client.ring.fd).st_ino)
            found = ring_of("self", "ShmemPmdMapped", inode=inode)
            assert found == (RING_BYTES if gather_huge_pages() else 0,)
        finally:
            client.close()
