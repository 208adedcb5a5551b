"""The process that calls a remote's library for a gateway, or that holds its memory for the pool.

Owns: the library: its import, its set-up, the calls, each lane on a thread of its own. Must not know: cards, objects,
how long a call may take (the gateway ends this process where one takes too long). It ends when the gateway has.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import os
import queue
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Final, Protocol, cast

from .huge_pages import Mapping
from .memory_limit import has_room_for_ring
from .remote_address import RemoteAddress
from .remote_words import (
    NOT_FOUND,
    PACKET_BYTES_MAX,
    TRANSFER,
    Call,
    Codes,
    Failed,
    FromChild,
    Lane,
    Ready,
    pack,
    unpack_call,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

LIBRARY: Final = "mooncake"
PR_SET_PDEATHSIG: Final = 1
WAITS_NICE: Final = 10
LIBRARY_BUFFER_BYTES: Final = 16 << 20  # the library's own, for what it is not given memory for: nothing of ours
BLOCK_BYTES: Final = 512  # of st_blocks
OURS: Final = -1_000_000  # a code that the library does not have: the call raised


class Library(Protocol):
    """The part of Mooncake's store client that is used here."""

    def setup(  # noqa: PLR0917  as it is there
        self, host: str, metadata: str, segment: int, buffer: int, protocol: str, device: str, master: str
    ) -> int:
        """0, or a code."""

    def get_hostname(self) -> str:
        """As others know this client."""

    def register_buffer(self, address: int, size: int) -> int:
        """0, or a code."""

    def unregister_buffer(self, address: int) -> int:
        """0, or a code."""

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """1, 0, or a code."""

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """Bytes, or a code."""

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """0, or a code; what is there already stays as it is."""

    def batch_remove(self, keys: list[str]) -> list[int]:
        """0, or a code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the gateway's end of the socket is closed."""
    parser = argparse.ArgumentParser(prog="remote_child", description="Call a remote's library for a gateway.")
    parser.add_argument("--address", required=True)
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, help="serve calls over this memory; without it: hold the segment")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    # However the gateway ends, and whatever the library is waiting for then: this process ends with it.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    address = RemoteAddress.parse(options.address, "--address")
    channel = socket.socket(fileno=options.socket_fd)
    is_holder = options.memory_fd is None
    try:
        library = _set_up(address, address.segment_bytes if is_holder else 0)
        memory = None if is_holder else share(library, options.memory_fd, address.memory_bytes)
    except _SetUpError as error:
        _say(channel, Failed(str(error)))
        return 1
    lanes = _Lanes(library, channel, memory)
    _say(channel, Ready(library.get_hostname()))
    while True:
        packet, fds, _, _ = socket.recv_fds(channel, PACKET_BYTES_MAX, 1)
        if not packet:
            break
        lanes.take(unpack_call(packet), fds[0] if fds else None)
    os._exit(0)  # a thread of the library may hang: nothing is waited for


class _SetUpError(Exception):
    """Why the library is not usable."""


def _set_up(address: RemoteAddress, segment_bytes: int) -> Library:
    if importlib.util.find_spec(LIBRARY) is None:
        raise _SetUpError(f"the package {LIBRARY} is not installed")
    library = cast("Library", importlib.import_module(f"{LIBRARY}.store").MooncakeDistributedStore())
    code = library.setup(
        address.host or _own_host(address.master),
        address.metadata,
        segment_bytes,
        LIBRARY_BUFFER_BYTES,
        address.protocol,
        address.device,
        address.master,
    )
    if code:
        raise _SetUpError(f"no set-up with the master at {address.master} (code {code})")
    return library


def _own_host(master: str) -> str:
    """This machine's address on its way to the master: no packet is sent."""
    host, _, port = master.rpartition(":")
    family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(place)
        return str(way.getsockname()[0])


def share(library: Library, memory_fd: int, memory_bytes: int) -> ctypes.c_char:
    """Map the gateway's memory, in huge pages if there are any (ADR 0019), and register it.

    Returns its first byte, which keeps it mapped.
    """
    mapping = Mapping(memory_fd, memory_bytes)
    if has_room_for_ring(memory_bytes, taken_bytes=os.fstat(memory_fd).st_blocks * BLOCK_BYTES):
        mapping.use_huge_pages([range(memory_bytes)])
    first = ctypes.c_char.from_buffer(mapping.memory)
    code = library.register_buffer(ctypes.addressof(first), memory_bytes)
    if code:
        raise _SetUpError(f"{memory_bytes} bytes of memory cannot be registered (code {code})")
    return first


class _Lanes:
    """A thread for each lane: a load that hangs keeps no lookup waiting."""

    def __init__(self, library: Library, channel: socket.socket, memory: ctypes.c_char | None) -> None:
        self._library = library
        self._channel = channel
        self._memory = memory
        self._bases = {TRANSFER: 0 if memory is None else ctypes.addressof(memory)}
        self._rings: dict[int, Mapping] = {}
        self._queues: dict[Lane, queue.SimpleQueue[tuple[Call, int | None]]] = {
            lane: queue.SimpleQueue() for lane in Lane
        }
        for lane in Lane:
            threading.Thread(target=self._work, args=(lane,), name=f"remote-{lane.value}", daemon=True).start()

    def take(self, call: Call, fd: int | None = None) -> None:
        """Carry this out, after those of its lane that came before. `fd`: of a ring, to be closed."""
        self._queues[call.lane].put((call, fd))

    def _work(self, lane: Lane) -> None:
        if lane in {Lane.LOAD, Lane.STORE}:
            # The library waits for a transfer's end in a loop without a pause, on this thread: a whole core. Whoever
            # has work for that core, the library's own threads first of all, goes before it.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WAITS_NICE)
        while True:
            call, fd = self._queues[lane].get()
            try:
                codes = self._carry_out(call) if call.lane is not Lane.MAP else [self._map(call, fd)]
            except Exception as error:  # noqa: BLE001  whatever the library raises: these keys have failed
                print(f"the library raised {error!r}", file=sys.stderr, flush=True)
                codes = [OURS] * len(call.keys)
            _say(self._channel, Codes(call.number, tuple(codes)))

    def _carry_out(self, call: Call) -> Sequence[int]:
        keys = list(call.keys)
        if call.lane is Lane.LOOK:
            return self._library.batch_remove(keys) if call.remove else self._library.batch_is_exist(keys)
        memories = call.memories or [TRANSFER] * len(keys)
        addresses = [self._bases[one] + offset for one, offset in zip(memories, call.offsets, strict=True)]
        if call.lane is Lane.LOAD:
            return self._library.batch_get_into(keys, addresses, list(call.sizes))
        removed = self._library.batch_remove(keys) if call.remove else [0] * len(keys)
        put = self._library.batch_put_from(keys, addresses, list(call.sizes))
        # Of what could not be removed the library says that it is there, which is no word of what was to be put.
        return [code if was in {0, NOT_FOUND} else was for code, was in zip(put, removed, strict=True)]

    def _map(self, call: Call, fd: int | None) -> int:
        """Map a ring and register it, once; or forget one, which no call that is under way is about. 0, or a code."""
        (number,), (size,) = call.offsets, call.sizes
        if call.remove:
            ring = self._rings.pop(number, None)
            self._bases.pop(number, None)
            return 0 if ring is None else self._library.unregister_buffer(ring.address)
        if fd is None:  # the kernel drops it where this process has no descriptor left
            return OURS
        try:
            ring = Mapping(fd, size)
        finally:
            os.close(fd)
        code = self._library.register_buffer(ring.address, size)
        if not code:
            self._rings[number], self._bases[number] = ring, ring.address
        return code


def _say(channel: socket.socket, message: FromChild) -> None:
    """One packet is sent whole, whichever thread sends it."""
    try:
        channel.send(pack(message))
    except OSError:
        os._exit(0)  # nobody listens any more


if __name__ == "__main__":
    sys.exit(main())
