"""The gate: whatever is missing, failed, skipped, stale or only partly run must be a no-go that says so."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from xkv_matrix.__main__ import main
from xkv_matrix.findings import EXIT_BAD_INPUT, EXIT_FINDINGS, EXIT_OK, MatrixError
from xkv_matrix.gate import Gate, Session, judge, load_gate, save_gate
from xkv_matrix.targets import load_targets

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
    for session in ("lint", "contracts(9.10.0)", "stack(9.10.0)", "vendored(9.10.0)", "contracts(9.8.0)"):
        found.put(session)
    return found


def test_go(lying: _Lying) -> None:
    gate = lying.judge("lint")
    assert gate.as_json() == {"verdict": "go", "supported": {"9.10.0": "pass"}, "followed": {"9.8.0": "pass"}}
    assert list(gate.as_lines()) == [
        "9.8.0  followed   pass     contracts pass, stack not run",
        "9.10.0  supported  pass     contracts pass, stack pass, vendored pass",
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
        ({"counts": 3}, "stack(9.10.0): its result is malformed"),
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


@pytest.mark.parametrize("session", ["stack", "contracts", "vendored"])
def test_a_missing_or_unreadable_result(lying: _Lying, session: str) -> None:
    file = lying.folder / f"{session}-9.10.0.json"
    file.unlink()
    assert lying.judge().blocking == (f"{session}(9.10.0): no result",)
    file.write_text("{", encoding="utf-8")
    (reason,) = lying.judge().blocking
    assert reason.startswith(f"{session}(9.10.0): its result cannot be read: ")


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
    assert "9.8.0  followed   fail     contracts pass, stack fail" in list(gate.as_lines())
    assert "  stack(9.8.0): 1 failed" in list(gate.as_lines())
    save_gate(gate, path)
    assert load_gate(path)["9.8.0"] == "pass"
    lying.put("stack(9.8.0)", outcome="failed", counts={"failed": 1}, sources="6" * 64)
    assert lying.judge().as_json()["followed"] == {"9.8.0": "pass"}, (
        "it ran on other sources, so it is nothing to go by"
    )
    lying.put("stack(9.8.0)")
    assert "9.8.0  followed   pass     contracts pass, stack pass" in list(lying.judge().as_lines())


def test_a_supported_row_with_a_known_misfit_does_not_pass_as_whole(lying: _Lying) -> None:
    lying.places.table(lying.targets[0]).write_text('[features]\n[misfits]\n"spec.x" = "why"\n', encoding="utf-8")
    gate = lying.judge()
    assert (gate.verdict, gate.blocking) == ("no-go", ("spec.x: why",))


def test_nothing_supported_is_no_go(lying: _Lying) -> None:
    assert replace(lying, targets=lying.targets[1:]).judge().verdict == "no-go"


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
        for name in ("stack", "contracts", "vendored"):
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
