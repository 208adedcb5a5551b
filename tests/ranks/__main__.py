"""`python -m ranks --ranks 8 --seconds N [--seed S] [--canary] [--json]`.

Owns: the command line, where what is said goes, the exit code. Must not know: what a run does.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from ranks.run import Options, Run

REASONS_MAX = 20  # lines that are shown: whatever is wrong is wrong in many jobs


def _options(arguments: list[str]) -> tuple[Options, bool]:
    parser = argparse.ArgumentParser(prog="ranks", allow_abbrev=False)
    parser.add_argument("--ranks", type=_Between(2, 64), default=8, help="processes, one for each rank (8)")
    parser.add_argument("--seconds", type=_Between(8, 86_400), default=60, help="how long jobs are begun (60)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn, and in which order (0)")
    parser.add_argument("--canary", action="store_true", help="with a broken rule: wrong bytes must be found")
    parser.add_argument("--json", action="store_true", help="print the closing line of JSON alone")
    found = parser.parse_args(arguments)
    return Options(found.ranks, found.seconds, found.seed, found.canary), found.json


class _Between:
    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def __call__(self, text: str) -> int:
        value = int(text)
        if not self._least <= value <= self._most:
            raise argparse.ArgumentTypeError(f"{self._least} to {self._most}")
        return value


def main(arguments: list[str]) -> int:
    """Run; 0 if it passed."""
    options, quiet = _options(arguments)
    folder = Path(tempfile.mkdtemp(prefix="xkv-ranks-"))
    began = time.monotonic()

    def say(line: str) -> None:
        if not quiet:
            sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {line}\n")

    outcome = Run(folder, options, say).run()
    if not outcome.canary:
        for line in outcome.reasons[:REASONS_MAX]:
            sys.stderr.write(f"{line}\n")
    say(outcome.verdict())
    if outcome.passed:
        shutil.rmtree(folder)
    else:
        sys.stderr.write(f"logs: {folder}\n")
    print(outcome.line(), flush=True)
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
