"""Bytes between the framework's KV tensors and ring slots.

Owns: gather (tensor pages to slots) and scatter (slots to pages), for tensors in host memory (straight, page by
page) and on a GPU (through a staging area, one object at a time; torch only).
Must not know: keys, the gateway, jobs. torch is imported only where a mover for a GPU is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from xkv_store.errors import UserError
from xkv_store.geometry import HEADER_BYTES

from .layout import ObjectLayout, spans
from .mapping import ChunkPart

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Move:
    """One chunk part and the slots of its fragments.

    `slots[i]` is the whole slot (header and payload) of fragment `first_fragment + i`; together they cover all
    bytes of the part. `base_sub_block` is the sub-block with which the object's bytes begin (0, but for a lone last
    block).
    """

    part: ChunkPart
    layout: ObjectLayout
    slots: Sequence[Bytes]
    first_fragment: int
    base_sub_block: int


class Mover(Protocol):
    """Copies; both methods return when the last byte has arrived."""

    def gather(self, move: Move) -> None:
        """Copy the part's pages into the slots' payloads."""

    def scatter(self, move: Move) -> None:
        """Copy the slots' payloads into the part's pages."""

    def ready_mark(self) -> object:
        """Something that says: what was queued on vLLM's stream until now. Made on vLLM's thread."""

    def after(self, mark: object) -> None:
        """Let the following copies begin only after `mark`."""


class HostMover:
    """Tensors in host memory, as numpy views of shape (blocks, row bytes)."""

    def __init__(self, rows: Sequence[Bytes]) -> None:
        self._rows = rows

    def gather(self, move: Move) -> None:
        """See Mover."""
        for row, page_at, slot, slot_at, length in self._pieces(move):
            slot[slot_at : slot_at + length] = row[page_at : page_at + length]

    def scatter(self, move: Move) -> None:
        """See Mover."""
        for row, page_at, slot, slot_at, length in self._pieces(move):
            row[page_at : page_at + length] = slot[slot_at : slot_at + length]

    def ready_mark(self) -> object:
        """See Mover: host tensors are written synchronously."""
        return None

    def after(self, mark: object) -> None:
        """See Mover."""

    def _pieces(self, move: Move) -> Sequence[tuple[Bytes, int, Bytes, int, int]]:
        layout = move.layout
        pieces = []
        at = (move.part.first - move.base_sub_block) * layout.block_bytes
        fragment_bytes = len(move.slots[0]) - HEADER_BYTES
        for block in move.part.blocks:
            for page in layout.pages:
                row = self._rows[page.tensor][block]
                for span in spans(first_byte=at, length=page.page_bytes, fragment_bytes=fragment_bytes):
                    slot = move.slots[span.fragment - move.first_fragment]
                    pieces.append((row, span.page_offset, slot, HEADER_BYTES + span.offset, span.length))
                at += page.page_bytes
        return pieces


class DeviceMover:
    """Tensors on a GPU: gathered into a staging area there, then copied once, fragment by fragment.

    Works on streams of its own; correct, not yet fast (one object at a time, a synchronisation per object).
    """

    def __init__(self, tensors: Sequence[Any], staging_bytes: int) -> None:
        import torch  # noqa: PLC0415 - there is none where nothing lies on a GPU

        self._torch = torch
        self._rows = tensors
        self._device = tensors[0].device
        self._staging = torch.empty(staging_bytes, dtype=torch.int8, device=self._device)
        self._stream = torch.cuda.Stream(self._device)

    def ready_mark(self) -> object:
        """See Mover: an event on vLLM's current stream."""
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def after(self, mark: object) -> None:
        """See Mover."""
        self._stream.wait_event(mark)

    def gather(self, move: Move) -> None:
        """See Mover."""
        torch = self._torch
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            staged = self._staged(move)
            ids = torch.tensor(move.part.blocks, dtype=torch.int64, device=self._device)
            at = 0
            for page in move.layout.pages:
                staged[:, at : at + page.page_bytes] = self._rows[page.tensor][ids, : page.page_bytes]
                at += page.page_bytes
            flat = staged.view(-1)
            for place, slot in self._slot_pieces(move, flat):
                slot.copy_(place)
            self._stream.synchronize()

    def scatter(self, move: Move) -> None:
        """See Mover."""
        torch = self._torch
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            staged = self._staged(move)
            flat = staged.view(-1)
            for place, slot in self._slot_pieces(move, flat):
                place.copy_(slot)
            ids = torch.tensor(move.part.blocks, dtype=torch.int64, device=self._device)
            at = 0
            for page in move.layout.pages:
                self._rows[page.tensor][ids, : page.page_bytes] = staged[:, at : at + page.page_bytes]
                at += page.page_bytes
            self._stream.synchronize()

    def _staged(self, move: Move) -> Any:
        size = len(move.part.blocks) * move.layout.block_bytes
        return self._staging[:size].view(len(move.part.blocks), move.layout.block_bytes)

    def _slot_pieces(self, move: Move, flat: Any) -> list[tuple[Any, Any]]:
        """Pairs of (piece of the staging area, piece of a slot as a tensor)."""
        fragment_bytes = len(move.slots[0]) - HEADER_BYTES
        first_byte = (move.part.first - move.base_sub_block) * move.layout.block_bytes
        pieces = []
        for span in spans(first_byte=first_byte, length=len(flat), fragment_bytes=fragment_bytes):
            slot = self._torch.from_numpy(move.slots[span.fragment - move.first_fragment].view(np.int8))
            start = HEADER_BYTES + span.offset
            pieces.append((flat[span.page_offset : span.page_offset + span.length], slot[start : start + span.length]))
        return pieces


def make_mover(*, tensors: Sequence[Any], staging_bytes: int, layouts: Sequence[ObjectLayout]) -> Mover:
    """The mover for `tensors` (int8, one row per block), all on one device.

    Raises UserError if a chunk does not fit the staging area.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return HostMover([tensor.numpy().view(np.uint8) for tensor in tensors])
    largest = max(layout.chunk_bytes for layout in layouts)
    if largest > staging_bytes:
        raise UserError(
            f"xkv.staging_bytes = {staging_bytes} is less than one chunk ({largest} bytes): make it larger, or give a "
            "smaller blocks_per_chunk"
        )
    return DeviceMover(tensors, largest)
