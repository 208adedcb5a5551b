"""Proving a whole card behind the gateway's back: one piece at a time, for one tool that listens.

Owns the run: whose it is, where it stands, what it has found, and how little of the medium's time it takes.
Must not know sockets, sessions, or what a command makes of the findings. All of it runs on the event loop's thread,
save `_Piece.read`, which one of the pool's threads calls.

A run ends with whoever listens. What is evicted or replaced meanwhile is no damage; what gets find meanwhile is told.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from .database import aligned_slots
from .errors import CorruptObject, MediumError, PeerError
from .io_pool import IoPool, Job, Lane, WithdrawnError
from .key import ObjectKey
from .wire import PROBLEM_CHARS_MAX, DamagedObject, Verifying, VerifyState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .card import Card
    from .plans import GetPlan

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 << 20  # read and proved at a time: a few milliseconds, for which a load may have to wait
KEYS_AHEAD: Final = 256  # fetched from the index at a time: a tenth of a millisecond on the event loop
SKIPS_PER_STEP_MAX: Final = 1_024  # keys passed over in one step, where objects leave faster than they are proved
PAUSES_WHEN_BUSY: Final = (
    3  # a piece's time is waited so often where there were loads or stores: a quarter of one thread
)
SAY_NS: Final = 250_000_000  # how often progress is told
DAMAGED_PER_MESSAGE_MAX: Final = 64  # a problem of 200 characters of 4 bytes, a key of 55: they fit a message


class Listener(Protocol):
    """Who asked for a run."""

    @property
    def caught_up(self) -> bool:
        """Whether it has taken all that it was told."""

    def tell(self, message: Verifying) -> None:
        """Send this."""


@dataclass(slots=True, eq=False)
class _Run:
    listener: Listener
    ask: int
    drop: bool
    total: int
    newest: int  # generation when it began; an object put since then is not its business, or it might never end
    slots: Sequence[memoryview]
    said_ns: int
    next_ns: int = 0
    last_key: bytes = b""
    ahead: deque[bytes] = field(default_factory=deque)
    plan: GetPlan | None = None
    fragment: int = 0
    objects: int = 0
    gone: int = 0
    proved_bytes: int = 0
    unsaid: deque[DamagedObject] = field(default_factory=deque)
    told: set[int] = field(default_factory=set)  # generations; the card's objects bound it
    others: int = 0  # jobs that the pool had got for others when the last piece began


@dataclass(slots=True, eq=False)
class _Piece:
    """One read, on its way through the pool."""

    run: _Run
    plan: GetPlan
    first_fragment: int
    slots: Sequence[memoryview]
    card: Card
    took_ns: int = 0

    def read(self) -> None:
        begun_ns = time.monotonic_ns()
        try:
            self.card.read(self.plan, self.slots, self.first_fragment)
        finally:
            self.took_ns = time.monotonic_ns() - begun_ns


class Prover:
    """At most one run, and at most one piece of it on its way."""

    def __init__(self, card: Card, pool: IoPool) -> None:
        self._card = card
        self._pool = pool
        self._run: _Run | None = None
        self._pieces: dict[Job, _Piece] = {}  # an ended run's last one may still be among them
        self.counters: Counter[str] = Counter()

    @property
    def running(self) -> bool:
        """Whether there is a run."""
        return self._run is not None

    # --- who listens -------------------------------------------------------------------------------------

    def begin(self, listener: Listener, ask: int, *, drop: bool) -> None:
        """Prove every object that the card holds; BUSY where that is being done already."""
        if self._run is not None:
            busy = f"the card is being proved already ({self._run.objects} of {self._run.total} objects so far)"
            listener.tell(Verifying(ask, VerifyState.BUSY, 0, 0, 0, 0, (), busy))
            return
        slot_bytes = self._card.geometry.slot_bytes
        slots = aligned_slots(max(1, PIECE_BYTES // slot_bytes), slot_bytes)
        self._run = _Run(listener, ask, drop, self._card.objects, self._card.generation, slots, time.monotonic_ns())
        self.counters["verify_runs"] += 1
        log.info("proving %d objects", self._run.total)

    def leave(self, listener: Listener) -> None:
        """It listens no more: its run is over."""
        run = self._run
        if run is not None and run.listener is listener:
            log.info("nobody waits for the proof any more: ending it after %d objects", run.objects)
            self._over(run)

    def stop(self) -> None:
        """The gateway ends."""
        if self._run is not None:
            self._end(self._run, VerifyState.STOPPED, "the gateway is ending")

    def noticed(self, plan: GetPlan, problem: str) -> None:
        """A get met damage, and took the object off the card."""
        if self._run is not None:
            self._damaged(self._run, plan, problem, dropped=True)

    # --- the loop's rounds -------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int | None:
        """Go on as far as is fair; in how many ns to call again at the latest (None: nothing is to be done)."""
        run = self._run
        if run is None:
            return None
        if not run.listener.caught_up:
            return SAY_NS  # its end, or its reading on, wakes the loop
        if run.unsaid or now_ns - run.said_ns >= SAY_NS:
            run.said_ns = now_ns
            self._say(run, VerifyState.RUNNING)
        if any(piece.run is run for piece in self._pieces.values()):
            return SAY_NS
        if now_ns < run.next_ns:
            return run.next_ns - now_ns
        try:
            self._next_piece(run)
        except MediumError as error:
            self._end(run, VerifyState.FAILED, str(error))
        return 0 if run.plan is None else SAY_NS

    def ended(self, job: Job) -> None:
        """One of this lane's jobs has ended."""
        piece = self._pieces.pop(job)
        run = piece.run
        if run is not self._run:
            self._card.end_get(piece.plan)
            return
        busy = self._pool.others != run.others
        run.next_ns = time.monotonic_ns() + (piece.took_ns * PAUSES_WHEN_BUSY if busy else 0)
        if job.error is None:
            run.fragment += len(piece.slots)
            if run.fragment < piece.plan.fragments:
                return
        run.plan = None
        self._card.end_get(piece.plan)
        self._judge(run, piece.plan, job.error)

    # --- inside ------------------------------------------------------------------------------------------

    def _next_piece(self, run: _Run) -> None:
        if run.plan is None:
            run.plan = self._next_object(run)
            run.fragment = 0
        if run.plan is None:
            return
        left = run.plan.fragments - run.fragment
        piece = _Piece(run, run.plan, run.fragment, run.slots[: min(left, len(run.slots))], self._card)
        job = Job(Lane.PROOF, piece.read)
        self._pieces[job] = piece
        run.others = self._pool.others
        if not self._pool.submit(job):
            del self._pieces[job]  # the pool is ending, and so will this run

    def _next_object(self, run: _Run) -> GetPlan | None:
        """Pin the next object that is still there; None where the run has ended, or too many were not."""
        for _ in range(SKIPS_PER_STEP_MAX):
            if not run.ahead:
                run.ahead.extend(self._card.contents.keys_after(run.last_key, KEYS_AHEAD))
                if not run.ahead:
                    self._end(run, VerifyState.ENDED, "")
                    return None
            run.last_key = run.ahead.popleft()
            try:
                plan = self._card.begin_proof(ObjectKey.decode(run.last_key))
            except PeerError:
                plan = None  # an entry that is damaged itself: never served, and removed by the next start
            if plan is None:
                run.gone += 1
            elif plan.generation > run.newest:
                self._card.end_get(plan)
            else:
                return plan
        return None

    def _judge(self, run: _Run, plan: GetPlan, error: Exception | None) -> None:
        if isinstance(error, WithdrawnError):
            return
        run.objects += 1
        self.counters["verified_objects"] += 1
        if error is None:
            run.proved_bytes += plan.length
        elif not self._card.holds(plan):
            run.objects -= 1
            run.gone += 1
        else:
            problem = str(error) if isinstance(error, MediumError) else f"{type(error).__name__}: {error}"
            bad = isinstance(error, CorruptObject) or (isinstance(error, MediumError) and error.errno == errno.EIO)
            if bad and run.drop:
                self._card.drop(
                    plan.key, plan.generation, "corrupt" if isinstance(error, CorruptObject) else "unreadable"
                )
            self._damaged(run, plan, problem, dropped=bad and run.drop)

    def _damaged(self, run: _Run, plan: GetPlan, problem: str, *, dropped: bool) -> None:
        if plan.generation in run.told:
            return
        run.told.add(plan.generation)
        self.counters["verified_damaged"] += 1
        log.warning("damaged: object %s, generation %d: %s", plan.encoded_key.hex(), plan.generation, problem)
        run.unsaid.append(
            DamagedObject(plan.encoded_key, plan.generation, plan.length, problem[:PROBLEM_CHARS_MAX], dropped)
        )

    def _say(self, run: _Run, state: VerifyState, reason: str = "") -> None:
        damaged = tuple(run.unsaid.popleft() for _ in range(min(len(run.unsaid), DAMAGED_PER_MESSAGE_MAX)))
        total = max(run.total, run.objects)
        run.listener.tell(Verifying(run.ask, state, run.objects, total, run.gone, run.proved_bytes, damaged, reason))

    def _end(self, run: _Run, state: VerifyState, reason: str) -> None:
        while len(run.unsaid) > DAMAGED_PER_MESSAGE_MAX:
            self._say(run, VerifyState.RUNNING)
        self._say(run, state, reason)
        log.info("proved %d objects, %d of them damaged", run.objects, len(run.told))
        self._over(run)

    def _over(self, run: _Run) -> None:
        self._run = None
        if run.plan is not None and not any(piece.run is run for piece in self._pieces.values()):
            self._card.end_get(run.plan)
