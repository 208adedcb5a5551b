"""Every call that the release's connector makes on our objects is made by a harness test, or says why not."""

from __future__ import annotations

import os
from typing import Any

import pytest

from harness import calls, coverage
from xkv_matrix.check import Places, load_expected
from xkv_matrix.extract import load_contract
from xkv_matrix.targets import find_target

pytest_plugins = ("harness.fixtures",)

SOURCE = """
class Connector:
    def step(self, keys):
        self.manager.touch(
            keys,
        )
        (self.manager
            .lookup(keys))
        return self.spec.blocks_per_chunk
"""
MODULE = "stand_in_connector"


def use(kind: str, name: str, line: int, role: str = "manager") -> dict[str, Any]:
    return {"role": role, "kind": kind, "name": name, "at": f"{MODULE}:Connector.step:{line}", "arguments": ["keys"]}


USES = (use("call", "touch", 4), use("call", "lookup", 7), use("read", "blocks_per_chunk", 9, "spec"))
MADE = (
    calls.Made("manager", "touch", MODULE, 4),
    calls.Made("manager", "lookup", MODULE, 8),
    calls.Made("spec", "blocks_per_chunk", MODULE, 9),
)
READ = "spec.blocks_per_chunk stand_in_connector:Connector.step:9"


@pytest.fixture
def _connector(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    coverage._tree.cache_clear()


@pytest.mark.usefixtures("_connector")
def test_what_coverage_finds() -> None:
    assert coverage.faults(USES, MADE, {}) == []
    assert coverage.faults(USES, MADE[:2], {}) == [f"{READ}: no harness test makes it (keys)"]
    assert coverage.faults(USES, MADE[:2], {READ: "why"}) == []
    assert coverage.faults(USES, MADE, {READ: "why"}) == [f"{READ}: declared as uncovered, but a test makes it"]
    assert coverage.faults(USES, MADE, {"x": "why"}) == ["x: declared as uncovered, but no such use"]
    moved = (*USES[:2], use("read", "blocks_per_chunk", 6, "spec"))
    assert "of another wheel" in coverage.faults(moved, MADE[:2], {})[0]
    assert coverage.faults(USES[:2], MADE, {}) == [
        f"spec.blocks_per_chunk {MODULE}:9: made, but the contract does not name it"
    ]


def test_every_call_of_the_contract_is_made(made: set[calls.Made], failed_before: list[str]) -> None:
    target = find_target(os.environ["XKV_TARGET"])
    uncovered = load_expected(Places().table(target)).uncovered
    found = coverage.faults(load_contract(Places().contract(target))["uses"], made, uncovered)
    hint = [f"failed before, and may have been to make these calls: {name}" for name in failed_before]
    assert not found, "\n".join([*found, *hint])
