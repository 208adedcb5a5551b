"""Quotas: how much of the card each namespace may take, and how much it takes.

Owns the rules, every namespace's account (slots in flight, used, in limbo), and who must make room. Pure: the clock
comes with each call. Must not know which object leaves, or where slots are.

A namespace with a quota is treated as a card of that size: what it has in flight, used and in limbo together never
grows beyond it, and its own objects leave ahead of its own puts.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .errors import UserError
from .eviction import Chooser
from .geometry import DATA_OFFSET, NAMESPACE_BYTES
from .pressure import Pressure
from .recency import Recency
from .sizes import parse_size_bytes

ACCOUNTS_SHOWN_MAX = 256  # in a status: those that take most
STEPS_MIN = 64  # entries of the order that each namespace that lacks room may look at in a call

_PREFIX = re.compile(rf"[0-9a-f]{{1,{2 * NAMESPACE_BYTES}}}")
_OPTION = "--quota"


@dataclass(frozen=True, slots=True)
class Quotas:
    """`default_bytes`: of every namespace that no prefix (the beginning of its hex form) names; None: no quota."""

    default_bytes: int | None = None
    by_prefix: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, texts: list[str]) -> "Quotas":
        """From `SIZE` (every namespace) and `PREFIX=SIZE` (those that begin so; the longest counts). UserError."""
        default_bytes: int | None = None
        by_prefix: dict[str, int] = {}
        for text in texts:
            prefix, equals, size = text.rpartition("=")
            size_bytes = parse_size_bytes(_OPTION, size)
            prefix = prefix.strip().lower()
            if not equals:
                if default_bytes is not None:
                    raise UserError(f"{_OPTION} is given twice for every namespace: type one size")
                default_bytes = size_bytes
            elif not _PREFIX.fullmatch(prefix):
                raise UserError(
                    f"{_OPTION} {text!r} names no namespace: type the beginning of its hex digits (`xkv gateway "
                    "status` shows them), then = and a size"
                )
            elif prefix in by_prefix:
                raise UserError(f"{_OPTION} is given twice for {prefix}: type one size")
            else:
                by_prefix[prefix] = size_bytes
        return cls(default_bytes, tuple(by_prefix.items()))

    def of(self, namespace: bytes) -> int | None:
        """The quota of a namespace, in bytes."""
        name = namespace.hex()
        matching = [(len(prefix), size) for prefix, size in self.by_prefix if name.startswith(prefix)]
        return max(matching)[1] if matching else self.default_bytes

    def check(self, *, slots: int, slot_bytes: int, databases: int) -> None:
        """UserError for a quota that a card of this size makes no sense of."""
        # As much as the card's files take is all of it, too: whoever gave the capacity gives the same number here.
        most = slots * slot_bytes + databases * (DATA_OFFSET + slot_bytes)
        for size in (self.default_bytes, *(size for _, size in self.by_prefix)):
            if size is None:
                continue
            if size > most:
                raise UserError(
                    f"{_OPTION} of {size} bytes is more than the card has ({slots * slot_bytes} bytes): give less, or "
                    "leave it out"
                )
            if size < slot_bytes:
                raise UserError(f"{_OPTION} of {size} bytes is less than one slot: give at least {slot_bytes}")


@dataclass(slots=True, eq=False)
class Account:
    """One namespace's slots. `room`: what measures its need of room; None without a quota."""

    namespace: bytes
    quota_slots: int | None
    room: Pressure | None
    chooser: Chooser | None
    objects: int = 0
    in_flight: int = 0
    used: int = 0
    limbo: int = 0

    @property
    def held(self) -> int:
        """All that the namespace has of the card."""
        return self.in_flight + self.used + self.limbo

    def came(self, slots: int) -> None:
        """An object is on the card."""
        self.used += slots
        self.objects += 1

    def left(self, slots: int) -> None:
        """An object is in limbo."""
        self.used -= slots
        self.limbo += slots
        self.objects -= 1

    def lacking_slots(self) -> int:
        """How many of its used slots must still leave."""
        if self.room is None or self.quota_slots is None:
            return 0
        return self.room.lacking_slots(free=self.quota_slots - self.held, on_their_way=self.limbo)

    def admits(self, slots: int, now_ns: int) -> bool:
        """Whether an object of `slots` slots stays within the quota."""
        if self.room is None or self.quota_slots is None:
            return True
        self.room.advance(now_ns)
        self.room.put(slots)
        if self.held + slots <= self.quota_slots:
            return True
        self.room.refused(slots, one_in_the_way=self.objects == 1 and not self.in_flight)
        return False


class Accounts:
    """All namespaces that have something of the card."""

    def __init__(self, quotas: Quotas, *, slot_bytes: int, grace_ns: int, recency: Recency) -> None:
        self._quotas = quotas
        self._slot_bytes = slot_bytes
        self._grace_ns = grace_ns
        self._recency = recency
        self._accounts: dict[bytes, Account] = {}

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def load(self, usage: Mapping[bytes, tuple[int, int]]) -> None:
        """Objects and used slots of each namespace, as the index has them."""
        for namespace, (objects, slots) in usage.items():
            account = self.of(namespace)
            account.objects, account.used = objects, slots

    def of(self, namespace: bytes) -> Account:
        """The namespace's account; a new one is kept until `settle` finds it empty."""
        account = self._accounts.get(namespace)
        if account is None:
            quota_bytes = self._quotas.of(namespace)
            quota_slots = None if quota_bytes is None else quota_bytes // self._slot_bytes
            account = Account(namespace, quota_slots, None, None)
            if quota_slots is not None:
                account.room = Pressure(quota_slots, self._grace_ns)
                account.chooser = Chooser(self._recency, only=namespace)
            self._accounts[namespace] = account
        return account

    def find(self, namespace: bytes) -> Account | None:
        """The namespace's account, where it has something of the card."""
        return self._accounts.get(namespace)

    def came(self, order_key: bytes, key: bytes) -> None:
        """An object stands at that place of the order of eviction from now on."""
        account = self._accounts.get(key[:NAMESPACE_BYTES])
        if account is not None and account.chooser is not None:
            account.chooser.came(order_key, key)

    @property
    def slot_bytes(self) -> int:
        """What a slot counts."""
        return self._slot_bytes

    def settle(self, now_ns: int) -> list[Account]:
        """Time goes on: forget who has nothing, and say who must make room."""
        lacking = []
        for account in list(self._accounts.values()):
            if not account.held:
                del self._accounts[account.namespace]
            elif account.room is not None:
                account.room.advance(now_ns)
                if account.lacking_slots() > 0 and account.used:  # the former forgets a demand that is met
                    lacking.append(account)
        return lacking

    def status(self) -> dict[str, object]:
        """For people: the largest first, and how many are not shown."""
        largest = sorted(self._accounts.values(), key=lambda account: -account.held)[:ACCOUNTS_SHOWN_MAX]
        shown = [
            {
                "namespace": account.namespace.hex(),
                "objects": account.objects,
                "bytes": account.held * self._slot_bytes,
                "limbo_bytes": account.limbo * self._slot_bytes,
                "quota_bytes": None if account.quota_slots is None else account.quota_slots * self._slot_bytes,
            }
            for account in largest
        ]
        return {"namespaces": shown, "namespaces_left_out": len(self._accounts) - len(shown)}
