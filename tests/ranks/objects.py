"""What lies on the card while ranks replay: which objects there are, their bytes, and the shape of pages.

Owns: keys, contents, sizes. Must not know: processes, rings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from xkv_offload.layout import ObjectLayout, Page
from xkv_store.key import ObjectKey

if TYPE_CHECKING:
    import numpy.typing as npt

SLOT_BYTES: Final = 65_536
FRAGMENT_BYTES: Final = SLOT_BYTES - 1_024
BLOCKS_PER_CHUNK: Final = 4
PAGE_BYTES: Final = 30_000
LAYOUT: Final = ObjectLayout(BLOCKS_PER_CHUNK, (Page(0, PAGE_BYTES),))
OBJECT_BYTES: Final = BLOCKS_PER_CHUNK * PAGE_BYTES
SLOTS_EACH: Final = -(-OBJECT_BYTES // FRAGMENT_BYTES)
OBJECTS: Final = 160  # on the card: the working set
MISSING: Final = 16  # further numbers that jobs ask for, and nobody has stored
NAMESPACE: Final = b"ranks-replicated"

_NOISE: Final = np.random.default_rng(5).integers(0, 256, OBJECT_BYTES + 64 * (OBJECTS + MISSING), dtype=np.uint8)


def offload_key(number: int) -> bytes:
    """The key that vLLM would give: a block's hash and its group's number, 0."""
    return number.to_bytes(8, "little") * 4 + bytes(4)


def object_key(number: int) -> ObjectKey:
    """The card's key: one object for all ranks."""
    return ObjectKey(NAMESPACE, 0, offload_key(number)[:-4], 0)


def content(number: int) -> npt.NDArray[np.uint8]:
    """The object's bytes, by block; no two have the same at one place."""
    own: npt.NDArray[np.uint8] = _NOISE[64 * number : 64 * number + OBJECT_BYTES] ^ np.uint8(number)
    return own.reshape(BLOCKS_PER_CHUNK, PAGE_BYTES)


def is_held(number: int) -> bool:
    """Whether the card has it."""
    return number < OBJECTS
