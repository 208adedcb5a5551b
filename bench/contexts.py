"""What a worker is given, where no engine gives it.

Owns: the context of a rank that has one group of chunks. Must not know: tensors, how its mover copies, vLLM.
"""

from xkv_offload.copy import Mover
from xkv_offload.failures import FailureLog, Plan
from xkv_offload.layout import ObjectLayout
from xkv_offload.rank import RankContext
from xkv_store.client import Client
from xkv_store.geometry import HEADER_BYTES


def rank_context(
    client: Client, mover: Mover, layout: ObjectLayout, *, load_timeout_s: float, rank: int = 0
) -> RankContext:
    """One rank, its mover at the ring; all ranks of an engine have the same objects, and the first stores them."""
    mover.use_ring(client.ring.array, [range(client.ring.slots)])
    return RankContext(
        client=client,
        rank=rank,
        object_rank=0,
        writes=rank == 0,
        blocks_per_chunk=layout.blocks_per_chunk,
        fragment_bytes=client.ring.slot_bytes - HEADER_BYTES,
        layouts=[layout],
        lone_last_block=[False],
        positions={0: 0},
        mover=mover,
        load_timeout_s=load_timeout_s,
        failure_plan=Plan("block_errors", ""),
        failures=FailureLog(),
    )
