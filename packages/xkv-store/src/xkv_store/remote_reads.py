"""Reads of a card that is the remote alone: objects come from there into the slots that wait for them.

Owns: which reads wait for a call, where each lands, and that each landing hears once how it went. Must not know:
sessions' rules, messages, what a failed read means (`transfers`), the library.

It stands where `Reads` does for other cards. Slots that a call may write to are their landing's until that call was
answered, or the process that made it is dead. What the library cannot be told of (a part of an object, slots that are
no neighbours) comes into the transfer memory, and is copied. Event loop's thread, save what is proved.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from .errors import CorruptObject, RemoteAwayError, RemoteGoneError, SpoiltSlots
from .io_pool import WithdrawnError
from .remote_fetches import LOAD_NS, TOGETHER_MAX, WAITS_NS_MAX
from .remote_format import header_of, prove_received, remote_key
from .remote_pace import STRAIGHT_BYTES_MAX, Expected, Pace
from .remote_puts import are_neighbours
from .remote_words import NOT_FOUND, TOO_LARGE, TRANSFER, Lane, code_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .card import GetPlan
    from .card_alone import CardAlone
    from .io_pool import Job
    from .leases import Part, Placed
    from .reads import Landing
    from .remote_link import Process
    from .remote_memory import Place, RemoteMemory
    from .remote_rings import RemoteRings
    from .remote_work import RemoteWork

    OnEnded = Callable[[Landing, GetPlan, Exception | None], None]

WAITING_MAX: Final = 16_384  # reads that no call is about yet
GATHER_NS_MAX: Final = 3_000_000  # a read waits so long for others that have been asked for to go with it


@dataclass(slots=True, eq=False)
class _Read:
    """`place`: where it comes to, if not to where it lands. `length`: of what came, once it is proved.

    `apart`: it came to where it lands, and was not right there.
    """

    plan: GetPlan
    part: Part
    landing: Landing
    since_ns: int
    place: Place | None = None
    length: int = 0
    apart: bool = False


class RemoteReads:
    """Of one gateway. `step` it each round."""

    def __init__(
        self,
        card: CardAlone,
        ended: OnEnded,
        *,
        link: Process,
        rings: RemoteRings,
        memory: RemoteMemory,
        work: RemoteWork,
        note: Callable[[str, str], None],
        other: Callable[[GetPlan, int], None],
        more: Callable[[], bool],
    ) -> None:
        """`ended` hears of each landing once, when nothing touches its slots any more.

        `more`: whether sessions have asked for something that is not begun yet. `other(plan, length)` hears that the
        remote has an object of another size than is listed.
        """
        self._card = card
        self._ended = ended
        self._link = link
        self._rings = rings
        self._memory = memory
        self._work = work
        self._note = note
        self._other = other
        self._more = more
        self._pace = Pace(call_ns=LOAD_NS, bytes_max=STRAIGHT_BYTES_MAX)
        self._expected = Expected(card.geometry.slot_bytes)
        self._queue: deque[_Read] = deque()
        self._coming: dict[Placed, Landing] = {}
        self._under_way = 0
        self._bad: deque[str] = deque(maxlen=TOGETHER_MAX)  # remote keys of what was no such object
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._queue) + self._under_way

    def landing_of(self, placed: Placed) -> Landing | None:
        """The landing that a place in a shared region waits for; None where its part has come."""
        return self._coming.get(placed)

    def begin(self, plan: GetPlan, part: Part, landing: Landing) -> bool:
        """Bring a part to a landing; False where nothing would come now."""
        is_too_large = plan.fragments > self._memory.slots and not self._is_direct(plan, part, landing)
        if not self._link.is_up or len(self._queue) >= WAITING_MAX or is_too_large:
            self.counters["remote_fetches_refused"] += 1
            return False
        self._queue.append(_Read(plan, part, landing, time.monotonic_ns()))
        if landing.placed is not None:
            self._coming[landing.placed] = landing
        return True

    def _is_direct(self, plan: GetPlan, part: Part, landing: Landing) -> bool:
        is_whole = part.first_fragment == 0 and part.fragments == plan.fragments
        return is_whole and are_neighbours(landing.slots) and self._rings.number_of(landing.ring) is not None

    def flush(self) -> None:
        """Nothing waits for it: `step` makes the calls."""

    def leave(self, landings: Iterable[Landing]) -> list[Landing]:
        """Give these up; those of them that nothing will touch any more, of which `ended` does not hear."""
        unwanted = set(landings)
        left = [one.landing for one in self._queue if one.landing in unwanted]
        self._queue = deque(one for one in self._queue if one.landing not in unwanted)
        for landing in left:
            self._forget(landing)
        return left

    @property
    def untidy(self) -> bool:
        """Whether `tidy` has something to do."""
        return False

    def tidy(self) -> None:
        """Nothing is ever to be tidied."""

    def withdraw_all(self) -> None:
        """End everything that no call is about."""
        while self._queue:
            self._end(self._queue.popleft(), WithdrawnError())

    def ended(self, _job: Job) -> bool:
        """Whether a job of the pool's is one of these: none is."""
        return False

    # --- calls -------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> None:
        """Do what can be done now."""
        while self._queue and (not self._link.is_up or now_ns - self._queue[0].since_ns > WAITS_NS_MAX):
            self._end(self._queue.popleft(), RemoteAwayError(self._link.reason or "it was not its turn in time"))
        while self._queue and self._link.has_room(Lane.LOAD) and self._is_worth_a_call(now_ns) and self._begin():
            pass
        if self._bad and self._link.has_room(Lane.LOOK):
            keys = list(self._bad)
            self._bad.clear()
            self._link.call(Lane.LOOK, keys, lambda _codes: None, remove=True)

    def _is_worth_a_call(self, now_ns: int) -> bool:
        """Whether what is there should not wait for what comes with it: a call costs as much as a few objects."""
        if not self._more() or now_ns - self._queue[0].since_ns > GATHER_NS_MAX:
            return True
        return sum(self._expected.of(one.plan.fragments) for one in self._queue) >= self._pace.bytes

    def _begin(self) -> bool:
        """Ask for the first few at once; whether there was room for any."""
        taken: list[_Read] = []
        memories: list[int] = []
        offsets: list[int] = []
        total, slot_bytes = 0, self._card.geometry.slot_bytes
        while self._queue and len(taken) < TOGETHER_MAX:
            one = self._queue[0]
            total += self._expected.of(one.plan.fragments)
            if taken and total > self._pace.bytes:
                break
            direct = not one.apart and self._is_direct(one.plan, one.part, one.landing)
            memory = self._rings.number_of(one.landing.ring) if direct else None
            if memory is None:
                one.place = self._memory.take(one.plan.fragments, is_store=False)
                if one.place is None:
                    break
            taken.append(self._queue.popleft())
            memories.append(TRANSFER if memory is None else memory)
            offsets.append(one.place.offset if one.place is not None else one.landing.slots[0] * slot_bytes)
        if taken:
            self._under_way += len(taken)
            self._link.call(
                Lane.LOAD,
                [remote_key(one.plan.encoded_key, self._card.geometry) for one in taken],
                partial(self._came, taken, time.monotonic_ns()),
                memories=tuple(memories),
                offsets=tuple(offsets),
                sizes=tuple(one.plan.fragments * slot_bytes for one in taken),
            )
        return bool(taken)

    def _came(self, taken: Sequence[_Read], begun_ns: int, codes: Sequence[int] | None) -> None:
        if codes is None:
            self._expected.forget()
            self._pace.failed(time.monotonic_ns())
        else:
            self._expected.came((one.plan.fragments, code) for one, code in zip(taken, codes, strict=True))
            self._pace.ended(sum(code for code in codes if code > 0), begun_ns, time.monotonic_ns())
        self._under_way -= len(taken)
        for one, code in zip(taken, codes or [-1] * len(taken), strict=True):
            if 0 < code <= one.plan.fragments * self._card.geometry.slot_bytes:
                self._take_in(one, code)
            elif code in {NOT_FOUND, TOO_LARGE}:
                self.counters["remote_fetches_absent"] += 1
                self._end(one, RemoteGoneError(code_text(code)))
            else:
                self.counters["remote_fetches_failed"] += 1
                why = "no answer" if codes is None else code_text(code)
                self._note("an object did not come from the remote", why)
                self._end(one, RemoteAwayError(why))

    # --- what came ---------------------------------------------------------------------------------------

    def _take_in(self, one: _Read, received_bytes: int) -> None:
        self._under_way += 1
        then = partial(self._proved, one)
        run = partial(self._prove, one, received_bytes)
        if not self._work.submit(run, then, is_store=False, cost=one.plan.fragments):
            then(RemoteAwayError("the gateway ends"))

    def _prove(self, one: _Read, received_bytes: int) -> None:
        """On a thread: prove what came as what it was there, and seal it as ours, by the checksums that were proved.

        Were they made anew, a late write would be sealed as right; like this, whoever looks at the slots finds it.
        """
        geometry, plan = self._card.geometry, one.plan
        slots = one.landing.views() if one.place is None else self._memory.views(one.place, plan.fragments)
        header = header_of(slots[0], plan.encoded_key, received_bytes, geometry)
        one.length = header.length
        if geometry.fragments(header.length) != plan.fragments:
            raise RemoteGoneError(f"it has {header.length} bytes, not {plan.length}")
        found = plan._replace(length=header.length)
        self._card.seal(found, slots, prove_received(slots, header, geometry))
        if one.place is not None:
            self._copy(found, one.part, slots, one.landing)

    def _copy(self, plan: GetPlan, part: Part, slots: Sequence[memoryview], landing: Landing) -> None:
        first = part.first_fragment
        try:
            self._card.copy(plan, slots[first : first + part.fragments], landing.views(), first)
        except CorruptObject as error:
            what = f"slots of an engine were written to while they were read into ({error})"
            raise SpoiltSlots(0, what) from error

    def _proved(self, one: _Read, error: Exception | None) -> None:
        self._under_way -= 1
        if isinstance(error, CorruptObject) and one.place is None and one.plan.fragments <= self._memory.slots:
            # The slots are an engine's: what it writes there meanwhile must cost nobody else the object.
            one.apart = True
            self._queue.appendleft(one)
            return
        if error is None:
            self.counters["remote_fetches"] += 1
            self.counters["remote_fetch_bytes"] += one.length
            for waiting in one.landing.waiting:
                waiting.plan = waiting.plan._replace(length=one.length)
            if one.landing.placed is not None:
                one.landing.placed.length = one.length
        elif isinstance(error, RemoteGoneError):
            self.counters["remote_fetches_absent"] += 1
            self._other(one.plan, one.length)
        elif isinstance(error, CorruptObject):
            self.counters["remote_fetches_corrupt"] += 1
            self._note("what came from the remote is not what was asked for", str(error))
            self._bad.append(remote_key(one.plan.encoded_key, self._card.geometry))
        self._end(one, error)

    def _end(self, one: _Read, error: Exception | None) -> None:
        """Nothing touches its slots any more."""
        if one.place is not None:
            self._memory.give(one.place)
        self._forget(one.landing)
        self._ended(one.landing, one.plan, error)

    def _forget(self, landing: Landing) -> None:
        if landing.placed is not None:
            del self._coming[landing.placed]
