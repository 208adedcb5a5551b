"""The probe table tried on a release's own sources: what a probe finds is taken away, one thing at a time.

Owns: taking it away in the parsed tree (and giving it back), and what must follow: the features that ask for
it go, and nothing else. Must not know: which features a release has, and what is done about a finding.
"""

from __future__ import annotations

import ast
from contextlib import contextmanager
from typing import TYPE_CHECKING

from xkv_compat import FEATURES, REQUIREMENTS, syntax
from xkv_compat.features import evaluate
from xkv_compat.probes import Kind, Probe, probes_of
from xkv_compat.source import SourceReader, Tree

from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from xkv_compat import Features

__all__ = ["PROBES", "mutations", "removed"]

PROBES: tuple[Probe, ...] = tuple(
    dict.fromkeys(
        (
            *(probe for feature in FEATURES for probe in probes_of(feature.term)),
            *(probe for requirement in REQUIREMENTS for probe in requirement.one_of),
        )
    )
)
GONE = "gone_for_the_trial"
_Undo = list["Callable[[], None]"]


class _WithoutModule(Tree):
    """A tree that lacks one module."""

    def __init__(self, tree: Tree, gone: str) -> None:
        self._tree, self._gone, self.package = tree, gone, tree.package

    def path(self, module: str) -> Path | None:
        """The file, unless it is the one that is gone."""
        return None if module == self._gone else self._tree.path(module)

    def module(self, module: str) -> ast.Module | None:
        """The parsed module, unless it is the one that is gone."""
        return None if module == self._gone else self._tree.module(module)


def _set(undo: _Undo, node: ast.AST, field: str) -> None:
    old = vars(node)[field]

    def back() -> None:
        setattr(node, field, old)

    undo.append(back)
    setattr(node, field, GONE)


def _unbind(undo: _Undo, body: ast.Module | ast.ClassDef, name: str) -> None:
    """Rename every binding of a name that a module's or a class's own body makes, in whatever branch."""
    pending: list[ast.AST] = list(body.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                _set(undo, node, "name")
        elif isinstance(node, ast.alias):
            if (node.asname or node.name.partition(".")[0]) == name:
                _set(undo, node, "asname")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id == name:
                _set(undo, node, "id")
        else:
            pending.extend(ast.iter_child_nodes(node))


def _unbind_parameter(undo: _Undo, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
    for inner in ast.iter_child_nodes(node.args):
        if isinstance(inner, ast.arg) and inner.arg == name:
            _set(undo, inner, "arg")


def _rename_attributes(undo: _Undo, scope: ast.AST, name: str) -> None:
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and node.attr == name:
            _set(undo, node, "attr")


def _rename_texts(undo: _Undo, scope: ast.AST, name: str) -> None:
    for node in ast.walk(scope):
        if isinstance(node, ast.Constant) and node.value == name:
            _set(undo, node, "value")


def _take_away(undo: _Undo, reader: SourceReader, probe: Probe) -> None:
    module = reader.tree.module(probe.module)
    if module is None:
        return
    if probe.kind is Kind.SYMBOL:
        _unbind(undo, module, probe.name)
    elif probe.kind is Kind.PARAMETER:
        if (function := reader.function(probe.module, probe.owner)) is not None:
            _unbind_parameter(undo, function, probe.name)
    elif probe.kind is Kind.CALL:
        _rename_attributes(undo, module, probe.name)
    elif probe.kind is Kind.TEXT:
        if (scope := syntax.find(module, probe.owner) if probe.owner else module) is not None:
            _rename_texts(undo, scope, probe.name)
    else:
        for _, node in reader.lineage(probe.module, probe.owner):
            if probe.kind is Kind.SELF_ATTRIBUTE:
                _rename_attributes(undo, node, probe.name)
            else:
                _unbind(undo, node, probe.name)


@contextmanager
def removed(reader: SourceReader, probe: Probe) -> Iterator[SourceReader]:
    """Give a reader of the same tree without what the probe looks for; the tree is whole again afterwards."""
    undo: _Undo = []
    try:
        if probe.kind is Kind.MODULE:
            yield SourceReader(_WithoutModule(reader.tree, probe.module))
        else:
            _take_away(undo, reader, probe)
            yield SourceReader(reader.tree)
    finally:
        for back in reversed(undo):
            back()


class _Expecting:
    """Answers as the tree does, but for what must go together with one probe's target."""

    def __init__(self, answers: dict[Probe, bool], gone: Probe) -> None:
        self._answers, self._gone = answers, gone

    def found(self, probe: Probe) -> bool:
        """Whether the probe must still find what it looks for."""
        return self._answers[probe] and not self._goes(probe)

    def _goes(self, probe: Probe) -> bool:
        gone = self._gone
        if probe.module != gone.module:
            return False
        if gone.kind is Kind.MODULE:
            return True
        if gone.kind is Kind.SYMBOL:  # with everything that is in it
            own = probe.name if probe.kind is Kind.SYMBOL else ""
            return gone.name in {own, probe.owner.partition(".")[0]}
        return (probe.owner, probe.name) == (gone.owner, gone.name) or probe.owner == f"{gone.owner}.{gone.name}"


def _differences(found: Features, expected: Features) -> Iterator[str]:
    for name, present in expected.items():
        if found[name] != present:
            yield f"{name} should be {'present' if present else 'absent'} then, and is not"
    if found.unmet != expected.unmet:
        lines = sorted(set(found.unmet) ^ set(expected.unmet))
        yield f"what is needed and missing then differs: {'; '.join(lines)}"


def mutations(reader: SourceReader) -> Iterator[tuple[Probe, Features, list[Finding]]]:
    """Each probe that finds something, the features without it, and what did not follow as it must."""
    answers = {probe: reader.found(probe) for probe in PROBES}
    for probe in (probe for probe, found in answers.items() if found):
        with removed(reader, probe) as without:
            still = without.found(probe)
            features = evaluate(without, str(probe))
        expected = evaluate(_Expecting(answers, probe), str(probe))
        texts = list(_differences(features, expected))
        if still:
            texts.insert(0, "it is still found where it was taken away")
        yield probe, features, [Finding("mutation", str(probe), text) for text in texts]
