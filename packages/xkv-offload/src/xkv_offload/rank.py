"""What one rank is.

Owns: `RankContext`, everything fixed that a worker's jobs need: the attachment, the layouts, the mover, the way of
reporting failures.
Must not know: jobs, vLLM.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xkv_store.client import Client
from xkv_store.key import ObjectKey, chunk_tag, tag_salt
from xkv_store.left_out import FIRST_NUMBER, NUMBERS, LeftOut

from .copy import Mover, RingSlots
from .failures import FailureLog, Plan
from .layout import ObjectLayout
from .mapping import MappingError
from .metrics import WORKER_COUNTERS, count, worker_number

LEFT_OUT: Mapping[str, LeftOut] = {
    "shed_objects": LeftOut.NO_SLOT,
    "partial_chunks": LeftOut.PARTIAL,
    "suspect_chunks": LeftOut.SUSPECT,
}
"""What the gateway is told too, by counter: no store comes to it."""
assert len(WORKER_COUNTERS) <= FIRST_NUMBER


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank of one engine.

    `rank`: its number on its gateway (0 where it has one of its own). `object_rank`: the rank in its objects' keys (0
    on every rank where one object serves all); `writes`: whether this rank puts them. `layouts`, `lone_last_block`: by
    position of the group. `positions`: vLLM's group number to position. `recomputes`: what vLLM does
    with a request whose load failed.
    """

    client: Client
    rank: int
    object_rank: int
    writes: bool
    blocks_per_chunk: int
    fragment_bytes: int
    layouts: Sequence[ObjectLayout]
    lone_last_block: Sequence[bool]
    positions: Mapping[int, int]
    mover: Mover
    load_timeout_s: float
    failure_plan: Plan
    failures: FailureLog
    recomputes: bool = False

    def key_groups(self, keys: Sequence[bytes]) -> list[int]:
        """The position of each offload key's group. Raises MappingError for a group that the engine has not."""
        try:
            return [self.positions[int.from_bytes(key[-4:], "big")] for key in keys]
        except KeyError as error:
            raise MappingError(f"group {error.args[0]} is none of this engine's") from None

    def object_key(self, namespace: bytes, key: bytes) -> ObjectKey:
        """The card's key of this rank's object of an offload key."""
        return ObjectKey(namespace, int.from_bytes(key[-4:], "big"), key[:-4], self.object_rank)

    def slots(self, numbers: Sequence[int]) -> RingSlots:
        """The ring's slots of these numbers."""
        return RingSlots(self.client.ring.array, numbers)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of this process, and of this rank for its scheduler. Any thread."""
        count(name, amount)
        control = self.client.control
        control.add_count(self.rank, worker_number(name), amount)
        if name in LEFT_OUT:
            control.add_count(self.rank, NUMBERS[LEFT_OUT[name]], amount)

    def deny(self, key: ObjectKey) -> None:
        """Make the engine's lookups miss what the card holds under `key` now."""
        tag = chunk_tag(tag_salt(key.namespace, key.group, key.rank // 64), key.block_hash)
        table = self.client.table
        entry = table.lookup(tag)
        self.client.control.deny(self.rank, tag, entry[0] if entry is not None else table.highest_generation)
