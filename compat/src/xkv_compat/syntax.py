"""What a module's syntax tree says, without importing it: names, classes, fields, parameters, calls.

Owns: the questions about one parsed module that both readers ask.
Must not know: where the text came from, and the probe table.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Import", "assigns_to_self", "calls", "class_body_names", "deeper_than", "enum_members", "field_names",
           "find", "has_text", "is_abstract", "parameter_names", "top_level"]  # fmt: skip

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """A name bound by an import statement: ``name`` of ``module`` (``name`` is empty for a module)."""

    module: str
    name: str
    level: int


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module or a class body runs; branches are all taken."""
    for node in body:
        if isinstance(node, ast.If):
            if not _is_type_checking(node.test):
                yield from _statements(node.body)
            yield from _statements(node.orelse)
        elif isinstance(node, ast.Try):
            for part in (
                node.body,
                *(handler.body for handler in node.handlers),
                node.orelse,
                node.finalbody,
            ):
                yield from _statements(part)
        elif isinstance(node, ast.With | ast.For | ast.While):
            yield from _statements(node.body)
        else:
            yield node


def _targets(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Tuple | ast.List):
        for element in node.elts:
            yield from _targets(element)


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt | Import]]:
    for node in _statements(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for name in _targets(target):
                    yield name, node
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None and isinstance(node.target, ast.Name):
                yield node.target.id, node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from _imports(node)


def _imports(node: ast.ImportFrom | ast.Import) -> Iterator[tuple[str, Import]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, Import(node.module or "", alias.name, node.level)
        else:
            whole = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or whole, Import(whole, "", 0)


def top_level(module: ast.Module) -> dict[str, ast.stmt | Import]:
    """Every name that importing the module binds, with what binds it last.

    What only type checkers see (``if TYPE_CHECKING``) and annotations without a value bind nothing.
    """
    return dict(_bindings(module.body))


def class_body_names(node: ast.ClassDef) -> dict[str, ast.stmt | Import]:
    """Every name that the class's own body binds; a field without a default binds nothing."""
    return dict(_bindings(node.body))


def field_names(node: ast.ClassDef) -> tuple[str, ...]:
    """The annotated names of a class body (a dataclass's or NamedTuple's own fields), ClassVars left out."""
    return tuple(
        statement.target.id
        for statement in _statements(node.body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.unparse(statement.annotation)
    )


def enum_members(node: ast.ClassDef) -> tuple[str, ...]:
    """The names that an enum's body assigns, private and dunder names left out."""
    return tuple(
        name
        for statement in _statements(node.body)
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        for name in _targets(target)
        if not name.startswith("_")
    )


def parameter_names(node: _Function) -> tuple[str, ...]:
    """The names of a function's parameters, ``self`` and starred ones included."""
    spec = node.args
    named = (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)
    starred = (argument for argument in (spec.vararg, spec.kwarg) if argument is not None)
    return (*(argument.arg for argument in named), *(argument.arg for argument in starred))


def is_abstract(node: ast.stmt | Import) -> bool:
    """Whether a class body's binding is an abstract method or property."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        ast.unparse(decorator).rpartition(".")[2] in {"abstractmethod", "abstractproperty"}
        for decorator in node.decorator_list
    )


def assigns_to_self(node: ast.ClassDef, name: str) -> bool:
    """Whether a method of the class assigns ``self.<name>``."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign):
            targets = inner.targets
        elif isinstance(inner, ast.AnnAssign) and inner.value is not None:
            targets = [inner.target]
        else:
            continue
        if any(_is_self(part, name) for target in targets for part in _parts(target)):
            return True
    return False


def _parts(target: ast.expr) -> Iterator[ast.expr]:
    """The single targets of an assignment, tuples taken apart."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _parts(element)
    else:
        yield target


def _is_self(target: ast.expr, name: str) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and target.attr == name
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )


def calls(tree: ast.AST, owner: str, name: str) -> bool:
    """Whether the tree holds a call ``<anything>.owner.name(…)`` or ``owner.name(…)``."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name):
            continue
        receiver = node.func.value
        if isinstance(receiver, ast.Attribute) and receiver.attr == owner:
            return True
        if isinstance(receiver, ast.Name) and receiver.id == owner:
            return True
    return False


def has_text(tree: ast.AST, text: str) -> bool:
    """Whether the tree holds exactly this string constant, docstrings left out."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return any(
        isinstance(node, ast.Constant) and node.value == text and id(node) not in docstrings for node in ast.walk(tree)
    )


def deeper_than(tree: ast.AST, levels: int) -> int | None:
    """The line of a node that is nested deeper than so many levels, None where there is none; never recurses."""
    nodes: list[ast.AST] = [tree]
    line = 0
    for _ in range(levels):
        nodes = [inner for node in nodes for inner in ast.iter_child_nodes(node)]
        if not nodes:
            return None
        line = next((node.lineno for node in nodes if isinstance(node, ast.stmt | ast.expr)), line)
    return line


def find(module: ast.Module, path: str) -> ast.stmt | None:
    """The function or class at a dotted path in the module itself (``Class.method``), or None."""
    body: list[ast.stmt] = module.body
    found: ast.stmt | None = None
    for part in path.split("."):
        found = None
        for name, node in _bindings(body):
            if name == part and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found = node
        if found is None or not isinstance(found, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        body = found.body
    return found
