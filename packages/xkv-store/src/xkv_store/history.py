"""What is known of objects, whether the card holds them or not.

Owns: these values, and having them of an open card or of one that nobody serves.
Must not know: sockets, commands, what follows from it (`explanation`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .geometry import NAMESPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .card import Card
    from .contents import HeldObject
    from .departures import Departure, Departures, Reason
    from .left_out import LeftOut, Omission


@dataclass(frozen=True, slots=True)
class ObjectHistory:
    """One key's. `held`: None where the card does not hold it; `coming`: something of its chunk is being put.

    `left`, `refused`: the newest first.
    """

    key: bytes
    held: HeldObject | None
    coming: bool
    left: Sequence[Departure]
    refused: Sequence[Departure]

    @property
    def namespace(self) -> bytes:
        """The key's."""
        return self.key[:NAMESPACE_BYTES]


@dataclass(slots=True)
class Histories:
    """Those that were asked for, in that order.

    `refused`: of each of their namespaces, stores that came to nothing since the gateway's start; `left_out`: what
    engines that have attached since then left out themselves (of a card that nobody serves nothing is known of it).
    `left_since_ms`, `refused_since_ms`: since when nothing is missing (0: since the card was made).
    """

    objects: list[ObjectHistory] = field(default_factory=list)
    refused: dict[bytes, Mapping[Reason, int]] = field(default_factory=dict)
    left_since_ms: int = 0
    refused_since_ms: int = 0
    left_out: dict[bytes, dict[LeftOut, Omission]] = field(default_factory=dict)


def of_card(card: Card, keys: Iterable[bytes]) -> Histories:
    """Of an open card. MediumError where its index cannot be read."""
    return _of(
        card.departures,
        [(key, card.contents.find(key), card.is_coming(key)) for key in keys],
    )


def of_records(departures: Departures, found: Mapping[bytes, HeldObject | None]) -> Histories:
    """Of a card that nobody serves: what it holds of each key."""
    return _of(departures, [(key, held, False) for key, held in found.items()])


def _of(departures: Departures, found: Iterable[tuple[bytes, HeldObject | None, bool]]) -> Histories:
    objects = [ObjectHistory(key, held, coming, *departures.of(key)) for key, held, coming in found]
    names = dict.fromkeys(one.namespace for one in objects)
    return Histories(objects, {name: departures.refusals_of(name) for name in names}, *departures.since_ms)
