"""The engines that are attached: their rings and control pages, who of them is here, what they have published.

Owns: which (engine, role, rank) is taken, that an engine's sessions agree, when a ring is discarded.
Must not know: sockets, puts and gets. A refusal is a value with a code and a reason (`Refusal`).
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from .control import ControlPage, CountReader
from .errors import PeerError, UserError
from .leases import LeaseRegion
from .left_out import FIRST_NUMBER, LOOK_EVERY_NS, REASONS, Ledger
from .ring import RankRegions, Ring, RingUse, memory_identity, regions, ring_slots, staged_slots
from .wire import DESCRIPTOR_BYTES_MAX, RANKS_MAX, Hello, RankNamespace, RefusedCode, Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Session = TypeVar("Session")
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)  # not the ring's fault: the caller refuses for want of places


class Refusal(Exception):  # noqa: N818  an answer to a Hello, not a fault
    """Why a Hello is refused."""

    def __init__(self, code: RefusedCode, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


@dataclass(slots=True, eq=False)
class Engine(Generic[Session]):
    """One engine with at least one session."""

    hello: Hello
    ring: Ring
    control: ControlPage
    regions: tuple[RankRegions, ...]
    staged_slots: int  # the scheduler's; the ring's last ones
    ring_use: RingUse
    leases: LeaseRegion | None  # what the ranks share, where they share anything
    sessions: dict[tuple[Role, int], Session] = field(default_factory=dict)
    namespaces: dict[int, RankNamespace] = field(default_factory=dict)
    adopted: bytes = b""  # the namespace under which its scheduler looks things up
    _left_out: CountReader = field(init=False)

    def __post_init__(self) -> None:
        self._left_out = CountReader(self.control, len(REASONS), FIRST_NUMBER)

    def left_out(self) -> tuple[bytes, list[int]]:
        """What it has left out since it was asked last, by `left_out.REASONS`, and of which namespace."""
        return self.adopted, self._left_out.poll() if self.adopted else [0] * len(REASONS)

    @property
    def ranks_attached(self) -> int:
        """How many of its ranks are here."""
        return sum(role is Role.RANK for role, _ in self.sessions)


class Engines(Generic[Session]):
    """All engines by their id."""

    def __init__(self, *, slot_bytes: int, fragment_bytes: int, boot_id: bytes, needs_staging: bool = False) -> None:
        """`needs_staging`: a rank without a staged region is refused."""
        self._needs_staging = needs_staging
        self._slot_bytes = slot_bytes
        self._fragment_bytes = fragment_bytes
        self._boot_id = boot_id
        self._by_id: dict[str, Engine[Session]] = {}
        self._looked_ns = 0
        self.left_out = Ledger()

    def __iter__(self) -> Iterator[Engine[Session]]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def holder(self, hello: Hello) -> Session | None:
        """Who has the place that this Hello asks for."""
        engine = self._by_id.get(hello.engine_id)
        return engine.sessions.get((hello.role, hello.rank)) if engine else None

    def sessions_of(self, engine_id: str) -> list[Session]:
        """Every session of that engine."""
        engine = self._by_id.get(engine_id)
        return list(engine.sessions.values()) if engine else []

    def attach(self, hello: Hello, fds: Sequence[int], session: Session) -> Engine[Session]:
        """Give a session its place, made or taken over; raises Refusal, OSError for want of descriptors. Owns `fds`."""
        left = list(fds)
        try:
            self._check(hello, fds)
            engine = self._by_id.get(hello.engine_id)
            if engine is None:
                engine = self._take_over(hello, left) if left else self._make(hello)
                self._by_id[hello.engine_id] = engine
            else:
                self._check_same(engine, hello, left)
        finally:
            for fd in left:
                os.close(fd)
        engine.sessions[hello.role, hello.rank] = session
        engine.control.set_attached(engine.ranks_attached)
        return engine

    def detach(self, engine: Engine[Session], role: Role, rank: int) -> None:
        """A session is over. The last one takes the ring with it: a late copy may still land there."""
        del engine.sessions[role, rank]
        if role is Role.RANK:
            engine.namespaces.pop(rank, None)
            engine.control.set_attached(engine.ranks_attached)
        if not engine.sessions:
            self.left_out.add(*engine.left_out())
            del self._by_id[engine.hello.engine_id]
            engine.ring.close()
            engine.control.close()

    def beat(self, now_ns: int) -> None:
        """Write the heartbeat on every control page; now and then look at what engines have left out."""
        for engine in self._by_id.values():
            engine.control.beat(now_ns)
        if now_ns - self._looked_ns >= LOOK_EVERY_NS:
            self._looked_ns = now_ns
            self.look()

    def look(self) -> None:
        """Take in what engines have left out up to now."""
        for engine in self._by_id.values():
            self.left_out.add(*engine.left_out())

    def set_draining(self) -> None:
        """Write on every control page that no more work is taken."""
        for engine in self._by_id.values():
            engine.control.set_draining(True)

    def _check(self, hello: Hello, fds: Sequence[int]) -> None:
        if not 1 <= hello.world_size <= RANKS_MAX:
            raise Refusal(RefusedCode.PROTOCOL, f"world size {hello.world_size} is not within 1 to {RANKS_MAX}")
        if hello.role is Role.RANK and hello.rank >= hello.world_size:
            raise Refusal(RefusedCode.PROTOCOL, f"rank {hello.rank} of a world of {hello.world_size}")
        if not hello.engine_id:
            raise Refusal(RefusedCode.PROTOCOL, "an engine id must not be empty")
        if len(fds) not in (0, 2):
            raise Refusal(RefusedCode.PROTOCOL, f"{len(fds)} descriptors: none, or ring and control page")
        if hello.fragment_bytes != self._fragment_bytes:
            raise Refusal(
                RefusedCode.FRAGMENT_BYTES,
                f"xkv.fragment_bytes is {hello.fragment_bytes}, but this card's is {self._fragment_bytes}; "
                f"set xkv.fragment_bytes to {self._fragment_bytes} or use another card",
            )
        if self._needs_staging and hello.role is Role.RANK and not self._staged_slots(hello):
            raise Refusal(
                RefusedCode.RING,
                "this gateway's card is a remote alone, from which a load could fail after its hit; set "
                "xkv.verify_hits to true, and xkv.staged_bytes to at least one slot",
            )
        if self.holder(hello) is not None:
            raise Refusal(
                RefusedCode.RANK_TAKEN,
                f"{hello.role.value} {hello.rank} of engine {hello.engine_id} is attached already; give each "
                "engine an id of its own",
            )

    def _check_same(self, engine: Engine[Session], hello: Hello, fds: Sequence[int]) -> None:
        first = engine.hello
        for name, theirs, ours in (
            ("world_size", hello.world_size, first.world_size),
            ("xkv.ring_bytes", hello.ring_bytes, first.ring_bytes),
            ("xkv.load_reserve_bytes", hello.load_reserve_bytes, first.load_reserve_bytes),
        ):
            if theirs != ours:
                raise Refusal(
                    RefusedCode.RING,
                    f"{name} is {theirs}, but this engine's first session gave {ours}; all ranks of an engine "
                    "must be configured alike",
                )
        if hello.staged_bytes is not None and self._staged_slots(hello) != engine.staged_slots:
            raise Refusal(
                RefusedCode.RING,
                f"xkv.staged_bytes is {hello.staged_bytes}, but this engine's first session gave "
                f"{first.staged_bytes}; all ranks of an engine must be configured alike",
            )
        if hello.ring_use is not None and hello.ring_use is not engine.ring_use:
            raise Refusal(
                RefusedCode.RING,
                f"this rank's use of the ring is {hello.ring_use.value}, but this engine's first session gave "
                f"{engine.ring_use.value}; all ranks of an engine must be configured alike",
            )
        if fds and (memory_identity(fds[0]), memory_identity(fds[1])) != (
            engine.ring.identity,
            engine.control.identity,
        ):
            raise Refusal(RefusedCode.RING, "the ring handed over is not the one that this engine's other sessions use")

    def _staged_slots(self, hello: Hello) -> int:
        return staged_slots(staged_bytes=hello.staged_bytes or 0, slot_bytes=self._slot_bytes)

    def _plan(self, hello: Hello) -> tuple[RankRegions, ...]:
        try:
            return regions(
                ring_bytes=hello.ring_bytes,
                slot_bytes=self._slot_bytes,
                world_size=hello.world_size,
                load_reserve_bytes=hello.load_reserve_bytes,
                staged_bytes=hello.staged_bytes or 0,
                use=hello.ring_use or RingUse.OWN,
            )
        except UserError as error:
            raise Refusal(RefusedCode.RING, str(error)) from error

    def _make(self, hello: Hello) -> Engine[Session]:
        plan = self._plan(hello)
        slots = ring_slots(ring_bytes=hello.ring_bytes, slot_bytes=self._slot_bytes)
        try:
            ring = Ring.create(slots, self._slot_bytes)
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                raise
            raise Refusal(RefusedCode.RING, f"no ring of {hello.ring_bytes} bytes: {error.strerror}") from error
        except PeerError as error:  # it cannot be mapped
            raise Refusal(RefusedCode.RING, str(error)) from error
        try:
            control = ControlPage.create(hello.world_size, self._boot_id)
        except OSError as error:
            ring.close()
            if error.errno in _NO_DESCRIPTORS:
                raise
            raise Refusal(RefusedCode.RING, f"no control page: {error.strerror}") from error
        except PeerError as error:
            ring.close()
            raise Refusal(RefusedCode.RING, str(error)) from error
        return self._engine(hello, ring, control, plan)

    def _take_over(self, hello: Hello, fds: list[int]) -> Engine[Session]:
        """A ring and a page from a former life of the gateway; both take their descriptor, also on failure."""
        plan = self._plan(hello)
        slots = ring_slots(ring_bytes=hello.ring_bytes, slot_bytes=self._slot_bytes)
        try:
            ring = Ring.adopt(fds.pop(0), slots=slots, slot_bytes=self._slot_bytes)
        except PeerError as error:
            raise Refusal(RefusedCode.RING, str(error)) from error
        try:
            control = ControlPage.attach(fds.pop(0), ranks=hello.world_size)
        except OSError:
            ring.close()
            raise
        except PeerError as error:
            ring.close()
            raise Refusal(RefusedCode.RING, str(error)) from error
        if control.boot_id != self._boot_id:
            control.set_boot(self._boot_id)
        return self._engine(hello, ring, control, plan)

    def _engine(self, hello: Hello, ring: Ring, control: ControlPage, plan: tuple[RankRegions, ...]) -> Engine[Session]:
        use = hello.ring_use or RingUse.OWN
        leases = None if use is RingUse.OWN else LeaseRegion(plan[0].load_first, plan[0].load_slots)
        return Engine(hello, ring, control, plan, self._staged_slots(hello), use, leases)


def check_descriptor(text: str) -> None:
    """A namespace's descriptor is a JSON object of a bounded size; raises PeerError."""
    if len(text.encode("utf-8", "replace")) > DESCRIPTOR_BYTES_MAX:
        raise PeerError(f"a namespace's descriptor of more than {DESCRIPTOR_BYTES_MAX} bytes")
    try:
        descriptor = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"a namespace's descriptor is no JSON: {error}") from error
    if not isinstance(descriptor, dict):
        raise PeerError("a namespace's descriptor is no JSON object")
