"""Chunks that have left, for a while: when each was last used, and how often.

Owns the ghosts: four bytes each, in two tables. Pure but for its own state; the clock is its caller's. Must not know
the index, slots or objects.

What leaves goes into the young table. When that is full it becomes the old one, and the old one is forgotten as a
whole. So what left together is forgotten together: where each ghost ends on its own, chains of chunks come back with
holes in them, and a prefix hits no farther than to the first one (docs/adr/0014-who-leaves-first.md).
"""

USES_BITS = 3  # how often a chunk was used is counted up to what they hold
USES_MAX = (1 << USES_BITS) - 1
PLACES_MIN = 1 << 10
_AGE_BITS = 17
_PRINT_BITS = 32 - _AGE_BITS - USES_BITS  # one in 4,096 strangers that lie at a chunk's place is taken for it
_TURNS = 16  # of the card's slots: ages are told apart up to so many
_FULL = 2 / 3  # of a table: chains of places stay short
_PRINT_MAX = (1 << _PRINT_BITS) - 1  # and 0 is no ghost
_AGE_MASK = (1 << _AGE_BITS) - 1
_PRINT_AT = _AGE_BITS + USES_BITS


class Ghosts:
    """Of a card of `slots` slots: one place for each."""

    def __init__(self, slots: int) -> None:
        self._places = max(PLACES_MIN, slots) // 2 | 1  # of one table; odd: tags that differ in any bit fall apart
        self._full = int(self._places * _FULL)
        self._unit = max(1, -(-slots * _TURNS >> _AGE_BITS))
        self._age_max = (_AGE_MASK // 2) * self._unit
        self._young, self._old = self._empty(), self._empty()
        self._count = 0  # of the young

    @property
    def bytes(self) -> int:
        """What they take, however many there are."""
        return self._young.nbytes + self._old.nbytes

    def add(self, tag: int, age: int, uses: int, now: int) -> None:
        """A chunk leaves that was last used `age` ago, and so often."""
        above, home = divmod(tag, self._places)
        print_ = above % _PRINT_MAX + 1
        at = self._find(self._young, home, print_)
        if not self._young[at]:
            if self._count == self._full:
                self._young, self._old, self._count = self._empty(), self._young, 0
                at = home
            self._count += 1
        last = (now - min(age, self._age_max)) // self._unit & _AGE_MASK
        self._young[at] = print_ << _PRINT_AT | last << USES_BITS | min(uses, USES_MAX)

    def find(self, tag: int, now: int) -> tuple[int, int] | None:
        """(age, uses) of a chunk that has left lately."""
        above, home = divmod(tag, self._places)
        print_ = above % _PRINT_MAX + 1
        ghost = self._young[self._find(self._young, home, print_)] or self._old[self._find(self._old, home, print_)]
        if not ghost:
            return None
        age = (now // self._unit - (ghost >> USES_BITS)) & _AGE_MASK
        return age * self._unit, ghost & USES_MAX

    def _find(self, table: memoryview, at: int, print_: int) -> int:
        """Its place, or the empty one where it would be."""
        while (ghost := table[at]) and ghost >> _PRINT_AT != print_:
            at += 1
            if at == self._places:
                at = 0
        return at

    def _empty(self) -> memoryview:
        return memoryview(bytearray(4 * self._places)).cast("I")
