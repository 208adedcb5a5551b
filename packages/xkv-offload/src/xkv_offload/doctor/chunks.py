"""What chunks of a model come to on a card, and when it pays to restore them.

Owns: fragments and waste for each `blocks_per_chunk`, which of them to take, and the break-even of restoring a
prompt against computing it. Must not know: files, gateways, how a rate was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xkv_store.doctor.findings import Finding, fault, note, ok, warning
from xkv_store.geometry import Geometry
from xkv_store.sizes import format_size
from xkv_store.wire import SLOTS_PER_OBJECT_MAX

from .model import ModelShape

BLOCKS_PER_CHUNK = (1, 2, 4, 8, 16, 32, 64, 128)
CHUNK_TOKENS_MAX = 2_048
"""Recommended at most: a prompt's tail that is no whole chunk is computed, half of one on average."""
WASTE_SMALL = 0.05  # no reason for a larger chunk
WASTE_MUCH = 0.15  # of the card: worth a warning where another chunk wastes less
WASTE_LESS = 0.05  # by how much less


@dataclass(frozen=True, slots=True)
class GroupChunk:
    """One group's object: its bytes on one rank, and the fragments that it is cut into."""

    kind: str
    object_bytes: int
    fragments: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A chunk of `blocks` blocks. `waste`: the share of its slots that holds nothing. `refused`: why it cannot be."""

    blocks: int
    tokens: int
    groups: tuple[GroupChunk, ...]
    waste: float
    refused: str = ""

    def as_value(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "blocks_per_chunk": self.blocks,
            "tokens": self.tokens,
            "object_bytes": [group.object_bytes for group in self.groups],
            "fragments": [group.fragments for group in self.groups],
            "waste": round(self.waste, 4),
            "refused": self.refused,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a rank's part of the ring holds at once, in slots, and the geometry that objects are cut by."""

    geometry: Geometry
    store_slots: int
    load_slots: int


def plan_chunk(shape: ModelShape, *, block_tokens: int, blocks: int, room: Room, holes: bool = False) -> ChunkPlan:
    """One size of chunk. `holes`: this vLLM offers chunks of several blocks with some of them missing."""
    geometry = room.geometry
    sizes = [group.token_bytes * block_tokens * blocks for group in shape.groups]
    groups = tuple(
        GroupChunk(group.kind, size, geometry.fragments(size)) for group, size in zip(shape.groups, sizes, strict=True)
    )
    slots = sum(group.fragments for group in groups)
    largest = max(group.fragments for group in groups)
    refused = ""
    if largest > min(SLOTS_PER_OBJECT_MAX, room.store_slots, room.load_slots):
        ring = f"{room.store_slots} for stores and {room.load_slots} for loads"
        refused = f"an object has {largest} fragments, and a rank's part of the ring holds {ring}"
    elif holes and blocks > 1 and len({group.kind for group in groups}) > 1:
        refused = "this vLLM offers such chunks of sliding windows with holes, and those are not stored"
    return ChunkPlan(blocks, blocks * block_tokens, groups, 1 - sum(sizes) / (slots * geometry.slot_bytes), refused)


def recommended(plans: Sequence[ChunkPlan]) -> ChunkPlan | None:
    """The smallest chunk that wastes little; else the one that wastes least. None where none is possible."""
    possible = [plan for plan in plans if not plan.refused]
    short = [plan for plan in possible if plan.tokens <= CHUNK_TOKENS_MAX] or possible[:1]
    small = [plan for plan in short if plan.waste <= WASTE_SMALL]
    return min(small, key=lambda plan: plan.blocks) if small else min(short, key=lambda plan: plan.waste, default=None)


def examine_chunks(plans: Sequence[ChunkPlan], given: ChunkPlan | None, *, in_tokens: bool) -> list[Finding]:
    """What each size comes to, which to take, and whether the given one is wasteful.

    `in_tokens`: this vLLM takes the chunk as `block_size`, in tokens.
    """
    best = recommended(plans)
    found = []
    for plan in plans:
        mark = "; recommended" if best is not None and plan.blocks == best.blocks else ""
        found.append(note("chunks", f"{_text(plan)}{f'; not possible: {plan.refused}' if plan.refused else mark}"))
    if best is None:
        what = "no chunk is possible: " + plans[0].refused
        found.append(fault("chunk size", what, "the engine does not start", "give a larger xkv.ring_bytes"))
        return found
    key = f'"block_size":{best.tokens}' if in_tokens else f'"blocks_per_chunk":{best.blocks}'
    if given is None:
        found.append(ok("chunk size", f"recommended: {key}, {best.tokens} tokens"))
    elif given.refused:
        found.append(fault("chunk size", given.refused, "nothing of it is stored, or nothing starts", f"give {key}"))
    elif given.waste > WASTE_MUCH and best.waste < given.waste - WASTE_LESS:
        what = f"blocks_per_chunk {given.blocks} is wasteful: {given.waste:.0%} of each slot's bytes hold nothing"
        follows = f"the card keeps {(1 - given.waste) / (1 - best.waste):.0%} of what it could, and more is read"
        found.append(warning("chunk size", what, follows, f"give {key} ({best.waste:.1%} waste)"))
    else:
        found.append(ok("chunk size", f"blocks_per_chunk {given.blocks}: {given.waste:.1%} waste"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What restoring and computing take. `start_s`: before the first byte of a restore."""

    read_bytes_per_s: float
    prefill_tokens_per_s: float
    start_s: float


def break_even_tokens(token_bytes: int, rates: Rates, *, chunk_tokens: int) -> int | None:
    """Tokens above which restoring is quicker than computing, in whole chunks; None where it never is."""
    gain_s = 1 / rates.prefill_tokens_per_s - token_bytes / rates.read_bytes_per_s
    if gain_s <= 0:
        return None
    tokens = int(rates.start_s / gain_s) + 1
    return -(-tokens // chunk_tokens) * chunk_tokens


def examine_break_even(shape: ModelShape, rates: Rates, *, chunk_tokens: int) -> tuple[Finding, int | None]:
    """Whether restoring pays on this machine, and from which prompt on."""
    tokens = break_even_tokens(shape.engine_token_bytes, rates, chunk_tokens=chunk_tokens)
    restore = rates.read_bytes_per_s / shape.engine_token_bytes
    pace = f"this card restores {restore:,.0f} tokens/s, and prefill computes {rates.prefill_tokens_per_s:,.0f}"
    if tokens is None:
        needed = format_size(int(rates.prefill_tokens_per_s * shape.engine_token_bytes))
        return (
            warning(
                "break-even",
                f"restoring never beats computing: {pace}",
                "every hit makes its request slower, though it spares the GPU the work",
                f"a medium that reads more than {needed}/s (several devices: --database, once for each), a smaller "
                '--dtype (fp8), or "xkv.restore_policy": "when_faster"',
            ),
            None,
        )
    return ok("break-even", f"restoring beats computing from {tokens} tokens on: {pace}"), tokens


def model_value(shape: ModelShape, plans: Sequence[ChunkPlan]) -> Mapping[str, Any]:
    """For JSON."""
    best = recommended(plans)
    return {
        "groups": [{"kind": one.kind, "layers": one.layers, "token_bytes": one.token_bytes} for one in shape.groups],
        "dtype": shape.dtype,
        "ranks": shape.ranks,
        "replicated": shape.replicated,
        "rank_token_bytes": shape.rank_token_bytes,
        "engine_token_bytes": shape.engine_token_bytes,
        "chunks": [plan.as_value() for plan in plans],
        "recommended_blocks_per_chunk": None if best is None else best.blocks,
    }


def _text(plan: ChunkPlan) -> str:
    sizes = ", ".join(
        f"{format_size(one.object_bytes)} in {one.fragments} fragments" for one in dict.fromkeys(plan.groups)
    )
    return f"blocks_per_chunk {plan.blocks}: {plan.tokens} tokens, {sizes}, {plan.waste:.1%} waste"
