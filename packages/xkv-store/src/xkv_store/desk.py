"""The gateway's desk: carries out what sessions ask for, and decides who may attach.

Owns: all connections, admission, the order in which a session's end gives things back.
Must not know: how the loop waits, formats, the medium.

A session ends in this order: its queued work is withdrawn; its running I/O ends; its place and, after the last
one, its engine's ring are given up; its last answers go out; the socket is closed (docs/protocol.md).
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from . import session_actions as actions_of
from . import sockets, wire
from .attendant import Attendant
from .connections import Connection
from .engines import Engines, Refusal, check_descriptor
from .errors import PeerError
from .ring import RingUse
from .session import State
from .transfers import Party
from .wire_remote import SoughtObject, SoughtStatus
from .wire_tools import Purge

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Sequence

    from .attendant import Question
    from .card import Card
    from .engines import Engine
    from .prover import Prover
    from .remote import Remote
    from .remote_alone import RemoteAlone
    from .session_actions import Actions
    from .transfers import Transfers

log = logging.getLogger(__name__)

DESCRIPTORS_SPARE: Final = 16  # below the process's limit: an engine's admission takes 8, others have some
PARKED_S_MAX: Final = 1.5  # a Hello waits so long for the old session's last I/O; clients wait 2 s for an answer
STATUS_SESSIONS_MAX: Final = 200  # sessions that a status lists, as far as they fit one message
STATUS_ENGINE_ID_CHARS_MAX: Final = 64  # of the engine id in that list


class House(Protocol):
    """What the desk asks of the gateway around it."""

    def stop(self) -> None:
        """Drain and end."""

    def status_text(self) -> str:
        """JSON: card, counters, sessions, versions; fits a message."""


class Desk:
    """All connections of one gateway. Everything here runs on the event loop's thread."""

    def __init__(
        self,
        *,
        card: Card,
        transfers: Transfers,
        prover: Prover,
        allow_uids: Collection[int],
        boot_id: bytes,
        house: House,
        remote: Remote | RemoteAlone | None = None,
        needs_staging: bool = False,
    ) -> None:
        """`needs_staging`: engines have to verify hits before they give them."""
        self._card = card
        self._transfers = transfers
        self._prover = prover
        self._allow_uids = allow_uids
        self._boot_id = boot_id
        self._house = house
        self._remote = remote
        self._table_fd = card.table.fd_read_only()
        self._numbers = 0
        self._parked: list[tuple[Connection, wire.Hello, tuple[int, ...], float]] = []
        self.engines: Engines[Connection] = Engines(
            slot_bytes=card.geometry.slot_bytes,
            fragment_bytes=card.geometry.fragment_bytes,
            boot_id=boot_id,
            needs_staging=needs_staging,
        )
        self._attendant = Attendant(card, self.engines.left_out)
        self.connections: dict[int, Connection] = {}  # by descriptor
        self.touched: set[Connection] = set()  # those with which something happened in this round
        self.counters: Counter[str] = Counter()
        self.draining = False

    @property
    def sessions(self) -> int:
        """Attached sessions of engines (tools do not count: looking at a gateway does not keep it)."""
        return sum(len(engine.sessions) for engine in self.engines)

    # --- coming ------------------------------------------------------------------------------------------

    def accept(self, accepted: socket.socket) -> None:
        """A new connection."""
        self._numbers += 1
        connection = Connection(accepted, number=self._numbers, geometry=self._card.geometry, touched=self.touched)
        self.connections[accepted.fileno()] = connection
        self.touched.add(connection)
        session = connection.session
        self.counters["connections"] += 1
        if self.draining:
            self.perform(connection, session.drain())
        elif len(self.connections) > wire.SESSIONS_MAX:
            self.counters["refused_sessions"] += 1
            reason = f"this gateway has {wire.SESSIONS_MAX} sessions already"
            self.perform(connection, session.refuse(wire.RefusedCode.SESSIONS, reason))
        elif not sockets.is_trusted(connection.peer, self._allow_uids):
            self.counters["refused_peer"] += 1
            log.warning("refused uid %d (pid %d)", connection.peer.uid, connection.peer.pid)
            reason = (
                f"this gateway serves uid {os.geteuid()}, not uid {connection.peer.uid}; start it with "
                f"--allow-uid {connection.peer.uid}"
            )
            self.perform(connection, session.refuse(wire.RefusedCode.PEER, reason))

    def _refuse_for_descriptors(self, connection: Connection) -> None:
        self.counters["refused_sessions"] += 1
        reason = "the gateway has no file descriptors left; raise its limit (ulimit -n)"
        self.perform(connection, connection.session.refuse(wire.RefusedCode.SESSIONS, reason))

    def readable(self, connection: Connection, packets_max: int) -> None:
        """Take in what the peer has sent, up to a number of packets."""
        for _ in range(packets_max):
            if connection.session.state in (State.ENDING, State.CLOSED) or connection.overflowing:
                return
            try:
                packet = connection.receive()
            except BlockingIOError:
                return
            except PeerError as error:
                self.perform(connection, connection.session.violate(str(error)))
                return
            if packet is None:
                self._gone(connection)
                return
            actions = connection.session.receive(packet.data, len(packet.fds))
            if not any(isinstance(action, actions_of.Admit) for action in actions):
                packet.close()
            self.perform(connection, actions, packet.fds)

    def _gone(self, connection: Connection) -> None:
        connection.forget_answers()
        self.touched.add(connection)
        self.perform(connection, connection.session.disconnected())
        self.perform(connection, connection.take_answers())  # what was withdrawn just now is settled just now

    # --- what sessions ask for ---------------------------------------------------------------------------

    def perform(self, connection: Connection, actions: Actions, fds: tuple[int, ...] = ()) -> None:
        """Carry out a session's actions, in order."""
        session = connection.session
        for action in actions:
            match action:
                case actions_of.Send(message):
                    self._send(connection, message)
                case actions_of.Admit(hello):
                    self._admit(connection, hello, fds, time.monotonic() + PARKED_S_MAX)
                case actions_of.RecordTouch(tags):
                    self._card.touch(tags)
                case actions_of.RecordNamespace(published, adopted):
                    self._publish(connection, published, adopted=adopted)
                case actions_of.AnswerTool(question):
                    self._attend(connection, question)
                case actions_of.StartSeek():
                    self._seek(connection, action)
                case actions_of.Close():
                    self._closing(connection)
                case (
                    actions_of.StartPut()
                    | actions_of.StartGet()
                    | actions_of.StartLease()
                    | actions_of.DropLease()
                    | actions_of.CancelGet()
                ):
                    self._transfer(_party(connection), action)
                case _:
                    self._answer(connection, action)
        if session.state is State.ENDING and not connection.left:
            connection.left = True
            if connection.party is not None:
                self._transfers.leave(connection.party)

    def _seek(self, connection: Connection, start: actions_of.StartSeek) -> None:
        if self._remote is not None:
            self._remote.seek(connection, start, time.monotonic_ns())
            return
        for index in range(len(start.objects)):
            connection.sought(start.seek, SoughtObject(index, SoughtStatus.FAILED))

    def _transfer(self, party: Party, action: actions_of.Transfer) -> None:
        match action:
            case actions_of.StartPut():
                self._transfers.put(party, action)
            case actions_of.StartGet():
                self._transfers.get(party, action)
            case actions_of.StartLease():
                self._transfers.lease(party, action)
            case actions_of.DropLease():
                self._transfers.drop(party, action)
            case actions_of.CancelGet():
                self._transfers.cancel(party, action)

    def _send(self, connection: Connection, message: wire.FromGateway) -> None:
        fds: tuple[int, ...] = ()
        if isinstance(message, wire.Welcome):
            fds, connection.welcome_fds = connection.welcome_fds, ()
        connection.queue(message, fds)

    def _answer(self, connection: Connection, action: actions_of.Action) -> None:
        session = connection.session
        match action:
            case actions_of.ReportNamespaces(ask):
                engine = connection.engine
                published = list(engine.namespaces.values()) if engine is not None else []
                for message in wire.split_namespaces(ask, published):
                    self.perform(connection, session.reply(message))
            case actions_of.ReportStatus(ask):
                self.perform(connection, session.reply(wire.Status(ask, self._house.status_text())))
            case actions_of.StopGateway(ask):
                if sockets.is_trusted(connection.peer):
                    self.perform(connection, session.reply(wire.Done(ask, "draining")))
                    self._house.stop()
                else:
                    self.perform(connection, session.violate("only the gateway's own user may stop it"))
            case actions_of.VerifyCard(ask, drop):
                if drop and not sockets.is_trusted(connection.peer):
                    self.perform(connection, session.violate("only the gateway's own user may drop what is damaged"))
                else:
                    self._prover.begin(connection, ask, drop=drop)
            case _:
                raise AssertionError(f"nobody carries out {action}")

    def _attend(self, connection: Connection, question: Question) -> None:
        session = connection.session
        if isinstance(question, Purge) and not sockets.is_trusted(connection.peer):
            self.perform(connection, session.violate("only the gateway's own user may purge the card"))
            return
        self.engines.look()
        self.perform(connection, session.reply(self._attendant.answer(question, time.monotonic_ns())))

    def _publish(self, connection: Connection, published: wire.RankNamespace, *, adopted: bool) -> None:
        engine = connection.engine
        assert engine is not None, "only schedulers and ranks publish, and they have an engine"
        try:
            check_descriptor(published.descriptor)
        except PeerError as error:
            self.perform(connection, connection.session.violate(str(error)))
            return
        if adopted:
            engine.adopted = published.namespace
            self._card.contents.put_namespace(published.namespace, published.descriptor)
        else:
            engine.namespaces[published.rank] = published

    # --- admission ---------------------------------------------------------------------------------------

    def _admit(self, connection: Connection, hello: wire.Hello, fds: tuple[int, ...], until_s: float) -> None:
        if hello.role is wire.Role.TOOL:
            if sum(one.is_tool for one in self.connections.values()) > wire.TOOL_SESSIONS_MAX:
                self.counters["refused_sessions"] += 1
                reason = f"this gateway has {wire.TOOL_SESSIONS_MAX} sessions of tools already; end some"
                self.perform(connection, connection.session.refuse(wire.RefusedCode.SESSIONS, reason))
                return
            self.perform(connection, connection.session.admit(self._welcome(connection, None)))
            return
        if self._waits_for_an_end(connection, hello, fds, until_s):
            return
        if connection.socket.fileno() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - DESCRIPTORS_SPARE:
            for fd in fds:
                os.close(fd)
            self._refuse_for_descriptors(connection)
            return
        try:
            engine = self.engines.attach(hello, fds, connection)
            try:
                # Its own duplicates: the engine may be gone, and the numbers given to others, before they are sent.
                connection.welcome_fds = _duplicates((engine.ring.fd, engine.control.fd, self._table_fd))
            except OSError:
                self.engines.detach(engine, hello.role, hello.rank)
                raise
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            log.warning("refused engine %r: %s", hello.engine_id, error.strerror)
            self._refuse_for_descriptors(connection)
            return
        except Refusal as refusal:
            self.counters[f"refused_{refusal.code.value}"] += 1
            self.perform(connection, connection.session.refuse(refusal.code, refusal.reason))
            return
        self._seat(connection, hello, engine)
        self.perform(connection, connection.session.admit(self._welcome(connection, hello)))

    def _seat(self, connection: Connection, hello: wire.Hello, engine: Engine[Connection]) -> None:
        connection.engine = engine
        connection.party = Party(engine.ring, connection, hello.engine_id)
        if hello.role is wire.Role.RANK:
            connection.party.region = engine.leases
            connection.party.end_term = partial(engine.control.end_term, hello.rank)
        if self._remote is not None and self._remote.alone is not None:
            self._remote.alone.attached(engine.ring)
        if len(engine.sessions) == 1:
            log.info("engine %r attaches (pid %d)", hello.engine_id, hello.pid)

    def _waits_for_an_end(
        self, connection: Connection, hello: wire.Hello, fds: tuple[int, ...], until_s: float
    ) -> bool:
        """Whether a Hello was parked until a former session's last I/O is over, or has waited too long for that.

        It waits for the session in its place; without a ring of its own also for an engine all of whose sessions
        are about to end: that one's ring goes with it, and is never another's.
        """
        holder = self.engines.holder(hello)
        dying = not fds and self._is_dying(hello.engine_id)
        if not dying and (holder is None or not self._leaving(holder)):
            return False
        if time.monotonic() < until_s:
            self._parked.append((connection, hello, fds, until_s))
            return True
        if dying:
            reason = f"the former engine {hello.engine_id} has ended, but not its last I/O"
            self.perform(connection, connection.session.refuse(wire.RefusedCode.RANK_TAKEN, reason))
        return dying

    def _leaving(self, holder: Connection) -> bool:
        """Whether the holder of a place is about to give it up; its end is taken in here if it just came."""
        if holder.session.state is not State.ENDING and holder.hung_up():
            self._gone(holder)
        return holder.session.state is State.ENDING

    def _is_dying(self, engine_id: str) -> bool:
        leaving = [self._leaving(session) for session in self.engines.sessions_of(engine_id)]
        return bool(self.engines.sessions_of(engine_id)) and all(leaving)

    def _try_parked(self) -> None:
        parked, self._parked = self._parked, []
        for connection, hello, fds, until_s in parked:
            if connection.session.state is State.ADMITTING:
                self._admit(connection, hello, fds, until_s)
            else:
                for fd in fds:
                    os.close(fd)

    def _welcome(self, connection: Connection, hello: wire.Hello | None) -> wire.Welcome:
        engine = connection.engine
        store_region = load_region = wire.SlotRange(0, 0)
        lease_slots = 0
        if engine is not None and hello is not None and hello.role is wire.Role.RANK:
            mine = engine.regions[hello.rank]
            store_region = wire.SlotRange(mine.first, mine.store_slots)
            load_region = wire.SlotRange(mine.load_first, mine.load_slots)
            lease_slots = mine.lease_slots
        elif engine is not None:
            load_region = wire.SlotRange(engine.ring.slots - engine.staged_slots, engine.staged_slots)
        return wire.Welcome(
            version=wire.PROTOCOL_VERSION,
            session=connection.number,
            boot_id=self._boot_id,
            card_uuid=self._card.uuid,
            epoch=engine.control.epoch if engine is not None else 0,
            slot_bytes=self._card.geometry.slot_bytes,
            ring_slots=engine.ring.slots if engine is not None else 0,
            store_region=store_region,
            load_region=load_region,
            heartbeat_ms=wire.HEARTBEAT_MS,
            ring_use=engine.ring_use if engine is not None else RingUse.OWN,
            lease_slots=lease_slots,
            has_remote=self._remote is not None,
        )

    # --- going -------------------------------------------------------------------------------------------

    def _closing(self, connection: Connection) -> None:
        """Nothing touches the session's slots any more: its place is free, its last answers may go out."""
        connection.closing_since_s = time.monotonic()
        self.touched.add(connection)
        self._prover.leave(connection)
        if connection.party is not None and not connection.left and not self.draining:
            # While the gateway drains, no slot is used again: what ranks hold they may go on copying.
            self._transfers.leave(connection.party)
        connection.party = None  # a cycle would keep a dead engine's ring until some garbage collection
        engine, hello = connection.engine, connection.session.hello
        if engine is not None and hello is not None:
            connection.engine = None
            self.engines.detach(engine, hello.role, hello.rank)

    def drain(self) -> None:
        """No new sessions, no new work."""
        self.draining = True
        self._prover.stop()
        self.engines.set_draining()
        for connection in list(self.connections.values()):
            self.perform(connection, connection.session.drain())

    def end_round(self, *, everybody: bool) -> list[Connection]:
        """Send what the round has brought; returns those with which something happened.

        `everybody`: also those with which nothing did, for the bounds in time (once a heartbeat is enough).
        """
        if self._parked:
            self._try_parked()
        now_s = time.monotonic()
        for connection in list(self.connections.values()) if everybody else list(self.touched):
            self._end_round_of(connection, now_s)
        looked_at = list(self.connections.values()) if everybody else list(self.touched)
        self.touched.clear()
        return looked_at

    def _end_round_of(self, connection: Connection, now_s: float) -> None:
        self.perform(connection, connection.take_answers())
        try:
            connection.flush()
        except PeerError:
            self._gone(connection)
        if connection.overflowing:
            self.counters["sessions_not_reading"] += 1
            self._gone(connection)
        if connection.silent_too_long(now_s):
            self._gone(connection)

    def forget(self, connection: Connection) -> None:
        """Close its socket; the selector must not know it any more."""
        del self.connections[connection.socket.fileno()]
        connection.close()

    def close(self) -> None:
        """Close every socket and every ring, whatever is under way (the I/O threads have ended)."""
        self.draining = True
        for connection in list(self.connections.values()):
            self._closing(connection)
            self.forget(connection)
        for _, _, fds, _ in self._parked:
            for fd in fds:
                os.close(fd)
        self._parked.clear()
        os.close(self._table_fd)

    # --- status ------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Counters and the sessions, as many as a message holds."""
        attached = [c for c in self.connections.values() if c.session.hello is not None]
        return {
            "engines": len(self.engines),
            "sessions_total": len(attached),
            "sessions_left_out": max(0, len(attached) - STATUS_SESSIONS_MAX),
            "sessions": [_session_status(connection) for connection in attached[:STATUS_SESSIONS_MAX]],
            "counters": {**self.counters, **self._transfers.all_counters(), **self._of_tools()},
        }

    def roles(self) -> dict[str, int]:
        """How many sessions of each role are attached."""
        hellos = (connection.session.hello for connection in self.connections.values())
        return Counter(hello.role.value for hello in hellos if hello is not None)

    def _of_tools(self) -> dict[str, int]:
        return {**self._prover.counters, **self._attendant.counters}


def _duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))  # noqa: PERF401  those made are closed where one fails
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    return tuple(made)


def _party(connection: Connection) -> Party:
    assert connection.party is not None, "only ranks put and get, and they have a ring"
    return connection.party


def _session_status(connection: Connection) -> dict[str, Any]:
    hello = connection.session.hello
    assert hello is not None
    return {
        "session": connection.number,
        "engine": hello.engine_id[:STATUS_ENGINE_ID_CHARS_MAX],
        "role": hello.role.value,
        "rank": hello.rank,
        "pid": connection.peer.pid,
        "in_flight": connection.session.in_flight,
    }
