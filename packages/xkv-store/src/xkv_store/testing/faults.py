"""Media that fail as a plan says: for tests of this package, and of whoever builds on it.

Owns: the plan (which operation, when, which fault), what of it took effect, a Database and an Index that follow it,
and their place under the cards that are opened meanwhile (`under`).
Must not know: any test, or what the code above makes of a fault.

A plan is data and has a seed: the same calls in the same order meet the same faults. Threads may change the order.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from .. import medium  # noqa: TID252  the package may have another name
from ..card_options import MEDIA  # noqa: TID252
from ..database import Database, Mover, aligned  # noqa: TID252
from ..errors import MediumError  # noqa: TID252
from ..geometry import DATA_OFFSET, IO_STEP_BYTES  # noqa: TID252
from ..index import Index  # noqa: TID252

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ..index import Change  # noqa: TID252

POISON: Final = 0xEE  # what lies in a buffer behind a short read


class Operation(enum.Enum):
    """What is asked of the medium."""

    READ = "read"  # one preadv of slots
    WRITE = "write"  # one pwritev of slots
    SYNC = "sync"  # fdatasync of a database
    DIRECT = "direct"  # the probe of O_DIRECT at a database's opening; its error is a refusal
    ALLOCATE = "allocate"  # the space of a new or cut database
    COMMIT = "commit"  # one transaction of the index
    LOOKUP = "lookup"  # one read of a record in the index


class Kind(enum.Enum):
    """What goes wrong."""

    ERROR = "error"  # `error`, and nothing is done
    LATE_ERROR = "late error"  # done in full, and yet `error`
    SHORT = "short"  # the call ends `cut_bytes` early and says so
    FLIP = "flip"  # one bit is another (at byte `at` of the call, else anywhere)
    ZERO = "zero"  # one slot of the call is zeros
    CUT = "cut"  # a write is torn and says nothing; a read finds the medium's end
    SWAP = "swap"  # the bytes of, or for, another slot of the database
    STALE = "stale"  # a write that never arrives and says nothing: what was there before stays
    FULL = "full"  # the index's map is full
    DEAD = "dead"  # `error` in a commit, after which LMDB refuses everything: as when it cannot write a meta page
    DELAY = "delay"  # right, but `delay_s` later


_MOVES: Final = {Kind.ERROR, Kind.LATE_ERROR, Kind.SHORT, Kind.FLIP, Kind.ZERO, Kind.CUT, Kind.SWAP, Kind.DELAY}
_CALLS: Final = {Kind.ERROR, Kind.LATE_ERROR, Kind.DELAY}
POSSIBLE: Final[dict[Operation, frozenset[Kind]]] = {
    Operation.READ: frozenset(_MOVES),
    Operation.WRITE: frozenset(_MOVES | {Kind.STALE}),
    Operation.SYNC: frozenset(_CALLS),
    Operation.DIRECT: frozenset({Kind.ERROR}),
    Operation.ALLOCATE: frozenset(_CALLS),
    Operation.COMMIT: frozenset(_CALLS | {Kind.FULL, Kind.DEAD}),
    Operation.LOOKUP: frozenset(_CALLS - {Kind.LATE_ERROR}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`kind` at the `nth` call of `operation` (from 1) and the `times` - 1 after it, or at any with `probability`."""

    operation: Operation
    kind: Kind
    nth: int = 0
    times: int = 1
    probability: float = 0.0
    error: int = errno.EIO
    cut_bytes: int = IO_STEP_BYTES
    at: int | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in POSSIBLE[self.operation]:
            raise ValueError(f"{self.kind.value} cannot happen to a {self.operation.value}")
        if bool(self.nth) == bool(self.probability):
            raise ValueError("a fault has either an nth call or a probability")
        if self.nth < 0 or self.times < 1 or not 0 <= self.probability <= 1 or self.cut_bytes < 1 or self.delay_s < 0:
            raise ValueError(f"out of range: {self}")
        if self.kind is Kind.DELAY and not self.delay_s:
            raise ValueError("a delay needs its seconds")

    def strikes(self, call: int, rng: random.Random) -> bool:
        """Whether it happens to the operation's call of this number."""
        if self.probability:
            return rng.random() < self.probability
        return self.nth <= call < self.nth + self.times


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Everything that goes wrong. Of several faults that strike the same call, the first does."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    proves: bool = True  # False: what is read is taken as it comes. Only to show what a check would find then

    def to_json(self) -> str:
        """The plan as text, for another process."""
        faults = [
            {**asdict(fault), "operation": fault.operation.value, "kind": fault.kind.value} for fault in self.faults
        ]
        return json.dumps({"seed": self.seed, "faults": faults, "proves": self.proves})

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """The plan that `to_json` made."""
        value = json.loads(text)
        faults = [
            Fault(**{**fault, "operation": Operation(fault["operation"]), "kind": Kind(fault["kind"])})
            for fault in value["faults"]
        ]
        return cls(tuple(faults), value["seed"], value["proves"])


class Injector:
    """A plan in action. `calls` and `effects` count what was asked and what went wrong; `log` gets the effects, too."""

    def __init__(self, plan: FaultPlan, log: Path | None = None) -> None:
        self.plan = plan
        self.calls: Counter[Operation] = Counter()
        self.effects: Counter[tuple[Operation, Kind]] = Counter()
        self.healthy = False  # set by a test: from now on nothing goes wrong
        self.rng = random.Random(plan.seed)  # noqa: S311  what fails is no secret
        self._log = log
        self._lock = threading.Lock()

    def strike(self, operation: Operation) -> Fault | None:
        """Count a call; what goes wrong with it."""
        with self._lock:
            self.calls[operation] += 1
            if self.healthy:
                return None
            struck = [fault for fault in self._faults_of(operation) if fault.strikes(self.calls[operation], self.rng)]
            if not struck:
                return None
            fault = struck[0]
            self.effects[operation, fault.kind] += 1
            if self._log is not None:
                with self._log.open("a", encoding="ascii") as file:
                    file.write(f"{operation.value}/{fault.kind.value}\n")
        if fault.kind is Kind.DELAY:
            time.sleep(fault.delay_s)
        return fault

    def before(self, operation: Operation) -> Callable[[], None]:
        """For a call that is done or not: raises the fault's error, or gives what is to be called after it."""
        fault = self.strike(operation)
        if fault is not None and fault.kind is Kind.ERROR:
            raise _os_error(fault)

        def after() -> None:
            if fault is not None and fault.kind is Kind.LATE_ERROR:
                raise _os_error(fault)

        return after

    def draw(self, below: int) -> int:
        """A number of the plan's seed."""
        with self._lock:
            return self.rng.randrange(below)

    def _faults_of(self, operation: Operation) -> list[Fault]:
        return [fault for fault in self.plan.faults if fault.operation is operation]


class FaultyDatabase(Database):
    """A database on a medium that follows an injector's plan. Made by `faulty_database`."""

    injector: ClassVar[Injector]

    def sync(self) -> None:
        """As the database's."""
        try:
            after = self.injector.before(Operation.SYNC)
            super().sync()
            after()
        except OSError as error:
            raise MediumError.of(error, f"syncing {self.path}") from error

    @classmethod
    def _probe_direct(cls, path: Path, superblock: bytes) -> int | None:
        fault = cls.injector.strike(Operation.DIRECT)
        return super()._probe_direct(path, superblock) if fault is None else None

    @classmethod
    def _reserve(cls, fd: int, needed: int) -> None:
        after = cls.injector.before(Operation.ALLOCATE)
        super()._reserve(fd, needed)
        after()

    def _move_all(self, call: Mover, doing: str, offset: int, buffers: Sequence[memoryview]) -> None:
        operation = Operation.READ if doing == "reading" else Operation.WRITE

        def move(fd: int, views: Sequence[memoryview], at: int) -> int:
            fault = self.injector.strike(operation)
            if fault is None or fault.kind is Kind.DELAY:
                return call(fd, views, at)
            if fault.kind is Kind.ERROR:
                raise _os_error(fault)
            if operation is Operation.READ:
                return self._read_badly(fault, call, fd, views, at)
            return self._write_badly(fault, call, fd, views, at)

        super()._move_all(move, doing, offset, buffers)

    def _read_badly(self, fault: Fault, call: Mover, fd: int, views: Sequence[memoryview], offset: int) -> int:
        wanted = sum(map(len, views))
        if fault.kind is Kind.CUT:
            return 0
        moved = call(fd, views, self._elsewhere(offset, wanted) if fault.kind is Kind.SWAP else offset)
        if fault.kind is Kind.LATE_ERROR:
            raise _os_error(fault)
        data = bytearray(b"".join(views))
        if fault.kind is Kind.SHORT:
            moved = max(0, moved - fault.cut_bytes)
            data[moved:] = bytes([POISON]) * (len(data) - moved)
        self._spoil(fault, data)
        _scatter(data, views)
        return moved

    def _write_badly(self, fault: Fault, call: Mover, fd: int, views: Sequence[memoryview], offset: int) -> int:
        wanted = sum(map(len, views))
        if fault.kind is Kind.STALE:
            return wanted
        data = bytearray(b"".join(views))
        self._spoil(fault, data)
        kept = wanted
        if fault.kind is Kind.SHORT:
            wanted = max(0, wanted - fault.cut_bytes)
            kept = -(-wanted // IO_STEP_BYTES) * IO_STEP_BYTES
        elif fault.kind is Kind.CUT:
            place = self.injector.draw(wanted) if fault.at is None else min(fault.at, wanted)
            kept = place // IO_STEP_BYTES * IO_STEP_BYTES
        if kept:
            memory = aligned(len(data))
            memory[:] = data
            call(fd, [memory[:kept]], self._elsewhere(offset, wanted) if fault.kind is Kind.SWAP else offset)
        if fault.kind is Kind.LATE_ERROR:
            raise _os_error(fault)
        return wanted

    def _spoil(self, fault: Fault, data: bytearray) -> None:
        """Another bit, or a slot of zeros."""
        if fault.kind is Kind.FLIP:
            place = self.injector.draw(len(data)) if fault.at is None else min(fault.at, len(data) - 1)
            data[place] ^= 1 << self.injector.draw(8)
        elif fault.kind is Kind.ZERO:
            slot_bytes = self.superblock.slot_bytes
            begin = self.injector.draw(-(-len(data) // slot_bytes)) * slot_bytes
            end = min(begin + slot_bytes, len(data))
            data[begin:end] = bytes(end - begin)

    def _elsewhere(self, offset: int, wanted: int) -> int:
        """Another slot of the database from which on there is room for so many bytes."""
        slot_bytes, slots = self.superblock.slot_bytes, self.superblock.slots
        here = (offset - DATA_OFFSET) // slot_bytes
        places = [at for at in range(slots + 1 - -(-wanted // slot_bytes)) if at != here]
        return DATA_OFFSET + places[self.injector.draw(len(places))] * slot_bytes if places else offset


class FaultyIndex(Index):
    """An index whose commits and look-ups follow an injector's plan. Made by `faulty_index`."""

    injector: ClassVar[Injector]

    def get(self, key: bytes) -> bytes | None:
        """As the index's."""
        try:
            self.injector.before(Operation.LOOKUP)
        except OSError as error:
            raise MediumError.of(error, "reading the index") from error
        return super().get(key)

    def _try(self, changes: list[Change], generation_ceiling: int | None) -> bool:
        fault = self.injector.strike(Operation.COMMIT)
        if fault is not None and fault.kind is Kind.DEAD:
            with self._lock:
                self._env.close()
        if fault is not None and fault.kind in {Kind.ERROR, Kind.DEAD}:
            raise _os_error(fault)
        if fault is not None and fault.kind is Kind.FULL:
            return False
        done = super()._try(changes, generation_ceiling)
        if fault is not None and fault.kind is Kind.LATE_ERROR:
            raise _os_error(fault)
        return done


def faulty_database(injector: Injector) -> type[Database]:
    """The class whose databases follow this injector: `open` and `make` it as any other."""
    return type("FaultyDatabase", (FaultyDatabase,), {"injector": injector})


def faulty_index(injector: Injector) -> type[Index]:
    """The class whose indexes follow this injector."""
    return type("FaultyIndex", (FaultyIndex,), {"injector": injector})


def put_under(injector: Injector) -> None:
    """Every card that this process makes or opens from now on has the injector's medium."""
    MEDIA.database, MEDIA.index = faulty_database(injector), faulty_index(injector)
    if not injector.plan.proves:
        vars(medium)["prove"] = _take_as_it_comes


@contextmanager
def under(plan: FaultPlan | Injector) -> Iterator[Injector]:
    """Cards made or opened in this block have the plan's medium, also after it. A plan in action goes on."""
    former = MEDIA.database, MEDIA.index, vars(medium)["prove"]
    injector = plan if isinstance(plan, Injector) else Injector(plan)
    put_under(injector)
    try:
        yield injector
    finally:
        MEDIA.database, MEDIA.index, vars(medium)["prove"] = former


def _take_as_it_comes(*_: object) -> None:
    """In the place of `fragment.prove`."""


def _os_error(fault: Fault) -> OSError:
    return OSError(fault.error, os.strerror(fault.error))


def _scatter(data: bytearray, views: Sequence[memoryview]) -> None:
    at = 0
    for view in views:
        view[:] = data[at : at + len(view)]
        at += len(view)
