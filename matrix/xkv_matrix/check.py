"""The checks on one release: its committed contract, its features, and whether our side fits it.

Owns: comparing what a wheel's sources say with what is committed. Must not know: how facts are extracted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xkv_compat import BadInput, BrokenVLLM
from xkv_compat.features import evaluate
from xkv_compat.source import SourceReader, Tree

from .binding import DEFAULT, OurClasses, bind
from .connector import uses_of
from .extract import contract_text, extract, load_contract
from .findings import Finding, MatrixError
from .mutation import mutations
from .needs import lacking
from .targets import TARGETS_FILE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xkv_compat import Features

    from .targets import Target

__all__ = [
    "Expected", "Places", "Verdict", "check", "differences", "expected_text", "load_expected", "open_tree", "write",
]  # fmt: skip

_REASONS = ("misfits", "uncovered", "defaults")  # the tables of an expected table that give reasons
LIVE_SECONDS_MAX = 180  # importing a release takes up to half a minute on a quiet machine
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Places:
    """Where committed facts and our classes lie; the defaults are beside the rows, and this repository's."""

    contracts: Path = TARGETS_FILE.parent / "contracts"
    expected: Path = TARGETS_FILE.parent / "expected"
    ours: Path = _ROOT / "packages" / "xkv-offload" / "src" / "xkv_offload"

    def contract(self, target: Target) -> Path:
        """The release's committed contract."""
        return self.contracts / f"{target.release}.json"

    def table(self, target: Target) -> Path:
        """The release's expected feature table."""
        return self.expected / f"{target.release}.toml"


@dataclass(frozen=True)
class Verdict:
    """What a check found, and the misfits that the expected table knows of (with their reasons)."""

    findings: tuple[Finding, ...]
    known: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Expected:
    """A reviewed table: feature → present; and, each with its reason, the misfits that are known, the connector's uses
    of our objects that no harness test makes, and those that are left to the release's own default.
    """

    features: dict[str, bool]
    misfits: dict[str, str]
    uncovered: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)


def open_tree(folder: Path) -> SourceReader:
    """A reader of a source tree; MatrixError where it is none."""
    try:
        return SourceReader(Tree(folder))
    except BadInput as error:
        raise MatrixError(str(error)) from error


def load_expected(path: Path) -> Expected:
    """A feature table; MatrixError with one line for what is wrong with it."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MatrixError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MatrixError(f"{path}: {error}") from error
    features, reasons = data.get("features"), {name: data.get(name, {}) for name in _REASONS}
    if not isinstance(features, dict) or not all(isinstance(value, bool) for value in features.values()):
        raise MatrixError(f"{path}: [features] must be a table of true and false")
    for name, table in reasons.items():
        if not isinstance(table, dict) or not all(isinstance(value, str) and value for value in table.values()):
            raise MatrixError(f"{path}: [{name}] must be a table of reasons")
    if unknown := sorted(set(data) - {"features", *reasons}):
        raise MatrixError(f"{path}: unknown table {unknown[0]!r}")
    return Expected(features, **reasons)


def expected_text(target: Target, features: Features, known: Expected) -> str:
    """A table to be reviewed, as the sources have it."""
    lines = [f"# Features of {target.package} {target.version}, reviewed against its sources.", "[features]"]
    lines += [f"{name} = {'true' if present else 'false'}" for name, present in features.items()]
    for title, name, reasons in (
        ("What does not fit our side, and why that is accepted.", "misfits", known.misfits),
        ("What no harness test calls or reads, and why that is accepted.", "uncovered", known.uncovered),
        ("What our side leaves to vLLM's own default, and why that is right.", "defaults", known.defaults),
    ):
        if reasons:
            lines += ["", f"# {title}", f"[{name}]"]
            lines += [f"{json.dumps(key)} = {json.dumps(reason)}" for key, reason in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, str]]:
    """Where two json values differ, as (path, text); the path's parts are joined by dots."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(set(old) | set(new)):
            inner = f"{path}.{name}" if path else name
            if name not in new:
                yield inner, f"gone (was {_short(old[name])})"
            elif name not in old:
                yield inner, f"new ({_short(new[name])})"
            else:
                yield from differences(inner, old[name], new[name])
    elif isinstance(old, list) and isinstance(new, list):
        before, after = ([json.dumps(item, sort_keys=True) for item in items] for items in (old, new))
        for item in sorted(set(before) - set(after)):
            yield path, f"gone: {item}"
        for item in sorted(set(after) - set(before)):
            yield path, f"new: {item}"
        if sorted(before) == sorted(after) and before != after:
            yield path, "in another order"
    elif old != new:
        yield path, f"{_short(new)} (was {_short(old)})"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _contract_findings(target: Target, reader: SourceReader, places: Places) -> list[Finding]:
    path = places.contract(target)
    where = f"contracts/{path.name}"
    try:
        committed = load_contract(path)
    except OSError:
        return [Finding("contract", where, "not there: run extract and review what it writes")]
    except ValueError as error:
        raise MatrixError(f"{path}: {error}") from error
    fresh = json.loads(contract_text(extract(reader, target)))
    return [Finding("contract", f"{where}: {at}", text) for at, text in differences("", committed, fresh)]


def _table_findings(name: str, where: str, expected: dict[str, bool], found: dict[str, bool]) -> list[Finding]:
    findings = []
    for feature in sorted(set(expected) | set(found)):
        if feature not in found:
            findings.append(Finding(name, where, f"{feature}: not in the probe table"))
        elif feature not in expected:
            findings.append(Finding(name, where, f"{feature}: not in the expected table"))
        elif expected[feature] != found[feature]:
            was, is_ = ("present" if value else "absent" for value in (expected[feature], found[feature]))
            findings.append(Finding(name, where, f"{feature}: expected {was}, found {is_}"))
    return findings


def _feature_findings(target: Target, features: Features, expected: Expected, where: str) -> list[Finding]:
    findings = _table_findings("features", where, expected.features, dict(features))
    findings += [Finding("features", where, f"needed and missing: {line}") for line in features.unmet]
    absent = {name for name, present in expected.features.items() if not present}
    for name in sorted(absent ^ set(target.lacks)):
        said = "says that it lacks" if name in target.lacks else "does not say that it lacks"
        findings.append(
            Finding("features", f"targets.toml: {target.release}", f"the row {said} {name}; {where} differs")
        )
    return findings


def _mutation_findings(
    target: Target, reader: SourceReader, features: Features, expected: Expected, where: str
) -> Iterator[Finding]:
    """What the probe table or the tables beside it would miss, if the release lost one thing that is probed."""
    for probe, without, findings in mutations(reader):
        yield from findings
        changed = dict(without) != dict(features) or without.unmet != features.unmet
        if changed and not _feature_findings(target, without, expected, where):
            yield Finding("mutation", str(probe), f"taking it away is not noticed by {where}")


def _judged(bound: list[Finding], expected: Expected, where: str) -> tuple[list[Finding], list[Finding]]:
    """Split misfits into findings and known ones; a reason for what is not so by now is a finding."""
    left, known = [], {}
    unused = set(expected.defaults)
    for finding in bound:
        key = finding.text.partition(": ")[0]
        if finding.check == DEFAULT and key in expected.defaults:
            unused.discard(key)
        elif key in expected.misfits:
            known[key] = Finding("known misfit", key, expected.misfits[key])
        else:
            left.append(finding)
    stale = sorted(set(expected.misfits) - set(known))
    left += [Finding("binding", where, f"{key}: a known misfit that fits") for key in stale]
    left += [Finding(DEFAULT, where, f"{key}: a known default that answers nothing") for key in sorted(unused)]
    return left, [known[key] for key in sorted(known)]


def _live_findings(python: str, features: Features) -> list[Finding]:
    """What the live reader says otherwise, in an environment where the release is installed."""
    command = [python, "-m", "xkv_compat", "report", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIVE_SECONDS_MAX, check=False)
        report = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise MatrixError(f"{python}: the live reader cannot be run there: {error}") from error
    return _table_findings("live reader", python, dict(features), report["features"])


def check(target: Target, tree: Path, places: Places | None = None, live_python: str | None = None) -> Verdict:
    """Everything about a release that is not as committed, or does not fit.

    Raises MatrixError for bad input: no tree, a broken file in it, a malformed table.
    """
    places = places or Places()
    reader = open_tree(tree)
    try:
        features = evaluate(reader, str(tree))
        findings = [*_contract_findings(target, reader, places), *lacking(reader, features)]
        bound = bind(uses_of(reader), reader, OurClasses(places.ours))
    except BrokenVLLM as error:
        raise MatrixError(str(error)) from error
    table = places.table(target)
    where = f"expected/{table.name}"
    if not table.is_file():
        absent = Finding("features", where, "not there: run extract and review what it writes")
        return Verdict((*findings, *bound, absent))
    expected = load_expected(table)
    findings += _feature_findings(target, features, expected, where)
    findings += _mutation_findings(target, reader, features, expected, where)
    unknown, known = _judged(bound, expected, where)
    findings += unknown
    if live_python is not None:
        findings += _live_findings(live_python, features)
    return Verdict(tuple(findings), tuple(known))


def write(target: Target, tree: Path, places: Places | None = None) -> tuple[Path, Path]:
    """Write a release's contract and its feature table (reasons kept) for review; their paths."""
    places = places or Places()
    reader = open_tree(tree)
    try:
        contract = contract_text(extract(reader, target))
        features = evaluate(reader, str(tree))
    except BrokenVLLM as error:
        raise MatrixError(str(error)) from error
    contract_path, table = places.contract(target), places.table(target)
    known = load_expected(table) if table.is_file() else Expected({}, {})
    text_of_table = expected_text(target, features, known)
    for path, text in ((contract_path, contract), (table, text_of_table)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return contract_path, table
