"""One rank's KV memory, and what every byte of it must be.

Owns: the bytes, a second copy with what they must be, and the comparison of the two. A page that a load is filling
may hold anything until the load is reported; nothing else may ever change but by `write`.
Must not know: vLLM, tokens, jobs.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from harness.shapes import GUARD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from harness.shapes import Shape
    from harness.story import Bytes

SHOWN_MAX = 5  # differences that an error lists


class PagesError(AssertionError):
    """A byte is not what it must be."""


class RankMemory:
    """All layers of one rank, one row per block and layer, with guards between the layers.

    A new memory is poison throughout: bytes that no model writes.
    """

    def __init__(self, shape: Shape, *, seed: int) -> None:
        self._shape = shape
        self._offsets = shape.offsets()
        self.bytes = _poison(shape.memory_bytes, seed)
        self._expected = self.bytes.copy()

    def page(self, layer: str, block: int) -> Bytes:
        """A layer's page without its padding, as it is."""
        return self.bytes[self._place(layer, block)]

    def rows(self, layer: str, block: int) -> Bytes:
        """A layer's page by token."""
        group = self._shape.groups[self._shape.group_of(layer)]
        return self.page(layer, block).reshape(group.page_rows, group.row_bytes)

    def write(self, layer: str, block: int, first_row: int, rows: Bytes) -> None:
        """Write tokens' rows, as a forward pass does."""
        group = self._shape.groups[self._shape.group_of(layer)]
        start = self._place(layer, block).start + first_row * group.row_bytes
        self.bytes[start : start + rows.size] = rows.reshape(-1)
        self._expected[start : start + rows.size] = rows.reshape(-1)

    def expect(self, layer: str, block: int, content: Bytes) -> None:
        """From now on, this page must begin with `content` (a load has brought it), and stay as it is after that."""
        self.accept(layer, block)
        start = self._place(layer, block).start
        self._expected[start : start + content.size] = content.reshape(-1)

    def accept(self, layer: str, block: int) -> None:
        """Whatever a load has made of this page is right (it has failed, so nobody may rely on it)."""
        place = self._moved(layer, block)
        self._expected[place] = self.bytes[place]

    def copy(self, source: int, destination: int) -> None:
        """Copy a block in every layer, paddings included, as a model runner does before a block is shared no more."""
        for layer, offset in self._offsets.items():
            group = self._shape.groups[self._shape.group_of(layer)]
            stride = self._shape.page_stride(layer)
            for memory in (self.bytes, self._expected):
                start, end = offset + source * stride, offset + destination * stride
                memory[end : end + group.stride_bytes] = memory[start : start + group.stride_bytes]

    def clear(self, layer: str, block: int) -> None:
        """Write zeros, as a model runner does to a new block of an attention layer in a model with states."""
        place = self._place(layer, block)
        self.bytes[place] = self._expected[place] = 0

    def poison(self, blocks: Iterable[int], *, seed: int) -> None:
        """Overwrite these blocks in every layer, padding excepted."""
        for block in blocks:
            for layer in self._offsets:
                place = self._place(layer, block)
                self.bytes[place] = self._expected[place] = _poison(place.stop - place.start, seed + block)

    def check(self, filling: Iterable[tuple[str, int]] = ()) -> None:
        """Every byte is what it must be, but for the (layer, block) pages that loads are `filling`.

        Raises PagesError that names layers, blocks and bytes.
        """
        now = self.bytes.copy()  # a copy thread may be writing into the pages that are being filled
        for layer, block in filling:
            place = self._moved(layer, block)
            self._expected[place] = now[place]
        if not np.array_equal(now, self._expected):
            raise PagesError("; ".join(self._differences(now)))

    def _place(self, layer: str, block: int) -> slice:
        """The bytes of a layer's page that mean something."""
        group = self._shape.groups[self._shape.group_of(layer)]
        start = self._offsets[layer] + block * self._shape.page_stride(layer)
        return slice(start, start + group.page_bytes)

    def _moved(self, layer: str, block: int) -> slice:
        """What a load of this page may write: the page, or all that is packed with it."""
        if not self._shape.packed:
            return self._place(layer, block)
        start = GUARD_BYTES + block * self._shape.packed_bytes
        return slice(start, start + self._shape.packed_bytes)

    def _differences(self, now: Bytes) -> list[str]:
        different = np.flatnonzero(now != self._expected)
        found: dict[str, int] = {}
        for at in different:
            name = self._name(int(at))
            found[name] = found.get(name, 0) + 1
        listed = [f"{name}: {count} bytes changed" for name, count in list(found.items())[:SHOWN_MAX]]
        return [*listed, f"{len(different)} bytes in {len(found)} places"]

    def _name(self, at: int) -> str:
        for layers in self._shape.regions():
            groups = [self._shape.groups[self._shape.group_of(layer)] for layer in layers]
            block, byte = divmod(at - self._offsets[layers[0]], self._shape.page_stride(layers[0]))
            if 0 <= block < self._shape.blocks and byte < groups[0].stride_bytes:
                part = "padding" if byte >= max(group.page_bytes for group in groups) else "page"
                return f"{part} of {'/'.join(layers)}, block {block}"
        return "guard bytes"


def _poison(size: int, seed: int) -> Bytes:
    """Bytes that differ with `seed` and from place to place."""
    generator = np.random.Generator(np.random.SFC64(zlib.crc32(b"poison") + seed))
    return generator.integers(0, 256, size=size, dtype=np.uint8)
