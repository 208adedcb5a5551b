"""The messages by which a scheduler asks for objects that its gateway's card lacks (docs/protocol.md).

Owns: these messages, their bounds and how a batch is cut. Must not know: sockets, sessions, what a remote is.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from .wire_types import U32, U64, Key, Message, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

SOUGHT_OBJECTS_MAX: Final = 512
"""Of one message: 512 objects of 63 bytes fit, whatever their keys are."""
_T = TypeVar("_T")


class SoughtStatus(IntEnum):
    """What became of one object of a seek."""

    FOUND = 0  # the remote has it; of a seek that fetches: the card has it
    ABSENT = 1
    FAILED = 2  # nobody knows: there is no remote, or it does not answer, or the card takes no more


class SeekObject(Part, frozen=True):
    """One object of a seek: its encoded key, and how many fragments it has at the most."""

    key: Key
    fragments: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]


class Seek(Message, frozen=True):
    """Does the remote have these objects? With `fetch`: bring them to the card."""

    seek: U64
    objects: Annotated[tuple[SeekObject, ...], msgspec.Meta(min_length=1, max_length=SOUGHT_OBJECTS_MAX)]
    fetch: bool


class SoughtObject(Part, frozen=True):
    """The answer to object `index` of a seek."""

    index: U32
    status: SoughtStatus


class Sought(Message, frozen=True):
    """Answers to objects of a seek."""

    seek: U64
    objects: Annotated[tuple[SoughtObject, ...], msgspec.Meta(max_length=SOUGHT_OBJECTS_MAX)]


def batches(items: Sequence[_T]) -> list[tuple[_T, ...]]:
    """Cut objects or answers in order; each piece fits a message."""
    return [tuple(items[at : at + SOUGHT_OBJECTS_MAX]) for at in range(0, len(items), SOUGHT_OBJECTS_MAX)]
