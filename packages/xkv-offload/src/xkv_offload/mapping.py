"""From vLLM's block lists to chunks: which GPU block is which sub-block of which key.

Owns: the formula of the framework (group sizes, block indices, blocks per chunk) and the decision which chunks can
be attributed with certainty. The only module that may speak both of vLLM's spans and of our fragments.
Must not know: vLLM's classes, torch, slots, the gateway. Pure; all integers are Python's (callers convert).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The blocks of one chunk that a job moves.

    `key`: index into the job's keys. `group`: position of the group. `first`: number of the first sub-block in the
    chunk. `blocks`: GPU block ids of the sub-blocks `first`, `first + 1`, …
    """

    key: int
    group: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What can be stored of a job, and the keys that cannot (indices into the job's keys)."""

    parts: tuple[ChunkPart, ...]
    left_out: tuple[int, ...]


class MappingError(ValueError):
    """A job's keys and blocks do not match: nothing of it may be moved."""


def plan_load(
    *,
    key_groups: Sequence[int],
    block_ids: Sequence[int],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    blocks_per_chunk: int,
) -> tuple[ChunkPart, ...]:
    """Map a load's blocks to its keys.

    `key_groups`: position of the group of each key, group-major. A load's blocks are consecutive in each group, so
    the j-th block of a group goes to sub-block `index % blocks_per_chunk + j` of the group's keys laid end to end.
    Raises MappingError if the number of keys is not the one that the blocks need, or block 0 is among them.
    """
    _check_shapes(block_ids, group_sizes, block_indices)
    if 0 in block_ids:
        raise MappingError("block 0 (the null block) is asked for")
    parts: list[ChunkPart] = []
    taken = 0
    for group, (size, index) in enumerate(zip(group_sizes, block_indices, strict=True)):
        keys = [i for i, owner in enumerate(key_groups) if owner == group]
        skip = index % blocks_per_chunk if size else 0
        needed = -(-(skip + size) // blocks_per_chunk)
        if len(keys) != needed:
            raise MappingError(f"group {group}: {size} blocks from {index} need {needed} keys, there are {len(keys)}")
        parts += _cut(keys, group, block_ids[taken : taken + size], skip, blocks_per_chunk)
        taken += size
    _check_groups(key_groups, group_sizes)
    return tuple(parts)


def plan_store(
    *,
    key_groups: Sequence[int],
    block_ids: Sequence[int],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    blocks_per_chunk: int,
    lone_last_block: Sequence[bool],
) -> StorePlan:
    """Map a store's blocks to its keys, leaving out what is not whole or not certain.

    vLLM drops null blocks from the list without saying where they were; `index` tells only where the first block of
    the first chunk lies. With k keys, n blocks and `skip` blocks missing at the head of the first chunk, all other
    chunks are whole if and only if skip + n = k · blocks_per_chunk; otherwise a hole lies somewhere in the group and
    none of its chunks is stored. The first chunk is whole only if `skip` is 0. In a group for which `lone_last_block`
    (by position) says that a chunk's last block alone is the chunk by design (Mamba), a chunk that is not whole is
    its last block; vLLM never offers a chunk without that one, so the last block of all is certain in spite of holes.
    Raises MappingError where the shapes of the job contradict each other.
    """
    _check_shapes(block_ids, group_sizes, block_indices)
    _check_groups(key_groups, group_sizes)
    parts: list[ChunkPart] = []
    left_out: list[int] = []
    taken = 0
    for group, (size, index) in enumerate(zip(group_sizes, block_indices, strict=True)):
        keys = [i for i, owner in enumerate(key_groups) if owner == group]
        blocks = block_ids[taken : taken + size]
        taken += size
        skip = index % blocks_per_chunk if size else 0
        missing = len(keys) * blocks_per_chunk - skip - size
        if 0 in blocks or missing:
            if lone_last_block[group] and blocks and 0 not in blocks and missing > 0:
                parts.append(ChunkPart(keys.pop(), group, blocks_per_chunk - 1, (blocks[-1],)))
            left_out += keys
            continue
        cut = _cut(keys, group, blocks, skip, blocks_per_chunk)
        if skip and lone_last_block[group]:
            cut[0] = ChunkPart(keys[0], group, blocks_per_chunk - 1, cut[0].blocks[-1:])
        elif skip:
            left_out.append(keys[0])
            del cut[0]
        parts += cut
    return StorePlan(tuple(parts), tuple(left_out))


def _cut(keys: Sequence[int], group: int, blocks: Sequence[int], skip: int, blocks_per_chunk: int) -> list[ChunkPart]:
    parts = []
    at = 0
    for number, key in enumerate(keys):
        first = skip if number == 0 else 0
        end = min(at + blocks_per_chunk - first, len(blocks))
        parts.append(ChunkPart(key, group, first, tuple(blocks[at:end])))
        at = end
    return parts


def _check_shapes(block_ids: Sequence[int], group_sizes: Sequence[int], block_indices: Sequence[int]) -> None:
    if len(group_sizes) != len(block_indices) or sum(group_sizes) != len(block_ids):
        raise MappingError(
            f"{len(block_ids)} blocks for group sizes {list(group_sizes)} and indices {list(block_indices)}"
        )


def _check_groups(key_groups: Sequence[int], group_sizes: Sequence[int]) -> None:
    if any(not 0 <= group < len(group_sizes) for group in key_groups):
        raise MappingError(f"a key's group is none of the {len(group_sizes)} groups")
    if list(key_groups) != sorted(key_groups):
        raise MappingError("the keys are not group-major")
