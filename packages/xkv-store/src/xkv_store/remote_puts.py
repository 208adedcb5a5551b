"""Puts of a card that is the remote alone: sealed in the engine's ring, and put to the remote from there.

Owns: which puts wait for a call, and that each of them hears how its own went. Must not know: sessions, answers, what
makes a put confirmed, the library.

It stands where `PutJobs` does for other cards, which it has for the sealing. Slots that a call may read are their
put's until that call was answered, or the process that made it is dead. Slots that are no neighbours, or of a ring that
this process does not have, go by the transfer memory, if there is room. Event loop's thread, save `wrote`.
"""

from __future__ import annotations

import errno
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from .errors import MediumError
from .fragment import filled
from .io_pool import WithdrawnError
from .native import copied
from .put_jobs import Put, PutJobs
from .remote_format import remote_bytes, remote_key
from .remote_pace import STRAIGHT_BYTES_MAX, Pace
from .remote_stores import ALONE_BYTES_MIN, PUT_NS, TOGETHER_BYTES_MIN, TOGETHER_MAX
from .remote_words import TRANSFER, Lane, code_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .card import Card, GetPlan, PutPlan
    from .io_pool import IoPool, Job
    from .remote_link import Process
    from .remote_memory import Place, RemoteMemory
    from .remote_rings import RemoteRings
    from .ring import Ring

    class RingPut(Put, Protocol):
        """What is to be put, and where in a ring it lies."""

        @property
        def ring(self) -> Ring:
            """The ring."""

        @property
        def slots(self) -> Sequence[int]:
            """The object's slots there."""

        @property
        def replace(self) -> bool:
            """Whether it takes the place of what the remote has."""

    OnWritten = Callable[[Any, Exception | None], None]


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A put whose slots are sealed. `place`: where they were copied to; None: they are in the ring."""

    put: RingPut
    place: Place | None
    remote_bytes: int


class RemotePuts:
    """Of one gateway. `step` it each round."""

    def __init__(
        self,
        card: Card,
        pool: IoPool,
        written: OnWritten,
        *,
        link: Process,
        rings: RemoteRings,
        memory: RemoteMemory,
        note: Callable[[str, str], None],
    ) -> None:
        """`written` is told of each put when it has ended. `note(what, why)` logs, not too often."""
        self._card = card
        self._written = written
        self._link = link
        self._rings = rings
        self._memory = memory
        self._note = note
        self._sealing = PutJobs(card, pool, self._were_sealed, self)
        self._pace = Pace(call_ns=PUT_NS, bytes_max=STRAIGHT_BYTES_MAX)
        self._apart: dict[int, Place] = {}  # by generation, of what is being sealed
        self._queue: deque[_Sealed] = deque()
        self._queued_bytes = 0
        self._putting = 0
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sealing) + len(self._queue) + self._putting

    def full(self, owner: str) -> bool:
        """Whether nothing more would go there."""
        return not self._link.is_up or self._sealing.full(owner)

    def add(self, put: RingPut) -> None:
        """Put this, now or, with others, at the next `flush`."""
        if not self._is_direct(put):
            slots = put.plan.fragments
            place = self._memory.take(slots, is_store=True) if slots <= self._memory.stores_max else None
            if place is None:
                self.counters["remote_stores_shed"] += 1
                self._written(put, MediumError(errno.ENOBUFS, "no room on the way to the remote"))
                return
            self._apart[put.plan.generation] = place
        self._sealing.add(put)

    def _is_direct(self, put: RingPut) -> bool:
        return are_neighbours(put.slots) and self._rings.number_of(put.ring) is not None

    def flush(self) -> None:
        """Hand over what waits for others to go with."""
        self._sealing.flush()

    def ended(self, job: Job) -> None:
        """The pool has ended this job."""
        self._sealing.ended(job)

    def withdraw(self, wanted: Callable[[Any], bool]) -> None:
        """Take back the puts that `wanted` names and that no call is about."""
        self._sealing.withdraw(wanted)
        for _ in range(len(self._queue)):
            one = self._pop()
            if wanted(one.put):
                self._end(one, WithdrawnError())
            else:
                self._push(one)

    def wrote(self, plan: PutPlan, slots: Sequence[memoryview]) -> None:
        """On a thread of the pool: these slots are sealed, and nobody else touches them until this returns."""
        place = self._apart.get(plan.generation)
        if place is not None:
            into = filled(self._memory.views(place, plan.fragments), plan.length, self._card.geometry, 0)
            copied(filled(slots, plan.length, self._card.geometry, 0), into, 0, [0] * plan.fragments)

    def read(self, _plan: GetPlan, _slots: Sequence[memoryview], _first_fragment: int) -> bool:
        """Nothing is kept here."""
        return False

    def _were_sealed(self, put: RingPut, error: Exception | None) -> None:
        place = self._apart.pop(put.plan.generation, None)
        one = _Sealed(put, place, remote_bytes(put.plan.length, self._card.geometry))
        if error is None:
            self._push(one)
        else:
            self._end(one, error)

    def _push(self, one: _Sealed) -> None:
        self._queue.append(one)
        self._queued_bytes += one.remote_bytes

    def _pop(self) -> _Sealed:
        one = self._queue.popleft()
        self._queued_bytes -= one.remote_bytes
        return one

    def step(self) -> None:
        """Do what can be done now."""
        while self._queue and not self._link.is_up:
            self._end(self._pop(), MediumError(0, f"the remote is not there: {self._link.reason}"))
        while self._queue and self._link.has_room(Lane.STORE) and self._is_worth_a_put():
            self._put()

    def _is_worth_a_put(self) -> bool:
        """Whether what is there should not wait for what will come to it."""
        if not self._putting and not len(self._sealing):
            return True
        wanted = min(TOGETHER_BYTES_MIN if self._putting else ALONE_BYTES_MIN, self._pace.bytes)
        return len(self._queue) >= TOGETHER_MAX or self._queued_bytes >= wanted

    def _put(self) -> None:
        taken: list[_Sealed] = []
        memories: list[int] = []
        offsets: list[int] = []
        total = 0
        while self._queue and len(taken) < TOGETHER_MAX:
            if taken and total + self._queue[0].remote_bytes > self._pace.bytes:
                break
            if taken and self._queue[0].put.replace is not taken[0].put.replace:
                break
            one = self._pop()
            memory = TRANSFER if one.place is not None else self._rings.number_of(one.put.ring)
            if memory is None:  # the process that knew the ring has ended since
                self._end(one, MediumError(0, "the remote was away"))
                continue
            total += one.remote_bytes
            taken.append(one)
            memories.append(memory)
            offsets.append(one.place.offset if one.place is not None else one.put.slots[0] * self._slot_bytes)
        if taken:
            self._putting += len(taken)
            self._link.call(
                Lane.STORE,
                [remote_key(one.put.plan.encoded_key, self._card.geometry) for one in taken],
                partial(self._were_put, taken, time.monotonic_ns()),
                memories=tuple(memories),
                offsets=tuple(offsets),
                sizes=tuple(one.remote_bytes for one in taken),
                remove=taken[0].put.replace,
            )

    @property
    def _slot_bytes(self) -> int:
        return self._card.geometry.slot_bytes

    def _were_put(self, taken: Sequence[_Sealed], begun_ns: int, codes: Sequence[int] | None) -> None:
        self._putting -= len(taken)
        if codes is None:
            self._pace.failed(time.monotonic_ns())
        else:
            put = (one.remote_bytes for one, code in zip(taken, codes, strict=True) if code == 0)
            self._pace.ended(sum(put), begun_ns, time.monotonic_ns())
        for one, code in zip(taken, codes or [-1] * len(taken), strict=True):
            if code == 0:
                self.counters["remote_stores"] += 1
                self.counters["remote_store_bytes"] += one.put.plan.length
                self._end(one, None)
                continue
            self.counters["remote_stores_failed"] += 1
            why = "no answer" if codes is None else code_text(code)
            self._note("an object was not put to the remote", why)
            self._end(one, MediumError(0, f"it was not put to the remote: {why}"))

    def _end(self, one: _Sealed, error: Exception | None) -> None:
        """Nothing touches its slots any more."""
        if one.place is not None:
            self._memory.give(one.place)
        self._written(one.put, error)


def are_neighbours(slots: Sequence[int]) -> bool:
    """Whether these slots lie one after the other, so that one address and a size say all of them."""
    return slots[-1] - slots[0] == len(slots) - 1 and list(slots) == list(range(slots[0], slots[-1] + 1))
