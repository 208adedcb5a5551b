"""A long run with real engines, from the command line: what it has found, where what is said goes, its exit code.

Owns: the counts that every such run has and when one has passed, the run's folder and logs, its closing line.
Must not know: what a run does, or what it counts beside that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stand.cases import Stand, target
from stand.engines import EngineServer
from xkv_matrix.findings import MatrixError

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[Stand, Path, "Options", Callable[[str], None]], "Findings"]

REASONS_MAX: Final = 20  # lines that are shown: whatever is wrong is wrong in many answers
SECONDS_MIN: Final = 10
SECONDS_MAX: Final = 86_400
BAD: Final = ("wrong", "engine_deaths", "stuck", "leaks")


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is asked to do."""

    seconds: int
    seed: int
    canary: bool


@dataclass(slots=True)
class Findings(ABC):
    """What every run counts."""

    target: str
    options: Options
    requests: int = field(default=0, kw_only=True)
    wrong: int = field(default=0, kw_only=True)
    engine_deaths: int = field(default=0, kw_only=True)
    stuck: int = field(default=0, kw_only=True)
    leaks: int = field(default=0, kw_only=True)
    restored: Counter[str] = field(default_factory=Counter, kw_only=True)  # objects in answers, by whose they are
    reasons: list[str] = field(default_factory=list, kw_only=True)  # one line for each thing that should not be

    def complain(self, what: str) -> None:
        """Keep what should not be, for whoever looks into it."""
        self.reasons.append(what)

    @abstractmethod
    def unproved(self) -> list[str]:
        """What has not happened that had to: without it the run proves nothing."""

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """The closing line's names and numbers."""

    @property
    def passed(self) -> bool:
        """Whether all is as it has to be; a canary has to find something."""
        if self.options.canary:
            return self.wrong > 0
        return not sum(getattr(self, name) for name in BAD) and self.requests > 0 and not self.unproved()

    def verdict(self) -> str:
        """Why it passed or not, one line."""
        if self.options.canary:
            return "the canary found wrong answers" if self.passed else "the canary found nothing: the run is blind"
        if self.passed:
            return "nothing wrong, nothing dead, nothing stuck"
        return "; ".join([*(f"{name} {getattr(self, name)}" for name in BAD), *self.unproved()])

    def line(self) -> str:
        """The closing line."""
        return json.dumps(self.counts())


def main(arguments: list[str], *, name: str, run: Run) -> int:
    """`--seconds N --seed S [--canary] [--json]`, with XKV_TARGET naming the release that is installed.

    0 if the run passed, 1 if not, 2 where there is nothing to run it on.
    """
    options, quiet = _options(arguments, name)
    try:
        target()
    except (AssertionError, MatrixError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    folder = Path(tempfile.mkdtemp(prefix=f"xkv-{name}-"))
    voice = os.fdopen(os.dup(2), "w", buffering=1)
    # Gateways write to the descriptor that they inherit: thousands of lines about what is meant to happen.
    sys.stderr.flush()
    descriptor = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is tidied up
    began = time.monotonic()

    def say(line: str) -> None:
        if not quiet:
            voice.write(f"{time.monotonic() - began:7.1f} s  {line}\n")

    try:
        vllm_home = Path(os.environ.get("VLLM_CACHE_ROOT", folder / "vllm"))
        with EngineServer(python=sys.executable, folder=folder / "engines", vllm_home=vllm_home) as server:
            found = run(Stand(server, folder / "models"), folder, options, say)
    except BaseException:
        voice.write(f"the run broke off; its logs: {folder}\n")
        raise
    finally:
        sys.stderr = voice
    if not options.canary:
        for line in found.reasons[:REASONS_MAX]:
            voice.write(f"{line}\n")
    if found.passed:
        say(found.verdict())
        shutil.rmtree(folder)
    else:
        voice.write(f"{found.verdict()}\nlogs: {folder}\n")
    print(found.line(), flush=True)
    return 0 if found.passed else 1


def _options(arguments: list[str], name: str) -> tuple[Options, bool]:
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    parser.add_argument("--seconds", type=_seconds, default=60, help="how long requests are sent (60)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn, and in which order (0)")
    parser.add_argument("--canary", action="store_true", help="without verification: wrong answers must be found")
    parser.add_argument("--json", action="store_true", help="print the closing line of JSON alone")
    found = parser.parse_args(arguments)
    return Options(found.seconds, found.seed, found.canary), found.json


def _seconds(text: str) -> int:
    value = int(text)
    if not SECONDS_MIN <= value <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{SECONDS_MIN} to {SECONDS_MAX} seconds")
    return value
