"""The client's session: what a gateway may say when, each answer once, and what is lost at the end."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from xkv_store import client_session, wire
from xkv_store.client_session import ClientEvent, ClientSession, ClientState, Lost
from xkv_store.errors import PeerError
from xkv_store.session import LocalProtocolError
from xkv_store.wire import LoadStatus, RefusedCode, Role, StoreStatus

HELLO = wire.Hello(wire.PROTOCOL_VERSION, "e", Role.RANK, 0, 1, 1 << 30, 1 << 28, 0, 261_120, 1)
REGIONS = (wire.SlotRange(0, 30), wire.SlotRange(30, 10))
WELCOME = wire.Welcome(wire.PROTOCOL_VERSION, 7, b"b" * 16, b"c" * 16, 1, 262_144, 40, *REGIONS, 100)
PUT = (wire.PutObject(b"k", 1, (1,), 0, 0, False),)
GET = (wire.GetObject(b"k", (31,), 0),)
CONFIRMED = wire.StoredObject(0, StoreStatus.CONFIRMED)
LOADED = wire.LoadedObject(0, LoadStatus.OK, 5, 1)


def say(session: ClientSession, message: wire.FromGateway, descriptors: int = 0) -> client_session.ClientAction:
    return session.receive(wire.encode(message), descriptors)


@pytest.fixture
def session() -> ClientSession:
    attached = ClientSession(HELLO)
    assert attached.greet() == HELLO
    assert say(attached, WELCOME, 3) == client_session.Attached(WELCOME)
    return attached


def test_answers(session: ClientSession) -> None:
    assert session.put(1, PUT * 2) == wire.Put(1, PUT * 2)
    assert session.get(2, GET) == wire.Get(2, GET)
    assert session.cancel(2) == wire.Cancel(2)
    assert session.cancel(1) is None
    assert session.outstanding
    done = say(session, wire.Stored(1, (wire.StoredObject(1, StoreStatus.HELD),)))
    assert done == client_session.PutAnswered(1, (wire.StoredObject(1, StoreStatus.HELD),))
    assert say(session, wire.Loaded(2, (LOADED,))) == client_session.GetAnswered(2, (LOADED,))
    assert session.cancel(2) is None
    session.ask_status(3)
    assert say(session, wire.Status(3, "{}")) == client_session.TextCame(3, "{}")
    session.stop(4)
    assert say(session, wire.Done(4, "")) == client_session.TextCame(4, "")
    session.ask_namespaces(5)
    for _ in range(2):
        assert say(session, wire.Namespaces(5, ())) == client_session.NamespacesCame(5, ())
    assert session.end() == Lost(puts=((1, 0),), gets=())
    assert not session.outstanding


@pytest.mark.parametrize(
    "message",
    [
        wire.Stored(9, (CONFIRMED,)),
        wire.Stored(1, (wire.StoredObject(1, StoreStatus.CONFIRMED),)),
        wire.Stored(1, (CONFIRMED, CONFIRMED)),
        wire.Stored(2, (CONFIRMED,)),
        wire.Loaded(1, (LOADED,)),
        wire.Loaded(2, (LOADED, LOADED)),
        wire.Status(1, ""),
        wire.Namespaces(9, ()),
        WELCOME,
    ],
)
def test_what_was_not_asked_is_the_gateways_fault(session: ClientSession, message: wire.FromGateway) -> None:
    """An answer taken for another's would report bytes that are not there."""
    session.put(1, PUT)
    session.get(2, GET)
    with pytest.raises(PeerError):
        say(session, message, 3 if message is WELCOME else 0)


def test_descriptors_come_with_welcome_alone(session: ClientSession) -> None:
    session.put(1, PUT)
    with pytest.raises(PeerError, match="1 descriptors"):
        say(session, wire.Stored(1, (CONFIRMED,)), 1)
    tool = ClientSession(msgspec.structs.replace(HELLO, role=Role.TOOL))
    tool.greet()
    say(tool, msgspec.structs.replace(WELCOME, slot_bytes=4_096, ring_slots=0))
    assert tool.state is ClientState.ATTACHED


def test_refused_at_any_time(session: ClientSession) -> None:
    rejected = client_session.Rejected(RefusedCode.PROTOCOL, "why")
    assert say(session, wire.Refused(RefusedCode.PROTOCOL, "why")) == rejected
    with pytest.raises(PeerError):
        say(session, wire.Refused(RefusedCode.PROTOCOL, "why"))
    greeting = ClientSession(HELLO)
    greeting.greet()
    with pytest.raises(PeerError, match="Stored in state GREETING"):
        say(greeting, wire.Stored(1, ()))
    assert say(greeting, wire.Refused(RefusedCode.RING, "")) == client_session.Rejected(RefusedCode.RING, "")


def test_our_own_misuse_is_told_apart(session: ClientSession) -> None:
    session.put(5, PUT)
    for number in (5, 4):
        with pytest.raises(LocalProtocolError):
            session.get(number, GET)
    session.end()
    with pytest.raises(LocalProtocolError):
        session.put(6, PUT)
    with pytest.raises(LocalProtocolError):
        session.end()
    with pytest.raises(LocalProtocolError):
        ClientSession(HELLO).put(1, PUT)


def test_every_state_can_end() -> None:
    for state in ClientState:
        if state is not ClientState.ENDED:
            assert client_session.TRANSITIONS[state, ClientEvent.END] is ClientState.ENDED


class Machine(RuleBasedStateMachine):
    """A gateway that answers in any order, rightly or wrongly: each object is answered or lost, once."""

    @initialize()
    def begin(self) -> None:
        self.session = ClientSession(HELLO)
        self.session.greet()
        say(self.session, WELCOME, 3)
        self.number = 0
        self.open: set[tuple[str, int, int]] = set()

    @rule(count=st.integers(1, 4), is_put=st.booleans())
    def transfer(self, count: int, is_put: bool) -> None:
        self.number += 1
        if is_put:
            self.session.put(self.number, PUT * count)
        else:
            self.session.get(self.number, GET * count)
        self.open |= {("put" if is_put else "get", self.number, index) for index in range(count)}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        kind, number, index = flight = data.draw(st.sampled_from(sorted(self.open)))
        self.open.remove(flight)
        self.say(kind, number, index)

    @rule(kind=st.sampled_from(["put", "get"]), number=st.integers(0, 9), index=st.integers(0, 4))
    def answer_wrongly(self, kind: str, number: int, index: int) -> None:
        if (kind, number, index) not in self.open:
            with pytest.raises(PeerError):
                self.say(kind, number, index)

    def say(self, kind: str, number: int, index: int) -> None:
        if kind == "put":
            say(self.session, wire.Stored(number, (wire.StoredObject(index, StoreStatus.CONFIRMED),)))
        else:
            say(self.session, wire.Loaded(number, (wire.LoadedObject(index, LoadStatus.OK, 1, 1),)))

    @rule(junk=st.binary(max_size=20))
    def babble(self, junk: bytes) -> None:
        with contextlib.suppress(PeerError):
            self.session.receive(wire.MAGIC + b"\x93" + junk)

    def teardown(self) -> None:
        if "open" in vars(self):
            lost = self.session.end()
            named = [("put", *flight) for flight in lost.puts] + [("get", *flight) for flight in lost.gets]
            assert sorted(named) == sorted(self.open)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
