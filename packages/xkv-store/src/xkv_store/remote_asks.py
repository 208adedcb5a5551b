"""Questions for existence that schedulers ask of a remote, in batches.

Owns: which are asked, their bound, and that each is answered once. Must not know: what is done with an answer, cards.
Event loop's thread alone.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from .remote_format import remote_key
from .remote_words import CALL_OBJECTS_MAX, Lane
from .wire_remote import SoughtObject, SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .geometry import Geometry
    from .key import ObjectKey
    from .remote_link import Process

ASKS_MAX: Final = 32_768  # objects whose existence is being asked for; for more there is no answer


class Answers(Protocol):
    """Where answers go: the connection, which sends them at the end of the loop's round."""

    def sought(self, seek: int, answer: SoughtObject) -> None:
        """Send this with others of the same seek."""


class RemoteAsks:
    """Of one gateway. `step` it each round."""

    def __init__(self, link: Process, geometry: Geometry) -> None:
        self._link = link
        self._geometry = geometry
        self._asks: list[tuple[str, Answers, int, int]] = []
        self._asked = 0
        self._draining = False
        self.counters: Counter[str] = Counter()

    def add(self, answers: Answers, seek: int, index: int, key: ObjectKey) -> None:
        """Ask for this object of a seek."""
        if not self._link.is_up or self._draining or self._asked + len(self._asks) >= ASKS_MAX:
            self.counters["remote_asked_failed"] += 1
            answers.sought(seek, SoughtObject(index, SoughtStatus.FAILED))
        else:
            self._asks.append((remote_key(key.encode(), self._geometry), answers, seek, index))

    def drain(self) -> None:
        """Ask nothing more."""
        self._draining = True

    def step(self) -> None:
        """Send what can be sent."""
        while self._asks and (self._link.has_room(Lane.LOOK) or not self._link.is_up):
            taken, self._asks = self._asks[:CALL_OBJECTS_MAX], self._asks[CALL_OBJECTS_MAX:]
            self._asked += len(taken)
            told = partial(self._told, taken)
            if self._link.is_up:
                self._link.call(Lane.LOOK, [key for key, *_ in taken], told)
            else:
                told(None)

    def _told(self, taken: Sequence[tuple[str, Answers, int, int]], codes: Sequence[int] | None) -> None:
        self._asked -= len(taken)
        for (_, answers, seek, index), code in zip(taken, codes or [-1] * len(taken), strict=True):
            status = SoughtStatus.FOUND if code > 0 else SoughtStatus.FAILED if code < 0 else SoughtStatus.ABSENT
            self.counters[f"remote_asked_{status.name.lower()}"] += 1
            answers.sought(seek, SoughtObject(index, status))
