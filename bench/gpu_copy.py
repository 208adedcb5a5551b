"""What moves between GPU, ring and card, against what the machine can do, in one run of a few minutes on one GPU.

Owns: the figures of docs/performance.md that need a GPU and no vLLM: ceilings, kernels, copies, jobs, submits.
Must not know: vLLM.

    python bench/gpu_copy.py [--json FILE] [--memory /dev/shm] [--disk FOLDER]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gateways import await_memory
from gpu_ceilings import GB, JOB_BYTES, MIB, REPEATS, Figures, batches, ceilings, seconds_on_gpu
from gpu_check import CASES, KERNELS, STAGING_BYTES, attached, check_mover, check_refusal, rank_context
from xkv_offload.copy import Move, Mover, RingSlots, make_mover
from xkv_offload.copy_triton import TritonRows
from xkv_offload.cuda import CudaDevice
from xkv_offload.cuda_batch import BatchedCopies
from xkv_offload.device_copy import DeviceMover
from xkv_offload.layout import ObjectLayout, Page
from xkv_offload.mapping import ChunkPart
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_offload.rows import ROW_BYTES_MAX, TensorPlace, WavePlan, make_piece, make_table, unit_bytes
from xkv_offload.staging_area import WORD_BYTES, Division, make_slots
from xkv_offload.transfer import XkvTransferSpec
from xkv_offload.worker import XkvWorker
from xkv_store.geometry import FRAGMENT_BYTES, SLOT_BYTES, Geometry
from xkv_store.ring import Ring
from xkv_store.sockets import socket_for_port
from xkv_store.testing.processes import PORT

KV_BYTES = 3 << 30
KERNEL_PAGES = {
    "4 KiB": 4_096,
    "16 KiB": 16_384,
    "64 KiB": 65_536,
    "72 KiB (MLA)": 73_728,
    "1 MiB": MIB,
    "65,537 B": 65_537,
}
DEADLINE_S = 60.0


# --- kernels ----------------------------------------------------------------------------------------------


def tensors_for(page_bytes: int, layers: int) -> list[torch.Tensor]:
    """KV tensors of random bytes, KV_BYTES in all."""
    blocks = KV_BYTES // (page_bytes * layers)
    return [torch.randint(-128, 127, (blocks, page_bytes), dtype=torch.int8, device="cuda") for _ in range(layers)]


def kernels(figures: Figures, page_bytes: int, name: str, wave_bytes: int) -> None:
    """Waves of whole objects, scattered blocks, many staging slots (more than the L2 holds), as one CUDA graph."""
    layers = 16 if page_bytes < MIB else 4
    tensors = tensors_for(page_bytes, layers)
    bpc = max(1, 2 * MIB // (page_bytes * layers))
    layout = ObjectLayout(bpc, tuple(Page(number, page_bytes) for number in range(layers)))
    places = [TensorPlace(tensor.data_ptr(), tensor.stride(0)) for tensor in tensors]
    device = CudaDevice(tensors[0].device)
    fragments = Geometry(SLOT_BYTES).fragments(layout.chunk_bytes)
    objects = max(1, wave_bytes // (fragments * SLOT_BYTES))
    plan_bytes = 8 * MIB
    slots_wanted = max(2, 512 * MIB // wave_bytes // 2)
    division = Division(slots_wanted, plan_bytes + objects * fragments * SLOT_BYTES, plan_bytes, objects * fragments)
    slots = make_slots(device, division=division, slot_bytes=SLOT_BYTES)[0]
    unit = unit_bytes(layouts=[layout], tensors=places, fragment_bytes=FRAGMENT_BYTES)
    rows = TritonRows(unit_bytes=unit, largest_page_bytes=page_bytes)
    table = make_table(
        layout=layout, base_sub_block=0, tensors=places, fragment_bytes=FRAGMENT_BYTES, row_bytes=ROW_BYTES_MAX
    )
    chosen = np.random.default_rng(0).permutation(len(tensors[0]))[: len(slots) * objects * bpc]
    for into_pages, key in ((False, "gather"), (True, "scatter")):
        launches = []
        for number, slot in enumerate(slots):
            plan = WavePlan(words_max=plan_bytes // WORD_BYTES)
            for index in range(objects):
                at = (number * objects + index) * bpc
                part = ChunkPart(0, 0, 0, tuple(chosen[at : at + bpc].tolist()))
                move = Move(part, layout, (), 0, 0)
                assert plan.add(make_piece(move, table, first=0, fragments=fragments, staged=index * fragments))
            plan_size, launch = rows.prepare(plan, slot, into_pages=into_pages)
            slot.plan[:plan_size].copy_(slot.host_plan[:plan_size])
            launches.append(launch)
        launches[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        moved = len(slots) * objects * layout.chunk_bytes
        rate = moved / seconds_on_gpu(graph.replay) / GB
        alone = figures.values[f"d2d_{wave_bytes // MIB}m"]
        ratio = rate / alone
        what = f"{key}, pages of {name}, waves of {wave_bytes // MIB} MiB"
        figures.add(
            f"{key}_{page_bytes}_{wave_bytes // MIB}m",
            what,
            ratio,
            f"{ratio:.2f} of device to device, copies of that size ({rate:,.0f} GB/s)",
        )


# --- copies between GPU and ring --------------------------------------------------------------------------


def moves_of(ring: Any, layout: ObjectLayout, job_bytes: int, blocks: int) -> list[Move]:
    """Objects that fill a job, each in slots that are neighbours, its blocks anywhere."""
    fragments = Geometry(SLOT_BYTES).fragments(layout.chunk_bytes)
    chosen = np.random.default_rng(0).permutation(blocks)
    bpc = layout.blocks_per_chunk
    return [
        Move(
            ChunkPart(0, 0, 0, tuple(chosen[number * bpc : (number + 1) * bpc].tolist())),
            layout,
            RingSlots(ring, list(range(number * fragments, (number + 1) * fragments))),
            0,
            0,
        )
        for number in range(job_bytes // layout.chunk_bytes)
    ]


@dataclass(frozen=True)
class Taken:
    """What a job took: seconds from the first start to the last end, and its thread's seconds of CPU."""

    wall: float
    cpu: float


def copy_job(mover: Mover, moves: Sequence[Move], *, gather: bool) -> Taken:
    """One job, on this thread."""
    ends: list[Exception | None] = []
    start = mover.start_gather if gather else mover.start_scatter
    began, cpu = time.perf_counter(), time.thread_time()
    mark = mover.ready_mark()
    for move in moves:
        start(move, mark, ends.append)
    while mover.advance():
        pass
    taken = Taken(time.perf_counter() - began, time.thread_time() - cpu)
    assert ends == [None] * len(moves), ends
    return taken


def mover_beside(tensors: Sequence[torch.Tensor], layout: ObjectLayout, ring: Ring) -> tuple[DeviceMover, CudaDevice]:
    """A mover as an engine has it, on a ring that is registered already."""
    mover = make_mover(tensors=tensors, staging_bytes=STAGING_BYTES, layouts=[layout], fragment_bytes=FRAGMENT_BYTES)
    assert isinstance(mover, DeviceMover)
    device = mover._device  # noqa: SLF001 - what is compared is how it copies
    assert isinstance(device, CudaDevice)
    mover._ring = device.host_bytes(ring.array)  # noqa: SLF001 - it is registered already
    return mover, device


def ways_of(device: CudaDevice) -> dict[str, BatchedCopies | None]:
    """How copies between GPU and ring are queued: both ways, or one by one where the driver has no batches."""
    made = device._batches  # noqa: SLF001 - as above
    return {"batched": made, "singly": None} if made is not None else {"singly": None}


def use_way(device: CudaDevice, made: BatchedCopies | None) -> None:
    """From now on."""
    device._batches = made  # noqa: SLF001 - as above


def copies(figures: Figures, ring: Ring, object_bytes: int, page_bytes: int) -> None:
    """Jobs of 1 GB through a mover as an engine has it, on a thread of their own, both ways turn about; against the
    pinned copies of this run.
    """
    layers = 32
    bpc = object_bytes // (page_bytes * layers)
    tensors = tensors_for(page_bytes, layers)
    layout = ObjectLayout(bpc, tuple(Page(number, page_bytes) for number in range(layers)))
    before = torch.cuda.memory_allocated()
    mover, device = mover_beside(tensors, layout, ring)
    beside = torch.cuda.memory_allocated() - before - STAGING_BYTES
    figures.values["memory_beside_staging"] = max(beside, figures.values.get("memory_beside_staging", 0))
    moves = moves_of(ring.array, layout, JOB_BYTES, len(tensors[0]))
    moved = len(moves) * layout.chunk_bytes
    ways = ways_of(device)
    for gather, key, name in ((True, "out", "GPU to ring"), (False, "back", "ring to GPU")):
        taken: dict[str, list[Taken]] = {way: [] for way in ways}
        with ThreadPoolExecutor(1) as thread:
            for _ in range(1 + REPEATS):
                for way, made in ways.items():
                    use_way(device, made)
                    taken[way].append(thread.submit(copy_job, mover, moves, gather=gather).result())
                    lost = made is not None and device._batches is None  # noqa: SLF001 - as above
                    assert not lost, "a batch was refused"
        for way, all_jobs_of_it in taken.items():
            jobs = all_jobs_of_it[1:]  # the first is to warm up
            rate = moved / statistics.median(job.wall for job in jobs) / GB
            ratio = rate / figures.values[f"{key}_256m"]
            micros = 1e6 * statistics.median(job.cpu for job in jobs) / len(moves)
            what = f"{name}, {object_bytes / MIB:g} MiB, pages of {page_bytes // 1024} KiB, {way}"
            figure = f"{key}_{object_bytes >> 10}k_{page_bytes}_{way}"
            figures.values[f"job_cpu_{figure}"] = micros
            text = f"{ratio:.3f} of pinned ({rate:.1f} GB/s); {micros:.0f} µs of CPU an object"
            figures.add(f"job_{figure}", what, ratio, text)
    use_way(device, ways.get("batched"))
    mover.close()


# --- whole jobs -------------------------------------------------------------------------------------------


@contextmanager
def gateway_process(folder: Path, options: Sequence[str]) -> Iterator[None]:
    """A gateway as it is started in earnest (the tests' own looks for points at which to stop)."""
    start = "import sys; from xkv_store import cli; sys.exit(cli.main(sys.argv[1:]))"
    words = ["gateway", "run", "--json", "--card", str(folder / "card"), "--socket-dir", str(folder / "sockets")]
    words += ["--port", str(PORT), "--capacity", "6GiB", *options]
    process = subprocess.Popen([sys.executable, "-c", start, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert "ready" in json.loads(process.stdout.readline())
        await_memory(socket_for_port(folder / "sockets", PORT))
        yield
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def blocks_of(first: int, count: int) -> Any:
    return SimpleNamespace(
        block_ids=np.arange(first, first + count, dtype=np.int32), group_sizes=[count], block_indices=[0]
    )


def spec_of(number: int, chunks: int) -> XkvTransferSpec:
    random = np.random.default_rng(number)
    keys = tuple(random.bytes(32) + bytes(4) for _ in range(chunks))
    return XkvTransferSpec(
        namespace=b"g" * 16, keys=keys, req_id="r", positions=tuple(range(chunks)), replace=(False,) * chunks
    )


def until(worker: XkvWorker, jobs: set[int]) -> float:
    """Poll as vLLM does, until these jobs are reported; when."""
    end = time.monotonic() + DEADLINE_S
    while jobs:
        assert time.monotonic() < end, PROCESS_COUNTERS
        jobs -= {result.job_id for result in worker.get_finished()}
        time.sleep(0.000_2)
    return time.perf_counter()


def whole_jobs(figures: Figures, folder: Path, where: str, options: Sequence[str], slot_bytes: int) -> None:
    """1 GB of the 8B shape (objects of 33.6 MB): stored until reported and until confirmed, then loaded."""
    sizes, _, bpc = CASES["llama 8B, 16 tokens a block"]
    layout = ObjectLayout(bpc, tuple(Page(number, size) for number, size in enumerate(sizes)))
    tensors = tensors_for(sizes[0], len(sizes))
    chunks = JOB_BYTES // layout.chunk_bytes
    moved = chunks * layout.chunk_bytes
    with gateway_process(folder, [*options, "--slot-bytes", str(slot_bytes)]):
        context = rank_context(attached(folder, "one", 4 << 30, slot_bytes=slot_bytes), tensors, layout)
        worker = XkvWorker(context=context, transfer_result=SimpleNamespace)
        left: list[float] = []
        confirmed: list[float] = []
        loaded: list[float] = []
        for run in range(4):
            before = PROCESS_COUNTERS["confirmed_objects"]
            began = time.perf_counter()
            worker.submit_store(2 * run, blocks_of(1, chunks * bpc), spec_of(run, chunks))
            left.append(until(worker, {2 * run}) - began)
            while PROCESS_COUNTERS["confirmed_objects"] < before + chunks:
                assert time.perf_counter() - began < DEADLINE_S, PROCESS_COUNTERS
                time.sleep(0.000_2)
            confirmed.append(time.perf_counter() - began)
            began = time.perf_counter()
            worker.submit_load(2 * run + 1, spec_of(run, chunks), blocks_of(1 + chunks * bpc, chunks * bpc))
            loaded.append(until(worker, {2 * run + 1}) - began)
            assert not context.failures.take(), PROCESS_COUNTERS
        for tensor in tensors:
            assert torch.equal(tensor[1 : 1 + chunks * bpc], tensor[1 + chunks * bpc : 1 + 2 * chunks * bpc])
        for key, name, taken in (
            ("left", "GPU to card: reported", left),
            ("confirmed", "GPU to card: confirmed", confirmed),
            ("loaded", "card to GPU: reported", loaded),
        ):
            rate = moved / statistics.median(taken[1:]) / GB  # the first run touches the ring and the file
            slots = f"slots of {slot_bytes >> 10} KiB"
            figures.add(f"{where}_{key}_{slot_bytes}", f"{name}, {where}, {slots}", rate, f"{rate:.2f} GB/s")
        if where == "memory" and slot_bytes == SLOT_BYTES:
            submits(figures, worker, bpc)
        worker.shutdown()


def submits(figures: Figures, worker: XkvWorker, bpc: int) -> None:
    """What one submit costs vLLM's thread, jobs of one chunk and of 32; the loads are of objects that are not there."""
    for chunks in (1, 32):
        blocks = blocks_of(1, chunks * bpc)
        taken: dict[str, list[float]] = {"store": [], "load": []}
        for number in range(60 if chunks == 1 else 12):
            job = 10_000 * chunks + 2 * number
            spec = spec_of(job, chunks)
            began = time.perf_counter()
            worker.submit_store(job, blocks, spec)
            taken["store"].append(time.perf_counter() - began)
            until(worker, {job})
            spec = spec_of(job + 1, chunks)
            began = time.perf_counter()
            worker.submit_load(job + 1, spec, blocks)
            taken["load"].append(time.perf_counter() - began)
            until(worker, {job + 1})
        worker.context.failures.take()
        for name, times in taken.items():
            micros = statistics.median(times) * 1e6
            figures.add(
                f"submit_{name}_{chunks}", f"submit of a {name}, {chunks} chunk(s), median", micros, f"{micros:.0f} µs"
            )


# --- beside an engine -------------------------------------------------------------------------------------


def beside(figures: Figures, ring: Ring) -> None:
    """Steps that read 4 GB of weights each, alone and while stores run at the full rate."""
    weights = torch.randn(8, 16_384, 16_384, dtype=torch.bfloat16, device="cuda")
    vector = torch.randn(16_384, 1, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    for weight in weights:
        weight @ vector
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for weight in weights:
            weight @ vector
    layers, page_bytes, bpc = 32, 65_536, 16
    tensors = tensors_for(page_bytes, layers)
    layout = ObjectLayout(bpc, tuple(Page(number, page_bytes) for number in range(layers)))
    mover, device = mover_beside(tensors, layout, ring)
    moves = moves_of(ring.array, layout, JOB_BYTES, len(tensors[0]))
    for way, made in ways_of(device).items():
        use_way(device, made)
        beside_stores(figures, way, graph, mover, moves)


def beside_stores(figures: Figures, way: str, graph: torch.cuda.CUDAGraph, mover: Mover, moves: Sequence[Move]) -> None:
    """One way of copying."""
    stop = threading.Event()
    jobs: list[float] = []

    def store() -> None:
        while not stop.is_set():
            jobs.append(copy_job(mover, moves, gather=True).wall)

    def steps() -> float:
        taken = []
        event = torch.cuda.Event(blocking=True)
        for _ in range(400):
            began = time.perf_counter()
            graph.replay()
            event.record()
            event.synchronize()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    steps()
    alone = steps()
    thread = threading.Thread(target=store)
    thread.start()
    while len(jobs) < 2:
        time.sleep(0.01)
    busy = steps()
    stop.set()
    thread.join()
    again = steps()
    more = 100 * (busy / ((alone + again) / 2) - 1)
    rate = len(moves) * moves[0].layout.chunk_bytes / statistics.median(jobs) / GB
    text = f"{more:+.1f} % ({1e3 * alone:.3f}, {1e3 * busy:.3f}, {1e3 * again:.3f} ms; stores at {rate:.1f} GB/s)"
    figures.add(f"beside_{way}", f"steps that read weights, while stores run, {way}", more, text)


def check_bytes() -> None:
    """Every byte against the host path, with Triton and without, in batches and one by one."""
    began = time.monotonic()
    for sizes, padding, bpc in CASES.values():
        for kernel in KERNELS:
            check_mover(sizes, padding, bpc, kernel)
    check_refusal()
    print(f"same bytes: {', '.join(CASES)} ({time.monotonic() - began:.0f} s)", flush=True)


def all_kernels(figures: Figures) -> None:
    """Page sizes and wave sizes."""
    for name, page_bytes in KERNEL_PAGES.items():
        for wave_bytes in (32 * MIB, 128 * MIB):
            kernels(figures, page_bytes, name, wave_bytes)
            torch.cuda.empty_cache()


def all_copies(figures: Figures, ring: Ring) -> None:
    """Object sizes and page sizes."""
    failed: list[Exception] = []
    for object_bytes, page_bytes in ((2 * MIB, 65_536), (2 * MIB, 4_096), (8 * MIB, 65_536), (32 * MIB, 65_536)):
        try:
            copies(figures, ring, object_bytes, page_bytes)
        except Exception as error:  # noqa: BLE001 - the other sizes still say something
            traceback.print_exc()
            failed.append(error)
        torch.cuda.empty_cache()
    if failed:
        raise failed[0]


def all_jobs(figures: Figures, options: argparse.Namespace) -> None:
    """A card in memory, a card on the disk; with slots of some sizes."""
    for where in options.where.split(","):
        parent = {"memory": options.memory, "disk": options.disk}[where]
        for slot_kib in map(int, options.slots.split(",")):
            words = ["--io-threads", str(options.io_threads), "--databases", "8"]
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                whole_jobs(figures, Path(folder), where, words, slot_kib << 10)
            torch.cuda.empty_cache()


def main() -> int:
    """Checks first, then figures; the table and the file last. 1 where a part failed to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--where", default="memory,disk", help="of the card, for jobs")
    parser.add_argument("--slots", default="256,1024,4096", help="KiB, for jobs")
    parser.add_argument("--io-threads", type=int, default=16)
    parser.add_argument("--parts", default="check,kernels,batches,copies,beside,jobs")
    options = parser.parse_args()
    began = time.monotonic()
    figures = Figures()
    ring = Ring.create(2 * JOB_BYTES // SLOT_BYTES, SLOT_BYTES)
    device = CudaDevice(torch.device("cuda", 0))
    huge = ring.use_huge_pages([range(ring.slots)]) / ring.array.nbytes
    text = f"{huge:.2f} of it ({time.monotonic() - began:.2f} s)"
    figures.add("huge_pages", "the ring in huge pages", huge, text)
    registering = time.monotonic()
    device.register([ring.array])
    registered_s = (time.monotonic() - registering) * GB / ring.array.nbytes
    figures.add("register_s_per_gb", "registration of the ring, for each GB", registered_s, f"{registered_s:.2f} s")
    host = device.host_bytes(ring.array)
    ceilings(figures, host)
    parts: dict[str, Callable[[], None]] = {
        "check": check_bytes,
        "kernels": partial(all_kernels, figures),
        "batches": partial(batches, figures, host),
        "copies": partial(all_copies, figures, ring),
        "beside": partial(beside, figures, ring),
        "jobs": partial(all_jobs, figures, options),
    }
    failed = []
    for name in options.parts.split(","):
        try:
            parts[name]()
        except Exception:  # noqa: BLE001 - the other parts still say something
            traceback.print_exc()
            failed.append(name)
        if options.json:  # now already: whoever runs this may end it
            options.json.write_text(json.dumps(figures.values, indent=1))
    print("\n".join(f"{what:<64} {text}" for what, text in figures.lines))
    print(f"took {time.monotonic() - began:.0f} s on {torch.cuda.get_device_name()}; failed: {failed or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
