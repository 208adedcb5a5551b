"""Who leaves first: the longest unasked, what is new before what was asked for again, whole chunks, bounded work."""

from bisect import bisect_left
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xkv_store.eviction import AHEAD_MAX, ORDER_BATCH, OTHERS_PER_OWN, PASS_ENTRIES_MAX, PASSES_MAX, Budget, Chooser
from xkv_store.ghosts import USES_MAX
from xkv_store.key import ObjectKey
from xkv_store.layout import AGAIN, OFTEN, Record, pack_order_key
from xkv_store.recency import FAMILIES_MAX, LRU, Recency, Weights, kind_of
from xkv_store.table import TableWriter
from xkv_store.testing.effort import chances


def key_of(number: int, rank: int = 0) -> ObjectKey:
    return ObjectKey(bytes(16), 0, (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") * 2, rank)


def stranger(number: int) -> ObjectKey:
    """Of another namespace."""
    return ObjectKey(b"\1" * 16, 0, number.to_bytes(8, "little") * 2, 0)


NAMESPACE = bytes(16)


def place(record: Record) -> bytes:
    return pack_order_key(record.family, record.position, record.generation)


@dataclass
class FakeCard:
    """Objects by key; the order is made from them, at once or (`commits` False) never."""

    records: dict[bytes, Record] = field(default_factory=dict)
    order: list[tuple[bytes, bytes]] = field(default_factory=list)
    held_chunks: set[bytes] = field(default_factory=set)
    looks: int = 0
    fetched: int = 0
    commits: bool = True
    own: int | None = None  # objects of those that may leave, where not all may

    def __post_init__(self) -> None:
        self.table = TableWriter.create(4_096, bytes(16), bytes(16))
        self.recency = Recency(1_024, self.table)
        self.chooser = Chooser(self.recency)
        self.choosers = [(b"", self.chooser)]
        self.generation = 0

    def add(self, key: ObjectKey, family: int, position: int = 0) -> None:
        self.generation += 1
        family = self.recency.came(key.tag, family, self.generation)
        record = Record(self.generation, 1, family, position, ())
        self.records[key.encode()] = record
        self.table.put(key.tag, self.generation, key.bit, 1)
        self.recency.confirmed(key.tag, family)
        self.stands(key.encode(), record)

    def stands(self, key: bytes, record: Record) -> None:
        """As when it is committed."""
        self.order.append((place(record), key))
        self.order.sort()
        for only, chooser in self.choosers:
            if key.startswith(only):
                chooser.came(place(record), key)

    def chooser_of(self, only: bytes) -> Chooser:
        self.choosers.append((only, chooser := Chooser(self.recency, only=only)))
        return chooser

    def ask(self, *numbers: int) -> None:
        for number in numbers:
            self.recency.touch(key_of(number).tag)

    @property
    def objects(self) -> int:
        return len(self.records) if self.own is None else self.own

    def order_from(self, order_key: bytes, limit: int, end: bytes) -> list[tuple[bytes, bytes]]:
        self.looks += 1
        at = bisect_left(self.order, (order_key, b""))
        found = self.order[at : min(at + limit, bisect_left(self.order, (end, b"")))]
        self.fetched += len(found)
        return found

    def chunk(self, key: bytes) -> list[tuple[bytes, Record]]:
        return sorted((one, record) for one, record in self.records.items() if one[:-2] == key[:-2])

    def held(self, chunk_key: bytes, chunk: list[tuple[bytes, Record]]) -> bool:
        return chunk_key in self.held_chunks and bool(chunk)

    def refile(self, key: bytes, record: Record, former: Record) -> None:
        assert former == self.records[key]
        self.records[key] = record
        if self.commits:
            self.order.remove((place(former), key))
            self.stands(key, record)

    def evict(
        self,
        steps: int = 1_000,
        chooser: Chooser | None = None,
        budget: Budget | None = None,
        objects: int | None = None,
    ) -> list[ObjectKey] | None:
        self.own = objects
        chunk = (chooser or self.chooser).next_chunk(self, budget or Budget(steps))
        if chunk is None:
            return None
        for key, record in chunk:
            del self.records[key]
            decoded = ObjectKey.decode(key)
            self.table.remove_rank(decoded.tag, decoded.bit)
            if self.commits:
                self.order.remove((place(record), key))
        return [ObjectKey.decode(key) for key, _ in chunk]


def test_families_in_order_and_in_a_family_the_latest_chunk_first() -> None:
    card = FakeCard()
    for family, position in ((1, 0), (1, 1), (1, 2), (2, 0)):
        card.add(key_of(10 * family + position), family, position)
    gone = [card.evict() for _ in range(5)]
    assert gone == [[key_of(12)], [key_of(11)], [key_of(10)], [key_of(20)], None]


def test_the_order_is_that_of_the_last_use_and_not_only_whether_there_was_one() -> None:
    """With a mark that says no more, all would have been spared once, and 0 would have left first."""
    card = FakeCard()
    for number in range(4):
        card.add(key_of(number), number)
    for family, number in enumerate((3, 1, 0, 2), 10):
        card.ask(number)
        card.add(key_of(100 + number), family)
    assert [card.evict() for _ in range(8)] == [[key_of(n)] for n in (103, 3, 101, 1, 100, 0, 102, 2)]


def test_what_was_asked_for_together_leaves_from_its_end() -> None:
    card = FakeCard()
    for position in range(3):
        card.add(key_of(position), 1, position)
    card.ask(0, 1, 2)
    assert [card.evict() for _ in range(3)] == [[key_of(2)], [key_of(1)], [key_of(0)]]


def test_a_scan_does_not_drive_out_what_is_used_where_new_ones_count_more() -> None:
    """With LRU, a hundred chunks that are used once would have driven out the two that were used an hour ago."""
    card = FakeCard()
    for number in (1, 2):
        card.add(key_of(number), number)
    card.ask(1, 2)
    card.recency.weights = Weights(1.0, 200.0, 200.0)
    for number in range(100, 200):
        card.add(key_of(number), number)
        if number >= 104:
            card.evict()
    assert all(key_of(number).encode() in card.records for number in (1, 2))
    card.recency.weights = LRU
    assert [card.evict(), card.evict()] == [[key_of(1)], [key_of(2)]]


def test_what_comes_back_is_filed_with_what_was_asked_for_again_all_of_a_family_at_one_time() -> None:
    card = FakeCard()
    for position in range(3):
        card.add(key_of(position), 1, position)
    while card.evict():
        pass
    for position in range(3):
        card.add(key_of(position), 2, position)
    assert {record.family for record in card.records.values()} == {AGAIN | 4}
    assert [card.evict() for _ in range(3)] == [[key_of(2)], [key_of(1)], [key_of(0)]]


def test_what_was_used_often_is_of_a_third_kind_also_after_it_has_left() -> None:
    card = FakeCard()
    for number in (1, 2):
        card.add(key_of(number), number)
    for _ in range(USES_MAX):
        card.recency.advance(card.recency.now + 1)
        card.ask(1)
    card.ask(2)
    card.recency.weights = Weights(1.0, 1.0, 50.0)
    card.recency.advance(card.recency.now + 30)
    assert card.evict() == [key_of(2)], "both were asked for last at one time"
    assert [record.family & OFTEN for record in card.records.values()] == [OFTEN]
    assert card.evict() == [key_of(1)]
    for number in (1, 2):
        card.add(key_of(number), 9, number)
    assert [kind_of(card.records[key_of(number).encode()].family) for number in (1, 2)] == [2, 1]


def test_what_was_used_often_before_a_restart_still_was() -> None:
    """The stamps are gone then; what the index says is not less for one use more."""
    card = FakeCard()
    card.add(key_of(1), OFTEN | 1)
    card.generation, card.records, card.order = 0, {}, []
    record = Record(1, 1, OFTEN | 1, 0, ())
    card.records[key_of(1).encode()] = record
    card.order.append((place(record), key_of(1).encode()))
    card.recency.advance(5)
    card.ask(1)
    card.add(key_of(2), 2)
    assert card.evict() == [key_of(2)]
    assert [record.family & OFTEN for record in card.records.values()] == [OFTEN]


YEAR_US = 365 * 24 * 3_600 * 1_000_000


@pytest.mark.parametrize("ahead", [1_000, YEAR_US, (1 << 63) - 1_000_000, (1 << 64) - 20])
def test_what_came_while_an_engines_clock_was_ahead_leaves_in_its_turn(ahead: int) -> None:
    """It would have outlived all that came until the clock of the one engine that was set had caught up."""
    card = FakeCard()
    for number in range(4):
        card.add(key_of(number), ahead + number)
    for number in range(4, 8):
        card.add(key_of(number), 10 + number)
        card.add(key_of(10 + number), ahead + number)  # another engine's, whose clock nobody has set
    assert [card.evict() for _ in range(12)] == [[key_of(n)] for n in (0, 1, 2, 3, 4, 14, 5, 15, 6, 16, 7, 17)]


def test_chunks_of_requests_that_come_by_turns_leave_with_their_own_the_latest_first() -> None:
    card = FakeCard()
    for position in range(3):
        for request in (9, 4, 7):
            card.add(key_of(10 * request + position), request, position)
    assert [card.evict() for _ in range(9)] == [[key_of(n)] for n in (92, 91, 90, 42, 41, 40, 72, 71, 70)]


def test_a_request_that_goes_on_is_known_however_many_have_come_since_it_began() -> None:
    card = FakeCard()
    card.add(key_of(0), 5, 0)
    for other in range(2 * FAMILIES_MAX):
        card.recency.came(other, 100 + other, card.generation)
        if other % (FAMILIES_MAX - 2) == 0:
            card.add(key_of(1 + other), 5, 1 + other)
    assert len({record.family for record in card.records.values()}) == 1
    assert len(card.records) == 4


@pytest.mark.parametrize("forgotten", [False, True])
def test_new_chunks_leave_before_the_prefix_that_they_were_put_behind(forgotten: bool) -> None:
    """On a small card a prompt's puts are a good part of what it holds: their end is younger than its beginning."""
    card = FakeCard()
    for position in range(3):
        card.add(key_of(position), 1, position)
    card.recency.advance(card.generation)
    card.ask(0, 1, 2)
    for position in range(3, 9):
        card.add(key_of(position), 2, position)
    for family in range(100, 101 + FAMILIES_MAX * forgotten):
        card.recency.came(family, family, card.generation)
    assert [card.evict() for _ in range(9)] == [[key_of(number)] for number in range(8, -1, -1)]


def test_all_ranks_leave_together_and_are_filed_together() -> None:
    card = FakeCard()
    for number in (1, 2):
        for rank in (0, 1, 64):
            card.add(key_of(number, rank), number)
    card.recency.touch(key_of(1, 64).tag)  # the page of one rank alone was asked for
    assert card.evict() == [key_of(2, 0), key_of(2, 1), key_of(2, 64)]
    assert len({record.family for record in card.records.values()}) == 1
    assert card.evict() == [key_of(1, 0), key_of(1, 1), key_of(1, 64)]


def test_one_that_is_filed_anew_before_its_commit_is_not_taken_at_its_old_place() -> None:
    card = FakeCard(commits=False)
    for number in range(3):
        card.add(key_of(number), number)
    card.ask(0)
    assert card.evict() == [key_of(1)]
    assert card.evict() == [key_of(2)]
    assert card.evict() is None, "its new place is not in the order yet"


def test_the_held_stays() -> None:
    card = FakeCard()
    for number in range(3):
        card.add(key_of(number), number)
    card.held_chunks = {key_of(0).chunk_key, key_of(1).chunk_key}
    assert card.evict() == [key_of(2)]
    assert card.evict(steps=50) is None
    card.held_chunks = set()
    assert card.evict() == [key_of(0)]


def test_one_that_was_held_leaves_soon_also_where_others_come_all_the_time() -> None:
    card = FakeCard()
    card.add(key_of(0), 0)
    card.held_chunks = {key_of(0).chunk_key}
    card.add(key_of(1), 1)
    assert card.evict() == [key_of(1)]
    card.held_chunks = set()
    for number in range(2, PASS_ENTRIES_MAX + 70):
        card.add(key_of(number), number)
        if card.evict() == [key_of(0)]:
            return
    raise AssertionError("the hand never began anew")


@pytest.mark.parametrize("objects", [1, 2, 10, 100])
def test_one_that_was_held_on_a_small_card_leaves_after_two_turns_of_it(objects: int) -> None:
    """It had to wait until 2,048 others had left: 200 turns of a card of ten objects."""
    card = FakeCard()
    for number in range(objects):
        card.add(key_of(number), number)
    card.held_chunks = {key_of(0).chunk_key}
    assert card.evict() == ([key_of(1)] if objects > 1 else None)
    card.held_chunks = set()
    for number in range(objects, 3 * objects + 2):
        card.add(key_of(number), number)
        if card.evict() == [key_of(0)]:
            return
    raise AssertionError("the hand did not begin anew in time")


@pytest.mark.parametrize("own", [False, True])
def test_what_comes_to_where_the_hand_has_been_is_the_next_to_leave(own: bool) -> None:
    """Of a request that goes on: it stayed until the hand had begun anew, while what stands before it left."""
    card = FakeCard()
    for number in range(200):
        card.add(stranger(number), number)
    chooser = card.chooser_of(NAMESPACE) if own else card.chooser
    for position in range(4):
        card.add(key_of(position), 1_000, position)
    for number in range(10, 20):
        card.add(key_of(number), 1_000 + number)
    for number in range(0 if own else 200):
        assert card.evict() == [stranger(number)]
    assert [card.evict(chooser=chooser, objects=20) for _ in range(3)] == [[key_of(n)] for n in (3, 2, 1)]
    for position in (4, 5, 6):
        card.add(key_of(position), 1_000, position)
    budget = Budget(100)
    for number in (6, 5, 4, 0, 10, 11):
        assert card.evict(chooser=chooser, objects=20, budget=budget) == [key_of(number)]
    assert budget.left == 94, "nothing was looked at twice"


def test_what_comes_to_a_part_where_nothing_was_is_found_at_once_however_many_others_stand_before_it() -> None:
    card = FakeCard()
    for number in range(10):
        card.add(key_of(number), number)
    for number in range(2_000):
        card.add(stranger(number), 100 + number)
    own = card.chooser_of(NAMESPACE)
    card.ask(*range(10))
    card.recency.advance(card.recency.now + 10)
    assert card.evict(chooser=own, steps=9_000, objects=10) == [key_of(0)], "all are of the second part now"
    assert card.evict(chooser=own, steps=9_000, objects=10) == [key_of(1)]
    card.recency.weights = Weights(1.0, 1_000.0, 1_000.0)
    for number in range(20, 40):
        budget = Budget(20)
        card.add(key_of(number), 5_000 + number)
        assert card.evict(chooser=own, budget=budget, objects=10) == [key_of(number)]


def test_what_is_remembered_of_what_comes_late_is_bounded_and_the_rest_is_fetched() -> None:
    card = FakeCard()
    late = 3 * AHEAD_MAX
    for number in range(2):
        card.add(key_of(number), number)
    assert [card.evict(), card.evict()] == [[key_of(0)], [key_of(1)]]
    for number in range(2, late):
        card.add(key_of(number), 1, number)
        assert len(card.chooser._hands[0].ahead) <= AHEAD_MAX
    card.add(key_of(late), 2)
    assert [card.evict() for _ in range(2, late)] == [[key_of(number)] for number in range(late - 1, 1, -1)]
    assert card.evict() == [key_of(late)]


def test_a_small_quota_on_a_large_card_does_not_pass_all_that_is_others_at_each_of_its_turns() -> None:
    """Its objects stand behind all others': a turn of five objects would cost a look at a thousand."""
    card = FakeCard()
    for number in range(1_000):
        card.add(stranger(number), number)
    own = card.chooser_of(NAMESPACE)
    for number in range(5):
        card.add(key_of(number), 2_000 + number)
    card.evict(chooser=own, steps=10_000, objects=5)
    budget = Budget(100_000)
    for number in range(5, 500):
        card.add(key_of(number), 2_000 + number)
        assert card.evict(chooser=own, budget=budget, objects=5) is not None
    assert 100_000 - budget.left < 500 * (1 + OTHERS_PER_OWN)


def test_what_has_left_but_stands_in_the_order_still_costs_no_more_than_some_passes() -> None:
    """Until its commit, which may fail for a long time: a hand that begins anew meets the same again and again."""
    card = FakeCard()
    for number in range(12):
        card.add(key_of(number), number)
    card.commits = False
    for number in (2, 3):
        assert card.evict() == [key_of(number - 2)]
    card.held_chunks = {key_of(number).chunk_key for number in range(2, 12)}
    budget = Budget(10_000)
    assert card.evict(budget=budget) is None
    assert 10_000 - budget.left <= 10 * PASSES_MAX + ORDER_BATCH
    card.held_chunks = set()
    assert card.evict() is not None


def test_where_all_is_held_a_small_card_says_so_after_three_passes() -> None:
    card = FakeCard()
    for number in range(10):
        card.add(key_of(number), number)
    card.held_chunks = {key_of(number).chunk_key for number in range(10)}
    for _ in range(5):
        budget = Budget(1_000)
        assert card.evict(budget=budget) is None
        assert 1_000 - budget.left <= 10 * PASSES_MAX


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("ask"), st.integers(0, 40), st.booleans()),
        st.tuples(st.just("evict"), st.just(0), st.booleans()),
        st.tuples(st.just("evict"), st.just(0), st.booleans()),
    ),
    max_size=120,
)


@chances(200)
@given(steps=STEPS)
def test_what_leaves_is_what_was_used_longest_ago_whatever_comes_by_whatever_turns(
    steps: list[tuple[str, int, bool]],
) -> None:
    """Of a namespace alone as well; requests go on, and what has left comes back."""
    card = FakeCard()
    makers = {True: key_of, False: stranger}
    own = {True: card.chooser_of(NAMESPACE), False: card.chooser}
    for number, (what, which, mine) in enumerate(steps):
        if what == "put" and makers[mine](number % 41).encode() not in card.records:
            card.add(makers[mine](number % 41), which, number)
        elif what == "ask":
            card.recency.touch(makers[mine](which).tag)
        elif what == "evict":
            last = {
                key: max(
                    card.recency.asked(ObjectKey.decode(key).tag)[0],
                    card.recency.filed(record.family, record.generation),
                )
                for key, record in card.records.items()
                if not mine or key.startswith(NAMESPACE)
            }
            left = card.evict(chooser=own[mine], objects=len(last), steps=10_000)
            assert [last[key.encode()] for key in left or ()] == ([min(last.values())] if last else [])


def test_work_is_bounded_by_the_budget() -> None:
    card = FakeCard()
    for number in range(500):
        card.add(key_of(number), number)
    card.ask(*range(500))
    budget = Budget(100)
    assert card.chooser.next_chunk(card, budget) is None
    assert budget.left == 0
    assert card.chooser.next_chunk(card, Budget(1_000)) is not None  # goes on where it was


def test_where_one_part_is_empty_the_other_is_not_fetched_for_it_again_and_again() -> None:
    card = FakeCard()
    for number in range(500):
        card.add(key_of(number), number)
    for _ in range(2):  # all are of the second part, and were asked for again since
        card.ask(*range(500))
        card.recency.advance(card.recency.now + 1)
        budget = Budget(500)
        card.fetched = 0
        card.chooser.next_chunk(card, budget)
    assert not budget.left
    assert card.fetched <= 500 + 2 * ORDER_BATCH


def test_a_place_that_an_object_no_longer_has_is_passed_over() -> None:
    """The order is of the last commit: the replaced object's old place is still in it."""
    card = FakeCard()
    card.add(key_of(1), 1)
    card.add(key_of(2), 2)
    card.add(key_of(1), 3)
    card.commits = False
    assert card.evict() == [key_of(2)]
    assert card.evict() == [key_of(1)]


def test_one_namespace_alone() -> None:
    card = FakeCard()
    for number in range(4):
        card.add(key_of(number), number)
    own = card.chooser_of(key_of(2).encode())
    assert card.evict(chooser=own) == [key_of(2)]
    assert card.evict(steps=50, chooser=own) is None


def test_a_namespace_alone_leaves_however_many_others_stand_before_it() -> None:
    card = FakeCard()
    for number in range(PASS_ENTRIES_MAX + 10):
        card.add(key_of(number), number)
    last = key_of(PASS_ENTRIES_MAX + 9)
    own = card.chooser_of(last.encode())
    assert card.evict(steps=2 * PASS_ENTRIES_MAX, chooser=own) == [last]


def test_a_namespace_alone_leaves_though_what_is_others_is_older_in_other_parts_of_the_order() -> None:
    """Others' entries are no candidates: hands that are at them by turns would be chosen for ever."""
    card = FakeCard()
    for number in range(8):
        card.add(key_of(number), number)
    for number in range(4):
        key = key_of(number).encode()
        card.refile(key, card.records[key]._replace(family=OFTEN | number), card.records[key])
    card.add(last := key_of(8), 8)
    former = card.records[last.encode()]
    card.refile(last.encode(), former._replace(family=AGAIN | 9), former)
    assert card.evict(chooser=card.chooser_of(last.encode())) == [last]


def test_an_empty_order_ends_at_once() -> None:
    card = FakeCard()
    assert card.evict() is None
    assert card.looks <= 9


def test_damaged_entries_of_the_order_are_passed_over() -> None:
    card = FakeCard(commits=False)
    card.add(key_of(1), 1)
    card.order += [
        (b"\0short", key_of(2).encode()),
        (pack_order_key(0, 0, 1), b"no key"),
        (pack_order_key(0, 0, 2), key_of(3).encode()),
    ]
    card.order.sort()
    assert card.evict() == [key_of(1)]
