"""Which bytes of which tensor form an object.

Owns: the byte order inside an object, format v1: sub-block after sub-block, and in each the pages of the group's
layers in the framework's order, unpadded. A run of sub-blocks is therefore one run of bytes, so that a load of
part of a chunk reads part of its fragments.
Must not know: torch, vLLM, keys, slots' numbers. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Page:
    """One layer's (or packed region's) page of a block: `page_bytes` from the start of a row of tensor `tensor`."""

    tensor: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """`length` bytes at `offset` in the payload of fragment `fragment`, from `page_offset` of a page."""

    fragment: int
    offset: int
    page_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """The layout of one group's objects: `blocks_per_chunk` sub-blocks of `block_bytes` each."""

    blocks_per_chunk: int
    pages: tuple[Page, ...]
    block_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of one sub-block: all pages of the group for one block."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_bytes", sum(page.page_bytes for page in self.pages))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk."""
        return self.blocks_per_chunk * self.block_bytes


def fragment_range(*, first_byte: int, length: int, fragment_bytes: int) -> range:
    """The fragments that hold `length` bytes from `first_byte` on; `length` is at least 1."""
    return range(first_byte // fragment_bytes, (first_byte + length - 1) // fragment_bytes + 1)


def spans(*, first_byte: int, length: int, fragment_bytes: int) -> Iterator[Span]:
    """Cut `length` bytes of an object, from `first_byte` on, at the edges of its fragments."""
    done = 0
    while done < length:
        fragment, offset = divmod(first_byte + done, fragment_bytes)
        part = min(length - done, fragment_bytes - offset)
        yield Span(fragment, offset, done, part)
        done += part


def group_layouts(*, blocks_per_chunk: int, pages: Sequence[Sequence[Page]]) -> tuple[ObjectLayout, ...]:
    """One layout per group; a group without layers has objects of no bytes and is never stored."""
    return tuple(ObjectLayout(blocks_per_chunk, tuple(group)) for group in pages)
