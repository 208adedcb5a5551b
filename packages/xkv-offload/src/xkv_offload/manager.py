"""The scheduler's side: what is held, what is stored, where a job finds it.

Owns: answers to vLLM's scheduler, from shared memory alone (lookup table, control page): no message and no wait on
vLLM's scheduling thread. The decision to shed a store, so that all ranks agree. The set of keys that are stored and
not yet confirmed.
Must not know: bytes, slots, tensors, how the gateway is reached; vLLM's classes (they come in by `Words`).
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from xkv_store.key import chunk_tag
from xkv_store.left_out import LeftOut

from .announcements import Announcements
from .asked import AskCounts
from .asked_card import NO_DENIALS, Card
from .entries import Entry, entries, gateway_of
from .identity import after_reset
from .measuring import JobTimes, LookupTimes
from .metrics import Increments
from .remote_lookups import RemoteLookups, lacking_objects
from .restore_policy import RestorePolicy
from .staging import Answer, Staging
from .transfer import StagedObject, XkvTransferSpec

logger = logging.getLogger(__name__)

PENDING_KEYS_MAX = 1 << 16  # stored, not yet confirmed: beyond it the oldest are forgotten (and may be stored twice)
PENDING_SECONDS = 10.0  # an object that is not confirmed by then has failed and may be stored again
TOUCHED_MAX = 1 << 14  # recency of one step; more is dropped: recency is a hint
REQUESTS_MAX = 1 << 16  # that have stored; 0.26 stores once more after it said that a request has finished
DENIED_MAX = 1 << 16  # failed loads that are remembered; beyond it the oldest are forgotten
SHED_LOG_SECONDS = 60.0

_R = TypeVar("_R")
_clock = time.perf_counter  # twice for each lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """vLLM's vocabulary on this release, found by compat."""

    miss: object
    hit: object
    pending: object
    prepare_store_output: Callable[..., object]
    request_context: Callable[[], object]
    stats: Callable[[], Any]
    load_source: object | None
    features: Mapping[str, bool]
    event: Callable[[Sequence[bytes], bool], object] | None = None  # of keys, removed or stored; None: nobody listens


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerOptions:
    """What is fixed when an engine starts.

    `group_bytes`: by vLLM's group number, bytes of the ring that a whole chunk takes on one rank, in whole slots
    (0: the group is never stored).
    `store_backlog_bytes`: per rank. `loads`, `stores`: by vLLM's kv_role. `gateways`: one, or one for each rank.
    `store_threshold`: a chunk is stored once so many requests have asked for it; 0 and 1 are the first time.
    """

    namespace: bytes
    ranks: int
    group_bytes: Mapping[int, int]
    store_backlog_bytes: int
    loads: bool
    stores: bool
    gateways: int = 1
    store_threshold: int = 0


@dataclass(slots=True)
class _Request:
    """What is remembered of a request while it stores: its arrival (µs since 1970) and the next chunk's place."""

    family: int
    next_position: int = 0
    shedding: bool = False


class XkvManager:
    """OffloadingManager of xkv. All methods run on vLLM's scheduling thread.

    No exception leaves a method: it is counted, logged, and answered like a miss or an empty store.
    """

    def __init__(
        self,
        *,
        card: Card,
        options: ManagerOptions,
        words: Words,
        staging: Staging | None = None,
        policy: RestorePolicy | None = None,
        remote: RemoteLookups | None = None,
    ) -> None:
        """`staging`: where hits are verified before they are given (ADR 0007). `policy`: where they may be declined.

        `remote`: where what the card lacks may come from elsewhere (ADR 0017).
        """
        self._card = card
        self._policy = policy
        self._remote = remote
        self._staging = staging
        self._options = options
        self._words = words
        self._answers = {
            Answer.HIT: ("lookup_hits", words.hit),
            Answer.PENDING: ("lookup_pending", words.pending),
            Answer.MISS: ("lookup_unverified", words.miss),
        }
        self._loads, self._hit, self._miss = options.loads, words.hit, words.miss
        self._counts = Increments()
        self._lookup_times = LookupTimes(self._counts)
        self._job_times = JobTimes(self._counts, options.group_bytes)
        self._namespace = options.namespace
        self._entries: dict[bytes, tuple[Entry, ...]] = {}  # of each group's chunks
        self._touched: list[int] = []
        self._denied: dict[int, int] = {}
        self._denied_up_to: dict[int, int] = {}  # by gateway, each counts generations of its own
        self._pending: dict[bytes, tuple[float, tuple[int, ...]]] = {}  # until when, and what was denied of it by then
        self._prepared_bytes: dict[bytes, int] = {}
        self._requests: dict[str, _Request] = {}
        self._announced = Announcements(partial(self._held, touch=False)) if words.event is not None else None
        self._live: set[str] = set()  # vLLM's requests, no more than it holds itself
        self._stale: set[str] = set()
        self._shed_logged = -SHED_LOG_SECONDS
        self._asked = AskCounts() if options.store_threshold > 1 else None

    # -- lookups ---------------------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> object:
        """HIT if every rank's object of `key` is confirmed on the card, else MISS.

        Where hits are verified first: HIT_PENDING until the bytes lie verified in the ring.
        """
        times, req_id = self._lookup_times, req_context.req_id
        begun = _clock()
        try:  # and not `_guarded`: of a thousand calls in a row each tenth of a microsecond shows
            answer = self._lookup(key, req_id)
            times.step_seconds += _clock() - begun
            waits = answer is self._words.pending
            if waits or times.waiting:
                times.answered(begun, req_id, waits=waits)
        except Exception:  # noqa: BLE001 - whatever it is, it must not reach vLLM
            answer = self._survive(self._lookup, self._miss)
        return answer

    def _lookup(self, key: bytes, req_id: str) -> object:
        if not self._loads:
            return self._miss
        card = self._card
        if not card.alive():
            self._counts.add("lookup_no_gateway")
            self._counts.miss("no_gateway")
            return self._miss
        denials = card.denials()
        if denials is not NO_DENIALS:
            self._take_denials(*denials)
        lacking = self._lacking(key, touch=True)
        if lacking:
            return self._lacks(key, req_id, lacking)
        if self._announced is not None:
            self._announced.found(key)
        if self._policy is not None and not self._policy.allows(req_id, key):
            self._counts.add("lookup_declined")
            self._counts.miss("declined")
            return self._miss
        if self._staging is None:
            self._counts.since["lookup_hits"] += 1
            return self._hit
        found = self._verified(self._staging, key, req_id)
        counted, answer = self._answers[found]
        self._counts.add(counted)
        if found is Answer.MISS:
            self._counts.miss("unverified")
        return answer

    def _lacks(self, key: bytes, req_id: str, why: str) -> object:
        """What to answer for a chunk that the card lacks: it may still come from the remote."""
        remote = self._remote
        if remote is not None and why != "denied":
            entries, lookup = self._entries_of(key), self._card.table.lookup
            waits = remote.waits(req_id, key, lambda key: lacking_objects(self._namespace, key, entries, lookup))
            if timeouts := remote.take_timeouts():
                self._counts.add("remote_timeouts", timeouts)
            if waits:
                self._counts.add("lookup_remote")
                return self._words.pending
        self._counts.add("lookup_misses")
        if why == "denied":
            self._counts.add("lookup_denied")
        self._counts.miss(why)
        return self._miss

    def _verified(self, staging: Staging, key: bytes, req_id: str) -> Answer:
        """What staging says of a chunk that the card holds."""
        answer = staging.lookup(
            req_id=req_id,
            namespace=self._namespace,
            key=key,
            objects=self._options.ranks,
            fragments=lambda: max(self._card.fragments(tag) for tag in self._tags(key)),
        )
        if timeouts := staging.take_timeouts():
            self._counts.add("pending_timeouts", timeouts)
        for namespace, denied, rank, generation in staging.take_denied():
            self._counts.add("verify_failures")
            if namespace == self._namespace:
                for entry in self._entries_of(denied):
                    if rank in entry.ranks:
                        self._deny(chunk_tag(entry.salt, denied[:-4]), generation)
        return answer

    def _held(self, key: bytes, *, touch: bool) -> bool:
        """Whether all ranks' objects are confirmed and not denied."""
        return not self._lacking(key, touch=touch)

    def _lacking(self, key: bytes, *, touch: bool) -> str:
        """Why `key` misses: absent, incomplete (some rank's object is not there) or denied; nothing where it hits."""
        lookup = self._card.table.lookup
        block_hash = key[:-4]
        denied = self._denied or self._denied_up_to
        others = False
        for salt, bits, _ in self._entries.get(key[-4:]) or self._entries_of(key):
            tag = chunk_tag(salt, block_hash)
            found = lookup(tag)
            if found is None or found[1] & bits != bits:
                return "incomplete" if others or (found is not None and found[1] & bits) else "absent"
            if denied and self._is_denied(tag, found[0]):
                return "denied"
            others = True
            if touch and len(self._touched) < TOUCHED_MAX:
                self._touched.append(tag)
        return ""

    def _entries_of(self, key: bytes) -> tuple[Entry, ...]:
        """The entries that a hit of `key` needs."""
        group = key[-4:]
        found = self._entries.get(group)
        if found is None:
            number, options = int.from_bytes(group, "big"), self._options
            found = entries(self._namespace, number, ranks=options.ranks, gateways=options.gateways)
            self._entries[group] = found
        return found

    def _tags(self, key: bytes) -> list[int]:
        return [chunk_tag(salt, key[:-4]) for salt, _, _ in self._entries_of(key)]

    def _is_denied(self, tag: int, generation: int) -> bool:
        return generation <= self._denied.get(tag, -1) or (
            bool(self._denied_up_to) and generation <= self._denied_up_to.get(gateway_of(tag), -1)
        )

    def _deny(self, tag: int, generation: int) -> None:
        self._denied[tag] = max(generation, self._denied.pop(tag, -1))

    def _take_denials(self, denials: Sequence[tuple[int, int]], lost: Mapping[int, int]) -> None:
        for tag, generation in denials:
            self._deny(tag, generation)
        while len(self._denied) > DENIED_MAX:
            self._denied.pop(next(iter(self._denied)))
        if lost:
            self._denied_up_to.update(lost)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Recency comes from lookups (vLLM stops calling this from 0.31 on)."""

    # -- loads -----------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> XkvTransferSpec:
        """Where the workers find `keys`: by key; nothing is reserved (an evicted object stays readable a while).

        Where hits are verified first: in the ring's slots, which stay until the job is over.
        """
        keys = tuple(keys)
        staged: tuple[tuple[StagedObject, ...], ...] = ()
        if self._staging is not None:
            staged = self._guarded(self._staging.take_for_load, staged, req_context.req_id, keys)
        self._guarded(self._job_times.begin, None, "load", keys)
        if self._policy is not None:
            self._guarded(self._policy.load_begins, None, req_context.req_id, keys)
        return XkvTransferSpec(namespace=self._namespace, keys=keys, req_id=req_context.req_id, staged=staged)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Says nothing about success; a failed load has left its denial."""
        self._guarded(self._job_times.end, None, "load", keys)
        if self._staging is not None:
            self._guarded(self._staging.loaded, None, req_context.req_id, keys)
        if self._policy is not None:
            self._guarded(self._policy.load_ended, None, req_context.req_id)

    def get_load_source(self, key: bytes, req_context: Any) -> object:
        """Where loads come from, in the words of releases that ask."""
        return self._words.load_source

    # -- stores ----------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> object:
        """Choose which of `keys` are stored: a subset, in order; never None (vLLM would ask again every step)."""
        nothing = XkvTransferSpec(namespace=self._namespace, keys=(), req_id=req_context.req_id)
        spec = self._guarded(self._choose, nothing, list(keys), req_context.req_id)
        self._guarded(self._job_times.begin, None, "store", spec.keys)
        return self._words.prepare_store_output(keys_to_store=list(spec.keys), store_spec=spec, evicted_keys=[])

    def _choose(self, keys: list[bytes], req_id: str) -> XkvTransferSpec:
        chosen: list[bytes] = []
        positions: list[int] = []
        replace: list[bool] = []
        request = self._request(req_id)
        left_out = self._leaves_out(request, req_id)
        if left_out is not None:
            self._counts.add("shed_keys", len(keys))
            self._card.left_out(left_out, len(keys))
            return XkvTransferSpec(namespace=self._namespace, keys=(), req_id=req_id)
        self._take_denials(*self._card.denials())
        now = time.monotonic()
        backlog = self._card.store_bytes() + sum(self._prepared_bytes.values())
        for number, key in enumerate(keys):
            position = request.next_position
            request.next_position += 1
            size = self._options.group_bytes.get(int.from_bytes(key[-4:], "big"), 0)
            if size == 0 or self._is_pending(key, now) or self._held(key, touch=True):
                self._counts.add("held_keys")
                continue
            if self._asked is not None and self._asked.ask(key) < self._options.store_threshold:
                self._counts.add("rare_keys")
                self._card.left_out(LeftOut.RARE, 1)
                continue
            if backlog + size > self._options.store_backlog_bytes:
                self._shed(request, len(keys) - number)
                break
            backlog += size
            chosen.append(key)
            positions.append(position)
            denied = self._denied_generations(key)
            replace.append(max(denied) >= 0)
            self._pending.pop(key, None)
            self._pending[key] = (now + PENDING_SECONDS, denied)
            self._prepared_bytes[key] = size
        while len(self._pending) > PENDING_KEYS_MAX:
            self._pending.pop(next(iter(self._pending)))
        self._counts.add("store_keys", len(chosen))
        if self._announced is not None:
            self._announced.stored(chosen)
        return XkvTransferSpec(
            namespace=self._namespace,
            keys=tuple(chosen),
            req_id=req_id,
            family=request.family,
            positions=tuple(positions),
            replace=tuple(replace),
        )

    def _leaves_out(self, request: _Request, req_id: str) -> LeftOut | None:
        """Why nothing of this request is stored; None where something may be."""
        if not self._options.stores:
            return LeftOut.ROLE
        if not self._card.alive():
            return LeftOut.NO_GATEWAY
        if request.shedding:
            return LeftOut.BACKLOG
        return LeftOut.RESET if req_id in self._stale else None

    def _request(self, req_id: str) -> _Request:
        request = self._requests.get(req_id)
        if request is None:
            request = self._requests[req_id] = _Request(time.time_ns() // 1000)
            if len(self._requests) > REQUESTS_MAX:
                self._requests.pop(next(iter(self._requests)))
        return request

    def _denied_generations(self, key: bytes) -> tuple[int, ...]:
        """For each entry, the highest generation that this engine does not believe, though the card may hold it.

        -1 for none.
        """
        up_to = self._denied_up_to
        return tuple(max(self._denied.get(tag, -1), up_to.get(gateway_of(tag), -1)) for tag in self._tags(key))

    def _is_pending(self, key: bytes, now: float) -> bool:
        """Whether it was stored a moment ago. What was denied since then is stored again at once."""
        until, denied = self._pending.get(key, (0.0, ()))
        return until > now and self._denied_generations(key) == denied

    def _shed(self, request: _Request, keys: int) -> None:
        """Not this and, for the rest of the request, no later chunk: a prefix without its middle is never hit."""
        request.shedding = True
        self._counts.add("shed_keys", keys)
        self._card.left_out(LeftOut.BACKLOG, keys)
        now = time.monotonic()
        if now - self._shed_logged >= SHED_LOG_SECONDS:
            self._shed_logged = now
            logger.warning(
                "More than %d bytes are on their way to the card: chunks are not stored for now",
                self._options.store_backlog_bytes,
            )

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """The bytes have left the GPU. That the card holds them is its own word alone."""
        self._guarded(self._job_times.end, None, "store", keys)
        for key in keys:
            self._prepared_bytes.pop(key, None)

    # -- requests, steps, resets -----------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> object:
        """The framework's default way of offloading."""
        self._live.add(req_context.req_id)
        self._stale.discard(req_context.req_id)
        return self._words.request_context()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the request. One more store may come after this (0.26)."""
        self._requests.pop(req_context.req_id, None)
        self._guarded(self._lookup_times.forget, None, req_context.req_id)
        self._live.discard(req_context.req_id)
        if self._remote is not None:
            self._guarded(self._remote.forget, None, req_context.req_id)
        if self._staging is not None:
            self._guarded(self._staging.forget, None, req_context.req_id)
        if self._policy is not None:
            self._guarded(self._policy.request_ended, None, req_context.req_id)

    def on_schedule_end(self, context: Any = None) -> None:
        """Hand the step's recency and reads to the gateway."""
        self._guarded(self._lookup_times.end_step, None)
        if self._remote is not None:
            self._guarded(self._remote.end_step, None)
        if self._staging is not None:
            self._guarded(self._staging.end_step, None)
        if self._touched:
            tags, self._touched = self._touched, []
            self._guarded(self._card.touch, None, tags)

    @property
    def wants_steps(self) -> bool:
        """Whether `step_scheduled` is of any use."""
        return self._policy is not None

    def step_scheduled(self, prompt_tokens: int) -> None:
        """A step that computes so many tokens of prompts is scheduled (see `steps`)."""
        if self._policy is not None:
            self._guarded(self._policy.step_begins, None, prompt_tokens)

    def has_pending_work(self) -> bool:
        """Never: nothing here needs the engine to step."""
        return False

    def take_events(self) -> Iterable[object]:
        """What the card holds and what it holds no more, as far as it was found out. VLLM asks once after each step."""
        if self._policy is not None:
            self._guarded(self._policy.step_ends, None)
            if probes := self._policy.take_probes():
                self._counts.add("restore_probes", probes)
        return self._guarded(self._news, ())

    def _news(self) -> Sequence[object]:
        """Events; none while the gateway is not there: what was announced may be hit again when it is."""
        if self._announced is None or self._words.event is None or not self._card.alive():
            return ()
        return [self._words.event(news.keys, news.removed) for news in self._announced.poll()]

    def reset_cache(self) -> None:
        """Move to a namespace of this launch: nothing stored before is hit, late stores land in the old one.

        Requests that are under way store nothing more: vLLM offers their chunks again from the first one, with
        blocks of sliding windows that have other owners by now, and computed before whatever the reset is for.
        """
        self._namespace = after_reset(self._options.namespace, os.urandom(16))
        self._entries.clear()
        self._pending.clear()
        self._prepared_bytes.clear()
        self._job_times.clear()
        self._requests.clear()
        if self._announced is not None:
            self._guarded(self._announced.reset, None)
        self._stale = set(self._live)
        if self._remote is not None:
            self._guarded(self._remote.stop, None)
        if self._staging is not None:
            self._guarded(self._staging.reset, None)
        if self._policy is not None:
            self._guarded(self._policy.reset, None)
        self._counts.add("resets")

    def on_reset_flushed(self) -> None:
        """Every job from before the reset is over."""
        if self._staging is not None:
            self._guarded(self._staging.reset_flushed, None)

    def get_stats(self) -> object | None:
        """What was counted and measured since the last call, by the ranks too; or None."""
        self._counts.add_workers(self._guarded(self._card.worker_counts, ()))
        return self._guarded(self._counts.take, None, self._words.stats, self._words.features)

    def shutdown(self) -> None:
        """Detach from the gateway; nothing has to be saved."""
        self._counts.drop()
        self._guarded(self._card.close, None)

    def _guarded(self, work: Callable[..., _R], otherwise: _R, *args: Any) -> _R:
        try:
            return work(*args)
        except Exception:  # noqa: BLE001 - as above
            return self._survive(work, otherwise)

    def _survive(self, work: Callable[..., _R], otherwise: _R) -> _R:
        self._counts.add("manager_errors")
        logger.exception("%r failed; answered as a miss", work)  # noqa: LOG004 - called in handlers only
        return otherwise
