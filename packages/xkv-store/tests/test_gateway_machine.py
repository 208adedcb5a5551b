"""Sessions of several engines over a real card, in any order of any steps, against a model in plain dictionaries.

Everything of a gateway but its loop and its threads is driven (`testing.steps`): connections, sessions, admission,
transfers, card, index, lookup table, control pages. Jobs of the pool, commits, time, deaths of clients and of the
gateway, failures and damage come one by one. The model knows what may be held; the slots that a client may use again
are poisoned, so that whatever touches them too late is seen.
"""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import shutil
import socket
import tempfile
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from xkv_store import database as database_module
from xkv_store import fragment as fragments_of
from xkv_store import layout, sockets, wire
from xkv_store.card import Card, CardOptions, GetPlan, PutPlan
from xkv_store.client_session import Attached, ClientSession, GetAnswered, PutAnswered, Rejected
from xkv_store.control import ControlPage, DenialReader
from xkv_store.database import Database
from xkv_store.engines import Engines
from xkv_store.errors import CorruptObject, MediumError
from xkv_store.fragment import Identity
from xkv_store.geometry import DATA_OFFSET, HEADER_BYTES, Geometry
from xkv_store.index import RemoveObject, SetObject
from xkv_store.io_pool import Job, Lane
from xkv_store.key import ObjectKey
from xkv_store.layout import Record
from xkv_store.limbo import Limbo
from xkv_store.overlay import Overlay
from xkv_store.ring import Ring, memory_identity
from xkv_store.session import GatewaySession, LocalProtocolError, State
from xkv_store.testing.effort import repeats, times
from xkv_store.testing.steps import Clock, StepGateway, told_by, works_of
from xkv_store.transfers import Transfers
from xkv_store.wire import LoadStatus, RefusedCode, Role, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

STEPS_MIN = 10_000
EXAMPLES = 220
SLOT = 4_096
GEOMETRY = Geometry(SLOT)
PAYLOAD = GEOMETRY.fragment_bytes
GRACE_MS = 50
RING_SLOTS = 24
STAGED_SLOTS = 4
PUTS_PER_LIFE_MIN = 10
JOBS_MAX = 6  # in each lane: then puts are shed and gets are busy
POISON = b"\xdb" * 64  # laid over the header of every slot that is the client's
MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
KEYS = [ObjectKey(bytes(16), 0, bytes([n]) * 9, rank) for n in range(4) for rank in ((0, 1) if n % 2 else (0,))]
RANKS = {"one": 1, "two": 2}
PLACES = [
    (name, role, rank)
    for name, ranks in RANKS.items()
    for role, rank in [(Role.SCHEDULER, 0), *((Role.RANK, rank) for rank in range(ranks))]
]
Place: TypeAlias = tuple[str, Role, int]
RETRY_MS = 1_001  # after a failed commit
LAST_ROUNDS = 16  # what leaves for a put that was refused may go one by one, each with a commit and a grace


LENGTHS = [1, PAYLOAD, PAYLOAD + 1, 2 * PAYLOAD, 3 * PAYLOAD]
WHAT = [
    (kind, how)
    for kind, hows in {
        "attach": ["free", "free", "free", "any"],
        "leave": ["hang up", "close", "engine", "deaf", "violate"],
        "put": ["sent"] * 6 + ["written"] * 3 + ["confirmed"] * 4,
        "get": ["sent"] * 6 + ["read"] * 3 + ["cancelled", "overtaken"],
        "say": ["cancel", "release", "release", "denials", "namespaces", "status", "touch"],
        "work": ["begin"] * 4 + ["end"] * 4 + ["fail", "no memory", "lost", "all"],
        "commit": ["take", "take", "take", "ok", "ok", "ok", "fail", "late"],
        "time": ["1", str(GRACE_MS), str(GRACE_MS), str(RETRY_MS), "1600"],
        "damage": ["flip", "older", "read", "read"],
        "end": ["drain", "crash"],
    }.items()
    for how in hows
]


def data_of(version: int, length: int) -> bytes:
    return (version.to_bytes(4, "little") * (length // 4 + 1))[:length]


def numbers_of(job: Job) -> set[int]:
    """The puts' or gets'."""
    return {work.put if job.lane is Lane.STORE else work.number for work in works_of(job)}


@dataclass(eq=False)
class Putting:
    key: ObjectKey
    data: bytes
    slots: tuple[int, ...]
    may_be_held: bool
    generation: int = 0  # once it is written


@dataclass(eq=False)
class Getting:
    key: ObjectKey
    slots: tuple[int, ...]
    first: int
    allowed: set[int]  # generations that may come
    must: bool  # it is held: a miss would be a loss
    may_be_busy: bool
    keep: bool  # a scheduler's, staged
    failing: bool = False
    cancelled: bool = False


@dataclass(eq=False)
class Lease:
    """A staged fragment: nobody may touch it until it is released."""

    key: bytes
    generation: int
    fragment: int
    payload: bytes


@dataclass(eq=False)
class Page:
    """What is known of an engine's control page."""

    boot: bytes
    epoch: int = 1
    denied: list[tuple[int, int]] = field(default_factory=list)


class Engine:
    """What an engine's processes share: they die together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ring: Ring | None = None
        self.control: ControlPage | None = None
        self.reader: DenialReader | None = None
        self.page = Page(b"")
        self.read = 0  # denials
        self.leases: dict[int, Lease] = {}
        self.back: set[int] = set()  # slots of flights whose connection has ended; nobody is attached for them

    def close(self) -> None:
        if self.ring is not None and self.control is not None:
            self.ring.close()
            self.control.close()


class Member:
    """One session's client side."""

    def __init__(self, engine: Engine, role: Role, rank: int, connection: socket.socket) -> None:
        self.engine, self.role, self.rank = engine, role, rank
        self.socket = connection
        self.welcome: wire.Welcome | None = None
        self.refused: RefusedCode | None = None
        self.ended = False
        self.hung_up = False
        self.deaf = False
        self.violated = False
        self.stores: list[int] = []
        self.loads: list[int] = []
        self.puts: dict[tuple[int, int], Putting] = {}
        self.gets: dict[tuple[int, int], Getting] = {}
        ranks = RANKS[engine.name]
        self.session = ClientSession(
            wire.Hello(
                wire.PROTOCOL_VERSION, engine.name, role, rank, ranks, RING_SLOTS * SLOT, 6 * SLOT,
                STAGED_SLOTS * SLOT, GEOMETRY.fragment_bytes, 1,
            )
        )  # fmt: skip

    @property
    def usable(self) -> bool:
        return self.welcome is not None and not (self.ended or self.hung_up or self.violated)

    def send(self, message: wire.FromClient, fds: Iterable[int] = ()) -> None:
        assert sockets.send(self.socket, wire.encode(message), tuple(fds))


class GatewayMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    executed: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.context = ExitStack()
        self.broken = False  # by the step that was under way

    @initialize(slots=st.integers(6, 14), databases=st.integers(1, 2))
    def begin(self, slots: int, databases: int) -> None:
        self.clock = Clock()
        self.context.enter_context(told_by(self.clock))
        self.folder = Path(tempfile.mkdtemp(prefix="xkv-machine-", dir=MEMORY_FOLDER))
        self.context.callback(shutil.rmtree, self.folder)
        options = CardOptions(
            folder=self.folder / "card", capacity_bytes=databases * (DATA_OFFSET + slots * SLOT),
            databases=databases, slot_bytes=SLOT, grace_ms=GRACE_MS,
        )  # fmt: skip
        self.gateway = StepGateway(options, self.clock, jobs_max=JOBS_MAX)
        self.options = replace(options, capacity_bytes=None, databases=None, slot_bytes=None)
        self.engines = {name: Engine(name) for name in RANKS}
        self.members: list[Member] = []
        self.numbers = itertools.count(1)
        self.versions = itertools.count(1)
        # What the model knows of the card, by generation and by key:
        self.contents: dict[int, tuple[ObjectKey, bytes]] = {}
        self.present: dict[ObjectKey, int] = {}  # what a get finds
        self.left: dict[ObjectKey, dict[int, int]] = {key: {} for key in KEYS}  # in limbo: generation -> when
        self.committed: set[int] = set()
        self.index: dict[ObjectKey, int] = {}  # what a restart finds
        self.damaged: set[int] = set()
        self.evicted = 0
        self.flights: dict[tuple[int, int, int], Putting] = {}  # by session, put and index, also of the dead
        self.reads: dict[tuple[int, int, int], Getting] = {}
        self.dead: set[tuple[int, int]] = set()  # rings of engines that were killed
        self.puts_of_life = 0
        for place in PLACES:
            self.attach(place)

    # One rule: Hypothesis leaves some rules out of each example, and without jobs or commits nothing would happen.

    @rule(what=st.sampled_from(WHAT), which=st.integers(0, 11), number=st.integers(0, 2**16 - 1))
    def step(self, what: tuple[str, str], which: int, number: int) -> None:
        self.broken = True
        self.take_step(*what, which, number)
        self.look()
        self.broken = False

    def take_step(self, kind: str, how: str, which: int, number: int) -> None:
        keys = [KEYS[(number + 5 * at) % len(KEYS)] for at in range(number % 3 + 1)]
        rest = number // 3
        match kind:
            case "attach":
                places = PLACES if how == "any" else self.free_places()
                if places:
                    self.attach(places[which % len(places)])
                    self.did(f"attach, {how}")
            case "leave":
                self.leave(which, how)
            case "put":
                self.put(which, keys, LENGTHS[rest % len(LENGTHS)], replacing=bool(rest // 8 % 2), until=how)
            case "get" if how == "overtaken":
                self.overtake(which, keys[0], number)
            case "get":
                self.get(which, keys, count=rest % 3 + 1, first=int(rest % 5 == 0), keep=bool(rest % 2), until=how)
            case "say":
                self.say(which, how)
            case "work":
                self.work(which, how)
            case "commit":
                self.commit(how)
            case "time":
                self.time_goes_on(int(how))
            case "damage":
                self.damage(which, how)
            case _:
                self.end_of_life(how, lands=bool(rest % 2))

    def did(self, what: str) -> None:
        """A step that had something to do has been taken."""
        self.executed[what] += 1

    # --- the clients' side -------------------------------------------------------------------------------

    def member(self, which: int, *roles: Role) -> Member | None:
        found = [one for one in self.members if one.usable and one.role in (roles or tuple(Role))]
        return found[which % len(found)] if found else None

    def round(self) -> None:
        self.gateway.round()
        self.hear()

    def hear(self) -> None:
        for member in list(self.members):
            if not member.deaf:
                self.listen(member)

    def listen(self, member: Member) -> None:
        while not member.ended:
            try:
                packet = sockets.receive(member.socket)
            except BlockingIOError:
                return
            if packet is None:
                self.ended(member)
                return
            match member.session.receive(packet.data, len(packet.fds)):
                case Attached(welcome):
                    self.welcomed(member, welcome, packet.fds)
                case Rejected(code):
                    member.refused = code
                case PutAnswered(number, objects):
                    for stored in objects:
                        self.stored(member, member.puts.pop((number, stored.index)), stored.status)
                case GetAnswered(number, loads):
                    for loaded in loads:
                        self.loaded(member, member.gets.pop((number, loaded.index)), loaded)
                case _:
                    pass

    def welcomed(self, member: Member, welcome: wire.Welcome, fds: tuple[int, ...]) -> None:
        engine = member.engine
        if engine.ring is None or engine.control is None or engine.reader is None:
            engine.ring = Ring.adopt(fds[0], slots=welcome.ring_slots, slot_bytes=SLOT)
            engine.control = ControlPage.attach(fds[1])
            engine.reader = DenialReader(engine.control)
            engine.page = Page(welcome.boot_id)
            assert engine.ring.identity not in self.dead, "a dead engine's ring is used again"
        else:
            same = (memory_identity(fds[0]), memory_identity(fds[1])) == (engine.ring.identity, engine.control.identity)
            for fd in fds[:2]:
                os.close(fd)
            if not same:  # it came without them, before others of its engine had any; the next attempt brings them
                os.close(fds[2])
                self.drop(member)
                return
        os.close(fds[2])
        page = engine.page
        if welcome.boot_id != page.boot:
            page.epoch += 1
            page.boot = welcome.boot_id
        assert (welcome.epoch, engine.control.epoch) == (page.epoch, page.epoch), "an epoch is each life's own"
        assert engine.control.boot_id == welcome.boot_id == self.gateway.card.boot_id
        assert not engine.control.draining
        assert welcome.card_uuid == self.gateway.card.uuid
        member.welcome = welcome
        for region, own in ((welcome.store_region, member.stores), (welcome.load_region, member.loads)):
            own += [slot for slot in range(region.first, region.first + region.count) if slot not in engine.leases]
        for slot in member.stores + member.loads:
            engine.ring.slot(slot)[: len(POISON)] = POISON
        engine.back.difference_update(member.stores, member.loads)

    def ended(self, member: Member) -> None:
        """The connection is over, so every slot is the client's again."""
        member.ended = True
        member.session.end()
        member.socket.close()
        self.members.remove(member)
        ring = member.engine.ring
        if ring is not None:
            flights: list[Putting | Getting] = [*member.puts.values(), *member.gets.values()]
            for slot in (slot for flight in flights for slot in flight.slots):
                ring.slot(slot)[: len(POISON)] = POISON
                member.engine.back.add(slot)
        if member.violated:
            assert member.refused is RefusedCode.PROTOCOL

    def give(self, member: Member, slots: Iterable[int], *, loads: bool) -> None:
        """Slots that were answered: used again, by anybody, at once."""
        assert member.engine.ring is not None
        for slot in slots:
            member.engine.ring.slot(slot)[: len(POISON)] = POISON
            (member.loads if loads else member.stores).append(slot)

    def stored(self, member: Member, putting: Putting, status: StoreStatus) -> None:
        match status:
            case StoreStatus.CONFIRMED:
                assert putting.generation in self.committed, "confirmed before it was committed"
            case StoreStatus.HELD:
                assert putting.may_be_held, "shown, and not held: a put was answered so"
                assert not putting.generation
            case StoreStatus.FAILED:
                assert putting.generation not in self.committed
            case StoreStatus.SHED:
                assert not putting.generation
            case StoreStatus.INVALID:
                raise AssertionError("it was valid")
        self.give(member, putting.slots, loads=False)

    def loaded(self, member: Member, getting: Getting, answer: wire.LoadedObject) -> None:
        engine = member.engine
        assert engine.ring is not None
        assert engine.control is not None
        if answer.generation:
            is_early = answer.generation not in self.committed
            what = "published before it was committed" if is_early else "another object than the one that was held"
            assert answer.generation in getting.allowed, what
        match answer.status:
            case LoadStatus.OK:
                self.compare(engine.ring, engine, getting, answer)
            case LoadStatus.MISS:
                assert not getting.must, "what was held is lost"
            case LoadStatus.CORRUPT:
                assert answer.generation in self.damaged, "sound bytes were called corrupt"
            case LoadStatus.CANCELLED:
                assert getting.cancelled
            case LoadStatus.BUSY:
                assert getting.may_be_busy
            case LoadStatus.FAILED:
                assert getting.failing
            case LoadStatus.TIMEOUT:
                raise AssertionError("a gateway never says so")
        if answer.status in {LoadStatus.CORRUPT, LoadStatus.FAILED} and member.role is Role.RANK:
            engine.control.deny(member.rank, getting.key.tag, answer.generation)
            engine.page.denied.append((getting.key.tag, answer.generation))
        if answer.status is not LoadStatus.OK or not getting.keep:
            self.give(member, getting.slots, loads=True)

    def compare(self, ring: Ring, engine: Engine, getting: Getting, answer: wire.LoadedObject) -> None:
        """The bytes in the ring are those that were put; staged ones stay there."""
        key, data = self.contents[answer.generation]
        assert (key, len(data)) == (getting.key, answer.length)
        for number, slot in enumerate(getting.slots, getting.first):
            part = data[number * PAYLOAD : (number + 1) * PAYLOAD]
            assert ring.slot(slot)[HEADER_BYTES : HEADER_BYTES + len(part)] == part, "wrong bytes"
            if getting.keep:
                engine.leases[slot] = Lease(key.encode(), answer.generation, number, part)

    # --- what the card shows -----------------------------------------------------------------------------

    def shown(self) -> dict[ObjectKey, int]:
        """By the lookup table: the highest generation of the chunk's ranks."""
        found = {}
        for key in KEYS:
            entry = self.gateway.card.table.get(key.tag)
            if entry is not None and entry[1] & key.bit:
                found[key] = entry[0]
        return found

    def flying(self) -> set[ObjectKey]:
        jobs = [*self.gateway.pool.waiting, *self.gateway.pool.begun]
        return {work.plan.key for job in jobs if job.lane is Lane.STORE for work in works_of(job)}

    def readable(self, key: ObjectKey) -> tuple[set[int], bool]:
        """(generations that a get may find now, whether it must find one)."""
        present = self.present.get(key)
        if present is not None:
            return {present}, True
        now_ns = self.clock.now_ns
        return {one for one, left_ns in self.left[key].items() if now_ns - left_ns <= GRACE_MS * 1_000_000}, False

    def leaves(self, key: ObjectKey) -> None:
        generation = self.present.pop(key, None)
        if generation is not None:
            self.left[key][generation] = self.clock.now_ns

    # --- rules: sessions ---------------------------------------------------------------------------------

    def free_places(self) -> list[Place]:
        taken = {(one.engine.name, one.role, one.rank) for one in self.members if one.usable}
        return [place for place in PLACES if place not in taken]

    def attach(self, place: Place) -> None:
        name, role, rank = place
        engine = self.engines[name]
        taken = [one for one in self.members if (one.engine, one.role, one.rank) == (engine, role, rank)]
        for former in taken:
            if not former.usable:  # a client that comes back has read what its last connection brought
                former.deaf = False
        self.hear()
        fds: tuple[int, ...] = ()
        if engine.ring is not None and engine.control is not None:
            fds = (engine.ring.fd, engine.control.fd)
        member = Member(engine, role, rank, self.gateway.connect())
        self.members.append(member)
        member.send(member.session.greet(), fds)
        self.round()
        if any(one.usable for one in taken):
            assert member.refused is RefusedCode.RANK_TAKEN, "a place was given twice"

    def busy(self) -> list[Member]:
        """Whose slots a job that has begun works in."""
        begun: list[Putting | Getting | None] = []
        for job in self.gateway.pool.begun:
            for work in works_of(job):
                number = work.party.answers.number
                if job.lane is Lane.STORE:
                    begun.append(self.flights.get((number, work.put, work.index)))
                elif job.lane is Lane.LOAD:
                    begun.append(self.reads.get((number, work.number, work.index)))
        return [one for one in self.members if one.usable and {*one.puts.values(), *one.gets.values()} & {*begun}]

    def leave(self, which: int, how: str) -> None:
        member = self.member(which)
        if member is None:
            return
        if how in {"hang up", "violate"} and which % 4 and (busy := self.busy()):
            member = busy[which // 4 % len(busy)]  # whose end has to wait for the job's
        match how:
            case "hang up":  # and wait for the end
                member.hung_up = True
                member.socket.shutdown(socket.SHUT_WR)
            case "close":
                self.drop(member)
            case "engine":
                self.kill_engine(member.engine)
            case "deaf":
                member.deaf = not member.deaf
            case _:
                self.violate(member, which)
        self.round()
        self.did(f"leave, {how}")

    def drop(self, member: Member) -> None:
        """A process dies: the kernel closes its socket."""
        member.ended = True
        member.socket.close()
        self.members.remove(member)

    def kill_engine(self, engine: Engine) -> None:
        for member in [one for one in self.members if one.engine is engine]:
            self.drop(member)
        if engine.ring is not None:
            self.dead.add(engine.ring.identity)
        engine.close()
        self.engines[engine.name] = Engine(engine.name)

    def violate(self, member: Member, which: int) -> None:
        """Something that no client may say; it is refused, and its slots come back with the connection's end."""
        assert member.welcome is not None
        key = KEYS[0].encode()
        number = next(self.numbers)
        ours = {*range(member.welcome.store_region.first, member.welcome.store_region.first + 50)}
        foreign = next(slot for slot in range(RING_SLOTS + 60) if slot not in ours and slot not in member.loads
                       and all(slot not in one.slots for one in member.gets.values())
                       and slot not in member.engine.leases)  # fmt: skip
        flights: list[Putting | Getting] = [*member.puts.values(), *member.gets.values()]
        busy = [slot for flight in flights for slot in flight.slots]
        said: list[bytes] = [
            wire.MAGIC + b"junk",
            wire.encode(wire.Get(number, (wire.GetObject(key, (RING_SLOTS + 1,), 0),))),
            wire.encode(member.session.hello),
            wire.encode(wire.Stop(1)),
        ]
        if member.role is Role.RANK:
            said.append(wire.encode(wire.Put(number, (wire.PutObject(key, 1, (foreign,), 0, 0, False),))))
        if busy and not member.deaf:  # a deaf one's may have been answered, and be its own again
            said += [wire.encode(wire.Get(number, (wire.GetObject(key, (busy[0],), 0),)))] * 4
        member.violated = True
        member.socket.send(said[which % len(said)])

    # --- rules: objects ----------------------------------------------------------------------------------

    def put(self, which: int, keys: list[ObjectKey], length: int, *, replacing: bool, until: str) -> None:
        member = self.member(which, Role.RANK)
        if member is None or member.engine.ring is None:
            return
        number = next(self.numbers)
        count = GEOMETRY.fragments(length)
        items: list[wire.PutObject] = []
        flying = self.flying()
        for key in keys:
            if len(member.stores) < count:
                break
            slots = tuple(member.stores.pop(0) for _ in range(count))
            data = data_of(next(self.versions), length)
            for fragment, slot in enumerate(slots):
                part = data[fragment * PAYLOAD : (fragment + 1) * PAYLOAD]
                member.engine.ring.slot(slot)[HEADER_BYTES : HEADER_BYTES + len(part)] = part
            putting = Putting(key, data, slots, key in self.present or key in flying)
            assert member.welcome is not None
            self.flights[member.welcome.session, number, len(items)] = putting
            member.puts[number, len(items)] = putting
            items.append(wire.PutObject(key.encode(), length, slots, number % 3, number % 4, replacing))
        if not items:
            return
        member.send(member.session.put(number, tuple(items)))
        self.round()
        self.note()
        if until != "sent":
            self.work_off(number)
        if until == "confirmed":
            for _ in range(2):  # what was taken before, then this
                self.end_commit("ok")
                self.gateway.take_batch()
            self.end_commit("ok")
        self.did(f"put, {until}")

    def get(self, which: int, keys: list[ObjectKey], *, count: int, first: int, keep: bool, until: str) -> None:
        member = self.member(which, Role.RANK, Role.SCHEDULER)
        if member is None or member.welcome is None:
            return
        number = next(self.numbers)
        items: list[wire.GetObject] = []
        busy = self.gateway.pool.queued(Lane.LOAD) + len(keys) > JOBS_MAX
        for key in keys:
            allowed, must = self.readable(key)
            if must:  # as much of it as there is, from `first` on
                whole = GEOMETRY.fragments(len(self.contents[min(allowed)][1]))
                fits = min(count, whole - first)
                must = fits > 0
            else:
                fits = count
            if len(member.loads) < max(1, fits):
                break
            slots = tuple(member.loads.pop(0) for _ in range(max(1, fits)))
            getting = Getting(
                key, slots, first, allowed, must and not busy, busy, keep and member.role is Role.SCHEDULER
            )
            self.reads[member.welcome.session, number, len(items)] = getting
            member.gets[number, len(items)] = getting
            items.append(wire.GetObject(key.encode(), slots, first))
        if not items:
            return
        member.send(member.session.get(number, tuple(items)))
        self.round()
        if until == "cancelled":
            self.cancel(member, number)
        if until == "read":
            self.work_off(number)
        self.did(f"get, {until}")

    def overtake(self, which: int, key: ObjectKey, number: int) -> None:
        """While a get waits for its thread its object is replaced, its grace ends, and others need room."""
        self.get(which, [key], count=3, first=0, keep=False, until="sent")
        self.put(which + 1, [key], 2 * PAYLOAD, replacing=True, until="confirmed")
        self.time_goes_on(GRACE_MS)
        self.time_goes_on(GRACE_MS)
        for at in range(4):
            self.put(which + at, [KEYS[(number + at) % len(KEYS)]], 2 * PAYLOAD, replacing=True, until="written")
        if number % 2:
            self.work_off()  # else much else may come before its thread does
        self.did("get, overtaken")

    def cancel(self, member: Member, number: int) -> None:
        message = member.session.cancel(number)
        if message is not None:
            for (get, _), getting in member.gets.items():
                getting.cancelled |= get == number
            member.send(message)
            self.round()

    def say(self, which: int, what: str) -> None:
        member = self.member(which)
        if member is None:
            return
        engine = member.engine
        if what == "cancel" and member.gets:
            numbers = sorted({number for number, _ in member.gets})
            self.cancel(member, numbers[which % len(numbers)])
        elif what == "release" and engine.leases:
            self.release(engine)
        elif what == "denials" and engine.reader is not None:
            denials = engine.reader.poll()
            assert not denials.overflow
            assert sorted(denials.pairs) == sorted(engine.page.denied[engine.read :]), "each is told once"
            engine.read = len(engine.page.denied)
        elif what == "namespaces":
            member.send(wire.PublishNamespace(bytes([which]) * 16, "{}"))
            if member.role is Role.SCHEDULER:
                member.send(member.session.ask_namespaces(next(self.numbers)))
        elif what == "status":
            member.send(member.session.ask_status(next(self.numbers)))
        elif what == "touch" and member.role is Role.SCHEDULER:
            member.send(wire.Touch(tuple(key.tag for key in KEYS[which:])))
        else:
            return
        self.round()
        self.did(what)

    def release(self, engine: Engine) -> None:
        """What was staged has been used. Whoever attaches as the scheduler next has the slots as well."""
        assert engine.ring is not None
        scheduler = [one for one in self.members if one.engine is engine and one.role is Role.SCHEDULER and one.welcome]
        for slot in list(engine.leases):
            del engine.leases[slot]
            engine.ring.slot(slot)[: len(POISON)] = POISON
            for member in scheduler:
                member.loads.append(slot)

    # --- rules: the gateway's steps ----------------------------------------------------------------------

    def work(self, which: int, what: str) -> None:
        pool = self.gateway.pool
        if what == "all":
            if not (pool.waiting or pool.begun):
                return
            self.work_off()
        elif what == "begin":
            if not pool.waiting:
                return
            pool.begin(which)
        elif pool.begun:
            self.end_job(which, what)
        else:
            return
        self.did(f"job, {what}")

    def work_off(self, number: int | None = None) -> None:
        """All jobs, or those of one put or get."""
        pool = self.gateway.pool

        def wanted(jobs: list[Job]) -> list[int]:
            return [at for at, job in enumerate(jobs) if number is None or number in numbers_of(job)]

        while wanted(pool.waiting):
            pool.begin(wanted(pool.waiting)[0])
        while wanted(pool.begun):
            self.end_job(wanted(pool.begun)[0], "end")

    def end_job(self, which: int, what: str) -> None:
        error = {"fail": MediumError(errno.EIO, "test"), "no memory": MediumError(errno.ENOMEM, "test")}.get(what)
        pool = self.gateway.pool
        begun = pool.begun[which % len(pool.begun)]
        works = works_of(begun)
        for work in works if begun.lane is Lane.LOAD else []:
            getting = self.reads[work.party.answers.number, work.number, work.index]
            getting.failing |= error is not None
            getting.cancelled |= work.cancelled
        with pytest.MonkeyPatch.context() as patch:
            if what == "lost":
                patch.setattr(database_module, "library", lambda: None)  # it would go past this
                patch.setattr(Database, "write", lambda *_: None)  # the medium says that it has written
            job = pool.end(which, error)
        if job.lane is Lane.STORE and job.error is None:
            for work in works:
                self.written(work, lost=what == "lost")
        elif job.lane is Lane.LOAD:
            for read in job.run.__self__.reads:  # type: ignore[attr-defined]
                failed = job.error or read.error
                if failed is not None and any(landing.waiting for landing in read.landings):
                    assert read.plan.generation in self.damaged or error is not None, "sound bytes were called corrupt"
                    self.read_badly(read.plan, leaves=isinstance(failed, CorruptObject) or what == "fail")
        self.round()
        self.note()

    def read_badly(self, plan: GetPlan, *, leaves: bool) -> None:
        if leaves:
            self.left[plan.key].pop(plan.generation, None)
            if self.present.get(plan.key) == plan.generation:
                del self.present[plan.key]

    def written(self, work: object, *, lost: bool) -> None:
        putting = self.flights[work.party.answers.number, work.put, work.index]  # type: ignore[attr-defined]
        generation = work.plan.generation  # type: ignore[attr-defined]
        assert generation not in self.contents, "a generation was given twice"
        putting.generation = generation
        self.puts_of_life += 1
        self.contents[generation] = putting.key, putting.data
        self.leaves(putting.key)
        self.present[putting.key] = generation
        if lost:
            self.damaged.add(generation)

    def commit(self, what: str) -> None:
        if what == "take":
            if self.gateway.take_batch() is None:
                return
        elif not self.end_commit(what):
            return
        self.did(f"commit, {what}")

    def end_commit(self, what: str) -> bool:
        """The batch has come back; one that failed may have been applied all the same ("late")."""
        if self.gateway.batch is None:
            return False
        changes = list(self.gateway.batch.changes)
        sets = [
            (ObjectKey.decode(change.key), layout.parse_record(change.record).generation)
            for change in changes
            if isinstance(change, SetObject)
        ]
        if what != "fail":
            for change in changes:
                if isinstance(change, SetObject):
                    record = layout.parse_record(change.record)
                    self.index[ObjectKey.decode(change.key)] = record.generation
                elif isinstance(change, RemoveObject):
                    self.index.pop(ObjectKey.decode(change.key), None)
        for key, generation in sets:
            if what == "ok":
                self.committed.add(generation)
            elif self.present.get(key) == generation:
                del self.present[key]
        error = None if what == "ok" else MediumError(errno.ENOSPC, "test")
        self.gateway.end_batch(applied=what != "fail", error=error)
        self.hear()
        self.note()
        return True

    def time_goes_on(self, ms: int) -> None:
        before_ns = self.clock.now_ns
        self.gateway.tick(ms)
        # A grace begins with the first clock that is read after the object has left.
        for generations in self.left.values():
            for generation, left_ns in generations.items():
                generations[generation] = self.clock.now_ns if left_ns >= before_ns else left_ns
        self.hear()
        self.note()
        self.did("time")

    def damage(self, which: int, how: str) -> None:
        """A slot of an object is another: some byte of it, or all of it is what its key had there before."""
        pool, card = self.gateway.pool, self.gateway.card
        jobs = [job for job in (*pool.waiting, *pool.begun) if job.lane is Lane.LOAD and works_of(job)]
        keys = [key for key in KEYS if key in self.present]
        record: Record | None
        if how == "read" and jobs:  # it may have been replaced meanwhile
            plan = works_of(jobs[which % len(jobs)])[0].plan
            key, record = plan.key, Record(plan.generation, plan.length, plan.family, plan.position, plan.extents)
        elif how != "read" and keys:
            key = keys[which % len(keys)]
            record = card._overlay.record(key.encode())
        else:
            return
        assert record is not None, "an object was lost"
        database, slot, _ = record.extents[0]
        path = self.options.folder / f"db-{database}.xkv"
        image = bytearray(SLOT)
        with path.open("r+b") as file:
            file.seek(DATA_OFFSET + slot * SLOT)
            file.readinto(image)
            if how != "older":
                image[HEADER_BYTES] ^= 1
            else:
                length = record.length
                identity = Identity(card.uuid, key.encode(), record.generation - 1, length, record.family, 0)
                old = data_of(10**6 + record.generation, length)[:PAYLOAD]
                image[HEADER_BYTES : HEADER_BYTES + len(old)] = old
                fragments_of.ObjectSlots(identity, GEOMETRY).seal([memoryview(image)], 0)
            file.seek(DATA_OFFSET + slot * SLOT)
            file.write(image)
        self.damaged.add(record.generation)
        self.did(f"damage, {how}")

    # --- rules: the gateway's end ------------------------------------------------------------------------

    def end_of_life(self, how: str, lands: bool) -> None:
        if self.puts_of_life < PUTS_PER_LIFE_MIN:  # else most lives would end before anything has happened
            return
        if how == "crash":
            for job in self.gateway.pool.begun:  # what was under way may have reached the medium
                if lands and job.lane is Lane.STORE:
                    job.run()
            self.gateway.die()
        else:
            self.drain()
            self.index = dict(self.present)
            self.gateway.close()
        for member in self.members:
            member.deaf = False
        self.hear()
        assert not self.members, "every connection has ended"
        self.open_again()
        self.did(how)

    def drain(self) -> None:
        """All that is in flight is answered, then every connection ends; new work is not taken."""
        self.gateway.desk.drain()
        for engine in self.gateway.desk.engines:
            assert engine.control.draining
        for member in self.members:
            member.deaf = False
        self.round()
        self.work_off()
        for _ in range(3):
            self.end_commit("ok")
            self.gateway.take_batch()
        self.gateway.tick(RETRY_MS)
        self.hear()
        self.note()
        while self.gateway.take_batch() is not None or self.gateway.batch is not None:
            self.end_commit("ok")
        self.round()
        self.round()

    def open_again(self) -> None:
        """Another life: exactly what was committed is there."""
        self.gateway = StepGateway(self.options, self.clock, jobs_max=JOBS_MAX)
        self.evicted = self.puts_of_life = 0
        self.present = dict(self.index)
        self.committed |= set(self.index.values())
        self.left = {key: {} for key in KEYS}
        shown = self.shown()
        assert shown.keys() == self.index.keys(), "a restart finds something else"
        for key, generation in self.index.items():
            assert shown[key] >= generation

    # --- always ------------------------------------------------------------------------------------------

    def look(self) -> None:
        places = [(one.engine.name, one.role, one.rank) for one in self.members if one.usable]
        assert len(set(places)) == len(places), "a place was given twice"
        self.what_is_shown_is_committed_and_held()
        self.a_clients_own_slots_are_touched_by_nobody()
        self.slots_add_up()
        assert not self.gateway.transfers.counters["errors_of_ours"]

    def note(self) -> None:
        """What has left the lookup table was evicted, as the card's counters say."""
        shown = self.shown()
        for key in KEYS:
            generation = self.present.get(key)
            if generation in self.committed and key not in shown:
                self.leaves(key)
                self.evicted += 1
        assert self.evicted == self.gateway.card.counters().get("evicted_objects", 0), "an object was lost"

    def what_is_shown_is_committed_and_held(self) -> None:
        for key, generation in self.shown().items():
            assert generation in self.committed, "published before it was committed"
            assert key in self.present, "shown, and not held"

    def a_clients_own_slots_are_touched_by_nobody(self) -> None:
        for engine in self.engines.values():
            for slot in engine.back:
                assert engine.ring is not None
                assert engine.ring.slot(slot)[: len(POISON)] == POISON, f"slot {slot} is used after it was given back"
        for member in self.members:
            ring = member.engine.ring
            if ring is None or member.welcome is None:
                continue
            for slot in (*member.stores, *member.loads):
                assert ring.slot(slot)[: len(POISON)] == POISON, f"slot {slot} is used after it was given back"
        for engine in self.engines.values():
            for slot, lease in engine.leases.items():
                assert engine.ring is not None
                view = engine.ring.slot(slot)
                assert fragments_of.hold(engine.ring.array, [slot], lease.key, lease.generation, lease.fragment)
                assert view[HEADER_BYTES : HEADER_BYTES + len(lease.payload)] == lease.payload

    def slots_add_up(self) -> None:
        slots = self.gateway.card.slots()
        assert sum(slots.values()) == self.gateway.card.slots_total, "slots are lost"
        assert min(slots.values()) >= 0

    def teardown(self) -> None:
        """In the end nothing is stuck, no place is taken, and the next life finds what this one confirmed."""
        self.context.callback(self.let_go)
        with self.context:
            if not self.broken:
                self.finish()

    def let_go(self) -> None:
        """Whatever has happened: descriptors are closed."""
        for member in self.members:
            member.socket.close()
        for engine in self.engines.values():
            engine.close()
        if not self.gateway.over:
            with suppress(KeyError):  # a place that was given twice
                self.gateway.die()
        for connection in list(self.gateway.desk.connections.values()):
            connection.close()

    def finish(self) -> None:
        for member in list(self.members):
            member.deaf = False
            if not member.hung_up:
                member.hung_up = True
                member.socket.shutdown(socket.SHUT_WR)
        self.round()
        self.work_off()
        for _ in range(LAST_ROUNDS):
            self.gateway.tick(RETRY_MS)
            self.gateway.take_batch()
            self.end_commit("ok")
            self.note()
        self.round()
        self.round()
        assert not self.members
        assert not self.gateway.desk.connections
        assert not len(self.gateway.desk.engines), "a place is still taken"
        slots = self.gateway.card.slots()
        assert (slots["in_flight"], slots["limbo"]) == (0, 0), "slots are lost"
        self.index = dict(self.present)
        self.gateway.close()
        self.open_again()
        self.gateway.close()


def profile(examples: int, *, steps: int = 100, shrink: bool = True) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=repeats(),
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """Steps are counted for each test; records of errors would keep the rings that their tracebacks lead to."""
    GatewayMachine.executed.clear()
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.collect()


def open_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.timeout(900)
def test_sessions_and_card_against_the_model() -> None:
    """XKV_EFFORT=50 takes fifty times as many steps, with seeds of chance."""
    before = open_fds()
    run_state_machine_as_test(GatewayMachine, settings=profile(times(EXAMPLES)))
    executed = GatewayMachine.executed
    assert executed.total() >= STEPS_MIN, executed
    assert all(executed[what] for what in named_steps()), "each kind of step had something to do"
    assert open_fds() <= before


def named_steps() -> set[str]:
    """Every kind of step by the name that it is counted by."""
    prefixed = {"attach": "attach, ", "leave": "leave, ", "put": "put, ", "get": "get, ", "work": "job, "}
    prefixed |= {"commit": "commit, ", "damage": "damage, "}
    return {"time" if kind == "time" else prefixed.get(kind, "") + how for kind, how in WHAT}


# --- teeth --------------------------------------------------------------------------------------------------


def forget_the_place(patch: pytest.MonkeyPatch) -> None:
    """A session's end does not free what it had."""
    patch.setattr(Engines, "detach", lambda *_: None)


def forget_the_pin(patch: pytest.MonkeyPatch) -> None:
    """A get's end leaves its object pinned: its slots are never free again."""
    patch.setattr(Card, "end_get", lambda *_: None)


def forget_the_slots_of_a_failed_put(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Card, "_give", lambda *_: None)


def skip_the_generation(patch: pytest.MonkeyPatch) -> None:
    """A slot of an earlier object of the same key passes for the present one's."""
    real = fragments_of.prove

    def prove(slot: memoryview, identity: Identity, geometry: Geometry, fragment: int) -> None:
        with suppress(layout.BadBytesError):
            identity = replace(identity, generation=layout.parse_slot_header(slot).generation)
        real(slot, identity, geometry, fragment)

    patch.setattr(fragments_of, "prove", prove)  # it has the last word wherever a header is not the expected one


def publish_before_commit(patch: pytest.MonkeyPatch) -> None:
    real = Card.finish_put

    def finish_put(card: Card, plan: PutPlan, error: MediumError | None, now_ns: int | None = None) -> None:
        real(card, plan, error, now_ns)
        if error is None:
            card.table.put(plan.key.tag, plan.generation, plan.key.bit, plan.fragments)

    patch.setattr(Card, "finish_put", finish_put)


def answer_before_commit(patch: pytest.MonkeyPatch) -> None:
    """A put is confirmed when it is written."""
    real = Transfers._written

    def written(transfers: Transfers, putting: Any, error: Exception | None) -> None:
        real(transfers, putting, error)
        if error is None:
            transfers.confirmed([putting.plan])

    patch.setattr(Transfers, "_written", written)


def keep_what_was_not_committed(patch: pytest.MonkeyPatch) -> None:
    """Puts of a failed commit are answered as such, and stay where a get finds them."""
    patch.setattr(Overlay, "undo", lambda overlay, batch: overlay.settle(batch) and [])


def close_before_the_last_io(patch: pytest.MonkeyPatch) -> None:
    """The client uses its slots again while a job of the dead connection goes on in them."""
    real = GatewaySession._settle

    def settle(session: GatewaySession) -> list[Any]:
        if session.state is State.ENDING:
            session.in_flight = 0
        return real(session)

    def unless_closed(answer: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        return lambda session, *words: [] if session.state is State.CLOSED else answer(session, *words)

    patch.setattr(GatewaySession, "_settle", settle)
    patch.setattr(GatewaySession, "stored", unless_closed(GatewaySession.stored))
    patch.setattr(GatewaySession, "loaded", unless_closed(GatewaySession.loaded))


def cancel_what_has_begun(patch: pytest.MonkeyPatch) -> None:
    """A cancelled get is answered at once, although a thread is reading into its slots."""
    real = Transfers.cancel

    def cancel(transfers: Transfers, party: Any, what: Any) -> None:
        real(transfers, party, what)
        for getting in transfers._getting.get((party, what.get), set()):
            party.answers.loaded(what.get, wire.LoadedObject(getting.index, LoadStatus.CANCELLED, 0, 0))

    patch.setattr(Transfers, "cancel", cancel)


def keep_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """An engine that comes back does not see that the gateway is another."""
    real = ControlPage.set_boot

    def set_boot(page: ControlPage, boot_id: bytes) -> int:
        former = page.epoch
        real(page, boot_id)
        if former:
            page._words[5] = former
        return page.epoch

    patch.setattr(ControlPage, "set_boot", set_boot)


def take_a_place_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engines, "holder", lambda *_: None)


def drop_the_newer(patch: pytest.MonkeyPatch) -> None:
    """A read of an object that was replaced meanwhile finds it damaged, and the new one leaves."""
    real = Card.drop

    def drop(card: Card, key: ObjectKey, generation: int, reason: str) -> None:
        record = card._overlay.record(key.encode())
        real(card, key, record.generation if record is not None else generation, reason)

    patch.setattr(Card, "drop", drop)


def forget_who_reads(patch: pytest.MonkeyPatch) -> None:
    """Slots of what is being read are given to others."""
    patch.setattr(Limbo, "release", limbo_without_pins(Limbo.release))


def limbo_without_pins(real: Callable[..., Any]) -> Callable[..., Any]:
    def release(limbo: Limbo, now_ns: int, _pinned: object) -> Any:
        return real(limbo, now_ns, frozenset())

    return release


LOST = "an object was lost|what was held is lost"
FORGED = "a restart finds something else|shown, and not held|published before it was committed"
MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (forget_the_place, "a place is still taken"),
    (forget_the_pin, "slots are lost"),
    (forget_the_slots_of_a_failed_put, "slots are lost"),
    (skip_the_generation, "wrong bytes"),
    (publish_before_commit, FORGED),
    (answer_before_commit, "confirmed before it was committed"),
    (keep_what_was_not_committed, f"{FORGED}|{LOST}"),
    (close_before_the_last_io, "is used after it was given back|slots are lost"),
    (cancel_what_has_begun, "is used after it was given back|is not in flight"),
    (keep_the_epoch, "an epoch is each life's own"),
    (take_a_place_twice, "a place was given twice"),
    (drop_the_newer, LOST),
    (forget_who_reads, "sound bytes were called corrupt|wrong bytes"),
]


@pytest.mark.parametrize(("mutate", "finding"), MUTATIONS)
def test_the_machine_has_teeth(
    mutate: Callable[[pytest.MonkeyPatch], None], finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these faults, put into the gateway, is found for what it is within the steps that CI takes."""
    mutate(monkeypatch)
    with pytest.raises((AssertionError, LocalProtocolError), match=finding):
        run_state_machine_as_test(GatewayMachine, settings=profile(EXAMPLES, shrink=False))
