"""The source reader: answers probes from a source tree, importing nothing of it.

Owns: finding and parsing modules of a tree, and following names through imports and base classes.
Must not know: the installed vLLM, torch, and what the answers are used for.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from . import syntax
from .errors import BadInput, BrokenVLLM
from .probes import Kind, Probe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["DEPTH_MAX", "FILE_BYTES_MAX", "IMPORTS_FOLLOWED_MAX", "SourceReader", "Tree"]

# Names re-exported through more modules than this are taken for a cycle.
IMPORTS_FOLLOWED_MAX = 16
# A file larger than this is none that a person wrote (vLLM's largest has 320 KB) and is not read.
FILE_BYTES_MAX = 8 << 20
# Syntax nested deeper than this is not followed (vLLM's deepest is 29): whoever walks it may recurse.
DEPTH_MAX = 100
NAME_CHARACTERS_MAX = 200  # of a folder's name in a message

_Found = tuple[str, ast.stmt | syntax.Import]  # the module that really binds a name, and what binds it
_Class = tuple[str, ast.ClassDef]  # the module of a class, and its statement


class Tree:
    """The modules of one source tree: a folder that holds the package ``vllm``, or that package itself."""

    def __init__(self, folder: Path) -> None:
        self.package = self._package(folder)
        self._modules: dict[str, ast.Module | None] = {}

    @staticmethod
    def _package(folder: Path) -> Path:
        try:
            whole = folder.resolve()  # so that "." inside the package is one too
            for candidate in (whole / "vllm", whole):
                if candidate.name == "vllm" and (candidate / "__init__.py").is_file():
                    return candidate
        except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
            reason = error.strerror if isinstance(error, OSError) else "a link to itself, or no path at all"
            raise BadInput(f"{str(folder)[:NAME_CHARACTERS_MAX]}: no folder to look into: {reason}") from error
        if not folder.is_dir():
            raise BadInput(f"{folder}: no such folder; name the checkout that holds vllm/__init__.py")
        raise BadInput(f"{folder}: not a vLLM source tree (there is no vllm/__init__.py in it)")

    def path(self, module: str) -> Path | None:
        """The file of a module of the tree, or None where there is none."""
        parts = module.split(".")
        if parts[0] != "vllm":
            return None
        base = self.package.joinpath(*parts[1:])
        for path in (
            base / "__init__.py",
            base.with_suffix(".py") if len(parts) > 1 else base / "__init__.py",
        ):
            if path.is_file():
                return path
        return None

    def module(self, module: str) -> ast.Module | None:
        """The parsed module, or None where the tree has none; BrokenVLLM where it does not parse."""
        if module not in self._modules:
            path = self.path(module)
            self._modules[module] = None if path is None else self._parse(module, path)
        return self._modules[module]

    def files(self, *folder: str) -> Iterator[tuple[str, Path]]:
        """Every module below a folder of the package, and its file; whatever is no file is no module either."""
        for path in sorted(self.package.joinpath(*folder).rglob("*.py")):
            if path.is_file():
                parts = path.relative_to(self.package).with_suffix("").parts
                yield ".".join(("vllm", *(parts[:-1] if parts[-1] == "__init__" else parts))), path

    @staticmethod
    def text(module: str, path: Path) -> bytes:
        """What a module's file holds; BrokenVLLM where it cannot be read, or is larger than any module."""
        try:
            if (size := path.stat().st_size) > FILE_BYTES_MAX:
                raise BrokenVLLM(module, f"{path}:0: {size} bytes; {FILE_BYTES_MAX} are the most that is read")
            return path.read_bytes()
        except OSError as error:
            raise BrokenVLLM(module, f"{path}:0: {error.strerror}") from error

    def _parse(self, module: str, path: Path) -> ast.Module:
        try:
            parsed = ast.parse(self.text(module, path), filename=str(path))
        except SyntaxError as error:
            raise BrokenVLLM(module, f"{path}:{error.lineno or 0}: {error.msg}") from error
        except (ValueError, MemoryError, RecursionError) as error:  # the last two: too deep for the parser
            raise BrokenVLLM(module, f"{path}:0: {type(error).__name__} {error}") from error
        if (line := syntax.deeper_than(parsed, DEPTH_MAX)) is not None:
            raise BrokenVLLM(module, f"{path}:{line}: nested more than {DEPTH_MAX} levels deep")
        return parsed


class SourceReader:
    """Answers probes about one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
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
        """Whether the tree has what the probe looks for; BrokenVLLM where a file does not parse."""
        return self._answers[probe.kind](probe)

    # -- following names ---------------------------------------------------------------------------

    def resolve(self, module: str, name: str) -> _Found | None:
        """What binds a top-level name of a module, followed through imports within the tree.

        A name imported from outside the tree resolves to its import statement.
        """
        for _ in range(IMPORTS_FOLLOWED_MAX):
            parsed = self.tree.module(module)
            if parsed is None:
                return None
            bound = syntax.top_level(parsed).get(name)
            if bound is None:
                return None
            if not isinstance(bound, syntax.Import):
                return module, bound
            target = self._absolute(module, bound)
            if not bound.name or self.tree.path(target) is None:
                return module, bound
            if self.tree.path(f"{target}.{bound.name}") is not None:  # a submodule, not a name in one
                return module, bound
            module, name = target, bound.name
        return None

    def _absolute(self, module: str, bound: syntax.Import) -> str:
        if not bound.level:
            return bound.module
        path = self.tree.path(module)
        parts = module.split(".")
        is_package = path is not None and path.name == "__init__.py"
        keep = len(parts) - bound.level + (1 if is_package else 0)
        return ".".join((*parts[:keep], *([bound.module] if bound.module else [])))

    def find_class(self, module: str, name: str) -> _Class | None:
        """A class by its name in a module, followed through imports; None where there is none."""
        found = self.resolve(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        return found[0], found[1]

    def lineage(self, module: str, name: str) -> list[_Class]:
        """A class and its bases within the tree, depth first and each once, itself first."""
        first = self.find_class(module, name)
        pending = [first] if first is not None else []
        seen: list[_Class] = []
        while pending:
            current = pending.pop(0)
            if any(current[1] is known[1] for known in seen):
                continue
            seen.append(current)
            bases = []
            for base in current[1].bases:
                plain = base.value if isinstance(base, ast.Subscript) else base  # Base[int] inherits from Base
                found = self.find_class(current[0], plain.id) if isinstance(plain, ast.Name) else None
                if found is not None:
                    bases.append(found)
            pending[:0] = bases
        return seen

    def function(self, module: str, path: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """A function by its name, or a method by ``Class.method``, inherited ones included."""
        owner, _, name = path.rpartition(".")
        if not owner:
            found = self.resolve(module, name)
            node = None if found is None else found[1]
            return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
        for _, node in self.lineage(module, owner):
            method = syntax.class_body_names(node).get(name)
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                return method
        return None

    # -- one answer for each kind ------------------------------------------------------------------

    def _has_module(self, probe: Probe) -> bool:
        return self.tree.module(probe.module) is not None

    def _has_symbol(self, probe: Probe) -> bool:
        return self.resolve(probe.module, probe.name) is not None

    def _has_member(self, probe: Probe) -> bool:
        return any(probe.name in syntax.class_body_names(node) for _, node in self.lineage(probe.module, probe.owner))

    def _has_own_member(self, probe: Probe) -> bool:
        found = self.find_class(probe.module, probe.owner)
        return found is not None and probe.name in syntax.class_body_names(found[1])

    def _has_field(self, probe: Probe) -> bool:
        return any(probe.name in syntax.field_names(node) for _, node in self.lineage(probe.module, probe.owner))

    def _has_parameter(self, probe: Probe) -> bool:
        node = self.function(probe.module, probe.owner)
        return node is not None and probe.name in syntax.parameter_names(node)

    def _has_enum_member(self, probe: Probe) -> bool:
        return any(probe.name in syntax.enum_members(node) for _, node in self.lineage(probe.module, probe.owner))

    def _has_abstract(self, probe: Probe) -> bool:
        for _, node in self.lineage(probe.module, probe.owner):
            bound = syntax.class_body_names(node).get(probe.name)
            if bound is not None:
                return syntax.is_abstract(bound)
        return False

    def _has_self_attribute(self, probe: Probe) -> bool:
        return any(syntax.assigns_to_self(node, probe.name) for _, node in self.lineage(probe.module, probe.owner))

    def _has_call(self, probe: Probe) -> bool:
        parsed = self.tree.module(probe.module)
        return parsed is not None and syntax.calls(parsed, probe.owner, probe.name)

    def _has_text(self, probe: Probe) -> bool:
        parsed = self.tree.module(probe.module)
        if parsed is None:
            return False
        scope: ast.AST | None = syntax.find(parsed, probe.owner) if probe.owner else parsed
        return scope is not None and syntax.has_text(scope, probe.name)
