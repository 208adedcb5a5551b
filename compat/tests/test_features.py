"""Features against the table: taking one symbol away turns off what depends on it, and nothing else."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from xkv_compat import FEATURES, REQUIREMENTS, Features, UnsupportedVLLM, detect_source
from xkv_compat.features import evaluate
from xkv_compat.probes import Kind, Probe, probes_of

Make = Callable[[dict[str, str]], Path]
Run = Callable[..., subprocess.CompletedProcess[str]]
Write = Callable[[Path, dict[str, str]], Path]

_PROBES = sorted(
    {probe for feature in FEATURES for probe in probes_of(feature.term)}
    | {probe for requirement in REQUIREMENTS for probe in requirement.one_of},
    key=str,
)
_GONE = "gone_for_the_test"
_LIVE = """
import json
from xkv_compat.features import evaluate, installed_version
from xkv_compat.live import LiveReader
for tree in {trees!r}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.path[0] = tree
    features = evaluate(LiveReader(), installed_version())
    print(json.dumps([features.where, dict(features), features.unmet]))
"""


class _Without:
    """A reader of the full tree without one probe's target: what the table says should follow."""

    def __init__(self, gone: Probe) -> None:
        self._gone = gone

    def found(self, probe: Probe) -> bool:
        gone = self._gone
        if probe.module != gone.module:
            return True
        if gone.kind is Kind.MODULE:
            return False
        if gone.kind is Kind.SYMBOL:  # everything inside it goes too
            return gone.name not in {
                probe.name if probe.kind is Kind.SYMBOL else "",
                probe.owner.split(".")[0],
            }
        same_name = (probe.owner, probe.name) == (gone.owner, gone.name)
        return not (same_name or probe.owner == f"{gone.owner}.{gone.name}")


class _Rename(ast.NodeTransformer):
    """Renames what a probe looks for, wherever in the module its owner or kind says it stands."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._path: list[str] = []
        self.renamed = 0

    def _hit(self, name: str, owner: str) -> bool:
        return name == self._probe.name and ".".join(self._path) == owner

    def _scope(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        owner = self._probe.owner if self._probe.kind not in {Kind.PARAMETER, Kind.TEXT, Kind.CALL} else ""
        roots = [owner] if owner != "OffloadingSpec" else [owner, "SpecRoot"]  # one is inherited in the tree
        if self._probe.kind not in {Kind.PARAMETER, Kind.TEXT, Kind.CALL} and any(
            self._hit(node.name, root) for root in roots
        ):
            node.name = _GONE
            self.renamed += 1
            return node
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()
        return node

    visit_ClassDef = _scope  # noqa: N815 - the visitor's names
    visit_FunctionDef = _scope  # noqa: N815

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Store) and self._hit(node.id, self._probe.owner):
            node.id = _GONE
            self.renamed += 1
        return node

    def visit_alias(self, node: ast.alias) -> ast.AST:
        if self._probe.kind is Kind.SYMBOL and self._hit(node.name, ""):
            node.asname = _GONE
            self.renamed += 1
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        if self._probe.kind is Kind.PARAMETER and self._hit(node.arg, self._probe.owner):
            node.arg = _GONE
            self.renamed += 1
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        kinds = {Kind.CALL, Kind.SELF_ATTRIBUTE}
        if self._probe.kind in kinds and node.attr == self._probe.name:
            node.attr = _GONE
            self.renamed += 1
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if self._probe.kind is Kind.TEXT and self._hit(str(node.value), self._probe.owner):
            node.value = _GONE
            self.renamed += 1
        return node


def _without(files: dict[str, str], probe: Probe) -> dict[str, str]:
    path = "/".join(probe.module.split(".")[1:]) + ".py"
    if probe.kind is Kind.MODULE:
        return {name: text for name, text in files.items() if name != path}
    rename = _Rename(probe)
    text = ast.unparse(rename.visit(ast.parse(files[path])))
    assert rename.renamed == 1, f"{probe}: {rename.renamed} places renamed"
    return {**files, path: text}


@pytest.mark.parametrize("probe", _PROBES, ids=str)
def test_taking_one_symbol_away(make_tree: Make, full_files: dict[str, str], probe: Probe) -> None:
    """A wrong owner or module in the table, or a reader that looks elsewhere, shows here."""
    source = detect_source(make_tree(_without(full_files, probe)))
    expected = evaluate(_Without(probe), "")
    assert dict(source) == dict(expected)
    assert source.unmet == expected.unmet


def test_the_live_reader_agrees(full_files: dict[str, str], run_live: Run, write_tree: Write, tmp_path: Path) -> None:
    """The installed release must not look otherwise than its sources: on the whole tree and without each symbol."""
    trees = [write_tree(tmp_path / "whole", full_files)]
    for index, probe in enumerate(_PROBES):
        trees.append(write_tree(tmp_path / str(index), _without(full_files, probe)))
    done = run_live(trees[0], _LIVE.format(trees=[str(tree) for tree in trees]))
    assert done.returncode == 0, done.stderr
    for tree, line in zip(trees, done.stdout.splitlines(), strict=True):
        where, features, unmet = json.loads(line)
        source = detect_source(tree)
        assert where == "1.2.3+made"
        assert features == dict(source)
        assert unmet == list(source.unmet)


def test_the_live_answer_is_remembered(make_tree: Make, full_files: dict[str, str], run_live: Run) -> None:
    """Every worker and scheduler asks it again and again."""
    code = "from xkv_compat import detect_live as ask\nassert ask() is ask()\nassert all(ask().values())\n"
    done = run_live(make_tree(full_files), code)
    assert done.returncode == 0, done.stderr


def test_every_absent_feature_says_what_was_not_found(make_tree: Make, full_files: dict[str, str]) -> None:
    del full_files["v1/kv_offload/config.py"]
    features = detect_source(make_tree(full_files))
    assert set(features.missing) == {name for name, found in features.items() if not found}
    assert features.missing["group_ids"] == ("field vllm.v1.kv_offload.config.OffloadingGroupConfig:group_id",)


def test_unsupported_lists_everything_missing_at_once(make_tree: Make) -> None:
    """One missing symbol at a time would cost a fork's maintainer a run for each."""
    features = detect_source(make_tree({}))
    with pytest.raises(UnsupportedVLLM) as caught:
        features.require()
    assert len(caught.value.missing) == len(REQUIREMENTS)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.missing, again.where, str(again)) == (
        caught.value.missing,
        caught.value.where,
        str(caught.value),
    )
    for requirement in REQUIREMENTS:
        assert f"- {requirement.name}: no " in str(caught.value)


def test_features_are_frozen_and_misspelt_names_are_errors(make_tree: Make, full_files: dict[str, str]) -> None:
    features: Features = detect_source(make_tree(full_files))
    with pytest.raises(KeyError):
        features["no_such_feature"]
    with pytest.raises(TypeError):
        features.missing["x"] = ()  # type: ignore[index]
    assert hash(features) == hash(detect_source(make_tree(full_files)))
    assert "lookup_enum" in repr(features)


def test_importing_starts_nothing(run_live: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The package is imported in vLLM's API server and before forks: no torch, no vllm, no thread."""
    code = """
import threading
import xkv_compat, xkv_compat.vllm_symbols, xkv_compat.report
assert not {"torch", "vllm"} & set(sys.modules), "imported too much"
assert threading.active_count() == 1
"""
    done = run_live(None, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("live", [False, True])
def test_a_method_that_nobody_calls_lifts_no_refusal(
    make_tree: Callable[[dict[str, str]], Path],
    full_files: dict[str, str],
    run_live: Callable[..., subprocess.CompletedProcess[str]],
    live: bool,
) -> None:
    """Backported without its call, it would let Mamba beside attention begin without a state."""
    call = "self.kv_cache_manager.get_computed_blocks_for_connector(request)"
    scheduler = "v1/core/sched/scheduler.py"
    assert call in full_files[scheduler]
    full_files[scheduler] = full_files[scheduler].replace(call, "self.kv_cache_manager.get_computed_blocks(request)")
    tree = make_tree(full_files)
    if live:
        done = run_live(
            tree, "from xkv_compat import detect_live\nprint(*(n for n, f in detect_live().items() if not f))"
        )
        assert done.stdout.split() == ["state_hits_agree"], done.stderr
    else:
        assert [name for name, found in detect_source(tree).items() if not found] == ["state_hits_agree"]
