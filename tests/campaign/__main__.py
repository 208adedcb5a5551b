"""`python -m campaign --seconds N --seed S [--canary] [--json]`, with XKV_TARGET naming the release that is installed.

Owns: the command line, where what is said goes, the exit code. Must not know: what a campaign does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from campaign.run import Campaign, Options
from stand.cases import Stand, target
from stand.engines import EngineServer
from xkv_matrix.findings import MatrixError

if TYPE_CHECKING:
    from collections.abc import Callable

    from campaign.outcome import Outcome

REASONS_MAX = 20  # lines that are shown: whatever is wrong is wrong in many answers


def _options(arguments: list[str]) -> tuple[Options, bool]:
    parser = argparse.ArgumentParser(prog="campaign", allow_abbrev=False)
    parser.add_argument("--seconds", type=_seconds, default=60, help="how long requests are sent (60)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn, and in which order (0)")
    parser.add_argument("--canary", action="store_true", help="without verification: wrong answers must be found")
    parser.add_argument("--json", action="store_true", help="print the closing line of JSON alone")
    found = parser.parse_args(arguments)
    return Options(found.seconds, found.seed, found.canary), found.json


def _seconds(text: str) -> int:
    value = int(text)
    if not 10 <= value <= 86_400:
        raise argparse.ArgumentTypeError("10 to 86400 seconds")
    return value


def main(arguments: list[str]) -> int:
    """Run a campaign; 0 if it passed, 1 if not, 2 where there is nothing to run it on."""
    options, quiet = _options(arguments)
    try:
        target()
    except (AssertionError, MatrixError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="xkv-campaign-"))
    log = folder / "campaign.log"
    voice = os.fdopen(os.dup(2), "w", buffering=1)
    # Gateways write to the descriptor that they inherit: thousands of lines about faults that are meant.
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is tidied up
    began = time.monotonic()

    def say(line: str) -> None:
        if not quiet:
            voice.write(f"{time.monotonic() - began:7.1f} s  {line}\n")

    try:
        outcome = _run(options, folder, say)
    except BaseException:
        voice.write(f"the campaign broke off; its logs: {folder}\n")
        raise
    finally:
        sys.stderr = voice
    if not outcome.canary:
        for line in outcome.reasons[:REASONS_MAX]:
            voice.write(f"{line}\n")
    if outcome.passed:
        say(outcome.verdict())
        shutil.rmtree(folder)
    else:
        voice.write(f"{outcome.verdict()}\nlogs: {folder}\n")
    print(outcome.line(), flush=True)
    return 0 if outcome.passed else 1


def _run(options: Options, folder: Path, say: Callable[[str], None]) -> Outcome:
    vllm_home = Path(os.environ.get("VLLM_CACHE_ROOT", folder / "vllm"))
    with EngineServer(python=sys.executable, folder=folder / "engines", vllm_home=vllm_home) as server:
        return Campaign(Stand(server, folder / "models"), folder, options, say).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
