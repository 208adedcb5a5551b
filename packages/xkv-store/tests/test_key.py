"""Keys: round trip, order (a chunk's ranks together), refusal of bytes that are none, tags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xkv_store.errors import PeerError
from xkv_store.geometry import KEY_BYTES_MAX
from xkv_store.key import ObjectKey, chunk_tag, encoded_entry, rank_bit, ranks_mask, tag_salt

keys = st.builds(
    ObjectKey,
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 32) - 1),
    st.binary(min_size=1, max_size=32),
    st.integers(0, (1 << 16) - 1),
)


@given(keys)
def test_round_trip(key: ObjectKey) -> None:
    encoded = key.encode()
    assert ObjectKey.decode(encoded) == key
    assert encoded[:-2] == key.chunk_key
    assert len(encoded) <= KEY_BYTES_MAX
    assert encoded_entry(encoded) == (key.tag, key.bit)


@given(keys, st.integers(0, 65_535), keys)
def test_ranks_of_a_chunk_lie_together(key: ObjectKey, rank: int, other: ObjectKey) -> None:
    """If a rank were not last and big-endian, eviction of a whole chunk would need a scan."""
    sibling = ObjectKey(key.namespace, key.group, key.block_hash, rank)
    low, high = sorted([key.encode(), sibling.encode()])
    assert (key.rank <= rank) == (key.encode() <= sibling.encode())
    if other.chunk_key != key.chunk_key:
        assert not low < other.encode() < high


@given(st.binary(max_size=70))
def test_any_bytes_are_a_key_or_the_peers_error(data: bytes) -> None:
    try:
        key = ObjectKey.decode(data)
    except PeerError:
        with pytest.raises(PeerError):
            encoded_entry(data)
        return
    assert key.encode() == data
    assert encoded_entry(data) == (key.tag, key.bit)


@pytest.mark.parametrize(
    ("namespace", "group", "block_hash", "rank"),
    [
        (b"short", 0, b"h", 0),
        (bytes(16), -1, b"h", 0),
        (bytes(16), 1 << 32, b"h", 0),
        (bytes(16), 0, b"", 0),
        (bytes(16), 0, bytes(33), 0),
        (bytes(16), 0, b"h", 1 << 16),
    ],
)
def test_fields_out_of_range_are_refused(namespace: bytes, group: int, block_hash: bytes, rank: int) -> None:
    with pytest.raises(PeerError):
        ObjectKey(namespace, group, block_hash, rank)


def test_encoding_is_the_documented_one() -> None:
    key = ObjectKey(bytes(range(16)), 0x01020304, b"abc", 0x0506)
    assert key.encode() == bytes(range(16)) + b"\x01\x02\x03\x04" + b"\x03abc" + b"\x05\x06"


def test_tag_of_zero_becomes_one() -> None:
    salt = tag_salt(bytes(16), 0, 0)
    assert chunk_tag(salt, salt.to_bytes(8, "little")) == 1
    assert chunk_tag(salt, (salt ^ 2).to_bytes(8, "little")) == 2


def test_short_hash_is_padded_with_zeros() -> None:
    assert chunk_tag(0, b"\x05") == 5


def test_ranks_from_64_on_have_a_tag_of_their_own() -> None:
    """Without the page in the tag, rank 64 would set rank 0's bit and answer hits that are none."""
    low, high = (ObjectKey(bytes(16), 1, b"hash", rank) for rank in (3, 67))
    assert low.bit == high.bit == rank_bit(3) == 8
    assert low.tag != high.tag


@given(st.integers(1, 400))
def test_mask_has_each_rank_once(world_size: int) -> None:
    masks = ranks_mask(world_size)
    ranks = [64 * page + bit for page, mask in masks for bit in range(64) if mask >> bit & 1]
    assert ranks == list(range(world_size))
