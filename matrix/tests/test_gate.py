"""The gate: whatever is missing, failed, skipped, stale or only partly run must be a no-go that says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from xkv_matrix.__main__ import main
from xkv_matrix.findings import EXIT_BAD_INPUT, EXIT_FINDINGS, EXIT_OK, MatrixError
from xkv_matrix.gate import SUPPORTED_SESSIONS, Gate, Session, judge, load_gate, save_gate, with_page
from xkv_matrix.table import table_text
from xkv_matrix.targets import COMMITTED, TARGETS_VARIABLE, load_targets

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_matrix.check import Places
    from xkv_matrix.targets import Target

_SOURCES = "5" * 64


@dataclass(frozen=True)
class _Lying:
    """A folder of results of a supported and a followed row, all well; tests spoil one thing."""

    folder: Path
    targets: tuple[Target, ...]
    places: Places

    def put(self, session: str, **fields: Any) -> None:
        """Write one session's result."""
        parsed = Session.parse(session)
        result: dict[str, Any] = {
            "name": parsed.name,
            "target": parsed.target,
            "outcome": "passed",
            "counts": {"passed": 3, "failed": 0},
        }
        result |= {"arguments": [], "failures": [], "sources": _SOURCES, **fields}
        parsed.file(self.folder).write_text(json.dumps(result), encoding="utf-8")

    def judge(self, *needed: str) -> Gate:
        """Ask the gate."""
        sessions = [Session.parse(text) for text in needed]
        return judge(self.targets, sessions, self.folder, self.places, _SOURCES)


def load_verdicts(gate: Gate) -> dict[str, str]:
    return {row.release: row.verdict for row in gate.rows}


@pytest.fixture
def lying(target: Target, places: Places, tmp_path: Path) -> _Lying:
    results = tmp_path / "results"
    for folder in (results, places.contracts, places.expected):
        folder.mkdir()
    supported = replace(target, release="9.10.0", status="supported")
    followed = replace(target, release="9.8.0", requirements="x.txt")
    provenance = {"package": target.package, "wheel": target.wheel, "sha256": target.sha256}
    for row in (supported, followed):
        places.contract(row).write_text(json.dumps({"format": 1, "provenance": provenance}), encoding="utf-8")
        places.table(row).write_text("[features]\n", encoding="utf-8")
    found = _Lying(results, (supported, followed), places)
    for session in ("lint", *(f"{name}(9.10.0)" for name in SUPPORTED_SESSIONS), "contracts(9.8.0)"):
        found.put(session)
    return found


def test_go(lying: _Lying) -> None:
    gate = lying.judge("lint")
    assert gate.as_json() == {"verdict": "go", "supported": {"9.10.0": "pass"}, "followed": {"9.8.0": "pass"}}
    assert list(gate.as_lines()) == [
        "9.8.0  followed   pass     contracts pass, stack not run, stack_tp not run",
        "9.10.0  supported  pass     contracts pass, stack pass, stack_tp pass, vendored pass",
        "go",
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"outcome": "failed", "counts": {"passed": 9, "failed": 1}}, "stack(9.10.0): 1 failed"),
        (
            {
                "outcome": "failed",
                "counts": {"failed": 1},
                "failures": ["test_stack_imports::test_importable[vllm.v1]"],
            },
            "stack(9.10.0): 1 failed: test_stack_imports::test_importable[vllm.v1]",
        ),
        (
            {"outcome": "failed", "counts": {"failed": 6}, "failures": list("abcdef")},
            "stack(9.10.0): 6 failed: a, b, c, d, e, …",
        ),
        # noxfile.py counts what was skipped as failed, too.
        (
            {"outcome": "failed", "counts": {"passed": 9, "failed": 2, "skipped": 2}},
            "stack(9.10.0): 2 undeclared skip(s)",
        ),
        ({"counts": {"passed": 0}}, "stack(9.10.0): did not pass"),
        ({"outcome": "failed"}, "stack(9.10.0): did not pass"),
        ({"arguments": ["-k", "one"]}, "stack(9.10.0): only some of it ran (-k one)"),
        ({"sources": "6" * 64}, "stack(9.10.0): ran on other sources than these"),
        ({"target": "9.8.0"}, "stack(9.10.0): its result is another session's"),
        *(
            (fields, f"stack(9.10.0): its result is malformed: {said}")
            for fields, said in (
                ({"counts": 3}, "its counts"),
                ({"counts": None}, "its counts"),
                ({"counts": [1]}, "its counts"),
                *(({"counts": {"passed": odd}}, "its count of passed") for odd in ("3", -3, True, 3.0, None, [1])),
                *(({"counts": {"passed": 3, "failed": odd}}, "its count of failed") for odd in ("x", -1, None)),
                ({"counts": {"passed": 3, "skipped": -1}}, "its count of skipped"),
                ({"counts": {"passed": 3, "errors": 2}}, "unknown count 'errors'"),
                ({"failures": ["a::b"]}, "it passed, and names what failed"),
                ({"failures": 5}, "its failures"),
                ({"failures": None}, "its failures"),
                ({"failures": [5]}, "its failures"),
                ({"arguments": "-k"}, "its arguments"),
                ({"outcome": "PASSED"}, "its outcome"),
                ({"outcome": None}, "its outcome"),
                ({"sources": 5}, "its sources"),
                ({"seconds": "1"}, "its seconds"),
                ({"target": 5}, "its target"),
            )
        ),
        ({"counts": {"passed": 3, "failed": 1}}, "stack(9.10.0): 1 failed"),
        ({"counts": {"passed": 3, "skipped": 2}}, "stack(9.10.0): 2 undeclared skip(s)"),
        (
            {"outcome": "failed", "counts": {"failed": 1}, "failures": ["a\nb\x1b\ud800c"]},
            "stack(9.10.0): 1 failed: a b c",
        ),
    ],
)
def test_a_result_that_does_not_count(lying: _Lying, fields: dict[str, Any], said: str) -> None:
    lying.put("stack(9.10.0)", **fields)
    gate = lying.judge("lint")
    assert gate.as_json() == {
        "verdict": "no-go",
        "supported": {"9.10.0": "fail"},
        "followed": {"9.8.0": "pass"},
        "reasons": [said],
    }


@pytest.mark.parametrize("session", ["stack", "stack_tp", "contracts", "vendored"])
def test_a_missing_or_unreadable_result(lying: _Lying, session: str) -> None:
    file = lying.folder / f"{session}-9.10.0.json"
    file.unlink()
    assert lying.judge().blocking == (f"{session}(9.10.0): no result",)
    file.write_text("{", encoding="utf-8")
    (reason,) = lying.judge().blocking
    assert reason.startswith(f"{session}(9.10.0): its result cannot be read: ")
    for text in ("[" * 100_000, '{"a": NaN}', '{"outcome": "failed", "outcome": "passed"}', "\ud800"):
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        (reason,) = lying.judge().blocking
        assert reason.startswith(f"{session}(9.10.0): its result cannot be read: "), text[:20]
        assert "\n" not in reason
    file.unlink()
    file.mkdir()
    (reason,) = lying.judge().blocking
    assert "Is a directory" in reason


def test_a_common_session_blocks_and_leaves_the_rows_as_they_are(lying: _Lying) -> None:
    gate = lying.judge("types")
    assert (gate.verdict, gate.blocking) == ("no-go", ("types: no result",))
    assert gate.as_json()["supported"] == {"9.10.0": "pass"}
    assert lying.judge("demo(9.10.0)").blocking == ("demo(9.10.0): no result",)


def test_a_contract_of_another_wheel_is_stale(lying: _Lying) -> None:
    """The row moved on to another wheel, and the committed contract still tells of the old one."""
    targets = (replace(lying.targets[0], sha256="1" * 64), lying.targets[1])
    gate = replace(lying, targets=targets).judge()
    assert gate.blocking == ("contract: 9.10.0.json is stale: it was not made from the wheel that the row names",)
    lying.places.contract(lying.targets[0]).unlink()
    assert lying.judge().blocking == ("contract: 9.10.0.json is missing or malformed",)


def test_followed_rows_are_reported_and_never_block(lying: _Lying) -> None:
    followed = lying.targets[1]
    lying.put("contracts(9.8.0)", outcome="failed", counts={"failed": 1})
    gate = lying.judge("lint")
    assert gate.as_json() == {"verdict": "go", "supported": {"9.10.0": "pass"}, "followed": {"9.8.0": "fail"}}
    assert "  contracts(9.8.0): 1 failed" in list(gate.as_lines())
    lying.put("contracts(9.8.0)")
    lying.places.table(followed).write_text('[features]\n[misfits]\n"spec.x" = "why"\n', encoding="utf-8")
    assert lying.judge().as_json()["followed"] == {"9.8.0": "misfit"}
    (lying.folder / "contracts-9.8.0.json").unlink()
    assert lying.judge().as_json() == {
        "verdict": "go",
        "supported": {"9.10.0": "pass"},
        "followed": {"9.8.0": "not run"},
    }


def test_a_followed_row_s_stack_is_reported_where_it_ran(lying: _Lying, tmp_path: Path) -> None:
    """And is not what the README shows of the row, which must be the same whether or not it ran."""
    path = tmp_path / "gate.json"
    lying.put("stack(9.8.0)", outcome="failed", counts={"failed": 1})
    gate = lying.judge()
    assert gate.as_json() == {"verdict": "go", "supported": {"9.10.0": "pass"}, "followed": {"9.8.0": "fail"}}
    assert "9.8.0  followed   fail     contracts pass, stack fail, stack_tp not run" in list(gate.as_lines())
    assert "  stack(9.8.0): 1 failed" in list(gate.as_lines())
    save_gate(gate, path)
    assert load_gate(path)["9.8.0"] == "pass"
    lying.put("stack(9.8.0)", outcome="failed", counts={"failed": 1}, sources="6" * 64)
    assert lying.judge().as_json()["followed"] == {"9.8.0": "pass"}, (
        "it ran on other sources, so it is nothing to go by"
    )
    lying.put("stack(9.8.0)")
    lying.put("stack_tp(9.8.0)")
    assert "9.8.0  followed   pass     contracts pass, stack pass, stack_tp pass" in list(lying.judge().as_lines())
    without = (lying.targets[0], replace(lying.targets[1], engine=False))
    lines = list(replace(lying, targets=without).judge().as_lines())
    assert "9.8.0  followed   pass     contracts pass, stack pass" in lines, "no engine of it runs on a CPU"


def test_a_supported_row_with_a_known_misfit_does_not_pass_as_whole(lying: _Lying) -> None:
    lying.places.table(lying.targets[0]).write_text('[features]\n[misfits]\n"spec.x" = "why"\n', encoding="utf-8")
    gate = lying.judge()
    assert (gate.verdict, gate.blocking) == ("no-go", ("spec.x: why",))


def test_nothing_supported_is_no_go(lying: _Lying) -> None:
    gate = replace(lying, targets=lying.targets[1:]).judge()
    assert (gate.verdict, gate.blocking) == ("no-go", ("there is no supported row",))
    assert "there is no supported row" in list(gate.as_lines())


@pytest.mark.parametrize("text", [None, "[", "a = " + "[" * 9000, "[features]\nx = 1\n"])
def test_a_row_without_its_table_is_a_reason(lying: _Lying, text: str | None) -> None:
    """Of a supported row against a go, of a followed one told."""
    supported, followed = lying.targets
    for row in (followed, supported):
        lying.places.table(row).unlink()
        if text is not None:
            lying.places.table(row).write_text(text, encoding="utf-8")
        gate = lying.judge("lint")
        reason = f"expected: {row.release}.toml is missing or malformed"
        assert f"  {reason}" in list(gate.as_lines())
        assert gate.blocking == ((reason,) if row is supported else ())
        assert gate.as_json()[row.status] == {row.release: "fail"}


def test_a_followed_row_s_damaged_results_never_block(lying: _Lying) -> None:
    for session in ("contracts(9.8.0)", "stack(9.8.0)"):
        lying.put(session, counts={"passed": 3, "failed": "x"})
    lying.places.contract(lying.targets[1]).write_text("[" * 100_000, encoding="utf-8")
    gate = lying.judge("lint")
    assert gate.as_json() == {"verdict": "go", "supported": {"9.10.0": "pass"}, "followed": {"9.8.0": "fail"}}
    assert "  stack(9.8.0): its result is malformed: its count of failed" in list(gate.as_lines())


def test_a_page_that_says_something_else_is_a_reason(lying: _Lying, tmp_path: Path) -> None:
    page, gate = tmp_path / "page.md", lying.judge("lint")
    page.write_text(table_text(lying.targets, load_verdicts(gate), lying.places), encoding="utf-8")
    assert with_page(gate, lying.targets, page, lying.places) == gate
    page.write_text(page.read_text(encoding="utf-8").replace("| supported", "| followed"), encoding="utf-8")
    drifted = with_page(gate, lying.targets, page, lying.places)
    assert drifted.as_json()["reasons"] == ["page.md: the support table is not what the gate says"]
    assert drifted.verdict == "no-go"
    page.write_text("no table", encoding="utf-8")
    assert "there must be one" in with_page(gate, lying.targets, page, lying.places).blocking[0]
    page.unlink()
    (reason,) = with_page(gate, lying.targets, page, lying.places).blocking
    assert reason.startswith("page.md: it cannot be read")


def test_a_page_that_tells_too_much_of_a_followed_row_is_told_and_does_not_block(lying: _Lying, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(table_text(lying.targets, load_verdicts(lying.judge()), lying.places), encoding="utf-8")
    lying.put("contracts(9.8.0)", outcome="failed", counts={"failed": 1})
    gate = with_page(lying.judge(), lying.targets, page, lying.places)
    assert gate.verdict == "go"
    assert "page.md: of 9.8.0 it does not say 'fail'" in list(gate.as_lines())


def test_gate_json_says_why_and_is_the_same_each_time(lying: _Lying, tmp_path: Path) -> None:
    lying.put("stack(9.10.0)", outcome="failed", counts={"failed": 1})
    path = tmp_path / "gate.json"
    save_gate(lying.judge(), path)
    first = path.read_text(encoding="utf-8")
    save_gate(lying.judge(), path)
    assert path.read_text(encoding="utf-8") == first
    assert json.loads(first)["rows"]["9.10.0"]["reasons"] == ["stack(9.10.0): 1 failed"]
    assert load_gate(path) == {"9.8.0": "pass", "9.10.0": "fail"}
    path.write_text('{"rows": {"9.8.0": 1}}', encoding="utf-8")
    with pytest.raises(MatrixError, match="not what the gate writes"):
        load_gate(path)


def test_what_cannot_be_judged_leaves_no_older_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gate.json"
    out.write_text('{"verdict": "go"}', encoding="utf-8")
    assert main(["gate", "--out", str(out), "--results", str(tmp_path), "--need", "no(1.2)"]) == EXIT_BAD_INPUT
    assert not out.exists()
    for place in (tmp_path, tmp_path / "absent" / "gate.json"):
        assert main(["gate", "--out", str(place), "--results", str(tmp_path)]) == EXIT_BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 3


def test_a_variable_that_is_left_over_narrows_nothing(tmp_path: Path) -> None:
    rows = tmp_path / "targets.toml"
    rows.write_text(COMMITTED.read_text(encoding="utf-8").replace('"supported"', '"followed"'), encoding="utf-8")
    command = [sys.executable, "-m", "xkv_matrix", "gate", f"--out={tmp_path / 'gate.json'}", f"--results={tmp_path}"]
    env = {**os.environ, TARGETS_VARIABLE: str(rows), "PYTHONPATH": str(COMMITTED.parent)}
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, env=env, timeout=60)
    assert done.returncode == EXIT_FINDINGS
    line = json.loads(done.stdout)
    assert set(line["supported"]) == {row.release for row in load_targets(COMMITTED) if row.status == "supported"}
    assert done.stderr == "XKV_TARGETS is set; judged are the committed rows\n"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "gate.json"), "--results", str(tmp_path)]
    for needed in ("what is this", "stack(no.such)"):
        assert main(["gate", *out, "--need", needed]) == EXIT_BAD_INPUT
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["gate", *out, "--json"]) == EXIT_FINDINGS
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    line = json.loads(printed)
    rows = load_targets()
    assert line["verdict"] == "no-go"
    assert set(line["supported"]) == {row.release for row in rows if row.status == "supported"}
    assert set(line["followed"].values()) == {"not run"}
    assert json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))["reasons"] == line["reasons"]
    for row in rows:
        for name in SUPPORTED_SESSIONS:
            result: dict[str, Any] = {
                "name": name,
                "target": row.release,
                "outcome": "passed",
                "counts": {"passed": 1},
                "arguments": [],
            }
            Session(name, row.release).file(tmp_path).write_text(json.dumps(result), encoding="utf-8")
    assert main(["gate", *out]) == EXIT_OK
    assert capsys.readouterr().out.endswith("\ngo\n")
