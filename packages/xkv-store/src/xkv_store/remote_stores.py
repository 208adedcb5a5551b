"""Objects on their way from the card to the remote, after the card has confirmed them.

Owns: the queue, what of it is being asked for, read or put, and that every slot of the remote's memory comes back.
Must not know: who stored an object, sockets, lookups. All of it runs on the event loop's thread, save the reads.

Nobody waits for these: what there is no room for is not put, and counted.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from .remote_format import remote_bytes, remote_key
from .remote_pace import Pace
from .remote_words import Lane, code_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .card import Card, GetPlan, PutPlan
    from .key import ObjectKey
    from .remote_link import Process
    from .remote_memory import Place, RemoteMemory
    from .remote_work import RemoteWork

QUEUED_MAX: Final = 16_384  # objects of which a remote has not been asked yet: some MB; more is not put there
ASKED_MAX: Final = 256  # in one call: below a millisecond of the master's
TOGETHER_MAX: Final = 256  # objects of one put
PUT_NS: Final = 2_000_000_000  # of one put: it may take 10 s, and holds what it carries for as long
TOGETHER_BYTES_MIN: Final = 32 << 20  # worth being the next put while there is one
ALONE_BYTES_MIN: Final = 8 << 20  # worth a put where there is none, while more is being read
TRIES_MAX: Final = 3  # a node that has just gone is chosen by the master until it has noticed
RETRY_NS: Final = 2_000_000_000


@dataclass(slots=True, eq=False)
class _Store:
    """One object. `place`: where it lies while it is under way; `not_before_ns`: of a further try."""

    key: ObjectKey
    generation: int
    tries: int = 0
    not_before_ns: int = 0
    place: Place | None = None
    length: int = 0


class RemoteStores:
    """Of one gateway."""

    def __init__(
        self, card: Card, link: Process, memory: RemoteMemory, work: RemoteWork, note: Callable[[str, str], None]
    ) -> None:
        """`note(what, why)` logs, not too often."""
        self._card = card
        self._link = link
        self._memory = memory
        self._work = work
        self._note = note
        self._pace = Pace(call_ns=PUT_NS)
        self._queue: deque[_Store] = deque()
        self._copied: deque[_Store] = deque()  # these hold what those in the queue wait for, and go before them
        self._later: deque[_Store] = deque()  # to be tried again
        self._asked = 0
        self._absent: deque[_Store] = deque()  # the remote does not have them, and they are to be read
        self._reading = 0
        self._read: list[_Store] = []
        self._putting = 0
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        waiting = len(self._queue) + len(self._copied) + len(self._later) + len(self._absent)
        return waiting + self._asked + self._reading + len(self._read) + self._putting

    def add(self, plan: PutPlan, place: Place | None = None) -> None:
        """The card has confirmed this object. `place`: where a copy of its slots lies, which is ours from now on."""
        one = _Store(plan.key, plan.generation, place=place, length=plan.length)
        if self._memory.stores_max < plan.fragments:
            self.counters["remote_stores_too_large"] += 1
        elif len(self._queue) + len(self._copied) >= QUEUED_MAX:
            self.counters["remote_stores_shed"] += 1
            self._give(one)
        else:
            (self._queue if place is None else self._copied).append(one)

    def step(self, now_ns: int) -> None:
        """Do what can be done now."""
        while self._later and self._later[0].not_before_ns <= now_ns:
            self._queue.append(self._later.popleft())
        if not self._link.is_up:
            return
        may_be_asked = self._copied or (self._queue and len(self._absent) < ASKED_MAX)
        if may_be_asked and not self._asked and self._link.has_room(Lane.LOOK):
            self._ask()
        while self._absent and self._begin_read(self._absent[0]):
            self._absent.popleft()
        while self._read and self._link.has_room(Lane.STORE) and self._is_worth_a_put():
            self._put()

    def _ask(self) -> None:
        """What the remote has already is not read, nor sent."""
        asked = [self._copied.popleft() for _ in range(min(ASKED_MAX, len(self._copied)))]
        if len(self._absent) < ASKED_MAX:
            asked += [self._queue.popleft() for _ in range(min(ASKED_MAX - len(asked), len(self._queue)))]
        self._asked = len(asked)
        keys = [remote_key(one.key.encode(), self._card.geometry) for one in asked]
        self._link.call(Lane.LOOK, keys, partial(self._were_asked, asked))

    def _were_asked(self, asked: Sequence[_Store], codes: Sequence[int] | None) -> None:
        self._asked = 0
        for one, code in zip(asked, codes or [-1] * len(asked), strict=True):
            if code > 0:
                self.counters["remote_stores_held"] += 1
                self._give(one)
            elif code == 0:
                # A copy goes also where the object has left the card since: a small one's objects do so soon.
                (self._absent if one.place is None else self._read).append(one)
            else:
                self._give(one)
                self._failed(one, "no answer" if codes is None else code_text(code))

    def _begin_read(self, one: _Store) -> bool:
        """Whether this need not be looked at again: it is being read, or it is gone."""
        plan = self._card.begin_proof(one.key)
        if plan is None or plan.generation != one.generation:
            if plan is not None:
                self._card.end_get(plan)
            self.counters["remote_stores_gone"] += 1
            return True
        place = self._memory.take(plan.fragments, is_store=True)
        if place is None:
            self._card.end_get(plan)
            return False
        one.place, one.length = place, plan.length
        views = self._memory.views(place, plan.fragments)
        run = partial(self._card.read, plan, views, 0)
        if not self._work.submit(run, partial(self._was_read, one, plan), is_store=True, cost=plan.fragments):
            self._card.end_get(plan)
            self._give(one)
            return False
        self._reading += 1
        return True

    def _was_read(self, one: _Store, plan: GetPlan, error: Exception | None) -> None:
        self._reading -= 1
        self._card.end_get(plan)
        if error is None:
            self._read.append(one)
            return
        self._give(one)
        self.counters["remote_stores_failed"] += 1
        self._note("an object could not be read for the remote", str(error))

    def _is_worth_a_put(self) -> bool:
        """Whether what is there should not wait for what will come to it."""
        if not self._putting and not self._reading:
            return True
        wanted = min(TOGETHER_BYTES_MIN if self._putting else ALONE_BYTES_MIN, self._pace.bytes)
        return len(self._read) >= TOGETHER_MAX or sum(one.length for one in self._read) >= wanted

    def _put(self) -> None:
        taken: list[_Store] = []
        total = 0
        while self._read and len(taken) < TOGETHER_MAX:
            total += remote_bytes(self._read[0].length, self._card.geometry)
            if taken and total > self._pace.bytes:
                break
            taken.append(self._read.pop(0))
        self._putting += len(taken)
        self._link.call(
            Lane.STORE,
            [remote_key(one.key.encode(), self._card.geometry) for one in taken],
            partial(self._were_put, taken, time.monotonic_ns()),
            offsets=tuple(one.place.offset for one in taken if one.place is not None),
            sizes=tuple(remote_bytes(one.length, self._card.geometry) for one in taken),
        )

    def _were_put(self, taken: Sequence[_Store], begun_ns: int, codes: Sequence[int] | None) -> None:
        if codes is None:
            self._pace.failed(time.monotonic_ns())
        else:
            put = (one.length for one, code in zip(taken, codes, strict=True) if code == 0)
            sent_bytes = sum(remote_bytes(length, self._card.geometry) for length in put)
            self._pace.ended(sent_bytes, begun_ns, time.monotonic_ns())
        self._putting -= len(taken)
        for one, code in zip(taken, codes or [-1] * len(taken), strict=True):
            self._give(one)
            if code == 0:
                self.counters["remote_stores"] += 1
                self.counters["remote_store_bytes"] += one.length
            else:
                self._failed(one, "no answer" if codes is None else code_text(code))

    def _failed(self, one: _Store, why: str) -> None:
        one.tries += 1
        if one.tries < TRIES_MAX and len(self._later) < QUEUED_MAX:
            one.not_before_ns = time.monotonic_ns() + RETRY_NS
            self._later.append(one)
            return
        self.counters["remote_stores_failed"] += 1
        self._note("an object was not put to the remote", why)

    def _give(self, one: _Store) -> None:
        if one.place is not None:
            self._memory.give(one.place)
            one.place = None
