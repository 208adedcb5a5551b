"""A client of a gateway: the scheduler's, or one rank's.

Owns: the one thread that receives, sends what waits and reconnects; the answers' way to the callers; what is
remembered over a reconnect. Must not know: vLLM, what is in an object, the gateway's insides.
"""

from __future__ import annotations

import itertools
import logging
import random
import select
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from . import attachment as reasons
from . import wire
from .attachment import RANK_TAKEN_MS_MAX, WAITING_HELPS, Attachment, retry_ms
from .bell import Bell
from .client_connection import ClientConnection, dial
from .client_leases import ClientLeases, Leased, LeaseObject
from .client_seeks import ClientSeeks
from .client_session import (
    Attached,
    ClientAction,
    ClientState,
    NamespacesCame,
    Rejected,
)
from .embedded import Starter
from .engine_memory import EngineMemory, take_memory
from .errors import PeerError, UserError
from .flights import (
    Delivery,
    Flights,
    GetObject,
    LoadedDelivery,
    PutObject,
    StoredDelivery,
    deliver,
)
from .wire import LoadedObject, LoadStatus, Role, StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .client_session import ClientSession
    from .control import ControlPage
    from .flights import Begin
    from .ring import Ring, SlotBudget, SlotRegion
    from .sockets import Packet
    from .table import TableReader

__all__ = [
    "Attachment",
    "Client",
    "GetObject",
    "LeaseObject",
    "Leased",
    "LoadStatus",
    "LoadedObject",
    "PutObject",
    "Role",
    "StoreStatus",
    "StoredObject",
]

HELLO_MS_MAX: Final = 5_000
"""A gateway answers a Hello at once, or after at most 4 s where a dead session's I/O has to end first."""
ASK_NAMESPACES_S: Final = 0.1
"""Ranks publish once, at start-up; the scheduler asks that often until all have."""
CLOSE_S_MAX: Final = 2.0  # for the thread to end; it never blocks for so long
PACKETS_PER_ROUND_MAX: Final = 64  # received before what waits to be sent has its turn

log = logging.getLogger(__name__)


class Client:
    """An attached session. Every method may be called from any thread; none but `attach` and the awaiting ones
    blocks. Callbacks run on the client's own thread, or, where an object is answered at once, in the call itself.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._changed = threading.Condition(threading.Lock())  # guards everything below that changes
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, name="xkv-client", daemon=True)
        self._heartbeat_ns_max = attachment.heartbeat_timeout_ms * 1_000_000
        self._numbers = itertools.count(1)  # never reused, over all connections
        self._flights = Flights()
        self.leases = ClientLeases(self, self._flights, attachment.rank)
        """Of the region that the engine's ranks share, where they share one."""
        self.seeks = ClientSeeks(self, self._flights)
        """For what the card lacks, where the gateway has a remote."""
        self._connection: ClientConnection | None = None
        self._connected = False
        self._memory: EngineMemory | None = None
        self._epoch = 0
        self._published: wire.PublishNamespace | None = None
        self._namespaces: dict[int, tuple[bytes, str]] = {}
        self._problem: UserError | None = None  # why there is no session, as far as is known
        self._is_final = False  # of the problem: at the start, no use to go on
        self._closing = False
        self._started_ns = time.monotonic_ns()
        card = attachment.embedded
        self._starter = None if card is None else Starter(card, attachment.socket)
        self._noted = ""

    # --- life --------------------------------------------------------------------------------------------

    @classmethod
    def attach(cls, attachment: Attachment) -> Client:
        """Attach within `connect_timeout_ms`, then take the ring's memory; raises UserError with what to do."""
        client = cls(attachment)
        client._thread.start()
        try:
            client._await_attached()
            client._attached_memory().use_huge_pages(staged_bytes=attachment.staged_bytes or 0)
        except BaseException:
            client.close()
            raise
        return client

    def close(self) -> None:
        """End the session. What is outstanding is answered as lost; slots are of no use after this."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._bell.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S_MAX)
        if not self._thread.is_alive():
            self._give_back()

    def alive(self) -> bool:
        """Connected, and the gateway's heart beats, and it takes work. Cheap: reads shared memory only."""
        memory, oldest_ns = self._memory, time.monotonic_ns() - self._heartbeat_ns_max
        return memory is not None and self._connected and memory.control.works(oldest_ns)

    def serves(self) -> bool:
        """Alive, and all ranks of the engine are attached. As cheap: the scheduler asks at each lookup."""
        memory, oldest_ns = self._memory, time.monotonic_ns() - self._heartbeat_ns_max
        return memory is not None and self._connected and memory.control.serves(oldest_ns)

    @property
    def epoch(self) -> int:
        """How often this client has been attached."""
        return self._epoch

    @property
    def card_uuid(self) -> bytes:
        """The card's; the same for the client's whole life."""
        return self._attached_memory().card_uuid

    @property
    def table(self) -> TableReader:
        """The lookup table of the gateway's present life: ask for it again for each batch of lookups."""
        return self._attached_memory().table

    @property
    def control(self) -> ControlPage:
        """The engine's control page."""
        return self._attached_memory().control

    @property
    def ring(self) -> Ring:
        """The engine's ring."""
        return self._attached_memory().ring

    @property
    def store_region(self) -> SlotRegion:
        """The slots for puts."""
        return self._attached_memory().store_region

    @property
    def load_region(self) -> SlotRegion:
        """The slots for gets; a scheduler's are the staged region. Where loads are leased, all ranks' together."""
        return self._attached_memory().load_region

    @property
    def lease_budget(self) -> SlotBudget:
        """What a rank may hold of a shared load region: to be taken before a lease is asked for, given after it."""
        return self._attached_memory().lease_budget

    # --- the scheduler's ---------------------------------------------------------------------------------

    def await_namespaces(self, world_size: int, timeout_s: float) -> dict[int, tuple[bytes, str]]:
        """What each rank has published: (namespace, descriptor) by rank.

        Raises UserError that names the ranks that have published nothing within `timeout_s`.
        """
        wanted = set(range(world_size))
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._namespaces = {}
            while not wanted <= self._namespaces.keys():
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._closing:
                    missing = ", ".join(str(rank) for rank in sorted(wanted - self._namespaces.keys()))
                    raise UserError(
                        f"no namespace from rank {missing} of {world_size} within {timeout_s:.1f} s; see that worker's "
                        f"log (each must attach to the gateway on {self._attachment.socket})"
                    )
                connection = self._usable_connection()
                if connection is not None:
                    connection.submit(connection.session.ask_namespaces(next(self._numbers)))
                    self._wake_to_send(connection)
                self._changed.wait_for(
                    lambda: self._closing or wanted <= self._namespaces.keys(), min(ASK_NAMESPACES_S, left_s)
                )
            return {rank: self._namespaces[rank] for rank in sorted(wanted)}

    def touch(self, tags: Sequence[int]) -> None:
        """These chunks were looked up; forgotten where the gateway does not keep up."""
        for message in wire.split_touches(tags):
            with self._changed:
                connection = self._usable_connection()
                if connection is None or connection.waits_to_send:
                    return
                connection.submit(message)
                self._wake_to_send(connection)

    # --- a rank's ----------------------------------------------------------------------------------------

    def publish_namespace(self, namespace: bytes, descriptor: str) -> None:
        """Tell what this rank stores under (16 bytes, and the JSON object that it is the digest of).

        Said again at each reconnect. Raises UserError where the descriptor is too long.
        """
        assert len(namespace) == wire.NAMESPACE_BYTES
        if len(descriptor.encode()) > wire.DESCRIPTOR_BYTES_MAX:
            raise UserError(
                f"the namespace's description has {len(descriptor.encode())} bytes, at most "
                f"{wire.DESCRIPTOR_BYTES_MAX} can be published; shorten xkv.namespace"
            )
        with self._changed:
            self._published = wire.PublishNamespace(namespace, descriptor)
            connection = self._usable_connection()
            if connection is not None:
                connection.submit(self._published)
                self._wake_to_send(connection)

    def put(self, objects: Sequence[PutObject], on_answer: Callable[[StoredObject], None]) -> None:
        """Hand objects to the card. Each is answered once, by its index; before that its slots are given back.

        Where there is no session, or the gateway does not keep up, the answer is `shed`, in this call.
        """
        items = [
            wire.PutObject(o.key.encode(), o.length, tuple(o.slots), o.family, o.position, o.replace) for o in objects
        ]
        base = 0
        for piece in wire.split_puts(items):
            if self.fly(self._flights.putting(piece, base=base, on_answer=on_answer)) is None:
                shed = [(item.slots, StoredObject(base + index, StoreStatus.SHED)) for index, item in enumerate(piece)]
                self.deliver([StoredDelivery(slots, answer, on_answer) for slots, answer in shed])
            base += len(piece)

    def get(self, objects: Sequence[GetObject], on_answer: Callable[[LoadedObject], None]) -> int:
        """Ask the card for objects. Each is answered once, by its index; then its slots are the caller's again.

        Where there is no session, or the gateway does not keep up, the answer is `failed`, in this call. Returns
        the number to cancel it by.
        """
        items = [wire.GetObject(o.key.encode(), tuple(o.slots), o.first_fragment) for o in objects]
        get = 0
        base = 0
        for piece in wire.split_gets(items):
            number = self.fly(self._flights.getting(piece, get=get, base=base, on_answer=on_answer))
            get = get or number or 0
            if number is None:
                failed = [LoadedObject(base + index, LoadStatus.FAILED, 0, 0) for index in range(len(piece))]
                self.deliver([LoadedDelivery(answer, on_answer) for answer in failed])
            base += len(piece)
        return get

    def cancel(self, get: int) -> None:
        """Nobody waits for this get (or lease) any more. Its slots stay the gateway's until it is answered, as ever."""
        with self._changed:
            connection = self._usable_connection()
            if connection is None:
                return
            for number in self._flights.messages_of(get):
                message = connection.session.cancel(number)
                if message is not None:
                    connection.submit(message)
            self._wake_to_send(connection)

    # --- inside: with the lock held ----------------------------------------------------------------------

    def _usable_connection(self) -> ClientConnection | None:
        connection = self._connection
        if not self._connected or connection is None or connection.hung_up:
            return None
        return connection if connection.session.state is ClientState.ATTACHED else None  # refused just now

    def _connection_for_work(self) -> ClientConnection | None:
        connection = self._usable_connection()
        return connection if connection is not None and connection.has_room else None

    def _wake_to_send(self, connection: ClientConnection) -> None:
        if connection.waits_to_send or connection.hung_up:
            self._bell.ring()

    # --- any thread: what is sent, for this class and its leases (`client_leases.Sender`) ------------------

    def fly(self, begin: Begin) -> int | None:
        """Send what `begin` makes, with a new number; that number, or None where there is no session."""
        with self._changed:
            connection = self._connection_for_work()
            if connection is None:
                return None
            number = next(self._numbers)
            connection.submit(begin(connection.session, number))
            self._wake_to_send(connection)
            return number

    def say(self, epoch: int, make: Callable[[ClientSession], wire.FromClient]) -> None:
        """Send what `make` makes, if that session is still there; also to a gateway that does not keep up."""
        with self._changed:
            connection = self._usable_connection()
            if connection is not None and epoch == self._epoch:
                connection.submit(make(connection.session))
                self._wake_to_send(connection)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Call callers, having given slots back."""
        if deliveries:
            deliver(deliveries, self._attached_memory().store_region)

    # --- inside: any thread ------------------------------------------------------------------------------

    def _attached_memory(self) -> EngineMemory:
        assert self._memory is not None, "before attach"
        return self._memory

    def _await_attached(self) -> None:
        timeout_s = self._attachment.connect_timeout_ms / 1_000
        with self._changed:
            self._changed.wait_for(lambda: self._connected or self._is_final, timeout_s)
            if not self._connected:
                if self._problem is None and self._connection is not None:
                    raise reasons.nothing_said(self._attachment, self._connection.peer)
                raise self._problem or reasons.nobody_answers(self._attachment)

    # --- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        attempt = 0
        while self._goes_on():
            epoch = self._epoch
            try:
                self._live()
            except UserError as error:
                self._note(error, is_final=True)
            except Exception:
                log.exception("the session with the gateway on %s failed", self._attachment.socket)
            attempt = 0 if self._epoch > epoch else attempt + 1
            if self._goes_on():
                # The jitter keeps ranks apart; nothing depends on its quality.
                pause_ms = retry_ms(attempt, random.random())  # noqa: S311
                try:
                    self._bell.wait(pause_ms)
                except Exception:
                    log.exception("waiting for the gateway on %s failed", self._attachment.socket)
                    time.sleep(pause_ms / 1_000)  # nobody would start this thread again: it goes on

    def _goes_on(self) -> bool:
        return not self._closing and not self._is_final

    def _live(self) -> None:
        """One connection, from dialling to its end."""
        connection = dial(self._attachment)
        if connection is None:
            self._note(reasons.nobody_answers(self._attachment), is_final=False)
            if self._starter is not None:
                self._starter.start()
            return
        with self._changed:
            self._connection = connection
            memory = self._memory
            fds = () if memory is None else (memory.ring.fd, memory.control.fd)
            connection.submit(connection.session.greet(), fds)
        try:
            self._serve(connection)
        finally:
            self._drop(connection)

    def _serve(self, connection: ClientConnection) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        hello_end_ns = time.monotonic_ns() + HELLO_MS_MAX * 1_000_000
        while not self._closing and (connection.session.outstanding or not connection.hung_up):
            poll.register(
                connection, select.POLLIN | (select.POLLOUT if connection.waits_to_send else 0)
            )  # again: changes what is waited for
            left_ms: float | None = None
            if connection.session.state is ClientState.GREETING:
                left_ms = (hello_end_ns - time.monotonic_ns()) / 1_000_000
                if left_ms <= 0:
                    self._note(reasons.nothing_said(self._attachment, connection.peer), is_final=False)
                    return
            poll.poll(left_ms)
            self._bell.silence()
            with self._changed:
                connection.flush()
            try:
                for _ in range(PACKETS_PER_ROUND_MAX):
                    if not self._receive_one(connection):
                        break
            except EOFError:
                return

    def _receive_one(self, connection: ClientConnection) -> bool:
        """Whether there was a packet."""
        try:
            packets = connection.receive()
            for packet in packets:
                self._take_in(connection, packet)
        except PeerError as error:
            self._distrust(connection, error)
            return True
        return bool(packets)

    def _take_in(self, connection: ClientConnection, packet: Packet) -> None:
        if connection.hung_up:
            packet.close()  # its end is all that is waited for
            return
        deliveries: list[Delivery] = []
        try:
            with self._changed:
                action = connection.interpret(packet)
                deliveries = self._answers(action)
        except PeerError:
            packet.close()
            raise
        if isinstance(action, Attached):
            self._welcome(connection, action.welcome, packet.fds)
        elif isinstance(action, Rejected):
            self._rejected(connection, action)
        self.deliver(deliveries)

    def _answers(self, action: ClientAction) -> list[Delivery]:
        if isinstance(action, NamespacesCame):
            self._namespaces.update({own.rank: (own.namespace, own.descriptor) for own in action.ranks})
            self._changed.notify_all()
        return self._flights.answered(action)

    def _welcome(self, connection: ClientConnection, welcome: wire.Welcome, fds: Sequence[int]) -> None:
        memory = take_memory(welcome, fds, world_size=self._attachment.world_size, previous=self._memory)
        with self._changed:
            if self._published is not None:
                connection.submit(self._published)
            self._memory = memory
            if self._attachment.staged_bytes is None:
                # A gateway that comes back may hear of this engine from us first.
                self._attachment = replace(
                    self._attachment,
                    staged_bytes=memory.load_region.count * memory.ring.slot_bytes,
                    ring_use=memory.ring_use,
                )
            self._epoch += 1
            self.leases.term = memory.control.term(self._attachment.rank)
            self.seeks.usable = welcome.has_remote
            self._connected = True
            self._noted = ""
            self._changed.notify_all()
        log.info("attached to the gateway on %s (life %d)", self._attachment.socket, self._epoch)

    def _rejected(self, connection: ClientConnection, action: Rejected) -> None:
        waited_ms = (time.monotonic_ns() - self._started_ns) / 1_000_000
        mends = action.code in WAITING_HELPS
        if action.code is wire.RefusedCode.RANK_TAKEN and waited_ms > RANK_TAKEN_MS_MAX:
            mends = False
        self._hang_up(connection)
        self._note(reasons.refused(self._attachment, action.code, action.reason), is_final=not mends)

    def _hang_up(self, connection: ClientConnection) -> None:
        """Nothing more of this gateway; but its hold on slots lasts until it closes the connection."""
        with self._changed:
            self._connected = False
            connection.hang_up()

    def _distrust(self, connection: ClientConnection, error: PeerError) -> None:
        """The gateway did what it may not."""
        self._hang_up(connection)
        self._note(UserError(f"the gateway on {self._attachment.socket} is not usable: {error}"), is_final=False)

    def _drop(self, connection: ClientConnection) -> None:
        with self._changed:
            was_attached = self._connected
            self._connected = False
            self._connection = None
            deliveries = self._flights.lost(connection.session.end())
            connection.close()
        if was_attached and not self._closing:
            text = f"the gateway on {self._attachment.socket} is gone: lookups miss until it is back"
            self._note(UserError(text), is_final=False)
        self.deliver(deliveries)

    def _note(self, problem: UserError, *, is_final: bool) -> None:
        """Why there is no session. Final only before the first; later it is logged, once."""
        with self._changed:
            self._problem = problem
            self._is_final = is_final and self._epoch == 0
            self._changed.notify_all()
        if self._epoch > 0 and str(problem) != self._noted:
            self._noted = str(problem)
            log.warning("%s", problem)

    def _give_back(self) -> None:
        if self._bell.close() and self._memory is not None:
            self._memory.close()
