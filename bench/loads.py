"""4 GB loaded from a card, and by the I/O functions of vLLM's own file system tier from its files.

Owns: `load_vs_vllm_fs_disk`, `load_vs_vllm_fs_mem`: the worse of 2 MiB and 32 MiB objects.
Must not know: how either side moves bytes (`transfers`, and `vllm_fs` in a release's environment).

The same file system, bytes, sizes and depth, turn and turn about; both load into memory that was touched before, the
ring's half for loads and as large a buffer. Theirs has no checksums; ours verifies each slot and its key.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any, Final

from gateways import MIB, running
from in_memory import MEMORY
from report import Part
from transfers import BATCH, RING_BYTES, Load, fill, get, put

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateways import BenchGateway
    from release import Release
    from xkv_store.client import Client

TOTAL: Final = 4_000_000_000
TOTAL_QUICK: Final = 1_000_000_000
# The card over what is put, so that no object has left when it is loaded: 2 MiB objects take nine slots for the bytes
# of eight (1.125), and up to an eighth of the card is kept free ahead of a fast stream of puts: 1.29 at least.
OVERFILL: Final = 1.5
LOADS: Final = (
    Load("32m", size=32 * MIB, block=32 * MIB, depth=8, total=TOTAL),
    Load("2m", size=2 * MIB, block=2 * MIB, depth=32, total=TOTAL, batch=BATCH),
)


def run(folder: Path, release: Release, *, quick: bool) -> Part:
    """On the disk, then in memory."""
    part = Part()
    for name, place in (("disk", folder), ("mem", MEMORY)):
        for load in LOADS:
            with tempfile.TemporaryDirectory(dir=place, prefix="xkv-bench-") as own:
                sized = load.other(total=TOTAL_QUICK) if quick else load
                ratios, line = _compare(Path(own), release, sized, 2 if quick else 3)
            part.worst(f"load_vs_vllm_fs_{name}", median(ratios))
            part.details.append(f"{load.size // MIB:2} MiB at depth {load.depth:2}, {name}: {line}")
    return part


@dataclass(frozen=True, slots=True)
class Moved:
    """Seconds and CPU seconds of one run."""

    seconds: float
    cpu_s: float


class Theirs:
    """The process with vLLM's functions."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers
        self.description = self._answer()

    def move(self, op: str, load: Load) -> Moved:
        """Store or load all objects of a load."""
        request = {"op": op, "size": load.size, "count": load.count, "depth": load.depth}
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return Moved(**self._answer())

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError("the process with vLLM's functions has ended: see its log above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def _theirs(folder: Path, release: Release) -> Iterator[Theirs]:
    script = str(Path(__file__).with_name("vllm_fs.py"))
    command = [release.python, script, str(folder), str(RING_BYTES // 2)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=release.env
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Theirs(process.stdin, process.stdout)
        finally:
            process.kill()


def _compare(folder: Path, release: Release, load: Load, repeats: int) -> tuple[list[float], str]:
    """The ratios, and a line with the rates and what CPU they took."""
    files = folder / "files"
    files.mkdir()
    with (
        running(folder, "--capacity", str(int(load.total * OVERFILL))) as gateway,
        _theirs(files, release) as theirs,
    ):
        gateway.await_memory()
        client = gateway.attach(ring_bytes=RING_BYTES)
        fill(client)
        put(client, load, 0)
        theirs.move("store", load)
        pairs = [(_load(gateway, client, load), theirs.move("load", load)) for _ in range(repeats + 1)][1:]
        client.close()
    ratios = sorted(his.seconds / ours.seconds for ours, his in pairs)
    gb = load.count * load.size / 1e9
    sides = [
        f"{gb / median(one.seconds for one in side):.2f} GB/s at {median(one.cpu_s for one in side) / gb:.3f} CPU s/GB"
        for side in zip(*pairs, strict=True)
    ]
    listed = f"{' '.join(f'{ratio:.2f}' for ratio in ratios)} (median {median(ratios):.2f})"
    return ratios, f"{sides[0]}, vLLM's {sides[1]} ({theirs.description}); ratios {listed}"


def _load(gateway: BenchGateway, client: Client, load: Load) -> Moved:
    began_s = gateway.cpu_s() + time.process_time()
    seconds = get(client, load, 0)
    return Moved(seconds, gateway.cpu_s() + time.process_time() - began_s)
