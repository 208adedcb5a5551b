"""One rank's KV memory, and what every byte of it must be.

Owns: the bytes, a second copy with what they must be, and the comparison of the two. A page that a load is filling
may hold anything until the load is reported; nothing else may ever change but by `write`.
Must not know: vLLM, tokens, jobs.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

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
        return self.page(layer, block).reshape(group.block_tokens, group.row_bytes)

    def write(self, layer: str, block: int, first_row: int, rows: Bytes) -> None:
        """Write tokens' rows, as a forward pass does."""
        group = self._shape.groups[self._shape.group_of(layer)]
        start = self._place(layer, block).start + first_row * group.row_bytes
        self.bytes[start : start + rows.size] = rows.reshape(-1)
        self._expected[start : start + rows.size] = rows.reshape(-1)

    def expect(self, layer: str, block: int, content: Bytes) -> None:
        """From now on, this page must be `content` (a load has brought it)."""
        self._expected[self._place(layer, block)] = content.reshape(-1)

    def accept(self, layer: str, block: int) -> None:
        """Whatever this page is now is right (a load into it has failed, so nobody may rely on it)."""
        self._expected[self._place(layer, block)] = self.page(layer, block)

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
            place = self._place(layer, block)
            self._expected[place] = now[place]
        if not np.array_equal(now, self._expected):
            raise PagesError("; ".join(self._differences(now)))

    def _place(self, layer: str, block: int) -> slice:
        group = self._shape.groups[self._shape.group_of(layer)]
        start = self._offsets[layer] + block * group.stride_bytes
        return slice(start, start + group.page_bytes)

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
            group = self._shape.groups[self._shape.group_of(layers[0])]
            block, byte = divmod(at - self._offsets[layers[0]], group.stride_bytes)
            if 0 <= block < self._shape.blocks:
                part = "padding" if byte >= group.page_bytes else "page"
                return f"{part} of {'/'.join(layers)}, block {block}"
        return "guard bytes"


def _poison(size: int, seed: int) -> Bytes:
    """Bytes that differ with `seed` and from place to place."""
    generator = np.random.Generator(np.random.SFC64(zlib.crc32(b"poison") + seed))
    return generator.integers(0, 256, size=size, dtype=np.uint8)
