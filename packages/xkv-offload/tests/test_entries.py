"""Which table entries a hit needs, and that tags of several gateways are told apart."""

import pytest

from xkv_offload.entries import entries, gateway_of, on_gateway, split
from xkv_store.key import ObjectKey, chunk_tag

NAMESPACE = b"n" * 16
HASH = bytes(range(32))


@pytest.mark.parametrize("ranks", [1, 8, 64, 70, 200])
@pytest.mark.parametrize("per_rank", [False, True])
def test_each_ranks_object_is_asked_for_where_its_gateway_publishes_it(ranks: int, per_rank: bool) -> None:
    found = entries(NAMESPACE, 3, ranks=ranks, gateways=ranks if per_rank else 1)
    asked: dict[int, tuple[int, int, int]] = {}
    for entry in found:
        for rank in entry.ranks:
            asked[rank] = (*split(chunk_tag(entry.salt, HASH)), entry.bits)
    assert sorted(asked) == list(range(ranks))
    for rank, (gateway, tag, bits) in asked.items():
        key = ObjectKey(NAMESPACE, 3, HASH, rank)
        assert (gateway, tag) == (rank if per_rank else 0, key.tag)
        assert bits & key.bit
    assert sum(entry.bits.bit_count() for entry in found) == ranks, "and nothing else is needed"


def test_one_gateway_is_asked_once_for_64_ranks() -> None:
    assert [len(entries(NAMESPACE, 0, ranks=ranks, gateways=1)) for ranks in (1, 64, 65)] == [1, 1, 2]


def test_a_tag_carries_its_gateway() -> None:
    assert gateway_of(on_gateway(7, 5)) == 5
    assert split(on_gateway(7, 5)) == (5, 7)
    assert split(on_gateway((1 << 64) - 1, 1)) == (1, (1 << 64) - 1)


def test_a_salt_that_cancels_the_hash_gives_the_tag_of_the_table() -> None:
    """A table has no tag 0; with a gateway's number above it a chunk's tag would be none of it."""
    salt = int.from_bytes(HASH[:8], "little")
    assert split(chunk_tag(on_gateway(salt, 2), HASH)) == (2, chunk_tag(salt, HASH))
