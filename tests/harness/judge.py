"""When call coverage is judged: last of all, and only if the whole harness was asked for.

Owns: which test judges (`JUDGE`), its place at the end of the run, and the line that says that it was not judged. Where
the harness runs in several processes, each leaves what was called in the folder of XKV_CALLS, for the last to judge.
Must not know: what it judges by.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import calls

if TYPE_CHECKING:
    from collections.abc import Generator

FOLDER = "XKV_CALLS"
FILES = "test_harness_*.py"
JUDGE = "test_every_call_of_the_contract_is_made"
_FAILED: list[str] = []  # harness tests of this run
_UNJUDGED = pytest.StashKey[str]()
_DESELECTED: list[pytest.Item] = []


@pytest.fixture
def failed_before() -> list[str]:
    """The harness tests that have failed: what they should have called may be missing."""
    return [*_FAILED, *(name for left in _left() for name in left["failed"])]


@pytest.fixture
def made() -> set[calls.Made]:
    """What the harness tests have called, in this process and in those before it."""
    return calls.MADE | {calls.Made(*one) for left in _left() for one in left["made"]}


def _left() -> list[dict[str, list[str]]]:
    folder = os.environ.get(FOLDER)
    return [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())] if folder else []


def _is_harness(path: Path) -> bool:
    return path.match(FILES)


def _not_whole(config: pytest.Config) -> str | None:
    """Why this run cannot make every call; None if the whole harness was asked for, or others should have run it."""
    if FOLDER in os.environ:
        return None
    folder = Path(__file__).resolve().parents[1]
    given = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    if any("::" in arg for arg in config.args):
        return "single tests were named"
    if config.getoption("ignore") or config.getoption("ignore_glob"):
        return "files were ignored"
    for file in sorted(folder.glob(FILES)):
        if not any(path in (file, *file.parents) for path in given):
            return f"{file.name} was not asked for"
    if any(_is_harness(item.path) for item in _DESELECTED):
        return "tests were deselected"
    return None


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remember what was taken away."""
    _DESELECTED.extend(items)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Move the judge to the end, or take it away where it cannot judge."""
    yield
    judges = [item for item in items if item.name == JUDGE]
    items[:] = [item for item in items if item.name != JUDGE]
    reason = _not_whole(config)
    if reason is None:
        items.extend(judges)
    elif judges:
        config.stash[_UNJUDGED] = reason
        config.hook.pytest_deselected(items=judges)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the harness tests that fail."""
    if report.failed and _is_harness(Path(report.nodeid.partition("::")[0])):
        _FAILED.append(report.nodeid)


def pytest_sessionfinish() -> None:
    """Leave what was called to whoever judges."""
    folder = os.environ.get(FOLDER)
    if folder and calls.MADE:
        left = {"made": sorted(calls.MADE), "failed": _FAILED}
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(left))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say it where coverage was not judged."""
    reason = config.stash.get(_UNJUDGED, None)
    if reason is not None:
        terminalreporter.write_line(f"calls of the contract: not judged, {reason}")
