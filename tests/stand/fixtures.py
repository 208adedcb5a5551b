"""Fixtures of the stack's tests, named by each of their modules in `pytest_plugins`.

Owns: the one engine server of a run, and its end.
Must not know: what a test is about.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stand.cases import Stand
from stand.engines import EngineServer

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNNERS = pytest.StashKey[dict[str, int]]()


@pytest.fixture(scope="session")
def stand(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Stand]:
    """The target's engines, for the whole run."""
    folder = tmp_path_factory.mktemp("stand")
    vllm_home = Path(os.environ.get("VLLM_CACHE_ROOT", folder / "vllm"))
    with EngineServer(python=sys.executable, folder=folder / "engines", vllm_home=vllm_home) as server:
        yield Stand(server, folder / "models")
    pytestconfig.stash[RUNNERS] = server.model_runners


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which model runner ran: a release may choose another one by itself."""
    for runner, engines in config.stash.get(RUNNERS, {}).items():
        terminalreporter.write_line(f"{engines} engines ran {runner}")
