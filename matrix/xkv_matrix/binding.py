"""Whether our side fits a release: every use that its connector makes, bound against our signatures.

Owns: reading our classes by their syntax, and binding calls and attributes against them.
Must not know: how uses are found, and how our side works.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xkv_compat import syntax

from .connector import ROLES
from .findings import Finding, MatrixError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from xkv_compat.source import SourceReader

    from .connector import Use, Uses

__all__ = ["DEFAULT", "OUR_CLASSES", "OurClasses", "bind", "called", "misbound", "misfit_key"]

# Role → our class. Objects of the other roles are the release's own classes, filled in by us.
OUR_CLASSES: Mapping[str, str] = {
    "spec": "XkvOffloadingSpec",
    "manager": "XkvManager",
    "worker": "XkvWorker",
    "load_store_spec": "XkvTransferSpec",
}
# What a release may make a spec from: ours takes anything, and reads these two shapes.
MADE_FROM = (("config",), ("vllm_config", "kv_cache_config"))
# What Python gives every class, whoever writes it.
OF_EVERY_CLASS = frozenset({"__doc__", "__module__", "__name__", "__qualname__"})
# The check of a call that vLLM's own method answers: a person must have said that it may.
DEFAULT = "default"
_CHECK = "binding"
_ABSTRACT = "abstract in this release, and not ours"
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Member = ast.stmt | syntax.Import


@dataclass(frozen=True)
class _Found:
    """A member: what binds it, and whether it is ours or the release's default."""

    bound: _Member | None  # None: an instance attribute or a field
    ours: bool


class OurClasses:
    """Our classes, read from the Python files of one folder without importing them."""

    def __init__(self, folder: Path, names: Mapping[str, str] = OUR_CLASSES) -> None:
        self._classes: dict[str, ast.ClassDef] = {}
        self._files: dict[str, Path] = {}
        if not folder.is_dir():
            raise MatrixError(f"{folder}: no such folder; our classes are read from there")
        for path in sorted(folder.rglob("*.py")):
            try:
                tree = ast.parse(path.read_bytes(), filename=str(path))
            except SyntaxError as error:
                raise MatrixError(f"{path}:{error.lineno or 0}: {error.msg}") from error
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._classes.setdefault(node.name, node)
                    self._files.setdefault(node.name, path)
        self.names = {role: name for role, name in names.items() if name in self._classes}
        if missing := sorted(set(names.values()) - set(self.names.values())):
            raise MatrixError(f"{folder}: no class {', '.join(missing)} in it")

    def lineage(self, role: str) -> list[ast.ClassDef]:
        """Our class of a role and its bases among our classes, itself first."""
        pending = [self.names[role]] if role in self.names else []
        found: list[ast.ClassDef] = []
        while pending:
            node = self._classes.get(pending.pop(0))
            if node is not None and node not in found:
                found.append(node)
                pending.extend(base.id for base in node.bases if isinstance(base, ast.Name))
        return found

    def place(self, role: str, name: str) -> tuple[str, Path]:
        """Our class that defines a member of a role's, and its file; the role's own class where none does."""
        lineage = self.lineage(role)
        for node in lineage:
            if name in syntax.class_body_names(node) or syntax.assigns_to_self(node, name):
                return node.name, self._files[node.name]
        return lineage[0].name, self._files[lineage[0].name]

    def defines(self, role: str, name: str) -> bool:
        """Whether one of our classes of a role defines a member itself."""
        return any(name in syntax.class_body_names(node) for node in self.lineage(role))


def misfit_key(use: Use) -> str:
    """The name that a use has in an expected table's misfits."""
    return f"{use.role}.{use.name}"


def called(uses: Uses, role: str) -> bool:
    """Whether anything calls an object of the role at all."""
    return any(use.role == role and use.kind in {"call", "make"} for use in uses.found)


def bind(uses: Uses, reader: SourceReader, ours: OurClasses) -> list[Finding]:
    """Everything of a release's uses that does not fit our classes; each finding names the call site."""
    sides = {role: _Side(role, reader, ours) for role in ROLES}
    findings = [Finding(_CHECK, where, "a call on an object of unknown class: nothing checks it")
                for where in uses.unresolved]  # fmt: skip
    findings += [Finding(_CHECK, module, "names our classes, and is no module whose calls are looked for")
                 for module in uses.unread]  # fmt: skip
    findings += [
        Finding(_CHECK, use.at, f"{misfit_key(use)}: {text}")
        for use in uses.found
        if (text := sides[use.role].misfit(use)) is not None
    ]
    left = {misfit_key(use): use for use in reversed(uses.found) if sides[use.role].is_left_to_default(use)}
    findings += [
        Finding(DEFAULT, use.at, f"{key}: {use.kind}, answered by vLLM's default, for ours has no such method")
        for key, use in sorted(left.items())
    ]
    used = {(use.role, use.name) for use in uses.found}
    for role in ours.names:
        if not sides[role].is_declared:
            text = f"{role}.*: the release declares no such class, so that its uses cannot be found"
            findings.append(Finding(_CHECK, ours.names[role], text))
        findings += [
            Finding(_CHECK, f"{ours.names[role]}.{name}", f"{role}.{name}: {_ABSTRACT}")
            for name in sides[role].unfilled()
            if (role, name) not in used
        ]
    return findings


class _Side:
    """One role: our class (if it is ours to write) over the release's own class."""

    def __init__(self, role: str, reader: SourceReader, ours: OurClasses) -> None:
        self._ours = ours.lineage(role)
        self._theirs: list[ast.ClassDef] = []
        for module, name in ROLES[role]:
            found = reader.lineage(module, name)
            if found:
                self._theirs = [node for _, node in found]
                break

    @property
    def is_declared(self) -> bool:
        """Whether the release has a class for the role."""
        return bool(self._theirs)

    def misfit(self, use: Use) -> str | None:
        """Why a use does not fit, or None."""
        if use.kind == "write" or (use.kind == "read" and use.name in OF_EVERY_CLASS):
            return None
        found = self._find(use.name)
        if use.kind in {"ask", "read"} and found is not None and _is_method(found.bound):
            return f"{use.kind} of a method that is not called on the spot: how it is called cannot be checked"
        if use.kind == "ask":
            return None
        if found is None:
            return f"{use.kind} of something that neither our class nor the release's has"
        if found.bound is not None and not found.ours and syntax.is_abstract(found.bound):
            return f"{use.kind}, {_ABSTRACT}"
        return None if use.kind == "read" else self._misbound(found.bound, use)

    def is_left_to_default(self, use: Use) -> bool:
        """Whether a method or a property of the release's own class answers for ours."""
        found = self._find(use.name) if self._ours else None
        return (
            found is not None
            and not found.ours
            and isinstance(found.bound, _Function)
            and not syntax.is_abstract(found.bound)
        )

    def _misbound(self, bound: _Member | None, use: Use) -> str | None:
        if not isinstance(bound, ast.FunctionDef | ast.AsyncFunctionDef):
            return "called, but it is no method"
        if use.starred:
            return "called with * or **: it cannot be bound"
        if use.kind == "make" and self._made_from() not in MADE_FROM:
            return f"a spec is made from {', '.join(self._made_from())} here; which is no shape that ours reads"
        return _misbound(bound, use)

    def _made_from(self) -> tuple[str, ...]:
        """What the release's own class is made from."""
        for node in self._theirs:
            bound = syntax.class_body_names(node).get("__init__")
            if isinstance(bound, ast.FunctionDef):
                return syntax.parameter_names(bound)[1:]
        return ()

    def unfilled(self) -> Iterator[str]:
        """The abstract methods of the release's class that our class does not define."""
        seen: set[str] = set()
        for node in self._theirs:
            for name, bound in syntax.class_body_names(node).items():
                if name not in seen and syntax.is_abstract(bound):
                    found = self._find(name)
                    if found is None or not found.ours:
                        yield name
                seen.add(name)

    def _find(self, name: str) -> _Found | None:
        for ours, nodes in ((True, self._ours), (False, self._theirs)):
            for node in nodes:
                bound = syntax.class_body_names(node).get(name)
                if bound is not None:
                    return _Found(bound, ours)
                if name in syntax.field_names(node) or syntax.assigns_to_self(node, name):
                    return _Found(None, ours)
        return None


def _signature(node: _Function) -> inspect.Signature:
    """A function's signature, read from its syntax; what a bound object passes by itself is left out."""
    spec = node.args
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    positional = [*((item, inspect.Parameter.POSITIONAL_ONLY) for item in spec.posonlyargs),
                  *((item, inspect.Parameter.POSITIONAL_OR_KEYWORD) for item in spec.args)]  # fmt: skip
    first_default = len(positional) - len(spec.defaults)
    parameters = [
        inspect.Parameter(item.arg, kind, default=None if index >= first_default else inspect.Parameter.empty)
        for index, (item, kind) in enumerate(positional)
    ]
    if "staticmethod" not in decorators:
        parameters = parameters[1:]
    if spec.vararg is not None:
        parameters.append(inspect.Parameter(spec.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    parameters += [
        inspect.Parameter(
            item.arg,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is None else None,
        )
        for item, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    ]
    if spec.kwarg is not None:
        parameters.append(inspect.Parameter(spec.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def misbound(node: _Function, keywords: Iterable[str]) -> str | None:
    """Why a method cannot be called with these keywords alone, or None."""
    try:
        _signature(node).bind(**dict.fromkeys(keywords))
    except TypeError as error:
        return f"it takes {_signature(node)}: {error}"
    return None


def _is_method(bound: _Member | None) -> bool:
    """Whether it is a function that is no property."""
    return isinstance(bound, _Function) and not any(
        ast.unparse(decorator).rpartition(".")[2] in {"property", "cached_property"}
        for decorator in bound.decorator_list
    )


def _misbound(node: _Function, use: Use) -> str | None:
    if not _is_method(node):
        return "called, but it is a property"
    signature = _signature(node)
    try:
        signature.bind(*[None] * use.positional, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return f"called with ({', '.join(use.arguments)}), ours takes {signature}: {error}"
    return None
