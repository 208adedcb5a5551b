"""The live reader: answers probes from the vLLM that this interpreter imports.

Owns: importing vLLM's modules one by one, and telling a module that is not there from one that is broken.
Must not know: source trees other than the installed one, and what the answers are used for.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from . import syntax
from .errors import BrokenVLLM
from .probes import Kind, Probe

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["LiveReader", "import_module"]

_ABSENT = object()


def import_module(module: str) -> ModuleType | None:
    """Import a module; None where it does not exist, BrokenVLLM where importing it fails."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            return None  # the module itself or a package on its path; anything else is missing inside it
        raise BrokenVLLM(module, f"{type(error).__name__}: {error}") from error
    except Exception as error:
        raise BrokenVLLM(module, f"{type(error).__name__}: {error}") from error


class LiveReader:
    """Answers probes about the installed vLLM; importing is its only effect."""

    def __init__(self) -> None:
        self._trees: dict[str, ast.Module] = {}
        self._answers = {
            Kind.MODULE: self._has_module,
            Kind.SYMBOL: self._has_symbol,
            Kind.MEMBER: self._has_member,
            Kind.OWN_MEMBER: self._has_own_member,
            Kind.FIELD: self._has_field,
            Kind.PARAMETER: self._has_parameter,
            Kind.ENUM_MEMBER: self._has_enum_member,
            Kind.ABSTRACT: self._has_abstract,
            Kind.SELF_ATTRIBUTE: self._has_self_attribute,
            Kind.CALL: self._has_call,
            Kind.TEXT: self._has_text,
        }

    def found(self, probe: Probe) -> bool:
        """Whether the installed vLLM has what the probe looks for; BrokenVLLM where an import fails."""
        return self._answers[probe.kind](probe)

    # -- getting at things -------------------------------------------------------------------------

    @staticmethod
    def _get(module: str, path: str) -> object:
        found: object = import_module(module)
        if found is None:
            return _ABSENT
        for part in path.split("."):
            found = getattr(found, part, _ABSENT)
            if found is _ABSENT:
                return _ABSENT
        return found

    def _class(self, probe: Probe) -> type | None:
        found = self._get(probe.module, probe.owner)
        return found if isinstance(found, type) else None

    def _tree(self, module: str) -> ast.Module | None:
        loaded = import_module(module)
        if loaded is None:
            return None
        return self._parse(module, loaded)

    def _parse(self, module: str, loaded: ModuleType) -> ast.Module:
        if module not in self._trees:
            try:
                path = inspect.getsourcefile(loaded)
                if path is None:
                    raise OSError("it has no source file")  # noqa: TRY301 - joins the other causes below
                self._trees[module] = ast.parse(Path(path).read_bytes(), filename=path)
            except (OSError, TypeError, SyntaxError, ValueError) as error:
                raise BrokenVLLM(module, f"its source cannot be read: {error}") from error
        return self._trees[module]

    # -- one answer for each kind ------------------------------------------------------------------

    def _has_module(self, probe: Probe) -> bool:
        return import_module(probe.module) is not None

    def _has_symbol(self, probe: Probe) -> bool:
        return self._get(probe.module, probe.name) is not _ABSENT

    def _has_member(self, probe: Probe) -> bool:
        owner = self._class(probe)
        return owner is not None and hasattr(owner, probe.name)

    def _has_own_member(self, probe: Probe) -> bool:
        owner = self._class(probe)
        return owner is not None and probe.name in vars(owner)

    def _has_field(self, probe: Probe) -> bool:
        owner = self._class(probe)
        if owner is None:
            return False
        if dataclasses.is_dataclass(owner):
            return any(field.name == probe.name for field in dataclasses.fields(owner))
        named: object = getattr(owner, "_fields", None) or getattr(owner, "__struct_fields__", None)
        if isinstance(named, tuple):
            return probe.name in named
        return any(probe.name in vars(base).get("__annotations__", {}) for base in owner.__mro__)

    def _has_parameter(self, probe: Probe) -> bool:
        function = self._get(probe.module, probe.owner)
        if not callable(function):
            return False
        return probe.name in inspect.signature(function).parameters

    def _has_enum_member(self, probe: Probe) -> bool:
        owner = self._class(probe)
        return owner is not None and issubclass(owner, enum.Enum) and probe.name in owner.__members__

    def _has_abstract(self, probe: Probe) -> bool:
        owner = self._class(probe)
        return owner is not None and probe.name in getattr(owner, "__abstractmethods__", ())

    def _has_self_attribute(self, probe: Probe) -> bool:
        owner = self._class(probe)
        if owner is None:
            return False
        for base in owner.__mro__:
            if base.__module__.partition(".")[0] != probe.module.partition(".")[0]:
                continue  # a base from elsewhere: the other reader does not see it either
            tree = self._tree(base.__module__)
            node = None if tree is None else syntax.find(tree, base.__qualname__)
            if isinstance(node, ast.ClassDef) and syntax.assigns_to_self(node, probe.name):
                return True
        return False

    def _has_call(self, probe: Probe) -> bool:
        tree = self._tree(probe.module)
        return tree is not None and syntax.calls(tree, probe.owner, probe.name)

    def _has_text(self, probe: Probe) -> bool:
        tree = self._tree(probe.module)
        if tree is None:
            return False
        scope: ast.AST | None = syntax.find(tree, probe.owner) if probe.owner else tree
        return scope is not None and syntax.has_text(scope, probe.name)
