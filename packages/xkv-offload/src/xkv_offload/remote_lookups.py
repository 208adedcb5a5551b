"""Lookups of what the card lacks, where its gateway has a remote: asked, fetched, remembered (ADR 0017).

Owns: what was asked and what came of it, for how long that is remembered, how long a request waits.
Plans and books only; questions go through `Seeks`, one batch for each step, and none beyond what vLLM looks up.
Must not know: vLLM, the lookup table, what a remote is.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Protocol

from xkv_store.client_seeks import SoughtObject, SoughtStatus
from xkv_store.key import ObjectKey, chunk_tag, rank_bit

from .entries import Entry

CHUNKS_MAX = 1 << 16  # remembered; beyond it the oldest are forgotten, and asked for again
REQUESTS_MAX = 1 << 14  # that have waited; vLLM tells of the end of each
ABSENT_SECONDS = 5.0  # what the remote does not have is not asked for again; another machine may put it
FAILED_SECONDS = 1.0  # nor is what came to nothing
FOUND_SECONDS = 2.0  # what the remote has is believed to be there; the remote may drop it
ANSWER_SECONDS = 10.0  # a question without an answer is forgotten: the gateway's own bounds are shorter


class Seeks(Protocol):
    """The scheduler's session, as far as it is needed here (`xkv_store.client_seeks`)."""

    @property
    def usable(self) -> bool:
        """Whether the gateway has a remote."""

    def ask(
        self, objects: Sequence[tuple[ObjectKey, int]], *, fetch: bool, on_answer: Callable[[SoughtObject], None]
    ) -> None:
        """Each of the objects (key, fragments) is answered once, by its index, on any thread."""


class _State(Enum):
    ASKED = auto()
    FOUND = auto()
    FETCHING = auto()
    ABSENT = auto()


@dataclass(slots=True, eq=False)
class _Chunk:
    """What is known of a chunk, until when. `outstanding`: objects of which no answer has come yet."""

    key: bytes
    state: _State
    until: float
    outstanding: int
    worst: SoughtStatus = SoughtStatus.FOUND


def lacking_objects(
    namespace: bytes, key: bytes, entries: Iterable[Entry], lookup: Callable[[int], tuple[int, int] | None]
) -> list[ObjectKey]:
    """The objects of a chunk that the card does not hold. `lookup`: of its table."""
    lacking: list[ObjectKey] = []
    group, block_hash = int.from_bytes(key[-4:], "big"), key[:-4]
    for salt, _, ranks in entries:
        found = lookup(chunk_tag(salt, block_hash))
        there = 0 if found is None else found[1]
        lacking += [ObjectKey(namespace, group, block_hash, rank) for rank in ranks if not there & rank_bit(rank)]
    return lacking


class RemoteLookups:
    """Of one engine. One thread (vLLM's scheduling thread)."""

    def __init__(self, seeks: Seeks, *, pending_seconds: float, fragments: Mapping[int, int]) -> None:
        """`fragments`: of a whole chunk's object, by vLLM's group number (0: the group is never stored)."""
        self._seeks = seeks
        self._pending_seconds = pending_seconds
        self._fragments = fragments
        self._chunks: dict[bytes, _Chunk] = {}
        self._since: dict[str, float] = {}  # a request's first wait
        self._asks: list[tuple[_Chunk, Sequence[ObjectKey]]] = []
        self._fetches: list[tuple[_Chunk, Sequence[ObjectKey]]] = []
        self._answers: deque[tuple[_Chunk, SoughtStatus]] = deque()  # appended to by the client's thread
        self._late: set[str] = set()
        self._timeouts = 0
        self._is_off = False

    def waits(self, req_id: str, key: bytes, lacking: Callable[[bytes], Sequence[ObjectKey]]) -> bool:
        """Whether a chunk that the card lacks may still come: the lookup is to be asked again.

        `lacking(key)`: the chunk's objects that the card does not have.
        """
        if self._is_off or not self._seeks.usable or not self._fragments.get(int.from_bytes(key[-4:], "big")):
            return False
        self._take_in()
        now = time.monotonic()
        chunk = self._chunks.get(key)
        if chunk is not None and chunk.until <= now:
            del self._chunks[key]
            chunk = None
        if chunk is not None and chunk.state is _State.ABSENT:
            return False
        if not self._may_wait(req_id, now):
            return False
        if chunk is None or chunk.state is _State.FOUND:
            objects = lacking(key)
            if chunk is None and objects:
                self._asks.append((self._begin(key, _State.ASKED, len(objects), now), objects))
            elif objects:
                self._fetches.append((self._begin(key, _State.FETCHING, len(objects), now), objects))
        return True  # also where the card has all of them by now

    def _may_wait(self, req_id: str, now: float) -> bool:
        since = self._since.get(req_id)
        if since is None:
            since = self._since[req_id] = now
            if len(self._since) > REQUESTS_MAX:
                self.forget(next(iter(self._since)))
        if now - since <= self._pending_seconds:
            return True
        if req_id not in self._late:
            self._late.add(req_id)
            self._timeouts += 1
        return False

    def _begin(self, key: bytes, state: _State, objects: int, now: float) -> _Chunk:
        chunk = _Chunk(key, state, now + ANSWER_SECONDS, objects)
        self._chunks.pop(key, None)
        self._chunks[key] = chunk
        if len(self._chunks) > CHUNKS_MAX:
            self._chunks.pop(next(iter(self._chunks)))
        return chunk

    def end_step(self) -> None:
        """A step's lookups are over: ask, in one batch, and have what was found before brought."""
        asks, self._asks = self._asks, []
        fetches, self._fetches = self._fetches, []
        for batch, fetch in ((asks, False), (fetches, True)):
            objects = [(key, self._fragments[key.group]) for _, keys in batch for key in keys]
            if objects:
                chunks = [chunk for chunk, keys in batch for _ in keys]
                self._seeks.ask(objects, fetch=fetch, on_answer=partial(self._answered, chunks))

    def _answered(self, chunks: Sequence[_Chunk], answer: SoughtObject) -> None:
        """On the client's thread, or within `end_step`."""
        self._answers.append((chunks[answer.index], SoughtStatus(answer.status)))

    def _take_in(self) -> None:
        now = time.monotonic()
        while self._answers:
            chunk, status = self._answers.popleft()
            chunk.outstanding -= 1
            chunk.worst = max(chunk.worst, status)
            if chunk.outstanding or self._chunks.get(chunk.key) is not chunk:
                continue
            if chunk.worst is not SoughtStatus.FOUND:
                chunk.state = _State.ABSENT
                chunk.until = now + (ABSENT_SECONDS if chunk.worst is SoughtStatus.ABSENT else FAILED_SECONDS)
            elif chunk.state is _State.ASKED:
                chunk.state, chunk.until = _State.FOUND, now + FOUND_SECONDS
            else:
                del self._chunks[chunk.key]  # the card has it: its table says so

    def forget(self, req_id: str) -> None:
        """The request is looked up no more."""
        self._since.pop(req_id, None)
        self._late.discard(req_id)

    def take_timeouts(self) -> int:
        """How many requests have waited too long, since the last call."""
        taken, self._timeouts = self._timeouts, 0
        return taken

    def stop(self) -> None:
        """From now on the namespace is this launch's own: nobody else's objects can be hit."""
        self._is_off = True
        self._chunks.clear()
        self._asks.clear()
        self._fetches.clear()
