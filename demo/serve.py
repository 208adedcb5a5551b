"""One process of the demo: writes the model, or serves one prompt with a vLLM engine and says what happened.

Owns: the engine, the time of the request alone, and what is counted in this process: the tokens that the
scheduler really computes, and xkv's own counters around the request.
Must not know: what the other process did, or what is expected of either.
`python serve.py write|serve JOB FD`: the job is a JSON file, what happened goes to FD, a JSON object a line.
"""
# ruff: noqa: PLC0415 (each mode imports what it needs; importing vLLM is a stage that is shown)

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
CONFIRM_S_MAX = 60.0  # some ten objects of a few MiB: a card that needs longer is no card
PAUSE_S = 0.01

Job = dict[str, Any]


class Reporter:
    """Lines of JSON to the parent."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", encoding="utf-8")

    def say(self, event: str, **values: object) -> None:
        """Send one event."""
        self._stream.write(json.dumps({"event": event, **values}) + "\n")
        self._stream.flush()


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer and what it cost."""

    seconds: float
    tokens: list[int]
    cached_tokens: int
    computed_tokens: int  # of the prompt


def write_model(job: Job) -> None:
    """Write a Llama with real random weights: with dummy ones an answer would not depend on what is restored."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**job["model"])).save_pretrained(job["folder"])


class Engine:
    """A vLLM engine within this process."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from xkv_compat.features import detect_live

        extra = dict(job["kv_transfer_config"]["kv_connector_extra_config"])
        if not detect_live()["blocks_per_chunk_key"]:  # the chunk is given in tokens there
            extra["block_size"] = extra.pop("blocks_per_chunk") * job["llm"]["block_size"]
        transfer = KVTransferConfig(**{**job["kv_transfer_config"], "kv_connector_extra_config": extra})
        self._llm = LLM(**job["llm"], kv_transfer_config=transfer)
        self._reporter = reporter
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._scheduled = 0
        self._count_scheduled_tokens()

    @property
    def block_size(self) -> int:
        """Tokens in one block of the engine's KV pages, as the engine has it."""
        return int(self._llm.llm_engine.vllm_config.cache_config.block_size)

    def _count_scheduled_tokens(self) -> None:
        schedule = self._core.scheduler.schedule

        def counted(*arguments: Any, **more: Any) -> Any:
            output = schedule(*arguments, **more)
            if output.total_num_scheduled_tokens:
                self._scheduled += output.total_num_scheduled_tokens
                self._reporter.say("scheduled", tokens=self._scheduled)
            return output

        self._core.scheduler.schedule = counted

    def answer(self, prompt: list[int], new_tokens: int) -> Answer:
        """Serve one prompt; the time is that of the request alone."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self._scheduled = 0
        started = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [int(token) for token in output.outputs[0].token_ids]
        # the last new token is never fed back, every other one is computed once
        computed = self._scheduled - (len(tokens) - 1)
        return Answer(seconds, tokens, int(output.num_cached_tokens or 0), computed)

    def settle(self, confirmed: int, counters: dict[str, int]) -> None:
        """Step until vLLM has no transfer left, then wait until the card has confirmed so many objects."""
        deadline = time.monotonic() + CONFIRM_S_MAX
        while self._core.scheduler.has_requests() or counters["confirmed_objects"] < confirmed:
            if time.monotonic() > deadline:
                found = {name: value for name, value in counters.items() if value}
                raise TimeoutError(f"the card did not confirm {confirmed} objects in {CONFIRM_S_MAX:.0f} s: {found}")
            if self._core.scheduler.has_requests():
                self._llm.llm_engine.step()
            time.sleep(PAUSE_S)

    def stop(self) -> None:
        """End the engine as vLLM ends it."""
        self._llm.llm_engine.engine_core.shutdown()


def serve(job: Job, reporter: Reporter) -> None:
    """Start an engine, warm it up with another prompt, serve the prompt, and stop."""
    import vllm

    from xkv_offload.metrics import PROCESS_COUNTERS

    reporter.say("imported", version=vllm.__version__)
    engine = Engine(job, reporter)
    reporter.say("started")
    engine.answer(job["warm_up_prompt"], job["warm_up_tokens"])
    engine.settle(0, PROCESS_COUNTERS)
    before = dict(PROCESS_COUNTERS)
    reporter.say("warm")
    answer = engine.answer(job["prompt"], job["new_tokens"])
    reporter.say("answered")
    engine.settle(before["confirmed_objects"] + job["confirm_objects"], PROCESS_COUNTERS)
    reporter.say(
        "result",
        pid=os.getpid(),
        chunk_tokens=engine.block_size * job["kv_transfer_config"]["kv_connector_extra_config"]["blocks_per_chunk"],
        seconds=answer.seconds,
        tokens=answer.tokens,
        cached_tokens=answer.cached_tokens,
        computed_tokens=answer.computed_tokens,
        counters={name: value - before[name] for name, value in PROCESS_COUNTERS.items()},
    )
    engine.stop()


def main(arguments: list[str]) -> None:
    """`write|serve JOB FD`."""
    mode, job_file, descriptor = arguments
    # However the parent ends, this process ends with it.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    job = json.loads(Path(job_file).read_text())
    reporter = Reporter(int(descriptor))
    if mode == "write":
        write_model(job)
        reporter.say("result")
    else:
        serve(job, reporter)


if __name__ == "__main__":
    main(sys.argv[1:])
