"""A client goes away at every moment of a request's life, and nothing of the request is left behind.

Where a release asserts on an abort of its own accord, exactly the moments at which it does are pinned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import release
from harness.shapes import Shape, full, mla, sliding
from harness.walks import Walk, sweep

if TYPE_CHECKING:
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures", "harness.slow_copies")

SHAPES = {
    "one group": Shape(groups=(mla(layers=1),), blocks=64, blocks_per_chunk=2),
    "two groups": Shape(groups=(full(layers=1), sliding(window=40, layers=1)), blocks=96, blocks_per_chunk=2),
    "two ranks": Shape(groups=(full(layers=1),), blocks=64, blocks_per_chunk=2, ranks=2),
}


# Shape, whether the prompt's first part is on the card, and the tokens after it: whole chunks, or less than one.
WALKS = [(shape, warm, 70) for shape in SHAPES for warm in (False, True)] + [("one group", True, 5)]


@pytest.mark.usefixtures("copies_across_steps")
@pytest.mark.parametrize(("shape", "warm", "tail"), WALKS)
def test_an_abort_at_every_moment(rig: Rig, shape: str, warm: bool, tail: int) -> None:
    seen = sweep(rig, SHAPES[shape], Walk, warm=warm, tail=tail)
    assert len(set(seen)) == len(seen) >= 14, seen
    under_way = "read" if release.channel(SHAPES[shape]) == "verified" else "load"
    assert not warm or {f"{under_way} under way, done", "arrived", "load reported, executed"} <= set(seen)
