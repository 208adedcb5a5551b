"""The messages by which a tool looks at what a card holds, and takes something off it (docs/protocol.md).

Owns: these messages and their bounds. Must not know: sockets, sessions, or how a card finds what it is asked for.

Each question has one answer, of a bounded size and a bounded cost; whoever asks remembers where it stands.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from .wire_types import U32, U64, Key, KeyPart, Message, Namespace, Part

OBJECTS_LISTED_MAX: Final = 256
"""Of one answer: a millisecond of the event loop, and a third of a message."""
NAMESPACES_LISTED_MAX: Final = 64
"""Looked at for one answer; as many are in it as a message holds with their descriptors."""
OBJECTS_PURGED_MAX: Final = 64
"""Of one message: two milliseconds of the event loop."""
NAMESPACES_FORGOTTEN_MAX: Final = 64
"""Of one message."""
REASON_CHARS_MAX: Final = 500
"""Of why an answer is none: it fits beside all else."""


class ListNamespaces(Message, frozen=True):
    """Which namespaces come behind this one (nothing: from the first on)?"""

    ask: U64
    after: Annotated[bytes, msgspec.Meta(max_length=16)]


class ListedNamespace(Part, frozen=True):
    """One namespace.

    `held_bytes`: of all its slots, in flight, used and in limbo; `descriptor`: what an engine published of it, or "".
    """

    namespace: Namespace
    objects: U64
    held_bytes: U64
    limbo_bytes: U64
    quota_bytes: U64 | None
    descriptor: str


class ListedNamespaces(Message, frozen=True):
    """Some namespaces in their order; `more`: ask again behind the last. `reason`: why there is no answer, or ""."""

    ask: U64
    namespaces: tuple[ListedNamespace, ...]
    more: bool
    reason: str


class ListObjects(Message, frozen=True):
    """Which objects have keys that begin with `prefix`, from `start` on?"""

    ask: U64
    prefix: KeyPart
    start: Annotated[bytes, msgspec.Meta(max_length=56)]  # a key, or one and a zero: what comes behind it


class ListedObject(Part, frozen=True):
    """One object that the card holds: its encoded key, and what its record says."""

    key: Key
    generation: U64
    length: U64
    position: U32


class ListedObjects(Message, frozen=True):
    """Some objects in the order of keys; `next`: where to start for more, nothing at the end. `reason`: as above."""

    ask: U64
    objects: tuple[ListedObject, ...]
    next: Annotated[bytes, msgspec.Meta(max_length=56)]
    reason: str


class PurgeObject(Part, frozen=True):
    """An object that is to leave, if it is still of that generation."""

    key: Key
    generation: U64


class Purge(Message, frozen=True):
    """Let these objects leave the card, and forget what was published of these namespaces where they have none."""

    ask: U64
    objects: Annotated[tuple[PurgeObject, ...], msgspec.Meta(max_length=OBJECTS_PURGED_MAX)]
    namespaces: Annotated[tuple[Namespace, ...], msgspec.Meta(max_length=NAMESPACES_FORGOTTEN_MAX)]


class Purged(Message, frozen=True):
    """So many objects have left, and their bytes; `later`: indexes of those that limbo has no room for just now.

    The others were gone already, or are of another generation.
    """

    ask: U64
    objects: U64
    object_bytes: U64
    later: tuple[U32, ...]
    namespaces: U64
