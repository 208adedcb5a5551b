"""The named points that a package's source really has, read from the source.

Owns: finding the calls of `reached`. Must not know: what is done with the names, or the table of points.
A list that is made from the code cannot forget a point, and cannot name one that is gone.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent.parent
MARKER: Final = "reached"


def in_source(folder: Path = PACKAGE) -> dict[str, list[str]]:
    """Name of each point: the places (`file:line`) that say it is reached. ValueError for a name that is computed."""
    found: dict[str, list[str]] = {}
    for source in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _called(node) == MARKER:
                place = f"{source.relative_to(folder)}:{node.lineno}"
                match node.args:
                    case [ast.Constant(value=str(name))]:
                        found.setdefault(name, []).append(place)
                    case _:
                        raise ValueError(f"{place}: a point's name must be a literal")
    return found


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""
