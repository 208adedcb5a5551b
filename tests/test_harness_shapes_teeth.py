"""Faults made on purpose in loads of states and of packed pages: the harness must find each."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from harness.memory import PagesError
from harness.refusals import refused
from harness.shapes import Shape, full, mamba, sliding
from harness.story import prompt
from xkv_offload.copy import HostMover

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

TOKENS = prompt(tokens=16 * 6 + 1, seed=1)
SHAPES = {
    "states": Shape(groups=(full(layers=1, padding_bytes=512), mamba(layers=1)), blocks=24, shared=True),
    "packed": Shape(groups=(full(layers=1), sliding(window=32, layers=2)), blocks=24, blocks_per_chunk=2, packed=True),
}
REAL_SCATTER = HostMover.scatter


def last_left_out(self: HostMover, move: Any) -> None:
    """A load that brings all but the last group's blocks: the state, or the window."""
    if move.part.group == 0:
        REAL_SCATTER(self, move)


def elsewhere(self: HostMover, move: Any) -> None:
    """A load into the neighbours of the last group's blocks."""
    by = move.part.group
    part = dataclasses.replace(move.part, blocks=tuple(block + by for block in move.part.blocks))
    REAL_SCATTER(self, dataclasses.replace(move, part=part))


def also_the_null_block(self: HostMover, move: Any) -> None:
    """A load that touches block 0 of the last tensor."""
    REAL_SCATTER(self, move)
    self._rows[-1][0][-2:] += 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fault", [last_left_out, elsewhere, also_the_null_block])
def test_a_wrong_load_is_found(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, shape: str, fault: Callable[[HostMover, Any], None]
) -> None:
    if refused(rig, SHAPES[shape]):
        return
    first = rig.launch(SHAPES[shape])
    first.serve("cold", TOKENS)
    first.await_stores()
    second = rig.relaunch(first)
    monkeypatch.setattr(HostMover, "scatter", fault)
    with pytest.raises(PagesError):
        second.serve("restored", TOKENS)
