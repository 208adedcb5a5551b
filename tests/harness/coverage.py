"""Whether every call that the release's connector makes on our objects has been made by a harness test.

Owns: comparing the contract's uses with those that were noted, by the lines of the installed release; the reviewed
declarations of what no test can reach.
Must not know: how uses are noted, pytest.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from harness.calls import Made


def site(use: Mapping[str, Any]) -> str:
    """A use's name in [uncovered]: `role.name module:function:line`, the module by its last part."""
    module, function, line = use["at"].rsplit(":", 2)
    return f"{use['role']}.{use['name']} {module.rpartition('.')[2]}:{function}:{line}"


def faults(uses: Collection[Mapping[str, Any]], made: Collection[Made], uncovered: Mapping[str, str]) -> list[str]:
    """What is wrong, a line each; empty if every use has been made, or is declared with a reason and was not."""
    done = {(one.role, one.name, one.module, one.line) for one in made}
    found = []
    for use in uses:
        module, _, line = use["at"].rsplit(":", 2)
        lines = set(_lines(module, use["kind"], use["name"], int(line)))
        if not lines:
            found.append(f"{site(use)}: the installed release has no such line: the contract is of another wheel")
            continue
        covered = any((use["role"], use["name"], module, one) in done for one in lines)
        if covered and site(use) in uncovered:
            found.append(f"{site(use)}: declared as uncovered, but a test makes it")
        elif not covered and site(use) not in uncovered:
            found.append(f"{site(use)}: no harness test makes it ({', '.join(use['arguments'])})")
    known = {site(use) for use in uses}
    found += [f"{name}: declared as uncovered, but no such use" for name in uncovered if name not in known]
    return found + sorted(_undeclared(uses, done))


def _undeclared(uses: Collection[Mapping[str, Any]], done: Collection[tuple[str, str, str, int]]) -> Iterator[str]:
    """Uses that were made in the contract's modules and that it does not name."""
    read = {use["at"].rsplit(":", 2)[0] for use in uses}
    named = set()
    for use in uses:
        module, _, line = use["at"].rsplit(":", 2)
        lines = _lines(module, use["kind"], use["name"], int(line))
        named |= {(use["role"], use["name"], module, one) for one in lines}
    for role, name, module, line in done:
        if module in read and not name.startswith("__") and (role, name, module, line) not in named:
            yield f"{role}.{name} {module}:{line}: made, but the contract does not name it"


def _lines(module: str, kind: str, name: str, line: int) -> Iterator[int]:
    """The lines that the interpreter may name for a use that begins at `line`: a chain may go over several."""
    for node in _nodes(module, line):
        attribute = node.func if kind == "call" and isinstance(node, ast.Call) else node
        is_it = isinstance(attribute, ast.Attribute) and attribute.attr == name
        is_asked = kind in ("ask", "read") and isinstance(node, ast.Call) and _asks(node, name)
        if is_it or is_asked or (kind == "make" and isinstance(node, ast.Call)):
            yield line
            yield from (end for end in (attribute.end_lineno,) if end is not None and is_it)


def _asks(node: ast.Call, name: str) -> bool:
    """Whether it is getattr(…, name)."""
    named = node.args[1] if len(node.args) > 1 else None
    return (
        isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and isinstance(named, ast.Constant)
        and named.value == name
    )


def _nodes(module: str, line: int) -> list[ast.expr]:
    return _tree(module).get(line, [])


@cache
def _tree(module: str) -> dict[int, list[ast.expr]]:
    """A module's calls and attributes by the line that each begins at."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{module} is not installed"
    assert spec.origin is not None
    found: dict[int, list[ast.expr]] = {}
    for node in ast.walk(ast.parse(Path(spec.origin).read_bytes())):
        if isinstance(node, ast.Call | ast.Attribute):
            found.setdefault(node.lineno, []).append(node)
    return found
