"""Ranks of one engine load the same objects from the ring that they share: one rank a GPU, two where there is one GPU.

Owns: a measurement: each rank alone and all at once, jobs and plain copies from the ring;
the bytes are compared. Prints a table, then one JSON line.
Must not know: vLLM.

    python bench/gpu_two_ranks.py [FOLDER]        FOLDER is where the card lies (/dev/shm)
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gpu_ceilings import GB, JOB_BYTES
from gpu_check import CASES, DEADLINE_S, attached, rank_context
from gpu_copy import blocks_of, gateway_process, spec_of, until
from xkv_offload.device_copy import REGISTERED_BYTES_MAX
from xkv_offload.layout import ObjectLayout, Page
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_offload.worker import XkvWorker
from xkv_store.geometry import SLOT_BYTES
from xkv_store.ring import RingUse
from xkv_store.sockets import socket_for_port
from xkv_store.testing.processes import PORT
from xkv_store.tool import Tool

RING_BYTES = 5 << 30
RUNS = 5
ANSWER_S_MAX = 120.0
PART_BYTES = REGISTERED_BYTES_MAX // SLOT_BYTES * SLOT_BYTES  # of the ring, registered by itself: no copy crosses
SIZES, _, BPC = CASES["llama 8B, 16 tokens a block"]
LAYOUT = ObjectLayout(BPC, tuple(Page(number, size) for number, size in enumerate(SIZES)))
CHUNKS = JOB_BYTES // LAYOUT.chunk_bytes
BLOCKS = CHUNKS * BPC
MOVED = CHUNKS * LAYOUT.chunk_bytes


class Rank:
    """What a rank's process does, command by command."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        generator = torch.Generator().manual_seed(5)  # on the CPU: the same bytes on every rank
        self._right = torch.randint(-128, 127, (len(SIZES), BLOCKS, SIZES[0]), dtype=torch.int8, generator=generator)
        self._tensors = [torch.zeros((1 + BLOCKS, SIZES[0]), dtype=torch.int8, device="cuda") for _ in SIZES]
        client = attached(folder, "engine", RING_BYTES, rank=rank, ranks=ranks, ring_use=RingUse.REPLICATED)
        began = time.monotonic()
        context = rank_context(client, self._tensors, LAYOUT, rank=rank)
        self._registered_s = time.monotonic() - began
        self._context = context
        self._worker = XkvWorker(context=context, transfer_result=SimpleNamespace)
        region = client.load_region
        ring = torch.from_numpy(client.ring.array.reshape(-1).view("int8"))
        first = region.first * SLOT_BYTES
        edges = sorted({first, first + MOVED, *range(-(-first // PART_BYTES) * PART_BYTES, first + MOVED, PART_BYTES)})
        area = torch.empty(MOVED, dtype=torch.int8, device="cuda")
        self._pieces = [(area[begin - first : end - first], ring[begin:end]) for begin, end in pairwise(edges)]
        self._jobs = 0

    def do(self, command: str) -> dict[str, Any]:
        """One command; seconds, or what it found."""
        if command == "ready":
            return {"registered_s": self._registered_s, "gpu": torch.cuda.get_device_name()}
        if command in {"store", "store one"}:
            return self._store(*((0, CHUNKS) if command == "store" else (1, 1)))
        if command in {"load", "load one"}:
            return self._load(*((0, CHUNKS) if command == "load" else (1, 1)))
        if command == "copy":
            torch.cuda.synchronize()
            began = time.perf_counter()
            for into, source in self._pieces:
                into.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            return {"s": time.perf_counter() - began}
        assert command == "compare", command
        wrong = sum(int((got[1:].cpu() != right).sum()) for got, right in zip(self._tensors, self._right, strict=True))
        return {"wrong": wrong, "counters": {name: count for name, count in PROCESS_COUNTERS.items() if count}}

    def _store(self, number: int, chunks: int) -> dict[str, Any]:
        confirmed = PROCESS_COUNTERS["confirmed_objects"] + chunks
        for tensor, right in zip(self._tensors, self._right, strict=True):
            tensor[1:] = right.cuda()
        self._jobs += 1
        self._worker.submit_store(self._jobs, blocks_of(1, chunks * BPC), spec_of(number, chunks))
        until(self._worker, {self._jobs})
        end = time.monotonic() + DEADLINE_S
        while PROCESS_COUNTERS["confirmed_objects"] < confirmed:
            assert time.monotonic() < end, PROCESS_COUNTERS
            time.sleep(0.001)
        return {}

    def _load(self, number: int, chunks: int) -> dict[str, Any]:
        for tensor in self._tensors:
            tensor.zero_()
        torch.cuda.synchronize()
        self._jobs += 1
        began = time.perf_counter()
        self._worker.submit_load(self._jobs, spec_of(number, chunks), blocks_of(1, chunks * BPC))
        seconds = until(self._worker, {self._jobs}) - began
        assert not self._context.failures.take(), PROCESS_COUNTERS
        return {"s": seconds}

    def close(self) -> None:
        """Detach."""
        self._worker.shutdown()


def be_a_rank(folder: Path, rank: int, ranks: int) -> None:
    """Commands from standard input, a line each; an answer to each."""
    own = Rank(folder, rank, ranks)
    for line in sys.stdin:
        print(json.dumps(own.do(line.strip())), flush=True)
    own.close()


class Ranks:
    """The ranks' processes."""

    def __init__(self, folder: Path, count: int) -> None:
        command = [sys.executable, __file__, "--rank", str(folder), str(count)]
        self._processes = [
            subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for rank in range(count)
        ]
        self.all = range(count)

    def tell(self, command: str, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """The answers of these ranks, that do it at once."""
        for rank in ranks:
            pipe = self._processes[rank].stdin
            assert pipe is not None
            pipe.write(command + "\n")
            pipe.flush()
        answers = []
        for rank in ranks:
            output = self._processes[rank].stdout
            assert output is not None
            line = output.readline()
            assert line, f"rank {rank} has ended"
            answers.append(json.loads(line))
        return answers

    def rates(self, command: str, ranks: Sequence[int]) -> list[float]:
        """GB/s of each of these ranks at once: the median of some runs."""
        runs = [[MOVED / answer["s"] / GB for answer in self.tell(command, ranks)] for _ in range(RUNS)]
        return [statistics.median(of_rank) for of_rank in zip(*runs, strict=True)]

    def close(self) -> None:
        """End them; they end by themselves when nothing more comes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(ANSWER_S_MAX)
            process.kill()
            process.wait()


def reads_so_far(folder: Path) -> int:
    """Objects that the gateway has read from its card."""
    with closing(Tool(socket_for_port(folder / "sockets", PORT))) as tool:
        return int(json.loads(tool.status())["counters"].get("reads", 0))


def measured(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The figures, by name."""
    ready = ranks.tell("ready", ranks.all)
    ranks.tell("store one", [0])
    ranks.tell("load one", ranks.all)  # kernels are compiled and brought to each GPU
    ranks.tell("store", [0])
    before = reads_so_far(folder)
    first = [MOVED / answer["s"] / GB for answer in ranks.tell("load", ranks.all)]
    reads = reads_so_far(folder) - before
    found: dict[str, Any] = {"gpus": [one["gpu"] for one in ready], "first_gb_per_s": first, "reads": reads}
    found["objects"] = CHUNKS
    for command in ("copy", "load"):
        if command == "copy":
            ranks.tell(command, ranks.all)  # warm
        found[f"{command}_alone_gb_per_s"] = [ranks.rates(command, [rank])[0] for rank in ranks.all]
        found[f"{command}_together_gb_per_s"] = ranks.rates(command, ranks.all)
    compared = ranks.tell("compare", ranks.all)
    found["wrong_bytes"] = sum(one["wrong"] for one in compared)
    found["registered_s"] = [one["registered_s"] for one in ready]
    return found


def main() -> int:
    """Exit code 1 where a byte is wrong or an object was read more than once for all ranks."""
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(Path(sys.argv[2]), int(sys.argv[4]), int(sys.argv[3]))
        return 0
    count = max(2, torch.cuda.device_count())
    parent = sys.argv[1] if len(sys.argv) > 1 else "/dev/shm"
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        with gateway_process(folder, ["--io-threads", "16", "--databases", "8"]):
            ranks = Ranks(folder, count)
            try:
                found = measured(ranks, folder)
            finally:
                ranks.close()
    for key, value in found.items():
        print(f"{key:<28} {[round(one, 2) for one in value] if key.endswith(('_s', 'per_s')) else value}")
    print(json.dumps(found))
    return int(found["wrong_bytes"] > 0 or found["reads"] > CHUNKS)


if __name__ == "__main__":
    sys.exit(main())
