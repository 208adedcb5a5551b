"""Answers tools that ask what the card holds, and why not, and takes off it what they name.

Owns: from a tool's question to its one answer: pages that fit a message, and what a purge does to each object.
Must not know: sockets, sessions, how a card is read. All of it runs on the event loop's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

from . import history
from .departures import Reason
from .errors import MediumError, PeerError
from .geometry import NAMESPACE_BYTES
from .left_out import Ledger
from .wire import bounded_text, split_listed_namespaces
from .wire_tools import (
    NAMESPACES_LISTED_MAX,
    OBJECTS_LISTED_MAX,
    REASON_CHARS_MAX,
    Departed,
    Explain,
    Explained,
    ExplainedObject,
    LeftOutStores,
    ListedNamespace,
    ListedNamespaces,
    ListedObject,
    ListedObjects,
    ListNamespaces,
    ListObjects,
    Purge,
    Purged,
    RefusedStores,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .card import Card
    from .departures import Departure

log = logging.getLogger(__name__)

Question: TypeAlias = ListNamespaces | ListObjects | Purge | Explain
Answer: TypeAlias = ListedNamespaces | ListedObjects | Purged | Explained


class Attendant:
    """Of one card."""

    def __init__(self, card: Card, left_out: Ledger | None = None) -> None:
        """`left_out`: of the engines of this card's gateway."""
        self._card = card
        self._left_out = left_out or Ledger()
        self.counters: Counter[str] = Counter()

    def answer(self, question: Question, now_ns: int) -> Answer:
        """The answer; it says why where there is none."""
        match question:
            case ListNamespaces(ask, after):
                try:
                    return self._namespaces(ask, after)
                except MediumError as error:
                    return ListedNamespaces(ask, (), more=False, reason=str(error)[:REASON_CHARS_MAX])
            case ListObjects(ask, prefix, start):
                try:
                    found, further = self._card.contents.objects(prefix, start, OBJECTS_LISTED_MAX)
                except MediumError as error:
                    return ListedObjects(ask, (), b"", str(error)[:REASON_CHARS_MAX])
                listed = [ListedObject(one.key, one.generation, one.length, one.position) for one in found]
                return ListedObjects(ask, tuple(listed), further, "")
            case Purge():
                return self._purge(question, now_ns)
            case Explain():
                return self._explain(question)

    def _namespaces(self, ask: int, after: bytes) -> ListedNamespaces:
        found, more = self._card.contents.namespaces(after, NAMESPACES_LISTED_MAX)
        listed = [
            ListedNamespace(
                one.namespace,
                one.objects,
                one.held_bytes,
                one.limbo_bytes,
                one.quota_bytes,
                bounded_text(one.descriptor),
            )
            for one in found
        ]
        first = split_listed_namespaces(listed)
        return ListedNamespaces(ask, first, more=more or len(first) < len(listed), reason="")

    def _explain(self, question: Explain) -> Explained:
        try:
            found = history.of_card(self._card, question.keys)
        except MediumError as error:
            return Explained(question.ask, (), (), 0, 0, str(error)[:REASON_CHARS_MAX])
        told = []
        for one in found.objects:
            generation, length = (one.held.generation, one.held.length) if one.held is not None else (0, 0)
            told.append(ExplainedObject(generation, length, one.coming, _told(one.left), _told(one.refused)))
        refused = [
            RefusedStores(
                name,
                shed=counts[Reason.SHED],
                over_quota=counts[Reason.OVER_QUOTA],
                failed=counts[Reason.FAILED],
                invalid=counts[Reason.INVALID],
            )
            for name, counts in found.refused.items()
            if len(name) == NAMESPACE_BYTES
        ]
        since = (found.left_since_ms, found.refused_since_ms)
        left_out = [
            LeftOutStores(name, reason, one.count, one.last_ms)
            for name, reasons in self._left_out.of(one.namespace for one in found.objects).items()
            for reason, one in reasons.items()
        ]
        return Explained(question.ask, tuple(told), tuple(refused), *since, "", tuple(left_out))

    def _purge(self, question: Purge, now_ns: int) -> Purged:
        objects = object_bytes = 0
        later: list[int] = []
        for index, one in enumerate(question.objects):
            try:
                left_bytes = self._card.purge(one.key, one.generation, now_ns)
            except PeerError:
                left_bytes = 0  # an entry of the index that is damaged itself: never served, removed by the next start
            if left_bytes is None:
                later.append(index)
            else:
                objects += left_bytes > 0
                object_bytes += left_bytes
        forgotten = sum(self._card.contents.forget_namespace(one) for one in question.namespaces)
        self.counters["purges"] += 1
        return Purged(question.ask, objects, object_bytes, tuple(later), forgotten)


def _told(departures: Iterable[Departure]) -> tuple[Departed, ...]:
    return tuple(Departed(one.reason, one.generation, one.when_ms) for one in departures)
