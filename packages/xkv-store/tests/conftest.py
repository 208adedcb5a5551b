"""Fixtures of several test modules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from xkv_store import cli

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def xkv(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Runs `xkv` with --json: its exit code and its lines."""

    def run(*words: str | Path) -> tuple[int, list[dict[str, Any]]]:
        code = cli.main([*map(str, words), "--json"])
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run
