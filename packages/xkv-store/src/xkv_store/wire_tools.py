"""The messages by which a tool looks at what a card holds, asks why not, and takes something off it (docs/protocol.md).

Owns: these messages and their bounds. Must not know: sockets, sessions, or how a card finds what it is asked for.

Each question has one answer, of a bounded size and a bounded cost; whoever asks remembers where it stands.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from .departures import TOLD_MAX, Reason
from .left_out import LeftOut  # noqa: TC001  msgspec reads this at run time
from .wire_types import U32, U64, Key, KeyPart, Message, Namespace, Part

OBJECTS_LISTED_MAX: Final = 256
"""Of one answer: a millisecond of the event loop, and a third of a message."""
NAMESPACES_LISTED_MAX: Final = 64
"""Looked at for one answer; as many are in it as a message holds with their descriptors."""
OBJECTS_PURGED_MAX: Final = 64
"""Of one message: two milliseconds of the event loop."""
NAMESPACES_FORGOTTEN_MAX: Final = 64
"""Of one message."""
OBJECTS_EXPLAINED_MAX: Final = 16
"""Of one message: three milliseconds of the event loop, which looks through the records for each."""
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


class Explain(Message, frozen=True):
    """What is known of the objects with these keys?"""

    ask: U64
    keys: Annotated[tuple[Key, ...], msgspec.Meta(min_length=1, max_length=OBJECTS_EXPLAINED_MAX)]


class Departed(Part, frozen=True):
    """An object that left the card, or (generation 0) a store that came to nothing; `when_ms` since 1970."""

    reason: Reason
    generation: U64
    when_ms: U64


_Departures = Annotated[tuple[Departed, ...], msgspec.Meta(max_length=TOLD_MAX)]


class ExplainedObject(Part, frozen=True):
    """What is known of one key. `generation`, `length`: 0 where the card does not hold it.

    `coming`: something of its chunk is being put; `left`, `refused`: the newest first.
    """

    generation: U64
    length: U64
    coming: bool
    left: _Departures
    refused: _Departures


class RefusedStores(Part, frozen=True):
    """How many stores of a namespace came to nothing since the gateway's start."""

    namespace: Namespace
    shed: U64
    over_quota: U64
    failed: U64
    invalid: U64


class LeftOutStores(Part, frozen=True):
    """What engines of a namespace left out themselves, for one reason, since they started; the last (about) then."""

    namespace: Namespace
    reason: LeftOut
    count: U64
    last_ms: U64


class Explained(Message, frozen=True):
    """By key, in the order of the question; the refused stores of the keys' namespaces, and what engines left out.

    `left_since_ms`, `refused_since_ms`: the records miss nothing since then (0: since the card was made).
    `reason`: as above.
    """

    ask: U64
    objects: tuple[ExplainedObject, ...]
    refused: tuple[RefusedStores, ...]
    left_since_ms: U64
    refused_since_ms: U64
    reason: str
    left_out: tuple[LeftOutStores, ...] = ()
