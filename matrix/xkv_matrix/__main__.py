"""The matrix's command line: ``python -m xkv_matrix COMMAND``, from the repository.

Owns: arguments, output and exit codes (0 fits, 1 findings, 2 bad input). Must not know: any check.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import candidate, fork, gate
from .check import Places, check, write
from .findings import EXIT_BAD_INPUT, EXIT_FINDINGS, EXIT_OK, MatrixError
from .page import placed
from .table import table_text
from .targets import COMMITTED, TARGETS_FILE, TARGETS_VARIABLE, find_target, load_targets
from .vendor import dotted, planned_tests, vendor, vendor_tests
from .wheels import fetch, fetch_version, read_wheel, unpack, unpack_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .targets import Target

    Command = Callable[[argparse.Namespace], int]

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[2]


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
    command = add("gate", "go or no-go, from the results of every session of every row")
    command.add_argument("--results", type=Path, default=_ROOT / "results", help="the folder of results")
    command.add_argument(
        "--need", action="append", default=[], metavar="SESSION", help="another session that must pass"
    )
    command.add_argument("--sources", metavar="HASH", help="what the results must say that they ran on")
    command.add_argument("--out", type=Path, default=_ROOT / "gate.json", help="where the verdict is written")
    command.add_argument("--page", type=Path, default=_ROOT / "README.md", help="the page that holds the table")
    command = add("table", "the support table of the README, from gate.json")
    command.add_argument("--gate", type=Path, default=_ROOT / "gate.json", help="what the gate wrote")
    command.add_argument("--page", type=Path, default=_ROOT / "README.md", help="the page that holds the table")
    action = command.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="fail where the page says something else")
    action.add_argument("--write", action="store_true", help="put it into the page")
    command = add("vendor", "copy compat, or the whole stack, into a fork's tree under another name")
    command.add_argument("--into", type=Path, required=True, metavar="DIR", help="the folder that gets the package")
    command.add_argument("--as", dest="name", required=True, metavar="PACKAGE", help="the copy's name")
    command.add_argument("--whole", action="store_true", help="the whole stack, not compat alone")
    command.add_argument("--tests", type=Path, metavar="DIR", help="copy the tests, too, speaking of the copy")
    command = add("unpack", "unpack a release's whole wheel: a fork's tree to be")
    command.add_argument("release", metavar="TARGET", help="a release of targets.toml")
    command.add_argument("--into", type=Path, required=True, metavar="DIR", help="a folder that is not there yet")
    command = add("candidate", "judge a release that has no row yet, against the newest known one")
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--wheel", type=Path, metavar="FILE", help="its wheel")
    which.add_argument("--version", metavar="V", help="its version, to be fetched")
    command.add_argument("--into", type=Path, required=True, metavar="DIR", help="where what is found is written")
    command.add_argument("--no-engine", action="store_true", help="its engine cannot be run on this machine")
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


def _rows_of_a_release(options: argparse.Namespace) -> tuple[tuple[Target, ...], Places]:
    """The rows that are committed, and where their facts lie: the variable that names others is for tests alone."""
    if options.targets == TARGETS_FILE != COMMITTED:
        sys.stderr.write(f"{TARGETS_VARIABLE} is set; judged are the committed rows\n")
        options.targets = COMMITTED
    folder = COMMITTED.parent
    return load_targets(options.targets), Places(folder / "contracts", folder / "expected")


def _gate(options: argparse.Namespace) -> int:
    options.out.unlink(missing_ok=True)  # what cannot be judged now must not leave an older verdict behind
    needed = [gate.Session.parse(text) for text in options.need]
    targets, places = _rows_of_a_release(options)
    verdict = gate.judge(targets, needed, options.results, places, options.sources)
    verdict = gate.with_page(verdict, targets, options.page, places)
    gate.save_gate(verdict, options.out)
    _say(verdict.as_json() if options.json else None, verdict.as_lines())
    return EXIT_OK if verdict.verdict == "go" else EXIT_FINDINGS


def _table(options: argparse.Namespace) -> int:
    targets, places = _rows_of_a_release(options)
    verdicts = gate.load_gate(options.gate)
    against = [
        target for target in targets if target.status == "supported" and verdicts.get(target.release) != gate.PASS
    ]
    if options.write and against:
        raise MatrixError(f"{options.gate}: {against[0].release} did not pass, and a page promises that it does")
    table = table_text(targets, verdicts, places)
    if not options.check and not options.write:
        _say({"table": table} if options.json else None, (table,))
        return EXIT_OK
    page = options.page.read_text(encoding="utf-8")
    wanted = placed(page, table)
    if options.write:
        fresh = options.page.with_name(f"{options.page.name}.new")
        fresh.write_text(wanted, encoding="utf-8")
        fresh.replace(options.page)
    fits = options.write or wanted == page
    text = f"{options.page.name}: the support table {'is' if fits else 'is not'} what the gate says"
    _say({"page": str(options.page), "fits": fits} if options.json else None, (text,))
    return EXIT_OK if fits else EXIT_FINDINGS


def _vendor(options: argparse.Namespace) -> int:
    if options.tests is not None:  # refused before anything is written
        planned_tests(options.tests, dotted(options.into / options.name), whole=options.whole)
    places = [vendor(options.into, options.name, whole=options.whole)]
    if options.tests is not None:
        places.append(vendor_tests(options.tests, dotted(places[0]), whole=options.whole))
    lines = [str(place) for place in places]
    _say({"package": options.name, "written": lines} if options.json else None, lines)
    return EXIT_OK


def _unpack(options: argparse.Namespace) -> int:
    target = find_target(options.release, options.targets)
    if options.into.exists():
        raise MatrixError(f"--into {options.into}: it is there already")
    unpack_whole(fetch(target), options.into)
    _say({"release": target.release, "written": str(options.into)} if options.json else None, (str(options.into),))
    return EXIT_OK


def _candidate(options: argparse.Namespace) -> int:
    targets = load_targets(options.targets)
    wheel = read_wheel(options.wheel or fetch_version(candidate.like(targets), options.version))
    found = candidate.judge(wheel, targets, Places(), is_run=not options.no_engine)
    candidate.save(found, options.into)
    _say(found.as_json() if options.json else None, found.as_lines())
    return EXIT_OK if found.usable else EXIT_FINDINGS


COMMANDS: Mapping[str, Command] = {
    "extract": _extract,
    "contracts": _contracts,
    "fork": _fork,
    "gate": _gate,
    "table": _table,
    "vendor": _vendor,
    "unpack": _unpack,
    "candidate": _candidate,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Bad input is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return COMMANDS[options.command](options)
    except MatrixError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_BAD_INPUT
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        sys.stderr.write(f"error: {' '.join(f'{place}{error.strerror or error}'.split())}\n")
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
