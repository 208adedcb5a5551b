"""From what is known of an object to why a lookup misses it.

Owns: the verdicts, the order in which they are tried, their words. Pure.
Must not know: cards, gateways, how anything is found out, commands.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from .departures import Reason
from .identities import Difference, in_words, look_at
from .left_out import LeftOut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .departures import Departure
    from .history import Histories, ObjectHistory
    from .left_out import Omission


class Verdict(str, Enum):
    """Why. Only `HELD` is no miss."""

    HELD = "held"
    COMING = "coming"
    OTHER_GENERATION = "other_generation"
    OTHER_IDENTITY = "other_identity"
    HASH_SEED = "hash_seed"
    EVICTED = "evicted"
    PURGED = "purged"
    DAMAGED = "damaged"
    SHED = "shed"
    STORE_FAILED = "store_failed"
    NEVER_STORED = "never_stored"
    NOT_KNOWN = "not_known"
    TOO_SHORT = "too_short"


@dataclass(frozen=True, slots=True)
class Explanation:
    """`what` is so, what `follows`, and what to type (`remedy`); `when_ms`: since 1970, or 0.

    `left_out`: what engines of the namespace have left out themselves, where that may be it.
    """

    verdict: Verdict
    what: str
    follows: str = ""
    remedy: str = ""
    when_ms: int = 0
    differences: Sequence[Difference] = field(default=())
    left_out: Mapping[LeftOut, Omission] = field(default_factory=dict)

    @property
    def misses(self) -> bool:
        """Whether a lookup misses."""
        return self.verdict is not Verdict.HELD

    def as_value(self) -> dict[str, Any]:
        """For JSON."""
        value: dict[str, Any] = {"verdict": self.verdict.value, "misses": self.misses, "what": self.what}
        value |= {name: text for name, text in (("follows", self.follows), ("type", self.remedy)) if text}
        if self.when_ms:
            value |= {"when_ms": self.when_ms, "when": at(self.when_ms)}
        if self.differences:
            value["differences"] = [one.as_value() for one in self.differences]
        if self.left_out:
            value["left_out"] = [
                {"reason": reason.value, "count": one.count, "last_ms": one.last_ms}
                for reason, one in self.left_out.items()
            ]
        return value


def at(when_ms: int) -> str:
    """A time for people, of this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when_ms / 1_000))


_LEFT: Final = {
    Reason.EVICTED: (
        Verdict.EVICTED,
        "was evicted, to make room",
        "the next request that computes it stores it again",
        "a larger card, or a quota for whoever stores most (xkv namespaces)",
    ),
    Reason.REPLACED: (
        Verdict.OTHER_GENERATION,
        "gave way to a newer one, which was not committed",
        "the next request that computes it stores it again",
        "",
    ),
    Reason.PURGED: (
        Verdict.PURGED,
        "was purged",
        "somebody typed xkv purge; the next request that computes it stores it again",
        "",
    ),
    Reason.CORRUPT: (
        Verdict.DAMAGED,
        "was taken off as its bytes were damaged",
        "nothing wrong was served; the next request that computes it stores it again",
        "xkv verify CARD, and look at the kernel's log for that device",
    ),
    Reason.UNREADABLE: (
        Verdict.DAMAGED,
        "was taken off as the medium could not read it",
        "nothing wrong was served; the next request that computes it stores it again",
        "look at the kernel's log for that device",
    ),
}
_REFUSED: Final = {
    Reason.SHED: (Verdict.SHED, "a store of it was shed: there was no slot, or limbo or the index had no room for it"),
    Reason.OVER_QUOTA: (Verdict.SHED, "a store of it was shed: its namespace was at its quota"),
    Reason.FAILED: (Verdict.STORE_FAILED, "a store of it failed on the medium, or its commit did"),
    Reason.INVALID: (Verdict.STORE_FAILED, "a store of it was refused: no object can be like that"),
}
_REFUSED_REMEDY: Final = {
    Reason.SHED: "a larger card, more --io-threads or devices, a shorter --grace-ms",
    Reason.OVER_QUOTA: "a larger --quota",
    Reason.FAILED: "the gateway's log names the file and the error",
    Reason.INVALID: "report it, with the engine's log",
}


_LEFT_OUT: Final = {
    LeftOut.BACKLOG: (
        "chunks as more than xkv.store_backlog_bytes was on its way to the card",
        "a faster card, or more devices; a larger xkv.ring_bytes",
    ),
    LeftOut.RARE: ("chunks as too few requests had asked for them", "a lower xkv.store_threshold"),
    LeftOut.NO_GATEWAY: ("chunks while the gateway was not there", "the gateway's log, for why it was not"),
    LeftOut.ROLE: ("chunks as its kv_role does not store", '"kv_role":"kv_both", or an engine beside it that stores'),
    LeftOut.RESET: ("chunks of requests that were under way when its cache was reset", ""),
    LeftOut.NO_SLOT: (
        "objects as no slot of its ring was free, its gateway was gone, or the copy took too long",
        "a larger xkv.ring_bytes, or a smaller xkv.load_reserve_bytes",
    ),
    LeftOut.PARTIAL: ("objects of chunks that were not certainly whole", ""),
    LeftOut.SUSPECT: ("objects of requests of which a load had failed", ""),
}


def explain(one: ObjectHistory, found: Histories, *, generation: int | None = None) -> Explanation:
    """Why a lookup misses this object, or does not; with `generation`, that one of it."""
    if one.held is not None:
        return _held(one, generation)
    if generation is not None:
        of_it = [left for left in one.left if left.generation == generation]
        if of_it:
            return _left(of_it[0])
    left = one.left[0] if one.left else None
    refused = one.refused[0] if one.refused else None
    if one.coming:
        what = "something of its chunk is being stored just now"
        return Explanation(Verdict.COMING, what, "it can hit when it is committed")
    if left is not None:
        why = _left(left)
        if refused is not None and refused.when_ms >= left.when_ms:
            why = replace(why, follows=f"since then, at {at(refused.when_ms)}, {_REFUSED[refused.reason][1]}")
        return why
    if refused is not None:
        verdict, what = _REFUSED[refused.reason]
        times = "" if len(one.refused) == 1 else f" ({len(one.refused)} times or more)"
        follows = "the next request that computes it tries again"
        remedy = _REFUSED_REMEDY[refused.reason]
        return Explanation(verdict, f"{what}, at {at(refused.when_ms)}{times}", follows, remedy, refused.when_ms)
    return _never(one, found)


def _held(one: ObjectHistory, generation: int | None) -> Explanation:
    assert one.held is not None
    if generation is None or generation == one.held.generation:
        what = f"the card holds it: generation {one.held.generation}, {one.held.length} bytes"
        return Explanation(
            Verdict.HELD,
            what,
            "a lookup hits it",
            "where an engine misses it all the same, it may have denied it after a failed load: vllm:xkv_lookup_denied",
        )
    gone = next((left for left in one.left if left.generation == generation), None)
    how = f"{generation} {_words(gone)}" if gone is not None else f"nothing is known of {generation}"
    when_ms = 0 if gone is None else gone.when_ms
    what = f"the card holds generation {one.held.generation} of it, not {generation}: {how}"
    return Explanation(Verdict.OTHER_GENERATION, what, "lookups hit the one that is there", "", when_ms)


def _words(left: Departure) -> str:
    if left.reason is Reason.REPLACED:
        return f"gave way to a newer one at {at(left.when_ms)}"
    return f"{_LEFT[left.reason][1]} at {at(left.when_ms)}"


def _left(left: Departure) -> Explanation:
    verdict, what, follows, remedy = _LEFT[left.reason]
    return Explanation(
        verdict, f"generation {left.generation} {what}, at {at(left.when_ms)}", follows, remedy, left.when_ms
    )


def _never(one: ObjectHistory, found: Histories) -> Explanation:
    since_ms = max(found.left_since_ms, found.refused_since_ms)
    refused = sum(found.refused.get(one.namespace, {}).values())
    left_out = found.left_out.get(one.namespace, {})
    if since_ms:
        what = f"it was not stored since {at(since_ms)}, and what left before then is not known any more"
        follows = "no store of it came since then; of before, nothing can be said"
    else:
        what, follows = "it was never stored on this card", "no store of it came"
    if refused:
        follows = f"of its namespace's stores, {refused} came to nothing since the gateway's start"
    remedy = (
        "ask that it was computed by an engine that stores (kv_role), and what that one shed itself: "
        "vllm:xkv_shed_keys, vllm:xkv_shed_objects"
    )
    if left_out:
        most_first = dict(sorted(left_out.items(), key=lambda pair: -pair[1].count))
        parts = [f"{omitted.count} {_LEFT_OUT[reason][0]}" for reason, omitted in most_first.items()]
        last = at(max(omitted.last_ms for omitted in left_out.values()))
        follows += f"; its engines left out themselves, the last at {last}: {'; '.join(parts)}; it may be one of these"
        remedy = next((_LEFT_OUT[reason][1] for reason in most_first if _LEFT_OUT[reason][1]), "")
        left_out = most_first
    return Explanation(Verdict.NEVER_STORED, what, follows, remedy, left_out=left_out)


def other_identity(found: Sequence[Difference], *, what: str) -> Explanation:
    """Another identity is in question than the one that was asked about. `what` names its namespace, and why."""
    fields = "; ".join(in_words(found)) or "nothing that was published"
    return Explanation(
        Verdict.OTHER_IDENTITY,
        f"{what} differs in: {fields}",
        "what was stored under another identity is a miss, never somebody else's bytes",
        f"if it should be the same: {look_at(found)}" if found else "",
        0,
        found,
    )


def held_elsewhere(found: Sequence[Difference], namespace: str) -> Explanation:
    """The same block is on the card, under another namespace, which differs so (nothing: that is not known)."""
    if found:
        return other_identity(found, what=f"it is held under namespace {namespace}, which")
    return Explanation(
        Verdict.OTHER_IDENTITY,
        f"it is held under namespace {namespace}, and of one of the two namespaces nothing was published",
        "what was stored under another identity is a miss, never somebody else's bytes",
        "an engine has such a namespace after a reset of its cache; else start the engine: it publishes its own",
    )
