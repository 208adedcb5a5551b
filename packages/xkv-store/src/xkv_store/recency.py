"""When chunks were asked for and how often, and what that says of who should leave next.

Owns: the stamps in the lookup table, the kinds, how many uses came after which age, and the weights made of that.
Pure but for its own state; the clock is the card's: the generation, which grows by one with each put. Must not know
the index, slots or objects.

Three kinds of objects: new ones; those that were asked for again since they were first put (or were put again after
they had left); and those for which that has happened often. Ages of uses are counted for each kind, and of the chunks
that have left as well (`ghosts`); from these the weights follow that would have given the most hits: an age of an
object is worth so much of one of a new object. With weights of 1 that is LRU, which is right where the card holds what
comes back in time; where it does not, what is new must make way, as in 2Q (Johnson and Shasha, VLDB 1994), S3-FIFO and
ARC. Hits as a function of age, and room as the integral of what is still waited for: Denning's working set, 1968.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .ghosts import USES_BITS, USES_MAX, Ghosts
from .layout import AGAIN, OFTEN

NEW_KIND, AGAIN_KIND, OFTEN_KIND = KINDS = range(3)
FAMILY_OF_KIND = (0, AGAIN, OFTEN)  # with when it was used, but for new ones
KIND_OF_USES = (NEW_KIND, *[AGAIN_KIND] * (USES_MAX - 1), OFTEN_KIND)
USES_OF_KIND = (0, 1, USES_MAX)  # at least

WHEN_BITS = 32 - USES_BITS  # of a stamp; the uses are above it. A stamp of 0 is that of what was not asked for
WHEN_MASK = (1 << WHEN_BITS) - 1  # of a generation: ages are modulo this
# A lookup, its load and what each rank asks are one use: what is asked for within one of such spells counts once.
SPELL_SHARE = 32  # of as many puts as the card holds objects…
SPELL_PUTS_MAX = 4_096  # …and a second, at the most puts that a gateway can do
FAMILIES_MAX = 4_096  # whose chunks come at about the same time: of what an engine serves within a minute
FAMILIES_AT_MAX = 1 << 61  # where they are counted from: no engine's clock comes near it, and none gets to AGAIN

_STEPS_PER_DOUBLING = 4
_DOUBLINGS = 40
_BUCKETS = _STEPS_PER_DOUBLING * _DOUBLINGS
TURN_SHARE = 4  # of a turn of the card (as many puts as it holds objects) there is a new weight after each
TURN_PUTS_MIN = 2_048  # less of a small card is too few requests to judge by
_FADE = 0.85  # of what was counted, at each new weight: half is gone after a turn
GAIN_MIN = 1.0  # times the square root of the uses that LRU finds: a gain that is less is the noise of counting
# Where LRU finds nearly all uses that were counted, few have been seen at the ages that weights are about. What was
# asked for again is then given half as much age again, if that costs next to nothing of what was counted.
_LRU_FINDS = 0.9
_LOSS_MAX = 1 / 10_000
# Never below 1, nor below that of the kind before: what was asked for more often is what others stand behind in their
# prefixes, and has to outlive them.
_WEIGHTS = np.array([1.0, 1.5, *(2.0 ** np.arange(1, 11))])

Floats: TypeAlias = npt.NDArray[np.float64]


class Weights(NamedTuple):
    """How much older an object of a kind may be than a new one, for both to leave at the same time."""

    new: float
    again: float
    often: float


LRU = Weights(1.0, 1.0, 1.0)
SLIGHT = Weights(1.0, 1.5, 1.5)


class Stamps(Protocol):
    """The lookup table's part of it."""

    def stamp_of(self, tag: int) -> tuple[int, int, int, int] | None:
        """(place for `stamp`, generation, ranks, stamp) of a chunk, or None where it is not held."""

    def stamp(self, at: int, stamp: int) -> None:
        """Stamp the chunk at that place."""


class Recency:
    """Of one card; its clock is `now`.

    A family is an engine's word for a request: chunks that come with the same one belong together, and no more is made
    of it. Engines give the time of their clocks, which differ and are set. On the card, a family says when its first
    chunk came, by the card's clock: so many puts after `_families_at`. That is 0 but for cards of earlier versions,
    where families are microseconds since 1970: what comes stands behind the newest of them.
    """

    def __init__(self, slots: int, stamps: Stamps, generation: int = 0, newest_family: int = 0) -> None:
        self.now = generation
        self.weights = LRU
        self._stamps = stamps
        self._ghosts = Ghosts(slots)
        self._ages = tuple(Ages() for _ in KINDS)
        self._adapted = generation
        self._spell = 1  # puts
        self._families_at = min(max(0, newest_family - generation), FAMILIES_AT_MAX)
        self._families: dict[int, int] = {}  # engines': when the first chunk was put; those last come are the last

    def advance(self, generation: int) -> None:
        """The card's clock."""
        self.now = generation

    def touch(self, tag: int) -> None:
        """A chunk was asked for. One that is not held changes nothing."""
        found = self._stamps.stamp_of(tag)
        if found is None:
            return
        at, generation, ranks, stamp = found
        now = self.now + 1  # later than what was put just now
        age = (now - (stamp or generation)) & WHEN_MASK
        uses = stamp >> WHEN_BITS
        if (now - age) // self._spell != now // self._spell:
            self._ages[KIND_OF_USES[uses]].used(age, ranks.bit_count())
            uses = min(uses + 1, USES_MAX)
            self._ages[KIND_OF_USES[uses]].begun(ranks.bit_count())
        if uses:
            self._stamps.stamp(at, uses << WHEN_BITS | now & WHEN_MASK)

    def touch_all(self, tags: Iterable[int]) -> None:
        """These were."""
        for tag in tags:
            self.touch(tag)

    def asked(self, tag: int) -> tuple[int, int]:
        """(generation at which the chunk was last asked for, uses) in this life of the card; zeros for never."""
        found = self._stamps.stamp_of(tag)
        if found is None or not found[3]:
            return 0, 0
        now = self.now + 1
        return now - ((now - found[3]) & WHEN_MASK), found[3] >> WHEN_BITS

    def came(self, tag: int, family: int, generation: int) -> int:
        """An object of an engine's family is put, with that generation: the family it is filed under.

        That is with AGAIN where its chunk left lately. All that comes of one family has one place in time, so that
        later chunks leave before earlier ones.
        """
        self.now = generation
        since = self._families[family] = self._families.pop(family, generation)
        if len(self._families) > FAMILIES_MAX:
            del self._families[next(iter(self._families))]
        ghost = self._ghosts.find(tag, generation)
        if ghost is None:
            self._ages[NEW_KIND].begun(1)
            return self._families_at + since
        age, uses = ghost
        self._ages[KIND_OF_USES[uses]].used(age, 1)
        kind = KIND_OF_USES[min(uses + 1, USES_MAX)]
        self._ages[kind].begun(1)
        return FAMILY_OF_KIND[kind] | since

    def confirmed(self, tag: int, family: int) -> None:
        """An object stands in the lookup table: one that came again says so there, too."""
        if family < AGAIN:
            return
        found = self._stamps.stamp_of(tag)
        if found is not None and not found[3]:
            ghost = self._ghosts.find(tag, self.now)
            uses = max(USES_OF_KIND[kind_of(family)], min(ghost[1] + 1, USES_MAX) if ghost is not None else 0)
            self._stamps.stamp(found[0], uses << WHEN_BITS | family & WHEN_MASK)

    def filed(self, family: int, generation: int) -> int:
        """When an object was last used, as far as its place in the order says: a generation.

        Of what is new and came with one family that is one time: later chunks leave before earlier ones, also where
        those were not new. Of families of an earlier version it is not known.
        """
        if family >= AGAIN:
            return family & ~OFTEN
        since = family - self._families_at
        return since if 0 < since < generation else generation

    def left(self, tag: int, filed: int, uses: int) -> None:
        """A chunk leaves; `filed` is when it was last used."""
        self._ghosts.add(tag, max(0, self.now - filed), uses, self.now)

    def adapt(self, objects: int) -> None:
        """Once in a part of a turn of the card: new weights from what was counted."""
        self._spell = max(1, min(SPELL_PUTS_MAX, objects // SPELL_SHARE))
        span = self.now - self._adapted
        if span < max(TURN_PUTS_MIN, objects // TURN_SHARE):
            return
        self._adapted = self.now
        self.weights = best_weights([ages.curve(span) for ages in self._ages], objects)


def kind_of(family: int) -> int:
    """Of the objects that are filed under it."""
    return NEW_KIND if family < AGAIN else AGAIN_KIND if family < OFTEN else OFTEN_KIND


class Curve(NamedTuple):
    """Of objects of one kind, by the age (EDGES) up to which they are kept: uses found, and objects that this keeps."""

    hits: Floats
    kept: Floats


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

    def curve(self, span: int) -> Curve:
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


def lower_edge(number: int) -> float:
    """The least age of a bucket."""
    if number < _STEPS_PER_DOUBLING:
        return float(number)
    power, step = divmod(number, _STEPS_PER_DOUBLING)
    return float((_STEPS_PER_DOUBLING + step) << power - 1)


EDGES: Floats = np.array([lower_edge(number) for number in range(_BUCKETS + 1)])
_EDGES_WEIGHED: Floats = np.outer(_WEIGHTS, EDGES)  # the ages of one kind beside those of new objects
_AGAIN, _OFTEN = np.triu_indices(len(_WEIGHTS))  # every pair of weights, that of the third kind not the smaller
_LRU_PAIR = 0
_SLIGHT_PAIR = int(np.flatnonzero((_WEIGHTS[_AGAIN] == SLIGHT.again) & (_WEIGHTS[_OFTEN] == SLIGHT.often))[0])


def best_weights(curves: list[Curve], objects: int) -> Weights:
    """The weights with which `objects` objects kept would have been found most often; LRU's unless clearly better."""
    new, again, often = curves
    kept = new.kept + _weighed(again.kept)[_AGAIN] + _weighed(often.kept)[_OFTEN]
    hits = new.hits + _weighed(again.hits)[_AGAIN] + _weighed(often.hits)[_OFTEN]
    found = np.array([np.interp(objects, of_pair, its_hits) for of_pair, its_hits in zip(kept, hits, strict=True)])
    best, lru = int(np.argmax(found)), found[_LRU_PAIR]
    if found[best] > lru + GAIN_MIN * lru**0.5:
        return Weights(1.0, float(_WEIGHTS[_AGAIN[best]]), float(_WEIGHTS[_OFTEN[best]]))
    counted = sum(float(curve.hits[-1]) for curve in curves)
    little_known = lru >= _LRU_FINDS * counted and found[_SLIGHT_PAIR] >= (1 - _LOSS_MAX) * lru
    return SLIGHT if little_known and counted else LRU


def _weighed(curve: Floats) -> Floats:
    """A line for each weight: the curve at the ages that new objects' ages are worth with it."""
    return np.interp(_EDGES_WEIGHED, EDGES, curve)
