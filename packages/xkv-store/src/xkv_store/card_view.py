"""A card as commands look at it: by the gateway that serves it, or here where none does.

Owns: the choice between the two, and how objects leave by each. Must not know: options, or what is printed.

A purge by a gateway goes through limbo and takes its time; of a card that nobody serves nobody has a hit.
"""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from . import contents, history, sockets
from .audit import closed_card
from .card_lock import CardInUseError
from .card_options import GRACE_MS_MAX, CardOptions
from .departures import Reason
from .errors import MediumError, UserError
from .served import serves, serving
from .tool import Tool
from .wire_tools import NAMESPACES_FORGOTTEN_MAX, OBJECTS_PURGED_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from .audit import ClosedCard
    from .contents import HeldNamespace, HeldObject
    from .history import Histories
    from .index import Index

PURGE_RETRY_S: Final = 0.2  # limbo gives room at the earliest when the next grace time ends
PURGE_STUCK_S_MAX: Final = GRACE_MS_MAX / 1_000 + 60  # without any that left: a grace time and its commit, with room
REMOVED_AT_ONCE: Final = 16_384  # of a closed card, in one transaction


class CardView(Protocol):
    """What a card holds."""

    @property
    def online(self) -> bool:
        """Whether a gateway serves it."""

    def namespaces(self) -> list[HeldNamespace]:
        """Every namespace, in the order of their bytes."""

    def objects(self, prefix: bytes) -> Iterator[HeldObject]:
        """Every object whose key begins with `prefix`, in the order of keys."""

    def explain(self, keys: Sequence[bytes]) -> Histories:
        """What is known of the objects with these keys, in their order."""

    def purge(self, objects: Iterable[HeldObject]) -> Iterator[tuple[int, int]]:
        """Let these leave; (objects, their bytes) that have left, bit by bit. Those that are gone are passed over."""

    def forget(self, namespaces: Sequence[bytes]) -> int:
        """Forget what was published of these, where they hold nothing; of how many."""


@contextmanager
def viewing(card: Path | None, folder: Path | None, named: Path | None) -> Iterator[CardView]:
    """The card in that folder, or of the gateway on the socket `named`; `folder`: where sockets are. UserError."""
    problem = ""
    if named is not None:
        tool = Tool(named)
    else:
        assert card is not None
        try:
            with closed_card(CardOptions(folder=card, create=False)) as closed:
                index = closed.open_index()
                if not isinstance(index, str):
                    with closing(index):
                        yield _Closed(closed, index)
                    return
                problem = index
        except CardInUseError as in_use:
            tool = serving(card, folder or sockets.default_socket_dir(), in_use)
        if problem:
            remedy = f"start its gateway, or type `xkv verify {card} --rebuild`: either makes the index anew"
            raise MediumError(0, f"the index of the card in {card} cannot be used: {problem}", remedy)
    with closing(tool):
        if named is not None and card is not None and not serves(tool, card):
            raise UserError(f"that gateway (pid {tool.pid}) serves another card than the one in {card}")
        yield _Served(tool)


class _Closed:
    online = False

    def __init__(self, card: ClosedCard, index: Index) -> None:
        self._card = card
        self._index = index

    def namespaces(self) -> list[HeldNamespace]:
        return contents.all_namespaces(self._index, self._card.geometry)

    def objects(self, prefix: bytes) -> Iterator[HeldObject]:
        return contents.all_objects(self._index, prefix)

    def explain(self, keys: Sequence[bytes]) -> Histories:
        found = {key: contents.one_object(self._index, key) for key in keys}
        return history.of_records(self._card.departures(self._index), found)

    def purge(self, objects: Iterable[HeldObject]) -> Iterator[tuple[int, int]]:
        objects = iter(objects)
        while batch := list(islice(objects, REMOVED_AT_ONCE)):
            self._card.remove(self._index, [one.key for one in batch])
            self._card.note_left(self._index, [(one.key, one.generation) for one in batch], Reason.PURGED)
            yield len(batch), sum(one.length for one in batch)

    def forget(self, namespaces: Sequence[bytes]) -> int:
        known = self._index.namespaces()
        gone = [one for one in namespaces if one in known and next(self.objects(one), None) is None]
        self._card.remove(self._index, [], gone)
        return len(gone)


class _Served:
    online = True

    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    def namespaces(self) -> list[HeldNamespace]:
        return list(self._tool.namespaces())

    def objects(self, prefix: bytes) -> Iterator[HeldObject]:
        return self._tool.objects(prefix)

    def explain(self, keys: Sequence[bytes]) -> Histories:
        return self._tool.explain(keys)

    def purge(self, objects: Iterable[HeldObject]) -> Iterator[tuple[int, int]]:
        objects = iter(objects)
        while batch := list(islice(objects, OBJECTS_PURGED_MAX)):
            yield from self._purge(batch)

    def _purge(self, batch: list[HeldObject]) -> Iterator[tuple[int, int]]:
        until_s = time.monotonic() + PURGE_STUCK_S_MAX
        while batch:
            begun_s = time.monotonic()
            answer = self._tool.purge(batch)
            time.sleep(time.monotonic() - begun_s)  # at most half of the loop's time is a purge's
            yield answer.objects, answer.object_bytes
            batch = [batch[index] for index in answer.later]
            if answer.objects:
                until_s = time.monotonic() + PURGE_STUCK_S_MAX
            elif time.monotonic() > until_s:
                raise UserError("the gateway lets no object leave any more: its index does not keep up; see its log")
            if batch:
                time.sleep(PURGE_RETRY_S)

    def forget(self, namespaces: Sequence[bytes]) -> int:
        rest = iter(namespaces)
        forgotten = 0
        while some := list(islice(rest, NAMESPACES_FORGOTTEN_MAX)):
            forgotten += self._tool.purge((), some).namespaces
        return forgotten
