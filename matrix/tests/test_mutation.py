"""The matrix tried on itself: a release that loses what is probed must be seen to, to the last link of the chain."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xkv_compat.features import evaluate
from xkv_compat.probes import Kind, Probe
from xkv_compat.source import SourceReader
from xkv_matrix.check import Places, check, open_tree
from xkv_matrix.gate import SUPPORTED_SESSIONS, judge
from xkv_matrix.mutation import PROBES, mutations, removed

if TYPE_CHECKING:
    from xkv_compat import Features
    from xkv_matrix.targets import Target

Make = Callable[[dict[str, str]], Path]
_TEXT = """
import os.path
from dataclasses import dataclass
from enum import Enum
from .other import Inherited

if True:
    chosen, other = 1, 2
else:
    chosen: int = 2
try:
    import json as either
except ImportError:
    either = None

class Colour(Enum):
    RED = 1

@dataclass
class Data(Inherited):
    own: int = 0

    def method(self, first, *rest, named=None):
        red = RED = 1
        chosen = self.attribute = either = 2
        return self.other.manager.touch("red", red, RED, chosen, either)

def function(chosen):
    return "red"
"""
_OTHER = "class Inherited:\n    field: int = 0\n    def method(self, first): ...\n    def far(self): ...\n"
_PLACES = (
    (Kind.MODULE, "", ""),
    (Kind.SYMBOL, "", "os"),
    (Kind.SYMBOL, "", "chosen"),
    (Kind.SYMBOL, "", "other"),
    (Kind.SYMBOL, "", "either"),
    (Kind.SYMBOL, "", "Inherited"),
    (Kind.SYMBOL, "", "function"),
    (Kind.MEMBER, "Data", "method"),
    (Kind.MEMBER, "Data", "far"),
    (Kind.FIELD, "Data", "own"),
    (Kind.FIELD, "Data", "field"),
    (Kind.ENUM_MEMBER, "Colour", "RED"),
    (Kind.SELF_ATTRIBUTE, "Data", "attribute"),
    (Kind.PARAMETER, "Data.method", "named"),
    (Kind.PARAMETER, "Data.method", "rest"),
    (Kind.PARAMETER, "function", "chosen"),
    (Kind.CALL, "manager", "touch"),
    (Kind.TEXT, "function", "red"),
    (Kind.TEXT, "", "red"),
)


def _dumped(reader: SourceReader) -> list[str]:
    trees = (reader.tree.module(name) for name in ("vllm.some", "vllm.other"))
    return [ast.dump(tree) for tree in trees if tree is not None]


@pytest.mark.parametrize("place", _PLACES, ids=lambda place: f"{place[0].value} {place[2]}")
def test_taken_away_and_given_back(make_tree: Make, place: tuple[Kind, str, str]) -> None:
    """Whatever else bears the name stays; a tree that was not given back whole would spoil every later trial."""
    reader = open_tree(make_tree({"some.py": _TEXT, "other.py": _OTHER}))
    probes = {Probe(kind, "vllm.some", name, owner) for kind, owner, name in _PLACES}
    gone = Probe(place[0], "vllm.some", place[2], place[1])
    whole = _dumped(reader)
    with removed(reader, gone) as without:
        lost = {probe for probe in probes if not without.found(probe)}
    also = {
        # the name in the list of bases is bound no more
        "Inherited": {Probe(Kind.MEMBER, "vllm.some", "far", "Data"), Probe(Kind.FIELD, "vllm.some", "field", "Data")},
        "function": {
            Probe(Kind.PARAMETER, "vllm.some", "chosen", "function"),
            Probe(Kind.TEXT, "vllm.some", "red", "function"),
        },
        "method": {probe for probe in probes if probe.owner == "Data.method"},
    }
    everything = also.get(gone.name, set()) | {gone}
    if gone.kind is Kind.MODULE:
        everything = probes
    elif gone == Probe(Kind.TEXT, "vllm.some", "red"):
        everything |= {Probe(Kind.TEXT, "vllm.some", "red", "function")}
    assert lost == everything
    assert _dumped(reader) == whole
    assert all(reader.found(probe) for probe in probes)


def test_every_probe_of_the_table_is_tried() -> None:
    assert len(set(PROBES)) == len(PROBES)
    assert {probe.kind for probe in PROBES} == set(Kind)


def test_a_small_release_loses_what_is_taken_and_nothing_else(make_tree: Make, whole: dict[str, str]) -> None:
    reader = open_tree(make_tree(whole))
    before = evaluate(reader, "")
    tried = list(mutations(reader))
    assert [finding for _, _, findings in tried for finding in findings] == []
    lost = {name for _, features, _ in tried for name in before if before[name] and not features[name]}
    assert lost == {name for name, present in before.items() if present}
    assert any(features.unmet for _, features, _ in tried)


class _Careless(SourceReader):
    """A reader that does not look whose parameter it is."""

    def found(self, probe: Probe) -> bool:
        if probe.kind is Kind.PARAMETER and probe.owner == "OffloadingSpec.__init__":
            tree = self.tree.module(probe.module)
            return tree is not None and f"arg='{probe.name}'" in ast.dump(tree)
        return super().found(probe)


def test_a_reader_that_looks_elsewhere_is_found_out(
    make_tree: Make, whole: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial has teeth: a probe that something else answers as well is a finding by its name."""
    whole["v1/kv_offload/base.py"] += "\ndef elsewhere(config): ...\n"
    monkeypatch.setattr("xkv_matrix.mutation.SourceReader", _Careless)
    texts = [
        str(finding)
        for _, _, findings in mutations(_Careless(open_tree(make_tree(whole)).tree))
        for finding in findings
    ]
    name = "mutation: parameter vllm.v1.kv_offload.base.OffloadingSpec.__init__:config"
    assert f"{name}: it is still found where it was taken away" in texts
    assert f"{name}: reset_safe should be absent then, and is not" in texts


def _without_on_disk(reader: SourceReader, files: dict[str, str], probe: Probe) -> dict[str, str]:
    found: dict[str, str] = {}
    with removed(reader, probe) as without:
        for path in files:
            module = ".".join(("vllm", *Path(path).with_suffix("").parts))
            tree = without.tree.module(module)
            if tree is not None:
                found[path] = ast.unparse(tree)
    return found


def _gate(target: Target, places: Places, results: Path, findings: int) -> str:
    """The gate's word, where the contracts session found so much and everything else is well."""
    for name, failed in {**dict.fromkeys(SUPPORTED_SESSIONS, 0), "contracts": findings}.items():
        result: dict[str, Any] = {"name": name, "target": target.release, "arguments": []}
        result |= {"outcome": "failed" if failed else "passed", "counts": {"failed": 1} if failed else {"passed": 1}}
        (results / f"{name}-{target.release}.json").write_text(json.dumps(result), encoding="utf-8")
    return judge((target,), (), results, places).verdict


def _changed(features: Features, before: Features) -> bool:
    return dict(features) != dict(before) or features.unmet != before.unmet


def test_the_gate_says_no_where_a_supported_row_loses_anything(
    extracted: tuple[Target, Path], whole: dict[str, str], places: Places, tmp_path: Path
) -> None:
    """From a symbol that is gone in the sources to no-go: a chain that would else be believed link by link."""
    target, tree = replace(extracted[0], status="supported"), extracted[1]
    results = tmp_path / "results"
    results.mkdir()
    assert _gate(target, places, results, len(check(target, tree, places).findings)) == "go"
    reader = open_tree(tree)
    before = evaluate(reader, "")
    tried = [(probe, features) for probe, features, _ in mutations(reader) if _changed(features, before)]
    assert len(tried) > 20
    for probe, features in tried:
        for path in whole:
            (tree / "vllm" / path).unlink(missing_ok=True)
        for path, text in _without_on_disk(reader, whole, probe).items():
            (tree / "vllm" / path).write_text(text, encoding="utf-8")
        findings = check(target, tree, places).findings
        said = {finding.text for finding in findings if finding.check == "features" and "expected/" in finding.where}
        wanted = {f"{name}: expected present, found absent" for name in before if before[name] and not features[name]}
        assert wanted <= said, probe
        assert _gate(target, places, results, len(findings)) == "no-go", probe
