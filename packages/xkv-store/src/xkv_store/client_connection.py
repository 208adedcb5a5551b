"""One connection of a client: its socket, its session, its outbox.

Owns: dialling, sending without blocking, the outbox and its bound, hanging up. Must not know: callbacks,
memory, reconnecting. Its user holds a lock around everything except `receive`, which one thread calls.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

from . import sockets
from .attachment import not_trusted
from .client_session import ClientSession
from .wire import FromClient, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .attachment import Attachment
    from .client_session import ClientAction

OUTBOX_MESSAGES_MAX: Final = 256
"""At most 16 MiB; the socket holds some more. A gateway that is so far behind gets no more work."""


def dial(attachment: Attachment) -> ClientConnection | None:
    """A connection to the gateway; None where nobody listens. Raises UserError for another user's."""
    connection = sockets.connect(attachment.socket)
    if connection is None:
        return None
    peer = sockets.peer_credentials(connection)
    if not sockets.is_trusted(peer, attachment.gateway_uids):
        connection.close()
        raise not_trusted(attachment, peer)
    return ClientConnection(connection, ClientSession(attachment.hello()), peer)


class ClientConnection:
    """A connected socket with what belongs to it."""

    def __init__(self, connection: socket.socket, session: ClientSession, peer: sockets.Peer) -> None:
        self.session = session
        self.peer = peer
        self.hung_up = False
        """We send nothing more and wait for the end: only the gateway's close says that it has let the slots go."""
        self._socket = connection
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    @property
    def has_room(self) -> bool:
        """Whether another message may be submitted."""
        return len(self._outbox) < OUTBOX_MESSAGES_MAX

    @property
    def waits_to_send(self) -> bool:
        """Whether messages wait for the socket to take them."""
        return bool(self._outbox)

    def submit(self, message: FromClient, fds: Sequence[int] = ()) -> None:
        """Send now, or as soon as the socket takes it, in order. The descriptors stay the caller's."""
        self._outbox.append((encode(message), tuple(fds)))
        if len(self._outbox) == 1:
            self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                if not sockets.send(self._socket, data, fds):
                    return
            except OSError:
                # For example: the message does not fit the buffer that this kernel grants. Nothing can be
                # sent in order any more.
                self.hang_up()
                return
            self._outbox.popleft()

    def receive(self) -> tuple[sockets.Packet, ...]:
        """The next packet, or none where none is there now.

        Raises EOFError at the end, PeerError for what is no packet of ours.
        """
        try:
            packet = sockets.receive(self._socket)
        except BlockingIOError:
            return ()
        except OSError as error:
            raise EOFError(str(error)) from error
        if packet is None:
            raise EOFError
        return (packet,)

    def interpret(self, packet: sockets.Packet) -> ClientAction:
        """What a packet says; raises PeerError. The packet's descriptors stay the caller's."""
        return self.session.receive(packet.data, len(packet.fds))

    def hang_up(self) -> None:
        """Send nothing more; the gateway lets our slots go and closes."""
        self.hung_up = True
        self._outbox.clear()
        with contextlib.suppress(OSError):  # it is gone already: `receive` tells
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Give the socket back."""
        self._outbox.clear()
        self._socket.close()
