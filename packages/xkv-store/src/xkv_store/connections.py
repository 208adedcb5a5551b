"""One client's connection at the gateway: its socket, its session, its unsent answers.

Owns: sending and receiving of packets for one peer, the outbox and its bound, answers gathered in one round.
Must not know: cards, engines' rules, what an action means.
"""

from __future__ import annotations

import os
import select
import selectors
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from . import sockets, wire
from .errors import PeerError
from .session import GatewaySession, State
from .session_actions import Send
from .wire_remote import Sought, batches

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from .engines import Engine
    from .geometry import Geometry
    from .session_actions import Actions
    from .transfers import Party
    from .wire_remote import SoughtObject

RECEIVES_PER_ROUND_MAX: Final = 16  # then the other connections have their turn
HELLO_S_MAX: Final = 5.0  # a connection that says nothing holds a descriptor no longer than that
TOOL_IDLE_S_MAX: Final = 60.0  # tools ask and go; one that says nothing for so long was forgotten
CLOSE_S_MAX: Final = 2.0  # for the last answers to go out to a client that does not read


class Connection:
    """A connected peer. `number` is the session's, never given twice in a gateway's life."""

    def __init__(self, connection: socket.socket, *, number: int, geometry: Geometry, touched: set[Connection]) -> None:
        self.socket = connection
        self.number = number
        self.peer = sockets.peer_credentials(connection)
        self.session = GatewaySession(geometry=geometry)
        self.heard_s = time.monotonic()  # when the last packet came
        self.engine: Engine[Connection] | None = None
        self.party: Party | None = None
        self.welcome_fds: tuple[int, ...] = ()  # duplicates that its Welcome takes along
        self.left = False  # its queued work has been withdrawn
        self.closing_since_s: float | None = None  # nothing touches its slots any more; only answers go out
        self.interest = 0  # what the selector was told
        self._touched = touched  # whom the loop looks at when the round ends
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._outbox_bytes = 0
        self._stored: dict[int, list[wire.StoredObject]] = {}
        self._loaded: dict[int, list[wire.LoadedObject]] = {}
        self._leased: dict[int, list[wire.LeasedObject]] = {}
        self._sought: dict[int, list[SoughtObject]] = {}

    # --- what the transfers call -------------------------------------------------------------------------

    def stored(self, put: int, answer: wire.StoredObject) -> None:
        """Gather an answer until the end of the round."""
        self._stored.setdefault(put, []).append(answer)
        self._touched.add(self)

    def loaded(self, get: int, answer: wire.LoadedObject) -> None:
        """Gather an answer until the end of the round."""
        self._loaded.setdefault(get, []).append(answer)
        self._touched.add(self)

    def leased(self, lease: int, answer: wire.LeasedObject) -> None:
        """Gather an answer until the end of the round."""
        self._leased.setdefault(lease, []).append(answer)
        self._touched.add(self)

    def sought(self, seek: int, answer: SoughtObject) -> None:
        """Gather an answer until the end of the round; of no use where the peer has gone: nothing waits for seeks."""
        if self.session.state not in (State.ENDING, State.CLOSED):
            self._sought.setdefault(seek, []).append(answer)
            self._touched.add(self)

    # --- what the loop calls -----------------------------------------------------------------------------

    def take_answers(self) -> Actions:
        """The actions of all answers gathered so far."""
        actions: Actions = []
        stored, self._stored = self._stored, {}
        for put, answers in stored.items():
            actions += self.session.stored(put, answers)
        loaded, self._loaded = self._loaded, {}
        for get, answers_of_get in loaded.items():
            actions += self.session.loaded(get, answers_of_get)
        leased, self._leased = self._leased, {}
        for lease, answers_of_lease in leased.items():
            actions += self.session.leased(lease, answers_of_lease)
        sought, self._sought = self._sought, {}
        for seek, answers_of_seek in sought.items():
            for piece in batches(answers_of_seek):
                actions += self.session.reply(Sought(seek, piece))
        return actions

    def receive(self) -> sockets.Packet | None:
        """The next packet; None at the end. BlockingIOError: nothing now. PeerError: not a packet of ours."""
        packet = sockets.receive(self.socket)
        self.heard_s = time.monotonic()
        return packet

    def queue(self, message: wire.FromGateway, fds: Sequence[int] = ()) -> None:
        """Send a message as soon as the peer has room for it. Owns `fds` from here on."""
        data = wire.encode(message)
        self._outbox.append((data, tuple(fds)))
        self._outbox_bytes += len(data)
        self._touched.add(self)

    @property
    def overflowing(self) -> bool:
        """The peer does not read what it asked for."""
        return len(self._outbox) > wire.OUTBOX_MESSAGES_MAX or self._outbox_bytes > wire.OUTBOX_BYTES_MAX

    @property
    def caught_up(self) -> bool:
        """Whether the peer has taken all that it was told."""
        return not self._outbox

    def tell(self, message: wire.Verifying) -> None:
        """Send what it listens for; a tool that listens is not silent."""
        self.heard_s = time.monotonic()
        for action in self.session.reply(message):
            assert isinstance(action, Send)
            self.queue(action.message)

    def flush(self) -> bool:
        """Send what the peer takes now; True when nothing is left."""
        outbox = self._outbox
        while outbox:
            data, fds = outbox[0]
            try:
                if not sockets.send(self.socket, data, fds):
                    return False
            except OSError as error:
                raise PeerError(f"cannot send: {error.strerror}") from error
            outbox.popleft()
            self._outbox_bytes -= len(data)
            _close_all(fds)
        return True

    def forget_answers(self) -> None:
        """The peer is gone: what it would have been told is of no use."""
        while self._outbox:
            _close_all(self._outbox.popleft()[1])
        self._outbox_bytes = 0

    def hung_up(self) -> bool:
        """Whether the peer has closed its end, read so far or not."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the socket and what would have been sent."""
        self.forget_answers()
        _close_all(self.welcome_fds)
        self.welcome_fds = ()
        self._drop_unread()
        self.socket.close()

    def _drop_unread(self) -> None:
        """A socket closed with unread packets is reset: its peer would not hear why it was refused."""
        try:
            for _ in range(RECEIVES_PER_ROUND_MAX):
                packet = self.receive()
                if packet is None:
                    return
                packet.close()
        except (OSError, PeerError):
            return

    @property
    def wants(self) -> int:
        """The selector's events that matter now; 0 for none."""
        reading = self.session.state not in (State.ENDING, State.CLOSED)
        return (selectors.EVENT_READ if reading else 0) | (selectors.EVENT_WRITE if self._outbox else 0)

    def silent_too_long(self, now_s: float) -> bool:
        """Connected, but never said Hello; or a tool that asks nothing."""
        silent_s = now_s - self.heard_s
        return (self.session.state is State.NEW and silent_s > HELLO_S_MAX) or (
            self.is_tool and silent_s > TOOL_IDLE_S_MAX
        )

    @property
    def is_tool(self) -> bool:
        """Whether a tool is attached here, or about to be."""
        hello = self.session.hello
        return hello is not None and hello.role is wire.Role.TOOL

    def may_close(self, now_s: float) -> bool:
        """The session is over, and the last answers are out or not wanted."""
        if self.closing_since_s is None:
            return False
        return not self._outbox or now_s - self.closing_since_s > CLOSE_S_MAX


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
