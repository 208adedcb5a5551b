"""Forks: a checkout that we do not fit must not pass, and one that we do must not be turned away for being new."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_compat import FEATURES
from xkv_matrix import fork
from xkv_matrix.__main__ import main
from xkv_matrix.check import Places, load_expected, write
from xkv_matrix.findings import EXIT_BAD_INPUT, EXIT_FINDINGS, EXIT_OK, MatrixError
from xkv_matrix.targets import load_targets
from xkv_matrix.wheels import unpack, wheels_folder

if TYPE_CHECKING:
    from xkv_matrix.fork import Judgement
    from xkv_matrix.targets import Target

Make = Callable[[dict[str, str]], Path]
_BASE = "v1/kv_offload/base.py"
_OFFLOADING = "distributed/kv_transfer/kv_connector/v1/offloading"
_LATEST = "    def complete_store(self, keys, req_context, success=True): ...\n"


@dataclass(frozen=True)
class _Known:
    """A small world of two known releases, and a way of judging a change of the newer one."""

    files: dict[str, str]
    targets: tuple[Target, ...]
    places: Places
    make: Make

    def judge(self, change: dict[str, tuple[str, str]] | None = None, gone: tuple[str, ...] = ()) -> Judgement:
        """Judge the newer release with (old, new) replaced in some files and others gone."""
        files = {name: text for name, text in self.files.items() if name not in gone}
        for name, (old, new) in (change or {}).items():
            assert old in files[name]
            files[name] = files[name].replace(old, new)
        tree = self.make(files)
        for name in gone:
            (tree / "vllm" / name).unlink(missing_ok=True)
        return fork.judge(tree, self.targets, self.places)


@pytest.fixture
def known(target: Target, whole: dict[str, str], make_tree: Make, places: Places, our_side: Path) -> _Known:
    """The small release as a supported row, and an older followed one whose manager has no lock."""
    assert our_side == places.ours
    older = replace(target, release="9.8.0")
    locked = {**whole}
    whole[_BASE] = whole[_BASE].replace("    def lock(self)", "    def latch(self)")
    write(older, make_tree(whole), places)
    supported = replace(target, release="9.10.0", status="supported")
    _, table = write(supported, make_tree(locked), places)
    with table.open("a", encoding="utf-8") as file:
        file.write('[defaults]\n"manager.lock" = "ours needs none"\n')
    return _Known(locked, (supported, older), places, make_tree)


def _texts(judgement: Judgement) -> list[str]:
    return [str(reason) for reason in judgement.reasons]


def test_a_release_s_own_tree_is_usable_and_nearest_to_itself(known: _Known) -> None:
    judgement = known.judge()
    assert judgement.usable
    assert judgement.nearest == judgement.newest
    assert (judgement.nearest.release, judgement.nearest.distance) == ("9.10.0", 0)
    assert next(iter(fork.as_lines(judgement))) == (
        "against 9.10.0 (newest supported and nearest known): the same features"
    )


def test_an_older_tree_is_compared_with_both_rows(known: _Known) -> None:
    """The connector must not ask for the lock either: a tree is judged as a whole."""
    scheduler = f"{_OFFLOADING}/scheduler.py"
    judgement = known.judge(
        {_BASE: ("    def lock(self)", "    def latch(self)"), scheduler: ("with self.manager.lock:", "if True:")}
    )
    assert judgement.usable
    assert (judgement.newest.release, judgement.newest.lost) == ("9.10.0", ("manager_lock",))
    assert (judgement.nearest.release, judgement.nearest.distance) == ("9.8.0", 0)


def test_a_renamed_method(known: _Known) -> None:
    judgement = known.judge(
        {
            _BASE: ("def lookup(", "def look_up("),
            f"{_OFFLOADING}/scheduler.py": ("self.manager.lookup(", "self.manager.look_up("),
        }
    )
    never, text = _texts(judgement)
    assert never.startswith("connector: XkvManager.lookup: never called here")
    assert text.startswith(f"binding: vllm.{_OFFLOADING.replace('/', '.')}.scheduler:OffloadingConnectorScheduler")
    assert text.endswith("manager.look_up: call, abstract in this release, and not ours")
    found, total = sum(judgement.features.values()), len(FEATURES)
    assert list(fork.as_lines(judgement))[-1].endswith(f"tree: unusable: 2 reason(s), {found} of {total} features")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("complete_store", "scheduler"),
        ("has_pending_work", "scheduler"),
        ("build_metric_definitions", "metrics"),
        ("shutdown", "worker"),
    ],
)
def test_a_renamed_method_that_the_release_answers_itself(known: _Known, name: str, file: str) -> None:
    """Nobody must fill it in, so that nothing fails: but what ours does would never be done."""
    path = f"{_OFFLOADING}/{file}.py"
    renamed = {_BASE: (f"def {name}(", f"def {name}_x("), path: (f".{name}(", f".{name}_x(")}
    role = {"metrics": "spec", "worker": "worker"}.get(file, "manager")
    owner = {"spec": "XkvOffloadingSpec", "worker": "XkvWorker", "manager": "XkvManager"}[role]
    never, default = _texts(known.judge(renamed))
    assert never.startswith(f"connector: {owner}.{name}: never called here; 9.10.0 calls it")
    assert default.endswith(f"{role}.{name}_x: call, answered by vLLM's default, for ours has no such method")


def test_a_method_of_ours_that_is_called_no_more(known: _Known) -> None:
    """Unless a known row does without the call as well."""
    scheduler = f"{_OFFLOADING}/scheduler.py"
    gone = {scheduler: ("self.manager.complete_store(set(keys), request)", "pass")}
    (text,) = _texts(known.judge(gone))
    assert text.startswith("connector: XkvManager.complete_store: never called here; 9.10.0 calls it")
    older = known.places.contract(known.targets[1])
    contract = json.loads(older.read_text(encoding="utf-8"))
    contract["uses"] = [use for use in contract["uses"] if use["name"] != "complete_store"]
    older.write_text(json.dumps(contract), encoding="utf-8")
    assert known.judge(gone).usable


def test_a_default_that_no_row_knows(known: _Known) -> None:
    table = known.places.table(known.targets[0])
    table.write_text(table.read_text(encoding="utf-8").replace("manager.lock", "manager.other"), encoding="utf-8")
    (text,) = _texts(known.judge())
    assert text.endswith("manager.lock: read, answered by vLLM's default, for ours has no such method")


def test_a_cherry_picked_newer_feature_is_no_reason_against_a_tree(known: _Known) -> None:
    newer = {_BASE: (_LATEST, f"{_LATEST}    def get_load_source(self, key, req_context): ...\n")}
    (text,) = _texts(known.judge(newer))
    assert text == "needs: vllm.v1.kv_offload.base.CacheHitSource: no such class, and we need it"
    known.files["v1/metrics/cache_hit_source.py"] = "class CacheHitSource:\n    DISK = 1\n"
    judgement = known.judge(newer)
    assert judgement.usable
    assert (judgement.newest.gained, judgement.newest.lost) == (("load_source",), ())
    assert "  also has load_source" in list(fork.as_lines(judgement))


@pytest.mark.parametrize("module", ["scheduler", "worker"])
def test_a_moved_connector_module_does_not_pass_unseen(known: _Known, module: str) -> None:
    """Its calls are not found any more: without this, a fork that moved them all would fit perfectly."""
    path = f"{_OFFLOADING}/{module}.py"
    known.files[f"{_OFFLOADING}/moved.py"] = known.files[path]
    judgement = known.judge(gone=(path,))
    assert not judgement.usable
    dotted = f"vllm.{_OFFLOADING.replace('/', '.')}.{module}"
    assert f"connector: {dotted}: not there; in 9.10.0 it calls us" in _texts(judgement)[0]
    role = {"scheduler": "manager", "worker": "worker"}[module]
    assert any(text.startswith(f"connector: {role}: no call on it was found") for text in _texts(judgement))


def test_a_moved_framework_names_every_symbol_that_is_needed(known: _Known) -> None:
    known.files["v1/offload/base.py"] = known.files[_BASE]
    judgement = known.judge(gone=(_BASE,))
    needed = [text for text in _texts(judgement) if text.startswith("needed: ")]
    assert any("OffloadingManager: no symbol vllm.v1.kv_offload.base:OffloadingManager" in text for text in needed)
    assert judgement.newest.lost


def test_a_misfit_that_a_row_knows_stays_a_reason_and_brings_its_own(known: _Known) -> None:
    """What is accepted of a followed row is still no fit; the reviewer's words help the fork's maintainer."""
    table = known.places.table(known.targets[0])
    table.write_text(table.read_text(encoding="utf-8") + '[misfits]\n"manager.brand_new" = "why"\n', encoding="utf-8")
    scheduler = f"{_OFFLOADING}/scheduler.py"
    judgement = known.judge({scheduler: ("output.store_spec", "self.manager.brand_new()")})
    (text,) = _texts(judgement)
    assert text.endswith("(why)")


def test_bad_input_is_one_line_and_an_exit_code_of_its_own(
    make_tree: Make, whole: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole[f"{_OFFLOADING}/worker.py"] = "import x\ndef (:\n"
    (tmp_path / "empty").mkdir()
    cases = (
        (tmp_path / "absent", "no such folder"),
        (tmp_path / "empty", "not a vLLM source tree"),
        (make_tree(whole), "worker.py:2: "),
    )
    for tree, said in cases:
        assert main(["fork", "--source", str(tree)]) == EXIT_BAD_INPUT
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert said in captured.err


def test_without_a_supported_row_or_a_contract_there_is_nothing_to_compare_with(known: _Known) -> None:
    with pytest.raises(MatrixError, match="no supported row"):
        fork.judge(known.make(known.files), known.targets[1:], known.places)
    known.places.contract(known.targets[0]).unlink()
    with pytest.raises(MatrixError, match=r"9\.10\.0\.json: No such file"):
        known.judge()


def test_json_of_a_package_that_is_called_vllm_and_is_none(make_tree: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """A vLLM from before the framework, or a name squatted on: a verdict, and every missing symbol."""
    assert main(["fork", "--json", "--source", str(make_tree({}))]) == EXIT_FINDINGS
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    report = json.loads(out)
    assert report["verdict"] == "unusable"
    assert {reason["check"] for reason in report["reasons"]} == {"needed", "needs", "connector", "binding"}
    assert report["newest_supported"]["lost"]


@pytest.mark.parametrize(
    ("contract", "said"),
    [
        ({"format": 1}, "a contract without release, provenance, modules, uses, unresolved"),
        ({"format": 1, "uses": [{}]}, "a contract without release"),
        (
            {"format": 1, "release": "", "provenance": {}, "modules": {}, "unresolved": [], "uses": [{}]},
            "not a use: {}",
        ),
    ],
)
def test_a_contract_that_lacks_what_is_compared(known: _Known, contract: dict[str, object], said: str) -> None:
    known.places.contract(known.targets[0]).write_text(json.dumps(contract), encoding="utf-8")
    with pytest.raises(MatrixError, match=said):
        known.judge()


def test_what_is_called_like_a_module_and_is_none(known: _Known) -> None:
    """Python imports none of these; to read a pipe would wait for ever."""
    tree = known.make(known.files)
    connectors = tree / "vllm" / "distributed" / "kv_transfer" / "kv_connector" / "v1"
    (connectors / "folder.py").mkdir()
    (connectors / "loop.py").symlink_to("loop.py")
    (connectors / "dangling.py").symlink_to("nowhere.py")
    os.mkfifo(connectors / "pipe.py")
    assert fork.judge(tree, known.targets, known.places).usable


def test_what_cannot_be_looked_through_is_said_in_one_line(known: _Known) -> None:
    known.files[f"{_OFFLOADING}/scheduler.py"] += f"        return self{'.a' * 900}.touch(1)\n"
    with pytest.raises(MatrixError, match="nested more than 100 levels deep"):
        known.judge()
    huge = known.make(known.files) / "vllm" / "distributed" / "kv_transfer" / "huge.py"
    huge.touch()
    os.truncate(huge, 4 << 30)
    (huge.parent / "kv_connector" / "v1" / "offloading" / "scheduler.py").write_text("", encoding="utf-8")
    with pytest.raises(MatrixError, match=r"huge\.py:0: 4294967296 bytes"):
        fork.judge(known.make({}), known.targets, known.places)


@pytest.mark.slow
@pytest.mark.timeout(600)  # every row's wheel is unpacked the first time
def test_the_trees_of_fetched_wheels(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row's own sources, where its wheel is there: nearest to themselves, usable but for known misfits."""
    for row in load_targets():
        wheel = wheels_folder() / row.wheel
        if wheel.is_file():
            fits = not load_expected(Places().table(row)).misfits
            code = main(["fork", "--json", "--source", str(unpack(wheel, row.sha256))])
            report = json.loads(capsys.readouterr().out)
            assert (code, report["verdict"]) == ((EXIT_OK, "usable") if fits else (EXIT_FINDINGS, "unusable"))
            assert report["nearest"] == {"release": row.release, "status": row.status, "gained": [], "lost": []}
