"""What a card holds, page by page: its objects in the order of keys, its namespaces in the order of their bytes.

Owns: reading the index (with what is not committed laid over it) in bounded pages, and what a page says.
Must not know: sockets, commands, slots, or who reads it.

An object that waits for its commit is not in a page: nobody can get it yet.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .errors import PeerError
from .geometry import KEY_BYTES_MAX, NAMESPACE_BYTES, Geometry
from .layout import BadBytesError, Record, parse_record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .index import Index
    from .overlay import Overlay
    from .quotas import Accounts

DESCRIPTOR_BYTES_MAX: Final = 65_536  # a message of the protocol
SCAN_PAGE: Final = 4_096  # objects fetched at a time where nobody else waits: a megabyte


@dataclass(frozen=True, slots=True)
class HeldObject:
    """One object, by its encoded key; `length` in bytes."""

    key: bytes
    generation: int
    length: int
    position: int

    @property
    def namespace(self) -> bytes:
        """The namespace that it is of."""
        return self.key[:NAMESPACE_BYTES]


@dataclass(slots=True)
class HeldNamespace:
    """One namespace: how much of the card it has, and what was published of it (JSON text, or "").

    `held_bytes`: of all its slots; `limbo_bytes` of them are about to be free. `quota_bytes`: None without a quota.
    """

    namespace: bytes
    objects: int = 0
    held_bytes: int = 0
    limbo_bytes: int = 0
    quota_bytes: int | None = None
    descriptor: str = ""


class Contents:
    """The pages of an open card. The main thread's; MediumError where the index cannot be read."""

    def __init__(self, index: Index, overlay: Overlay, accounts: Accounts) -> None:
        self._index = index
        self._overlay = overlay
        self._accounts = accounts

    def objects(self, prefix: bytes, start: bytes, limit: int) -> tuple[list[HeldObject], bytes]:
        """At most `limit` objects whose keys begin with `prefix`, from `start` on; where to go on, nothing at the end.

        A page may be empty, and not the last.
        """
        page = self._index.objects_from(max(prefix, start), limit)
        found: list[HeldObject] = []
        for key, packed in page:
            if not key.startswith(prefix):
                return found, b""
            record = self._overlay.present(key, packed)
            if record is not None and len(key) <= KEY_BYTES_MAX:  # a longer one is damage, and no message takes it
                found.append(HeldObject(key, record.generation, record.length, record.position))
        return found, _behind(page[-1][0]) if len(page) == limit else b""

    def find(self, encoded: bytes) -> HeldObject | None:
        """The object of this key, committed or not. MediumError."""
        record = self._overlay.record(encoded)
        return None if record is None else HeldObject(encoded, record.generation, record.length, record.position)

    def namespaces(self, after: bytes, limit: int) -> tuple[list[HeldNamespace], bool]:
        """The next `limit` namespaces that hold something or were published; whether there are more."""
        described = self._index.namespaces(after, limit + 1)
        held = heapq.nsmallest(limit + 1, (one.namespace for one in self._accounts if one.namespace > after))
        names = sorted({*described, *held})
        more = len(names) > limit
        names = [name for name in names[:limit] if len(name) == NAMESPACE_BYTES]  # others are damage
        found = []
        for name in names:
            one = HeldNamespace(name, descriptor=described.get(name, b"").decode("utf-8", "replace"))
            account = self._accounts.find(name)
            if account is not None:
                size = self._accounts.slot_bytes
                one.objects = account.objects
                one.held_bytes, one.limbo_bytes = account.held * size, account.limbo * size
                one.quota_bytes = None if account.quota_slots is None else account.quota_slots * size
            found.append(one)
        return found, more

    def keys_after(self, encoded: bytes, limit: int) -> list[bytes]:
        """The next `limit` committed objects' keys behind `encoded`, in the order of keys."""
        return self._index.keys_after(encoded, limit)

    # --- what was published of namespaces ---------------------------------------------------------------------

    def put_namespace(self, namespace: bytes, descriptor: str) -> None:
        """Keep the identity behind a namespace; it rides in the next commit. PeerError if it is too long."""
        encoded = descriptor.encode()
        if len(encoded) > DESCRIPTOR_BYTES_MAX:
            raise PeerError(f"a namespace's descriptor of {len(encoded)} bytes")
        self._overlay.set_namespace(namespace, encoded)

    def descriptors(self) -> dict[bytes, str]:
        """Every namespace that is committed, with its descriptor."""
        return {name: text.decode("utf-8", "replace") for name, text in self._index.namespaces().items()}

    def forget_namespace(self, namespace: bytes) -> bool:
        """Keep that identity no more; False, and nothing happens, where the card holds an object of the namespace."""
        account = self._accounts.find(namespace)
        if account is not None and (account.objects or account.in_flight):
            return False
        self._overlay.forget_namespace(namespace)
        return True


# --- of a card that no gateway serves -----------------------------------------------------------------------------


def all_objects(index: Index, prefix: bytes = b"") -> Iterator[HeldObject]:
    """Every object whose key begins with `prefix`; of entries that are damaged nothing is said."""
    start = prefix
    while page := index.objects_from(start, SCAN_PAGE):
        for key, packed in page:
            if not key.startswith(prefix):
                return
            record = _parse(packed)
            if record is not None:
                yield HeldObject(key, record.generation, record.length, record.position)
        start = page[-1][0] + b"\0"


def one_object(index: Index, key: bytes) -> HeldObject | None:
    """The object of this key; None also of an entry that is damaged."""
    packed = index.get(key)
    record = None if packed is None else _parse(packed)
    return None if record is None else HeldObject(key, record.generation, record.length, record.position)


def all_namespaces(index: Index, geometry: Geometry) -> list[HeldNamespace]:
    """Every namespace, with all that it has."""
    found = {
        name: HeldNamespace(name, descriptor=text.decode("utf-8", "replace"))
        for name, text in index.namespaces().items()
    }
    for held in all_objects(index):
        one = found.setdefault(held.namespace, HeldNamespace(held.namespace))
        one.objects += 1
        one.held_bytes += geometry.fragments(held.length) * geometry.slot_bytes
    return [found[name] for name in sorted(found)]


def _behind(key: bytes) -> bytes:
    """The first key that comes behind `key`; of one that is damage, behind all that begin as it does."""
    if len(key) <= KEY_BYTES_MAX:
        return key + b"\0"
    front = key[:KEY_BYTES_MAX].rstrip(b"\xff")
    return front[:-1] + bytes([front[-1] + 1]) if front else b""


def _parse(packed: bytes) -> Record | None:
    try:
        return parse_record(packed)
    except BadBytesError:
        return None
