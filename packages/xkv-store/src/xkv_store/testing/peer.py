"""A client that says exactly what a test wants, right or wrong, with no thread and no memory of its own.

Owns: one connection and the mappings of what came with its Welcome.
Must not know: reconnection, back-off, free lists: that is `client`.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from .. import sockets, wire  # noqa: TID252  a test helper inside the package
from ..ring import Ring, RingUse  # noqa: TID252

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ..geometry import Geometry  # noqa: TID252

ANSWER_S_MAX: Final = 20.0

Answer = TypeVar("Answer", bound=wire.FromGateway)


class Peer:
    """One connection. `welcome`, `ring` and `fds` (ring, control page, table) exist after `attach`."""

    def __init__(self, path: Path, *, geometry: Geometry) -> None:
        connection = sockets.connect(path)
        if connection is None:
            raise ConnectionRefusedError(f"nobody listens on {path}")
        self.socket = connection
        self.geometry = geometry
        self.ring: Ring | None = None
        self.fds: tuple[int, ...] = ()
        self._numbers = 0

    def hello(
        self,
        *,
        engine: str = "engine",
        role: wire.Role = wire.Role.RANK,
        rank: int = 0,
        world_size: int = 1,
        ring_slots: int = 160,
        fragment_bytes: int | None = None,
        staged_slots: int = 0,
        ring_use: RingUse = RingUse.OWN,
        fds: Sequence[int] = (),
    ) -> None:
        """Say Hello; a quarter of the ring is for loads."""
        ring_bytes = ring_slots * self.geometry.slot_bytes
        message = wire.Hello(
            version=wire.PROTOCOL_VERSION,
            engine_id=engine,
            role=role,
            rank=rank,
            world_size=world_size,
            ring_bytes=ring_bytes,
            load_reserve_bytes=ring_bytes // 4,
            staged_bytes=staged_slots * self.geometry.slot_bytes,
            fragment_bytes=self.geometry.fragment_bytes if fragment_bytes is None else fragment_bytes,
            pid=os.getpid(),
            ring_use=ring_use,
        )
        self.send(message, fds)

    def attach(
        self,
        *,
        engine: str = "engine",
        rank: int = 0,
        world_size: int = 1,
        staged_slots: int = 0,
        ring_use: RingUse = RingUse.OWN,
        fds: Sequence[int] = (),
    ) -> wire.Welcome:
        """Say Hello as a rank, and map the ring."""
        self.hello(
            engine=engine, rank=rank, world_size=world_size, staged_slots=staged_slots, ring_use=ring_use, fds=fds
        )
        self.welcome = self.receive(wire.Welcome)
        self.ring = Ring.adopt(os.dup(self.fds[0]), slots=self.welcome.ring_slots, slot_bytes=self.welcome.slot_bytes)
        return self.welcome

    def send(self, message: wire.FromClient, fds: Sequence[int] = ()) -> None:
        """Send one message."""
        assert sockets.send(self.socket, wire.encode(message), fds), "the socket is full"

    def receive(self, kind: type[Answer], wait_s: float = ANSWER_S_MAX) -> Answer:
        """The next message, which must be of this kind."""
        message = self.next(wait_s)
        assert isinstance(message, kind), f"{kind.__name__} was expected, not {message}"
        return message

    def next(self, wait_s: float = ANSWER_S_MAX) -> wire.FromGateway | None:
        """The next message; None at the connection's end. TimeoutError where nothing comes."""
        deadline = time.monotonic() + wait_s
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self.socket], [], [], left_s)[0]:
                raise TimeoutError("no message from the gateway")
            packet = sockets.receive(self.socket)
            if packet is None:
                return None
            if packet.fds:
                self.fds = packet.fds
            return wire.decode_from_gateway(packet.data)

    # --- objects -----------------------------------------------------------------------------------------

    def begin_put(
        self, content: bytes, key: bytes, *, first_slot: int = 0, replace: bool = False, family: int | None = None
    ) -> int:
        """Fill slots of the store region and send the put of one object; returns its number.

        `family`: its request, where it has others; the later objects of a request leave first.
        """
        fragments = self.geometry.fragments(len(content))
        start = self.welcome.store_region.first + first_slot
        slots = tuple(range(start, start + fragments))
        for fragment, slot in enumerate(slots):
            self.fill(slot, content, fragment)
        self._numbers += 1
        of = self._numbers if family is None else family
        item = wire.PutObject(key, len(content), slots, of, self._numbers, replace)
        self.send(wire.Put(self._numbers, (item,)))
        return self._numbers

    def fill(self, slot: int, content: bytes, fragment: int) -> None:
        """Lay one fragment of the content into a slot, behind the place of its header."""
        assert self.ring is not None
        size = self.geometry.fragment_bytes
        piece = content[fragment * size : (fragment + 1) * size]
        header = self.geometry.slot_bytes - size
        self.ring.slot(slot)[header : header + len(piece)] = piece

    def put(self, content: bytes, key: bytes, *, first_slot: int = 0, replace: bool = False) -> wire.StoreStatus:
        """Put one object and wait for its answer."""
        number = self.begin_put(content, key, first_slot=first_slot, replace=replace)
        answer = self.receive(wire.Stored)
        assert answer.put == number
        (stored,) = answer.objects
        return stored.status

    def begin_get(self, length: int, key: bytes, *, first_slot: int = 0) -> int:
        """Poison slots of the load region and ask for one object; returns the get's number."""
        assert self.ring is not None
        start = self.welcome.load_region.first + first_slot
        slots = tuple(range(start, start + self.geometry.fragments(length)))
        for slot in slots:
            self.ring.array[slot].fill(0xDB)
        self._numbers += 1
        self.send(wire.Get(self._numbers, (wire.GetObject(key, slots, 0),)))
        return self._numbers

    def content(self, length: int, *, first_slot: int = 0) -> bytes:
        """What lies in slots of the load region."""
        assert self.ring is not None
        header = self.geometry.slot_bytes - self.geometry.fragment_bytes
        start = self.welcome.load_region.first + first_slot
        pieces = [
            bytes(self.ring.slot(start + number)[header : header + self.geometry.payload_bytes(length, number)])
            for number in range(self.geometry.fragments(length))
        ]
        return b"".join(pieces)

    def get(self, length: int, key: bytes) -> tuple[wire.LoadStatus, bytes]:
        """Get one object and wait: its status, and its bytes where it is ok."""
        number = self.begin_get(length, key)
        answer = self.receive(wire.Loaded)
        assert answer.get == number
        (loaded,) = answer.objects
        return loaded.status, self.content(length) if loaded.status is wire.LoadStatus.OK else b""

    def close(self) -> None:
        """End the connection; the ring's mapping goes with its last view."""
        self.socket.close()
        if self.ring is not None:
            self.ring.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


@contextmanager
def attached(path: Path, *, geometry: Geometry) -> Iterator[Peer]:
    """A peer of the gateway that listens there, attached for the block."""
    peer = Peer(path, geometry=geometry)
    try:
        peer.attach()
        yield peer
    finally:
        peer.close()
