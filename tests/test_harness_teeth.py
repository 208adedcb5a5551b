"""The harness itself: each fault that it is there to find is made on purpose, and must be found."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import pytest

from harness.memory import PagesError
from harness.shapes import Shape, full, mla
from harness.story import prompt
from xkv_offload.copy import HostMover
from xkv_offload.worker import XkvWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

TOKENS = prompt(tokens=16 * 8 + 1, seed=1)


def restore(rig: Rig, shape: Shape) -> None:
    first = rig.launch(shape)
    first.serve("cold", TOKENS)
    rig.gateway.await_objects(8 // shape.blocks_per_chunk)
    rig.relaunch(first).serve("restored", TOKENS)


def with_part(move: Any, **changes: Any) -> Any:
    return dataclasses.replace(move, part=dataclasses.replace(move.part, **changes))


def nothing(self: HostMover, move: Any) -> None:
    """A load that is reported and brought nothing."""


def elsewhere(self: HostMover, move: Any) -> None:
    """A load into the neighbours of its blocks."""
    REAL_SCATTER(self, with_part(move, blocks=tuple(block + 1 for block in move.part.blocks)))


def swapped(self: HostMover, move: Any) -> None:
    """A load that mixes up the blocks of a chunk."""
    REAL_SCATTER(self, with_part(move, blocks=move.part.blocks[::-1]))


def also_the_null_block(self: HostMover, move: Any) -> None:
    """A load that touches block 0."""
    REAL_SCATTER(self, move)
    self._rows[0][0][5:8] = 0


def also_padding(self: HostMover, move: Any) -> None:
    """A load that writes behind a page."""
    REAL_SCATTER(self, move)
    self._rows[0][move.part.blocks[0]][-3:] = 0


REAL_SCATTER = HostMover.scatter


@pytest.mark.parametrize("fault", [nothing, elsewhere, swapped, also_the_null_block, also_padding])
def test_a_wrong_load_is_found(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fault: Callable[[HostMover, Any], None]
) -> None:
    shape = Shape(groups=(full(padding_bytes=256),), blocks=32, blocks_per_chunk=2)
    monkeypatch.setattr(HostMover, "scatter", fault)
    with pytest.raises(PagesError):
        restore(rig, shape)


def test_a_right_load_passes(rig: Rig) -> None:
    restore(rig, Shape(groups=(full(padding_bytes=256),), blocks=32, blocks_per_chunk=2))


def test_a_wait_that_does_not_wait_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = HostMover.gather

    def slowly(self: HostMover, move: Any) -> None:
        time.sleep(0.02)
        gather(self, move)

    def without_waiting(self: XkvWorker, job_ids: set[int]) -> None: ...

    monkeypatch.setattr(HostMover, "gather", slowly)
    monkeypatch.setattr(XkvWorker, "wait", without_waiting)
    shape = Shape(groups=(mla(layers=2),), blocks=12, blocks_per_chunk=2)
    engine = rig.launch(shape)
    prompts = [prompt(tokens=16 * 8 + 1, seed=seed) for seed in (3, 4, 5)]
    for number, tokens in enumerate(prompts):
        engine.submit(str(number), tokens)
    engine.run()
    rig.gateway.await_objects(12)
    again = rig.relaunch(engine)
    for number, tokens in enumerate(prompts):
        again.submit(f"again {number}", tokens)
    with pytest.raises(PagesError):
        again.run()


def test_a_restored_prompt_of_another_model_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if an identity were blind to what differs: the bytes are whole and verified, and still wrong.
    restore_shape = Shape(groups=(mla(layers=2),), blocks=32, blocks_per_chunk=2)
    first = rig.launch(restore_shape)
    first.serve("cold", TOKENS)
    rig.gateway.await_objects(4)
    second = rig.relaunch(first)
    other = second.submit("restored", TOKENS)
    monkeypatch.setattr(other.story, "_prefixes", [number * 7 for number in range(400)])
    with pytest.raises(PagesError):
        second.run()
