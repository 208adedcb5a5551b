"""The rows of a wave between pages and staging area, one by one, with torch alone.

Owns: what is done where Triton is missing or refuses. Correct, and slow.
Must not know: streams, jobs, how a plan is written.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from xkv_store.geometry import HEADER_BYTES

from .layout import spans
from .rows import Piece, WavePlan
from .staging_area import StagingSlot, Work


class TorchRows:
    """A copy for each row; `tensors` are the KV tensors."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors

    def prepare(self, plan: WavePlan, slot: StagingSlot, *, into_pages: bool) -> tuple[int, Work]:
        """See RowCopier: no plan is read."""
        return 0, partial(self._copy, list(plan.pieces), slot, into_pages)

    def _copy(self, pieces: Sequence[Piece], slot: StagingSlot, into_pages: bool) -> None:
        for piece in pieces:
            for page, staged in self._rows(piece, slot):
                into, source = (page, staged) if into_pages else (staged, page)
                into.copy_(source, non_blocking=True)

    def _rows(self, piece: Piece, slot: StagingSlot) -> Iterator[tuple[Any, Any]]:
        """Each row's bytes in its page and in the staging area."""
        move = piece.move
        begin = move.first_fragment + piece.first
        at = (move.part.first - move.base_sub_block) * move.layout.block_bytes
        fragment_bytes = slot.slot_bytes - HEADER_BYTES
        for block in move.part.blocks:
            for page in move.layout.pages:
                row = self._tensors[page.tensor][block]
                for span in spans(first_byte=at, length=page.page_bytes, fragment_bytes=fragment_bytes):
                    if begin <= span.fragment < begin + piece.fragments:
                        staged_at = (
                            (piece.staged + span.fragment - begin) * slot.slot_bytes + HEADER_BYTES + span.offset
                        )
                        yield (
                            row[span.page_offset : span.page_offset + span.length],
                            slot.area[staged_at : staged_at + span.length],
                        )
                at += page.page_bytes
