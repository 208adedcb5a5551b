"""The support table: what the README promises must be what the gate says of the rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_matrix.__main__ import main
from xkv_matrix.check import Places, load_expected
from xkv_matrix.findings import EXIT_BAD_INPUT, EXIT_FINDINGS, EXIT_OK, MatrixError
from xkv_matrix.gate import MISFIT, PASS
from xkv_matrix.page import BEGIN, END, placed
from xkv_matrix.table import drift, table_text
from xkv_matrix.targets import CannotRun, load_targets

if TYPE_CHECKING:
    from xkv_matrix.targets import Target

_README = Path(__file__).resolve().parents[2] / "README.md"


def _promised() -> dict[str, str]:
    """What the gate says of the rows on the day of a release."""
    places = Places()
    return {row.release: MISFIT if load_expected(places.table(row)).misfits else PASS for row in load_targets()}


def test_the_readme_promises_what_a_go_means() -> None:
    page = _README.read_text(encoding="utf-8")
    assert placed(page, table_text(load_targets(), _promised(), Places())) == page


def test_check_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, gate = tmp_path / "page.md", tmp_path / "gate.json"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    common = ["table", "--page", str(page), "--gate", str(gate)]
    assert main([*common, "--check"]) == EXIT_BAD_INPUT
    assert "the gate writes it" in capsys.readouterr().err
    rows = {
        release: {"status": "supported", "verdict": verdict, "sessions": {}} for release, verdict in _promised().items()
    }
    gate.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert main([*common, "--check"]) == EXIT_FINDINGS
    assert main([*common, "--write"]) == EXIT_OK
    assert main([*common, "--check"]) == EXIT_OK
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n\n| vLLM |")
    assert text.endswith(f"|\n\n{END}\nafter\n")
    rows[next(iter(rows))]["verdict"] = "fail"
    gate.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert main([*common, "--check"]) == EXIT_FINDINGS, "the page promises what the gate denies"
    capsys.readouterr()
    assert main(common) == EXIT_OK
    assert capsys.readouterr().out.startswith(BEGIN)


def test_what_a_row_is_checked_with(target: Target, places: Places) -> None:
    places.expected.mkdir()
    places.table(target).write_text('[features]\n[misfits]\n"spec.x" = "why"\n', encoding="utf-8")
    supported = replace(target, release="9.10.0", status="supported", cannot_run=(CannotRun("mla", "no"),))
    verdicts = {"9.9.9": MISFIT, "9.10.0": PASS}
    assert table_text((supported, target), verdicts, places).splitlines()[4:6] == [
        "| 9.9.9 | followed | its sources: why | misfit |",
        "| 9.10.0 | supported | real engine: Llama, Gemma 3 (sliding windows); connector harness: MLA | pass |",
    ]
    with pytest.raises(MatrixError, match=r"no verdict on 9\.9\.9"):
        table_text((target,), {}, places)


def test_a_page_drifts_where_it_promises_what_a_go_does_not_mean(target: Target, places: Places) -> None:
    """What it says of a followed row's result is told and is no drift: such a row blocks nothing."""
    places.expected.mkdir()
    places.table(target).write_text("[features]\n", encoding="utf-8")
    rows = (replace(target, release="9.10.0", status="supported"), target)
    page = table_text(rows, {"9.9.9": PASS, "9.10.0": PASS}, places)
    assert drift(page, rows, {"9.9.9": PASS, "9.10.0": "fail"}, places) == (False, [])
    assert drift(page, rows, {"9.9.9": "fail", "9.10.0": PASS}, places) == (False, ["9.9.9"])
    places.table(target).unlink()
    assert drift(page, rows, {"9.9.9": "fail", "9.10.0": PASS}, places) == (False, ["9.9.9"])
    places.table(target).write_text("[features]\n", encoding="utf-8")
    verdicts = {"9.9.9": PASS, "9.10.0": PASS}
    for old, new in (
        ("| supported |", "| followed |"),
        ("MLA | pass", "MLA | fail"),
        ("its sources", "engines"),
        ("| followed | its sources: contract, calls and features | pass |", "| followed | its sources |"),
    ):
        assert old in page
        assert drift(page.replace(old, new), rows, verdicts, places)[0]


def test_what_did_not_pass_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, gate = tmp_path / "page.md", tmp_path / "gate.json"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    rows = {row.release: {"status": row.status, "verdict": "fail", "sessions": {"contracts": "pass"}}
            for row in load_targets()}  # fmt: skip
    gate.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert main(["table", "--page", str(page), "--gate", str(gate), "--write"]) == EXIT_BAD_INPUT
    assert "did not pass, and a page promises that it does" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == f"{BEGIN}\n{END}\n"


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"])
def test_a_page_without_a_place_for_it(page: str) -> None:
    with pytest.raises(MatrixError, match="there must be one"):
        placed(page, "x")
