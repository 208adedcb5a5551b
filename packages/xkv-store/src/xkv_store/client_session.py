"""The client's view of one connection, without any I/O: packets in, answers out.

Owns: what a gateway may say when, and which puts, gets and asks are outstanding on this connection. Must
not know: sockets, memory, threads or callbacks. The gateway's view is `session`.

A gateway's fault raises `PeerError`; our own misuse raises `LocalProtocolError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from .errors import PeerError
from .geometry import HEADER_BYTES
from .session import LocalProtocolError
from .wire import (
    PROTOCOL_VERSION,
    AskNamespaces,
    AskStatus,
    Cancel,
    Done,
    FromGateway,
    Get,
    GetObject,
    Hello,
    Lease,
    Leased,
    LeasedObject,
    LeaseObject,
    Loaded,
    LoadedObject,
    LoadStatus,
    Namespaces,
    Put,
    PutObject,
    RankNamespace,
    Refused,
    RefusedCode,
    Release,
    Role,
    SlotRange,
    Status,
    Stop,
    Stored,
    StoredObject,
    Welcome,
    decode_from_gateway,
)
from .wire_remote import Seek, SeekObject, Sought, SoughtObject

if TYPE_CHECKING:
    from collections.abc import Iterable

WELCOME_DESCRIPTORS: Final = 3
"""Ring, control page, lookup table, in this order; a tool gets none."""


class ClientState(Enum):
    """Where the connection stands."""

    NEW = auto()
    GREETING = auto()  # Hello is sent
    ATTACHED = auto()
    REFUSED = auto()  # the gateway said so and will close
    ENDED = auto()


class ClientEvent(Enum):
    """What moves the connection on."""

    HELLO = auto()
    WELCOME = auto()
    REFUSED = auto()
    END = auto()


TRANSITIONS: Final[dict[tuple[ClientState, ClientEvent], ClientState]] = {
    (ClientState.NEW, ClientEvent.HELLO): ClientState.GREETING,
    (ClientState.NEW, ClientEvent.END): ClientState.ENDED,
    (ClientState.GREETING, ClientEvent.WELCOME): ClientState.ATTACHED,
    (ClientState.GREETING, ClientEvent.REFUSED): ClientState.REFUSED,
    (ClientState.GREETING, ClientEvent.END): ClientState.ENDED,
    (ClientState.ATTACHED, ClientEvent.REFUSED): ClientState.REFUSED,
    (ClientState.ATTACHED, ClientEvent.END): ClientState.ENDED,
    (ClientState.REFUSED, ClientEvent.END): ClientState.ENDED,
}


@dataclass(frozen=True, slots=True)
class Attached:
    """The gateway's Welcome, checked against our Hello."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Rejected:
    """The gateway ends the session."""

    code: RefusedCode
    reason: str


@dataclass(frozen=True, slots=True)
class PutAnswered:
    """Answers to objects of a put, each for the first and only time."""

    put: int
    objects: tuple[StoredObject, ...]


@dataclass(frozen=True, slots=True)
class GetAnswered:
    """Answers to objects of a get, each for the first and only time."""

    get: int
    objects: tuple[LoadedObject, ...]


@dataclass(frozen=True, slots=True)
class LeaseAnswered:
    """Answers to objects of a lease, each for the first and only time."""

    lease: int
    objects: tuple[LeasedObject, ...]


@dataclass(frozen=True, slots=True)
class SeekAnswered:
    """Answers to objects of a seek, each for the first and only time."""

    seek: int
    objects: tuple[SoughtObject, ...]


@dataclass(frozen=True, slots=True)
class NamespacesCame:
    """Some of the ranks' namespaces; there may be more to the same ask."""

    ask: int
    ranks: tuple[RankNamespace, ...]


@dataclass(frozen=True, slots=True)
class TextCame:
    """The answer to a status or stop ask."""

    ask: int
    text: str


ClientAction = (
    Attached | Rejected | PutAnswered | GetAnswered | LeaseAnswered | SeekAnswered | NamespacesCame | TextCame
)


@dataclass(frozen=True, slots=True)
class Lost:
    """What was outstanding when the connection ended: (number, index) of puts, of gets, of leases and of seeks."""

    puts: tuple[tuple[int, int], ...]
    gets: tuple[tuple[int, int], ...]
    leases: tuple[tuple[int, int], ...] = ()
    seeks: tuple[tuple[int, int], ...] = ()


class ClientSession:
    """One connection, for the one `hello` that it begins with."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.state = ClientState.NEW
        self._puts: dict[int, set[int]] = {}  # put -> indexes without an answer
        self._gets: dict[int, set[int]] = {}
        self._leases: dict[int, set[int]] = {}
        self._lease_objects: dict[int, tuple[LeaseObject, ...]] = {}
        self._seeks: dict[int, set[int]] = {}
        self._load_region = range(0)
        self._asks: set[int] = set()
        self._last = -1

    # --- to the gateway ----------------------------------------------------------------------------------

    def greet(self) -> Hello:
        """The first message."""
        self._move(ClientEvent.HELLO)
        return self.hello

    def put(self, number: int, objects: tuple[PutObject, ...]) -> Put:
        """A put under a number greater than any before."""
        self._puts[self._number(number)] = set(range(len(objects)))
        return Put(number, objects)

    def get(self, number: int, objects: tuple[GetObject, ...]) -> Get:
        """A get under a number greater than any before."""
        self._gets[self._number(number)] = set(range(len(objects)))
        return Get(number, objects)

    def lease(self, number: int, objects: tuple[LeaseObject, ...]) -> Lease:
        """A lease under a number greater than any before."""
        self._leases[self._number(number)] = set(range(len(objects)))
        self._lease_objects[number] = objects
        return Lease(number, objects)

    def seek(self, number: int, objects: tuple[SeekObject, ...], *, fetch: bool) -> Seek:
        """A seek under a number greater than any before."""
        self._seeks[self._number(number)] = set(range(len(objects)))
        return Seek(number, objects, fetch)

    def release(self, lease: int, indexes: tuple[int, ...]) -> Release:
        """Objects of a lease of this connection that were answered as `OK`, each once."""
        self._require_attached()
        return Release(lease, indexes)

    def cancel(self, get: int) -> Cancel | None:
        """None where nothing of that get (or lease) is outstanding on this connection."""
        self._require_attached()
        return Cancel(get) if get in self._gets or get in self._leases else None

    def ask_namespaces(self, number: int) -> AskNamespaces:
        """An ask under a number greater than any before."""
        self._asks.add(self._number(number))
        return AskNamespaces(number)

    def ask_status(self, number: int) -> AskStatus:
        """An ask under a number greater than any before."""
        self._asks.add(self._number(number))
        return AskStatus(number)

    def stop(self, number: int) -> Stop:
        """An ask under a number greater than any before."""
        self._asks.add(self._number(number))
        return Stop(number)

    @property
    def outstanding(self) -> bool:
        """Whether the gateway holds slots of this connection."""
        return bool(self._puts or self._gets or self._leases)

    # --- from the gateway --------------------------------------------------------------------------------

    def receive(self, data: bytes, descriptors: int = 0) -> ClientAction:
        """A packet came, with so many descriptors; raises PeerError for what may not come now."""
        message = decode_from_gateway(data)
        expected = 0
        if isinstance(message, Welcome) and self.hello.role is not Role.TOOL:
            expected = WELCOME_DESCRIPTORS
        if descriptors != expected:
            raise PeerError(f"{type(message).__name__} with {descriptors} descriptors")
        if isinstance(message, Welcome):
            return self._welcome(message)
        if isinstance(message, Refused):
            self._move_by_peer(ClientEvent.REFUSED, "Refused")
            return Rejected(message.code, message.reason)
        if self.state is not ClientState.ATTACHED:
            raise PeerError(f"{type(message).__name__} in state {self.state.name}")
        return self._answer(message)

    def _answer(self, message: FromGateway) -> ClientAction:
        match message:
            case Stored(put, objects):
                _answered(self._puts, "put", put, (answer.index for answer in objects))
                return PutAnswered(put, objects)
            case Loaded(get, loaded):
                _answered(self._gets, "get", get, (answer.index for answer in loaded))
                return GetAnswered(get, loaded)
            case Leased(lease, leased):
                self._check_leased(lease, leased)
                _answered(self._leases, "lease", lease, (answer.index for answer in leased))
                if lease not in self._leases:
                    del self._lease_objects[lease]
                return LeaseAnswered(lease, leased)
            case Sought(seek, sought):
                _answered(self._seeks, "seek", seek, (answer.index for answer in sought))
                return SeekAnswered(seek, sought)
            case Namespaces(ask, ranks):
                self._check_ask(ask)
                return NamespacesCame(ask, ranks)
            case Status(ask, text) | Done(ask, text):
                self._check_ask(ask)
                return TextCame(ask, text)
            case _:
                raise PeerError(f"{type(message).__name__} after Welcome")

    def _welcome(self, welcome: Welcome) -> Attached:
        if welcome.version != PROTOCOL_VERSION:
            raise PeerError(f"Welcome of version {welcome.version}, not {PROTOCOL_VERSION}")
        if self.hello.role is not Role.TOOL:
            if welcome.slot_bytes != self.hello.fragment_bytes + HEADER_BYTES:
                raise PeerError(f"slots of {welcome.slot_bytes} bytes for fragments of {self.hello.fragment_bytes}")
            if not _are_apart(welcome.store_region, welcome.load_region, welcome.ring_slots):
                raise PeerError(
                    f"regions {welcome.store_region} and {welcome.load_region} in {welcome.ring_slots} slots"
                )
            self._load_region = range(welcome.load_region.first, welcome.load_region.first + welcome.load_region.count)
        self._move_by_peer(ClientEvent.WELCOME, "Welcome")
        return Attached(welcome)

    def end(self) -> Lost:
        """The connection is gone; says what will not be answered on it."""
        self._move(ClientEvent.END)
        lost = Lost(
            tuple((put, index) for put, indexes in self._puts.items() for index in sorted(indexes)),
            tuple((get, index) for get, indexes in self._gets.items() for index in sorted(indexes)),
            tuple((lease, index) for lease, indexes in self._leases.items() for index in sorted(indexes)),
            tuple((seek, index) for seek, indexes in self._seeks.items() for index in sorted(indexes)),
        )
        self._seeks.clear()
        self._puts.clear()
        self._gets.clear()
        self._leases.clear()
        self._lease_objects.clear()
        return lost

    # --- inside ------------------------------------------------------------------------------------------

    def _check_leased(self, lease: int, answers: tuple[LeasedObject, ...]) -> None:
        """Slots that are said to hold an object are in the region, and as many as were asked for."""
        objects = self._lease_objects.get(lease, ())
        for answer in answers:
            wanted = 0
            if answer.status is LoadStatus.OK and answer.index < len(objects):
                wanted = objects[answer.index].fragments
            ends = (min(answer.slots), max(answer.slots)) if answer.slots else ()
            if len(answer.slots) != wanted or not all(end in self._load_region for end in ends):
                raise PeerError(f"object {answer.index} of lease {lease} lies in slots {answer.slots[:8]}")

    def _number(self, number: int) -> int:
        self._require_attached()
        if number <= self._last:
            raise LocalProtocolError(f"number {number} after {self._last}")
        self._last = number
        return number

    def _require_attached(self) -> None:
        if self.state is not ClientState.ATTACHED:
            raise LocalProtocolError(f"a message in state {self.state.name}")

    def _check_ask(self, ask: int) -> None:
        if ask not in self._asks:
            raise PeerError(f"an answer to ask {ask}, which was not asked")

    def _move(self, event: ClientEvent) -> None:
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            raise LocalProtocolError(f"{event.name} in state {self.state.name}")
        self.state = to

    def _move_by_peer(self, event: ClientEvent, name: str) -> None:
        if (self.state, event) not in TRANSITIONS:
            raise PeerError(f"{name} in state {self.state.name}")
        self._move(event)


def _answered(flights: dict[int, set[int]], kind: str, number: int, indexes: Iterable[int]) -> None:
    flight = flights.get(number)
    if flight is None:
        raise PeerError(f"an answer to {kind} {number}, which is not outstanding")
    answered: set[int] = set()
    for index in indexes:
        if index not in flight or index in answered:
            raise PeerError(f"a second or unasked answer to object {index} of {kind} {number}")
        answered.add(index)
    flight -= answered  # all of a message or nothing: what is left is lost with the connection
    if not flight:
        del flights[number]


def _are_apart(store: SlotRange, load: SlotRange, slots: int) -> bool:
    ends = (store.first + store.count, load.first + load.count)
    if max(ends) > slots:
        return False
    return ends[0] <= load.first or ends[1] <= store.first
