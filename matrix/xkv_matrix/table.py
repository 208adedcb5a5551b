"""The README's support table, made from the rows and the gate's verdicts between two markers.

Owns: the table's text, and finding its place. Must not know: how a verdict comes about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .check import load_expected
from .findings import MatrixError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .check import Places
    from .targets import Target

__all__ = ["BEGIN", "END", "placed", "table_text"]

BEGIN = "<!-- support table: made by `python -m xkv_matrix table --write` -->"
END = "<!-- end of the support table -->"
# What the real engines of a supported row are run with; a row says which of them its CPU engine cannot run.
SHAPES: Mapping[str, str] = {"llama": "Llama", "sliding": "Gemma 3 (sliding windows)", "mla": "MLA"}


def _checked_by(target: Target, places: Places) -> str:
    if target.status != "supported":
        misfits = sorted(set(load_expected(places.table(target)).misfits.values()))
        if misfits or not target.requirements:
            return f"its sources: {'; '.join(misfits) or 'contract, calls and features'}"
        return f"its sources; {'real engine' if target.engine else 'connector harness'} outside CI"
    cannot = {item.shape for item in target.cannot_run}
    if unknown := sorted(cannot - set(SHAPES)):
        raise MatrixError(f"{target.release}: cannot_run names {unknown[0]!r}; known are {', '.join(SHAPES)}")
    engine = ", ".join(name for shape, name in SHAPES.items() if shape not in cannot)
    harness = ", ".join(name for shape, name in SHAPES.items() if shape in cannot)
    return f"real engine: {engine}" + (f"; connector harness: {harness}" if harness else "")


def _lines(targets: Sequence[Target], verdicts: Mapping[str, str], places: Places) -> Iterator[str]:
    yield "| vLLM | status | checked with | result |"
    yield "| --- | --- | --- | --- |"
    for target in sorted(targets, key=lambda target: target.order):
        verdict = verdicts.get(target.release)
        if verdict is None:
            raise MatrixError(f"the gate has no verdict on {target.release}: ask it again")
        yield f"| {target.release} | {target.status} | {_checked_by(target, places)} | {verdict} |"


def table_text(targets: Sequence[Target], verdicts: Mapping[str, str], places: Places) -> str:
    """The table with its markers."""
    return "\n".join((BEGIN, "", *_lines(targets, verdicts, places), "", END))


def placed(text: str, table: str) -> str:
    """A page with the table put between its markers; MatrixError where they are not there once each, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise MatrixError(f"there must be one {BEGIN} and after it one {END}")
    return f"{before}{table}{after}"
