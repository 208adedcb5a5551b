"""What a release offers of one prompt for storing.

Owns: the chunks of each group that the connector stores of a prompt which it computes from the first token on, by
the rules of the framework.
Must not know: vLLM, what we do with an offer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_compat.features import detect_live

if TYPE_CHECKING:
    from harness.shapes import Shape


def offered(shape: Shape, tokens: int) -> list[range]:
    """For each group: the numbers of the chunks that are stored of a prompt of so many tokens.

    A release that knows what a window can need offers the window's chunks at the end of the longest prefix that can
    be hit: whole chunks before the last token, which is always computed. Where its blocks do not fit into such chunks
    it offers all.
    """
    found = []
    for group in shape.groups:
        chunk_tokens = group.block_tokens * shape.blocks_per_chunk
        chunks = tokens // chunk_tokens
        span = _span(shape)
        if group.window is None or span % group.block_tokens or not detect_live()["window_store_mask"]:
            found.append(range(chunks))
            continue
        end = (tokens - 1) // span * span // group.block_tokens
        first = max(0, end - -(-(group.window - 1) // group.block_tokens))
        found.append(range(first // shape.blocks_per_chunk, min(chunks, -(-end // shape.blocks_per_chunk))))
    return found


def _span(shape: Shape) -> int:
    """Tokens of what a hit is made of: a chunk of full attention, or the longest chunk where there is none."""
    full = {group.block_tokens for group in shape.groups if group.window is None}
    (tokens,) = full or {max(group.block_tokens for group in shape.groups)}
    return tokens * shape.blocks_per_chunk
