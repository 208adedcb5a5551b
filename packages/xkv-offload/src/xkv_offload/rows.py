"""Which bytes of a page lie where in a staging area that is laid out like the ring: tables for the kernels.

Owns: the table of rows of an object (one row: a run of bytes in one page and in one fragment), which of them a piece
of an object needs, and the plan of a wave as the kernels read it. Pure numpy; addresses are integers.
Must not know: torch, CUDA, the ring, jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Final

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
UNIT_BYTES_MAX: Final = 16
"""What a thread loads at once."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One KV tensor: the address of block 0's row, the bytes from one row to the next."""

    address: int
    stride: int


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of the objects that begin with one sub-block of one layout, in the order of the object's bytes.

    `first_of_fragment[i]`, `first_of_block[i]`: the first row of fragment `i`, of the `i`-th sub-block; one more at the
    end.
    """

    rows: Words
    first_of_fragment: tuple[int, ...]
    first_of_block: tuple[int, ...]


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
    return Table(words, (*first_of_fragment, *ends), (*first_of_block, *ends))


def unit_bytes(*, layouts: Sequence[ObjectLayout], tensors: Sequence[TensorPlace], fragment_bytes: int) -> int:
    """The largest power of two, at most 16, that divides every address and length of these layouts' rows."""
    common = gcd(UNIT_BYTES_MAX, HEADER_BYTES, fragment_bytes)
    for layout in layouts:
        for page in layout.pages:
            place = tensors[page.tensor]
            common = gcd(common, page.page_bytes, place.address, place.stride)
    return common


@dataclass(frozen=True, slots=True)
class Piece:
    """Some fragments of a move: `count` from the move's `first`-th slot on, at place `staged` of the staging area."""

    move: Move
    first: int
    count: int
    staged: int

    def payload_range(self, fragment_bytes: int) -> tuple[int, int]:
        """From the start of the first slot: the first byte of the part, and the end of its last, in the last slot."""
        move = self.move
        block_bytes = move.layout.block_bytes
        begin = (move.part.first - move.base_sub_block) * block_bytes
        end = begin + len(move.part.blocks) * block_bytes
        first = move.first_fragment + self.first
        last = first + self.count - 1
        return (
            HEADER_BYTES + max(0, begin - first * fragment_bytes),
            HEADER_BYTES + min(fragment_bytes, end - last * fragment_bytes),
        )

    def row_range(self, table: Table) -> tuple[int, int]:
        """The rows of the table that this piece needs."""
        move = self.move
        block = move.part.first - move.base_sub_block
        fragment = move.first_fragment + self.first
        return (
            max(table.first_of_block[block], table.first_of_fragment[fragment]),
            min(
                table.first_of_block[block + len(move.part.blocks)],
                table.first_of_fragment[fragment + self.count],
            ),
        )


@dataclass(frozen=True, slots=True)
class Written:
    """A plan as written: its words, its pieces, and the most rows that one of them has."""

    words: int
    pieces: int
    rows_max: int


@dataclass(slots=True)
class _Rows:
    table: Table
    begin: int
    end: int

    @property
    def words(self) -> int:
        return (self.end - self.begin) * ROW_WORDS


class WavePlan:
    """The pieces of one wave, and the words that the kernels need of them: at most `words_max`."""

    def __init__(self, *, words_max: int) -> None:
        self._words_max = words_max
        self._words = 0
        self._rows: dict[int, _Rows] = {}  # by the table's identity
        self._pieces: list[tuple[Piece, Table]] = []

    @property
    def pieces(self) -> Sequence[Piece]:
        """What has been added."""
        return [piece for piece, _ in self._pieces]

    def add(self, piece: Piece, table: Table) -> bool:
        """Take a piece in; False if there is no room for what it needs."""
        begin, end = piece.row_range(table)
        known = self._rows.get(id(table))
        merged = _Rows(table, min(begin, known.begin) if known else begin, max(end, known.end) if known else end)
        words = merged.words - (known.words if known else 0) + PIECE_WORDS + len(piece.move.part.blocks)
        if self._words + words > self._words_max:
            return False
        self._words += words
        self._rows[id(table)] = merged
        self._pieces.append((piece, table))
        return True

    def write(self, into: Words, *, staging_address: int, slot_bytes: int) -> Written:
        """Write the words to the start of `into`."""
        at = len(self._pieces) * PIECE_WORDS
        places: dict[int, int] = {}
        for number, rows in self._rows.items():
            places[number] = at - rows.begin * ROW_WORDS
            into[at : at + rows.words] = rows.table.rows[rows.begin : rows.end].reshape(-1)
            at += rows.words
        most = 0
        words: list[int] = []
        for piece, table in self._pieces:
            move = piece.move
            begin, end = piece.row_range(table)
            words += (
                places[id(table)] + begin * ROW_WORDS,
                end - begin,
                at - (move.part.first - move.base_sub_block),
                staging_address + (piece.staged - move.first_fragment - piece.first) * slot_bytes,
            )
            blocks = move.part.blocks
            into[at : at + len(blocks)] = blocks
            at += len(blocks)
            most = max(most, end - begin)
        into[: len(words)] = words
        return Written(at, len(self._pieces), most)


@dataclass(frozen=True, slots=True)
class Run:
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
        begin, end = piece.payload_range(slot_bytes - HEADER_BYTES)
        for first, count, number in _neighbours(piece):
            start = begin if first == 0 else HEADER_BYTES
            stop = (count - 1) * slot_bytes + (end if first + count == piece.count else slot_bytes)
            run = Run((piece.staged + first) * slot_bytes + start, number * slot_bytes + start, stop - start)
            _append(found, run)
    return [part for run in found for part in _cut(run, cut_bytes)]


def _neighbours(piece: Piece) -> list[tuple[int, int, int]]:
    """The piece's slots as (first, count, the first one's number) of neighbours in the ring."""
    numbers = _numbers(piece)
    if numbers == list(range(numbers[0], numbers[0] + piece.count)):
        return [(0, piece.count, numbers[0])]
    edges = [0, *(at for at in range(1, piece.count) if numbers[at] != numbers[at - 1] + 1), piece.count]
    return [(first, end - first, numbers[first]) for first, end in pairwise(edges)]


def _numbers(piece: Piece) -> list[int]:
    slots = piece.move.slots
    assert isinstance(slots, RingSlots), "slots that a device copies are a ring's"
    return list(slots.numbers[piece.first : piece.first + piece.count])


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
    parts = []
    done = 0
    while done < run.length:
        at = run.ring_at + done
        length = min(run.length - done, cut_bytes - at % cut_bytes)
        parts.append(Run(run.staged_at + done, at, length))
        done += length
    return parts
