"""Objects on their way from the remote to the card, for lookups that wait for them.

Owns: who waits for which object, where each lies meanwhile, and that everybody is answered once, at the latest when
the card has confirmed it. Must not know: sessions' rules, messages, the library. All of it runs on the event loop's
thread, save the proof and the write.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from .card import PutPlan, PutRefusal
from .errors import CorruptObject, MediumError
from .remote_format import header_of, prove_received, remote_key
from .remote_pace import Expected, Pace
from .remote_words import NOT_FOUND, Lane, code_text
from .wire_remote import SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .card import Card
    from .key import ObjectKey
    from .layout import SlotHeader
    from .remote_link import Process
    from .remote_memory import Place, RemoteMemory
    from .remote_work import RemoteWork

    OnSought = Callable[[SoughtStatus], None]

FETCHES_MAX: Final = 16_384  # objects that are waited for: a few requests of the longest prompts
TOGETHER_MAX: Final = 256  # objects of one load
LOAD_NS: Final = 500_000_000  # of one load: an engine waits for 2 s, and what has come is proved and written meanwhile
ADMIT_NS_MIN: Final = 250_000_000  # between two attempts: each looks for what may leave
ADMITTED_NS_MAX: Final = 1_500_000_000  # after it was asked for: a full card makes room, and an engine waits for 2 s
WAITS_NS_MAX: Final = 4_000_000_000  # for its turn: an engine has given up by then


@dataclass(slots=True, eq=False)
class _Fetch:
    """One object. `family`: of all that was asked for with it; `place`: where it lies while it is under way."""

    key: ObjectKey
    encoded: bytes
    fragments: int
    family: int
    since_ns: int
    waiting: list[OnSought] = field(default_factory=list)
    place: Place | None = None


class RemoteFetches:
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
        self._pace = Pace(call_ns=LOAD_NS)
        self._expected = Expected(card.geometry.slot_bytes)
        self._fetches: dict[bytes, _Fetch] = {}
        self._queue: deque[_Fetch] = deque()
        self._refused: list[tuple[_Fetch, SlotHeader]] = []  # by the card, for want of slots
        self._admit_after_ns = 0
        self._unconfirmed: dict[int, _Fetch] = {}  # by generation
        self._bad: deque[str] = deque(maxlen=TOGETHER_MAX)  # remote keys of what was no such object
        self.writing = 0
        """Objects that are being written to the card, or wait for their commit."""
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._fetches)

    def add(self, key: ObjectKey, fragments: int, family: int, on_sought: OnSought, now_ns: int) -> None:
        """Bring this, to be put with that family; `on_sought` hears how it went, maybe in this call."""
        encoded = key.encode()
        fetch = self._fetches.get(encoded)
        if fetch is not None:
            fetch.waiting.append(on_sought)
        elif self._card.table.holds(key.tag, key.bit):
            on_sought(SoughtStatus.FOUND)
        elif not self._link.is_up or len(self._fetches) >= FETCHES_MAX or fragments > self._memory.slots:
            self.counters["remote_fetches_refused"] += 1
            on_sought(SoughtStatus.FAILED)
        else:
            fetch = _Fetch(key, encoded, fragments, family, now_ns, [on_sought])
            self._fetches[encoded] = fetch
            self._queue.append(fetch)

    def step(self, now_ns: int) -> None:
        """Do what can be done now."""
        while self._queue and (not self._link.is_up or now_ns - self._queue[0].since_ns > WAITS_NS_MAX):
            self._end(self._queue.popleft(), SoughtStatus.FAILED)
        if self._refused and now_ns >= self._admit_after_ns:
            self._admit_after_ns = now_ns + ADMIT_NS_MIN
            refused, self._refused = self._refused, []
            for fetch, header in refused:
                self._admit(fetch, header)
        while self._queue and self._link.has_room(Lane.LOAD) and self._begin():
            pass
        if self._bad and self._link.has_room(Lane.LOOK):
            keys = list(self._bad)
            self._bad.clear()
            self._link.call(Lane.LOOK, keys, lambda _codes: None, remove=True)

    def _begin(self) -> bool:
        """Ask for the first few at once; whether there was room for any."""
        taken: list[_Fetch] = []
        total = 0
        while self._queue and len(taken) < TOGETHER_MAX:
            fragments = self._queue[0].fragments
            total += self._expected.of(fragments)
            if taken and total > self._pace.bytes:
                break
            place = self._memory.take(fragments, is_store=False)
            if place is None:
                break
            fetch = self._queue.popleft()
            fetch.place = place
            taken.append(fetch)
        if taken:
            self._link.call(
                Lane.LOAD,
                [remote_key(fetch.encoded, self._card.geometry) for fetch in taken],
                partial(self._came, taken, time.monotonic_ns()),
                offsets=tuple(fetch.place.offset for fetch in taken if fetch.place is not None),
                sizes=tuple(fetch.fragments * self._card.geometry.slot_bytes for fetch in taken),
            )
        return bool(taken)

    def _came(self, taken: Sequence[_Fetch], begun_ns: int, codes: Sequence[int] | None) -> None:
        if codes is None:
            self._expected.forget()
            self._pace.failed(time.monotonic_ns())
        else:
            self._pace.ended(sum(code for code in codes if code > 0), begun_ns, time.monotonic_ns())
            self._expected.came((fetch.fragments, code) for fetch, code in zip(taken, codes, strict=True))
        for fetch, code in zip(taken, codes or [-1] * len(taken), strict=True):
            if 0 < code <= fetch.fragments * self._card.geometry.slot_bytes:
                self._take_in(fetch, code)
            elif code == NOT_FOUND:
                self.counters["remote_fetches_absent"] += 1
                self._end(fetch, SoughtStatus.ABSENT)
            else:
                self.counters["remote_fetches_failed"] += 1
                self._note("an object did not come from the remote", "no answer" if codes is None else code_text(code))
                self._end(fetch, SoughtStatus.FAILED)

    def _take_in(self, fetch: _Fetch, received_bytes: int) -> None:
        """It is in our memory: have it proved and written, if the card takes it."""
        assert fetch.place is not None
        geometry = self._card.geometry
        try:
            first = self._memory.views(fetch.place, 1)[0]
            header = header_of(first, fetch.encoded, received_bytes, geometry)
        except CorruptObject as error:
            self._corrupt(fetch, error)
            return
        self._admit(fetch, header)

    def _admit(self, fetch: _Fetch, header: SlotHeader) -> None:
        assert fetch.place is not None
        plan = self._card.begin_put(
            fetch.key, header.length, fetch.family, header.position, replace=False, now_ns=time.monotonic_ns()
        )
        if isinstance(plan, PutRefusal):
            self._not_admitted(fetch, header, plan)
            return
        slots = self._memory.views(fetch.place, plan.fragments)
        run = partial(self._prove_and_write, plan, header, slots)
        self.writing += 1
        then = partial(self._written, fetch, plan)
        if not self._work.submit(run, then, is_store=False, cost=plan.fragments):
            then(MediumError(0, "no room"))

    def _not_admitted(self, fetch: _Fetch, header: SlotHeader, refusal: PutRefusal) -> None:
        """The card has it, or an engine is putting it just now; or it has no slots, and makes some free meanwhile."""
        if refusal in {PutRefusal.HELD, PutRefusal.BUSY}:
            self.counters["remote_fetches_held"] += 1
            self._end(fetch, SoughtStatus.FOUND)
        elif refusal is PutRefusal.SHED and time.monotonic_ns() - fetch.since_ns < ADMITTED_NS_MAX:
            self._refused.append((fetch, header))
        else:
            self.counters["remote_fetches_not_admitted"] += 1
            self._end(fetch, SoughtStatus.FAILED)

    def _prove_and_write(self, plan: PutPlan, header: SlotHeader, slots: Sequence[memoryview]) -> None:
        """On a thread: prove what came as what it was there, then seal it as ours, by the checksums that were proved.

        Were they made anew, a late write of the library's would be sealed as right; like this it is found.
        """
        sums = prove_received(slots, header, self._card.geometry)
        self._card.write(plan, slots, sums)

    def _written(self, fetch: _Fetch, plan: PutPlan, error: Exception | None) -> None:
        if error is None:
            self._card.finish_put(plan, None)
            self._unconfirmed[plan.generation] = fetch
            self.counters["remote_fetch_bytes"] += plan.length
            return
        self.writing -= 1
        failed = error if isinstance(error, MediumError) else MediumError(0, f"{type(error).__name__}: {error}")
        self._card.finish_put(plan, failed)
        if isinstance(error, CorruptObject):
            self._corrupt(fetch, error)
            return
        self.counters["remote_fetches_failed"] += 1
        self._note("what came from the remote was not written", str(failed))
        self._end(fetch, SoughtStatus.FAILED)

    def _corrupt(self, fetch: _Fetch, error: CorruptObject) -> None:
        """It is a miss, and the remote is told to forget it."""
        self.counters["remote_fetches_corrupt"] += 1
        self._note("what came from the remote is not what was asked for", str(error))
        self._bad.append(remote_key(fetch.encoded, self._card.geometry))
        self._end(fetch, SoughtStatus.ABSENT)

    def settle(self, plan: PutPlan, *, is_confirmed: bool) -> bool:
        """The card has confirmed this put, or will not; whether it was one of these."""
        fetch = self._unconfirmed.pop(plan.generation, None)
        if fetch is None:
            return False
        self.writing -= 1
        if is_confirmed:
            self.counters["remote_fetches"] += 1
            if fetch.place is not None:  # its slots are the card's, byte for byte: whoever waits for it loads it soon
                self._memory.keep(fetch.place, plan.generation)
                fetch.place = None
        else:
            self.counters["remote_fetches_failed"] += 1
        self._end(fetch, SoughtStatus.FOUND if is_confirmed else SoughtStatus.FAILED)
        return True

    def _give(self, fetch: _Fetch) -> None:
        if fetch.place is not None:
            self._memory.give(fetch.place)
            fetch.place = None

    def _end(self, fetch: _Fetch, status: SoughtStatus) -> None:
        self._give(fetch)
        del self._fetches[fetch.encoded]
        for on_sought in fetch.waiting:
            on_sought(status)
