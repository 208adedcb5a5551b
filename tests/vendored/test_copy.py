"""A whole copy in a fork's tree: it must do the main job, and need none of its originals.

`nox -s vendored` copies this file and `tests/stand` beside a copy, with every name of our packages changed to the
copy's. Run as it lies here it fails: the originals are there.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import xkv_compat
import xkv_offload
import xkv_store
from stand.cases import assert_canary, assert_restored, generate, prompts, store
from stand.engines import SPEC_MODULE
from stand.gateways import EmbeddedCard, Gateway
from stand.models import LLAMA

if TYPE_CHECKING:
    from types import ModuleType

    from stand.cases import Stand

pytest_plugins = ("stand.fixtures",)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MIB = 1024 * 1024
LINGER_S = 60.0  # longer than an engine's start
ROOMS = ("store", "compat", "offload")
PROVENANCE = "PROVENANCE.json"


def _folder(module: ModuleType) -> Path:
    assert module.__file__ is not None
    return Path(module.__file__).parent


@pytest.mark.parametrize("room", ROOMS)
def test_no_original_is_on_the_path(room: str) -> None:
    assert importlib.util.find_spec(f"xkv_{room}") is None


def test_the_copy_lies_in_the_tree_of_the_vllm_that_runs() -> None:
    release = importlib.util.find_spec("vllm")
    assert release is not None
    assert release.origin is not None
    place = _folder(xkv_offload).parent
    assert place.is_relative_to(Path(release.origin).parents[1])
    assert {_folder(module).parent for module in (xkv_store, xkv_compat)} == {place}
    facts = json.loads((place / PROVENANCE).read_text(encoding="utf-8"))
    assert (facts["whole"], facts["package"]) == (True, place.name)
    assert xkv_offload.__name__ == SPEC_MODULE  # what the engines below are told


def test_a_gateway_of_the_copy_is_started_by_hand(tmp_path: Path) -> None:
    with Gateway(tmp_path) as gateway:
        assert gateway.status()["objects"] == 0


def test_stored_restarted_restored_and_the_canary(stand: Stand, tmp_path: Path) -> None:
    asked = prompts(LLAMA, 1, 2)
    expected = stand.baseline(LLAMA, asked)
    with EmbeddedCard(tmp_path / "card", capacity_bytes=128 * MIB, linger_s=LINGER_S) as card:
        config = stand.offloading(LLAMA, card, blocks_per_chunk=16)
        with stand.engine(config) as first:
            stored = store(first, asked, expected)
            assert stored > 0
        gateway = card.end_gateway()
        assert gateway is not None
        with stand.engine(config) as second:
            serving = card.gateway_pid()
            assert serving not in {None, gateway}
            command = Path(f"/proc/{serving}/cmdline").read_bytes().decode().split("\0")
            assert str(_folder(xkv_store)) in command  # the engine's own gateway is the copy's, too
            assert_restored(generate(second, asked), expected)
            assert_canary(second, asked, expected)
