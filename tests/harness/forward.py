"""The stand-in for a model: what one rank's forward pass writes into its pages, and what it must find there.

Owns: block tables as a model runner keeps them, tokens' rows, recurrent states and where they are kept, new blocks'
zeros and copies of shared blocks, what a loaded block must hold.
Must not know: the connector, jobs, how requests are scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import release
from harness.memory import PagesError, RankMemory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from harness.shapes import Shape
    from harness.story import Bytes, Story


@dataclass(frozen=True, slots=True)
class Turn:
    """A step's number, and the last step whose outcome the scheduler knew when it decided on this one."""

    number: int
    heard: int


class Model:
    """One rank's part of the model, on one memory."""

    def __init__(self, shape: Shape, *, rank: int, stories: Mapping[str, Story], memory: RankMemory) -> None:
        self._shape = shape
        self._content_rank = 0 if shape.identical_ranks else rank
        self._stories = stories
        self._memory = memory
        self._tables: dict[str, list[list[int]]] = {}
        self._wrong: dict[int, int] = {}  # block to the step whose failed load has left it so
        self._states: dict[tuple[str, int], int] = {}  # request and group to the block that holds its running state

    def update(self, scheduled: Any) -> None:
        """Take over block tables, then make new and copied blocks what the step expects them to be."""
        cached = scheduled.scheduled_cached_reqs
        gone = set(scheduled.finished_req_ids) | set(scheduled.preempted_req_ids or ()) | set(cached.resumed_req_ids)
        self._states = {place: block for place, block in self._states.items() if place[0] not in gone}
        for req_id in scheduled.finished_req_ids:
            self._tables.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                self._tables[req_id] = [list(group) for group in blocks]
            elif blocks is not None:
                for known, more in zip(self._tables[req_id], blocks, strict=True):
                    known.extend(more)
        for block in scheduled.new_block_ids_to_zero or ():
            for group in self._shape.groups:
                for layer in group.layers if group.kind != "mamba" else ():
                    self._memory.clear(layer, block)
        for copy in release.block_copies(scheduled):
            self._memory.copy(copy.src_block_id, copy.dst_block_id)

    def forward(self, scheduled: Any, turn: Turn, unfilled: Collection[int] = ()) -> dict[str, list[int]]:
        """Write what every scheduled token leaves behind, read what it needs, and say the next token.

        Blocks in `unfilled` hold nothing of use: a load inside this step has failed. Until the scheduler has heard of
        it, requests may read them; they leave wrong rows behind and say a wrong token, as do those that read these.
        """
        self._wrong = {block: step for block, step in self._wrong.items() if step > turn.heard}
        self._wrong |= dict.fromkeys(unfilled, turn.number)
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = {}
        for req_id, count in scheduled.num_scheduled_tokens.items():
            start, end = starts[req_id], starts[req_id] + count
            for group, one in enumerate(self._shape.groups):
                if one.kind == "mamba":
                    self._advance(req_id, group, start, end)
                else:
                    self._write(req_id, group, start, end)
            attending = [group for group, one in enumerate(self._shape.groups) if one.kind not in ("mamba", "ring")]
            sound = all(self._read(req_id, group, start, end) for group in attending)
            if not sound:
                self._spoil(req_id, attending, start, end)
            story = self._stories[req_id]
            said = story.tokens(end, end + 1) if end >= story.prompt_length else []
            sampled[req_id] = said if sound else [token + 1 for token in said]
        return sampled

    # --- rows of tokens ------------------------------------------------------------------------------------------

    def _spans(self, req_id: str, group: int, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(block id, first row, first position, last position + 1) of the blocks that hold these positions."""
        tokens = self._shape.groups[group].block_tokens
        blocks = self._tables[req_id][group]
        is_ring = self._shape.groups[group].kind == "ring"
        while start < end:
            stop = min(end, (start // tokens + 1) * tokens)
            yield blocks[0 if is_ring else start // tokens], start % tokens, start, stop
            start = stop

    def _write(self, req_id: str, group: int, start: int, end: int) -> None:
        for block, row, first, stop in self._spans(req_id, group, start, end):
            assert block != 0, f"{req_id} computes into the null block"
            for layer in self._shape.groups[group].layers:
                self._memory.write(layer, block, row, self._rows(req_id, layer, first, stop))

    def _spoil(self, req_id: str, groups: Sequence[int], start: int, end: int) -> None:
        """Make the rows of these positions wrong, for as long as what they follow from may be read."""
        until = max(self._wrong.values())
        for group in groups:
            for block, row, first, stop in self._spans(req_id, group, start, end):
                self._wrong[block] = until
                for layer in self._shape.groups[group].layers:
                    self._memory.write(layer, block, row, ~self._rows(req_id, layer, first, stop))

    def _read(self, req_id: str, group: int, start: int, end: int) -> bool:
        """The rows that the first scheduled token attends to, which earlier steps computed or loads brought.

        False where some are wrong that may be.
        """
        sound = True
        window = self._shape.groups[group].window
        oldest = 0 if window is None else max(0, start - window + 1)
        for block, row, first, stop in self._spans(req_id, group, oldest, end):
            if block == 0:
                raise PagesError(f"{req_id} reads position {first} of group {group} from the null block")
            for layer in self._shape.groups[group].layers:
                found = self._memory.rows(layer, block)[row : row + stop - first]
                wanted = self._rows(req_id, layer, first, stop)
                if np.array_equal(found, wanted):
                    continue
                if block not in self._wrong:
                    wrong = [first + int(at) for at in np.flatnonzero((found != wanted).any(axis=1))]
                    raise PagesError(f"{req_id}, {layer}, block {block}: wrong rows at positions {wrong}")
                sound = False
        return sound

    def _rows(self, req_id: str, layer: str, start: int, end: int) -> Bytes:
        """The rows for these positions. A draft model's row depends on the next token, too."""
        group = self._shape.groups[self._shape.group_of(layer)]
        later = 1 if group.is_draft else 0
        return self._stories[req_id].rows(
            layer=layer, rank=self._content_rank, start=start + later, end=end + later, row_bytes=group.row_bytes
        )

    # --- recurrent states ----------------------------------------------------------------------------------------

    def _advance(self, req_id: str, group: int, start: int, end: int) -> None:
        """Take the state after `start` tokens from its block, and leave the state after `end` tokens in its own.

        "align" keeps one running state, in the block of the step's last token; the other modes leave one in each
        block that the step passes.
        """
        spec = self._shape.groups[group]
        tokens, table = spec.block_tokens, self._tables[req_id][group]
        last = (end - 1) // tokens
        if start:
            at = self._states.get((req_id, group), (start - 1) // tokens)
            self._check_state(req_id, group, table[at], start)
        for index in range(last if spec.state_mode == "align" else start // tokens, last + 1):
            assert table[index] != 0, f"{req_id} leaves a state in the null block"
            after = min(end, (index + 1) * tokens)
            for layer in spec.layers:
                self._memory.write(layer, table[index], 0, self._state(req_id, layer, after))
        self._states[req_id, group] = last

    def _check_state(self, req_id: str, group: int, block: int, tokens: int) -> None:
        if block == 0:
            raise PagesError(f"{req_id} reads its state after {tokens} tokens in group {group} from the null block")
        for layer in self._shape.groups[group].layers:
            if not np.array_equal(self._memory.rows(layer, block), self._state(req_id, layer, tokens)):
                raise PagesError(f"{req_id}, {layer}, block {block}: not the state after {tokens} tokens")

    def _state(self, req_id: str, layer: str, tokens: int) -> Bytes:
        """The state after `tokens` tokens."""
        return self._rows(req_id, layer, tokens - 1, tokens)

    # --- loads ---------------------------------------------------------------------------------------------------

    def loaded(self, req_id: str, layer: str, index: int, end: int) -> Bytes:
        """What a load of a request's first `end` tokens must have put at the beginning of its block `index`."""
        group = self._shape.groups[self._shape.group_of(layer)]
        first, stop = index * group.block_tokens, min(end, (index + 1) * group.block_tokens)
        return self._state(req_id, layer, stop) if group.kind == "mamba" else self._rows(req_id, layer, first, stop)
