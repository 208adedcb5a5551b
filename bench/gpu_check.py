"""The CUDA path against the host path, on one GPU: every byte, with poisoned outputs; then jobs through a gateway.

Owns: a check that needs a GPU (CI has none) and first figures. Prints one JSON line last.
Must not know: vLLM.

    python bench/gpu_check.py
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import contexts
from xkv_offload.copy import HostMover, Move, Mover, RingSlots, make_mover
from xkv_offload.copy_torch import TorchRows
from xkv_offload.copy_triton import TritonRows
from xkv_offload.cuda import CudaDevice
from xkv_offload.device_copy import DeviceMover
from xkv_offload.layout import ObjectLayout, Page, fragment_range
from xkv_offload.mapping import ChunkPart
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_offload.rank import RankContext
from xkv_offload.transfer import XkvTransferSpec
from xkv_offload.worker import XkvWorker
from xkv_store.client import Attachment, Client
from xkv_store.geometry import FRAGMENT_BYTES, HEADER_BYTES, SLOT_BYTES
from xkv_store.ring import RingUse
from xkv_store.sockets import socket_for_port
from xkv_store.testing.processes import PORT, running_gateway
from xkv_store.wire import Role

POISON = -91
BLOCKS = 256
DEADLINE_S = 60.0
STAGING_BYTES = 1 << 28
OBJECTS = 5
KERNELS = ("triton", "triton, one by one", "torch")
"""How rows are copied; and how runs are, which is in batches where the driver has them."""
CASES = {
    "llama 8B, 16 tokens a block": ([2 * 16 * 8 * 128 * 2] * 32, 0, 16),
    "mla, odd pages": ([64 * 576 * 2] * 27, 0, 4),
    "padded rows": ([40_001, 7, 65_536], 512, 3),
    "one packed tensor": ([1_000_003], 0, 2),
    "small pages": ([4_096] * 12, 64, 8),
}


def tensors_of(sizes: list[int], padding: int, *, poisoned: bool, seed: int = 0) -> list[torch.Tensor]:
    """int8 rows of random bytes, or of poison, on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    made = []
    for size in sizes:
        shape = (BLOCKS, size + padding)
        if poisoned:
            made.append(torch.full(shape, POISON, dtype=torch.int8, device="cuda"))
        else:
            made.append(torch.randint(-128, 127, shape, dtype=torch.int8, device="cuda", generator=generator))
    return made


def mover_for(tensors: list[torch.Tensor], layout: ObjectLayout, kernel: str) -> Mover:
    """A mover as an engine has it, or one that copies rows with torch alone."""
    made = make_mover(tensors=tensors, staging_bytes=STAGING_BYTES, layouts=[layout], fragment_bytes=FRAGMENT_BYTES)
    assert isinstance(made, DeviceMover)
    assert isinstance(made._rows, TritonRows), "Triton's kernel was not chosen"  # noqa: SLF001 - what is checked
    if kernel == "triton, one by one":
        made._device.use_no_batches()  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    if kernel == "torch":
        made._rows = TorchRows(tensors)  # noqa: SLF001 - as above
    return made


def copy_all(mover: Mover, moves: list[Move], *, gather: bool) -> None:
    """Start all, wait for all."""
    ends: list[Exception | None] = []
    start = mover.start_gather if gather else mover.start_scatter
    for move in moves:
        start(move, mover.ready_mark(), ends.append)
    while mover.advance():
        pass
    assert ends == [None] * len(moves), ends


def check_mover(sizes: list[int], padding: int, bpc: int, kernel: str) -> None:
    """Gather must equal the host path's payloads; scatter must change the asked rows' pages alone."""
    layout = ObjectLayout(bpc, tuple(Page(number, size) for number, size in enumerate(sizes)))
    source = tensors_of(sizes, padding, poisoned=False)
    host = [tensor.cpu().numpy().view(np.uint8) for tensor in source]
    chosen = np.random.default_rng(1).permutation(BLOCKS)[: OBJECTS * bpc].reshape(OBJECTS, bpc)
    count = len(fragment_range(first_byte=0, length=layout.chunk_bytes, fragment_bytes=FRAGMENT_BYTES))
    rings = [np.full((OBJECTS * count, SLOT_BYTES), 0xA5, np.uint8) for _ in range(2)]
    mover = mover_for(source, layout, kernel)
    mover.use_ring(rings[0], [range(OBJECTS * count)])
    moves = [
        Move(ChunkPart(0, 0, 0, tuple(blocks.tolist())), layout, RingSlots(rings[0], slots), 0, 0)
        for blocks, slots in zip(chosen, np.arange(OBJECTS * count).reshape(OBJECTS, count).tolist(), strict=True)
    ]
    copy_all(mover, moves, gather=True)
    mover.close()
    for number, move in enumerate(moves):
        slots = rings[1][number * count : (number + 1) * count]
        HostMover(host).gather(Move(move.part, layout, list(slots), 0, 0))
    payload = np.ones((count, SLOT_BYTES), bool)
    payload[:, :HEADER_BYTES] = False
    payload[-1, HEADER_BYTES + layout.chunk_bytes - (count - 1) * FRAGMENT_BYTES :] = False
    where = np.tile(payload, (OBJECTS, 1))
    assert (rings[0][where] == rings[1][where]).all(), "gather differs from the host path"
    check_scatter(sizes, padding, layout=layout, ring=rings[0], count=count, kernel=kernel)


def check_scatter(sizes: list[int], padding: int, *, layout: ObjectLayout, ring: Any, count: int, kernel: str) -> None:
    """The second half of a chunk, into poisoned tensors."""
    target = tensors_of(sizes, padding, poisoned=True)
    expected = [tensor.cpu().numpy().view(np.uint8).copy() for tensor in target]
    first = layout.blocks_per_chunk // 2
    blocks = layout.blocks_per_chunk - first
    needed = fragment_range(
        first_byte=first * layout.block_bytes, length=blocks * layout.block_bytes, fragment_bytes=FRAGMENT_BYTES
    )
    mover = mover_for(target, layout, kernel)
    mover.use_ring(ring, [range(len(ring))])
    moves = [
        Move(
            ChunkPart(0, 0, first, tuple(range(3 + number * blocks, 3 + (number + 1) * blocks))),
            layout,
            RingSlots(ring, range(number * count + needed.start, number * count + needed.stop)),
            needed.start,
            0,
        )
        for number in range(OBJECTS)
    ]
    copy_all(mover, moves, gather=False)
    mover.close()
    for move in moves:
        HostMover(expected).scatter(move)
    for got, wanted in zip(target, expected, strict=True):
        assert (got.cpu().numpy().view(np.uint8) == wanted).all(), "scatter differs from the host path"


def check_refusal() -> None:
    """A ring that CUDA does not register: a warning, no error left behind, and the bytes arrive all the same."""
    sizes, bpc = [65_536] * 4, 4
    layout = ObjectLayout(bpc, tuple(Page(number, size) for number, size in enumerate(sizes)))
    source = tensors_of(sizes, 0, poisoned=False)
    count = len(fragment_range(first_byte=0, length=layout.chunk_bytes, fragment_bytes=FRAGMENT_BYTES))
    ring = np.full((count, SLOT_BYTES), 0xA5, np.uint8)
    first = CudaDevice(source[0].device)
    first.register([ring])
    for name in ("is registered already", "is not registered"):
        mover = mover_for(source, layout, "triton")
        mover.use_ring(ring, [range(count)])
        if name == "is not registered":
            mover.close()
        target = tensors_of(sizes, 0, poisoned=True)
        copy_all(
            mover, [Move(ChunkPart(0, 0, 0, (5, 6, 7, 8)), layout, RingSlots(ring, range(count)), 0, 0)], gather=True
        )
        into = mover_for(target, layout, "triton, one by one")
        assert isinstance(into, DeviceMover)
        into._ring = first.host_bytes(ring)  # noqa: SLF001 - it is not to be registered
        copy_all(
            into, [Move(ChunkPart(0, 0, 0, (1, 2, 3, 4)), layout, RingSlots(ring, range(count)), 0, 0)], gather=False
        )
        for got, wanted in zip(target, source, strict=True):
            assert torch.equal(got[1:5], wanted[5:9]), name
            assert (got[5:] == POISON).all(), name
        print(f"same bytes: a ring that {name}")
        ring[:] = 0xA5
        first.unregister()


def check_jobs(folder: Path) -> dict[str, float]:
    """Store 64 chunks of the 8B shape through a gateway and load them into poisoned tensors."""
    sizes, padding, bpc = CASES["llama 8B, 16 tokens a block"]
    chunks = BLOCKS // bpc - 1
    layout = ObjectLayout(bpc, tuple(Page(number, size) for number, size in enumerate(sizes)))
    source, target = tensors_of(sizes, padding, poisoned=False), tensors_of(sizes, padding, poisoned=True)
    figures = {}
    with running_gateway(folder, capacity="4GiB", slot_bytes=SLOT_BYTES) as gateway:
        assert gateway.alive
        for name, tensors in (("store", source), ("load", target)):
            client = attached(folder, name, 2 << 30)
            context = rank_context(client, tensors, layout)
            worker = XkvWorker(context=context, transfer_result=SimpleNamespace)
            figures[f"{name}_gb_per_s"] = run_job(worker, name, chunks, bpc)
            assert not context.failures.take(), "a load failed"
            worker.shutdown()
    rows = slice(1, 1 + chunks * bpc)
    for got, wanted in zip(target, source, strict=True):
        assert torch.equal(got[rows], wanted[rows]), "restored pages differ"
        assert (got[0] == POISON).all(), "block 0 was written"
        assert (got[rows.stop :] == POISON).all(), "a block that nobody asked for was written"
    return figures


def attached(
    folder: Path,
    engine: str,
    ring_bytes: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    ring_use: RingUse = RingUse.LEASED,
    slot_bytes: int = SLOT_BYTES,
) -> Client:
    """One rank of an engine; alone unless `ranks` says otherwise."""
    return Client.attach(
        Attachment(
            socket=socket_for_port(folder / "sockets", PORT),
            engine_id=engine,
            role=Role.RANK,
            rank=rank,
            world_size=ranks,
            ring_bytes=ring_bytes,
            load_reserve_bytes=ring_bytes // 2,
            staged_bytes=0,
            ring_use=ring_use,
            fragment_bytes=slot_bytes - HEADER_BYTES,
            connect_timeout_ms=20_000,
            heartbeat_timeout_ms=3_000,
            embedded=None,
        )
    )


def rank_context(client: Client, tensors: list[torch.Tensor], layout: ObjectLayout, *, rank: int = 0) -> RankContext:
    """One rank, its ring registered; all ranks of an engine have the same objects."""
    fragment_bytes = client.ring.slot_bytes - HEADER_BYTES
    mover = make_mover(tensors=tensors, staging_bytes=STAGING_BYTES, layouts=[layout], fragment_bytes=fragment_bytes)
    return contexts.rank_context(client, mover, layout, load_timeout_s=DEADLINE_S, rank=rank)


def run_job(worker: XkvWorker, name: str, chunks: int, bpc: int) -> float:
    """One job of `chunks` chunks; GB/s until it is reported, and for stores until the card has confirmed it."""
    keys = tuple(number.to_bytes(8, "little") * 4 + bytes(4) for number in range(chunks))
    spec = XkvTransferSpec(
        namespace=b"g" * 16, keys=keys, req_id="r", positions=tuple(range(chunks)), replace=(False,) * chunks
    )
    blocks: Any = SimpleNamespace(
        block_ids=np.arange(1, 1 + chunks * bpc, dtype=np.int32), group_sizes=[chunks * bpc], block_indices=[0]
    )
    started = time.monotonic()
    if name == "store":
        worker.submit_store(0, blocks, spec)
    else:
        worker.submit_load(0, spec, blocks)
    results: list[Any] = []
    while not results or (name == "store" and PROCESS_COUNTERS["confirmed_objects"] < chunks):
        assert time.monotonic() - started < DEADLINE_S, f"{name} took too long: {PROCESS_COUNTERS}"
        results += worker.get_finished()
        time.sleep(0.001)
    assert PROCESS_COUNTERS["worker_errors"] == 0
    return float(results[0].transfer_size) / (time.monotonic() - started) / 1e9


def main() -> None:
    """All cases, then the jobs."""
    for name, (sizes, padding, bpc) in CASES.items():
        for kernel in KERNELS:
            check_mover(sizes, padding, bpc, kernel)
            print(f"same bytes: {name} ({kernel})")
    check_refusal()
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        figures = check_jobs(Path(folder))
    print(json.dumps({"device": torch.cuda.get_device_name(), **{k: round(v, 3) for k, v in figures.items()}}))


if __name__ == "__main__":
    main()
