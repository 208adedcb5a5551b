"""Copies that take their time, so that stores are under way while the engine goes on.

Owns: the fixtures that slow the copy thread's reading down.
Must not know: what a test is about.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from xkv_offload.copy import HostMover

if TYPE_CHECKING:
    from collections.abc import Callable

ACROSS_STEPS_S = 0.002  # of one object: longer than a step of the harness


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stores that take so long to read the pages of one object, from now on."""
    gather = HostMover.gather

    def slow(seconds: float) -> None:
        def slowly(self: HostMover, move: Any) -> None:
            time.sleep(seconds)
            gather(self, move)

        monkeypatch.setattr(HostMover, "gather", slowly)

    return slow


@pytest.fixture
def copies_across_steps(slow_copies: Callable[[float], None]) -> None:
    """Stores that are still under way when the next steps begin."""
    slow_copies(ACROSS_STEPS_S)
