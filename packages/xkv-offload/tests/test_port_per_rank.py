"""A gateway for each rank: a hit is one on all, what fails on one is nobody else's, rings are taken alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from xkv_offload.attachment import StagedReads
from xkv_offload.manager import ManagerOptions, Words, XkvManager
from xkv_offload.metrics import WORKER_COUNTERS
from xkv_offload.port_per_rank import CardPerRank, ReadsPerRank, SeeksPerRank, card_of, reads_of
from xkv_offload.staging import Chunk, Staging
from xkv_store.client_seeks import SoughtObject, SoughtStatus
from xkv_store.control import ControlPage
from xkv_store.key import ObjectKey
from xkv_store.left_out import LeftOut
from xkv_store.ring import Ring, SlotRegion
from xkv_store.wire import LoadedObject, LoadStatus

NAMESPACE = b"n" * 16
RANKS = 3
ANSWERED_BYTES = 100


class FakeTable:
    def __init__(self) -> None:
        self.entries: dict[int, tuple[int, int]] = {}

    @property
    def lookup(self) -> Callable[[int], tuple[int, int] | None]:
        return self.entries.get


@dataclass
class FakeCard:
    """One gateway's: it has the objects that are confirmed on it, in generations of its own."""

    rank: int
    table: FakeTable = field(default_factory=FakeTable)
    living: bool = True
    touched: list[int] = field(default_factory=list)
    denied: list[tuple[int, int]] = field(default_factory=list)
    lost_up_to: int = -1
    backlog: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    is_closed: bool = False
    error: Exception | None = None
    omissions: list[tuple[LeftOut, int]] = field(default_factory=list)

    def left_out(self, reason: LeftOut, chunks: int) -> None:
        self.omissions.append((reason, chunks))

    def alive(self) -> bool:
        return self.living

    def touch(self, tags: Sequence[int]) -> None:
        self.touched.extend(tags)

    def denials(self) -> tuple[Sequence[tuple[int, int]], Mapping[int, int]]:
        denied, self.denied = self.denied, []
        lost, self.lost_up_to = self.lost_up_to, -1
        return denied, {0: lost} if lost >= 0 else {}

    def store_bytes(self) -> int:
        return self.backlog

    def worker_counts(self) -> Sequence[int]:
        return [0] * len(WORKER_COUNTERS)

    def fragments(self, tag: int) -> int:
        return self.sizes.get(tag, 0)

    def loaded(self) -> Sequence[tuple[int, int]]:
        return [(self.rank + 1, 7)]

    def close(self) -> None:
        self.is_closed = True
        if self.error is not None:
            raise self.error

    def confirm(self, key: bytes, generation: int, *, fragments: int = 1) -> None:
        tag = self.tag(key)
        self.table.entries[tag] = (generation, 1 << self.rank)
        self.sizes[tag] = fragments

    def tag(self, key: bytes) -> int:
        return ObjectKey(NAMESPACE, int.from_bytes(key[-4:], "big"), key[:-4], self.rank).tag


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4 + bytes(4)


def request(name: str = "r") -> Any:
    return SimpleNamespace(req_id=name)


@dataclass
class Rig:
    manager: XkvManager
    cards: list[FakeCard]

    def confirm(self, number: int, *generations: int) -> None:
        for card, generation in zip(self.cards, generations, strict=True):
            card.confirm(key(number), generation)

    def lookup(self, number: int, name: str = "r") -> object:
        return self.manager.lookup(key(number), request(name))

    def store(self, *numbers: int, name: str = "r") -> Any:
        output: Any = self.manager.prepare_store([key(number) for number in numbers], request(name))
        return output.store_spec


def rig(staging: Staging | None = None) -> Rig:
    cards = [FakeCard(rank) for rank in range(RANKS)]
    manager = XkvManager(
        card=CardPerRank(cards),
        options=ManagerOptions(
            namespace=NAMESPACE,
            ranks=RANKS,
            group_bytes={0: 100},
            store_backlog_bytes=1000,
            loads=True,
            stores=True,
            gateways=RANKS,
        ),
        staging=staging,
        words=Words(
            miss="MISS",
            hit="HIT",
            pending="PENDING",
            prepare_store_output=SimpleNamespace,
            request_context=SimpleNamespace,
            stats=SimpleNamespace,
            load_source=None,
            features={"labelled_stats": True, "histogram_stats": True},
        ),
    )
    return Rig(manager, cards)


def test_a_hit_is_one_on_every_gateway() -> None:
    one = rig()
    for card in one.cards:
        assert one.lookup(1) == "MISS"
        card.confirm(key(1), 1)
    assert one.lookup(1) == "HIT"
    assert one.lookup(2) == "MISS"


def test_what_is_left_out_is_told_to_each_gateway() -> None:
    one = rig()
    one.cards[1].backlog = 1_000
    assert one.store(1, 2).keys == ()
    assert [card.omissions for card in one.cards] == [[(LeftOut.BACKLOG, 2)]] * RANKS


@pytest.mark.parametrize("rank", range(RANKS))
def test_another_ranks_object_is_none_of_its_gateways(rank: int) -> None:
    """As where cards have changed places: all three tables know the chunk, and one has another rank's."""
    one = rig()
    one.confirm(1, 1, 1, 1)
    tag = one.cards[rank].tag(key(1))
    one.cards[rank].table.entries[tag] = (1, 1 << (rank + 1) % RANKS)
    assert one.lookup(1) == "MISS"


@pytest.mark.parametrize("rank", range(RANKS))
def test_one_gateway_that_is_down_makes_all_miss_and_store_nothing(rank: int) -> None:
    one = rig()
    one.confirm(1, 1, 1, 1)
    one.cards[rank].living = False
    assert one.lookup(1) == "MISS"
    assert one.store(2).keys == ()
    one.cards[rank].living = True
    assert one.lookup(1) == "HIT"
    assert one.store(2, name="another").keys == (key(2),)


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_one_gateway_lacks_is_stored_again_and_nothing_else(rank: int) -> None:
    one = rig()
    one.confirm(1, 1, 1, 1)
    one.confirm(2, 2, 2, 2)
    del one.cards[rank].table.entries[one.cards[rank].tag(key(1))]
    assert [one.lookup(number) for number in (1, 2)] == ["MISS", "HIT"]
    again = one.store(1, 2)
    assert (again.keys, again.replace) == ((key(1),), (False,)), "those that have it say so and write nothing"
    one.cards[rank].confirm(key(1), 3)
    assert one.lookup(1) == "HIT"


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_denied_object_is_missed_until_its_own_gateway_has_a_new_one(rank: int) -> None:
    """Generations are each gateway's own: the others' may be far ahead of the failed one's, or far behind."""
    one = rig()
    one.confirm(1, *(500 if card.rank == rank else 10**6 * card.rank + 7 for card in one.cards))
    failing = one.cards[rank]
    failing.denied = [(failing.tag(key(1)), 500)]
    assert one.lookup(1) == "MISS"
    assert one.store(1).replace == (True,)
    for card in one.cards:
        if card is not failing:
            card.confirm(key(1), 10**9)
    assert one.lookup(1) == "MISS", "the others' new objects do not make up for it"
    failing.confirm(key(1), 501)
    assert one.lookup(1) == "HIT"


def test_what_was_denied_is_stored_again_at_once_whatever_was_denied_elsewhere() -> None:
    one = rig()
    first, second, _ = one.cards
    first.denied = [(first.tag(key(1)), 1000)]
    assert one.store(1, name="first").keys == (key(1),)
    assert one.store(1, name="waits for its confirmation").keys == ()
    one.confirm(1, 1001, 3, 3)
    second.denied = [(second.tag(key(1)), 3)]
    assert one.store(1, name="again").keys == (key(1),)


@pytest.mark.parametrize("rank", range(RANKS))
def test_denials_that_were_lost_deny_what_their_gateway_holds_and_no_other(rank: int) -> None:
    one = rig()
    one.confirm(1, *(100 if card.rank == rank else 5 for card in one.cards))
    one.cards[rank].lost_up_to = 100
    assert one.lookup(1) == "MISS"
    one.cards[rank].confirm(key(1), 101)
    assert one.lookup(1) == "HIT", "the others' generations are far below, and theirs were not lost"


def test_recency_goes_to_each_gateway_in_its_own_tags() -> None:
    one = rig()
    one.confirm(1, 1, 1, 1)
    one.confirm(2, 2, 2, 2)
    assert [one.lookup(number) for number in (1, 2)] == ["HIT", "HIT"]
    one.manager.on_schedule_end()
    assert [card.touched for card in one.cards] == [[card.tag(key(number)) for number in (1, 2)] for card in one.cards]


def test_the_backlog_is_the_worst_gateways() -> None:
    one = rig()
    one.cards[1].backlog = 950
    assert one.store(1).keys == ()
    one.cards[1].backlog = 850
    assert one.store(1, name="another").keys == (key(1),)


def test_what_each_rank_has_loaded_is_told_by_its_gateway() -> None:
    assert CardPerRank(rig().cards).loaded() == [(rank + 1, 7) for rank in range(RANKS)]


def test_all_are_left_also_where_one_makes_difficulties() -> None:
    one = rig()
    one.cards[1].error = OSError("gone")
    one.manager.shutdown()
    assert [card.is_closed for card in one.cards] == [True] * RANKS


# --- verified before the hit ---------------------------------------------------------------------------------------


class FakeClient:
    """The scheduler's session with one gateway: a real ring of which the last slots are staged."""

    def __init__(self, slots: int, *, first: int) -> None:
        self.ring = Ring.create(first + slots, 4096)
        self.load_region = SlotRegion(first, slots)
        self.gets: list[tuple[list[Any], Callable[[LoadedObject], None]]] = []
        self.control = ControlPage.create(1, bytes(16))
        self.serves = self.touch = self.close = lambda: None
        self.table = FakeTable()

    def get(self, objects: Sequence[Any], on_answer: Callable[[LoadedObject], None]) -> int:
        self.gets.append((list(objects), on_answer))
        return len(self.gets)

    def answer(self, status: LoadStatus = LoadStatus.OK, generation: int = 1) -> None:
        """To everything that was asked for."""
        for objects, on_answer in self.gets:
            for index in range(len(objects)):
                on_answer(LoadedObject(index, status, generation, ANSWERED_BYTES))
        self.gets = []


@dataclass
class VerifiedRig(Rig):
    clients: list[Any]
    reads: ReadsPerRank

    def step(self) -> None:
        self.manager.on_schedule_end()

    def free(self) -> list[int]:
        return [client.load_region.free for client in self.clients]


def verified_rig(slots: int = 4) -> VerifiedRig:
    clients: list[Any] = [FakeClient(slots, first=10 * number) for number in range(RANKS)]
    reads = ReadsPerRank([StagedReads(client) for client in clients])
    one = rig(Staging(reads, pending_seconds=2, groups=1))
    return VerifiedRig(one.manager, one.cards, clients, reads)


def test_each_object_is_read_by_its_gateway_into_its_ring() -> None:
    one = verified_rig()
    for card in one.cards:
        card.confirm(key(1), 1, fragments=2)
    assert one.lookup(1) == "PENDING"
    assert [client.gets for client in one.clients] == [[]] * RANKS, "nothing goes out before the step is planned"
    one.step()
    for rank, client in enumerate(one.clients):
        ((objects, _),) = client.gets
        assert [(wanted.key, wanted.slots, wanted.first_fragment) for wanted in objects] == [
            (ObjectKey(NAMESPACE, 0, key(1)[:-4], rank), (10 * rank, 10 * rank + 1), 0)
        ]
    for client in one.clients:
        assert one.lookup(1) == "PENDING"
        client.answer(generation=5)
    assert one.lookup(1) == "HIT"
    spec = one.manager.prepare_load([key(1)], request())
    assert [part.slots for part in spec.staged[0]] == [(0, 1), (10, 11), (20, 21)]
    assert one.free() == [2, 2, 2]
    assert [moved for moved, _ in one.reads.loaded()] == [ANSWERED_BYTES] * RANKS
    assert all(busy_ns > 0 for _, busy_ns in one.reads.loaded())
    one.manager.complete_load({key(1)}, request())
    assert one.free() == [4, 4, 4]


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_one_gateway_cannot_verify_is_denied_there_alone(rank: int) -> None:
    one = verified_rig()
    one.confirm(1, *(3 if card.rank == rank else 2 for card in one.cards))
    assert one.lookup(1) == "PENDING"
    one.step()
    for number, client in enumerate(one.clients):
        client.answer(*((LoadStatus.CORRUPT, 3) if number == rank else (LoadStatus.OK, 2)))
    assert one.lookup(1) == "MISS"
    assert one.free() == [4, 4, 4]
    assert one.store(1).replace == (True,)
    one.cards[rank].confirm(key(1), 4)
    assert one.lookup(1, "another") == "PENDING", "the others' generation 2 was not what failed"


def test_a_gateway_that_goes_while_it_reads_is_a_miss() -> None:
    one = verified_rig()
    one.confirm(1, 1, 1, 1)
    assert one.lookup(1) == "PENDING"
    one.step()
    one.clients[0].answer()
    one.clients[1].answer(LoadStatus.FAILED, 0)
    one.clients[2].answer()
    assert one.lookup(1) == "MISS"
    assert one.free() == [4, 4, 4]
    one.step()
    assert one.lookup(1, "another") == "PENDING", "nothing was said of the object itself"


def test_an_object_that_is_smaller_than_another_ranks_is_denied_so_that_it_is_stored_again() -> None:
    """As where one rank's is a lone last block, and the other's, which had been shed, the whole chunk."""
    client: Any = FakeClient(4, first=0)
    reads = StagedReads(client)
    tag = ObjectKey(NAMESPACE, 0, key(1)[:-4], 0).tag
    for entry, expected in (
        ((7, 0b11), [(7, True)] * 2),
        ((7, 0b10), [(0, False), (7, True)]),
        (None, [(0, False)] * 2),
    ):
        client.table.entries = {} if entry is None else {tag: entry}
        reads.start(Chunk(NAMESPACE, key(1), ((0, 1), (2, 3)), outstanding=2))
        reads.send()
        client.answer(LoadStatus.MISS, 0)
        assert [(done.generation, done.denied) for done in reads.finished()] == expected


def test_a_chunk_takes_as_many_slots_in_each_ring_as_its_largest_object_has() -> None:
    one = verified_rig()
    for card in one.cards:
        card.confirm(key(1), 1, fragments=3 if card.rank == 2 else 1)
    assert one.lookup(1) == "PENDING"
    assert one.free() == [1, 1, 1]


def test_room_is_what_every_ring_has() -> None:
    one = verified_rig(4)
    reads = one.reads
    assert (reads.slots, reads.free) == (12, 12)
    assert reads.take(15) is None
    taken = reads.take(9)
    assert taken == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert reads.free == 3
    assert reads.take(6) is None
    reads.give(taken)
    assert reads.free == 12
    one.clients[1].load_region.take(3)
    assert reads.free == 3
    assert reads.take(6) is None


def test_one_gateway_needs_nothing_of_this() -> None:
    one, two = (verified_rig().clients[:number] for number in (1, 2))
    assert (isinstance(card_of(one), CardPerRank), isinstance(card_of(two), CardPerRank)) == (False, True)
    assert (isinstance(reads_of(one), ReadsPerRank), isinstance(reads_of(two), ReadsPerRank)) == (False, True)


@dataclass
class FakeSeeks:
    """One gateway's remote, which has what the test says."""

    usable: bool = True
    asked: list[tuple[list[int], bool]] = field(default_factory=list)
    on_answer: Callable[[SoughtObject], None] | None = None

    def ask(
        self, objects: Sequence[tuple[ObjectKey, int]], *, fetch: bool, on_answer: Callable[[SoughtObject], None]
    ) -> None:
        self.asked.append(([fragments for _, fragments in objects], fetch))
        self.on_answer = on_answer


def test_each_rank_s_objects_are_sought_through_its_own_gateway() -> None:
    parts = [FakeSeeks() for _ in range(RANKS)]
    seeks = SeeksPerRank(parts)
    answers: list[SoughtObject] = []
    keys = [(ObjectKey(NAMESPACE, 0, bytes([number]), number % 2), number) for number in range(5)]
    seeks.ask(keys, fetch=True, on_answer=answers.append)
    assert [part.asked for part in parts] == [[([0, 2, 4], True)], [([1, 3], True)], []]
    assert parts[1].on_answer is not None
    parts[1].on_answer(SoughtObject(1, SoughtStatus.ABSENT))
    assert answers == [SoughtObject(3, SoughtStatus.ABSENT)], "the index is the caller's"
    assert seeks.usable
    parts[2].usable = False
    assert not seeks.usable
