"""A prompt on the card of which a part goes bad, and how it is asked for again.

Owns: that prompt, the damage done to one of its blocks on the medium, the asking with nothing in the engine itself.
Must not know: policies, channels, what a test expects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.story import Story, prompt

if TYPE_CHECKING:
    from harness.engine import Engine
    from harness.rig import Rig
    from harness.shapes import Shape
    from harness.story import Bytes

BLOCKS = 20
TOKENS = prompt(tokens=16 * BLOCKS + 3, seed=1)


def damage(rig: Rig, shape: Shape, block: int, *, rank: int = 0) -> None:
    """Change a byte of what the card holds of one block's second layer."""
    content = content_of(shape, block, rank=rank)
    assert sum(gateway.damage(content) for gateway in rig.gateways) == 1


def content_of(shape: Shape, block: int, *, rank: int) -> Bytes:
    """What the card holds of one block's second layer: as much of it as lies within one slot, whatever the chunk."""
    group = shape.groups[0]
    first = block * group.block_tokens
    rows = Story(TOKENS).rows(
        layer=group.layers[1], rank=rank, start=first, end=first + group.block_tokens, row_bytes=group.row_bytes
    )
    return rows.reshape(-1)[:4096]


def serve_again(engine: Engine, name: str) -> list[tuple[int, ...]]:
    """Serve the prompt once more, whole; what was loaded for it, of the first group."""
    engine.await_stores()
    engine.forget()
    request = engine.serve(name, TOKENS, output_tokens=2)
    assert request.finish_reason == "length"
    return request.loaded()
