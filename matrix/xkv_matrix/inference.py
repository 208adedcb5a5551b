"""A little type inference over a few modules: which expressions are objects of which class.

Owns: reading annotations, following assignments, loops, attributes and return types, flow-insensitively.
Must not know: which classes matter to anybody.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["PASSES_MAX", "Classes", "Scope", "Seen", "walk_scopes"]

# Assignments are followed this often at most: names that depend on one another in a chain longer than
# this do not occur in the modules that are read, and stay unknown (which is reported).
PASSES_MAX = 4

_MANY = frozenset({"list", "set", "tuple", "Iterable", "Iterator", "Sequence", "Collection", "deque", "frozenset"})
_MAPS = frozenset({"dict", "defaultdict", "Mapping"})
_PASS = frozenset({"Optional", "Union", "ClassVar", "Final", "Annotated"})
_VALUES = frozenset({"get", "pop", "setdefault"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Seen:
    """What an expression was seen to be: an object of the class ``name``, or (``is_class``) the class.

    ``many``: a collection of such objects; ``is_map``: they are a mapping's values.
    """

    name: str
    is_class: bool = False
    many: bool = False
    is_map: bool = False


class Classes:
    """The classes and functions of the modules, with their annotations."""

    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self.nodes: dict[str, ast.ClassDef] = {}
        self._functions: dict[str, _Function] = {}
        self._aliases: dict[str, ast.expr] = {}
        for tree in modules.values():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self.nodes[node.name] = node
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self._functions[node.name] = node
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
                    self._aliases |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        self._members: dict[tuple[str, str], Seen | None] = {}

    def annotation(self, node: ast.expr | None) -> Seen | None:  # noqa: C901, PLR0911 - one case for each form
        """What an annotation says, as far as it names one of the classes."""
        if node is None:
            return None
        if isinstance(node, ast.Constant):
            if not isinstance(node.value, str):
                return None
            return self.annotation(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.Name):
            return Seen(node.id) if node.id in self.nodes else self._alias(node.id)
        if isinstance(node, ast.Attribute):
            return Seen(node.attr) if node.attr in self.nodes else None
        if isinstance(node, ast.BinOp):
            return self.annotation(node.left) or self.annotation(node.right)
        if not isinstance(node, ast.Subscript):
            return None
        outer = node.value.id if isinstance(node.value, ast.Name) else ""
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer in _MAPS:
            found = self.annotation(inner[-1])
            return None if found is None else replace(found, many=True, is_map=True)
        first = ast.dump(inner[0])
        found = next((seen for part in inner if (seen := self.annotation(part)) is not None), None)
        if found is None:
            return None
        if outer == "type":
            return replace(found, is_class=True)
        if outer == "tuple" and any(not isinstance(part, ast.Constant) and ast.dump(part) != first for part in inner):
            return None  # a tuple of different things: its elements are not followed
        if outer in _MANY:
            return None if found.many else replace(found, many=True)
        return found if outer in _PASS else None

    def _alias(self, name: str) -> Seen | None:
        """What a name stands for that a module gives to an annotation."""
        meant = self._aliases.pop(name, None)  # away meanwhile: an alias may name itself
        if meant is None:
            return None
        found = self.annotation(meant)
        self._aliases[name] = meant
        return found

    def returns(self, function: str) -> Seen | None:
        """What a top-level function returns."""
        node = self._functions.get(function)
        return None if node is None else self.annotation(node.returns)

    def member(self, owner: str, name: str) -> Seen | None:
        """What an attribute of a class is, or what its method returns; inherited ones included."""
        key = (owner, name)
        if key not in self._members:
            self._members[key] = None  # ends a cycle
            self._members[key] = self._member(owner, name)
        return self._members[key]

    def _member(self, owner: str, name: str) -> Seen | None:
        node = self.nodes.get(owner)
        if node is None:
            return None
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if statement.target.id == name:
                    return self.annotation(statement.annotation)
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                if statement.name == name:
                    return self.annotation(statement.returns)
                found = self._assigned_in(node, statement, name)
                if found is not None:
                    return found
        for base in node.bases:
            if isinstance(base, ast.Name) and (found := self.member(base.id, name)) is not None:
                return found
        return None

    def _assigned_in(self, owner: ast.ClassDef, function: _Function, name: str) -> Seen | None:
        """What a method assigns to ``self.<name>``."""
        scope: Scope | None = None
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign) and _is_self(node.target, name):
                if (seen := self.annotation(node.annotation)) is not None:
                    return seen
            elif isinstance(node, ast.Assign) and any(_is_self(target, name) for target in node.targets):
                scope = scope or Scope("", owner.name, function, self, None)
                if (seen := scope.infer(node.value)) is not None:
                    return seen
        return None


def _is_self(target: ast.expr, name: str) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and target.attr == name
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )


class Scope:
    """One function (or a module's own statements) and what its names are."""

    def __init__(
        self, module: str, owner: str, function: _Function | ast.Module, classes: Classes, outer: Scope | None
    ) -> None:
        self._module = module
        self._owner = owner
        self._function = function
        self._classes = classes
        self._path = (outer.path + "." if outer is not None and outer.path else "") + (
            function.name if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        )
        self.names: dict[str, Seen] = dict(outer.names) if outer is not None else {}
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            self._parameters(function)
        for _ in range(PASSES_MAX):
            before = dict(self.names)
            for node in self.nodes():
                self._bind(node)
            if self.names == before:
                break

    @property
    def path(self) -> str:
        """The names of the functions around and including this one."""
        return self._path

    def at(self, node: ast.AST) -> str:
        """Where a node stands, for people: module, class and function, line."""
        where = ".".join(part for part in (self._owner, self._path) if part) or "<module>"
        return f"{self._module}:{where}:{getattr(node, 'lineno', 0)}"

    def nodes(self) -> Iterator[ast.AST]:
        """The nodes of this scope, without those of inner functions and classes."""
        pending: list[ast.AST] = list(self._function.body)
        while pending:
            node = pending.pop(0)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            yield node
            pending[:0] = list(ast.iter_child_nodes(node))

    def inner(self) -> Iterator[_Function]:
        """The functions defined in this one, however deep in its statements."""
        pending: list[ast.AST] = list(self._function.body)
        while pending:
            node = pending.pop(0)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node
            elif not isinstance(node, ast.ClassDef):
                pending[:0] = list(ast.iter_child_nodes(node))

    def _parameters(self, function: _Function) -> None:
        arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        for index, argument in enumerate(arguments):
            seen = self._classes.annotation(argument.annotation)
            if seen is None and index == 0 and self._owner and argument.arg in {"self", "cls"}:
                seen = Seen(self._owner, is_class=argument.arg == "cls")
            if seen is not None:
                self.names[argument.arg] = seen
            else:
                self.names.pop(argument.arg, None)  # it hides an outer name

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.AnnAssign):
            self._name(node.target, self._classes.annotation(node.annotation))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._name(target, self.infer(node.value))
        elif isinstance(node, ast.NamedExpr):
            self._name(node.target, self.infer(node.value))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._each(node.target, node.iter)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._name(node.optional_vars, self.infer(node.context_expr))

    def _name(self, target: ast.expr, seen: Seen | None) -> None:
        if isinstance(target, ast.Name) and seen is not None:
            self.names.setdefault(target.id, seen)
        elif isinstance(target, ast.Tuple) and seen is not None and seen.many and not seen.is_map:
            for part in target.elts:
                self._name(part, replace(seen, many=False))

    def _each(self, target: ast.expr, source: ast.expr) -> None:
        """Bind what a loop gives its target, one element at a time; pairs of ``items`` and ``enumerate`` too."""
        pair = target.elts if isinstance(target, ast.Tuple) and len(target.elts) == 2 else []
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute):
            seen = self.infer(source.func.value)
            if seen is not None and seen.is_map and source.func.attr in {"items", "values"}:
                value = pair[1] if pair and source.func.attr == "items" else target
                self._name(value, replace(seen, many=False, is_map=False))
                return
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Name) and source.args:
            if source.func.id == "enumerate" and pair:
                self._each(pair[1], source.args[0])
                return
            if source.func.id == "zip" and isinstance(target, ast.Tuple):
                for part, inner in zip(target.elts, source.args, strict=False):
                    self._each(part, inner)
                return
            if source.func.id in {"list", "tuple", "set", "sorted", "reversed"}:
                self._each(target, source.args[0])
                return
        seen = self.infer(source)
        if seen is not None and seen.many and not seen.is_map:
            self._name(target, replace(seen, many=False))

    def infer(self, node: ast.expr) -> Seen | None:  # noqa: PLR0911 - one answer for each form
        """What an expression is, or None where that is not known."""
        if isinstance(node, ast.Name):
            if node.id in self.names:
                return self.names[node.id]
            return Seen(node.id, is_class=True) if node.id in self._classes.nodes else None
        if isinstance(node, ast.Attribute):
            owner = self.infer(node.value)
            return None if owner is None or owner.many else self._classes.member(owner.name, node.attr)
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Subscript):
            seen = self.infer(node.value)
            return None if seen is None or not seen.many else replace(seen, many=False, is_map=False)
        if isinstance(node, ast.IfExp):
            return self.infer(node.body) or self.infer(node.orelse)
        if isinstance(node, ast.BoolOp):
            return next((seen for value in node.values if (seen := self.infer(value)) is not None), None)
        if isinstance(node, ast.NamedExpr | ast.Await):
            return self.infer(node.value)
        return None

    def _called(self, node: ast.Call) -> Seen | None:
        function = node.func
        if isinstance(function, ast.Name):
            seen = self.infer(function)
            if seen is not None and seen.is_class and not seen.many:
                return replace(seen, is_class=False)
            return self._classes.returns(function.id)
        if isinstance(function, ast.Attribute):
            owner = self.infer(function.value)
            if owner is None:
                return None
            if owner.is_map and function.attr in _VALUES:
                return replace(owner, many=False, is_map=False)
            return None if owner.many else self._classes.member(owner.name, function.attr)
        return None


def walk_scopes(module: str, tree: ast.Module, classes: Classes) -> Iterator[Scope]:
    """Every scope of a module: its own statements, each function, and the functions inside."""

    def functions(owner: str, node: _Function, outer: Scope | None) -> Iterator[Scope]:
        scope = Scope(module, owner, node, classes, outer)
        yield scope
        for inner in scope.inner():
            yield from functions(owner, inner, scope)

    yield Scope(module, "", ast.Module(body=list(tree.body), type_ignores=[]), classes, None)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from functions("", node, None)
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from functions(node.name, method, None)
