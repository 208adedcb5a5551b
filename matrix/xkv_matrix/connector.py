"""What a release's connector does with our objects: every call and every attribute, found in its source.

Owns: naming the connector's modules and the classes that stand for ours, and collecting their uses.
Must not know: our own classes, and what is done about a use that does not fit.
"""

from __future__ import annotations

import ast
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from xkv_compat import syntax

from .inference import Classes, Scope, Seen, walk_scopes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xkv_compat.source import SourceReader

__all__ = ["MODULES", "ROLES", "Use", "Uses", "role_classes", "uses_of"]

_BASE = "vllm.v1.kv_offload.base"
_OLD_WORKER = "vllm.v1.kv_offload.worker.worker"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"

# Modules whose calls on our objects are the contract; those that a release lacks are skipped.
MODULES = (
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    f"{_OFFLOADING}.scheduler",
    f"{_OFFLOADING}.worker",
    f"{_OFFLOADING}.common",
    f"{_OFFLOADING}.config",
    f"{_OFFLOADING}.events",
    f"{_OFFLOADING}.metrics",
    "vllm.v1.kv_offload.factory",
    _OLD_WORKER,
)

# Role → the classes that a release may declare it by, in the order of trying.
ROLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "spec": ((_BASE, "OffloadingSpec"),),
    "manager": ((_BASE, "OffloadingManager"),),
    "worker": ((_BASE, "OffloadingWorker"), (_OLD_WORKER, "OffloadingHandler")),
    "load_store_spec": ((_BASE, "LoadStoreSpec"),),
    "store_output": ((_BASE, "PrepareStoreOutput"),),
    "transfer_result": ((_BASE, "TransferResult"), (_OLD_WORKER, "TransferResult")),
    "request_context": ((_BASE, "RequestOffloadingContext"),),
}


# Where a module that names one of these is taken for part of the connector; whoever else names them makes them.
_CONNECTORS = ("distributed", "kv_transfer")
_NAMED = re.compile(rb"\b(OffloadingSpec|OffloadingManager|OffloadingWorker|OffloadingHandler)\b")


@dataclass(frozen=True, order=True)
class Use:
    """One thing that the connector does with an object of a role.

    ``kind``: ``call`` (a method), ``make`` (the class itself is called), ``read`` or ``write`` (an
    attribute), ``ask`` (``getattr`` with a default). ``positional``: how many positional arguments;
    ``keywords``: the names of the others; ``starred``: whether ``*`` or ``**`` hides some.
    ``at``: module, class and function, and line.
    """

    role: str
    kind: str
    name: str
    positional: int
    keywords: tuple[str, ...]
    starred: bool
    arguments: tuple[str, ...]
    at: str

    def as_json(self) -> dict[str, Any]:
        """The use as json-able data."""
        return asdict(self)


@dataclass(frozen=True)
class Uses:
    """What was found, and what nothing checks.

    ``unresolved``: calls that may be on our objects but whose receiver is not known. ``unread``: modules of
    connectors that name our classes and are none of MODULES.
    """

    found: tuple[Use, ...]
    unresolved: tuple[str, ...]
    unread: tuple[str, ...] = ()


def role_classes(reader: SourceReader) -> dict[str, str]:
    """Role → the name of the class that this release declares it by; a role that it lacks is left out."""
    found: dict[str, str] = {}
    for role, places in ROLES.items():
        for module, name in places:
            if reader.find_class(module, name) is not None:
                found[role] = name
                break
    return found


def uses_of(reader: SourceReader) -> Uses:
    """Every use of our objects in the connector's modules of one tree."""
    roles = {name: role for role, name in role_classes(reader).items()}
    modules = {name: tree for name in (*MODULES, _BASE) if (tree := reader.tree.module(name)) is not None}
    classes = Classes(modules)
    watched = _public_methods(reader, roles)
    found: list[Use] = []
    unresolved: list[str] = []
    for module, tree in modules.items():
        if module == _BASE:  # its annotations are used; what it does with itself is no contract of ours
            continue
        for scope in walk_scopes(module, tree, classes):
            found.extend(_uses_in(scope, roles))
            unresolved.extend(_unresolved(scope, watched))
    return Uses(tuple(sorted(set(found))), tuple(sorted(set(unresolved))), tuple(_unread(reader)))


def _unread(reader: SourceReader) -> Iterator[str]:
    for module, path in reader.tree.files(*_CONNECTORS):
        if module not in MODULES and _NAMED.search(reader.tree.text(module, path)):
            yield module


def _public_methods(reader: SourceReader, roles: Mapping[str, str]) -> frozenset[str]:
    """The methods of a spec, a manager and a worker: calls of such names must have a known receiver."""
    ours = {name for name, role in roles.items() if role in {"spec", "manager", "worker"}}
    names: set[str] = set()
    for module, name in (place for places in ROLES.values() for place in places):
        if name in ours:
            for _, node in reader.lineage(module, name):
                names.update(
                    key
                    for key, bound in syntax.class_body_names(node).items()
                    if isinstance(bound, ast.FunctionDef) and not key.startswith("_")
                )
    return frozenset(names)


def _call(role: str, kind: str, name: str, node: ast.Call, at: str) -> Use:
    starred = any(isinstance(value, ast.Starred) for value in node.args) or any(
        keyword.arg is None for keyword in node.keywords
    )
    positional = [value for value in node.args if not isinstance(value, ast.Starred)]
    keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
    arguments = tuple(ast.unparse(value) for value in (*node.args, *node.keywords))
    return Use(role, kind, name, len(positional), keywords, starred, arguments, at)


def _role(seen: Seen | None, roles: Mapping[str, str]) -> str | None:
    return roles.get(seen.name) if seen is not None and not seen.many else None


def _uses_in(scope: Scope, roles: Mapping[str, str]) -> Iterator[Use]:
    called = {id(node.func) for node in scope.nodes() if isinstance(node, ast.Call)}
    for node in scope.nodes():
        at = scope.at(node)
        if isinstance(node, ast.Call):
            yield from _call_uses(scope, node, roles, at)
        elif isinstance(node, ast.Attribute) and id(node) not in called:
            role = _role(scope.infer(node.value), roles)
            if role is not None:
                kind = "read" if isinstance(node.ctx, ast.Load) else "write"
                yield Use(role, kind, node.attr, 0, (), False, (), at)


def _call_uses(scope: Scope, node: ast.Call, roles: Mapping[str, str], at: str) -> Iterator[Use]:
    if isinstance(node.func, ast.Attribute):
        role = _role(scope.infer(node.func.value), roles)
        if role is not None:
            yield _call(role, "call", node.func.attr, node, at)
    elif isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) >= 2:
        role = _role(scope.infer(node.args[0]), roles)
        named = node.args[1]
        if role is not None:
            is_known = isinstance(named, ast.Constant)
            kind = "ask" if is_known and len(node.args) == 3 else "read"
            name = str(named.value) if isinstance(named, ast.Constant) else f"<{ast.unparse(named)}>"
            yield Use(role, kind, name, 0, (), False, (), at)
    made = scope.infer(node.func) if isinstance(node.func, ast.Name) else None
    if made is not None and made.is_class and _role(made, roles) == "spec":
        yield _call("spec", "make", "__init__", node, at)


def _unresolved(scope: Scope, watched: frozenset[str]) -> Iterator[str]:
    for node in scope.nodes():
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in watched
            and scope.infer(node.func.value) is None
        ):
            yield f"{scope.at(node)}: {ast.unparse(node.func)}"
