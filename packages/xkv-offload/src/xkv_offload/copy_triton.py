"""The rows of a wave between pages and staging area, in one launch, as a Triton kernel.

Owns: the kernel and how it is launched. Addresses are absolute 64-bit integers in the plan, so that any number of
tensors, any stride and any size are the same to it.
Must not know: what the rows are for (rows), streams, jobs. Imported only where a mover for a GPU is made.
"""

from functools import partial

import triton
import triton.language as tl

from .rows import PIECE_WORDS, ROW_BYTES_MAX, ROW_WORDS, WavePlan, Written
from .staging_area import WORD_BYTES, StagingSlot, Work

BYTES_PER_THREAD = 64  # four loads of 16 bytes are under way before the first is stored
WARP_THREADS = 32
WARPS_MIN = 2
TILE_BYTES_MIN = 256


@triton.jit  # type: ignore[untyped-decorator]
def move_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - the compiler of kernels takes annotations for code
    plan,
    WORDS_PER_PIECE: tl.constexpr,  # noqa: N803 - constants of the compilation are written so
    WORDS_PER_ROW: tl.constexpr,  # noqa: N803
    ELEMENT: tl.constexpr,  # noqa: N803
    ELEMENT_BYTES: tl.constexpr,  # noqa: N803
    VECTOR: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    INTO_PAGES: tl.constexpr,  # noqa: N803
):
    """One program copies one row of one piece: at most `TILE` elements, `VECTOR` of them at once."""
    piece = plan + tl.program_id(1) * WORDS_PER_PIECE
    number = tl.program_id(0)
    if number < tl.load(piece + 1):
        row = plan + tl.load(piece) + number * WORDS_PER_ROW
        block = tl.load(plan + tl.load(piece + 2) + tl.load(row))
        page_address = tl.load(row + 1) + block * tl.load(row + 2)
        staged_address = tl.load(piece + 3) + tl.load(row + 3)
        # As distances from a pointer whose alignment the compiler knows, divided and multiplied again: so it sees by
        # what they are divisible, and loads whole vectors.
        anchor = plan.to(tl.pointer_type(ELEMENT))
        origin = plan.to(tl.int64)
        page = anchor + (page_address - origin) // (VECTOR * ELEMENT_BYTES) * VECTOR
        staged = anchor + (staged_address - origin) // (VECTOR * ELEMENT_BYTES) * VECTOR
        elements = tl.load(row + 4) // (VECTOR * ELEMENT_BYTES) * VECTOR
        at = tl.arange(0, TILE)
        if INTO_PAGES:
            tl.store(page + at, tl.load(staged + at, mask=at < elements), mask=at < elements)
        else:
            tl.store(staged + at, tl.load(page + at, mask=at < elements), mask=at < elements)


_ELEMENTS = {1: (tl.int8, 1), 2: (tl.int16, 1), 4: (tl.int32, 1), 8: (tl.int64, 1), 16: (tl.int64, 2)}
"""By the bytes that divide everything: the element, and how many are loaded at once."""


class TritonRows:
    """One launch copies a wave's rows, by its plan."""

    def __init__(self, *, unit_bytes: int, largest_page_bytes: int) -> None:
        self._element, self._vector = _ELEMENTS[unit_bytes]
        self._element_bytes = unit_bytes // self._vector
        tile_bytes = min(ROW_BYTES_MAX, triton.next_power_of_2(max(largest_page_bytes, TILE_BYTES_MIN)))
        self._tile = tile_bytes // self._element_bytes
        self._warps = max(WARPS_MIN, tile_bytes // (BYTES_PER_THREAD * WARP_THREADS))

    def prepare(self, plan: WavePlan, slot: StagingSlot, *, into_pages: bool) -> tuple[int, Work]:
        """See RowCopier."""
        written = plan.write(slot.host_words, staging_address=slot.address, slot_bytes=slot.slot_bytes)
        return written.words * WORD_BYTES, partial(self._launch, slot, written, into_pages)

    def _launch(self, slot: StagingSlot, written: Written, into_pages: bool) -> None:
        move_rows[(written.rows_max, written.pieces)](
            slot.words,
            PIECE_WORDS,
            ROW_WORDS,
            self._element,
            self._element_bytes,
            self._vector,
            self._tile,
            into_pages,
            num_warps=self._warps,
        )
