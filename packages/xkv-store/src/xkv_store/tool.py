"""A tool's session with a gateway: one question, one answer, no threads, no ring.

Owns: the short blocking conversation that commands need, and its bounds.
Must not know: engines, rings, what a command prints.
"""

from __future__ import annotations

import os
import select
import time
import uuid
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from . import sockets, wire
from .contents import HeldNamespace, HeldObject
from .departures import REFUSALS, Departure
from .errors import MediumError, PeerError, UserError
from .history import Histories, ObjectHistory
from .left_out import Omission
from .wire_tools import (
    OBJECTS_EXPLAINED_MAX,
    Departed,
    Explain,
    Explained,
    ListedNamespaces,
    ListedObjects,
    ListNamespaces,
    ListObjects,
    Purge,
    Purged,
    PurgeObject,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence
    from pathlib import Path

Answer = TypeVar("Answer", bound=wire.FromGateway)


class NobodyAnswersError(UserError):
    """No process listens on the socket."""


class SilentGatewayError(UserError):
    """A process listens, and says nothing within the bound; `peer` is who."""

    def __init__(self, message: str, peer: sockets.Peer) -> None:
        super().__init__(message, peer)
        self.peer = peer

    def __str__(self) -> str:
        return str(self.args[0])


class ForeignGatewayError(UserError):
    """What listens does not speak this protocol."""


class GatewayRefusesError(UserError):
    """The gateway said no; `code` says why."""

    def __init__(self, message: str, code: wire.RefusedCode) -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


ANSWER_S_MAX: Final = 10.0  # a gateway that opens a card of a million entries answers within five seconds
END_S_MAX: Final = 60.0  # the drain's bound, the last commit and the card's sync, with room


def _is_readable(watched: socket.socket | int, wait_s: float) -> bool:
    poll = select.poll()  # select() takes no descriptor above 1,023
    poll.register(watched, select.POLLIN)
    return bool(poll.poll(wait_s * 1_000))


def _check_told(reason: str) -> None:
    if reason:
        raise MediumError(0, f"the gateway cannot say what the card holds: {reason}")


def _of(told: Sequence[Departed]) -> list[Departure]:
    return [Departure(one.reason, one.generation, one.when_ms) for one in told]


class Tool:
    """An attached tool; close it (`contextlib.closing`)."""

    def __init__(self, path: Path, answer_s_max: float = ANSWER_S_MAX) -> None:
        """Attach; raises UserError where no gateway answers or it refuses."""
        self._path = path
        self._answer_s_max = answer_s_max
        self._asked = 0
        connection = sockets.connect(path) if os.path.isdir(path.parent) else None  # noqa: PTH112  never raises
        if connection is None:
            raise NobodyAnswersError(
                f"no gateway answers on {path}; start one with `xkv gateway run`, or name the right one with "
                "--port, --socket-dir, --card or --socket"
            )
        self._connection = connection
        try:
            self.peer = sockets.peer_credentials(connection)
            self.pid = self.peer.pid
            hello = wire.Hello(
                version=wire.PROTOCOL_VERSION,
                engine_id=f"tool-{uuid.uuid4().hex}",
                role=wire.Role.TOOL,
                rank=0,
                world_size=1,
                ring_bytes=0,
                load_reserve_bytes=0,
                staged_bytes=0,
                fragment_bytes=0,
                pid=os.getpid(),
            )
            self._send(hello)
            self._await(wire.Welcome)
        except BaseException:
            connection.close()
            raise

    def status(self) -> str:
        """The gateway's status, JSON text."""
        self._asked += 1
        self._send(wire.AskStatus(self._asked))
        return self._await(wire.Status).text

    def stop(self) -> bool:
        """Make the gateway drain and end; True when its process has ended, False when the bound came first."""
        try:
            process = os.pidfd_open(self.pid)
        except OSError:
            process = None  # in another pid namespace: the connection's end has to do
        try:
            self._asked += 1
            self._send(wire.Stop(self._asked))
            self._await(wire.Done)
            watched = self._connection if process is None else process
            return _is_readable(watched, END_S_MAX)
        finally:
            if process is not None:
                os.close(process)

    def verify(self, *, drop: bool) -> Iterator[wire.Verifying]:
        """Have the card proved; what the gateway tells of it, to its last message. UserError where it falls silent."""
        self._asked += 1
        self._send(wire.Verify(self._asked, drop))
        while True:
            told = self._await(wire.Verifying)
            yield told
            if told.state is not wire.VerifyState.RUNNING:
                return

    def namespaces(self) -> Iterator[HeldNamespace]:
        """Every namespace of the card, in the order of their bytes. UserError, MediumError."""
        after = b""
        while True:
            self._asked += 1
            self._send(ListNamespaces(self._asked, after))
            page = self._await(ListedNamespaces)
            _check_told(page.reason)
            for one in page.namespaces:
                yield HeldNamespace(*msgspec.structs.astuple(one))
                after = one.namespace
            if not (page.more and page.namespaces):
                return

    def objects(self, prefix: bytes) -> Iterator[HeldObject]:
        """Every object whose key begins with `prefix`, in the order of keys. UserError, MediumError."""
        start = prefix
        while True:
            self._asked += 1
            self._send(ListObjects(self._asked, prefix, start))
            page = self._await(ListedObjects)
            _check_told(page.reason)
            for one in page.objects:
                yield HeldObject(*msgspec.structs.astuple(one))
            if not page.next:
                return
            if page.next <= start:
                raise UserError(f"the gateway on {self._path} goes in a circle; see its log")
            start = page.next

    def purge(self, objects: Sequence[HeldObject], namespaces: Sequence[bytes] = ()) -> Purged:
        """Let these objects leave, as many as a message takes, and forget these namespaces. UserError."""
        self._asked += 1
        wanted = tuple(PurgeObject(one.key, one.generation) for one in objects)
        self._send(Purge(self._asked, wanted, tuple(namespaces)))
        return self._await(Purged)

    def explain(self, keys: Sequence[bytes]) -> Histories:
        """What is known of the objects with these keys. UserError, MediumError."""
        found = Histories()
        for first in range(0, len(keys), OBJECTS_EXPLAINED_MAX):
            some = tuple(keys[first : first + OBJECTS_EXPLAINED_MAX])
            self._asked += 1
            self._send(Explain(self._asked, some))
            page = self._await(Explained)
            _check_told(page.reason)
            for key, one in zip(some, page.objects, strict=True):
                held = HeldObject(key, one.generation, one.length, 0) if one.generation else None
                found.objects.append(ObjectHistory(key, held, one.coming, _of(one.left), _of(one.refused)))
            for of in page.refused:
                counts = (of.shed, of.over_quota, of.failed, of.invalid)
                found.refused[of.namespace] = dict(zip(REFUSALS, counts, strict=True))
            for left_out in page.left_out:
                reasons = found.left_out.setdefault(left_out.namespace, {})
                reasons[left_out.reason] = Omission(left_out.count, left_out.last_ms)
            found.left_since_ms, found.refused_since_ms = page.left_since_ms, page.refused_since_ms
        return found

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    def _send(self, message: wire.FromClient) -> None:
        if not sockets.send(self._connection, wire.encode(message)):
            raise UserError(f"the gateway on {self._path} does not take messages; see its log")

    def _await(self, kind: type[Answer]) -> Answer:
        deadline = time.monotonic() + self._answer_s_max
        while (left_s := deadline - time.monotonic()) > 0:
            if not _is_readable(self._connection, left_s):
                break
            message = self._receive(self._connection)
            if isinstance(message, kind):
                return message
            if isinstance(message, wire.Refused):
                raise GatewayRefusesError(f"the gateway on {self._path} refuses: {message.reason}", message.code)
        raise SilentGatewayError(
            f"the gateway on {self._path} (pid {self.pid}) does not answer within {self._answer_s_max:.0f} s; see its "
            "log",
            self.peer,
        )

    def _receive(self, connection: socket.socket) -> wire.FromGateway:
        packet = sockets.receive(connection)
        if packet is None:
            raise UserError(f"the gateway on {self._path} has closed the connection; see its log")
        packet.close()  # a tool gets no descriptors that it would use
        try:
            return wire.decode_from_gateway(packet.data)
        except PeerError as error:
            raise ForeignGatewayError(
                f"what listens on {self._path} is no xkv gateway of this version: {error}"
            ) from error
