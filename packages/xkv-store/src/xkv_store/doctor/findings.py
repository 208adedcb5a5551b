"""What a check has found, and how findings are said.

Owns: `Finding` (what is so, what follows, what to type), the severities, the exit code, the text and the JSON.
Must not know: any check.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EXIT_FAULT: Final = 1
TEXT_COLUMNS: Final = 120


class Severity(str, Enum):
    """How bad it is. Only a fault makes the exit code 1."""

    OK = "ok"
    NOTE = "note"  # nothing is wrong; worth knowing
    WARNING = "warning"  # it works, and less well than it could
    FAULT = "fault"  # it does not work, or loses what it is for


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found. `check` is a stable name for programs; the texts are for people."""

    check: str
    severity: Severity
    what: str
    follows: str = ""
    remedy: str = ""

    def as_value(self) -> dict[str, str]:
        """For JSON; the remedy is called `type`, which is what to do with it."""
        value = {"check": self.check, "severity": self.severity.value, "what": self.what}
        return value | {name: text for name, text in (("follows", self.follows), ("type", self.remedy)) if text}


def ok(check: str, what: str) -> Finding:
    """It was looked at and is well."""
    return Finding(check, Severity.OK, what)


def note(check: str, what: str, follows: str = "", remedy: str = "") -> Finding:
    """Worth knowing."""
    return Finding(check, Severity.NOTE, what, follows, remedy)


def warning(check: str, what: str, follows: str, remedy: str) -> Finding:
    """Less well than it could be."""
    return Finding(check, Severity.WARNING, what, follows, remedy)


def fault(check: str, what: str, follows: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(check, Severity.FAULT, what, follows, remedy)


def of_error(check: str, error: Exception, follows: str, remedy: str = "") -> Finding:
    """A fault of an error. Without a remedy, the error's text has it behind its last semicolon."""
    text = " ".join(str(error).split())
    if remedy:
        return fault(check, text, follows, remedy)
    what, _, remedy = text.rpartition("; ")
    return fault(check, what or text, follows, remedy if what else "mend what is named, and try again")


def exit_code(findings: Iterable[Finding]) -> int:
    """0, or 1 where there is a fault."""
    return EXIT_FAULT if any(one.severity is Severity.FAULT for one in findings) else 0


def as_value(findings: Sequence[Finding], measured: dict[str, Any]) -> dict[str, Any]:
    """The whole report for a program."""
    return {
        "verdict": "fault" if exit_code(findings) else "well",
        "findings": [one.as_value() for one in findings],
        "measured": measured,
    }


def as_text(findings: Sequence[Finding]) -> str:
    """The whole report for a person: a line for each finding, and what follows and what to type below it."""
    width = max((len(one.check) for one in findings), default=0)
    lines: list[str] = []
    for one in findings:
        lines += _wrapped(f"{one.severity.value:<7}  {one.check:<{width}}  ", one.what)
        rest = " " * (9 + width + 2)
        for name, text in (("follows", one.follows), ("type", one.remedy)):
            if text:
                lines += _wrapped(f"{rest}{name + ':':<9}", text)
    counts = {severity: sum(one.severity is severity for one in findings) for severity in Severity}
    faults, warnings = counts[Severity.FAULT], counts[Severity.WARNING]
    verdict = f"{faults} fault(s), {warnings} warning(s)" if faults or warnings else "well"
    return "\n".join([*lines, "", f"xkv doctor: {verdict}"])


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        TEXT_COLUMNS,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
