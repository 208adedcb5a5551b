"""The soak finds what it looks for: each planted fault is found as what it is, and a sound gateway shows none of them.

Rates are judged by `nox -s soak` alone: what a machine that runs other tests can do says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from soak.outcome import Outcome
from soak.run import Options, Run

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"puts": 3_000, "capacity": 96 << 20, "slot_bytes": 4_096, "grace_ms": 200, "seed": 1}


def soaked(folder: Path, fault: str = "") -> Outcome:
    options: dict[str, Any] = {**SMALL, "fault": fault}
    return Run(folder, Options(**options), print).run()


def faults_of(outcome: Outcome) -> dict[str, int]:
    names = ("accounting_errors", "audit_errors", "lost_in_grace", "leases_broken", "wrong")
    return {name: count for name in names if (count := vars_of(outcome)[name])}


def vars_of(outcome: Outcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in outcome.__slots__}


@pytest.mark.slow
def test_a_sound_gateway_shows_no_fault(tmp_path: Path) -> None:
    outcome = soaked(tmp_path)
    assert not outcome.reasons
    assert outcome.puts >= SMALL["puts"]
    assert outcome.evicted
    assert outcome.leases
    assert outcome.audited_objects


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "found"),
    [("leak", {"accounting_errors"}), ("grace", {"lost_in_grace"}), ("lease", {"wrong"})],
)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str, found: set[str]) -> None:
    outcome = soaked(tmp_path, fault)
    assert found <= faults_of(outcome).keys(), outcome.reasons
    assert outcome.passed, "a canary that finds something"
    outcome.canary = ""
    assert not outcome.passed


@pytest.mark.slow
def test_a_cliff_is_found(tmp_path: Path) -> None:
    """Places take two milliseconds each to find on a card that is nearly full."""
    outcome = soaked(tmp_path, "cliff")
    assert outcome.rate_ratio < 0.5
    assert any("filling" in line for line in outcome.missed())


def test_a_run_that_saw_nothing_has_not_passed() -> None:
    outcome = Outcome(rates=[(1.0, 1.0)])
    assert not outcome.missed()
    assert len(outcome.blind()) == 3
    assert not outcome.passed
