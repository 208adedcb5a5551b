"""The product's main job, shown: a prompt served cold, everything stopped, and the prompt restored in a new process.

Owns: the two runs, their display, and the closing line of JSON.
Must not know: how engines are run (the stand does), how xkv works.

`python demo/run.py --target LABEL [--json]` in an environment that holds vLLM. Ends with 1 where the restored answer
differs, where less than every whole chunk was restored, or where a count contradicts another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # the stand lives with the tests

from stand.engines import EngineConfig, EngineServer
from stand.gateways import EmbeddedCard
from stand.models import DEMO, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from stand.engines import Counters, Engine, Generation

MIB = 1024 * 1024
PROMPT_TOKENS = 4130
OUTPUT_TOKENS = 8
BLOCK_TOKENS = 32
BLOCKS_PER_CHUNK = 16
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
WHOLE_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
WARM_UP_TOKENS = 64  # less than a chunk: nothing of it is stored; the first request of a process costs extra
CAPACITY_BYTES = 512 * MIB
RING_BYTES = 512 * MIB  # the prompt's pages are about 100 MB, and half of the ring may wait for the card
LINGER_S = 120.0  # the gateway outlives the first engine by more than a second start takes
STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process's answer to the prompt."""

    pid: int
    answer: Generation
    settled: Counters
    model_runner: str
    zeroed_tokens: list[list[int]] | None = None  # the answer where every restored page is overwritten by zeros


class Steps:
    """The progress display: what is being done, and how many steps there are."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=STEPS)

    def begin(self, text: str) -> None:
        """The next step; the one before it is done."""
        started = self._progress.tasks[0].description != ""
        self._progress.update(self._task, description=text, advance=1 if started else 0)

    def end(self) -> None:
        """All is done."""
        self._progress.update(self._task, description="done", completed=STEPS)


@contextmanager
def _steps() -> Iterator[Steps]:
    columns = (
        SpinnerColumn(),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Steps(progress)


def _serve(engine: Engine, steps: Steps, text: str, *, canary: bool) -> Run:
    asked = [prompt(DEMO, tokens=PROMPT_TOKENS, seed=1)]
    engine.generate([prompt(DEMO, tokens=WARM_UP_TOKENS, seed=99)], max_tokens=2)
    steps.begin(text)
    answer = engine.generate(asked, max_tokens=OUTPUT_TOKENS)
    settled = engine.settle()
    zeroed_tokens = None
    if canary:
        steps.begin("second process: restoring again and zeroing the pages, which must change the answer")
        engine.reset_prefix()
        engine.zero_loads(on=True)
        zeroed_tokens = engine.generate(asked, max_tokens=OUTPUT_TOKENS).tokens
    return Run(
        pid=engine.pid,
        answer=answer,
        settled=settled,
        model_runner=engine.description["model_runner"],
        zeroed_tokens=zeroed_tokens,
    )


def _two_runs(folder: Path, steps: Steps) -> tuple[Run, Run]:
    vllm_home = Path(os.environ.get("VLLM_CACHE_ROOT", folder / "vllm"))
    with EmbeddedCard(folder / "card", capacity_bytes=CAPACITY_BYTES, linger_s=LINGER_S, ring_bytes=RING_BYTES) as card:
        config = EngineConfig(
            model=folder / "model",
            block_size=BLOCK_TOKENS,
            max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
            extra={"blocks_per_chunk": BLOCKS_PER_CHUNK, **card.extra},
        )
        steps.begin("first process: importing vLLM, writing the model")
        with EngineServer(python=sys.executable, folder=folder / "first", vllm_home=vllm_home) as server:
            server.write_model(DEMO, config.model)
            steps.begin("first process: starting the engine and its embedded gateway")
            with server.engine(config) as engine:
                cold = _serve(engine, steps, f"first process: computing {PROMPT_TOKENS} prompt tokens", canary=False)
                steps.begin("first process: stopping")
        steps.begin("second process: importing vLLM")
        with EngineServer(python=sys.executable, folder=folder / "second", vllm_home=vllm_home) as server:
            server.connect_once()
            steps.begin("second process: starting the engine")
            with server.engine(config) as engine:
                restored = _serve(engine, steps, "second process: restoring the prompt from the card", canary=True)
                steps.begin("second process: stopping")
        steps.begin("ending the gateway, removing the card")
    return cold, restored


def _mistakes(cold: Run, restored: Run) -> list[str]:
    """What contradicts the demonstration's claim; empty when it holds."""
    seen, product = restored.answer.counters.seen, restored.answer.counters.product
    checks = {
        "the answers differ": restored.answer.tokens == cold.answer.tokens,
        "zeroed pages give the same answer, so equal answers prove nothing": restored.zeroed_tokens
        not in (None, cold.answer.tokens),
        "both answers came from one process": restored.pid != cold.pid,
        "the first run restored something": cold.answer.counters.seen["load_blocks"] == 0,
        "not every whole chunk was restored": seen["load_blocks"] * BLOCK_TOKENS == WHOLE_TOKENS,
        "the product counts other objects": product["load_objects"] * CHUNK_TOKENS == WHOLE_TOKENS,
        "other bytes were stored than restored": product["load_bytes"] == cold.settled.product["store_bytes"],
        "the second run computed restored tokens": restored.answer.computed_prompt_tokens
        == PROMPT_TOKENS - WHOLE_TOKENS,
    }
    return [text for text, holds in checks.items() if not holds]


def _summary(target: str, cold: Run, restored: Run) -> dict[str, object]:
    return {
        "target": target,
        "prompt_tokens": PROMPT_TOKENS,
        "restored_tokens": restored.answer.counters.seen["load_blocks"] * BLOCK_TOKENS,
        "identical": restored.answer.tokens == cold.answer.tokens,
        "objects": restored.answer.counters.product["load_objects"],
        "bytes": restored.answer.counters.product["load_bytes"],
    }


def _table(target: str, cold: Run, restored: Run) -> Table:
    table = Table(title=f"vLLM {target}: one prompt of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} tokens answered")
    for heading in ("", "cold", "restored"):
        table.add_column(heading, justify="left" if not heading else "right")
    runs = (cold, restored)
    counts = [run.answer.counters for run in runs]
    rows = {
        "process id": [str(run.pid) for run in runs],
        "seconds": [f"{run.answer.seconds:.2f}" for run in runs],
        "prompt tokens computed": [f"{run.answer.computed_prompt_tokens:,}" for run in runs],
        "prompt tokens restored": [f"{count.seen['load_blocks'] * BLOCK_TOKENS:,}" for count in counts],
        "objects stored": [f"{run.settled.product['confirmed_objects']:,}" for run in runs],
        "objects restored": [f"{count.product['load_objects']:,}" for count in counts],
        "bytes restored": [f"{count.product['load_bytes']:,}" for count in counts],
        "hit rate": [f"{count.seen['load_blocks'] * BLOCK_TOKENS / PROMPT_TOKENS:.1%}" for count in counts],
    }
    for name, (left, right) in rows.items():
        table.add_row(name, left, right)
    return table


def _show(target: str, cold: Run, restored: Run) -> None:
    console = Console(width=100)
    console.print(_table(target, cold, restored))
    console.print(f"restored {cold.answer.seconds / restored.answer.seconds:.1f} times as fast as computed")
    console.print(f"first process {cold.pid}, second process {restored.pid}")
    console.print(f"prompt tokens that the second process computed: {restored.answer.computed_prompt_tokens}")
    console.print(f"model runner: {restored.model_runner}", highlight=False)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; the exit code."""
    parser = argparse.ArgumentParser(description="Serve a prompt, stop, restore it in a new process.")
    parser.add_argument("--target", required=True, help="what to call the release that is installed")
    parser.add_argument("--json", action="store_true", help="print nothing but the closing line on standard output")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # so that the gateway and the card go in that case too
    try:
        with tempfile.TemporaryDirectory(prefix="xkv-demo-") as folder, _steps() as steps:
            cold, restored = _two_runs(Path(folder), steps)
            steps.end()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; engines and gateway are ended, the card is removed\n")
        return 130
    if not options.json:
        _show(options.target, cold, restored)
    mistakes = _mistakes(cold, restored)
    for mistake in mistakes:
        sys.stderr.write(f"error: {mistake}\n")
    sys.stdout.write(json.dumps(_summary(options.target, cold, restored)) + "\n")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
