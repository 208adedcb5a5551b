"""Where the support table stands in the README: between two markers.

Owns: finding its place, and putting another text there. Must not know: the table.
"""

from __future__ import annotations

from .findings import MatrixError

__all__ = ["BEGIN", "END", "placed", "table_of"]

BEGIN = "<!-- support table: made by `python3 dev.py -s table` -->"
END = "<!-- end of the support table -->"


def _parts(text: str) -> tuple[str, str, str]:
    before, begin, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise MatrixError(f"there must be one {BEGIN} and after it one {END}")
    return before, table, after


def placed(text: str, table: str) -> str:
    """A page with the table put between its markers; MatrixError where they are not there once each, in order."""
    before, _, after = _parts(text)
    return f"{before}{table}{after}"


def table_of(text: str) -> str:
    """What a page has there, with the markers."""
    return f"{BEGIN}{_parts(text)[1]}{END}"
