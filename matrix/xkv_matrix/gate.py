"""The gate: go or no-go for a release of the product, from what every session of every row left behind.

Owns: what a result must say to count, a row's verdict with its reasons, and gate.json.
Must not know: how sessions are run, and what any test looks for.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .check import load_expected
from .extract import load_contract
from .findings import MatrixError
from .outcomes import read_outcome
from .table import drift

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from .check import Places
    from .targets import Target

__all__ = [
    "FAIL", "MISFIT", "NOT_RUN", "PASS", "SUPPORTED_SESSIONS", "Gate", "Row", "Session", "judge", "load_gate",
    "save_gate", "with_page",
]  # fmt: skip

PASS, FAIL, NOT_RUN, MISFIT = "pass", "fail", "not run", "misfit"
# Whatever else a caller asks for, no supported row passes without these.
SUPPORTED_SESSIONS = ("contracts", "stack", "stack_tp", "vendored")
# A followed row's sources are judged in every run; its stack is reported where it ran on these sources.
FOLLOWED_SESSIONS = ("contracts",)
FOLLOWED_IF_RUN = ("stack", "stack_tp")  # the second where an engine runs on a CPU
FAILURES_SHOWN_MAX = 5  # a reason is read at a glance; the session's own output has them all
_SESSION = re.compile(r"(?P<name>\w+)(\((?P<target>[^()]+)\))?")


@dataclass(frozen=True)
class Session:
    """A session whose result is needed; with a target, one row's."""

    name: str
    target: str | None = None

    @classmethod
    def parse(cls, text: str) -> Session:
        """``name`` or ``name(target)``; MatrixError for anything else."""
        found = _SESSION.fullmatch(text)
        if found is None:
            raise MatrixError(f"{text!r} names no session: it is NAME or NAME(TARGET)")
        return cls(found["name"], found["target"])

    def __str__(self) -> str:
        return f"{self.name}({self.target})" if self.target else self.name

    def file(self, results: Path) -> Path:
        """Where its result lies."""
        return results / (f"{self.name}-{self.target}.json" if self.target else f"{self.name}.json")


@dataclass(frozen=True)
class Row:
    """One row's verdict; reasons where it is none of ``pass``. ``sessions``: the verdict of each that it has."""

    release: str
    status: str
    verdict: str
    reasons: tuple[str, ...]
    sessions: Mapping[str, str]


@dataclass(frozen=True)
class Gate:
    """The whole verdict: go where no supported row and no common session has a reason against it."""

    rows: tuple[Row, ...]
    common: tuple[str, ...]
    notes: tuple[str, ...] = ()  # said to people, against nothing

    @property
    def blocking(self) -> tuple[str, ...]:
        """Every reason for a no-go."""
        supported = [row for row in self.rows if row.status == "supported"]
        nothing = () if supported else ("there is no supported row",)
        return (*self.common, *nothing, *(reason for row in supported for reason in row.reasons))

    @property
    def verdict(self) -> str:
        """The word."""
        return "no-go" if self.blocking else "go"

    def as_json(self) -> dict[str, Any]:
        """The line that machines read; reasons only where there are any against a go."""
        line: dict[str, Any] = {"verdict": self.verdict}
        for status in ("supported", "followed"):
            line[status] = {row.release: row.verdict for row in self.rows if row.status == status}
        return {**line, "reasons": list(self.blocking)} if self.blocking else line

    def as_lines(self) -> Iterator[str]:
        """The same for people, with the followed rows' reasons, which never block."""
        supported = any(row.status == "supported" for row in self.rows)
        yield from self.common if supported else self.blocking
        for row in self.rows:
            sessions = ", ".join(f"{name} {verdict}" for name, verdict in row.sessions.items())
            yield f"{row.release}  {row.status:9}  {row.verdict:7}  {sessions}"
            yield from (f"  {reason}" for reason in row.reasons)
        yield from self.notes
        yield self.verdict


def _against(session: Session, results: Path, sources: str | None) -> Iterator[str]:
    """What is wrong with a session's result, if anything."""
    found = read_outcome(session.file(results))
    if found is None:
        yield f"{session}: no result"
        return
    if isinstance(found, str):
        yield f"{session}: {found}"
        return
    if (found.name, found.target) != (session.name, session.target):
        yield f"{session}: its result is another session's"
    if sources is not None and found.sources != sources:
        yield f"{session}: ran on other sources than these"
    if found.arguments:
        yield f"{session}: only some of it ran ({' '.join(found.arguments)})"
    skipped = found.counts.get("skipped", 0)
    if skipped:
        yield f"{session}: {skipped} undeclared skip(s)"
    failed = found.counts.get("failed", 0) - skipped  # what is skipped is counted as failed, too
    if failed > 0 or not (found.passed or skipped) or not found.counts.get("passed"):
        names = found.failures
        more = ", …" if len(names) > FAILURES_SHOWN_MAX else ""
        which = f": {', '.join(names[:FAILURES_SHOWN_MAX])}{more}" if names else ""
        yield f"{session}: {failed} failed{which}" if failed > 0 else f"{session}: did not pass"


def _stale(target: Target, places: Places) -> Iterator[str]:
    """What is wrong with the row's committed contract: it must come from the wheel that the row names."""
    path = places.contract(target)
    try:
        provenance = load_contract(path).get("provenance")
    except (OSError, ValueError, RecursionError, MatrixError):
        yield f"contract: {path.name} is missing or malformed"
        return
    if provenance != {"package": target.package, "wheel": target.wheel, "sha256": target.sha256}:
        yield f"contract: {path.name} is stale: it was not made from the wheel that the row names"


def _is_of(session: Session, results: Path, sources: str | None) -> bool:
    """Whether a result lies there that was made on these sources, or that does not say so."""
    found = read_outcome(session.file(results))
    return isinstance(found, str) or (found is not None and sources in {None, found.sources})


def _if_run(target: Target) -> tuple[str, ...]:
    """What a followed row may have beside what it needs."""
    return FOLLOWED_IF_RUN if target.engine else FOLLOWED_IF_RUN[:1]


def _verdict(session: Session, results: Path, reasons: Sequence[str], misfits: Mapping[str, str]) -> str:
    if reasons:
        return FAIL if session.file(results).exists() else NOT_RUN
    return MISFIT if misfits and session.name == "contracts" else PASS


def _misfits(target: Target, places: Places) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """The misfits that the row's table knows of, or a reason where there is no such table."""
    path = places.table(target)
    try:
        return load_expected(path).misfits, ()
    except (MatrixError, RecursionError):
        return {}, (f"expected: {path.name} is missing or malformed",)


def _row(target: Target, needed: Sequence[Session], results: Path, places: Places, sources: str | None) -> Row:
    found = {session: tuple(_against(session, results, sources)) for session in needed}
    misfits, unreadable = _misfits(target, places)
    stale = (*_stale(target, places), *unreadable)
    reasons = (*stale, *(reason for texts in found.values() for reason in texts))
    misfits = {} if stale else misfits
    known = tuple(f"{name}: {reason}" for name, reason in sorted(misfits.items()))
    sessions = {session.name: _verdict(session, results, texts, misfits) for session, texts in found.items()}
    if stale:
        sessions["contracts"] = FAIL
    if target.status == "followed" and target.requirements:
        sessions = {**dict.fromkeys(_if_run(target), NOT_RUN), **sessions}
    if target.status == "followed" and set(sessions.values()) == {NOT_RUN}:
        verdict = NOT_RUN
    else:
        verdict = FAIL if reasons else MISFIT if known else PASS
    return Row(target.release, target.status, verdict, reasons or known, dict(sorted(sessions.items())))


def judge(
    targets: Sequence[Target], needed: Sequence[Session], results: Path, places: Places, sources: str | None = None
) -> Gate:
    """The verdict on what lies in a folder of results.

    ``needed``: sessions beyond those that every row needs; with a followed row's target they are reported
    only. ``sources``: what a result must say that it ran on; None where that is not asked.
    """
    releases = {target.release for target in targets}
    if unknown := [str(session) for session in needed if session.target not in {None, *releases}]:
        raise MatrixError(f"{unknown[0]}: no such target")
    rows = []
    for target in sorted(targets, key=lambda target: target.order):
        own = SUPPORTED_SESSIONS if target.status == "supported" else FOLLOWED_SESSIONS
        sessions = [Session(name, target.release) for name in own]
        sessions += [session for session in needed if session.target == target.release and session not in sessions]
        if target.status == "followed":
            more = [Session(name, target.release) for name in _if_run(target)]
            sessions += [session for session in more if session not in sessions and _is_of(session, results, sources)]
        rows.append(_row(target, sessions, results, places, sources))
    common = [text for session in needed if not session.target for text in _against(session, results, sources)]
    return Gate(tuple(rows), tuple(common))


def with_page(gate: Gate, targets: Sequence[Target], page: Path, places: Places) -> Gate:
    """The verdict with what the README says of the rows: a page that promises anything else is a reason."""
    verdicts = {row.release: _shown({"status": row.status, "verdict": row.verdict, "sessions": row.sessions})
                for row in gate.rows}  # fmt: skip
    try:
        differs, wrong = drift(page.read_text(encoding="utf-8"), targets, verdicts, places)
    except (OSError, UnicodeDecodeError) as error:
        return replace(gate, common=(*gate.common, f"{page.name}: it cannot be read: {error}"))
    except MatrixError as error:
        return replace(gate, common=(*gate.common, f"{page.name}: {error}"))
    reasons = (f"{page.name}: the support table is not what the gate says",) if differs else ()
    notes = tuple(f"{page.name}: of {release} it does not say {verdicts[release]!r}" for release in wrong)
    return replace(gate, common=(*gate.common, *reasons), notes=notes)


def save_gate(gate: Gate, path: Path) -> None:
    """Write gate.json; nothing in it depends on when or where the gate was asked."""
    rows = {
        row.release: {
            "status": row.status,
            "verdict": row.verdict,
            "sessions": dict(row.sessions),
            "reasons": row.reasons,
        }
        for row in gate.rows
    }
    text = json.dumps({"verdict": gate.verdict, "reasons": gate.blocking, "rows": rows}, indent=1)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(f"{text}\n", encoding="utf-8")
    fresh.replace(path)


def _shown(row: Mapping[str, Any]) -> str:
    """A row's verdict in the README: a followed one's by its sources alone, whatever else ran by chance."""
    return str(row["verdict"] if row["status"] == "supported" else row["sessions"]["contracts"])


def load_gate(path: Path) -> dict[str, str]:
    """Release → the verdict that the README shows, from gate.json; MatrixError where there is none, or no such."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return {str(release): _shown(row) for release, row in rows.items()}
    except OSError as error:
        raise MatrixError(f"{path}: {error.strerror}; the gate writes it") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MatrixError(f"{path}: not what the gate writes") from error
