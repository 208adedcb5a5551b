"""Any vLLM checkout judged by its sources: what it has and lacks against the known rows, and whether we fit it.

Owns: finding the nearest known row, the reasons for a verdict, and the report's two forms.
Must not know: how features, uses and misfits are found, and where a checkout comes from.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from xkv_compat import BrokenVLLM
from xkv_compat.features import evaluate

from .binding import DEFAULT, OurClasses, bind, called
from .check import Places, load_expected, open_tree
from .connector import MODULES, ROLES, uses_of
from .extract import load_whole_contract
from .findings import Finding, MatrixError
from .needs import lacking

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from xkv_compat import Features
    from xkv_compat.source import SourceReader

    from .check import Expected
    from .connector import Uses
    from .targets import Target

__all__ = ["Difference", "Judgement", "as_json", "as_lines", "difference", "judge"]

NEEDED_ROLES = ("spec", "manager", "worker")  # a connector that calls none of one of these was not found


@dataclass(frozen=True)
class Difference:
    """What a tree has that a known row has not, and the other way round; names of features, in the table's order."""

    release: str
    status: str
    gained: tuple[str, ...]
    lost: tuple[str, ...]

    @property
    def distance(self) -> int:
        """How many features differ."""
        return len(self.gained) + len(self.lost)


@dataclass(frozen=True)
class Judgement:
    """A verdict on one tree: usable where there is no reason against it.

    ``newest``: against the newest supported row. ``nearest``: against the row with the fewest other
    features, the newest of several.
    """

    features: Features
    newest: Difference
    nearest: Difference
    reasons: tuple[Finding, ...]

    @property
    def usable(self) -> bool:
        """Whether our classes work with the tree, as far as its sources tell."""
        return not self.reasons


def _difference(target: Target, features: Mapping[str, bool], expected: Expected) -> Difference:
    # A feature that the table lacks by now is no fact about the tree: the row's own check says so.
    known = [name for name in features if name in expected.features]
    return Difference(
        target.release,
        target.status,
        tuple(name for name in known if features[name] and not expected.features[name]),
        tuple(name for name in known if expected.features[name] and not features[name]),
    )


def difference(target: Target, features: Mapping[str, bool], places: Places) -> Difference:
    """How a tree's features differ from a known row's."""
    return _difference(target, features, load_expected(places.table(target)))


def _module_of(at: str) -> str:
    return at.partition(":")[0]


def _contract(target: Target, places: Places) -> Mapping[str, Any]:
    path = places.contract(target)
    try:
        return load_whole_contract(path)
    except OSError as error:
        raise MatrixError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise MatrixError(f"{path}: {error}") from error


def _calls(uses: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    return {(use["role"], use["name"]) for use in uses if use["kind"] in {"call", "make"}}


def _declares(contract: Mapping[str, Any], role: str, name: str) -> bool:
    return any(
        name in contract["modules"].get(module, {}).get("classes", {}).get(owner, {}).get("members", {})
        for module, owner in ROLES[role]
    )


def _uncalled(
    uses: Uses, ours: OurClasses, nearest: Target, targets: Sequence[Target], places: Places
) -> Iterator[Finding]:
    """Our methods that the nearest row calls and the tree never does, but for those that some row leaves uncalled."""
    contracts = {target: _contract(target, places) for target in targets}
    here = _calls(use.as_json() for use in uses.found)
    for role, name in sorted(_calls(contracts[nearest]["uses"]) - here):
        if ours.defines(role, name) and not any(
            _declares(contract, role, name) and (role, name) not in _calls(contract["uses"])
            for contract in contracts.values()
        ):
            text = f"never called here; {nearest.release} calls it, and what ours does then is left undone"
            yield Finding("connector", f"{ours.place(role, name)[0]}.{name}", text)


def _moved(reader: SourceReader, uses: Uses, nearest: Target, places: Places) -> Iterator[Finding]:
    """Modules that use our objects in the nearest row and are not there: their calls would go unchecked."""
    known = {_module_of(use["at"]) for use in _contract(nearest, places)["uses"]}
    for module in (name for name in MODULES if name in known and reader.tree.path(name) is None):
        text = f"not there; in {nearest.release} it calls us, so that calls from wherever it went are not checked"
        yield Finding("connector", module, text)
    for role in NEEDED_ROLES:
        if not called(uses, role):
            yield Finding("connector", role, "no call on it was found: the connector is somewhere else, or is none")


def _misfits(bound: Sequence[Finding], expected: Expected, defaults: Container[str]) -> Iterator[Finding]:
    for finding in bound:
        key = finding.text.partition(": ")[0]
        if finding.check == DEFAULT and key in defaults:
            continue  # left to vLLM on purpose, in a row that has it
        reason = expected.misfits.get(key)
        text = f"{finding.text} ({reason})" if reason else finding.text
        yield Finding(finding.check, finding.where, text)


def judge(tree: Path, targets: Sequence[Target], places: Places | None = None) -> Judgement:
    """A verdict on a source tree, nothing of which is imported.

    Raises MatrixError for bad input: no tree, a broken file in it (with its line), no supported row.
    """
    places = places or Places()
    reader = open_tree(tree)
    try:
        features = evaluate(reader, str(tree))
        uses = uses_of(reader)
        ours = OurClasses(places.ours)
        bound = (*lacking(reader, features), *bind(uses, reader, ours))
    except BrokenVLLM as error:
        raise MatrixError(str(error)) from error
    tables = {target: load_expected(places.table(target)) for target in targets}
    ordered = sorted(targets, key=lambda target: target.order)
    differences = {target: _difference(target, features, tables[target]) for target in ordered}
    supported = [target for target in ordered if target.status == "supported"]
    if not supported:
        raise MatrixError("there is no supported row to compare with")
    # Of rows that are equally near, the newest: sorting is stable.
    nearest = min(reversed(ordered), key=lambda target: differences[target].distance)
    unmet = tuple(Finding("needed", "missing", line) for line in features.unmet)
    moved = tuple(_moved(reader, uses, nearest, places))
    uncalled = tuple(_uncalled(uses, ours, nearest, targets, places))
    defaults = {name for table in tables.values() for name in table.defaults}
    reasons = (*unmet, *moved, *uncalled, *_misfits(bound, tables[nearest], defaults))
    return Judgement(features, differences[supported[-1]], differences[nearest], reasons)


def as_json(judgement: Judgement) -> dict[str, Any]:
    """The report as json-able data."""
    return {
        "where": judgement.features.where,
        "verdict": "usable" if judgement.usable else "unusable",
        "reasons": [reason.as_json() for reason in judgement.reasons],
        "newest_supported": asdict(judgement.newest),
        "nearest": asdict(judgement.nearest),
        "features": dict(judgement.features),
    }


def as_lines(judgement: Judgement) -> Iterator[str]:
    """The report for people: differences, reasons, and the verdict last."""
    pairs = [("newest supported", judgement.newest), ("nearest known", judgement.nearest)]
    if judgement.newest == judgement.nearest:
        pairs = [("newest supported and nearest known", judgement.newest)]
    for title, difference in pairs:
        same = "" if difference.distance else ": the same features"
        yield f"against {difference.release} ({title}){same}"
        yield from (f"  missing  {name}" for name in difference.lost)
        yield from (f"  also has {name}" for name in difference.gained)
    yield from (str(reason) for reason in judgement.reasons)
    found, total = sum(judgement.features.values()), len(judgement.features)
    verdict = "usable" if judgement.usable else f"unusable: {len(judgement.reasons)} reason(s)"
    yield f"{judgement.features.where}: {verdict}, {found} of {total} features"
