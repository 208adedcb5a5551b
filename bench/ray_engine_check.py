"""A real vLLM whose two ranks are Ray's workers stores through xkv, restores after a restart, and loses one of them.

Owns: a check that needs Ray and a vLLM for CPUs in one environment (CI has no Ray). Prints one JSON line last.
Must not know: releases; it takes the vLLM that is importable.

    XKV_TARGET=0.29.0 python bench/ray_engine_check.py [--legacy] [--embedded]

`--legacy`: vLLM's older Ray executor; `--embedded`: the engine's processes start the gateway.

vLLM refuses Ray on a CPU ("current platform cpu does not support ray") only as its CPU platform names no kind of
device that Ray is to count. A platform plugin, which is vLLM's own way, names one here: two "GPU" that Ray is told of.
All else is vLLM's and Ray's: a cluster of its own that has been started without the engine's environment, placement
groups, actors, the executor. Both are ended here by their ids.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from stand.cases import Stand, assert_canary, assert_missed, assert_restored, generate, store
from stand.engines import EngineError, EngineServer, await_end
from stand.gateways import EmbeddedCard, Gateway, leftovers
from stand.models import LLAMA
from stand.parallel_child import RANK_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stand.engines import Engine, EngineConfig

RANKS: Final = 2
BLOCKS_PER_CHUNK: Final = 2
END_S_MAX: Final = 30.0
FREED_S_MAX: Final = 1.0  # the promise
RAY: Final = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "ray"}
PASSED: Final = ("PATH", "TMPDIR", "RAY_TMPDIR")  # to the cluster, of the engine's environment
REFUSED: Final = "does not support ray"
PLUGIN: Final = {
    "cpu_for_ray.py": (
        "from vllm.platforms.cpu import CpuPlatform\n"
        "class CpuForRay(CpuPlatform):\n"
        '    ray_device_key = "GPU"\n'
        "def name():\n"
        '    return "cpu_for_ray.CpuForRay"\n'
    ),
    "cpu_for_ray-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: cpu-for-ray\nVersion: 1\n",
    "cpu_for_ray-1.dist-info/entry_points.txt": "[vllm.platform_plugins]\ncpu_for_ray = cpu_for_ray:name\n",
}


def main() -> int:
    """The refusal, then each part in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--legacy", action="store_true")
    parser.add_argument("--embedded", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    # Short: Ray's sockets lie below it, and a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-") as name, ExitStack() as stack:
        folder = Path(name)
        os.environ["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "0" if options.legacy else "1"
        os.environ["VLLM_USE_RAY_WRAPPED_PP_COMM"] = "0"  # NCCL's
        os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] = RANK_VARIABLE
        os.environ["VLLM_CACHE_ROOT"] = str(folder / "vllm")
        os.environ["RAY_TMPDIR"] = os.environ["TMPDIR"] = tempfile.tempdir = name
        write_plugin(folder / "plugin")
        os.environ["RAY_ADDRESS"] = stack.enter_context(cluster(folder))
        refusal = as_it_comes(folder)
        os.environ["PYTHONPATH"] = module_path(folder)
        stand = stack.enter_context(standing(folder / "stand"))
        if options.embedded:
            card = EmbeddedCard(folder / "card", capacity_bytes=256 << 20, linger_s=60.0)
            found = embedded(stand, stack.enter_context(card))
        else:
            found = parts(stand, stack.enter_context(Gateway(folder / "gateway")))
    print(json.dumps({"refusal": refusal, **found, "seconds": round(time.monotonic() - began)}))
    return 0


def parts(stand: Stand, gateway: Gateway) -> dict[str, object]:
    """What is stored by one engine is restored by it and by the next; then one of that one's workers is killed."""
    pool = stand.decided(LLAMA, 2)
    asked, other = ([prompt] for prompt in pool.prompts)
    expected, other_expected = ([answer] for answer in pool.answers)
    config = stand.offloading(LLAMA, gateway, blocks_per_chunk=BLOCKS_PER_CHUNK, llm=RAY)
    with ranks_of_ray(stand, config) as first:
        objects = store(first, asked, expected)
        assert gateway.status()["objects"] == objects
        assert objects % RANKS == 0, "an object for each rank"
        first.reset_prefix()
        assert restored(first, asked, expected) == objects
    left = leftovers(gateway.status, FREED_S_MAX)
    assert left == "", left
    with ranks_of_ray(stand, replace(config, load_failure_policy="recompute")) as second:
        ranks = second.description["ranks"]
        assert restored(second, asked, expected) == objects
        for rank in range(RANKS):
            assert_canary(second, asked, expected, rank=rank, ranks=RANKS)
        cold = generate(second, other)
        assert cold.tokens == other_expected
        assert_missed(cold)
        lose(second, gateway, other)
    return {"objects": objects, "ranks": ranks, "restored": "same tokens", "canary": "other tokens, by each rank"}


def embedded(stand: Stand, card: EmbeddedCard) -> dict[str, object]:
    """The gateway is nobody's: not the worker's that started it, and it serves the next engine."""
    pool = stand.decided(LLAMA, 1)
    config = stand.offloading(LLAMA, card, blocks_per_chunk=BLOCKS_PER_CHUNK, llm=RAY)
    with ranks_of_ray(stand, config) as first:
        objects = store(first, pool.prompts, pool.answers)
        pid = card.gateway_pid()
    with ranks_of_ray(stand, config) as second:
        assert restored(second, pool.prompts, pool.answers) == objects
        assert card.gateway_pid() == pid
    return {"objects": objects, "gateway": pid, "restored": "same tokens"}


def restored(engine: Engine, asked: list[list[int]], expected: list[list[int]]) -> int:
    """How many objects came from the card for the right answer."""
    answer = generate(engine, asked)
    assert_restored(answer, expected)
    return answer.counters.product["load_objects"]


def lose(engine: Engine, gateway: Gateway, asked: list[list[int]]) -> None:
    """Kill -9 a worker of Ray's while the gateway is about to read for it: a second later nothing of it is held."""
    engine.settle()
    engine.reset_prefix()
    gateway.hold("get.before_read")
    engine.begin_generate(asked)
    gateway.await_point("get.before_read")
    os.kill(engine.description["ranks"][1], signal.SIGKILL)
    await_end(engine.description["ranks"][1], END_S_MAX)
    engine.kill()  # as in stand.parallel: its orderly end waits for the rank
    for pid in engine.description["ranks"]:
        await_end(pid, END_S_MAX)
    gateway.let_go("get.before_read")
    left = leftovers(gateway.status, FREED_S_MAX)
    assert left == "", left


@contextmanager
def ranks_of_ray(stand: Stand, config: EngineConfig) -> Iterator[Engine]:
    """A ready engine, of which each rank is an actor. They end with it."""
    began = time.monotonic()
    with stand.engine(config) as engine:
        ranks = engine.description["ranks"]
        titles = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() for pid in ranks]
        print(f"ready in {time.monotonic() - began:.0f} s: {dict(zip(ranks, titles, strict=True))}", flush=True)
        assert len({engine.pid, *ranks}) == 1 + RANKS, "each rank is a process of its own"
        assert all(title.startswith("ray::RayWorker") for title in titles)
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (engine.pid, *ranks)]
        rings = [set(re.findall(r" (\d+) +/memfd:xkv-ring", text)) for text in maps]
        assert rings[1:] == [rings[0]] * RANKS, "one ring for all of them, by its inode"
        assert len(rings[0]) == 1
        named = {path for text in maps for path in re.findall(r"/dev/shm/(\S+)$", text, re.MULTILINE)}
        assert not any("xkv" in name for name in named), named
        yield engine
    for pid in ranks:
        await_end(pid, END_S_MAX)
    for name in named:  # vLLM's queues: Ray kills its actors, also where the engine ends in order
        if name.startswith("psm_"):
            Path("/dev/shm", name).unlink(missing_ok=True)


def as_it_comes(folder: Path) -> str:
    """In vLLM's words, why it does not run Ray's workers on a CPU."""
    with standing(folder / "plain") as stand:
        try:
            stand.engine(stand.config(LLAMA, llm=RAY)).kill()
        except EngineError as error:
            words = next((line for line in error.chain if REFUSED in line), "")
            if words:
                return words
            raise
    raise AssertionError("this vLLM runs Ray's workers on a CPU: the plugin is not needed")


def write_plugin(folder: Path) -> None:
    """Before the cluster is started: a worker that has seen no folder there looks there no more."""
    for name, text in PLUGIN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def module_path(folder: Path) -> str:
    """Where everything is found, and the plugin."""
    return os.pathsep.join([str(folder / "plugin"), *(entry for entry in sys.path if entry)])


@contextmanager
def standing(folder: Path) -> Iterator[Stand]:
    """Engines, by a server that has imported this vLLM."""
    vllm_home = Path(os.environ["VLLM_CACHE_ROOT"])
    with EngineServer(python=sys.executable, folder=folder / "engines", vllm_home=vllm_home) as server:
        yield Stand(server, folder / "models")


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A cluster of one node; its address. Whatever of it is left at the end is ended by its id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    words += ["--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--port={port}"]
    words += [f"--num-cpus={RANKS}", f"--num-gpus={RANKS}", "--object-store-memory=200000000"]
    environment = {"PYTHONPATH": module_path(folder), **{name: os.environ[name] for name in PASSED}}
    with (folder / "ray.log").open("wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/")
    try:
        _await_cluster(process, port, folder / "ray.log")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(END_S_MAX)
        for pid in _of(folder / "ray"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await_end(pid, END_S_MAX)


def _await_cluster(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + END_S_MAX
    while process.poll() is None and time.monotonic() < deadline:
        if b"Ray runtime started" in log.read_bytes():
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"Ray's cluster is not there: {log.read_text()}")


def _of(folder: Path) -> list[int]:
    """The processes that name the cluster's folder in their command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if f"{folder}/".encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
