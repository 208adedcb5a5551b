"""The gateway's view of one connection, without any I/O: packets and completions in, actions out.

Owns: what a client may say when, whose slots are in flight, when a connection may be closed. Must not know:
sockets, rings' memory, cards or threads. The client's view is `client_session`.

A peer's fault becomes `Refused` and an ending session, never an exception; our own misuse raises
`LocalProtocolError`.
"""

from __future__ import annotations

from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING, Final

from .errors import PeerError
from .key import ObjectKey
from .session_actions import (
    Action,
    Actions,
    Admit,
    AnswerTool,
    CancelGet,
    Close,
    DropLease,
    GetTask,
    LeaseTask,
    PutTask,
    RecordNamespace,
    RecordTouch,
    ReportNamespaces,
    ReportStatus,
    Send,
    StartGet,
    StartLease,
    StartPut,
    StartSeek,
    StopGateway,
    VerifyCard,
)
from .wire import (
    OBJECTS_PER_SESSION_MAX,
    PROTOCOL_VERSION,
    RANKS_MAX,
    AskNamespaces,
    AskStatus,
    Cancel,
    Done,
    FromClient,
    Get,
    Hello,
    Lease,
    LeasedObject,
    LoadedObject,
    LoadStatus,
    Namespaces,
    PublishNamespace,
    Put,
    RankNamespace,
    Refused,
    RefusedCode,
    Release,
    Role,
    Status,
    Stop,
    StoredObject,
    StoreStatus,
    Touch,
    Verify,
    Verifying,
    Welcome,
    bounded_text,
    decode_from_client,
    foreign_version,
    split_leased,
    split_loaded,
    split_stored,
)
from .wire_remote import Seek, Sought
from .wire_tools import Explain, Explained, ListedNamespaces, ListedObjects, ListNamespaces, ListObjects, Purge, Purged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .geometry import Geometry

Reply = Namespaces | Status | Done | Verifying | Sought | ListedNamespaces | ListedObjects | Purged | Explained

HELLO_DESCRIPTORS: Final = (0, 2)
"""None, or the ring and the control page of an earlier life of the gateway."""


class LocalProtocolError(AssertionError):
    """Our own code used a session in a way that its state does not allow."""


class State(Enum):
    """Where a connection stands."""

    NEW = auto()
    ADMITTING = auto()  # Hello came; the gateway decides
    ATTACHED = auto()
    DRAINING = auto()  # new work is refused, answers still go out
    ENDING = auto()  # the peer is gone or not listened to; only I/O on its slots is waited for
    CLOSED = auto()


class Event(Enum):
    """What moves a connection on."""

    HELLO = auto()
    ADMITTED = auto()
    REFUSED = auto()
    DRAIN = auto()
    VIOLATION = auto()
    PEER_GONE = auto()
    IDLE = auto()  # nothing is in flight


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.NEW, Event.HELLO): State.ADMITTING,
    (State.NEW, Event.REFUSED): State.ENDING,
    (State.NEW, Event.DRAIN): State.ENDING,
    (State.NEW, Event.VIOLATION): State.ENDING,
    (State.NEW, Event.PEER_GONE): State.ENDING,
    (State.ADMITTING, Event.ADMITTED): State.ATTACHED,
    (State.ADMITTING, Event.REFUSED): State.ENDING,
    (State.ADMITTING, Event.DRAIN): State.ENDING,
    (State.ADMITTING, Event.VIOLATION): State.ENDING,
    (State.ADMITTING, Event.PEER_GONE): State.ENDING,
    (State.ATTACHED, Event.DRAIN): State.DRAINING,
    (State.ATTACHED, Event.VIOLATION): State.ENDING,
    (State.ATTACHED, Event.PEER_GONE): State.ENDING,
    (State.DRAINING, Event.DRAIN): State.DRAINING,
    (State.DRAINING, Event.VIOLATION): State.ENDING,
    (State.DRAINING, Event.PEER_GONE): State.ENDING,
    (State.DRAINING, Event.IDLE): State.CLOSED,
    (State.ENDING, Event.DRAIN): State.ENDING,
    (State.ENDING, Event.PEER_GONE): State.ENDING,
    (State.ENDING, Event.IDLE): State.CLOSED,
    (State.CLOSED, Event.DRAIN): State.CLOSED,
    (State.CLOSED, Event.PEER_GONE): State.CLOSED,
}

PERMITTED: Final[dict[Role, frozenset[type]]] = {
    Role.SCHEDULER: frozenset({AskNamespaces, PublishNamespace, Touch, Get, Cancel, AskStatus, Seek}),
    Role.RANK: frozenset({PublishNamespace, Put, Get, Lease, Release, Cancel, AskStatus}),
    Role.TOOL: frozenset({AskStatus, Stop, Verify, ListNamespaces, ListObjects, Purge, Explain}),
}


class GatewaySession:
    """One connection. Every method returns the actions to carry out, in order."""

    def __init__(self, *, geometry: Geometry) -> None:
        self.state = State.NEW
        self.hello: Hello | None = None
        self.published: RankNamespace | None = None
        self._geometry = geometry
        self._own: tuple[range, ...] = ()  # the session's slots; a ring may have tens of millions
        self._busy: set[int] = set()  # those in flight
        self._puts: dict[int, dict[int, tuple[int, ...]]] = {}  # put -> index -> slots
        self._gets: dict[int, dict[int, tuple[int, ...]]] = {}
        self._last_put = -1
        self._last_get = -1  # a lease's number is a get's
        self._leases: dict[int, dict[int, int]] = {}  # lease -> index -> slots, not answered yet
        self._held: dict[int, dict[int, int]] = {}  # the same, answered and not released
        self._lease_slots_max = 0
        self._lease_slots = 0  # of both
        self.in_flight = 0
        """Objects of puts, gets and leases that are not answered yet."""

    # --- packets -----------------------------------------------------------------------------------------

    def receive(self, data: bytes, descriptors: int = 0) -> Actions:
        """A packet came, with so many descriptors. The caller closes those that no `Admit` asks for."""
        if self.state in (State.ENDING, State.CLOSED):
            return []
        try:
            message = decode_from_client(data)
            if self.state is State.NEW:
                return self._receive_hello(message, descriptors)
            return self._receive_attached(message, descriptors)
        except PeerError as error:
            version = foreign_version(data) if self.state is State.NEW else None
            if version is not None:
                return self.refuse(RefusedCode.VERSION, _version_reason(version))
            return self.violate(str(error))

    def _receive_hello(self, message: FromClient, descriptors: int) -> Actions:
        if not isinstance(message, Hello):
            raise PeerError(f"{type(message).__name__} before Hello")
        if descriptors not in HELLO_DESCRIPTORS or (descriptors and message.role is Role.TOOL):
            raise PeerError(f"Hello of a {message.role.value} with {descriptors} descriptors")
        if message.version != PROTOCOL_VERSION:
            return self.refuse(RefusedCode.VERSION, _version_reason(message.version))
        if message.role is not Role.TOOL:
            if not 0 < message.world_size <= RANKS_MAX or message.rank >= message.world_size:
                raise PeerError(f"rank {message.rank} of {message.world_size}")
            if message.role is Role.SCHEDULER and message.rank != 0:
                raise PeerError(f"a scheduler of rank {message.rank}: an engine has one, its rank is 0")
            if message.fragment_bytes != self._geometry.fragment_bytes:
                return self.refuse(
                    RefusedCode.FRAGMENT_BYTES,
                    f"the card's fragments have {self._geometry.fragment_bytes} bytes, "
                    f"xkv.fragment_bytes is {message.fragment_bytes}",
                )
        self.hello = message
        self._move(Event.HELLO)
        return [Admit(message, reattaching=descriptors > 0)]

    def _receive_attached(self, message: FromClient, descriptors: int) -> Actions:
        hello = self.hello
        if self.state is State.ADMITTING or hello is None:
            raise PeerError(f"{type(message).__name__} before Welcome")
        if descriptors:
            raise PeerError(f"{type(message).__name__} with descriptors")
        if type(message) not in PERMITTED[hello.role]:
            raise PeerError(f"{type(message).__name__} from a {hello.role.value}")
        match message:
            case Put():
                return self._receive_put(message)
            case Get() | Lease() | Release() | Cancel():
                return self._receive_of_get(message)
            case PublishNamespace(namespace, descriptor):
                self.published = RankNamespace(hello.rank, namespace, descriptor)
                return [RecordNamespace(self.published, adopted=hello.role is Role.SCHEDULER)]
            case Seek(seek, objects, fetch):
                wanted = tuple((ObjectKey.decode(one.key), one.fragments) for one in objects)
                return [StartSeek(seek, wanted, fetch)]
            case _:
                return [_plain_action(message)]

    def _receive_of_get(self, message: Get | Lease | Release | Cancel) -> Actions:
        match message:
            case Get():
                return self._receive_get(message)
            case Lease():
                return self._receive_lease(message)
            case Release(lease, indexes):
                return self._receive_release(lease, indexes)
            case Cancel(get):
                outstanding = (*self._gets.get(get, ()), *self._leases.get(get, ()))
                return [CancelGet(get, outstanding)] if outstanding else []

    def _receive_put(self, message: Put) -> Actions:
        if message.put <= self._last_put:
            raise PeerError(f"put {message.put} after put {self._last_put}")
        self._last_put = message.put
        room = self._room()
        tasks: list[PutTask] = []
        refused: list[StoredObject] = []
        for index, item in enumerate(message.objects):
            key = ObjectKey.decode(item.key)
            if len(item.slots) != self._geometry.fragments(item.length):
                refused.append(StoredObject(index, StoreStatus.INVALID))
            elif len(tasks) >= room:
                refused.append(StoredObject(index, StoreStatus.SHED))
            else:
                tasks.append(PutTask(index, key, item))
        flight = self._occupy([(task.index, task.item.slots) for task in tasks])
        actions: Actions = [Send(answer) for answer in split_stored(message.put, refused)]
        if flight:
            self._puts[message.put] = flight
            actions.append(StartPut(message.put, tuple(tasks)))
        return actions

    def _receive_get(self, message: Get) -> Actions:
        self._next_get(message.get)
        room = self._room()
        tasks: list[GetTask] = []
        refused: list[LoadedObject] = []
        for index, item in enumerate(message.objects):
            key = ObjectKey.decode(item.key)
            if len(tasks) >= room:
                refused.append(LoadedObject(index, LoadStatus.BUSY, 0, 0))
            else:
                tasks.append(GetTask(index, key, item))
        flight = self._occupy([(task.index, task.item.slots) for task in tasks])
        actions: Actions = [Send(answer) for answer in split_loaded(message.get, refused)]
        if flight:
            self._gets[message.get] = flight
            actions.append(StartGet(message.get, tuple(tasks)))
        return actions

    def _receive_lease(self, message: Lease) -> Actions:
        self._next_get(message.lease)
        wanted = sum(item.fragments for item in message.objects)
        if self._lease_slots + wanted > self._lease_slots_max:
            raise PeerError(
                f"a lease of {wanted} slots beside {self._lease_slots}: the session may hold {self._lease_slots_max}"
            )
        room = self._room()
        tasks = [
            LeaseTask(index, ObjectKey.decode(item.key), item) for index, item in enumerate(message.objects[:room])
        ]
        refused = [LeasedObject(index, LoadStatus.BUSY, 0, 0, ()) for index in range(len(tasks), len(message.objects))]
        actions: Actions = [Send(answer) for answer in split_leased(message.lease, refused)]
        if tasks:
            self._leases[message.lease] = {task.index: task.item.fragments for task in tasks}
            self._lease_slots += sum(task.item.fragments for task in tasks)
            self.in_flight += len(tasks)
            actions.append(StartLease(message.lease, tuple(tasks)))
        return actions

    def _receive_release(self, lease: int, indexes: tuple[int, ...]) -> Actions:
        held = self._held.get(lease, {})
        for index in indexes:
            if index not in held:
                raise PeerError(f"object {index} of lease {lease} is released, which is not held")
            self._lease_slots -= held.pop(index)
        if not held:
            self._held.pop(lease, None)
        return [DropLease(lease, indexes)]

    def _next_get(self, number: int) -> None:
        if number <= self._last_get:
            raise PeerError(f"get or lease {number} after {self._last_get}")
        self._last_get = number

    def _room(self) -> int:
        return OBJECTS_PER_SESSION_MAX - self.in_flight if self.state is State.ATTACHED else 0

    def _occupy(self, objects: list[tuple[int, tuple[int, ...]]]) -> dict[int, tuple[int, ...]]:
        wanted = set(chain.from_iterable(own for _index, own in objects))
        if len(wanted) != sum(len(own) for _index, own in objects):
            raise PeerError("one slot named twice in a message")
        if not (self._busy.isdisjoint(wanted) and self._lie_in_one_region(wanted)):
            wrong = [slot for slot in wanted if slot in self._busy or not any(slot in own for own in self._own)]
            if wrong:
                raise PeerError(f"slots that are in flight or not the session's: {sorted(wrong)[:8]}")
        self._busy |= wanted
        self.in_flight += len(objects)
        return dict(objects)

    def _lie_in_one_region(self, slots: set[int]) -> bool:
        """By their ends: an object has hundreds of slots, and a message hundreds of objects."""
        ends = (min(slots), max(slots)) if slots else ()
        return any(all(end in own for end in ends) for own in self._own)

    # --- the gateway's decisions and completions ---------------------------------------------------------

    def admit(self, welcome: Welcome) -> Actions:
        """The Hello is accepted; from here on the regions of `welcome` are the session's slots."""
        self._move(Event.ADMITTED)
        self._lease_slots_max = welcome.lease_slots
        regions = (welcome.store_region,) if welcome.lease_slots else (welcome.store_region, welcome.load_region)
        self._own = tuple(range(region.first, region.first + region.count) for region in regions)
        return [Send(welcome)]

    def refuse(self, code: RefusedCode, reason: str) -> Actions:
        """The connection is not to be attached."""
        self._move(Event.REFUSED)
        return [Send(Refused(code, bounded_text(reason))), *self._settle()]

    def violate(self, reason: str) -> Actions:
        """The peer broke the protocol: it hears so, then only I/O on its slots is waited for."""
        if self.state in (State.ENDING, State.CLOSED):
            return []
        self._move(Event.VIOLATION)
        return [Send(Refused(RefusedCode.PROTOCOL, bounded_text(reason))), *self._abandon()]

    def disconnected(self) -> Actions:
        """The peer is gone, or does not read its answers any more."""
        if self.state in (State.ENDING, State.CLOSED):
            return []
        self._move(Event.PEER_GONE)
        return self._abandon()

    def drain(self) -> Actions:
        """The gateway ends: no new work; the connection closes when the last answer is given."""
        before = self.state
        self._move(Event.DRAIN)
        if before in (State.NEW, State.ADMITTING):
            return [Send(Refused(RefusedCode.DRAINING, "the gateway is ending")), *self._settle()]
        return self._settle() if before is State.ATTACHED else []

    def reply(self, message: Reply) -> Actions:
        """Answer an ask, if anybody still listens."""
        return [Send(message)] if self.state in (State.ATTACHED, State.DRAINING) else []

    def stored(self, put: int, objects: Sequence[StoredObject]) -> Actions:
        """These objects of a put are done with; their slots are the client's again."""
        self._release(self._puts, put, [answer.index for answer in objects])
        listening = self.state is not State.ENDING
        return [*(Send(answer) for answer in split_stored(put, objects) if listening), *self._settle()]

    def loaded(self, get: int, objects: Sequence[LoadedObject]) -> Actions:
        """These objects of a get are done with; their slots are the client's again."""
        self._release(self._gets, get, [answer.index for answer in objects])
        listening = self.state is not State.ENDING
        return [*(Send(answer) for answer in split_loaded(get, objects) if listening), *self._settle()]

    def leased(self, lease: int, objects: Sequence[LeasedObject]) -> Actions:
        """These objects of a lease are answered; the slots of those that are OK are held until they are released."""
        flight = self._leases.get(lease, {})
        for answer in objects:
            slots = flight.pop(answer.index, None)
            if slots is None:
                raise LocalProtocolError(f"object {answer.index} of lease {lease} is not in flight")
            self.in_flight -= 1
            if answer.status is LoadStatus.OK:
                self._held.setdefault(lease, {})[answer.index] = slots
            else:
                self._lease_slots -= slots
        if not flight:
            self._leases.pop(lease, None)
        listening = self.state is not State.ENDING
        return [*(Send(answer) for answer in split_leased(lease, objects) if listening), *self._settle()]

    # --- inside ------------------------------------------------------------------------------------------

    def _move(self, event: Event) -> None:
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            raise LocalProtocolError(f"{event.name} in state {self.state.name}")
        self.state = to

    def _abandon(self) -> Actions:
        outstanding = [(number, tuple(own)) for number, own in self._gets.items()]
        outstanding += [(number, tuple(own)) for number, own in self._leases.items()]
        return [*(CancelGet(number, own) for number, own in outstanding), *self._settle()]

    def _settle(self) -> Actions:
        if self.in_flight or self.state not in (State.DRAINING, State.ENDING):
            return []
        self._move(Event.IDLE)
        return [Close()]

    def _release(self, flights: dict[int, dict[int, tuple[int, ...]]], number: int, indexes: list[int]) -> None:
        flight = flights.get(number, {})
        for index in indexes:
            slots = flight.pop(index, None)
            if slots is None:
                raise LocalProtocolError(f"object {index} of {number} is not in flight")
            self._busy.difference_update(slots)
            self.in_flight -= 1
        if not flight:
            flights.pop(number, None)


def _version_reason(version: int) -> str:
    return f"the gateway speaks version {PROTOCOL_VERSION} of the protocol, the client version {version}"


def _plain_action(message: FromClient) -> Action:
    """The action of a message that changes nothing in the session."""
    match message:
        case Touch(tags):
            return RecordTouch(tags)
        case AskNamespaces(ask):
            return ReportNamespaces(ask)
        case AskStatus(ask):
            return ReportStatus(ask)
        case Stop(ask):
            return StopGateway(ask)
        case Verify(ask, drop):
            return VerifyCard(ask, drop)
        case ListNamespaces() | ListObjects() | Purge() | Explain():
            return AnswerTool(message)
        case _:
            raise PeerError(f"{type(message).__name__} after Welcome")
