"""Bytes between the framework's KV tensors and ring slots.

Owns: what one copy is (`Move`), what a mover does, and the mover for tensors in host memory (straight, page by page);
choosing the mover.
Must not know: keys, the gateway, jobs. What imports torch is imported only where a mover for a GPU is made.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from xkv_store.geometry import HEADER_BYTES

from .layout import ObjectLayout, spans
from .mapping import ChunkPart

Bytes = npt.NDArray[np.uint8]
End = Callable[[Exception | None], None]
"""Called once, on the copy thread: the last byte has arrived, or will not, and why."""


class Slots(Protocol):
    """Whole slots (header and payload), as rows of bytes."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Bytes]: ...
    def __getitem__(self, index: int, /) -> Bytes: ...


@dataclass(frozen=True, slots=True)
class RingSlots:
    """Slots of a ring by their numbers."""

    ring: Bytes
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Bytes]:
        return (self.ring[number] for number in self.numbers)

    def __getitem__(self, index: int, /) -> Bytes:
        return self.ring[self.numbers[index]]  # type: ignore[no-any-return]  # a row of a two-dimensional array


@dataclass(frozen=True, slots=True)
class Move:
    """One chunk part and the slots of its fragments.

    `slots[i]` is the slot of fragment `first_fragment + i`; together they cover all bytes of the part.
    `base_sub_block` is the sub-block with which the object's bytes begin (0, but for a lone last block).
    """

    part: ChunkPart
    layout: ObjectLayout
    slots: Slots
    first_fragment: int
    base_sub_block: int


class Mover(Protocol):
    """Copies, of which several may be under way. All but `ready_mark` and `use_ring` runs on the copy thread."""

    def use_ring(self, ring: Bytes, numbers: Sequence[range]) -> None:
        """All slots to come are these of `ring`. Once, before the first copy."""

    def ready_mark(self) -> object:
        """Something that says: what was queued on vLLM's stream until now. Made on vLLM's thread."""

    def start_gather(self, move: Move, mark: object, end: End) -> None:
        """Begin to copy the part's pages, as they are after `mark`, into the slots' payloads."""

    def start_scatter(self, move: Move, mark: object, end: End) -> None:
        """Begin to copy the slots' payloads into the part's pages, which are free of other work after `mark`."""

    def advance(self) -> bool:
        """Nothing more is to begin now: end a copy, waiting for it. False if none is under way."""

    def close(self) -> None:
        """Give back what the copies needed. The ring is still there."""


class HostMover:
    """Tensors in host memory, as numpy views of shape (blocks, row bytes). A copy ends in its start."""

    def __init__(self, rows: Sequence[Bytes]) -> None:
        self._rows = rows

    def gather(self, move: Move) -> None:
        """Copy the part's pages into the slots' payloads."""
        for row, page_at, slot, slot_at, length in self._pieces(move):
            slot[slot_at : slot_at + length] = row[page_at : page_at + length]

    def scatter(self, move: Move) -> None:
        """Copy the slots' payloads into the part's pages."""
        for row, page_at, slot, slot_at, length in self._pieces(move):
            row[page_at : page_at + length] = slot[slot_at : slot_at + length]

    def use_ring(self, ring: Bytes, numbers: Sequence[range]) -> None:
        """See Mover."""

    def ready_mark(self) -> object:
        """See Mover: host tensors are written synchronously."""
        return None

    def start_gather(self, move: Move, mark: object, end: End) -> None:  # noqa: ARG002 - nothing is queued on a CPU
        """See Mover."""
        _at_once(self.gather, move, end)

    def start_scatter(self, move: Move, mark: object, end: End) -> None:  # noqa: ARG002 - as above
        """See Mover."""
        _at_once(self.scatter, move, end)

    def advance(self) -> bool:
        """See Mover."""
        return False

    def close(self) -> None:
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


def _at_once(copy: Callable[[Move], None], move: Move, end: End) -> None:
    try:
        copy(move)
    except Exception as error:  # noqa: BLE001 - it is told to the copy's owner, who counts and logs it
        end(error)
    else:
        end(None)


def make_mover(
    *, tensors: Sequence[Any], staging_bytes: int, layouts: Sequence[ObjectLayout], fragment_bytes: int
) -> Mover:
    """The mover for `tensors` (int8, one row per block), all on one device.

    Raises UserError if a fragment does not fit the staging area.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return HostMover([tensor.numpy().view(np.uint8) for tensor in tensors])
    from .device_setup import make_device_mover  # noqa: PLC0415 - where nothing lies on a GPU, torch may be absent

    return make_device_mover(
        tensors=tensors, staging_bytes=staging_bytes, layouts=layouts, fragment_bytes=fragment_bytes
    )
