"""A release that has no row yet: its contract against the newest known one, and what of ours each difference concerns.

Owns: the differences, with call site, our method and the module to edit; the row that its tests run with.
Must not know: how a contract is extracted, and how environments are made and tests are run.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import fork
from .binding import OUR_CLASSES, OurClasses
from .check import Places, differences, expected_text, load_expected, open_tree
from .connector import ROLES
from .extract import contract_text, extract, load_whole_contract
from .findings import MatrixError
from .targets import Target, checked, row_text
from .wheels import unpack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .findings import Finding
    from .wheels import Wheel

__all__ = ["ROW_FILE", "Candidate", "Change", "judge", "like", "save"]

ROW_FILE = "targets.toml"
# No text model needs them, and they are bound to a build of torch.
NOT_NEEDED = frozenset({"torchaudio", "torchvision", "torchcodec"})
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)")
_TORCH = re.compile(r"torch\s*==\s*(?P<version>[\w.]+)")
_ROOT = Path(__file__).resolve().parents[2]
_NAMING = ("compat/src/xkv_compat", "packages/xkv-offload/src/xkv_offload")
_TABLE = "compat/src/xkv_compat/probes.py"  # names every feature
_DECLARED = {name: role for role, places in ROLES.items() for _, name in places}
NOTHING = "nothing of ours"


@dataclass(frozen=True)
class Change:
    """One difference between two contracts.

    ``kind``: ``use``, ``declaration`` or ``feature``. ``where``: the call site, or what is declared.
    ``ours``: our method or class that it concerns; ``edit``: the modules to look at, relative to the repository.
    """

    kind: str
    where: str
    text: str
    ours: str
    edit: tuple[str, ...]

    def as_lines(self) -> Iterator[str]:
        """The change for people."""
        yield f"{self.kind}: {self.where}: {self.text}"
        yield f"    ours: {self.ours}" + (f"; edit {', '.join(self.edit)}" if self.edit else "")


@dataclass(frozen=True)
class Candidate:
    """What the sources of a release that nobody has seen say of it."""

    row: Target
    path: Path  # of the wheel
    requires: tuple[str, ...]
    against: str
    changes: tuple[Change, ...]
    reasons: tuple[Finding, ...]
    contract: str
    features: str

    @property
    def usable(self) -> bool:
        """Whether our classes work with it, as far as its sources tell."""
        return not self.reasons

    def as_json(self) -> dict[str, Any]:
        """The report as json-able data."""
        return {
            "candidate": self.row.release,
            "package": self.row.package,
            "wheel": self.row.wheel,
            "path": str(self.path),
            "sha256": self.row.sha256,
            "engine": self.row.engine,
            "against": self.against,
            "verdict": "usable" if self.usable else "unusable",
            "differences": [asdict(change) for change in self.changes],
            "reasons": [reason.as_json() for reason in self.reasons],
        }

    def as_lines(self) -> Iterator[str]:
        """The report for people."""
        yield f"{self.row.package} {self.row.release} against {self.against}, the newest known"
        for change in self.changes:
            yield from change.as_lines()
        yield from (str(reason) for reason in self.reasons)
        verdict = "usable" if self.usable else f"unusable: {len(self.reasons)} reason(s)"
        yield f"{self.row.release}: {len(self.changes)} difference(s), {verdict} by its sources"


def like(targets: Sequence[Target]) -> Target:
    """The row whose package and platform a version is asked for."""
    supported = [target for target in targets if target.status == "supported"]
    if not supported:
        raise MatrixError("there is no supported row to compare with")
    return max(supported, key=lambda target: target.order)


def _row(wheel: Wheel, targets: Sequence[Target], is_run: bool) -> Target:
    known = like(targets)
    torch = [found["version"] for line in wheel.requires if (found := _TORCH.match(line))]
    return replace(
        known,
        release=wheel.version,
        status="followed",
        package=wheel.package,
        version=wheel.version,
        wheel=wheel.path.name,
        sha256=wheel.sha256,
        torch=torch[0] if torch else "",
        requirements="requirements.in",
        engine=is_run,
    )


def _requirements(wheel: Wheel) -> tuple[str, ...]:
    """What the wheel needs, any build of torch serving, and less what it is not used for."""
    found = []
    for line in wheel.requires:
        name = _REQUIREMENT.match(line)
        if name and name["name"].lower() not in NOT_NEEDED:
            found.append(re.sub(r"^(torch\s*==\s*[\w.]+)\+[\w.]+", r"\1", line))
    return tuple(found)


@dataclass(frozen=True)
class _Ours:
    """Whom a difference concerns on our side."""

    classes: OurClasses
    texts: Mapping[str, str]  # path below the repository → text

    def of_member(self, role: str, name: str, declared: str) -> tuple[str, tuple[str, ...]]:
        """Our member for a role's; for the classes that we fill in, who fills them in."""
        if role not in OUR_CLASSES:
            return f"whoever makes a {declared}", self.naming(declared)
        owner, file = self.classes.place(role, name)
        there = "" if self.classes.defines(role, name) else " (not ours: vLLM's default)"
        return f"{owner}.{name}{there}", (_below_root(file),)

    def naming(self, name: str) -> tuple[str, ...]:
        """Our modules that mention a name."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        return tuple(path for path, text in self.texts.items() if word.search(text))


def _below_root(path: Path) -> str:
    return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.as_posix()


def _site(use: Mapping[str, Any]) -> str:
    return str(use["at"]).rpartition(":")[0]


_Shapes = dict[str, dict[str, str]]  # site → how it is used there → the use's whole place


def _shapes(uses: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], _Shapes]:
    found: dict[tuple[str, str], _Shapes] = {}
    for use in uses:
        names = [*["_"] * use["positional"], *(f"{name}=_" for name in use["keywords"]), *["*"] * use["starred"]]
        shape = f"{use['kind']} ({', '.join(names)})" if use["kind"] in {"call", "make"} else use["kind"]
        by_site = found.setdefault((use["role"], use["name"]), {})
        by_site.setdefault(_site(use), {})[shape] = use["at"]
    return found


def _use_texts(old: _Shapes, new: _Shapes) -> Iterator[tuple[str, str]]:
    """Where and how the uses of one member differ, as (call site, text)."""
    for site in sorted(set(old) | set(new)):
        before, after = old.get(site, {}), new.get(site, {})
        gained, lost = sorted(set(after) - set(before)), sorted(set(before) - set(after))
        if gained:
            was = f", was {', '.join(lost)}" if lost else ("" if old else ", which nothing did before")
            yield after[gained[0]], f"{', '.join(gained)}{was}"
        elif lost:
            yield before[lost[0]], f"no more {', '.join(lost)}" + ("" if new else ", nor anywhere else")


def _use_changes(old: Mapping[str, Any], new: Mapping[str, Any], ours: _Ours) -> Iterator[Change]:
    before, after = _shapes(old["uses"]), _shapes(new["uses"])
    declared = {role: name for name, role in _DECLARED.items()}
    for role, name in sorted(set(before) | set(after)):
        for where, text in _use_texts(before.get((role, name), {}), after.get((role, name), {})):
            method, edit = ours.of_member(role, name, declared[role])
            yield Change("use", where, f"{role}.{name}: {text}", method, edit)


def _declared_changes(old: Mapping[str, Any], new: Mapping[str, Any], ours: _Ours) -> Iterator[Change]:
    before, after = old["modules"], new["modules"]
    for module in sorted(set(before) | set(after)):
        if (module in before) != (module in after):
            text = "gone" if module in before else "new"
            edit = ours.naming(module)
            yield Change("declaration", module, text, "whoever names it" if edit else NOTHING, edit)
            continue
        for section in ("classes", "functions"):
            for name in sorted(set(before[module][section]) | set(after[module][section])):
                facts = [{name: side[module][section][name]} if name in side[module][section] else {} for side in
                         (before, after)]  # fmt: skip
                for path, text in differences("", *facts):
                    yield _declared_change(module, path, text, ours)


def _declared_change(module: str, path: str, text: str, ours: _Ours) -> Change:
    name, _, rest = path.partition(".")
    member = rest.removeprefix("members.") if rest.startswith("members.") else ""
    where = f"{module}.{name}" + (f".{member}" if member else f" ({rest})" if rest else "")
    role = _DECLARED.get(name)
    if role is not None and member:
        return Change("declaration", where, text, *ours.of_member(role, member, name))
    # Who names the member itself is the nearer one, where its name is not just any word.
    named = member if member.isupper() and ours.naming(member) else name
    edit = ours.naming(named)
    return Change("declaration", where, text, f"whoever names {named}" if edit else NOTHING, edit)


def _feature_changes(base: fork.Difference, ours: _Ours) -> Iterator[Change]:
    for text, names in (("has it, too", base.gained), ("lacks it", base.lost)):
        for name in names:
            users = tuple(path for path in ours.naming(name) if path != _TABLE)
            yield Change("feature", name, text, "whoever asks for it" if users else NOTHING, users)


def _read_ours(places: Places) -> _Ours:
    files = sorted(path for place in _NAMING for path in (_ROOT / place).rglob("*.py"))
    texts = {path.relative_to(_ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    return _Ours(OurClasses(places.ours), texts)


def _uncovered_names(uses: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The names that uses have in a table's [uncovered], in the order of lines, by what they are without the line."""
    found: dict[str, set[int]] = {}
    for use in uses:
        module, function, line = str(use["at"]).rsplit(":", 2)
        found.setdefault(f"{use['role']}.{use['name']} {module.rpartition('.')[2]}:{function}", set()).add(int(line))
    return {name: [f"{name}:{line}" for line in sorted(lines)] for name, lines in found.items()}


def _carried(
    uncovered: Mapping[str, str], old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Reasons of the newest known row for uses that no harness test makes, for the same uses on other lines."""
    before, after = _uncovered_names(old), _uncovered_names(new)
    return {
        moved: uncovered[name]
        for key, names in before.items()
        if len(after.get(key, ())) == len(names)
        for name, moved in zip(names, after[key], strict=True)
        if name in uncovered
    }


def judge(wheel: Wheel, targets: Sequence[Target], places: Places | None = None, *, is_run: bool = True) -> Candidate:
    """What a wheel's sources say, against the newest known row; MatrixError for one that has a row, or is broken."""
    places = places or Places()
    if any(target.version == wheel.version for target in targets):
        raise MatrixError(f"{wheel.version} has a row already: ask for contracts and stack of it")
    newest = max(targets, key=lambda target: target.order)
    row = checked(str(wheel.path), _row(wheel, targets, is_run))
    tree = unpack(wheel.path, wheel.sha256)
    judgement = fork.judge(tree, targets, places)
    row = replace(row, lacks=tuple(name for name, has in judgement.features.items() if not has))
    new = extract(open_tree(tree), row)
    try:
        old = load_whole_contract(places.contract(newest))
    except (OSError, ValueError) as error:
        raise MatrixError(f"{places.contract(newest)}: {error}") from error
    ours = _read_ours(places)
    changes = (
        *_use_changes(old, new, ours),
        *_declared_changes(old, new, ours),
        *_feature_changes(fork.difference(newest, judgement.features, places), ours),
    )
    known = load_expected(places.table(newest))
    carried = replace(known, misfits={}, uncovered=_carried(known.uncovered, old["uses"], new["uses"]))
    table = expected_text(row, judgement.features, carried)
    return Candidate(
        row,
        wheel.path.absolute(),
        _requirements(wheel),
        newest.release,
        changes,
        judgement.reasons,
        contract_text(new),
        table,
    )


def save(found: Candidate, folder: Path) -> None:
    """Write its row, requirements, contract and feature table as a matrix of its own, and the report."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        ROW_FILE: row_text(found.row),
        found.row.requirements: "".join(f"{line}\n" for line in found.requires),
        f"contracts/{found.row.release}.json": found.contract,
        f"expected/{found.row.release}.toml": found.features,
        "report.json": json.dumps(found.as_json(), indent=1) + "\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
