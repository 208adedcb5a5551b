"""A session's result as it is read back: strictly, so that an edited or damaged one is never taken for a pass.

Owns: the result's format. Must not know: which results are needed, and what is made of them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["COUNTS", "Outcome", "plain", "read_outcome"]

COUNTS = ("passed", "failed", "skipped", "xfailed")
_VERDICTS = ("passed", "failed")


@dataclass(frozen=True)
class Outcome:
    """What one session left behind. ``arguments``: pytest's, where only some tests were asked for."""

    name: str
    target: str | None
    passed: bool
    counts: dict[str, int]
    seconds: float
    arguments: tuple[str, ...]
    failures: tuple[str, ...]
    sources: str | None


def plain(text: str) -> str:
    """A text on one line, of what can be printed."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _malformed(found: Any) -> str | None:
    """The first thing in a result that is not of its kind."""
    if not isinstance(found, dict):
        return "it is no table"
    target, sources, seconds = found.get("target"), found.get("sources"), found.get("seconds", 0.0)
    counts = found.get("counts")
    checks = {
        "name": isinstance(found.get("name"), str),
        "target": target is None or isinstance(target, str),
        "outcome": found.get("outcome") in _VERDICTS,
        "seconds": isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < math.inf,
        "counts": isinstance(counts, dict),
        "arguments": _are_texts(found.get("arguments")),
        "failures": _are_texts(found.get("failures", [])),
        "sources": sources is None or isinstance(sources, str),
    }
    if bad := [name for name, good in checks.items() if not good]:
        return f"its {bad[0]}"
    assert isinstance(counts, dict)
    if unknown := sorted(set(counts) - set(COUNTS)):
        return f"unknown count {plain(unknown[0])!r}"
    return next((f"its count of {name}" for name, count in counts.items() if not _is_count(count)), None)


def _contradictory(found: dict[str, Any]) -> str | None:
    """Why a well-formed result cannot be what a session wrote."""
    if found["outcome"] == "passed" and found.get("failures"):
        return "it passed, and names what failed"
    return None


def read_outcome(file: Path) -> Outcome | str | None:
    """A result; a text for what is wrong with it, None where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_no_constant, object_pairs_hook=_pairs)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"its result cannot be read: {plain(str(error))}"
    except RecursionError:
        return "its result cannot be read: nested too deeply"
    if bad := _malformed(found) or _contradictory(found):
        return f"its result is malformed: {bad}"
    return Outcome(
        name=found["name"],
        target=found.get("target"),
        passed=found["outcome"] == "passed",
        counts=found["counts"],
        seconds=float(found.get("seconds", 0.0)),
        arguments=tuple(map(plain, found["arguments"])),
        failures=tuple(map(plain, found.get("failures", []))),
        sources=found.get("sources"),
    )
