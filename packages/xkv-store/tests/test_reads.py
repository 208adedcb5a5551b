"""One read for all who want the same, and leases: step by step, each job when the test says so."""

from __future__ import annotations

import errno
import itertools
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar, TypeVar

import pytest

from xkv_store import database as database_module
from xkv_store import medium, sockets, transfers, wire
from xkv_store.card import CardOptions
from xkv_store.client_session import Attached, ClientSession, GetAnswered, LeaseAnswered, PutAnswered, Rejected
from xkv_store.control import ControlPage
from xkv_store.database import Database
from xkv_store.errors import MediumError
from xkv_store.geometry import DATA_OFFSET, HEADER_BYTES, Geometry
from xkv_store.io_pool import Job, Lane
from xkv_store.key import ObjectKey
from xkv_store.reads import LANDINGS_MAX
from xkv_store.ring import Ring, RingUse
from xkv_store.testing.steps import Clock, StepGateway, told_by
from xkv_store.wire import LoadStatus, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from xkv_store.plans import GetPlan

SLOT = 4_096
GEOMETRY = Geometry(SLOT)
PAYLOAD = GEOMETRY.fragment_bytes
RING_SLOTS = 40
SHARE = 4  # slots that each of two ranks may hold
LENGTH = 2 * PAYLOAD - 7

Found = TypeVar("Found")


def key_of(number: int) -> ObjectKey:
    return ObjectKey(bytes(16), 0, bytes([number]) * 9, 0)


def content_of(number: int) -> bytes:
    return bytes((number + at) % 251 for at in range(LENGTH))


class Rank:
    """One session's client side, without a thread."""

    numbers = itertools.count(1)
    made: ClassVar[list[Rank]] = []

    def __init__(
        self,
        gateway: StepGateway,
        engine: str,
        rank: int = 0,
        *,
        use: RingUse = RingUse.LEASED,
        fds: tuple[int, ...] = (),
    ) -> None:
        hello = wire.Hello(
            wire.PROTOCOL_VERSION, engine, Role.RANK, rank, 2, RING_SLOTS * SLOT, 2 * SHARE * SLOT, 0, PAYLOAD,
            os.getpid(), use,
        )  # fmt: skip
        self.gateway = gateway
        self.rank = rank
        self.socket = gateway.connect()
        self.made.append(self)
        self.session = ClientSession(hello)
        self.said: list[object] = []
        self.fds: list[int] = []
        self.send(self.session.greet(), fds)
        self.welcome = self.hear(Attached).welcome
        self.ring = Ring.adopt(os.dup(self.fds[0]), slots=self.welcome.ring_slots, slot_bytes=SLOT)
        self.control = ControlPage.attach(os.dup(self.fds[1]), ranks=2)
        self.term = self.control.term(rank)

    def send(self, message: wire.FromClient, fds: tuple[int, ...] = ()) -> None:
        assert sockets.send(self.socket, wire.encode(message), fds)
        self.gateway.round()

    def listen(self) -> None:
        while True:
            try:
                packet = sockets.receive(self.socket)
            except BlockingIOError:
                return
            if packet is None:
                self.said.append(None)
                return
            if packet.fds:
                self.fds = list(packet.fds)
            self.said.append(self.session.receive(packet.data, len(packet.fds)))

    def hear(self, kind: type[Found]) -> Found:
        """The next that was said."""
        self.gateway.round()
        self.listen()
        found = self.said.pop(0)
        assert isinstance(found, kind), found
        return found

    @property
    def has_heard_nothing(self) -> bool:
        self.gateway.round()
        self.listen()
        return not self.said

    def put(self, number: int) -> None:
        first = self.welcome.store_region.first
        slots = (first, first + 1)
        for fragment, slot in enumerate(slots):
            part = content_of(number)[fragment * PAYLOAD : (fragment + 1) * PAYLOAD]
            self.ring.slot(slot)[HEADER_BYTES : HEADER_BYTES + len(part)] = part
        item = wire.PutObject(key_of(number).encode(), LENGTH, slots, 1, number, False)
        self.send(self.session.put(next(self.numbers), (item,)))
        work(self.gateway)
        assert self.gateway.take_batch() is not None
        self.gateway.end_batch(applied=True, error=None)
        assert self.hear(PutAnswered).objects[0].status is wire.StoreStatus.CONFIRMED

    def lease(self, *numbers: int) -> int:
        items = tuple(wire.LeaseObject(key_of(number).encode(), 0, 2) for number in numbers)
        lease = next(self.numbers)
        self.send(self.session.lease(lease, items))
        return lease

    def leased(self, number: int, status: LoadStatus = LoadStatus.OK) -> tuple[int, ...]:
        """The answer to an object; its slots, in which it lies."""
        (answer,) = self.hear(LeaseAnswered).objects
        assert answer.status is status
        if status is LoadStatus.OK:
            assert self.bytes_in(answer.slots) == content_of(number)
        return answer.slots

    def bytes_in(self, slots: tuple[int, ...]) -> bytes:
        return b"".join(bytes(self.ring.slot(slot)[HEADER_BYTES:]) for slot in slots)[:LENGTH]

    def release(self, lease: int, *indexes: int) -> None:
        self.send(self.session.release(lease, indexes or (0,)))

    def get(self, number: int) -> tuple[int, ...]:
        first = self.welcome.load_region.first
        slots = (first, first + 1)
        self.send(self.session.get(next(self.numbers), (wire.GetObject(key_of(number).encode(), slots, 0),)))
        return slots

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        if self.fds:
            self.ring.close()
            self.control.close()

    def die(self) -> None:
        self.socket.close()
        self.gateway.round()
        self.gateway.round()


def work(gateway: StepGateway, error: MediumError | None = None) -> int:
    """Every job, from its beginning to its end; how many there were."""
    jobs = 0
    while gateway.pool.waiting:
        gateway.pool.begin(0)
    while gateway.pool.begun:
        gateway.pool.end(0, error)
        jobs += 1
    gateway.round()
    return jobs


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[StepGateway]:
    with ExitStack() as stack:
        clock = Clock()
        stack.enter_context(told_by(clock))
        options = CardOptions(
            folder=tmp_path / "card", capacity_bytes=DATA_OFFSET + 64 * SLOT, databases=1, slot_bytes=SLOT, grace_ms=50
        )
        life = StepGateway(options, clock, jobs_max=200)
        yield life
        if not life.over:
            life.die()
        for rank in Rank.made:
            rank.close()
        Rank.made.clear()


@pytest.fixture
def ranks(gateway: StepGateway) -> tuple[Rank, Rank]:
    """Both ranks of an engine; objects 1 to 6 are on the card."""
    first, second = Rank(gateway, "e", 0), Rank(gateway, "e", 1)
    for number in range(1, 7):
        first.put(number)
    return first, second


def test_a_later_rank_finds_what_the_first_has_had_read(gateway: StepGateway, ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    lease = first.lease(1)
    assert work(gateway) == 1
    slots = first.leased(1)
    first.release(lease)
    second.lease(1)
    assert not gateway.pool.waiting, "nothing is read again"
    assert second.leased(1) == slots
    assert gateway.transfers.all_counters()["reads"] == 1


def test_ranks_that_ask_while_it_is_read_wait_for_the_same_read(gateway: StepGateway, ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    first.lease(1)
    second.lease(1)
    gateway.pool.begin(0)
    second.lease(1)
    assert first.has_heard_nothing
    gateway.pool.end(0)
    assert first.leased(1) == second.leased(1)
    assert second.leased(1)
    assert not work(gateway)
    assert gateway.transfers.all_counters()["leases_joined"] == 2


def test_fifty_equal_prompts_are_one_read_of_each_object(gateway: StepGateway, ranks: tuple[Rank, Rank]) -> None:
    first, _ = ranks
    for _ in range(50):
        lease = first.lease(1, 2)
        work(gateway)
        first.hear(LeaseAnswered)
        first.release(lease, 0, 1)
    assert gateway.transfers.all_counters()["reads"] == 2


def test_a_rank_that_comes_after_the_slots_were_used_again_costs_a_second_read(
    gateway: StepGateway, ranks: tuple[Rank, Rank]
) -> None:
    first, second = ranks
    for number in (1, 2, 3, 4, 5, 6):
        lease = first.lease(number)
        work(gateway)
        first.leased(number)
        first.release(lease)
    second.lease(1)
    assert work(gateway) == 1
    second.leased(1)


def test_a_rank_that_stands_still_keeps_nobody_else_waiting(gateway: StepGateway, ranks: tuple[Rank, Rank]) -> None:
    """It holds its whole share for ever, and the other goes on with its own."""
    first, second = ranks
    first.lease(1)
    first.lease(2)
    work(gateway)
    kept = [first.leased(1), first.leased(2)]
    for number in (3, 4, 5, 6, 1, 2, 3, 4):
        lease = second.lease(number)
        work(gateway)
        slots = second.leased(number)
        assert number < 3 or not any({*slots} & {*own} for own in kept)
        second.release(lease)
    assert [first.bytes_in(slots) for slots in kept] == [content_of(1), content_of(2)]


def test_a_killed_ranks_part_is_free_at_once_and_its_reads_part_when_they_have_ended(
    gateway: StepGateway, ranks: tuple[Rank, Rank]
) -> None:
    first, second = ranks
    region = next(iter(gateway.desk.engines)).leases
    assert region is not None
    first.lease(1)
    work(gateway)
    first.leased(1)
    first.lease(2)
    gateway.pool.begin(0)
    assert region.needed_slots == 4
    first.die()
    assert region.needed_slots == 2, "a thread is still reading into these"
    assert second.control.term(0) != first.term, "none of its leases holds"
    third = gateway.connect()  # the place is taken until the read has ended
    assert sockets.send(third, wire.encode(first.session.hello), ())
    gateway.round()
    with pytest.raises(BlockingIOError):
        sockets.receive(third)
    gateway.pool.end(0)
    gateway.round()
    gateway.round()
    assert region.needed_slots == 0
    packet = sockets.receive(third)
    assert packet is not None
    assert isinstance(wire.decode_from_gateway(packet.data), wire.Welcome)
    packet.close()
    third.close()
    second.lease(1)
    assert second.leased(1), "what was read before is still there"


def test_a_read_goes_on_for_whoever_is_left(gateway: StepGateway, ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    first.lease(1)
    second.lease(1)
    first.die()
    assert work(gateway) == 1
    second.leased(1)


def test_cancelled_reads(gateway: StepGateway, ranks: tuple[Rank, Rank]) -> None:
    """One of two is answered at once; the last only when nothing touches the slots any more."""
    first, second = ranks
    lease, other = first.lease(1), second.lease(1)
    gateway.pool.begin(0)
    cancel = first.session.cancel(lease)
    assert cancel is not None
    first.send(cancel)
    first.leased(1, LoadStatus.CANCELLED)
    cancel = second.session.cancel(other)
    assert cancel is not None
    second.send(cancel)
    assert second.has_heard_nothing
    gateway.pool.end(0)
    second.leased(1, LoadStatus.CANCELLED)
    lease = first.lease(2)
    cancel = first.session.cancel(lease)
    assert cancel is not None
    first.send(cancel)
    first.leased(2, LoadStatus.CANCELLED)
    assert not gateway.pool.waiting, "what nobody wants is not read"


def test_failures_reach_all_who_wait_and_are_not_found_later(gateway: StepGateway, ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    first.lease(1)
    second.lease(1)
    work(gateway, MediumError(12, "no memory"))
    first.leased(1, LoadStatus.FAILED)
    second.leased(1, LoadStatus.FAILED)
    first.lease(1)
    assert work(gateway) == 1
    first.leased(1)
    first.lease(9)
    first.leased(9, LoadStatus.MISS)


def test_what_left_the_card_is_not_served_from_the_ring(gateway: StepGateway, ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    lease = first.lease(1)
    work(gateway)
    first.leased(1)
    first.release(lease)
    plan = gateway.card.begin_get(key_of(1), gateway.clock.now_ns)
    assert plan is not None
    gateway.card.end_get(plan)
    gateway.card.drop(key_of(1), plan.generation, "corrupt")
    second.lease(1)
    second.leased(1, LoadStatus.MISS)


@pytest.mark.parametrize("begun", [False, True])
def test_engines_that_want_the_same_at_once_share_one_read(
    gateway: StepGateway, ranks: tuple[Rank, Rank], *, begun: bool
) -> None:
    """Leases and gets alike, before the read has begun and while it goes on; each has its own ring."""
    first, _ = ranks
    other, third = Rank(gateway, "other", use=RingUse.OWN), Rank(gateway, "third")
    first.lease(1)
    if begun:
        gateway.pool.begin(0)
    slots = other.get(1)
    third.lease(1)
    assert work(gateway) == 1
    first.leased(1)
    third.leased(1)
    assert other.hear(GetAnswered).objects[0].status is LoadStatus.OK
    assert other.bytes_in(slots) == content_of(1)
    assert gateway.transfers.all_counters()["reads"] == 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_full_queue_refuses_no_one_who_can_join_a_read(
    gateway: StepGateway, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    """What is refused has left nothing behind: every slot is to be had afterwards."""
    first, second = ranks
    other, third = Rank(gateway, "other", use=RingUse.OWN), Rank(gateway, "third")
    first.lease(1)
    if begun:
        gateway.pool.begin(0)
    monkeypatch.setattr(gateway.pool, "_jobs_max", 0)
    slots = other.get(1)
    third.lease(1)
    for _ in range(2 * SHARE):  # more than the region holds
        third.lease(2)
        third.leased(2, LoadStatus.BUSY)
    assert work(gateway) == 1
    first.leased(1)
    third.leased(1)
    assert other.hear(GetAnswered).objects[0].status is LoadStatus.OK
    assert other.bytes_in(slots) == content_of(1)
    other.get(2)
    assert other.hear(GetAnswered).objects[0].status is LoadStatus.BUSY
    monkeypatch.undo()
    third.lease(2)
    second.lease(2)
    work(gateway)
    third.leased(2)
    second.leased(2)
    assert gateway.transfers.all_counters()["get_busy"] == 2 * SHARE + 1


def test_the_control_page_says_whether_all_ranks_are_here(gateway: StepGateway) -> None:
    first = Rank(gateway, "e", 0)
    assert not first.control.serves(0)
    second = Rank(gateway, "e", 1)
    assert first.control.serves(0)
    second.die()
    assert not first.control.serves(0)
    Rank(gateway, "e", 1)
    assert first.control.serves(0)


def test_a_copy_that_is_not_what_was_read_becomes_a_read_of_its_own(
    gateway: StepGateway, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that writes where it must not harms itself alone."""
    first, _ = ranks
    other = Rank(gateway, "other")
    first.lease(1)
    other.lease(1)
    real = gateway.card.read

    def read(plan: object, slots: list[memoryview], first_fragment: int) -> None:
        real(plan, slots, first_fragment)  # type: ignore[arg-type]
        slots[0][HEADER_BYTES] ^= 1

    monkeypatch.setattr(gateway.card, "read", read)
    assert work(gateway) == 1
    monkeypatch.undo()
    assert other.has_heard_nothing
    assert work(gateway) == 1
    other.leased(1)
    assert gateway.transfers.all_counters()["reads_again"] == 1


def ask_for_neighbours(gateway: StepGateway, rank: Rank) -> list[int]:
    """Two gets, in one round, of slots that lie behind one another: the first object's last, the second's first."""
    first = rank.welcome.load_region.first
    numbers = []
    for number, fragment in ((1, 1), (2, 0)):
        numbers.append(next(rank.numbers))
        item = wire.GetObject(key_of(number).encode(), (first + number,), fragment)
        assert sockets.send(rank.socket, wire.encode(rank.session.get(numbers[-1], (item,))), ())
    gateway.round()
    return numbers


@pytest.mark.parametrize("trouble", ["", "the call fails", "one is damaged"])
def test_slots_behind_one_another_are_one_job_and_each_is_judged_by_itself(
    gateway: StepGateway, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    other = Rank(gateway, "other", use=RingUse.OWN)
    ask_for_neighbours(gateway, other)
    calls: list[int] = []
    real = Database.read

    def read(database: Database, slot: int, buffers: list[memoryview]) -> None:
        calls.append(len(buffers))
        if trouble == "the call fails" and len(buffers) > 1:
            raise MediumError(errno.EIO, "a test's")
        real(database, slot, buffers)
        if trouble == "one is damaged":
            buffers[-1][HEADER_BYTES] ^= 1

    monkeypatch.setattr(database_module, "library", lambda: None)  # it would go past this
    monkeypatch.setattr(Database, "read", read)
    assert work(gateway) == 1
    assert calls[0] == 2
    answers = {answer.get: answer.objects[0] for answer in (other.hear(GetAnswered), other.hear(GetAnswered))}
    wanted = [LoadStatus.OK, LoadStatus.CORRUPT if trouble == "one is damaged" else LoadStatus.OK]
    assert [answer.status for _, answer in sorted(answers.items())] == wanted
    first = other.welcome.load_region.first
    assert bytes(other.ring.slot(first + 1)[HEADER_BYTES:]).startswith(content_of(1)[PAYLOAD:])
    if not trouble:
        assert calls == [2]
    assert gateway.transfers.all_counters()["reads"] == 2


@pytest.mark.parametrize("near", [(), (1,), (1, 2)])
def test_what_lies_nearby_is_not_read_and_the_rest_still_is_one_call(
    gateway: StepGateway, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, near: tuple[int, ...]
) -> None:
    """With a remote: what is in its memory comes from there; where nothing is, neighbours go together as without."""
    calls: list[int] = []
    real = Database.read

    class Nearby:
        def read(self, plan: GetPlan, slots: list[memoryview], first_fragment: int) -> bool:
            if plan.key not in map(key_of, near):
                return False
            gateway.card.read(plan, slots, first_fragment)
            calls.clear()
            return True

    def read(database: Database, slot: int, buffers: list[memoryview]) -> None:
        calls.append(len(buffers))
        real(database, slot, buffers)

    monkeypatch.setattr(database_module, "library", lambda: None)  # it would go past this
    monkeypatch.setattr(Database, "read", read)
    monkeypatch.setattr(gateway.transfers._reads, "_nearby", Nearby())
    other = Rank(gateway, "other", use=RingUse.OWN)
    ask_for_neighbours(gateway, other)
    assert work(gateway) == 1
    answers = [other.hear(GetAnswered).objects[0] for _ in range(2)]
    assert [answer.status for answer in answers] == [LoadStatus.OK] * 2
    assert calls == {0: [2], 1: [1], 2: []}[len(near)]


@pytest.mark.parametrize("both", [False, True])
def test_who_leaves_a_job_takes_no_other_along(gateway: StepGateway, ranks: tuple[Rank, Rank], *, both: bool) -> None:
    other = Rank(gateway, "other", use=RingUse.OWN)
    numbers = ask_for_neighbours(gateway, other)
    for number in numbers[: 1 + both]:
        other.send(wire.Cancel(number))
    assert len(gateway.pool.waiting) == (not both)
    assert work(gateway) == (not both)
    answers = {answer.get: answer.objects[0] for answer in (other.hear(GetAnswered), other.hear(GetAnswered))}
    left = LoadStatus.CANCELLED if both else LoadStatus.OK
    assert [answer.status for _, answer in sorted(answers.items())] == [LoadStatus.CANCELLED, left]
    assert not gateway.transfers.in_flight


def test_so_many_join_a_read_and_no_more(gateway: StepGateway, ranks: tuple[Rank, Rank]) -> None:
    first, _ = ranks
    first.lease(1)
    others = [Rank(gateway, f"engine {number}", use=RingUse.OWN) for number in range(LANDINGS_MAX + 1)]
    for other in others:
        other.get(1)
    assert work(gateway) == 2
    assert all(other.hear(GetAnswered).objects[0].status is LoadStatus.OK for other in others)


def test_a_gateway_that_comes_back_ends_every_lease(
    gateway: StepGateway, ranks: tuple[Rank, Rank], tmp_path: Path
) -> None:
    """It knows nothing of what a rank still copies, and says so before it gives a slot to anybody."""
    first, second = ranks
    first.lease(1)
    work(gateway)
    first.leased(1)
    gateway.die()
    assert first.control.term(0) == first.term, "a dead gateway gives no slot away: what lies there is still good"
    life = StepGateway(CardOptions(folder=tmp_path / "card"), gateway.clock, jobs_max=8)
    again = Rank(life, "e", 1, fds=(second.ring.fd, second.control.fd))
    assert first.control.term(0) != first.term
    again.lease(2)
    work(life)
    again.leased(2)
    life.die()


def test_more_than_the_share_and_what_is_not_held_are_the_peers_errors(
    gateway: StepGateway, ranks: tuple[Rank, Rank]
) -> None:
    first, second = ranks
    lease = first.lease(1, 2)
    work(gateway)
    first.hear(LeaseAnswered)
    first.release(lease, 0)
    first.release(lease, 0)
    assert "not held" in first.hear(Rejected).reason
    second.lease(1, 2, 3)
    assert "the session may hold 4" in second.hear(Rejected).reason
    region = next((engine.leases for engine in gateway.desk.engines), None)
    assert region is None or region.needed_slots == 0


def test_all_sessions_of_an_engine_use_its_ring_alike(gateway: StepGateway) -> None:
    first = Rank(gateway, "e", 0)
    with pytest.raises(AssertionError, match="use of the ring is replicated"):
        Rank(gateway, "e", 1, use=RingUse.REPLICATED)
    assert first.welcome.ring_use is RingUse.LEASED


def test_loads_go_to_the_pool_as_loads(gateway: StepGateway, ranks: tuple[Rank, Rank]) -> None:
    """Behind stores they would wait for a slow medium's writes."""
    ranks[0].lease(1)
    assert [job.lane for job in gateway.pool.waiting] == [Lane.LOAD]


def test_a_round_begins_something_of_everybodys(
    gateway: StepGateway, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message may ask for hundreds of objects: the next engine's one would wait for all of them."""
    monkeypatch.setattr(transfers, "BEGUN_PER_ROUND_MAX", 2)
    flood, other = Rank(gateway, "flood", use=RingUse.OWN), Rank(gateway, "other", use=RingUse.OWN)
    for rank, wanted in ((flood, (1, 2, 3, 4)), (other, (5,))):
        first = rank.welcome.load_region.first
        items = tuple(wire.GetObject(key_of(one).encode(), (first + at,), 0) for at, one in enumerate(wanted))
        assert sockets.send(rank.socket, wire.encode(rank.session.get(next(rank.numbers), items)), ())
    for connection in list(gateway.desk.connections.values()):
        gateway.desk.readable(connection, 1)
    gateway.transfers.begin(gateway.clock.now_ns)
    assert sorted(job.owner for job in gateway.pool.waiting) == ["flood", "other"]
    assert gateway.transfers.waiting
    assert ranks[0].has_heard_nothing
    assert len(gateway.pool.waiting) == 5


def test_what_waits_for_its_turn_ends_with_its_session(
    gateway: StepGateway, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "BEGUN_PER_ROUND_MAX", 0)
    first, _ = ranks
    items = tuple(wire.LeaseObject(key_of(number).encode(), 0, 2) for number in (1, 2))
    assert sockets.send(first.socket, wire.encode(first.session.lease(next(first.numbers), items)), ())
    for connection in list(gateway.desk.connections.values()):
        gateway.desk.readable(connection, 1)
    before = gateway.transfers.in_flight
    first.socket.close()
    for connection in list(gateway.desk.connections.values()):
        gateway.desk.readable(connection, 1)
    gateway.desk.end_round(everybody=True)
    assert (before, gateway.transfers.in_flight) == (2, 0)
    assert [engine.sessions.keys() for engine in gateway.desk.engines] == [{(Role.RANK, 1)}]


def test_a_put_and_a_get_may_have_the_same_number(
    gateway: StepGateway, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their numbers grow each for itself: who cancels the get means no put."""
    monkeypatch.setattr(transfers, "BEGUN_PER_ROUND_MAX", 0)
    first, _ = ranks
    number = next(first.numbers)
    slots = (first.welcome.store_region.first, first.welcome.store_region.first + 1)
    put = wire.Put(number, (wire.PutObject(key_of(9).encode(), LENGTH, slots, 1, 9, False),))
    lease = wire.Lease(number, (wire.LeaseObject(key_of(1).encode(), 0, 2),))
    for message in (put, lease, wire.Cancel(number)):
        assert sockets.send(first.socket, wire.encode(message), ())
    for connection in list(gateway.desk.connections.values()):
        gateway.desk.readable(connection, 3)
    monkeypatch.undo()
    gateway.round()
    assert [job.lane for job in gateway.pool.waiting] == [Lane.STORE]


def test_what_a_killed_session_waited_for_is_taken_back_in_one_go(
    gateway: StepGateway, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time all that is queued is looked at: once for each of thousands, the gateway's heart would stand still."""
    flood = Rank(gateway, "flood", use=RingUse.OWN)
    for place in range(SHARE):
        item = wire.GetObject(key_of(1 + place).encode(), (flood.welcome.load_region.first + place,), 0)
        flood.send(flood.session.get(next(flood.numbers), (item,)))
    ranks[0].lease(6)
    looks = 0
    real = gateway.pool.withdraw

    def withdraw(wanted: Callable[[Job], bool]) -> list[Job]:
        nonlocal looks
        looks += 1
        return real(wanted)

    monkeypatch.setattr(gateway.pool, "withdraw", withdraw)
    flood.die()
    assert [job.owner for job in gateway.pool.waiting] == ["e"]
    assert looks <= 2, "one for its loads, one for its stores"
    assert gateway.transfers.in_flight == 1


def test_an_engine_that_writes_where_a_read_lands_costs_nobody_an_object(
    gateway: StepGateway, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = ranks
    other = Rank(gateway, "other")
    first.lease(1)
    other.lease(1)
    real = medium.prove
    proofs = 0

    def prove(own: object, slots: list[memoryview], first_fragment: int) -> None:
        nonlocal proofs
        proofs += 1
        if proofs == 1:
            slots[0][HEADER_BYTES] ^= 1  # by a process of the first one's engine, which has this ring
        real(own, slots, first_fragment)  # type: ignore[arg-type]

    monkeypatch.setattr(medium, "prove", prove)
    work(gateway)
    work(gateway)
    first.leased(1, LoadStatus.FAILED)
    other.leased(1)
    first.lease(1)
    work(gateway)
    first.leased(1)
