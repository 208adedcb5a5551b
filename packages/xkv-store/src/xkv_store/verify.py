"""Proving a card that no gateway serves: every object read, or the index made anew from slot headers.

Owns the two passes over a whole card and what they report. Must not know sessions, or how a slot is proved.
"""

from collections.abc import Generator
from dataclasses import dataclass

from .card import Card, CardOptions
from .card_folder import open_folder
from .database import aligned
from .errors import CorruptObject, MediumError
from .key import ObjectKey

READ_SLOTS_MAX = 64  # slots read at a time: 16 MiB of memory, whatever the object's size


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of one object: `problem` is empty if it is sound."""

    key: ObjectKey
    length: int
    problem: str


def verify(options: CardOptions, *, drop: bool) -> Generator[Verified, None, None]:
    """Read and prove every object of the card; with `drop` the corrupt leave it. UserError if it is in use."""
    card = Card.open(options)
    try:
        slot_bytes = card.geometry.slot_bytes
        memory = aligned(READ_SLOTS_MAX * slot_bytes)
        slots = [memory[at : at + slot_bytes] for at in range(0, len(memory), slot_bytes)]
        for key in card.object_keys():
            yield from _verify_one(card, key, slots, drop=drop)
    except BaseException:
        card.abandon()
        raise
    card.close()


def rebuild(options: CardOptions) -> dict[str, object]:
    """Make the index anew from slot headers (what an open does by itself for a damaged one); the card's status."""
    card = Card(options, open_folder(options, rebuild_index=True))
    status = card.status()
    card.close()
    return status


def _verify_one(card: Card, key: ObjectKey, slots: list[memoryview], *, drop: bool) -> Generator[Verified, None, None]:
    plan = card.begin_get(key, 0)
    if plan is None:
        return
    problem = ""
    try:
        for first in range(0, plan.fragments, READ_SLOTS_MAX):
            card.read(plan, slots[: min(READ_SLOTS_MAX, plan.fragments - first)], first)
    except MediumError as error:
        problem = str(error)
        if drop and isinstance(error, CorruptObject):
            card.drop(key, plan.generation, "corrupt")
    finally:
        card.end_get(plan)
    yield Verified(key, plan.length, problem)
