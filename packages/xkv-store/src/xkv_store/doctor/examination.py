"""The order of the checks that need no engine, and what each of them needs of those before it.

Owns: `Subject` (what is examined), `examine`, and what is left out where something is not there.
Must not know: how a check finds what it finds, the engine, what is printed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import MediumError, UserError  # noqa: TID252  the package may have another name
from ..geometry import HEADER_BYTES, SLOT_BYTES  # noqa: TID252
from ..io_pool import IO_THREADS_DEFAULT  # noqa: TID252
from ..native import ENVIRONMENT_NAME, path_word  # noqa: TID252
from ..progress import QUIET, Progress  # noqa: TID252
from .findings import note, of_error, ok
from .folder import examine_databases, examine_direct, examine_owner, examine_room, gather_folder, nearest
from .limits import examine_huge_pages, examine_memlock, examine_memory, gather_huge_pages, gather_limits
from .medium import Bandwidth, Effort, examine_bandwidth, measure
from .round_trip import examine_trip, gather_trip
from .service import State, examine_gateway, examine_socket, gather_gateway, gather_socket

if TYPE_CHECKING:
    from .findings import Finding
    from .folder import FolderFacts
    from .round_trip import TripFacts
    from .service import GatewayFacts

RING_BYTES_DEFAULT: Final = 1 << 30  # an engine's, if nothing else is set


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is examined. `card`: its folder, where it is known; else the gateway says it.

    `embedded`: an engine starts the gateway. `fragment_bytes`: an engine's, None where none is known. `pid`: the
    process whose limits count, None for this one. `trusted_uids`: users besides our own and root.
    """

    socket: Path
    card: Path | None = None
    embedded: bool = False
    ring_bytes: int = RING_BYTES_DEFAULT
    fragment_bytes: int | None = None
    capacity_bytes: int | None = None
    io_threads: int = IO_THREADS_DEFAULT
    trusted_uids: frozenset[int] = frozenset()
    pid: int | None = None
    measures: bool = True


@dataclass(slots=True)
class Examined:
    """What was found, in the order of looking, and what was measured."""

    findings: list[Finding] = field(default_factory=list)
    bandwidth: Bandwidth | None = None
    get_s: float | None = None

    def measured(self) -> dict[str, Any]:
        """For JSON: only what was measured."""
        found: dict[str, Any] = {} if self.bandwidth is None else {"bandwidth": self.bandwidth.as_value()}
        return found | ({} if self.get_s is None else {"get_s": round(self.get_s, 6)})


def examine(subject: Subject, bar: Progress = QUIET) -> Examined:
    """Look at everything; `bar` is of what takes longest, the medium.

    Raises UserError for what is no finding: a process that is not there.
    """
    limits = gather_limits(subject.pid)
    found = [
        examine_memlock(limits, ring_bytes=subject.ring_bytes),
        examine_memory(limits, ring_bytes=subject.ring_bytes),
        examine_huge_pages(given=gather_huge_pages()),
    ]
    examined = examine_service(subject, bar)
    examined.findings[:0] = found
    return examined


def examine_service(subject: Subject, bar: Progress = QUIET) -> Examined:
    """Look at a gateway and its card."""
    examined = Examined()
    found = examined.findings
    uid = os.geteuid()
    found += examine_socket(gather_socket(subject.socket), uid=uid, trusted_uids=subject.trusted_uids)
    gateway = gather_gateway(subject.socket)
    found += examine_gateway(
        gateway,
        path=subject.socket,
        embedded=subject.embedded,
        fragment_bytes=subject.fragment_bytes,
        trusted_uids=subject.trusted_uids,
    )
    folder = _examine_card(subject, gateway, found)
    found.append(_examine_checksums(gateway))
    if gateway.state is State.ANSWERS:
        trip = _trip(subject, gateway)
        found += examine_trip(trip)
        examined.get_s = trip.get_s or None
    else:
        found.append(note("round trip", "not tried: no gateway answers"))
    if folder is not None:
        _measure(subject, gateway, folder, examined, bar)
    return examined


def _examine_card(subject: Subject, gateway: GatewayFacts, found: list[Finding]) -> FolderFacts | None:
    """What is looked at as the card's folder; None where nobody says which it is."""
    served = gateway.status
    place = Path(served["card"]) if served else subject.card
    if served and not served["databases"]:
        found.append(note("card", f"there is none but the remote: {served['card']}"))
        return None
    if place is None:
        found.append(note("card", "not looked at: no gateway says which it is", "", "xkv doctor --card FOLDER"))
        return None
    try:
        if served and not place.is_dir():
            what = f"the gateway's card is in {place}, which is not seen from here: it is in another container"
            found.append(note("card", what, "", "xkv doctor where the gateway runs"))
            return None
        facts = gather_folder(place)
    except OSError as error:
        refused = UserError(f"{place} cannot be looked at: {error.strerror}; run this as the gateway's user")
        found.append(of_error("card", refused, "nothing is known of the card"))
        return None
    uid = gateway.peer.uid if served and gateway.peer is not None else os.geteuid()
    found.append(examine_owner(facts, uid=uid))
    found += examine_databases(facts, uid=uid)
    found.append(examine_room(facts, capacity_bytes=subject.capacity_bytes))
    found.append(examine_direct(facts, bool(served["direct"]) if served else None))
    return facts


def _examine_checksums(gateway: GatewayFacts) -> Finding:
    """The gateway's way; where none answers, the one that this Python would go."""
    way = gateway.status.get("checksums") if gateway.status else path_word()
    if way == "native":
        return ok("checksums", "made by the native library, and reads with them")
    what = f"made by Python: the native library is not installed there, or {ENVIRONMENT_NAME}=0"
    return note("checksums", what, "I/O threads wait more often for Python's interpreter")


def _trip(subject: Subject, gateway: GatewayFacts) -> TripFacts:
    return gather_trip(subject.socket, slot_bytes=int(gateway.status["slot_bytes"]), gateway_uids=subject.trusted_uids)


def _measure(subject: Subject, gateway: GatewayFacts, folder: FolderFacts, examined: Examined, bar: Progress) -> None:
    if not subject.measures:
        examined.findings.append(note("bandwidth", "not measured: --no-bandwidth"))
        return
    place = nearest(folder.folder)
    if folder.databases:
        medium = folder.databases[0].path.resolve()
        if medium.is_block_device():
            what = f"not measured: the card is on the block device {medium}, and no place of it is ours to write"
            examined.findings.append(note("bandwidth", what))
            return
        place = medium.parent
    slot_bytes = int(gateway.status["slot_bytes"]) if gateway.status else SLOT_BYTES
    if subject.fragment_bytes is not None and not gateway.status:
        slot_bytes = subject.fragment_bytes + HEADER_BYTES
    try:
        system = os.statvfs(place)
        bandwidth = measure(
            place,
            Effort(slot_bytes=slot_bytes, threads=subject.io_threads),
            free_bytes=system.f_bavail * system.f_frsize,
            bar=bar,
        )
    except (UserError, MediumError, OSError) as error:
        examined.findings.append(note("bandwidth", f"not measured: {' '.join(str(error).split())}"))
        return
    examined.bandwidth = bandwidth
    examined.findings.append(examine_bandwidth(bandwidth))
