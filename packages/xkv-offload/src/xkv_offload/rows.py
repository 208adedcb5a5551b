"""Which bytes of a page lie where in a staging area that is laid out like the ring: tables for the kernels.

Owns: the table of rows of an object (one row: a run of bytes in one page and in one fragment), which of them a piece
of an object needs, and the plan of a wave as the kernels read it. Pure numpy; addresses are integers.
Must not know: torch, CUDA, the ring, jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from xkv_store.geometry import HEADER_BYTES

from .copy import Move, RingSlots
from .layout import ObjectLayout, spans

Words = npt.NDArray[np.int64]

ROW_WORDS: Final = 5
"""Sub-block (from the table's first), address of the page's bytes in row 0 of its tensor, the tensor's bytes from one
block to the next, the bytes' place in the object's slots, their number."""
PIECE_WORDS: Final = 4
"""Of the plan: first row's word, number of rows, the word of the table's first sub-block's id (there need not be one:
only a part's sub-blocks are read), address of the place of the object's first slot in the staging area."""
ROW_BYTES_MAX: Final = 8_192
"""A program copies one row: many small ones keep the memory busy, and one is copied by one block of threads at once."""
CUTS_MAX: Final = 4_096
"""Remembered at once; objects of one size are cut in as many ways as a wave has places."""
UNIT_BYTES_MAX: Final = 16
"""What a thread loads at once."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One KV tensor: the address of block 0's row, the bytes from one row to the next."""

    address: int
    stride: int


class Cut(NamedTuple):
    """Which part of a table and of its slots a piece needs: its rows, and from the start of its first slot its first
    byte and, in its last slot, the end of its last.
    """

    first_row: int
    end_row: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of the objects that begin with one sub-block of one layout, in the order of the object's bytes.

    `first_of_fragment[i]`, `first_of_block[i]`: the first row of fragment `i`, of the `i`-th sub-block; one more at the
    end. `cuts` remembers what `cut` has found: objects are cut alike, over and over.
    """

    rows: Words
    first_of_fragment: tuple[int, ...]
    first_of_block: tuple[int, ...]
    block_bytes: int
    fragment_bytes: int
    cuts: dict[tuple[int, int, int, int], Cut] = field(default_factory=dict)

    def cut(self, block: int, blocks: int, fragment: int, fragments: int) -> Cut:
        """What of `blocks` sub-blocks from `block` on lies in `fragments` fragments from `fragment` on."""
        key = (block, blocks, fragment, fragments)
        found = self.cuts.get(key)
        if found is None:
            if len(self.cuts) == CUTS_MAX:
                self.cuts.clear()
            begin, end = block * self.block_bytes, (block + blocks) * self.block_bytes
            found = self.cuts[key] = Cut(
                max(self.first_of_block[block], self.first_of_fragment[fragment]),
                min(self.first_of_block[block + blocks], self.first_of_fragment[fragment + fragments]),
                HEADER_BYTES + max(0, begin - fragment * self.fragment_bytes),
                HEADER_BYTES + min(self.fragment_bytes, end - (fragment + fragments - 1) * self.fragment_bytes),
            )
        return found


def make_table(
    *, layout: ObjectLayout, base_sub_block: int, tensors: Sequence[TensorPlace], fragment_bytes: int, row_bytes: int
) -> Table:
    """The table of objects that begin with sub-block `base_sub_block`; rows of at most `row_bytes` bytes."""
    rows: list[tuple[int, int, int, int, int]] = []
    first_of_block: list[int] = []
    first_of_fragment: list[int] = []
    at = 0
    for block in range(layout.blocks_per_chunk - base_sub_block):
        first_of_block.append(len(rows))
        for page in layout.pages:
            place = tensors[page.tensor]
            for span in spans(first_byte=at, length=page.page_bytes, fragment_bytes=fragment_bytes):
                if span.fragment == len(first_of_fragment):
                    first_of_fragment.append(len(rows))
                slot_at = span.fragment * (HEADER_BYTES + fragment_bytes) + HEADER_BYTES + span.offset
                rows += [
                    (block, place.address + span.page_offset + done, place.stride, slot_at + done, length)
                    for done in range(0, span.length, row_bytes)
                    for length in (min(row_bytes, span.length - done),)
                ]
            at += page.page_bytes
    ends = (len(rows),)
    words = np.array(rows, np.int64).reshape(-1, ROW_WORDS)
    return Table(
        rows=words,
        first_of_fragment=(*first_of_fragment, *ends),
        first_of_block=(*first_of_block, *ends),
        block_bytes=layout.block_bytes,
        fragment_bytes=fragment_bytes,
    )


def unit_bytes(*, layouts: Sequence[ObjectLayout], tensors: Sequence[TensorPlace], fragment_bytes: int) -> int:
    """The largest power of two, at most 16, that divides every address and length of these layouts' rows."""
    common = gcd(UNIT_BYTES_MAX, HEADER_BYTES, fragment_bytes)
    for layout in layouts:
        for page in layout.pages:
            place = tensors[page.tensor]
            common = gcd(common, page.page_bytes, place.address, place.stride)
    return common


class Piece(NamedTuple):
    """Some fragments of a move: so many from the move's `first`-th slot on, at place `staged` of the staging area."""

    move: Move
    table: Table
    cut: Cut
    first: int
    fragments: int
    staged: int


def make_piece(move: Move, table: Table, *, first: int, fragments: int, staged: int) -> Piece:
    """The piece, with what it needs of the move's table."""
    part = move.part
    cut = table.cut(part.first - move.base_sub_block, len(part.blocks), move.first_fragment + first, fragments)
    return Piece(move, table, cut, first, fragments, staged)


@dataclass(frozen=True, slots=True)
class Written:
    """A plan as written: its words, its pieces, and the most rows that one of them has."""

    words: int
    pieces: int
    rows_max: int


class WavePlan:
    """The pieces of one wave, and the words that the kernels need of them: at most `words_max`."""

    def __init__(self, *, words_max: int) -> None:
        self._words_max = words_max
        self._words = 0
        self._rows: dict[int, tuple[Table, int, int]] = {}  # by the table's identity: its first row here, and the end
        self.pieces: list[Piece] = []

    def add(self, piece: Piece) -> bool:
        """Take a piece in; False if there is no room for what it needs."""
        table, (first, end, _, _) = piece.table, piece.cut
        _, known_first, known_end = self._rows.get(id(table), (table, first, first))
        first = min(first, known_first)
        end = max(end, known_end)
        more = (end - first - known_end + known_first) * ROW_WORDS
        words = self._words + more + PIECE_WORDS + len(piece.move.part.blocks)
        if words > self._words_max:
            return False
        self._words = words
        if more:
            self._rows[id(table)] = (table, first, end)
        self.pieces.append(piece)
        return True

    def write(self, into: Words, *, staging_address: int, slot_bytes: int) -> Written:
        """Write the words to the start of `into`."""
        at = len(self.pieces) * PIECE_WORDS
        places: dict[int, int] = {}
        for number, (table, first, end) in self._rows.items():
            places[number] = at - first * ROW_WORDS
            words = (end - first) * ROW_WORDS
            into[at : at + words] = table.rows[first:end].reshape(-1)
            at += words
        most = 0
        heads: list[int] = []
        ids: list[int] = []
        for move, table, (first, end, _, _), first_slot, _, staged in self.pieces:
            part = move.part
            heads += (
                places[id(table)] + first * ROW_WORDS,
                end - first,
                at + len(ids) - part.first + move.base_sub_block,
                staging_address + (staged - move.first_fragment - first_slot) * slot_bytes,
            )
            ids += part.blocks
            most = max(most, end - first)
        into[: len(heads)] = heads
        into[at : at + len(ids)] = ids
        return Written(at + len(ids), len(self.pieces), most)


class Run(NamedTuple):
    """`length` bytes at `staged_at` of a staging area, at `ring_at` of the ring."""

    staged_at: int
    ring_at: int
    length: int


GAP_BYTES_MAX: Final = 65_536
"""Bytes between two runs that are copied along: about a microsecond, less than a copy of its own would cost."""


def runs(pieces: Sequence[Piece], *, slot_bytes: int, cut_bytes: int) -> list[Run]:
    """The copies between staging area and ring, as long as possible, none across a multiple of `cut_bytes` of the ring.

    The pieces lie one behind the other in the staging area. What lies between the payloads (headers, the rest of a last
    slot) is copied along where neighbours there are neighbours in the ring; it is nobody's.
    """
    found: list[Run] = []
    for piece in pieces:
        _, _, begin, end = piece.cut
        for first, count, number in _neighbours(piece):
            start = begin if first == 0 else HEADER_BYTES
            stop = (count - 1) * slot_bytes + (end if first + count == piece.fragments else slot_bytes)
            run = Run((piece.staged + first) * slot_bytes + start, number * slot_bytes + start, stop - start)
            _append(found, run)
    return [part for run in found for part in _cut(run, cut_bytes)]


def _neighbours(piece: Piece) -> list[tuple[int, int, int]]:
    """The piece's slots as (first, count, the first one's number) of neighbours in the ring."""
    numbers = _numbers(piece)
    if numbers == list(range(numbers[0], numbers[0] + piece.fragments)):
        return [(0, piece.fragments, numbers[0])]
    edges = [0, *(at for at in range(1, piece.fragments) if numbers[at] != numbers[at - 1] + 1), piece.fragments]
    return [(first, end - first, numbers[first]) for first, end in pairwise(edges)]


def _numbers(piece: Piece) -> list[int]:
    slots = piece.move.slots
    assert isinstance(slots, RingSlots), "slots that a device copies are a ring's"
    return list(slots.numbers[piece.first : piece.first + piece.fragments])


def _append(found: list[Run], run: Run) -> None:
    """Add a run, to the last one if the gap between them is the same small one on both sides."""
    if found:
        last = found[-1]
        gap = run.ring_at - last.ring_at - last.length
        if 0 <= gap <= GAP_BYTES_MAX and run.staged_at - last.staged_at - last.length == gap:
            found[-1] = Run(last.staged_at, last.ring_at, last.length + gap + run.length)
            return
    found.append(run)


def _cut(run: Run, cut_bytes: int) -> list[Run]:
    if run.ring_at % cut_bytes + run.length <= cut_bytes:
        return [run]
    parts = []
    done = 0
    while done < run.length:
        at = run.ring_at + done
        length = min(run.length - done, cut_bytes - at % cut_bytes)
        parts.append(Run(run.staged_at + done, at, length))
        done += length
    return parts
