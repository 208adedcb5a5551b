"""The client's side of the engine server: how a test starts, drives, stops and kills engines.

Owns: the server's process, the connections to its children, every bound on waiting for them.
Must not know: vLLM (it is imported in the server alone) or what an answer ought to be.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from stand.models import Shape

SERVER_START_S_MAX = 180.0  # importing vLLM: 12 to 26 s with idle cores
ENGINE_START_S_MAX = 240.0  # an architecture's first start inspects its class in a process of its own
REQUEST_S_MAX = 240.0  # a few seconds of computing, with busy cores and a load that times out
STOP_S_MAX = 30.0  # a stopped engine's process is gone after this, or it is killed
SETTLE_S_MAX = 20.0  # a few dozen megabytes, on a disk that others use
POLL_S = 0.05

TESTS_FOLDER = Path(__file__).parent.parent
SPEC_MODULE = "xkv_offload"
SPEC_NAME = "XkvOffloadingSpec"
COUNTERS_MODULE = "xkv_offload.metrics"


class EngineError(Exception):
    """An engine did not start, or died: `chain` holds the error's lines from the outermost to its root.

    What a process of its own was stopped by, such as a rank's, stands in `log`.
    """

    def __init__(self, chain: list[str], log: Path) -> None:
        super().__init__("; ".join(chain))
        self.chain = chain
        self.log = log


class StandError(Exception):
    """The stand itself failed: something did not answer in time or ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: its model, its sizes, and its offloading (`extra` None: without)."""

    model: Path
    block_size: int = 32
    dtype: str = "float32"
    max_model_len: int = 2048
    extra: dict[str, Any] | None = None
    load_failure_policy: str = "recompute"
    connector: tuple[str, str] | None = None  # class and module, where it is not vLLM's own
    kv_space_gib: int = 1
    llm: dict[str, Any] = field(default_factory=dict)

    def message(self, log: Path) -> dict[str, Any]:
        """What the server's child is told."""
        transfer = None
        if self.extra is not None:
            name, module = self.connector or ("OffloadingConnector", None)
            transfer = {
                "kv_connector": name,
                "kv_connector_module_path": module,
                "kv_role": "kv_both",
                "kv_load_failure_policy": self.load_failure_policy,
                "kv_connector_extra_config": {
                    "spec_name": SPEC_NAME,
                    "spec_module_path": SPEC_MODULE,
                    **self.extra,
                },
            }
        llm = {
            "model": str(self.model),
            "block_size": self.block_size,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "load_format": "auto",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            **self.llm,
        }
        return {
            "op": "engine",
            "log": str(log),
            "env": {"VLLM_CPU_KVCACHE_SPACE": str(self.kv_space_gib)},
            "llm": llm,
            "kv_transfer_config": transfer,
            "counters_module": COUNTERS_MODULE,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """`seen`: what the stand's witness saw at the spec's worker; `product`: what the product itself counted."""

    seen: dict[str, int]
    product: dict[str, int]

    def since(self, earlier: Counters) -> Counters:
        """What was added after `earlier`."""
        return Counters(
            seen={name: count - earlier.seen.get(name, 0) for name, count in self.seen.items()},
            product={name: count - earlier.product.get(name, 0) for name, count in self.product.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to one batch of prompts, with what was counted while it was made."""

    tokens: list[list[int]]
    finish_reasons: list[str]
    cached_tokens: list[int]
    computed_prompt_tokens: int
    seconds: float
    counters: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a service: the engine's step at which it comes, and the one at which it is aborted."""

    id: str
    prompt: list[int]
    at_step: int = 0
    abort_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request got; `finish_reason` None: it had no end in time. `margin`: see `Engine.begin_serve`."""

    tokens: list[int]
    finish_reason: str | None
    margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The answers to a service's requests. `drained`: no transfer is left; `reset`: the prefixes were forgotten."""

    answers: dict[str, Answer]
    drained: bool
    reset: bool
    counters: Counters


class Engine:
    """One running engine. Made by `EngineServer.engine`."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._connection = connection
        self._reader = connection.makefile("r", encoding="utf-8")
        self._counters = Counters(seen={}, product={})
        self.log = log
        self.pid = 0
        self.description: dict[str, Any] = {}

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, seconds_max: float) -> dict[str, Any]:
        self._connection.settimeout(seconds_max)
        try:
            line = self._reader.readline()
        except TimeoutError as error:
            raise StandError(f"no answer from engine {self.pid} in {seconds_max:.0f} s; log: {self.log}") from error
        except ConnectionError:
            line = ""
        if not line:
            raise StandError(f"engine {self.pid} ended by itself; log: {self.log}\n{log_tail(self.log)}")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        if "error" in answer:
            raise EngineError(answer["error"], self.log)
        return answer

    def start(self, message: dict[str, Any]) -> None:
        """Send the first message and wait until the engine is ready."""
        self._send(message)
        self.description = self._receive(ENGINE_START_S_MAX)
        self.pid = self.description.get("pid", 0)

    def begin_generate(self, prompts: list[list[int]], *, max_tokens: int = 16, drain: bool = True) -> None:
        """Send prompts without waiting; `finish_generate` takes the answer."""
        self._send({"op": "generate", "prompts": prompts, "max_tokens": max_tokens, "drain": drain})

    def finish_generate(self) -> Generation:
        """The answer to `begin_generate`. Its counters are those added since the last answer."""
        answer = self._receive(REQUEST_S_MAX)
        counters = answer.pop("counters")
        return Generation(counters=self._advance(counters), **answer)

    def generate(self, prompts: list[list[int]], *, max_tokens: int = 16) -> Generation:
        """Greedy answers to `prompts`, after which every store job has been submitted and reported."""
        self.begin_generate(prompts, max_tokens=max_tokens)
        return self.finish_generate()

    def decode_steps(self, prompts: list[list[int]], *, steps: int) -> list[float]:
        """Seconds of each of some `steps` steps that do nothing but decode all of `prompts`; then all is drained."""
        self._send({"op": "decode", "prompts": prompts, "steps": steps})
        answer = self._receive(REQUEST_S_MAX)
        assert answer["drained"], "a transfer did not end"
        return [float(value) for value in answer["seconds"]]

    def begin_serve(
        self,
        requests: Sequence[Request],
        *,
        max_tokens: int,
        seconds_max: float = REQUEST_S_MAX,
        reset_prefix: bool = False,
        margins: bool = False,
    ) -> None:
        """Send requests, with the steps at which they come and are aborted, without waiting.

        `margins`: say for each answer by how much (log-probability) its tokens were ahead of the next likely ones.
        """
        self._send(
            {
                "op": "serve",
                "requests": [asdict(request) for request in requests],
                "max_tokens": max_tokens,
                "seconds_max": seconds_max,
                "reset_prefix": reset_prefix,
                "margins": margins,
            }
        )

    def finish_serve(self, seconds_max: float = REQUEST_S_MAX) -> Service:
        """The answers to `begin_serve`. Its counters are those added since the last answer."""
        answer = self._receive(seconds_max)
        counters = self._advance(answer.pop("counters"))
        answers = {name: Answer(**one) for name, one in answer.pop("answers").items()}
        return Service(answers=answers, counters=counters, **answer)

    def _advance(self, message: dict[str, Any]) -> Counters:
        now = Counters(seen=message["seen"], product=message["product"])
        added = now.since(self._counters)
        self._counters = now
        return added

    def counters(self) -> Counters:
        """Everything that this engine's process has counted so far."""
        self._send({"op": "counters"})
        answer = self._receive(REQUEST_S_MAX)
        return Counters(seen=answer["seen"], product=answer["product"])

    def settle(self) -> Counters:
        """Wait until the card has answered for every object handed to it; everything counted so far."""
        deadline = time.monotonic() + SETTLE_S_MAX
        while True:
            counters = self.counters()
            product = counters.product
            if product["store_objects"] <= product["confirmed_objects"] + product["refused_objects"]:
                return counters
            if time.monotonic() > deadline:
                raise StandError(f"the card has not answered for every object: {product}")
            time.sleep(POLL_S)

    def zero_loads(self, *, on: bool, rank: int | None = None) -> None:
        """Overwrite every page with zeros right after it was restored, on every rank or on one: the canary."""
        self._send({"op": "zero_loads", "on": on, "rank": rank})
        self._receive(REQUEST_S_MAX)

    def reset_prefix(self) -> None:
        """Forget the engine's own prefixes (never reaches the card): the next hit comes from the card."""
        self._send({"op": "reset_prefix"})
        assert self._receive(REQUEST_S_MAX)["done"], "blocks were still in use"

    def stop(self) -> None:
        """End the engine as vLLM does, and its process by force if it stays."""
        if self.pid and alive(self.pid):
            with contextlib.suppress(OSError, StandError, EngineError):
                self._send({"op": "stop"})
                self._receive(STOP_S_MAX)
            with contextlib.suppress(StandError):
                await_end(self.pid, STOP_S_MAX)
        self.kill()

    def kill(self) -> None:
        """End the process with SIGKILL, by its id."""
        if self.pid and alive(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            await_end(self.pid, STOP_S_MAX)
        self._reader.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            sys.stderr.write(f"--- log of engine {self.pid}, {self.log}\n{log_tail(self.log)}\n")
        self.stop()


class EngineServer:
    """The process that has imported vLLM. Its engines end with it, and it ends with this process."""

    def __init__(self, *, python: str, folder: Path, vllm_home: Path) -> None:
        self._folder = folder
        self._socket = folder / "engines.sock"
        self._engines: list[Engine] = []
        self.model_runners: dict[str, int] = {}  # how many engines ran which
        self._numbers = itertools.count(1)  # of engines, whichever thread asks for one
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "server.log"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS_FOLDER), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "PYTHONHASHSEED": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(vllm_home),
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else some releases compile small functions in every process
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "passive",  # else waiting threads take the cores that gateways and other engines need
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "stand.engine_server", str(self._socket)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + SERVER_START_S_MAX
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise StandError(f"the engine server did not start\n{log_tail(self._log)}") from None
                time.sleep(POLL_S)
            else:
                return connection

    def _child(self, message: dict[str, Any], log: Path) -> Engine:
        child = Engine(self._connect(), log)
        try:
            child.start(message)
        except BaseException as error:
            child.kill()
            if not isinstance(error, EngineError):
                sys.stderr.write(f"--- {log}\n{log_tail(log)}\n")
            raise
        return child

    def engine(self, config: EngineConfig) -> Engine:
        """A new engine in a new process, ready; EngineError when vLLM or the spec refuses."""
        log = self._folder / f"engine-{next(self._numbers)}.log"
        engine = self._child(config.message(log), log)
        self._engines.append(engine)
        runner = engine.description["model_runner"]
        self.model_runners[runner] = self.model_runners.get(runner, 0) + 1
        return engine

    def write_model(self, shape: Shape, folder: Path) -> Path:
        """Write the model of `shape` into `folder` unless it is there."""
        log = self._folder / f"model-{folder.name}.log"
        message = {
            "op": "write_model",
            "log": str(log),
            "env": {},
            "shape": shape.name.removesuffix(f"-{shape.seed}") if shape.seed else shape.name,
            "seed": shape.seed,
            "folder": str(folder),
        }
        self._child(message, log).kill()
        return folder

    def close(self) -> None:
        """End every engine and the server."""
        for engine in self._engines:
            engine.kill()
        self._process.kill()
        self._process.wait(STOP_S_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def counted(service: Service) -> str:
    """What the product has counted meanwhile, for whoever looks into a fault."""
    return str({name: count for name, count in service.counters.product.items() if count})


def alive(pid: int) -> bool:
    """Whether a process of this id runs (a zombie does not)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def await_end(pid: int, seconds_max: float) -> None:
    """Wait until the process is gone; StandError when it stays."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([handle], [], [], seconds_max)[0]:
            raise StandError(f"process {pid} still runs after {seconds_max:.0f} s")
    finally:
        os.close(handle)


def log_tail(log: Path, *, bytes_max: int = 6000) -> str:
    """The end of a log, for a failure's report."""
    try:
        return log.read_bytes()[-bytes_max:].decode(errors="replace")
    except FileNotFoundError:
        return "(no log)"
