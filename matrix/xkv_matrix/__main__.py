"""The matrix's command line: ``python -m xkv_matrix extract|contracts TARGET``, from the repository.

Owns: arguments, output and exit codes (0 fits, 1 findings, 2 bad input). Must not know: any check.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .check import Places, check, write
from .findings import EXIT_BAD_INPUT, EXIT_FINDINGS, EXIT_OK, MatrixError
from .targets import TARGETS_FILE, find_target
from .wheels import fetch, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .targets import Target

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m xkv_matrix", description="Judge a vLLM release by its sources.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("extract", "write a release's contract and feature table, to be reviewed"),
        ("contracts", "check a release against what is committed, and our side against it"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("release", metavar="TARGET", help="a release of targets.toml")
        command.add_argument("--tree", type=Path, help="judge this source tree instead of the wheel's")
        command.add_argument("--targets", type=Path, default=TARGETS_FILE, help=argparse.SUPPRESS)
        command.add_argument("--json", action="store_true", help="print one line of JSON")
        if name == "contracts":
            command.add_argument("--python", help="an interpreter with the release installed: ask the live reader too")
    return parser


def _tree(target: Target, given: Path | None) -> Path:
    return unpack(fetch(target), target.sha256) if given is None else given


def _extract(options: argparse.Namespace, target: Target) -> int:
    paths = write(target, _tree(target, options.tree))
    lines = [str(path) for path in paths]
    sys.stdout.write(
        (json.dumps({"release": target.release, "written": lines}) if options.json else "\n".join(lines)) + "\n"
    )
    return EXIT_OK


def _contracts(options: argparse.Namespace, target: Target) -> int:
    verdict = check(target, _tree(target, options.tree), Places(), options.python)
    if options.json:
        report = {
            "release": target.release,
            "verdict": "findings" if verdict.findings else "fits",
            "findings": [item.as_json() for item in verdict.findings],
            "known": [item.as_json() for item in verdict.known],
        }
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.writelines(f"{finding}\n" for finding in (*verdict.findings, *verdict.known))
        count = f"{len(verdict.findings)} finding(s)" if verdict.findings else "fits"
        known = f", {len(verdict.known)} known misfit(s)" if verdict.known else ""
        sys.stdout.write(f"{target.release}: {count}{known}\n")
    return EXIT_FINDINGS if verdict.findings else EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Bad input is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        target = find_target(options.release, options.targets)
        return _extract(options, target) if options.command == "extract" else _contracts(options, target)
    except MatrixError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
