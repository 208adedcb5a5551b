"""What the card hands out: grants of slots, pinned objects, refusals.

Owns these values and nothing else. Must not know how they come about.
"""

from enum import Enum
from typing import NamedTuple

from .key import ObjectKey
from .layout import Extent


class PutRefusal(Enum):
    """Why a put does not begin."""

    HELD = "held"  # the card has it
    SHED = "shed"  # no slots, or the index does not keep up
    BUSY = "busy"  # the same key is being put
    INVALID = "invalid"  # no object can be like that


class ObjectPlan(NamedTuple):
    """One object of one generation, and where it lies."""

    key: ObjectKey
    encoded_key: bytes
    generation: int
    length: int
    family: int
    position: int
    fragments: int
    extents: tuple[Extent, ...]


class PutPlan(ObjectPlan):
    """Slots granted to one put, until `finish_put`."""

    __slots__ = ()


class GetPlan(ObjectPlan):
    """An object pinned for one get, until `end_get`."""

    __slots__ = ()
