"""A release's contract as data: what its framework declares, and what its connector does with our objects.

Owns: the contract file's format, and making it from a source tree.
Must not know: our own classes, and whether a fact is good or bad.
"""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING, Any

from xkv_compat import syntax

from .connector import uses_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from xkv_compat.source import SourceReader

    from .targets import Target

__all__ = ["CONTRACT_FORMAT", "contract_text", "extract", "load_contract", "load_whole_contract"]

CONTRACT_FORMAT = 1
# What must be there in a file that is read back, and of which type.
_PARTS: Mapping[str, type] = {"release": str, "provenance": dict, "modules": dict, "uses": list, "unresolved": list}
_OF_A_USE: Mapping[str, type] = {
    "role": str, "kind": str, "name": str, "positional": int, "keywords": list, "starred": bool, "at": str,
}  # fmt: skip

# Modules whose declarations are part of the contract; those that a release lacks are left out.
DECLARING = (
    "vllm.v1.kv_offload.base",
    "vllm.v1.kv_offload.config",
    "vllm.v1.kv_offload.factory",
    "vllm.v1.kv_offload.worker.worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics",
)


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Keep the name only."""
        return ast.arg(arg=node.arg, annotation=None)


def parameters_text(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A function's parameters as they are written, without annotations."""
    arguments = ast.parse(ast.unparse(node.args) and f"def f({ast.unparse(node.args)}): ...").body
    if not arguments:
        return ""
    function = arguments[0]
    assert isinstance(function, ast.FunctionDef)
    return ast.unparse(_WithoutAnnotations().visit(function.args))


def _member(bound: ast.stmt | syntax.Import) -> str:
    if not isinstance(bound, ast.FunctionDef | ast.AsyncFunctionDef):
        return "value"
    kinds = [ast.unparse(decorator) for decorator in bound.decorator_list]
    marks = [kind for kind in ("property", "classmethod", "staticmethod", "abstractmethod") if kind in kinds]
    return " ".join((*marks, f"({parameters_text(bound)})"))


def _class(node: ast.ClassDef) -> dict[str, Any]:
    bound = syntax.class_body_names(node)
    bases = [ast.unparse(base) for base in node.bases]
    fields = syntax.field_names(node)
    members = {name: _member(value) for name, value in sorted(bound.items()) if name not in fields}
    facts: dict[str, Any] = {
        "bases": bases,
        "fields": list(fields),
        "members": members,
        "abstract": sorted(name for name, value in bound.items() if syntax.is_abstract(value)),
    }
    if any(base.rpartition(".")[2] in {"Enum", "IntEnum", "Flag"} for base in bases):
        facts["enum"] = list(syntax.enum_members(node))
    return {name: value for name, value in facts.items() if value}


def _module(tree: ast.Module) -> dict[str, Any]:
    bound = syntax.top_level(tree)
    return {
        "symbols": sorted(name for name in bound if not name.startswith("__")),
        "classes": {node.name: _class(node) for node in tree.body if isinstance(node, ast.ClassDef)},
        "functions": {
            node.name: f"({parameters_text(node)})"
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        },
    }


def extract(reader: SourceReader, target: Target) -> dict[str, Any]:
    """The contract of a release, from its source tree; BrokenVLLM where a file does not parse."""
    uses = uses_of(reader)
    return {
        "format": CONTRACT_FORMAT,
        "release": target.release,
        "provenance": {"package": target.package, "wheel": target.wheel, "sha256": target.sha256},
        "modules": {name: _module(tree) for name in DECLARING if (tree := reader.tree.module(name)) is not None},
        "uses": [use.as_json() for use in uses.found],
        "unresolved": list(uses.unresolved),
    }


def contract_text(contract: dict[str, Any]) -> str:
    """The contract file's text: pretty, with one line for each use, so that differences read well."""
    uses = ",\n".join(f"  {json.dumps(use)}" for use in contract["uses"])
    rest = json.dumps({name: value for name, value in contract.items() if name != "uses"}, indent=1)
    return f'{rest[:-2]},\n "uses": [\n{uses}\n ]\n}}\n' if uses else f'{rest[:-2]},\n "uses": []\n}}\n'


def load_contract(path: Path) -> dict[str, Any]:
    """A committed contract; ValueError for what is none, OSError for what cannot be read."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("format") != CONTRACT_FORMAT:
        raise ValueError(f"{path}: not a contract of format {CONTRACT_FORMAT}")
    return found


def load_whole_contract(path: Path) -> dict[str, Any]:
    """A committed contract with everything in it that is compared or counted; errors as `load_contract`'s."""
    found = load_contract(path)
    if missing := [name for name, kind in _PARTS.items() if not isinstance(found.get(name), kind)]:
        raise ValueError(f"{path}: a contract without {', '.join(missing)}")
    for use in found["uses"]:
        if not isinstance(use, dict) or not all(isinstance(use.get(name), kind) for name, kind in _OF_A_USE.items()):
            raise ValueError(f"{path}: not a use: {json.dumps(use)[:80]}")
    return found
