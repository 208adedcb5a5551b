"""One object through the ring and back, as an engine would have it, and off the card again.

Owns: attaching as the one rank of an engine that nobody else is, a namespace that nobody else has, and its removal.
Must not know: findings of other checks, the card's files, what a command prints.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ..attachment import Attachment  # noqa: TID252  the package may have another name
from ..client import Client, GetObject, PutObject  # noqa: TID252
from ..contents import HeldObject  # noqa: TID252
from ..errors import PeerError, UserError  # noqa: TID252
from ..geometry import HEADER_BYTES, Geometry  # noqa: TID252
from ..key import ObjectKey  # noqa: TID252
from ..tool import Tool  # noqa: TID252
from ..wire import LoadedObject, LoadStatus, Role, StoredObject, StoreStatus  # noqa: TID252
from .findings import fault, note, of_error, ok, warning

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..embedded import EmbeddedCard  # noqa: TID252
    from .findings import Finding

FRAGMENTS: Final = 3  # the last of them is not full
RING_SLOTS: Final = 4 * FRAGMENTS
STAGED_SLOTS: Final = 1  # not used: a gateway whose card is a remote alone takes no engine without
ANSWER_S_MAX: Final = 10.0
ATTACH_MS_MAX: Final = 5_000
HEARTBEAT_MS_MAX: Final = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TripFacts:
    """What came of it. `error`: it did not come so far; None for a status that was not reached."""

    error: str = ""
    stored: StoreStatus | None = None
    loaded: LoadStatus | None = None
    equal: bool = False
    put_s: float = 0.0
    get_s: float = 0.0
    forgotten: bool = True
    sent_bytes: int = 0


def gather_trip(
    socket: Path, *, slot_bytes: int, gateway_uids: frozenset[int] = frozenset(), embedded: EmbeddedCard | None = None
) -> TripFacts:
    """Put one object, get it back, and take it off the card. `embedded`: whose gateway is started if none is there."""
    geometry = Geometry(slot_bytes)
    attachment = Attachment(
        socket=socket,
        engine_id=f"doctor-{uuid.uuid4().hex}",
        role=Role.RANK,
        rank=0,
        world_size=1,
        ring_bytes=(RING_SLOTS + STAGED_SLOTS) * slot_bytes,
        load_reserve_bytes=RING_SLOTS // 2 * slot_bytes,
        staged_bytes=STAGED_SLOTS * slot_bytes,
        fragment_bytes=geometry.fragment_bytes,
        connect_timeout_ms=ATTACH_MS_MAX,
        heartbeat_timeout_ms=HEARTBEAT_MS_MAX,
        gateway_uids=gateway_uids,
        embedded=embedded,
    )
    try:
        with closing(Client.attach(attachment)) as client:
            facts, left = _there_and_back(client, geometry)
            return replace(facts, forgotten=left is None or _forget(socket, *left))
    except (UserError, PeerError) as error:
        return TripFacts(error=str(error))


def _forget(socket: Path, key: ObjectKey, generation: int) -> bool:
    """Take it off the card; whether it has left."""
    with closing(Tool(socket)) as tool:
        return tool.purge([HeldObject(key.encode(), generation, 0, 0)]).objects == 1


def examine_trip(facts: TripFacts) -> list[Finding]:
    """What it means for an engine."""
    if facts.error:
        return [of_error("round trip", UserError(facts.error), "an engine would not start, or miss and shed all")]
    found = [_examine_bytes(facts)]
    if not facts.forgotten:
        what = "the object of this round trip is still on the card (one object, in a namespace of its own)"
        found.append(note("round trip", what, "it leaves by age, like any other"))
    return found


def _examine_bytes(facts: TripFacts) -> Finding:
    if facts.stored is StoreStatus.SHED:
        return warning(
            "round trip",
            "the gateway did not take an object: the card is full just now, or it is behind",
            "what engines store meanwhile is left out",
            "look again with xkv gateway status; a card that stays full is too small, or its medium too slow",
        )
    if facts.stored is not StoreStatus.CONFIRMED:
        said = "said nothing" if facts.stored is None else f"says {facts.stored.name.lower()}"
        what = f"an object was not stored: the gateway {said}"
        return fault("round trip", what, "nothing is stored", "look at the gateway's log, and at the card's findings")
    if facts.loaded is not LoadStatus.OK:
        said = "said nothing" if facts.loaded is None else f"says {facts.loaded.name.lower()}"
        what = f"an object was stored and cannot be read: the gateway {said}"
        return fault("round trip", what, "nothing is restored", "xkv verify, and the kernel's log (dmesg)")
    if not facts.equal:
        what = "an object came back with other bytes than went, and the gateway took it for sound"
        return fault("round trip", what, "wrong pages would be served", "stop the gateway; check this machine's memory")
    return ok(
        "round trip",
        f"{facts.sent_bytes} bytes through the ring to the card and back: stored in {facts.put_s * 1_000:.1f} ms, "
        f"read in {facts.get_s * 1_000:.1f} ms",
    )


# --- the trip ----------------------------------------------------------------------------------------------------


class _Answer:
    """The one answer to one message, from the client's thread."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self.value: StoredObject | LoadedObject | None = None

    def __call__(self, value: StoredObject | LoadedObject) -> None:
        self.value = value
        self._came.set()

    def wait(self) -> bool:
        return self._came.wait(ANSWER_S_MAX)


def _there_and_back(client: Client, geometry: Geometry) -> tuple[TripFacts, tuple[ObjectKey, int] | None]:
    """The facts, and what is on the card now."""
    content = os.urandom((FRAGMENTS - 1) * geometry.fragment_bytes + geometry.fragment_bytes // 3)
    key = ObjectKey(uuid.uuid4().bytes, 0, os.urandom(32), 0)
    facts = TripFacts(sent_bytes=len(content))
    slots = client.store_region.take(FRAGMENTS)
    assert slots is not None, "nobody else has slots of this ring"
    _fill(client, geometry, slots, content)
    stored, begun_s = _Answer(), time.monotonic()
    client.put([PutObject(key, len(content), slots, 0, 0, replace=False)], stored)
    came = stored.wait()
    if not came or not isinstance(stored.value, StoredObject):
        return facts, None
    facts = replace(facts, stored=stored.value.status, put_s=time.monotonic() - begun_s)
    if stored.value.status is not StoreStatus.CONFIRMED:
        return facts, None
    entry = client.table.lookup(key.tag)
    left = (key, entry[0]) if entry is not None else None
    into = client.load_region.take(FRAGMENTS)
    assert into is not None, "nobody else has slots of this ring"
    for slot in into:
        client.ring.slot(slot)[:] = bytes(geometry.slot_bytes)
    loaded, begun_s = _Answer(), time.monotonic()
    client.get([GetObject(key=key, slots=into, first_fragment=0)], loaded)
    came = loaded.wait()
    if not came or not isinstance(loaded.value, LoadedObject):
        return facts, left
    get_s = time.monotonic() - begun_s
    parts = b"".join(bytes(client.ring.slot(slot)[HEADER_BYTES:]) for slot in into)
    equal = parts[: len(content)] == content
    return replace(facts, loaded=loaded.value.status, get_s=get_s, equal=equal), left


def _fill(client: Client, geometry: Geometry, slots: Sequence[int], content: bytes) -> None:
    step = geometry.fragment_bytes
    for place, slot in enumerate(slots):
        part = content[place * step : (place + 1) * step]
        client.ring.slot(slot)[HEADER_BYTES : HEADER_BYTES + len(part)] = part
