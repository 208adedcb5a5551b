"""What a real engine's decoding pays while its gateway stores at full rate for another client.

Owns: `decode_overhead`: the median step of an engine with offloading while the gateway stores, against that of the
same engine without offloading while the gateway is idle, less one.
Must not know: vLLM (the stand's engine server imports it), how an engine is driven.

The engines, of which one at a time works, have the first core; the gateway and the client that stores the second.
For comparison the second core is kept busy by a loop that does nothing, which shows what a neighbour costs by itself:
two cores of a virtual machine may be one of the host's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from gateways import MIB, running
from report import Part, percentiles
from small_puts import Flood, putting
from stand.engines import EngineConfig, EngineServer
from stand.models import LLAMA, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateways import BenchGateway
    from release import Release
    from stand.engines import Engine

BATCH: Final = 4
PROMPT_TOKENS: Final = 128
BLOCKS_PER_CHUNK: Final = 2  # of 32 tokens: each request stores a chunk every 64 steps
STEPS: Final = 200
RING_BYTES: Final = 128 * MIB
CAPACITY: Final = "4GiB"  # full within seconds: what is stored evicts
PORT: Final = 5557
FLOOD: Final = Flood(length=2 * MIB, round=64, objects_max=1_000_000, may_shed=True)


def run(folder: Path, release: Release, *, quick: bool) -> Part:
    """Each kind of engine with the gateway idle and storing, several times in turn."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("the engine and the gateway need a core each, and this process has one")
    os.environ.update(release.env)
    steps: dict[str, list[float]] = {}
    rates: list[float] = []
    with ExitStack() as running_things:
        with _on(cores[1]):
            gateway = running_things.enter_context(running(folder, "--capacity", CAPACITY))
        engines = _engines(running_things, folder, release, gateway, cores[0])
        for engine in engines.values():
            engine.decode_steps(_prompts(0), steps=STEPS)  # a warm-up
        for number in range(1, 3 if quick else 5):
            for name, engine in engines.items():
                steps.setdefault(f"{name} offloading, gateway idle", []).extend(_steps(engine, number))
            with ExitStack() as storing:
                with _on(cores[1]):
                    rate = storing.enter_context(putting(gateway.socket, FLOOD))
                for name, engine in engines.items():
                    steps.setdefault(f"{name} offloading, gateway storing", []).extend(_steps(engine, number + 100))
            rates += rate
            with _spinning(cores[1]):
                alone = steps.setdefault("without offloading, the other core in an empty loop", [])
                alone.extend(_steps(engines["without"], number + 200))
    base, loaded = (steps[name] for name in ("without offloading, gateway idle", "with offloading, gateway storing"))
    return Part(
        {"decode_overhead": median(loaded) / median(base) - 1},
        [
            *(
                f"step of {BATCH} requests, {name}: {percentiles([value * 1e3 for value in taken], 'ms')}"
                for name, taken in steps.items()
            ),
            f"the gateway stored {median(rates) / 1e9:.2f} GB/s meanwhile",
        ],
    )


def _engines(
    running_things: ExitStack, folder: Path, release: Release, gateway: BenchGateway, core: int
) -> dict[str, Engine]:
    """One with offloading, one without; on `core`."""
    own = Path(tempfile.mkdtemp(prefix="xkv-"))  # short, as it holds a socket
    running_things.callback(shutil.rmtree, own, ignore_errors=True)
    with _on(core):
        server = running_things.enter_context(
            EngineServer(python=release.python, folder=own / "engines", vllm_home=release.home)
        )
    model = server.write_model(LLAMA, folder / "model")
    return {
        "without": server.engine(EngineConfig(model=model)),
        "with": server.engine(EngineConfig(model=model, extra=_extra(gateway))),
    }


@contextmanager
def _on(core: int) -> Iterator[None]:
    """Processes that are started in this block have this core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _spinning(core: int) -> Iterator[None]:
    """While the block runs, a process on this core does nothing as fast as it can."""
    with _on(core):
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _steps(engine: Engine, number: int) -> list[float]:
    return engine.decode_steps(_prompts(number), steps=STEPS)


def _prompts(number: int) -> list[list[int]]:
    return [prompt(LLAMA, tokens=PROMPT_TOKENS, seed=number * BATCH + one) for one in range(BATCH)]


def _extra(gateway: BenchGateway) -> dict[str, object]:
    return {
        "blocks_per_chunk": BLOCKS_PER_CHUNK,
        "xkv.port": PORT,
        "xkv.socket_dir": str(gateway.socket.parent),
        "xkv.ring_bytes": RING_BYTES,
    }
