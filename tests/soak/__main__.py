"""`python -m soak [--puts N] [--capacity MIB] [--slot-bytes N] [--grace-ms N] [--seed S] [--canary FAULT] [--json]`.

Owns: the command line, where what is said goes, the exit code. Must not know: what a run does.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from soak.broken import FAULTS
from soak.run import Options, Run

REASONS_MAX = 20  # lines that are shown


def _options(arguments: list[str]) -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="soak", allow_abbrev=False)
    parser.add_argument("--puts", type=int, default=100_000, help="objects put while the card is full (100000)")
    parser.add_argument("--capacity", type=int, default=1_024, metavar="MIB", help="of the card (1024)")
    parser.add_argument("--slot-bytes", type=int, default=4_096, help="of the card (4096)")
    parser.add_argument("--grace-ms", type=int, default=500, help="of the card (500)")
    parser.add_argument("--seed", type=int, default=0, help="what is watched and kept (0)")
    parser.add_argument("--canary", choices=sorted(FAULTS), default="", help="with this fault, which must be found")
    parser.add_argument("--folder", type=Path, help="on the file system to use (the temporary one)")
    parser.add_argument("--json", action="store_true", help="print the closing line of JSON alone")
    found = parser.parse_args(arguments)
    if found.puts < 1_000:
        parser.error("--puts: at least 1000, or no rate is known")
    options = Options(
        puts=found.puts,
        capacity=found.capacity << 20,
        slot_bytes=found.slot_bytes,
        grace_ms=found.grace_ms,
        seed=found.seed,
        fault=found.canary,
    )
    return options, found


def main(arguments: list[str]) -> int:
    """Run; 0 if no bar was missed, or a planted fault was found."""
    options, found = _options(arguments)
    folder = Path(tempfile.mkdtemp(prefix="xkv-soak-", dir=found.folder))
    began = time.monotonic()

    def say(line: str) -> None:
        if not found.json:
            sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {line}\n")

    try:
        outcome = Run(folder, options, say).run()
    finally:
        shutil.rmtree(folder)
    for line in outcome.reasons[:REASONS_MAX]:
        say(line)
    say(outcome.verdict())
    print(outcome.line(), flush=True)
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
