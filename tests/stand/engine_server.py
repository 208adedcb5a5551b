"""A process that has imported vLLM once and forks one child for each engine.

Owns: the engines' processes on the engine's side: what they are told, what they count, how they end.
Must not know: tests, expected results, or anything of xkv but the name of its spec and of its counters.

A child counts by itself what its engine asks of the spec, and what the engine schedules: the product's own
counters are reported beside that, never instead of it. `python -m stand.engine_server SOCKET`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stand import models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Message = dict[str, Any]

# Imported before any fork: they take some seven seconds that no child then spends.
PRELOADED = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.v1.engine.core")
LOAD_ERROR_METHODS = {"get_block_ids_with_load_errors", "get_transfer_results"}
PR_SET_PDEATHSIG = 1
REAP_INTERVAL_S = 0.2  # how soon a dead child is noticed and its process id freed
DRAIN_S_MAX = 30.0  # transfers left after a request's last token
STEP_PAUSE_S = 0.001  # between steps that only wait for transfers


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Channel:
    """Lines of JSON over a stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("r", encoding="utf-8")

    def receive(self) -> Message | None:
        """The next message, or None at the connection's end."""
        line = self._reader.readline()
        if not line:
            return None
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def send(self, message: Message) -> None:
        """Send one message whole."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")


@dataclass
class Witness:
    """What an engine asked of its spec's worker, counted beside the product, and the canary's zeroing."""

    zero_loads: bool = False
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("store_jobs", "store_blocks", "load_jobs", "load_blocks", "zeroed_blocks", "scheduled_tokens"), 0
        )
    )
    _loading: dict[int, list[int]] = field(default_factory=dict)

    def watch_spec(self, spec_class: Any) -> None:
        """Wrap the worker that the spec makes in this process."""
        make_worker = spec_class.get_worker

        def get_worker(spec: Any, kv_caches: Any) -> Any:
            worker = make_worker(spec, kv_caches)
            self._watch_worker(worker, [item.tensor for item in kv_caches.tensors])
            return worker

        spec_class.get_worker = get_worker

    def _watch_worker(self, worker: Any, tensors: list[Any]) -> None:
        submit_store, submit_load, get_finished = worker.submit_store, worker.submit_load, worker.get_finished

        def counted_store(job_id: int, src_spec: Any, dst_spec: Any) -> Any:
            self.counts["store_jobs"] += 1
            self.counts["store_blocks"] += len(src_spec.block_ids)
            return submit_store(job_id, src_spec, dst_spec)

        def counted_load(job_id: int, src_spec: Any, dst_spec: Any, **more: Any) -> Any:
            self._loading[job_id] = [int(block) for block in dst_spec.block_ids]
            return submit_load(job_id, src_spec, dst_spec, **more)

        def counted_finished() -> Any:
            results = list(get_finished())
            for result in results:
                blocks = self._loading.pop(result.job_id, None)
                if blocks is None:
                    continue
                self.counts["load_jobs"] += 1
                self.counts["load_blocks"] += len(blocks)
                if self.zero_loads:
                    self.counts["zeroed_blocks"] += len(blocks)
                    for tensor in tensors:
                        tensor[blocks] = 0
            return results

        worker.submit_store, worker.submit_load, worker.get_finished = counted_store, counted_load, counted_finished

    def watch_scheduler(self, scheduler: Any) -> None:
        """Count the tokens that the engine really schedules for computing."""
        schedule = scheduler.schedule

        def counted_schedule(*arguments: Any, **more: Any) -> Any:
            output = schedule(*arguments, **more)
            self.counts["scheduled_tokens"] += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = counted_schedule


def _answer_of(output: Any, *, margins: bool) -> Message:
    """What a request has so far; `margin`: the least lead of a token over the next likely one, in log-probability."""
    found = output.outputs[0]
    margin = None
    if margins:
        ranked = [sorted((one.logprob for one in step.values()), reverse=True) for step in found.logprobs]
        margin = min((first - second for first, second, *_ in ranked), default=None)
    return {"tokens": list(found.token_ids), "finish_reason": found.finish_reason, "margin": margin}


def _connector_class() -> Any:
    """The connector as vLLM defines it."""
    module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
    return module.OffloadingConnector


class EngineChild:
    """One engine and the requests that its connection makes."""

    def __init__(self, request: Message) -> None:
        self._witness = Witness()
        self._product_counters: dict[str, int] = {}
        self._llm = self._build(request)
        core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._witness.watch_scheduler(core.scheduler)
        runner = core.model_executor.driver_worker.worker.model_runner
        self.description: Message = {
            "model_runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            "groups": len(core.scheduler.kv_cache_config.kv_cache_groups),
            "own_connector_methods": sorted(vars(_connector_class()).keys() & LOAD_ERROR_METHODS),
            "block_size": int(self._llm.llm_engine.vllm_config.cache_config.block_size),
        }

    def _build(self, request: Message) -> Any:
        transfer = request["kv_transfer_config"]
        arguments = dict(request["llm"])
        if transfer is not None:
            extra = transfer["kv_connector_extra_config"]
            if transfer["kv_connector_module_path"]:
                importlib.import_module(transfer["kv_connector_module_path"])  # before the spec, as vLLM does
            module = importlib.import_module(extra["spec_module_path"])
            self._witness.watch_spec(getattr(module, extra["spec_name"]))
            self._product_counters = importlib.import_module(request["counters_module"]).PROCESS_COUNTERS
            from vllm.config import KVTransferConfig  # noqa: PLC0415 - nothing but the server itself may import vLLM

            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        from vllm import LLM  # noqa: PLC0415 - nothing but the server itself may import vLLM

        return LLM(**arguments)

    def answer(self, request: Message) -> Message:
        """Carry out one request."""
        operations: dict[str, Callable[[Message], Message]] = {
            "generate": self._generate,
            "serve": self._serve,
            "decode": self._decode,
            "counters": self._counters,
            "zero_loads": self._zero_loads,
            "reset_prefix": self._reset_prefix,
            "drain": self._drain,
        }
        return operations[request["op"]](request)

    def _generate(self, request: Message) -> Message:
        from vllm import SamplingParams  # noqa: PLC0415 - nothing but the server itself may import vLLM

        sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        before = self._witness.counts["scheduled_tokens"]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        if request["drain"]:
            self._drain(request)
        generated = sum(len(output.outputs[0].token_ids) for output in outputs)
        scheduled = self._witness.counts["scheduled_tokens"] - before
        return {
            "seconds": seconds,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "finish_reasons": [output.outputs[0].finish_reason for output in outputs],
            "cached_tokens": [output.num_cached_tokens or 0 for output in outputs],
            # the last token of each answer is never fed back, all others are computed once
            "computed_prompt_tokens": scheduled - max(0, generated - len(outputs)),
            "counters": self._counters(request),
        }

    def _serve(self, request: Message) -> Message:
        """Serve requests that come at their step and may be aborted at another, as a serving loop does."""
        from vllm import SamplingParams  # noqa: PLC0415 - nothing but the server itself may import vLLM

        reset = not request["reset_prefix"] or bool(self._llm.reset_prefix_cache())
        engine = self._llm.llm_engine
        coming = sorted(request["requests"], key=lambda one: one["at_step"])
        aborts = {one["id"]: one["abort_step"] for one in coming if one["abort_step"] is not None}
        sampling = {"temperature": 0, "max_tokens": request["max_tokens"], "ignore_eos": True, "detokenize": False}
        answers: dict[str, Message] = {}
        open_ids: set[str] = set()
        deadline, step = time.monotonic() + request["seconds_max"], 0
        while coming or open_ids:
            while coming and coming[0]["at_step"] <= step:
                one = coming.pop(0)
                params = SamplingParams(**sampling, logprobs=2 if request["margins"] else None)
                engine.add_request(one["id"], {"prompt_token_ids": one["prompt"]}, params)
                answers[one["id"]] = {"tokens": [], "finish_reason": None, "margin": None}
                open_ids.add(one["id"])
            for name in [name for name in open_ids if aborts.get(name, step + 1) <= step]:
                engine.abort_request([name])
                open_ids.discard(name)
                answers[name]["finish_reason"] = "abort"
            outputs = engine.step()
            for output in outputs:
                if output.request_id in open_ids:
                    answers[output.request_id].update(_answer_of(output, margins=request["margins"]))
                    if output.finished:
                        open_ids.discard(output.request_id)
            if not outputs:
                time.sleep(STEP_PAUSE_S)
            if time.monotonic() > deadline:
                break
            step += 1
        drained = not open_ids and self._drain(request)["drained"]
        return {"answers": answers, "drained": drained, "reset": reset, "counters": self._counters(request)}

    def _decode(self, request: Message) -> Message:
        """Seconds of each step in which all prompts are decoded and nothing else is computed."""
        from vllm import SamplingParams  # noqa: PLC0415 - nothing but the server itself may import vLLM

        engine = self._llm.llm_engine
        steps = request["steps"]
        # One token comes from each prompt's own computation, and one more step is not counted at either end.
        params = SamplingParams(temperature=0, max_tokens=steps + 3, ignore_eos=True, detokenize=False)
        for number, ids in enumerate(request["prompts"]):
            engine.add_request(f"decode-{number}", {"prompt_token_ids": ids}, params)
        lengths: dict[str, int] = {}
        while len(lengths) < len(request["prompts"]) or min(lengths.values()) < 2:
            lengths |= {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
        seconds = []
        for _ in range(steps - max(lengths.values()) + 2):
            started = time.perf_counter()
            outputs = engine.step()
            seconds.append(time.perf_counter() - started)
            assert len(outputs) == len(lengths), "each step decodes all of them"
        while engine.has_unfinished_requests():
            engine.step()
        return {"seconds": seconds, **self._drain(request)}

    def _drain(self, _request: Message) -> Message:
        """Step until the connector's last jobs are submitted and reported, as a serving loop does when idle."""
        deadline = time.monotonic() + DRAIN_S_MAX
        while self._scheduler.has_requests():
            if time.monotonic() > deadline:
                return {"drained": False}
            self._llm.llm_engine.step()
            time.sleep(STEP_PAUSE_S)
        return {"drained": True}

    def _counters(self, _request: Message) -> Message:
        return {"seen": dict(self._witness.counts), "product": dict(self._product_counters)}

    def _zero_loads(self, request: Message) -> Message:
        self._witness.zero_loads = request["on"]
        return {}

    def _reset_prefix(self, _request: Message) -> Message:
        return {"done": bool(self._llm.reset_prefix_cache())}

    def stop(self) -> None:
        """End the engine as vLLM ends it."""
        self._llm.llm_engine.engine_core.shutdown()


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _failure(error: BaseException) -> Message:
    traceback.print_exc()
    chain = []
    link: BaseException | None = error
    while link is not None:
        chain.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or link.__context__
    return {"error": chain}


def _run_engine(channel: Channel, request: Message) -> None:
    try:
        engine_class = EngineChild
        if request["llm"].get("tensor_parallel_size", 1) > 1:
            engine_class = importlib.import_module("stand.parallel_child").ParallelChild
        child = engine_class(request)
    except BaseException as error:  # noqa: BLE001 - whatever stops an engine's start is the answer
        channel.send(_failure(error))
        return
    channel.send({"pid": os.getpid(), **child.description})
    while (request_ := channel.receive()) is not None:
        if request_["op"] == "stop":
            child.stop()
            channel.send({})
            return
        try:
            answer = child.answer(request_)
        except BaseException as error:  # noqa: BLE001 - an engine that died is the answer
            answer = _failure(error)
        channel.send(answer)


def _run_child(connection: socket.socket) -> None:
    """Serve one connection in a forked child."""
    die_with_parent()
    channel = Channel(connection)
    request = channel.receive()
    if request is None:
        return
    _redirect_output(request["log"])
    os.environ.update(request["env"])
    if request["op"] == "write_model":
        try:
            models.write(models.SHAPES[request["shape"]].with_seed(request["seed"]), Path(request["folder"]))
        except Exception as error:  # noqa: BLE001 - the parent cannot see this process
            channel.send(_failure(error))
        else:
            channel.send({})
        return
    _run_engine(channel, request)


def _reap(children: set[int]) -> None:
    for pid in tuple(children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        children.discard(pid)


def serve(path: Path) -> None:
    """Import vLLM, listen on `path`, and fork a child for each connection until this process is killed."""
    for module in PRELOADED:
        importlib.import_module(module)
    import vllm  # noqa: PLC0415 - nothing but the server itself may import vLLM

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(REAP_INTERVAL_S)
    sys.stderr.write(f"vllm {vllm.__version__} ready\n")
    children: set[int] = set()
    while True:
        _reap(children)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.setblocking(True)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                listener.close()
                _run_child(connection)
                code = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # an engine's threads and finalizers must not run in a fork's interpreter exit
        children.add(pid)
        connection.close()


def main(arguments: Iterable[str]) -> None:
    """`SOCKET`: where to listen."""
    (path,) = arguments
    die_with_parent()
    serve(Path(path))


if __name__ == "__main__":
    main(sys.argv[1:])
