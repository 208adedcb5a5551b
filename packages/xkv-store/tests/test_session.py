"""The gateway's session: what a client may say when, whose slots are in flight, when a connection may close."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xkv_store import session as session_module
from xkv_store import session_actions as actions
from xkv_store import wire
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.session import PERMITTED, TRANSITIONS, Event, GatewaySession, LocalProtocolError, State
from xkv_store.wire import LoadStatus, RefusedCode, Role, StoreStatus
from xkv_store.wire_tools import ListNamespaces, ListObjects, Purge

GEOMETRY = Geometry()
STORES, LOADS = wire.SlotRange(10, 20), wire.SlotRange(30, 10)
OWN = range(10, 40)


def hello(role: Role = Role.RANK, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "version": wire.PROTOCOL_VERSION,
        "engine_id": "e",
        "role": role,
        "rank": 0,
        "world_size": 2,
        "ring_bytes": 1 << 30,
        "load_reserve_bytes": 1 << 28,
        "staged_bytes": 0,
        "fragment_bytes": GEOMETRY.fragment_bytes,
        "pid": 1,
    }
    return wire.encode(wire.Hello(**(fields | changes)))  # type: ignore[arg-type]


def welcome() -> wire.Welcome:
    return wire.Welcome(wire.PROTOCOL_VERSION, 7, b"b" * 16, b"c" * 16, 1, GEOMETRY.slot_bytes, 40, STORES, LOADS, 100)


def key(number: int = 0) -> bytes:
    return ObjectKey(b"n" * 16, 0, number.to_bytes(32, "little"), 0).encode()


def put_object(*slots: int, fragments: int | None = None) -> wire.PutObject:
    length = (len(slots) if fragments is None else fragments) * GEOMETRY.fragment_bytes
    return wire.PutObject(key(), length, slots, 1, 0, False)


def put(number: int, *objects: wire.PutObject) -> bytes:
    return wire.encode(wire.Put(number, objects))


def get(number: int, *slots: int) -> bytes:
    return wire.encode(wire.Get(number, (wire.GetObject(key(), slots, 0),)))


def attached(role: Role = Role.RANK) -> GatewaySession:
    session = GatewaySession(geometry=GEOMETRY)
    session.receive(hello(role))
    assert session.admit(welcome()) == [actions.Send(welcome())]
    return session


def refusal(done: actions.Actions) -> RefusedCode:
    assert isinstance(done[0], actions.Send)
    assert isinstance(done[0].message, wire.Refused)
    return done[0].message.code


def test_a_huge_ring_costs_nothing_until_it_is_used() -> None:
    """A set of all slots of a ring of 1 TiB took seconds, in which no other session was served."""
    session = GatewaySession(geometry=GEOMETRY)
    session.receive(hello())
    started = time.monotonic()
    half = 1 << 31
    session.admit(
        wire.Welcome(
            wire.PROTOCOL_VERSION,
            7,
            bytes(16),
            bytes(16),
            1,
            GEOMETRY.slot_bytes,
            half,
            wire.SlotRange(0, half),
            wire.SlotRange(half, 9),
            100,
        )
    )
    assert time.monotonic() - started < 0.5
    assert isinstance(session.receive(put(1, put_object(half - 1)))[0], actions.StartPut)
    assert refusal(session.receive(put(2, put_object(half - 1)))) is RefusedCode.PROTOCOL


# --- attaching -------------------------------------------------------------------------------------------


def test_hello_asks_the_gateway_to_decide() -> None:
    session = GatewaySession(geometry=GEOMETRY)
    (admit,) = session.receive(hello(), descriptors=2)
    assert isinstance(admit, actions.Admit)
    assert admit.reattaching
    assert session.state is State.ADMITTING
    done = session.refuse(RefusedCode.RANK_TAKEN, "x" * 100_000)
    assert refusal(done) is RefusedCode.RANK_TAKEN
    assert done[1:] == [actions.Close()]
    assert session.receive(hello()) == []


@pytest.mark.parametrize(
    ("packet", "descriptors", "code"),
    [
        (hello(version=wire.PROTOCOL_VERSION + 1), 0, RefusedCode.VERSION),
        (wire.MAGIC + b"\x92\xa5Hello\x09", 0, RefusedCode.VERSION),
        (hello(fragment_bytes=4_096 - 1_024), 0, RefusedCode.FRAGMENT_BYTES),
        (hello(rank=2), 0, RefusedCode.PROTOCOL),
        (hello(Role.SCHEDULER, rank=1), 0, RefusedCode.PROTOCOL),
        (hello(world_size=0), 0, RefusedCode.PROTOCOL),
        (hello(world_size=wire.RANKS_MAX + 1), 0, RefusedCode.PROTOCOL),
        (hello(), 1, RefusedCode.PROTOCOL),
        (hello(), 3, RefusedCode.PROTOCOL),
        (hello(Role.TOOL), 2, RefusedCode.PROTOCOL),
        (put(1, put_object(10)), 0, RefusedCode.PROTOCOL),
        (b"GET / HTTP/1.1\r\n\r\n", 0, RefusedCode.PROTOCOL),
    ],
)
def test_what_is_no_proper_hello_is_refused(packet: bytes, descriptors: int, code: RefusedCode) -> None:
    session = GatewaySession(geometry=GEOMETRY)
    done = session.receive(packet, descriptors)
    assert refusal(done) is code
    assert done[-1] == actions.Close()
    assert session.state is State.CLOSED


def test_a_tool_needs_no_fragment_bytes() -> None:
    session = GatewaySession(geometry=GEOMETRY)
    (admit,) = session.receive(hello(Role.TOOL, fragment_bytes=0, ring_bytes=0))
    assert isinstance(admit, actions.Admit)


MESSAGES: dict[type, wire.FromClient] = {
    wire.PublishNamespace: wire.PublishNamespace(b"n" * 16, "{}"),
    wire.AskNamespaces: wire.AskNamespaces(1),
    wire.Put: wire.Put(1, (put_object(10),)),
    wire.Get: wire.Get(1, (wire.GetObject(key(), (30,), 0),)),
    wire.Touch: wire.Touch((1,)),
    wire.Cancel: wire.Cancel(1),
    wire.AskStatus: wire.AskStatus(1),
    wire.Stop: wire.Stop(1),
    wire.Verify: wire.Verify(1, False),
    ListNamespaces: ListNamespaces(1, b""),
    ListObjects: ListObjects(1, b"", b""),
    Purge: Purge(1, (), ()),
}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("kind", MESSAGES)
def test_each_role_says_what_is_its_to_say(role: Role, kind: type) -> None:
    """A scheduler that wrote, or a rank that stopped the gateway, would be a confused or a hostile client."""
    session = attached(role)
    done = session.receive(wire.encode(MESSAGES[kind]))
    if kind in PERMITTED[role]:
        assert session.state is State.ATTACHED
    else:
        assert refusal(done) is RefusedCode.PROTOCOL
        assert session.state is State.CLOSED
    assert wire.Hello not in PERMITTED[role]


def test_only_ranks_hold_slots_of_a_shared_region_and_only_where_there_is_one() -> None:
    """Anybody else would hold what no share provides for."""
    for role in Role:
        for message in (wire.Lease(1, (wire.LeaseObject(key(), 0, 1),)), wire.Release(1, (0,))):
            assert refusal(attached(role).receive(wire.encode(message))) is RefusedCode.PROTOCOL


def test_plain_messages_become_actions() -> None:
    scheduler, rank, tool = attached(Role.SCHEDULER), attached(), attached(Role.TOOL)
    assert scheduler.receive(wire.encode(wire.Touch((1, 2)))) == [actions.RecordTouch((1, 2))]
    assert scheduler.receive(wire.encode(wire.AskNamespaces(5))) == [actions.ReportNamespaces(5)]
    answer = wire.Namespaces(5, ())
    assert scheduler.reply(answer) == [actions.Send(answer)]
    published = wire.RankNamespace(0, b"n" * 16, "{}")
    assert rank.receive(wire.encode(MESSAGES[wire.PublishNamespace])) == [
        actions.RecordNamespace(published, adopted=False)
    ]
    assert rank.published == published
    assert tool.receive(wire.encode(wire.AskStatus(6))) == [actions.ReportStatus(6)]
    assert tool.receive(wire.encode(wire.Stop(7))) == [actions.StopGateway(7)]
    assert tool.receive(wire.encode(wire.Verify(8, True))) == [actions.VerifyCard(8, drop=True)]
    for question in (ListNamespaces(1, b"n"), ListObjects(2, b"", b"k"), Purge(3, (), ())):
        assert tool.receive(wire.encode(question)) == [actions.AnswerTool(question)]
    assert refusal(tool.receive(hello(Role.TOOL))) is RefusedCode.PROTOCOL


# --- slots -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "packet",
    [
        put(2, put_object(9)),
        put(2, put_object(40)),
        put(2, put_object(2**32 - 1)),
        put(2, put_object(11, 11)),
        put(2, put_object(11), put_object(11)),
        put(2, put_object(10)),
        put(2, wire.PutObject(b"no key", 1, (11,), 0, 0, False)),
        put(1, put_object(11)),
        put(2, put_object(12, 9, 13)),
        put(2, put_object(12, 40, 13)),
        put(2, put_object(11), put_object(12, 10, 13)),
        get(1, 9),
        get(1, 31, 31),
        get(1, 10),
    ],
)
def test_only_the_sessions_own_idle_slots_may_be_named(packet: bytes) -> None:
    """Anything else would let one engine read or write another's, or one slot hold two objects."""
    session = attached()
    session.receive(put(1, put_object(10)))
    done = session.receive(packet)
    assert refusal(done) is RefusedCode.PROTOCOL
    assert session.state is State.ENDING, "slot 10 is still being written"
    assert session.stored(1, [wire.StoredObject(0, StoreStatus.CONFIRMED)]) == [actions.Close()]


def test_an_objects_slots_may_lie_in_both_regions() -> None:
    slots = (STORES.first, LOADS.first, STORES.first + 1)
    (start,) = attached().receive(get(1, *slots))
    assert isinstance(start, actions.StartGet)
    assert start.tasks[0].item.slots == slots


def test_slots_are_the_clients_again_after_the_answer() -> None:
    session = attached()
    (start,) = session.receive(put(1, put_object(10, 11), put_object(12)))
    assert isinstance(start, actions.StartPut)
    assert [task.index for task in start.tasks] == [0, 1]
    assert start.tasks[0].key == ObjectKey.decode(key())
    first = [wire.StoredObject(1, StoreStatus.CONFIRMED)]
    assert session.stored(1, first) == [actions.Send(wire.Stored(1, tuple(first)))]
    assert isinstance(session.receive(get(1, 12))[0], actions.StartGet)
    assert session.in_flight == 2
    for wrong in ((1, 1), (1, 2), (2, 0)):
        with pytest.raises(LocalProtocolError):
            session.stored(wrong[0], [wire.StoredObject(wrong[1], StoreStatus.CONFIRMED)])


def test_a_put_of_the_wrong_number_of_slots_is_invalid() -> None:
    session = attached()
    done = session.receive(put(1, put_object(10, 11, fragments=3), put_object(12)))
    assert done[0] == actions.Send(wire.Stored(1, (wire.StoredObject(0, StoreStatus.INVALID),)))
    assert isinstance(done[1], actions.StartPut)
    assert [task.index for task in done[1].tasks] == [1]


def test_a_client_that_floods_is_shed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "OBJECTS_PER_SESSION_MAX", 2)
    session = attached()
    done = session.receive(put(1, put_object(10), put_object(11), put_object(12)))
    assert done[0] == actions.Send(wire.Stored(1, (wire.StoredObject(2, StoreStatus.SHED),)))
    busy = wire.Loaded(1, (wire.LoadedObject(0, LoadStatus.BUSY, 0, 0),))
    assert session.receive(get(1, 12)) == [actions.Send(busy)]
    assert session.in_flight == 2


def test_cancel() -> None:
    session = attached()
    session.receive(get(4, 30))
    assert session.receive(wire.encode(wire.Cancel(3))) == []
    assert session.receive(wire.encode(wire.Cancel(4))) == [actions.CancelGet(4, (0,))]
    assert session.in_flight == 1, "its slots are the gateway's until it is answered"


# --- ending ----------------------------------------------------------------------------------------------


def test_a_connection_closes_only_after_the_last_io_on_its_slots() -> None:
    """The client reuses its slots at the connection's end: a late read would write into new bytes."""
    session = attached()
    session.receive(put(1, put_object(10)))
    session.receive(get(1, 30))
    assert session.disconnected() == [actions.CancelGet(1, (0,))]
    assert session.disconnected() == []
    assert session.stored(1, [wire.StoredObject(0, StoreStatus.CONFIRMED)]) == [], "nobody is told any more"
    answer = wire.LoadedObject(0, LoadStatus.CANCELLED, 0, 0)
    assert session.loaded(1, [answer]) == [actions.Close()]
    assert session.state is State.CLOSED


def test_drain_answers_what_is_in_flight_and_refuses_the_rest() -> None:
    session = attached()
    session.receive(put(1, put_object(10)))
    assert session.drain() == []
    assert session.drain() == []
    shed = wire.Stored(2, (wire.StoredObject(0, StoreStatus.SHED),))
    assert session.receive(put(2, put_object(11))) == [actions.Send(shed)]
    assert session.reply(wire.Done(1, "")) == [actions.Send(wire.Done(1, ""))]
    done = session.stored(1, [wire.StoredObject(0, StoreStatus.CONFIRMED)])
    assert done == [actions.Send(wire.Stored(1, (wire.StoredObject(0, StoreStatus.CONFIRMED),))), actions.Close()]
    assert attached().drain() == [actions.Close()]
    assert refusal(GatewaySession(geometry=GEOMETRY).drain()) is RefusedCode.DRAINING


def test_misuse_is_told_apart_from_the_peers_faults() -> None:
    session = GatewaySession(geometry=GEOMETRY)
    with pytest.raises(LocalProtocolError):
        session.admit(welcome())
    with pytest.raises(LocalProtocolError):
        session.stored(1, [wire.StoredObject(0, StoreStatus.CONFIRMED)])
    assert session.reply(wire.Done(1, "")) == []


def test_the_table_names_every_way_out() -> None:
    """From every state but the last a lost peer must lead to the end."""
    for state in State:
        assert (state, Event.PEER_GONE) in TRANSITIONS
        assert (state, Event.DRAIN) in TRANSITIONS
    assert {to for (at, _), to in TRANSITIONS.items() if at is State.CLOSED} == {State.CLOSED}


class Machine(RuleBasedStateMachine):
    """Any order of packets, completions and losses, against a plain model of whose slot is whose."""

    @initialize()
    def begin(self) -> None:
        self.session = attached()
        self.busy: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.number = 0
        self.closed = False
        self.told: set[tuple[str, int, int]] = set()
        self.over = False

    def take(self, done: actions.Actions) -> None:
        for action in done:
            assert not self.closed, "nothing after Close"
            match action:
                case actions.StartPut(number, tasks):
                    self.busy |= {("put", number, task.index): task.item.slots for task in tasks}
                case actions.StartGet(number, gets):
                    self.busy |= {("get", number, task.index): task.item.slots for task in gets}
                case actions.Send(wire.Stored(number, objects)):
                    self.tell({("put", number, own.index) for own in objects})
                case actions.Send(wire.Loaded(number, loaded)):
                    self.tell({("get", number, own.index) for own in loaded})
                case actions.Send(wire.Refused()):
                    self.over = True
                case actions.CancelGet(number, indexes):
                    assert all(("get", number, index) in self.busy for index in indexes)
                case actions.Close():
                    assert not self.busy
                    self.closed = True

    def tell(self, answers: set[tuple[str, int, int]]) -> None:
        assert not self.over, "no answers after Refused or to a peer that is gone"
        assert not answers & self.told, "each object is answered once"
        self.told |= answers

    @rule(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), data=st.data(), is_put=st.booleans())
    def transfer(self, sizes: list[int], data: st.DataObject, is_put: bool) -> None:
        self.number += 1
        slots = data.draw(st.lists(st.integers(8, 41), min_size=sum(sizes), max_size=sum(sizes)))
        lists = [tuple(slots.pop() for _ in range(size)) for size in sizes]
        named = [slot for own in lists for slot in own]
        held = {slot for own in self.busy.values() for slot in own}
        proper = len(set(named)) == len(named) and not held & set(named) and all(slot in OWN for slot in named)
        if is_put:
            packet = put(self.number, *(put_object(*own) for own in lists))
        else:
            packet = wire.encode(wire.Get(self.number, tuple(wire.GetObject(key(), own, 0) for own in lists)))
        before = self.session.state
        self.take(self.session.receive(packet))
        if before is State.ATTACHED:
            assert (self.session.state is State.ATTACHED) == proper

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        kind, number, index = flight = data.draw(st.sampled_from(sorted(self.busy)))
        del self.busy[flight]
        if kind == "put":
            self.take(self.session.stored(number, [wire.StoredObject(index, StoreStatus.CONFIRMED)]))
        else:
            self.take(self.session.loaded(number, [wire.LoadedObject(index, LoadStatus.OK, 1, 1)]))

    @rule(number=st.integers(0, 20))
    def cancel(self, number: int) -> None:
        self.take(self.session.receive(wire.encode(wire.Cancel(number))))

    @rule()
    def drain(self) -> None:
        self.take(self.session.drain())

    @rule()
    def lose(self) -> None:
        self.over = self.over or self.session.state is not State.CLOSED
        self.take(self.session.disconnected())

    @rule(junk=st.binary(max_size=20))
    def babble(self, junk: bytes) -> None:
        self.take(self.session.receive(wire.MAGIC + junk))

    @invariant()
    def counted(self) -> None:
        assert self.session.in_flight == len(self.busy)
        if self.session.state in (State.DRAINING, State.ENDING):
            assert self.busy, "with nothing in flight the connection is closed"
        assert self.closed == (self.session.state is State.CLOSED)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
