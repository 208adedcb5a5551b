"""A gateway for each rank, as one card (ADR 0011).

Owns: `CardPerRank`, `ReadsPerRank`, `SeeksPerRank`: what the manager, staging and remote lookups see of several
gateways, of which each has one rank's objects.
Must not know: how a gateway is reached, vLLM, what a hit is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from xkv_store.client import Client
from xkv_store.client_seeks import SoughtObject
from xkv_store.key import ObjectKey
from xkv_store.left_out import LeftOut

from .asked_card import Card
from .attachment import SchedulerCard, StagedReads
from .entries import on_gateway, split
from .meter import Totals
from .remote_lookups import Seeks
from .staging import Chunk, ReadDone, Reads


def card_of(clients: Sequence[Client]) -> Card:
    """The scheduler's card, through its sessions with one gateway or with each rank's."""
    cards = [SchedulerCard(client) for client in clients]
    return CardPerRank(cards) if cards[1:] else cards[0]


def seeks_of(clients: Sequence[Client]) -> Seeks:
    """What asks for objects that the card lacks, through the same."""
    parts = [client.seeks for client in clients]
    return SeeksPerRank(parts) if parts[1:] else parts[0]


def reads_of(clients: Sequence[Client]) -> Reads:
    """The scheduler's reads, through the same."""
    parts = [StagedReads(client) for client in clients]
    return ReadsPerRank(parts) if parts[1:] else parts[0]


class TablePerRank:
    """`manager.Table` over the tables of all gateways; a tag says which (see `entries`)."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = cards

    def lookup(self, tag: int) -> tuple[int, int] | None:
        """See manager.Table."""
        gateway, own = split(tag)
        return self._cards[gateway].table.lookup(own)


class CardPerRank:
    """`asked_card.Card` over the gateways of all ranks, by rank. One that is down makes all of them be down."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = tuple(cards)
        self.table = TablePerRank(self._cards)

    def alive(self) -> bool:
        """See asked_card.Card: a chunk is of use only with every rank's object."""
        for card in self._cards:  # noqa: SIM110  called at each lookup, and a generator would double its time
            if not card.alive():
                return False
        return True

    def touch(self, tags: Sequence[int]) -> None:
        """See asked_card.Card."""
        found: list[list[int]] = [[] for _ in self._cards]
        for tag in tags:
            gateway, own = split(tag)
            found[gateway].append(own)
        for card, part in zip(self._cards, found, strict=True):
            if part:
                card.touch(part)

    def denials(self) -> tuple[Sequence[tuple[int, int]], Mapping[int, int]]:
        """See asked_card.Card. Each gateway counts generations of its own."""
        pairs: list[tuple[int, int]] = []
        lost: dict[int, int] = {}
        for gateway, card in enumerate(self._cards):
            found, up_to = card.denials()
            if found:
                pairs += [(on_gateway(tag, gateway), generation) for tag, generation in found]
            for generation in up_to.values():
                lost[gateway] = generation
        return pairs, lost

    def store_bytes(self) -> int:
        """See asked_card.Card."""
        return max(card.store_bytes() for card in self._cards)

    def left_out(self, reason: LeftOut, chunks: int) -> None:
        """See asked_card.Card: each of them may be asked."""
        for card in self._cards:
            card.left_out(reason, chunks)

    def worker_counts(self) -> Sequence[int]:
        """See asked_card.Card."""
        return [sum(counts) for counts in zip(*(card.worker_counts() for card in self._cards), strict=True)]

    def fragments(self, tag: int) -> int:
        """See asked_card.Card."""
        gateway, own = split(tag)
        return self._cards[gateway].fragments(own)

    def loaded(self) -> Sequence[Totals]:
        """See asked_card.Card."""
        return [totals for card in self._cards for totals in card.loaded()]

    def close(self) -> None:
        """Detach from all, also where one makes difficulties."""
        with ExitStack() as closing:
            for card in self._cards:
                closing.callback(card.close)


class SeeksPerRank:
    """`remote_lookups.Seeks` over the gateways of all ranks: each is asked for its rank's objects."""

    def __init__(self, parts: Sequence[Seeks]) -> None:
        self._parts = tuple(parts)

    @property
    def usable(self) -> bool:
        """See remote_lookups.Seeks: a chunk is of use only with every rank's object, whichever it lacks."""
        return all(part.usable for part in self._parts)

    def ask(
        self, objects: Sequence[tuple[ObjectKey, int]], *, fetch: bool, on_answer: Callable[[SoughtObject], None]
    ) -> None:
        """See remote_lookups.Seeks."""
        for rank, part in enumerate(self._parts):
            places = [index for index, (key, _) in enumerate(objects) if key.rank == rank]
            if places:
                own = [objects[index] for index in places]
                part.ask(own, fetch=fetch, on_answer=partial(_at, places, on_answer))


def _at(places: Sequence[int], on_answer: Callable[[SoughtObject], None], answer: SoughtObject) -> None:
    on_answer(SoughtObject(places[answer.index], answer.status))


class ReadsPerRank:
    """`staging.Reads` over the rings of all gateways: each rank's object lies in its own.

    A chunk has as many slots in each ring, so that all rings have as many free.
    """

    def __init__(self, parts: Sequence[StagedReads]) -> None:
        self._parts = tuple(parts)
        self.slots = len(parts) * min(part.slots for part in parts)

    @property
    def free(self) -> int:
        """See staging.Reads."""
        return len(self._parts) * min(part.free for part in self._parts)

    def take(self, count: int) -> list[int] | None:
        """See staging.Reads."""
        if count > self.free:
            return None
        each = self._each(count)
        slots: list[int] = []
        for part in self._parts:
            taken = part.take(each)
            assert taken is not None, "nobody else takes them"
            slots += taken
        return slots

    def give(self, slots: Sequence[int]) -> None:
        """See staging.Reads."""
        each = self._each(len(slots))
        for number, part in enumerate(self._parts):
            part.give(slots[number * each : (number + 1) * each])

    def _each(self, count: int) -> int:
        each, rest = divmod(count, len(self._parts))
        assert not rest, "a chunk has an object of each rank, and all have as many slots"
        return each

    def start(self, chunk: Chunk) -> None:
        """See staging.Reads."""
        for rank, part in enumerate(self._parts):
            part.start_object(chunk, rank)

    def send(self) -> None:
        """See staging.Reads. One get on each gateway."""
        for part in self._parts:
            part.send()

    def loaded(self) -> Sequence[Totals]:
        """See staging.Reads."""
        return [totals for part in self._parts for totals in part.loaded()]

    def finished(self) -> Iterable[ReadDone]:
        """See staging.Reads."""
        return [done for part in self._parts for done in part.finished()]
