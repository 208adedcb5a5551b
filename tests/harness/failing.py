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

BLOCKS = 20
TOKENS = prompt(tokens=16 * BLOCKS + 3, seed=1)


def damage(rig: Rig, shape: Shape, block: int, *, rank: int = 0) -> None:
    """Change a byte of what the card holds of one block's second layer."""
    group = shape.groups[0]
    layer = group.layers[1]
    first = block * group.block_tokens
    content = Story(TOKENS).rows(
        layer=layer, rank=rank, start=first, end=first + group.block_tokens, row_bytes=group.row_bytes
    )
    # Within one slot's payload, wherever the object's fragments are cut.
    pieces = [content.reshape(-1)[at : at + 4096] for at in range(0, content.size, 4096)]
    assert sum(rig.gateway.damage(piece) for piece in pieces[:1]) == 1


def serve_again(engine: Engine, name: str) -> list[tuple[int, ...]]:
    """Serve the prompt once more, whole; what was loaded for it, of the first group."""
    engine.await_stores()
    engine.forget()
    request = engine.serve(name, TOKENS, output_tokens=2)
    assert request.finish_reason == "length"
    return request.loaded()
