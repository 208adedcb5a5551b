"""Which entries of lookup tables speak of a chunk.

Owns: `Entry`, and how a tag carries the number of a gateway where each rank has one of its own.
Must not know: tables, clients, vLLM.
"""

from typing import Final, NamedTuple

from xkv_store.geometry import RANKS_PER_ENTRY
from xkv_store.key import chunk_tag, rank_bit, ranks_mask, tag_salt

_TAG_BITS: Final = 64  # of a tag in a table; the gateway's number stands above them
_TAG_MASK: Final = (1 << _TAG_BITS) - 1


class Entry(NamedTuple):
    """What an entry must say for a hit: `bits` of these `ranks`, under the tag that `salt` gives (`chunk_tag`)."""

    salt: int
    bits: int
    ranks: range


def entries(namespace: bytes, group: int, *, ranks: int, gateways: int) -> tuple[Entry, ...]:
    """The entries that a hit needs: those of all `ranks` on one gateway, or each rank's on its own.

    With several gateways a tag has the number of its gateway above its 64 bits (see `split`).
    """
    if gateways == 1:
        return tuple(
            Entry(
                tag_salt(namespace, group, page),
                bits,
                range(page * RANKS_PER_ENTRY, page * RANKS_PER_ENTRY + bits.bit_length()),
            )
            for page, bits in ranks_mask(ranks)
        )
    assert gateways == ranks, "one gateway, or one for each rank"
    return tuple(
        Entry(
            on_gateway(tag_salt(namespace, group, rank // RANKS_PER_ENTRY), rank),
            rank_bit(rank),
            range(rank, rank + 1),
        )
        for rank in range(ranks)
    )


def on_gateway(tag: int, gateway: int) -> int:
    """A tag (or salt) of one gateway's table, told apart from the same one of another's."""
    return gateway << _TAG_BITS | tag


def gateway_of(tag: int) -> int:
    """The gateway whose table has this tag."""
    return tag >> _TAG_BITS


def split(tag: int) -> tuple[int, int]:
    """The gateway whose table has this tag, and the tag as it stands there."""
    return tag >> _TAG_BITS, (tag & _TAG_MASK) or chunk_tag(0, b"")  # no tag is 0 there
