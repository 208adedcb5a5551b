"""What a session wants its gateway to do: the actions of `session`, as values.

Owns: one class for each action. Must not know: how a session comes to want it, or who carries it out (`desk`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .key import ObjectKey
    from .wire import FromGateway, GetObject, Hello, LeaseObject, PutObject, RankNamespace
    from .wire_tools import Explain, ListNamespaces, ListObjects, Purge


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message (a Welcome with its descriptors)."""

    message: FromGateway


@dataclass(frozen=True, slots=True)
class Admit:
    """Decide on this Hello, then call `admit` or `refuse`; `reattaching`: ring and control page came too."""

    hello: Hello
    reattaching: bool


@dataclass(frozen=True, slots=True)
class PutTask:
    """Object `index` of a put, its slots in flight from now on."""

    index: int
    key: ObjectKey
    item: PutObject


@dataclass(frozen=True, slots=True)
class GetTask:
    """Object `index` of a get, its slots in flight from now on."""

    index: int
    key: ObjectKey
    item: GetObject


@dataclass(frozen=True, slots=True)
class StartPut:
    """Begin these; report each once with `stored`."""

    put: int
    tasks: tuple[PutTask, ...]


@dataclass(frozen=True, slots=True)
class StartGet:
    """Begin these; report each once with `loaded`."""

    get: int
    tasks: tuple[GetTask, ...]


@dataclass(frozen=True, slots=True)
class LeaseTask:
    """Object `index` of a lease; so many slots count as held by the session from now on."""

    index: int
    key: ObjectKey
    item: LeaseObject


@dataclass(frozen=True, slots=True)
class StartLease:
    """Begin these; report each once with `leased`."""

    lease: int
    tasks: tuple[LeaseTask, ...]


@dataclass(frozen=True, slots=True)
class StartSeek:
    """Look for these (key, fragments at the most) at the remote, and with `fetch` bring them; each is answered once."""

    seek: int
    objects: tuple[tuple[ObjectKey, int], ...]
    fetch: bool


@dataclass(frozen=True, slots=True)
class DropLease:
    """The session does not need these slots any more."""

    lease: int
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelGet:
    """Nobody waits for these any more: report them with `loaded` (or `leased`) as soon as that ends nothing untimely.

    That is when their slots are not touched, or are others' as well.
    """

    get: int
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordTouch:
    """These tags were looked up."""

    tags: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordNamespace:
    """The session published this (it also stands in `published`).

    `adopted`: by the scheduler, so objects are stored under it; else by a rank, for the scheduler to ask for.
    """

    published: RankNamespace
    adopted: bool


@dataclass(frozen=True, slots=True)
class ReportNamespaces:
    """Answer with `reply`: what the sessions of this engine's ranks have published."""

    ask: int


@dataclass(frozen=True, slots=True)
class ReportStatus:
    """Answer with `reply`."""

    ask: int


@dataclass(frozen=True, slots=True)
class StopGateway:
    """Answer Done with `reply`, then drain the gateway."""

    ask: int


@dataclass(frozen=True, slots=True)
class VerifyCard:
    """Prove the card's objects, telling of it with `reply`."""

    ask: int
    drop: bool


@dataclass(frozen=True, slots=True)
class AnswerTool:
    """Answer with `reply`: what the card holds, or what has left it."""

    question: ListNamespaces | ListObjects | Purge | Explain


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection once what is to be sent has gone out: nothing touches its slots any more."""


Transfer = StartPut | StartGet | StartLease | DropLease | CancelGet
Action = (
    Send
    | Admit
    | Transfer
    | StartSeek
    | RecordTouch
    | RecordNamespace
    | ReportNamespaces
    | ReportStatus
    | StopGateway
    | VerifyCard
    | AnswerTool
    | Close
)
Actions = list[Action]
