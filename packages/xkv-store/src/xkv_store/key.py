"""Keys of objects, and the tags under which the lookup table knows their chunks.

Owns the key's bytes and the tag's arithmetic (docs/format.md). Must not know files, tables or who asks.
"""

import struct
from dataclasses import dataclass, field
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from .errors import PeerError
from .geometry import HASH_BYTES_MAX, NAMESPACE_BYTES, RANK_MAX, RANKS_PER_ENTRY

_GROUP_MAX = (1 << 32) - 1
_PREFIX = struct.Struct(">16sIB")  # namespace, group, hash length
_RANK = struct.Struct(">H")
_HASH_AT = _PREFIX.size
_SALT = struct.Struct(">16sIH")  # namespace, group, rank page
_TAG_OF_ZERO = 1  # tag 0 is an empty entry of the lookup table

RANK_BYTES = _RANK.size


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    """What an object is known by: (namespace, group, block hash, rank).

    `tag`: the chunk's in the lookup table, for this rank's page of ranks. It and the key's bytes are made once, since
    both are asked for several times on an object's way.
    """

    namespace: bytes
    group: int
    block_hash: bytes
    rank: int
    _encoded: bytes = field(init=False, repr=False, compare=False)
    tag: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """PeerError for a field that the format has no room for: keys come from sockets and from disk."""
        if len(self.namespace) != NAMESPACE_BYTES:
            raise PeerError(f"a namespace has {NAMESPACE_BYTES} bytes, not {len(self.namespace)}")
        if not 0 <= self.group <= _GROUP_MAX:
            raise PeerError(f"group {self.group} is not within 0 to {_GROUP_MAX}")
        if not 1 <= len(self.block_hash) <= HASH_BYTES_MAX:
            raise PeerError(f"a block hash has 1 to {HASH_BYTES_MAX} bytes, not {len(self.block_hash)}")
        if not 0 <= self.rank <= RANK_MAX:
            raise PeerError(f"rank {self.rank} is not within 0 to {RANK_MAX}")
        prefix = _PREFIX.pack(self.namespace, self.group, len(self.block_hash))
        salt = tag_salt(self.namespace, self.group, self.rank // RANKS_PER_ENTRY)
        object.__setattr__(self, "_encoded", prefix + self.block_hash + _RANK.pack(self.rank))
        object.__setattr__(self, "tag", chunk_tag(salt, self.block_hash))

    @property
    def chunk_key(self) -> bytes:
        """The encoded key less its rank: what the ranks of a chunk have in common."""
        return self._encoded[:-RANK_BYTES]

    @property
    def bit(self) -> int:
        """This rank's bit in the entry of its tag."""
        return rank_bit(self.rank)

    def encode(self) -> bytes:
        """The key's bytes, as in the index and in slot headers."""
        return self._encoded

    @classmethod
    def decode(cls, encoded: bytes) -> "ObjectKey":
        """The key whose bytes these are; PeerError when they are none."""
        if len(encoded) < _HASH_AT + 1 + RANK_BYTES:
            raise PeerError(f"an object key of {len(encoded)} bytes is too short")
        namespace, group, hash_bytes = _PREFIX.unpack_from(encoded)
        if len(encoded) != _HASH_AT + hash_bytes + RANK_BYTES:
            raise PeerError(f"an object key of {len(encoded)} bytes cannot hold a hash of {hash_bytes}")
        (rank,) = _RANK.unpack_from(encoded, _HASH_AT + hash_bytes)
        return cls(namespace, group, bytes(encoded[_HASH_AT : _HASH_AT + hash_bytes]), rank)


def encoded_entry(encoded: bytes) -> tuple[int, int]:
    """(tag, bit) of an encoded key, as `ObjectKey` has them; PeerError where it is none. Faster than decoding it."""
    hash_bytes = len(encoded) - _HASH_AT - RANK_BYTES
    if not 1 <= hash_bytes <= HASH_BYTES_MAX or encoded[_HASH_AT - 1] != hash_bytes:
        raise PeerError(f"an object key of {len(encoded)} bytes cannot be one")
    namespace, group, _ = _PREFIX.unpack_from(encoded)
    rank = int.from_bytes(encoded[-RANK_BYTES:], "big")
    salt = tag_salt(namespace, group, rank // RANKS_PER_ENTRY)
    return chunk_tag(salt, encoded[_HASH_AT:-RANK_BYTES]), rank_bit(rank)


@lru_cache(maxsize=4096)  # namespaces × groups × pages of ranks that one process talks about
def tag_salt(namespace: bytes, group: int, rank_page: int) -> int:
    """What is mixed into the tags of one (namespace, group, page of 64 ranks)."""
    return xxh3_64_intdigest(_SALT.pack(namespace, group, rank_page))


def chunk_tag(salt: int, block_hash: bytes) -> int:
    """The tag of the chunk with this block hash: 1 to 2^64-1."""
    return int.from_bytes(block_hash[:8], "little") ^ salt or _TAG_OF_ZERO


def rank_bit(rank: int) -> int:
    """The bit of `rank` in the entry of its tag."""
    return 1 << (rank % RANKS_PER_ENTRY)


def ranks_mask(world_size: int) -> list[tuple[int, int]]:
    """What a hit of all of `world_size` ranks needs: (page of ranks, bits) for each page."""
    masks = []
    for page in range(-(-world_size // RANKS_PER_ENTRY)):
        ranks = min(RANKS_PER_ENTRY, world_size - page * RANKS_PER_ENTRY)
        masks.append((page, (1 << ranks) - 1))
    return masks
