"""The gateway's end of the processes that call a remote's library: started, asked, ended, started again.

Owns: their lives, the bounds of each call, and that each call is answered once: with codes, or with None where it came
to nothing. Must not know: objects, cards, what a call is for.

A call that takes too long ends its process, and with it all that could still touch the memory it was given.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec

from .embedded import boot_command, daemon_environment
from .errors import UserError
from .remote_child import LIBRARY
from .remote_words import PACKET_BYTES_MAX, Call, Codes, Failed, Lane, Ready, pack, unpack_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .remote_address import RemoteAddress
    from .remote_memory import RemoteMemory

    OnCodes = Callable[[Sequence[int] | None], None]

log = logging.getLogger(__name__)

NS: Final = 1_000_000_000
SET_UP_NS_MAX: Final = 20 * NS  # import, the way to the master, memory registered: half a second where all is well
CALL_NS_MAX: Final = {Lane.LOOK: 1 * NS, Lane.LOAD: 3 * NS, Lane.STORE: 10 * NS, Lane.MAP: 30 * NS}
"""Once it is a call's turn: a lookup waits for the first two (2 s in all), for stores nobody does. RDMA pins what is
mapped, which is copied to and from until then."""
CALLS_MAX: Final = {Lane.LOOK: 8, Lane.LOAD: 2, Lane.STORE: 2, Lane.MAP: 8}
"""Outstanding: one runs, the next is there when it ends."""
RESTART_NS_MIN: Final = NS // 2
RESTART_NS_MAX: Final = 10 * NS  # what was away is found again within that
KILLED_S_MAX: Final = 5.0  # for the kernel to end a process: nothing of it waits for a network
_CLOSED: Final = "the gateway ends"


class LinkState(Enum):
    """Where the process stands."""

    STARTING = "starting"
    UP = "up"
    DYING = "dying"  # it was told to end at once
    DOWN = "down"  # until the next attempt


@dataclass(slots=True, eq=False)
class _Flight:
    call: Call
    on_codes: OnCodes


class Process:
    """One process of ours, started again when it ends. `poll` it; `call` it while it is up."""

    def __init__(self, address: RemoteAddress, memory: RemoteMemory | None) -> None:
        """Without `memory` it holds the segment and takes no calls."""
        self._address = address
        self._memory = memory
        self._epoll = select.epoll()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lanes: dict[Lane, deque[_Flight]] = {lane: deque() for lane in Lane}
        self._since_ns: dict[Lane, int] = dict.fromkeys(Lane, 0)  # when the first of a lane had its turn
        self._numbers = 0
        self._failures = 0
        self._failed_lane: Lane | None = None  # whose call it was that took too long
        self._until_ns = 0  # of STARTING: its bound; of DOWN: when to start
        self._said = ""
        self.state = LinkState.DOWN
        self.reason = "not started yet"
        self.host = ""
        self.life = 0
        """Grows with each process: what an earlier one was told, a later one does not know."""
        self.counters: Counter[str] = Counter()

    def fileno(self) -> int:
        """Readable when `poll` has something."""
        return self._epoll.fileno()

    @property
    def is_up(self) -> bool:
        """Whether calls can be made."""
        return self.state is LinkState.UP

    def has_room(self, lane: Lane) -> bool:
        """Whether another call of this lane may be made now."""
        return self.is_up and len(self._lanes[lane]) < CALLS_MAX[lane]

    def call(self, lane: Lane, keys: Sequence[str], on_codes: OnCodes, fds: Sequence[int] = (), **more: object) -> None:
        """Call the library; `has_room` comes first. `on_codes` hears the codes, or None, in `poll` or `close`."""
        assert self._channel is not None
        self._numbers += 1
        call = msgspec.structs.replace(Call(self._numbers, lane, tuple(keys)), **more)
        if not self._lanes[lane]:
            self._since_ns[lane] = time.monotonic_ns()
        self._lanes[lane].append(_Flight(call, on_codes))
        try:
            if fds:
                socket.send_fds(self._channel, [pack(call)], fds)
            else:
                self._channel.send(pack(call))
        except OSError as error:
            self._end(f"it does not take calls ({error.strerror})")

    def poll(self, now_ns: int) -> None:
        """Take in answers, see to the bounds, start what has to be started."""
        self._receive(now_ns)
        if self.state is LinkState.STARTING and now_ns >= self._until_ns:
            self._end("it is not set up in time: does the master answer?")
        if self.state is LinkState.UP:
            for lane, flights in self._lanes.items():
                if flights and now_ns - self._since_ns[lane] > CALL_NS_MAX[lane]:
                    self.counters[f"remote_late_{lane.value}"] += 1
                    self._failed_lane = lane
                    self._end(f"a call to {lane.value} took longer than {CALL_NS_MAX[lane] / NS:.0f} s")
                    break
        if self._process is not None and self._process.poll() is not None:
            self._ended(now_ns)
        if self.state is LinkState.DOWN and now_ns >= self._until_ns:
            self._start(now_ns)

    def close(self) -> None:
        """End it, and what it was asked."""
        self._said = _CLOSED
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(KILLED_S_MAX)
            except subprocess.TimeoutExpired:  # in a call of a driver that no signal ends: it ends with that
                log.warning("process %d of the remote was killed and has not ended", self._process.pid)
            self._ended(time.monotonic_ns())
        self._epoll.close()

    # --- inside ------------------------------------------------------------------------------------------

    def _start(self, now_ns: int) -> None:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # no descriptors left: later
            self._fail(f"it cannot be started ({error.strerror})", now_ns)
            return
        fds = [theirs.fileno()]
        words = [*boot_command("remote_child"), "--address", self._address.text, "--socket-fd", str(theirs.fileno())]
        if self._memory is not None:
            fds.append(self._memory.fd)
            words += ["--memory-fd", str(self._memory.fd)]
        try:
            self._process = subprocess.Popen(
                words, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd="/", env=child_environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            self._fail(f"it cannot be started ({error.strerror})", now_ns)
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        self._channel = ours
        self._epoll.register(ours, select.EPOLLIN)
        self.state = LinkState.STARTING
        self.life += 1
        self._until_ns = now_ns + SET_UP_NS_MAX
        self.counters["remote_starts"] += 1

    def _receive(self, now_ns: int) -> None:
        while self._channel is not None:
            try:
                packet = self._channel.recv(PACKET_BYTES_MAX)
                answer = unpack_answer(packet) if packet else None
            except BlockingIOError:
                return
            except (OSError, msgspec.MsgspecError) as error:
                self._end(f"it is not understood ({error})")
                return
            match answer:
                case None:
                    self._end("it has ended")
                    return
                case Ready(host):
                    self.state, self.host, self.reason = LinkState.UP, host, ""
                    if self._memory is None:  # of one that takes calls only an answer says that all is well
                        self._failures = 0
                    log.info("the remote at %s is there (this machine is %s)", self._address.master, host)
                    self._said = ""
                case Failed(reason):
                    self._end(reason)
                    return
                case Codes(number, codes):
                    self._answered(number, codes, now_ns)

    def _answered(self, number: int, codes: Sequence[int], now_ns: int) -> None:
        for lane, flights in self._lanes.items():
            if flights and flights[0].call.number == number:
                flight = flights.popleft()
                self._since_ns[lane] = now_ns
                if lane is self._failed_lane or self._failed_lane is None:
                    self._failures, self._failed_lane = 0, None
                flight.on_codes(codes if len(codes) == len(flight.call.keys) else None)
                return
        self._end(f"it answers call {number}, which is not the first of a lane")

    def _end(self, reason: str) -> None:
        """Not to be listened to any more; what it was asked fails once it is dead."""
        if self.state is LinkState.DYING or self._process is None:
            return
        self.state, self.reason = LinkState.DYING, reason
        self._process.kill()
        if self._channel is not None:
            self._epoll.unregister(self._channel)
            self._channel.close()
            self._channel = None

    def _ended(self, now_ns: int) -> None:
        """It is dead: nothing touches the memory of its calls any more."""
        self._end(self._said if self._said == _CLOSED else "it has ended")
        self._process = None
        self._fail(self.reason, now_ns)
        for flights in self._lanes.values():
            lost = list(flights)
            flights.clear()
            for flight in lost:
                flight.on_codes(None)

    def _fail(self, reason: str, now_ns: int) -> None:
        self.state, self.reason = LinkState.DOWN, reason
        wait_ns = min(RESTART_NS_MIN << min(self._failures, 16), RESTART_NS_MAX)
        self._failures += 1
        self._until_ns = now_ns + wait_ns
        self.counters["remote_ends"] += 1
        if reason != self._said:
            self._said = reason
            what = "the remote" if self._memory is not None else "the segment for the remote"
            log.warning("%s at %s is not there: %s; tried again", what, self._address.master, reason)


def child_environment() -> dict[str, str]:
    """Of ours what a program of this package needs, and what is the library's."""
    return {"GLOG_minloglevel": "2", **daemon_environment(os.environ, sys.path, has_remote=True)}


def check_library() -> None:
    """UserError where the library is not installed."""
    if importlib.util.find_spec(LIBRARY) is None:
        raise UserError(
            "a remote needs the package mooncake-transfer-engine (or mooncake-transfer-engine-non-cuda): install "
            "xkv-store[mooncake]; without --remote everything else works"
        )
