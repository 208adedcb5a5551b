"""SIEVE: the unvisited oldest leaves, the visited gets one more lap, whole chunks only, bounded work."""

from bisect import bisect_left
from dataclasses import dataclass, field

from xkv_store.eviction import SPARED_MAX, Budget, Marks, Sieve
from xkv_store.key import ObjectKey
from xkv_store.layout import Record, pack_order_key


def key_of(number: int, rank: int = 0) -> ObjectKey:
    return ObjectKey(bytes(16), 0, (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") * 2, rank)


@dataclass
class FakeCard:
    """Objects by key; the order is made from them."""

    records: dict[bytes, Record] = field(default_factory=dict)
    order: list[tuple[bytes, bytes]] = field(default_factory=list)
    held_chunks: set[bytes] = field(default_factory=set)
    looks: int = 0

    def add(self, key: ObjectKey, family: int, position: int = 0) -> None:
        generation = len(self.order) + 1
        self.records[key.encode()] = Record(generation, 1, family, position, ())
        self.order.append((pack_order_key(family, position, generation), key.encode()))
        self.order.sort()

    def order_from(self, order_key: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        self.looks += 1
        at = bisect_left(self.order, (order_key, b""))
        return self.order[at : at + limit]

    def generation_of(self, key: bytes) -> int | None:
        record = self.records.get(key)
        return record.generation if record is not None else None

    def chunk(self, chunk_key: bytes) -> list[tuple[bytes, Record]]:
        return sorted((key, record) for key, record in self.records.items() if key[:-2] == chunk_key)

    def held(self, chunk_key: bytes, chunk: list[tuple[bytes, Record]]) -> bool:
        return chunk_key in self.held_chunks and bool(chunk)

    def evict(self, sieve: Sieve, steps: int = 1_000) -> list[ObjectKey] | None:
        chunk = sieve.next_chunk(self, Budget(steps))
        if chunk is None:
            return None
        for key, _ in chunk:
            del self.records[key]
        return [ObjectKey.decode(key) for key, _ in chunk]


def test_families_in_order_and_in_a_family_the_latest_chunk_first() -> None:
    card, sieve = FakeCard(), Sieve(100)
    for family, position in ((2, 0), (1, 0), (1, 1), (1, 2)):
        card.add(key_of(10 * family + position), family, position)
    gone = [card.evict(sieve) for _ in range(5)]
    assert gone == [[key_of(12)], [key_of(11)], [key_of(10)], [key_of(20)], None]


def test_the_visited_is_spared_once() -> None:
    card, sieve = FakeCard(), Sieve(100)
    for number in range(4):
        card.add(key_of(number), number)
    sieve.marks.set_all([key_of(0).tag, key_of(2).tag])
    assert [card.evict(sieve) for _ in range(4)] == [[key_of(1)], [key_of(3)], [key_of(0)], [key_of(2)]]


def test_a_scan_does_not_drive_out_what_is_used() -> None:
    """With LRU, a hundred chunks that are used once would have driven out the two in use."""
    card, sieve = FakeCard(), Sieve(400)
    used = [key_of(number) for number in (1, 2)]
    for number, key in enumerate(used):
        card.add(key, number)
    for number in range(100, 200):
        card.add(key_of(number), number)
        sieve.marks.set_all([key.tag for key in used])
        if number >= 104:
            card.evict(sieve)
    assert all(key.encode() in card.records for key in used)


def test_all_ranks_leave_together_and_are_spared_together() -> None:
    card, sieve = FakeCard(), Sieve(100)
    for number in (1, 2):
        for rank in (0, 1, 64):
            card.add(key_of(number, rank), number)
    sieve.marks.set(key_of(1, 64).tag)  # the page of one rank alone was touched
    assert card.evict(sieve) == [key_of(2, 0), key_of(2, 1), key_of(2, 64)]
    assert card.evict(sieve) == [key_of(1, 0), key_of(1, 1), key_of(1, 64)]


def test_groups_at_one_place_do_not_undo_each_others_sparing() -> None:
    """Ranks of several groups' chunks of one position alternate in the order."""
    card, sieve = FakeCard(), Sieve(100)
    for rank in (0, 1):
        for number in (1, 2):
            card.add(key_of(number, rank), 5, 7)
    card.add(key_of(9), 6)
    sieve.marks.set_all([key_of(1).tag, key_of(2).tag])
    assert card.evict(sieve) == [key_of(9)]


def test_what_was_spared_leaves_in_the_next_pass_also_where_all_stand_at_one_place() -> None:
    """Objects without a family of their own filled a card for ever once each had been read."""
    card, sieve = FakeCard(), Sieve(100)
    for number in range(3):
        card.add(key_of(number), 0)
        sieve.marks.set(key_of(number).tag)
    assert card.evict(sieve) == [key_of(0)]
    assert card.evict(sieve) == [key_of(1)]


def test_the_held_stays() -> None:
    card, sieve = FakeCard(), Sieve(100)
    for number in range(3):
        card.add(key_of(number), number)
    card.held_chunks = {key_of(0).chunk_key, key_of(1).chunk_key}
    assert card.evict(sieve) == [key_of(2)]
    assert card.evict(sieve, steps=50) is None
    card.held_chunks = set()
    assert card.evict(sieve) == [key_of(0)]


def test_work_is_bounded_by_the_budget() -> None:
    card, sieve = FakeCard(), Sieve(1_000)
    for number in range(500):
        card.add(key_of(number), number)
        sieve.marks.set(key_of(number).tag)
    budget = Budget(100)
    assert sieve.next_chunk(card, budget) is None
    assert budget.left == 0
    assert sieve.next_chunk(card, Budget(1_000)) is not None  # goes on where it was


def test_a_place_that_an_object_no_longer_has_is_passed_over() -> None:
    """The order is of the last commit: the replaced object's old place is still in it."""
    card, sieve = FakeCard(), Sieve(100)
    card.add(key_of(1), 1)
    card.add(key_of(2), 2)
    card.add(key_of(1), 3)
    assert card.evict(sieve) == [key_of(2)]
    assert card.evict(sieve) == [key_of(1)]


def test_an_empty_order_ends_at_once() -> None:
    card, sieve = FakeCard(), Sieve(10)
    assert sieve.next_chunk(card, Budget(1_000)) is None
    assert card.looks <= 3


def test_damaged_entries_of_the_order_are_passed_over() -> None:
    card, sieve = FakeCard(), Sieve(10)
    card.add(key_of(1), 1)
    card.order += [
        (b"\0short", key_of(2).encode()),
        (pack_order_key(0, 0, 1), b"no key"),
        (pack_order_key(0, 0, 2), key_of(3).encode()),
    ]
    card.order.sort()
    assert card.evict(sieve) == [key_of(1)]


def test_marks_are_cleared_by_looking() -> None:
    marks = Marks(10)
    marks.set(5)
    assert marks.clear(5)
    assert not marks.clear(5)
    assert not marks.clear(6)


def test_what_is_remembered_at_one_place_is_bounded() -> None:
    sieve = Sieve(10)
    card = FakeCard()
    card.add(key_of(1), 0)
    sieve._spared = {number.to_bytes(4, "big") for number in range(SPARED_MAX)}
    assert card.evict(sieve) == [key_of(1)]
    assert not sieve._spared
