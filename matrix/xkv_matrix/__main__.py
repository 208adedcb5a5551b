"""The matrix's command line: ``python -m xkv_matrix extract|contracts|fork``, from the repository.

Owns: arguments, output and exit codes (0 fits, 1 findings, 2 bad input). Must not know: any check.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import fork
from .check import Places, check, write
from .findings import EXIT_BAD_INPUT, EXIT_FINDINGS, EXIT_OK, MatrixError
from .targets import TARGETS_FILE, find_target, load_targets
from .wheels import fetch, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .targets import Target

    Command = Callable[[argparse.Namespace], int]

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m xkv_matrix", description="Judge vLLM releases by their sources.")
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--targets", type=Path, default=TARGETS_FILE, help=argparse.SUPPRESS)
    shared.add_argument("--json", action="store_true", help="print one line of JSON")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, parents=[shared], allow_abbrev=False)

    for name, text in (
        ("extract", "write a release's contract and feature table, to be reviewed"),
        ("contracts", "check a release against what is committed, and our side against it"),
    ):
        command = add(name, text)
        command.add_argument("release", metavar="TARGET", help="a release of targets.toml")
        command.add_argument("--tree", type=Path, help="judge this source tree instead of the wheel's")
        if name == "contracts":
            command.add_argument("--python", help="an interpreter with the release installed: ask the live reader too")
    command = add("fork", "judge a checkout of a fork, importing nothing of it")
    command.add_argument("--source", type=Path, required=True, metavar="TREE", help="the folder that holds vllm/")
    return parser


def _say(as_json: Mapping[str, object] | None, lines: Iterable[str]) -> None:
    """Print one line of JSON where it is asked for, and the lines otherwise."""
    texts = lines if as_json is None else (json.dumps(as_json),)
    sys.stdout.writelines(f"{text}\n" for text in texts)


def _tree(target: Target, given: Path | None) -> Path:
    return unpack(fetch(target), target.sha256) if given is None else given


def _extract(options: argparse.Namespace) -> int:
    target = find_target(options.release, options.targets)
    lines = [str(path) for path in write(target, _tree(target, options.tree))]
    _say({"release": target.release, "written": lines} if options.json else None, lines)
    return EXIT_OK


def _contracts(options: argparse.Namespace) -> int:
    target = find_target(options.release, options.targets)
    verdict = check(target, _tree(target, options.tree), Places(), options.python)
    report = {
        "release": target.release,
        "verdict": "findings" if verdict.findings else "fits",
        "findings": [item.as_json() for item in verdict.findings],
        "known": [item.as_json() for item in verdict.known],
    }
    count = f"{len(verdict.findings)} finding(s)" if verdict.findings else "fits"
    known = f", {len(verdict.known)} known misfit(s)" if verdict.known else ""
    lines = [str(item) for item in (*verdict.findings, *verdict.known)]
    _say(report if options.json else None, (*lines, f"{target.release}: {count}{known}"))
    return EXIT_FINDINGS if verdict.findings else EXIT_OK


def _fork(options: argparse.Namespace) -> int:
    judgement = fork.judge(options.source, load_targets(options.targets))
    _say(fork.as_json(judgement) if options.json else None, fork.as_lines(judgement))
    return EXIT_OK if judgement.usable else EXIT_FINDINGS


COMMANDS: Mapping[str, Command] = {"extract": _extract, "contracts": _contracts, "fork": _fork}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Bad input is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return COMMANDS[options.command](options)
    except MatrixError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
