"""The README's support table, made from the rows and the gate's verdicts between two markers.

Owns: the table's text, and whether a page says the same. Must not know: how a verdict comes about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .check import load_expected
from .findings import MatrixError
from .page import BEGIN, END, placed, table_of
from .targets import SHAPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .check import Places
    from .targets import Target

__all__ = ["drift", "table_text"]

# What a row may be said to be; the gate says which it is.
_WORDS = ("pass", "fail", "not run", "misfit")


def _checked_by(target: Target, places: Places) -> str:
    if target.status != "supported":
        misfits = sorted(set(load_expected(places.table(target)).misfits.values()))
        if misfits or not target.requirements:
            return f"its sources: {'; '.join(misfits) or 'contract, calls and features'}"
        return f"its sources; {'real engine' if target.engine else 'connector harness'} outside CI"
    cannot = {item.shape for item in target.cannot_run}
    engine = ", ".join(name for shape, name in SHAPES.items() if shape not in cannot)
    harness = ", ".join(name for shape, name in SHAPES.items() if shape in cannot)
    return f"real engine: {engine}" + (f"; connector harness: {harness}" if harness else "")


def _line(target: Target, checked: str, verdict: str) -> str:
    return f"| {target.release} | {target.status} | {checked} | {verdict} |"


def _lines(targets: Sequence[Target], verdicts: Mapping[str, str], places: Places) -> Iterator[str]:
    yield "| vLLM | status | checked with | result |"
    yield "| --- | --- | --- | --- |"
    for target in sorted(targets, key=lambda target: target.order):
        verdict = verdicts.get(target.release)
        if verdict is None:
            raise MatrixError(f"the gate has no verdict on {target.release}: ask it again")
        yield _line(target, _checked_by(target, places), verdict)


def _marked(lines: Iterable[str]) -> str:
    return "\n".join((BEGIN, "", *lines, "", END))


def table_text(targets: Sequence[Target], verdicts: Mapping[str, str], places: Places) -> str:
    """The table with its markers."""
    return _marked(_lines(targets, verdicts, places))


def drift(text: str, targets: Sequence[Target], verdicts: Mapping[str, str], places: Places) -> tuple[bool, list[str]]:
    """Whether a page promises anything but what a go means, and the followed rows of which it says what is not so.

    What it says of a supported row is its pass: whatever else is the gate's own reason against a go. A followed row
    never blocks, so its result, and what cannot be read of it, are no drift.
    """
    lines = {line.removeprefix("| ").partition(" |")[0]: line for line in table_of(text).splitlines()}
    wanted, wrong = list(_lines((), {}, places)), []
    for target in sorted(targets, key=lambda target: target.order):
        if target.status == "supported":
            wanted.append(_line(target, _checked_by(target, places), "pass"))
            continue
        there = lines.get(target.release, "")
        word = there.removesuffix(" |").rpartition("| ")[2]
        if word in _WORDS and word != verdicts[target.release]:
            wrong.append(target.release)
        try:
            wanted.append(_line(target, _checked_by(target, places), word if word in _WORDS else "pass"))
        except MatrixError:
            wanted.append(there)
    return placed(text, _marked(wanted)) != text, wrong
