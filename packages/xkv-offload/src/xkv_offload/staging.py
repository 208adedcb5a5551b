"""Verify before hit: objects that lie, verified, in the engine's ring before a lookup hits them (ADR 0007).

Owns: which request may take slots of the staged region, which objects are staged and for whom, when slots are let
go. Plans and books only; the reads themselves go through `Reads`.
Must not know: vLLM, the lookup table, how a read is made.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from .meter import Totals
from .transfer import StagedObject

logger = logging.getLogger(__name__)

REQUESTS_MAX = 1024  # that are looked up at once; vLLM runs far fewer, further ones miss
LEASE_SECONDS = 5.0  # vLLM asks again each step, unless it lacks pages for longer than that
GROUP_SHARE_MAX = 0.75  # of the region, for one group's chunks where there are others: their windows end a prefix
QUARANTINE_SECONDS = 60.0  # after a reset, for copies of jobs that vLLM tells nothing more of


class State(Enum):
    """Where one chunk's objects stand."""

    READING = auto()
    READY = auto()
    FAILED = auto()


class Answer(Enum):
    """What a lookup of a confirmed chunk is answered."""

    HIT = auto()
    PENDING = auto()
    MISS = auto()


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The end of one object's read: `object` counts the chunk's objects (one per rank)."""

    chunk: "Chunk"
    object: int
    generation: int
    length: int
    ok: bool
    denied: bool  # not to be believed any more: the card's copy is bad, or cannot be read


@dataclass(slots=True, eq=False)
class Chunk:
    """The objects of one key, on their way into the ring or there."""

    namespace: bytes
    key: bytes
    slots: tuple[tuple[int, ...], ...]  # per object
    state: State = State.READING
    outstanding: int = 0
    found: dict[int, StagedObject] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)  # requests that were told, or will be
    jobs: int = 0  # load jobs that copy from it

    @property
    def objects(self) -> tuple[StagedObject, ...]:
        """By rank, once READY."""
        return tuple(self.found[number] for number in range(len(self.slots)))


class Reads(Protocol):
    """The scheduler's attachment, as far as staging needs it; slots may be of several rings."""

    @property
    def slots(self) -> int:
        """Slots of the staged region."""

    @property
    def free(self) -> int:
        """Those of them that can be taken now."""

    def take(self, count: int) -> list[int] | None:
        """Slots for a chunk's objects, which are of one size, one's after the other's; None for want of free ones."""

    def give(self, slots: Sequence[int]) -> None:
        """Erase the headers of a chunk's slots, in the order in which they were taken, and take them back."""

    def start(self, chunk: Chunk) -> None:
        """Read every object of the chunk; each ends in `finished`, also where there is no gateway."""

    def send(self) -> None:
        """Let what was started begin: one message for all of a step."""

    def loaded(self) -> Sequence[Totals]:
        """What has been read, and in how much time, through each gateway."""

    def finished(self) -> Iterable[ReadDone]:
        """The ends of reads since the last call."""


@dataclass(slots=True)
class _Request:
    """One request that is being looked up.

    `may_wait`: for slots; not once it has waited too long, or holds all there are alone. `wants_more`: than there was
    room for, in its last pass of lookups.
    """

    since: float  # of its first lookup
    seen: float  # of its last lookup
    seen_step: int = -1
    is_late: bool = False
    may_wait: bool = True
    wants_more: bool = False
    failed: set[bytes] = field(default_factory=set)
    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    asked: dict[bytes, int] = field(default_factory=dict)  # the step of each chunk's last lookup
    group_slots: Counter[bytes] = field(default_factory=Counter)  # by the key's group, of all its chunks so far


class Staging:
    """All staged chunks of one engine. One thread (vLLM's scheduling thread)."""

    def __init__(self, reads: Reads, *, pending_seconds: float, groups: int) -> None:
        """`groups`: KV-cache groups whose chunks are stored."""
        self._reads = reads
        self.group_slots_max = reads.slots if groups == 1 else int(reads.slots * GROUP_SHARE_MAX)
        self._pending_seconds = pending_seconds
        self._chunks: dict[tuple[bytes, bytes], Chunk] = {}
        self._requests: dict[str, _Request] = {}
        self._queue: deque[str] = deque()  # by first lookup; all but the first have nothing or all they want
        self._in_jobs: dict[str, dict[bytes, Chunk]] = {}
        self._quarantine: deque[tuple[float, Chunk]] = deque()
        self._denied: list[tuple[bytes, bytes, int, int]] = []
        self._step = 0
        self._timeouts = 0

    # -- lookups ---------------------------------------------------------------------------------------------

    def lookup(
        self, *, req_id: str, namespace: bytes, key: bytes, objects: int, fragments: Callable[[], int]
    ) -> Answer:
        """What to answer for a chunk that the card holds, as `objects` objects of `fragments()` slots each."""
        self.poll()
        now = time.monotonic()
        request = self._request(req_id, now)
        if request is None or key in request.failed:
            return Answer.MISS
        request.asked[key] = self._step
        is_late = now - request.since > self._pending_seconds
        chunk = request.chunks.get(key)
        if chunk is None and not is_late:
            chunk = self._lease(request, req_id, (namespace, key), objects=objects, fragments=fragments)
        if chunk is not None and chunk.state is State.READY:
            return Answer.HIT
        if chunk is None and key in request.failed:
            return Answer.MISS
        if chunk is None or chunk.state is State.READING:
            if is_late and not request.is_late:
                request.is_late, request.may_wait, request.wants_more = True, False, False
                self._timeouts += 1
            waits = request.may_wait if chunk is None else not is_late
            return Answer.PENDING if waits else Answer.MISS
        self._drop(request, req_id, key)
        request.failed.add(key)
        return Answer.MISS

    def _request(self, req_id: str, now: float) -> _Request | None:
        request = self._requests.get(req_id)
        if request is None:
            if len(self._requests) >= REQUESTS_MAX:
                return None
            request = self._requests[req_id] = _Request(since=now, seen=now)
            self._queue.append(req_id)
        if request.seen_step != self._step:
            request.seen_step, request.wants_more = self._step, False
        request.seen = now
        return request

    def _lease(
        self, request: _Request, req_id: str, name: tuple[bytes, bytes], *, objects: int, fragments: Callable[[], int]
    ) -> Chunk | None:
        """A chunk for the request: staged already, or taken now; None if it is not its turn or there is no room."""
        if request.wants_more:
            return None  # what comes after a chunk that there was no room for is of no use
        if request.may_wait and not self._is_first(req_id):
            request.wants_more = True
            return None
        chunk = self._chunks.get(name)
        slots_each = fragments() if chunk is None else len(chunk.slots[0])
        group, slots_wanted = name[1][-4:], objects * slots_each
        if not slots_wanted or request.group_slots[group] + slots_wanted > self.group_slots_max:
            request.failed.add(name[1])
            return None
        if chunk is None:
            taken = self._reads.take(slots_wanted)
            if taken is None and self._drop_unasked(request, req_id):
                taken = self._reads.take(slots_wanted)
            if taken is None:
                self._no_room(request, slots_wanted)
                return None
            slots = tuple(tuple(taken[at : at + slots_each]) for at in range(0, len(taken), slots_each))
            chunk = self._chunks[name] = Chunk(*name, slots, outstanding=objects)
            self._reads.start(chunk)
        chunk.holders.add(req_id)
        request.chunks[name[1]] = chunk
        request.group_slots[group] += slots_wanted
        return chunk

    def _is_first(self, req_id: str) -> bool:
        """Whether it is this request's turn to take slots. Those before it that have all they want are passed."""
        while self._queue and self._queue[0] != req_id:
            first = self._requests.get(self._queue[0])
            if first is not None and first.wants_more:
                return False
            if first is not None:
                first.may_wait = False
            self._queue.popleft()
        return bool(self._queue)

    def _drop_unasked(self, request: _Request, req_id: str) -> bool:
        """Let go what this pass of lookups has not asked for: windows that ended a longer prefix than there is.

        Whether anything was let go.
        """
        unasked = [key for key in request.chunks if request.asked.get(key) != self._step]
        for key in unasked:
            self._drop(request, req_id, key)
        return bool(unasked)

    def _no_room(self, request: _Request, slots: int) -> None:
        """The first request waits, unless what it waits for are its own slots."""
        if not request.may_wait:
            return
        own = sum(len(each) for chunk in request.chunks.values() for each in chunk.slots)
        if slots > self._reads.slots - own or self._reads.slots - self._reads.free <= own:
            request.may_wait = False
        request.wants_more = request.may_wait

    # -- loads -----------------------------------------------------------------------------------------------

    def take_for_load(self, req_id: str, keys: Collection[bytes]) -> tuple[tuple[StagedObject, ...], ...]:
        """Hand the request's verified chunks `keys` to a load job; what else it holds is let go.

        Nothing for a key that was not verified for it: some releases load a window's first chunk without a lookup.
        """
        request = self._requests.get(req_id)
        jobs = self._in_jobs.setdefault(req_id, {})
        objects: list[tuple[StagedObject, ...]] = []
        for key in keys:
            chunk = request.chunks.get(key) if request is not None else None
            if chunk is None or chunk.state is not State.READY or key in jobs:
                objects.append(())
                continue
            chunk.jobs += 1
            jobs[key] = chunk
            objects.append(chunk.objects)
        self.forget(req_id)
        return tuple(objects)

    def loaded(self, req_id: str, keys: Iterable[bytes]) -> None:
        """The load job of these keys is over on every rank."""
        jobs = self._in_jobs.get(req_id, {})
        for key in keys:
            chunk = jobs.pop(key, None)
            if chunk is not None:
                chunk.jobs -= 1
                self._let_go(chunk)
        if not jobs:
            self._in_jobs.pop(req_id, None)

    # -- ends ------------------------------------------------------------------------------------------------

    def forget(self, req_id: str) -> None:
        """The request is looked up no more: what it holds and no job needs is let go."""
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        if req_id in self._queue:
            self._queue.remove(req_id)
        for key in list(request.chunks):
            self._drop(request, req_id, key)

    def end_step(self) -> None:
        """A step is planned. Requests that were not asked for since long lose what they hold."""
        self._step += 1
        self._reads.send()
        self.poll()
        now = time.monotonic()
        for req_id in [name for name, one in self._requests.items() if now - one.seen > LEASE_SECONDS]:
            self.forget(req_id)
        while self._quarantine and self._quarantine[0][0] <= now:
            _, chunk = self._quarantine.popleft()
            chunk.jobs -= 1
            self._let_go(chunk)

    def reset(self) -> None:
        """Nothing from before is looked up again, and vLLM reports none of its jobs."""
        for req_id in list(self._requests):
            self.forget(req_id)
        until = time.monotonic() + QUARANTINE_SECONDS
        for jobs in self._in_jobs.values():
            self._quarantine.extend((until, chunk) for chunk in jobs.values())
        self._in_jobs.clear()

    def reset_flushed(self) -> None:
        """Every job of before the reset is over on every rank."""
        while self._quarantine:
            _, chunk = self._quarantine.popleft()
            chunk.jobs -= 1
            self._let_go(chunk)

    def take_denied(self) -> list[tuple[bytes, bytes, int, int]]:
        """(namespace, key, object, generation) of objects whose read failed, since the last call."""
        taken, self._denied = self._denied, []
        return taken

    def take_timeouts(self) -> int:
        """How many requests have waited too long, since the last call."""
        taken, self._timeouts = self._timeouts, 0
        return taken

    @property
    def staged(self) -> int:
        """Chunks in the ring."""
        return len(self._chunks)

    # -- inside ----------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what has been read."""
        for done in self._reads.finished():
            chunk = done.chunk
            chunk.outstanding -= 1
            if done.ok:
                slots = chunk.slots[done.object]
                chunk.found[done.object] = StagedObject(done.generation, done.length, slots)
            else:
                chunk.state = State.FAILED
                if done.denied:
                    self._denied.append((chunk.namespace, chunk.key, done.object, done.generation))
            if chunk.outstanding == 0:
                if chunk.state is State.READING:
                    chunk.state = State.READY
                else:
                    self._unlist(chunk)
                self._let_go(chunk)

    def _drop(self, request: _Request, req_id: str, key: bytes) -> None:
        chunk = request.chunks.pop(key)
        request.group_slots[key[-4:]] -= sum(map(len, chunk.slots))
        chunk.holders.discard(req_id)
        self._let_go(chunk)

    def _unlist(self, chunk: Chunk) -> None:
        if self._chunks.get((chunk.namespace, chunk.key)) is chunk:
            del self._chunks[chunk.namespace, chunk.key]

    def _let_go(self, chunk: Chunk) -> None:
        """Give the slots back once nobody needs them and nothing is read into them."""
        if chunk.holders or chunk.jobs or not chunk.slots:
            return
        self._unlist(chunk)
        if chunk.outstanding:
            return  # until the last read has ended
        slots, chunk.slots = chunk.slots, ()
        self._reads.give([slot for own in slots for slot in own])
