"""When chunks were asked for, what left without being asked for again, and what that says of who should leave next.

Owns: the ghosts (chunks that have left, for a while), how many uses came after which age, and the weight made of both.
Pure but for its own state; the clock is the card's: the generation, which grows by one with each put. Must not know
the index, slots or objects.

Two kinds of objects: new ones, and those that were asked for again since they were first put (or were put again after
they had left). Reuse ages of both are counted; from these the weight follows that would have given the most hits
(`weight`: a new object's age counts so many times). With weight 1 that is LRU, which is right where the card holds what
comes back in time; where it does not, what is new must make way, as in 2Q (Johnson and Shasha, VLDB 1994), S3-FIFO and
ARC. Hits as a function of age, and room as the integral of what is still waited for: Denning's working set, 1968.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .layout import AGAIN

STAMP_BITS = 32
STAMP_MASK = (1 << STAMP_BITS) - 1  # of a generation: ages are modulo this
GHOSTS_PER_SLOT = 1  # 4 bytes each. An object has several slots, and what comes back after four turns is worth knowing
GHOSTS_MIN = 1 << 10
WAYS = 8  # ghosts that share a bucket: the oldest of them goes. With one, chains of chunks are remembered with holes
_PRINT_BITS, _AGE_BITS = 11, 20  # of a ghost: one in 2,048 strangers is taken for it; the age as below; its kind
_GHOST_TURNS = 16  # ages of ghosts are counted up to so many times the card's slots
NEVER = 0
FAMILIES_MAX = 1_024  # whose chunks come again at about the same time

_STEPS_PER_DOUBLING = 4
_DOUBLINGS = 40
_BUCKETS = _STEPS_PER_DOUBLING * _DOUBLINGS
_FADE = 0.5  # of what was counted, at each new weight
GAIN_MIN = 1.05  # a weight that promises less than this over LRU is noise
TURN_PUTS_MIN = 8_192  # a turn of a small card is too few requests to judge by
# Never below 1: what was asked for again is what new objects stand behind in their prefixes, and has to outlive them.
_WEIGHTS = 2.0 ** (np.arange(21) / 2)
_HALVINGS = 40

Floats = npt.NDArray[np.float64]


class Stamps(Protocol):
    """The lookup table's part of it."""

    def ask(self, tag: int, stamp: int) -> tuple[int, int, int] | None:
        """Stamp a chunk; (generation, ranks, former stamp), or None where it is not held."""

    def asked(self, tag: int) -> int:
        """The chunk's stamp; NEVER where it has none."""


class Recency:
    """Of one card. `weight`: how many times a new object's age counts beside that of one that was asked for again."""

    def __init__(self, slots: int, stamps: Stamps, generation: int = 0) -> None:
        self.now = generation
        self.weight = 1.0
        self._stamps = stamps
        self._buckets = (
            max(GHOSTS_MIN, slots * GHOSTS_PER_SLOT) // WAYS | 1
        )  # odd: tags that differ in any bit fall apart
        self._ghosts = memoryview(bytearray(4 * WAYS * self._buckets)).cast("I")
        self._unit = max(1, -(-slots * _GHOST_TURNS >> _AGE_BITS))
        self._ages = (Ages(), Ages())
        self._adapted = generation
        self._families: dict[int, int] = {}  # when the first of them came again

    def advance(self, generation: int) -> None:
        """The card's clock."""
        self.now = generation

    def touch(self, tag: int) -> None:
        """A chunk was asked for. One that is not held changes nothing."""
        found = self._stamps.ask(tag, _stamp(self.now + 1))  # later than what was put just now
        if found is None:
            return
        generation, ranks, stamp = found
        age = (self.now + 1 - (stamp or generation)) & STAMP_MASK
        self._ages[stamp != NEVER].used(age, ranks.bit_count())
        self._ages[1].begun(ranks.bit_count())

    def touch_all(self, tags: Iterable[int]) -> None:
        """These were."""
        for tag in tags:
            self.touch(tag)

    def asked_at(self, tag: int) -> int:
        """When the chunk was last asked for in this life of the card, as a generation; 0 for never."""
        stamp = self._stamps.asked(tag)
        return self.now + 1 - ((self.now + 1 - stamp) & STAMP_MASK) if stamp else 0

    def came(self, tag: int, family: int, generation: int) -> int:
        """An object is put, with that generation: the family it is filed under, AGAIN where its chunk left lately.

        All that came again of one family has one place in time, so that later chunks leave before earlier ones.
        """
        self.now = generation
        at, place = self._place_of(tag)
        known = place < WAYS
        self._ages[known].begun(1)
        if not known:
            return min(family, AGAIN - 1)
        ghost = self._ghosts[at + place]
        age = (self.now // self._unit - (ghost >> 1)) % (1 << _AGE_BITS) * self._unit
        self._ages[ghost & 1].used(age, 1)
        since = self._families.setdefault(family, self.now)
        if len(self._families) > FAMILIES_MAX:
            del self._families[next(iter(self._families))]
        return AGAIN | since

    def confirmed(self, tag: int, family: int) -> None:
        """An object stands in the lookup table: one that came again says so there, too."""
        if family >= AGAIN:
            self._stamps.ask(tag, _stamp(family - AGAIN))

    def left(self, tag: int, last: int, *, again: bool) -> None:
        """A chunk leaves; `last` is when it was put, or asked for (`again`)."""
        ghosts = self._ghosts
        at, place = self._place_of(tag)
        for number in range(at + min(place, WAYS - 1), at, -1):
            ghosts[number] = ghosts[number - 1]
        stamp = min(last, self.now) // self._unit % (1 << _AGE_BITS)
        ghosts[at] = (self._print_of(tag) << _AGE_BITS | stamp) << 1 | again

    def adapt(self, objects: int) -> None:
        """Once in a turn of the card (as many puts as it holds objects): a new weight from what was counted."""
        if self.now - self._adapted < max(TURN_PUTS_MIN, objects):
            return
        span, self._adapted = self.now - self._adapted, self.now
        new, again = (ages.curves(span) for ages in self._ages)
        self.weight = best_weight(new, again, objects)

    def _print_of(self, tag: int) -> int:
        """What tells this chunk's ghost from others'; 0 is no ghost's."""
        return tag // self._buckets % ((1 << _PRINT_BITS) - 1) + 1

    def _place_of(self, tag: int) -> tuple[int, int]:
        """Where its bucket begins, and the ghost's place in it; WAYS where there is none."""
        at = tag % self._buckets * WAYS
        print_, shift = self._print_of(tag), _AGE_BITS + 1
        for place, ghost in enumerate(self._ghosts[at : at + WAYS]):
            if ghost >> shift == print_:
                return at, place
        return at, WAYS


def _stamp(generation: int) -> int:
    """Its lower half; the one before where that would say NEVER."""
    return generation & STAMP_MASK or STAMP_MASK


class Curve:
    """Of objects of one kind, by the age up to which they are kept: uses that find them, and how many that keeps."""

    def __init__(self, hits: Floats, kept: Floats) -> None:
        self._hits, self._kept = hits, kept

    def hits(self, age: Floats) -> Floats:
        """Uses."""
        return np.interp(age, EDGES, self._hits)

    def kept(self, age: Floats) -> Floats:
        """Objects."""
        return np.interp(age, EDGES, self._kept)


class Ages:
    """How many objects of one kind began to wait for a use, and how many uses came after which age; old counts fade."""

    def __init__(self) -> None:
        self._uses = [0.0] * _BUCKETS
        self._begun = 0.0
        self._span = 0.0

    def begun(self, objects: int) -> None:
        """So many wait from now on."""
        self._begun += objects

    def used(self, age: int, objects: int) -> None:
        """So many were used at that age."""
        self._uses[bucket(age)] += objects

    def curves(self, span: int) -> Curve:
        """From all counts of `span` more puts; then they fade."""
        self._span += span
        hits = np.concatenate(([0.0], np.cumsum(self._uses)))
        waiting = np.maximum(self._begun - hits, 0.0)
        kept = np.concatenate(([0.0], np.cumsum((waiting[1:] + waiting[:-1]) / 2 * np.diff(EDGES)))) / self._span
        self._uses = [uses * _FADE for uses in self._uses]
        self._begun *= _FADE
        self._span *= _FADE
        return Curve(hits, kept)


def bucket(age: int) -> int:
    """The bucket of an age: four in each doubling."""
    if age < _STEPS_PER_DOUBLING:
        return max(age, 0)
    power = age.bit_length() - 1
    return min(_BUCKETS - 1, _STEPS_PER_DOUBLING * (power - 1) + (age >> power - 2) - _STEPS_PER_DOUBLING)


def _edge(number: int) -> float:
    """The least age of a bucket."""
    if number < _STEPS_PER_DOUBLING:
        return float(number)
    power, step = divmod(number, _STEPS_PER_DOUBLING)
    return float((_STEPS_PER_DOUBLING + step) << power - 1)


EDGES: Floats = np.array([_edge(number) for number in range(_BUCKETS + 1)])


def best_weight(new: Curve, again: Curve, objects: int) -> float:
    """The weight with which `objects` objects kept would have been found most often; 1 unless it is clearly better."""
    low, high = np.zeros(len(_WEIGHTS)), np.full(len(_WEIGHTS), EDGES[-1])
    for _ in range(_HALVINGS):  # the age up to which new objects can be kept, for each weight
        middle = (low + high) / 2
        fits = new.kept(middle) + again.kept(middle * _WEIGHTS) <= objects
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    hits = new.hits(low) + again.hits(low * _WEIGHTS)
    best = int(np.argmax(hits))
    return float(_WEIGHTS[best]) if hits[best] >= GAIN_MIN * hits[0] else 1.0
