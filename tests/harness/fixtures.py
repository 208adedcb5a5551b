"""Fixtures of the harness's tests, named by each of their modules in `pytest_plugins`.

Owns: the import of vLLM before the first test that needs it, and the end of every rig.
Must not know: what a test is about.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from harness import release
from harness.rig import Rig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytest_plugins = ("harness.judge",)  # of every process: each leaves what its tests have called


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A gateway on an empty card, and whatever engines the test launches."""
    release.names()
    with closing(Rig(tmp_path)) as made:
        yield made


@pytest.fixture
def two_gateways_rig(tmp_path: Path) -> Iterator[Rig]:
    """As `rig`, with a gateway for each of an engine's two ranks."""
    release.names()
    with closing(Rig(tmp_path, gateways=2)) as made:
        yield made


@pytest.fixture
def small_slots_rig(tmp_path: Path) -> Iterator[Rig]:
    """As `rig`, on a card whose slots are so small that pages lie across them."""
    release.names()
    with closing(Rig(tmp_path, slot_bytes=8192)) as made:
        yield made
