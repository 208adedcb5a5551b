"""The check and the command line: what is committed against what a tree says, with exit codes 0, 1 and 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_matrix.__main__ import main
from xkv_matrix.check import Places, check, load_expected, write
from xkv_matrix.findings import EXIT_BAD_INPUT, EXIT_OK, MatrixError

if TYPE_CHECKING:
    from xkv_matrix.targets import Target

Make = Callable[[dict[str, str]], Path]
_BASE = "v1/kv_offload/base.py"


def _texts(target: Target, tree: Path, places: Places) -> list[str]:
    return [str(finding) for finding in check(target, tree, places).findings]


def _change(tree: Path, file: str, old: str, new: str) -> None:
    path = tree / "vllm" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_what_was_just_extracted_fits(extracted: tuple[Target, Path], places: Places) -> None:
    target, tree = extracted
    assert _texts(target, tree, places) == []
    contract = json.loads(places.contract(target).read_text(encoding="utf-8"))
    assert contract["provenance"] == {"package": target.package, "wheel": target.wheel, "sha256": target.sha256}
    manager = contract["modules"]["vllm.v1.kv_offload.base"]["classes"]["OffloadingManager"]
    assert manager["abstract"] == ["lookup", "on_new_request", "prepare_store"]
    assert manager["members"]["complete_store"] == "(self, keys, req_context, success=True)"
    assert manager["members"]["lock"] == "property (self)"


def test_a_changed_parameter_is_named(extracted: tuple[Target, Path], places: Places) -> None:
    target, tree = extracted
    _change(tree, _BASE, "complete_store(self, keys, req_context, success=True)", "complete_store(self, keys)")
    (text,) = _texts(target, tree, places)
    assert "OffloadingManager.members.complete_store" in text
    assert '"(self, keys)" (was "(self, keys, req_context, success=True)")' in text


def test_a_feature_that_goes_is_named_in_table_and_row(extracted: tuple[Target, Path], places: Places) -> None:
    target, tree = extracted
    _change(tree, _BASE, "    def lock(self)", "    def latch(self)")
    texts = _texts(target, tree, places)
    assert f"features: expected/{target.release}.toml: manager_lock: expected present, found absent" in texts
    assert any("manager.lock: read of something that neither" in text for text in texts)


def test_a_needed_symbol_that_goes_is_named(extracted: tuple[Target, Path], places: Places) -> None:
    target, tree = extracted
    _change(tree, _BASE, "class GPULoadStoreSpec:", "class Renamed:")
    assert any("needed and missing: GPULoadStoreSpec: no symbol" in text for text in _texts(target, tree, places))


def test_the_row_must_say_what_the_table_says(extracted: tuple[Target, Path], places: Places) -> None:
    target, tree = extracted
    target = replace(target, lacks=(*target.lacks[1:], "manager_lock"))
    texts = _texts(target, tree, places)
    assert len(texts) == 2
    assert all(text.startswith("features: targets.toml: 9.9.9: the row ") for text in texts)


def test_what_no_harness_test_calls_is_kept_with_its_reason(extracted: tuple[Target, Path], places: Places) -> None:
    target, tree = extracted
    table = places.table(target)
    with table.open("a", encoding="utf-8") as file:
        file.write('[uncovered]\n"manager.lookup scheduler:f:1" = "why"\n')
    assert _texts(target, tree, places) == []
    write(target, tree, places)
    assert load_expected(table).uncovered == {"manager.lookup scheduler:f:1": "why"}


def test_what_is_left_to_the_release_is_pinned(extracted: tuple[Target, Path], places: Places) -> None:
    target, tree = extracted
    table = places.table(target)
    plain = table.read_text(encoding="utf-8")
    write(target, tree, places)  # extracting again keeps what a person wrote
    assert load_expected(table).defaults == {"manager.lock": "ours needs none"}
    table.write_text(plain.partition("[defaults]")[0], encoding="utf-8")
    (text,) = _texts(target, tree, places)
    assert text.startswith("default: ")
    assert text.endswith("manager.lock: read, answered by vLLM's default, for ours has no such method")
    table.write_text(plain + '"manager.lookup" = "why"\n', encoding="utf-8")
    assert _texts(target, tree, places) == [
        "default: expected/9.9.9.toml: manager.lookup: a known default that answers nothing"
    ]


def test_known_misfits_are_pinned(extracted: tuple[Target, Path], places: Places) -> None:
    """A misfit is accepted by its name only, and a name that fits by now must go."""
    target, tree = extracted
    path = places.ours / "manager.py"
    path.write_text(path.read_text(encoding="utf-8").replace("lookup(self, key, req_context)", "lookup(self)"))
    assert len(check(target, tree, places).findings) == 1
    table = places.table(target)
    plain = table.read_text(encoding="utf-8")
    table.write_text(plain + '[misfits]\n"manager.lookup" = "why"\n', encoding="utf-8")
    verdict = check(target, tree, places)
    assert verdict.findings == ()
    assert [str(item) for item in verdict.known] == ["known misfit: manager.lookup: why"]
    write(target, tree, places)  # extracting again keeps what a person wrote
    assert load_expected(table).misfits == {"manager.lookup": "why"}
    table.write_text(plain + '[misfits]\n"manager.lookup" = "why"\n"spec.x" = "why"\n', encoding="utf-8")
    assert [finding.text for finding in check(target, tree, places).findings] == ["spec.x: a known misfit that fits"]


def test_what_is_not_committed_is_a_finding(extracted: tuple[Target, Path], places: Places) -> None:
    target, tree = extracted
    places.contract(target).unlink()
    places.table(target).unlink()
    manager = places.ours / "manager.py"
    manager.write_text(manager.read_text(encoding="utf-8") + "    lock = None\n", encoding="utf-8")
    assert [text.partition(": not there")[0] for text in _texts(target, tree, places)] == [
        "contract: contracts/9.9.9.json",
        "features: expected/9.9.9.toml",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[features]\nx = 1\n", "must be a table of true and false"),
        ("[features]\n[misfits]\nx = ''\n", "must be a table of reasons"),
        ("[features]\n[uncovered]\nx = 1\n", "must be a table of reasons"),
        ("[features]\n[other]\n", "unknown table 'other'"),
        ("[features", "9.9.9.toml: "),
    ],
)
def test_a_malformed_table(extracted: tuple[Target, Path], places: Places, text: str, said: str) -> None:
    target, tree = extracted
    places.table(target).write_text(text, encoding="utf-8")
    with pytest.raises(MatrixError, match=said):
        check(target, tree, places)


def test_a_broken_file_and_no_tree(extracted: tuple[Target, Path], places: Places, tmp_path: Path) -> None:
    target, tree = extracted
    with pytest.raises(MatrixError, match="not a vLLM source tree"):
        check(target, tmp_path, places)
    places.contract(target).write_text("{}", encoding="utf-8")
    with pytest.raises(MatrixError, match="not a contract of format"):
        check(target, tree, places)
    (tree / "vllm" / _BASE).write_text("def (:\n", encoding="utf-8")
    with pytest.raises(MatrixError, match=r"base\.py:1: "):
        check(target, tree, places)


def test_command_line_on_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "targets.toml"
    rows.write_text("[[target]]\nrelease = 'x'\n", encoding="utf-8")
    cases = (
        (["contracts", "no.such"], "no target 'no.such'; there are "),
        (["contracts", "x", "--targets", str(rows)], ": status, package"),
        (["contracts", _some_release(), "--tree", str(tmp_path)], "not a vLLM source tree"),
    )
    for arguments, said in cases:
        assert main(arguments) == EXIT_BAD_INPUT
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert said in captured.err
        assert captured.err.count("\n") == 1


def _some_release() -> str:
    names = sorted(path.stem for path in Places().contracts.glob("*.json"))
    assert names
    return names[-1]


def test_the_live_reader_is_asked_where_an_interpreter_is_given(
    extracted: tuple[Target, Path], places: Places, tmp_path: Path
) -> None:
    target, tree = extracted
    features = load_expected(places.table(target)).features
    python = tmp_path / "python"
    report = json.dumps({"features": {**features, "manager_lock": False}})
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{report}\nEND\n", encoding="utf-8")
    python.chmod(0o755)
    (finding,) = check(target, tree, places, str(python)).findings
    assert str(finding) == f"live reader: {python}: manager_lock: expected present, found absent"
    with pytest.raises(MatrixError, match="the live reader cannot be run there"):
        check(target, tree, places, str(tmp_path / "absent"))
    assert EXIT_OK == 0
