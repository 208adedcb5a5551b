"""The main job, shown: a prompt is served, the engine stops, and a new process restores it from the card.

Owns: the order of things, the model's and the prompt's sizes, what is shown while it runs, and the exit code.
Must not know: vLLM (serve.py, run in a process of its own, does) or any release's number.
`python demo/run.py --target RELEASE [--json]`, with the python of an environment that holds the release.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from xkv_store.errors import PeerError, UserError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from demo.outcome import Outcome, Served
from demo.processes import DemoError, Place, card_status, child, temporary_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PROMPT_TOKENS: Final = 8_196
NEW_TOKENS: Final = 16
BLOCK_SIZE: Final = 32
BLOCKS_PER_CHUNK: Final = 16
CHUNK_TOKENS: Final = BLOCK_SIZE * BLOCKS_PER_CHUNK
WARM_UP_TOKENS: Final = 500  # less than a chunk: nothing of it is stored or looked up
WARM_UP_NEW_TOKENS: Final = 2

# Much to compute and little to keep: wide layers, many query heads, two KV heads. Few layers, because every layer
# costs each new token some waits among threads, which on a busy machine are long. The scale of the weights makes
# greedy output diverse and dependent on the whole prompt: with restored pages zeroed it differs from the first token.
MODEL: Final[Mapping[str, object]] = {
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "num_hidden_layers": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 16_384,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
CARD_BYTES: Final = 256 << 20  # some eight times what the prompt leaves
RING_BYTES: Final = 64 << 20
LINGER_S: Final = 120.0  # from one engine's end to the next one's start; it is asked to stop at the end

STAGES: Final = {
    "imported": "importing vLLM",
    "started": "starting the engine",
    "warm": "warming up with another prompt",
    "answered": "serving the prompt",
    "result": "waiting until the card has confirmed everything",
}


def prompt(*, tokens: int, seed: int) -> list[int]:
    """Token ids without a pattern, the same in every run; the lowest stay free for special tokens."""
    vocabulary = int(str(MODEL["vocab_size"]))
    source = random.Random(seed)  # noqa: S311 (nothing secret)
    return [source.randrange(10, vocabulary) for _ in range(tokens)]


class Display:
    """A line for each stage on the terminal, with a bar for the prompt's tokens; plain lines elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._task: TaskID | None = None
        self._title = ""
        self._started = 0.0

    @contextmanager
    def live(self) -> Iterator[None]:
        """While this lasts, the bars move."""
        with self._progress:
            yield
            self.done()

    def begin(self, title: str, total: int | None = None) -> None:
        """A stage begins, and with it the one before is done."""
        self.done()
        self._title, self._started = title, time.monotonic()
        self._task = self._progress.add_task(title, total=total, note="")

    def advance(self, tokens: int, total: int) -> None:
        """So much of the prompt is computed or being computed."""
        if self._task is not None:
            shown = min(tokens, total)
            self._progress.update(self._task, total=total, completed=shown, note=f"{shown:,} tokens")

    def done(self) -> None:
        """The stage is done."""
        if self._task is None:
            return
        if not self.console.is_terminal:
            self.console.print(f"{self._title}: {time.monotonic() - self._started:.1f} s")
        self._progress.update(self._task, total=1, completed=1)
        self._progress.stop_task(self._task)
        self._task = None

    def say(self, text: str) -> None:
        """A line that stays, beside the stages."""
        self.console.print(text, soft_wrap=True)


def serving_job(place: Place) -> dict[str, object]:
    """What both engines are told alike."""
    return {
        "llm": {
            "model": str(place.model),
            "load_format": "auto",
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": PROMPT_TOKENS + CHUNK_TOKENS,
            # One chunk a step. The prompt's end then is a step of its own in both processes: the same arithmetic.
            "max_num_batched_tokens": CHUNK_TOKENS,
            "max_num_seqs": 4,
        },
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "XkvOffloadingSpec",
                "spec_module_path": "xkv_offload",
                "blocks_per_chunk": BLOCKS_PER_CHUNK,
                "xkv.path": str(place.card),
                "xkv.socket_dir": str(place.sockets),
                "xkv.capacity_bytes": CARD_BYTES,
                "xkv.ring_bytes": RING_BYTES,
                "xkv.linger_s": LINGER_S,
            },
        },
        "prompt": prompt(tokens=PROMPT_TOKENS, seed=1),
        "new_tokens": NEW_TOKENS,
        "warm_up_prompt": prompt(tokens=WARM_UP_TOKENS, seed=2),
        "warm_up_tokens": WARM_UP_NEW_TOKENS,
    }


def serve(job: Mapping[str, object], place: Place, target: str, display: Display, title: str) -> Served:
    """Run one engine in a process of its own, and return when that process has ended."""
    with child("serve", job, place, target) as process:
        titles = iter(STAGES.items())
        awaited, stage = next(titles)
        display.begin(f"{title}: {stage}")
        for event in process.events():
            if event["event"] == "scheduled" and awaited == "answered":
                display.advance(event["tokens"], PROMPT_TOKENS)
            elif event["event"] == "imported" and event["version"].partition("+")[0] != target:
                raise DemoError(f"this environment holds vLLM {event['version']}, not {target}")
            if event["event"] != awaited:
                continue
            if awaited == "result":
                served = Served.of(event)
                break
            awaited, stage = next(titles)
            display.begin(f"{title}: {stage}")
        display.begin(f"{title}: stopping the engine, ending process {served.pid}")
        process.wait()
        display.done()
    return served


def demonstrate(place: Place, target: str, display: Display) -> Outcome:
    """Do the main job."""
    display.begin("writing a model")
    with child("write", {"model": MODEL, "folder": str(place.model)}, place, target) as process:
        for _ in process.events():
            pass
        process.wait()
    job = serving_job(place)
    chunks = PROMPT_TOKENS // CHUNK_TOKENS
    cold = serve({**job, "confirm_objects": chunks}, place, target, display, "1 cold")
    gateway_pid, status = card_status(place)
    display.say(
        f"process {cold.pid} has ended; gateway {gateway_pid} serves the card: "
        f"{status['objects']} objects, {status['object_bytes']:,} bytes"
    )
    warm = serve({**job, "confirm_objects": 0}, place, target, display, "2 restored")
    return Outcome(target=target, prompt_tokens=PROMPT_TOKENS, cold=cold, warm=warm)


def release(text: str) -> str:
    """A release's number, which also names a folder."""
    if not re.fullmatch(r"[0-9][0-9A-Za-z.]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no release number")
    return text


def show(outcome: Outcome, *, line_only: bool) -> None:
    """Print the table and, last, the line of JSON."""
    if not line_only:
        console = Console(highlight=False, soft_wrap=True)
        for sentence in outcome.sentences():
            console.print(sentence)
        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for row in outcome.rows():
            table.add_row(*row)
        console.print(table)
    sys.stdout.write(outcome.line() + "\n")
    sys.stdout.flush()


def interrupted(number: int, _frame: object) -> None:
    """End by the ordinary way, so that everything is taken down."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str]) -> int:
    """Run the demo; 0 where the main job was done, 1 where not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--target", "--target-label", type=release, required=True, help="the release installed here")
    parser.add_argument("--json", action="store_true", help="print the closing line of JSON alone")
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    display = Display(quiet=options.json)
    try:
        with temporary_place() as place, display.live():
            outcome = demonstrate(place, options.target, display)
    except (DemoError, UserError, PeerError, OSError) as error:
        sys.stderr.write(f"the demo failed: {error}\n")
        return 1
    show(outcome, line_only=options.json)
    fault = outcome.fault()
    if fault is not None:
        sys.stderr.write(f"the demo failed: {fault}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
