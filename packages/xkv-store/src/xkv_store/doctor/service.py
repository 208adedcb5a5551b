"""The gateway and its socket: whether it is there, ours, awake and of this version.

Owns: asking it, with a bound; looking at the socket's folder; and what each answer means for an engine.
Must not know: the card's files, engines, what a command prints.
"""

from __future__ import annotations

import json
import stat
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import __version__  # noqa: TID252  the package may have another name
from ..errors import UserError  # noqa: TID252
from ..geometry import HEADER_BYTES  # noqa: TID252
from ..sizes import format_size  # noqa: TID252
from ..sockets import Peer, is_trusted  # noqa: TID252
from ..tool import (  # noqa: TID252
    ForeignGatewayError,
    GatewayRefusesError,
    NobodyAnswersError,
    SilentGatewayError,
    Tool,
)
from ..wire import PROTOCOL_VERSION, RefusedCode  # noqa: TID252
from .findings import fault, note, of_error, ok, warning

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from .findings import Finding

ANSWER_S_MAX: Final = 5.0  # as long as an engine waits for its gateway, if nothing else is set
OTHERS_WRITE: Final = 0o022
MISSES: Final = "every lookup of an engine misses and nothing is stored: it works as if there were no card"


class State(str, Enum):
    """What became of asking."""

    ANSWERS = "answers"
    NOBODY = "nobody listens"
    SILENT = "does not answer"
    OTHER_VERSION = "speaks another version of the protocol"
    FOREIGN = "is no gateway"
    REFUSES = "refuses"
    UNREACHABLE = "cannot be reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketFacts:
    """The socket's folder and the socket, by lstat; None where it is not there."""

    path: Path
    folder: os.stat_result | None
    socket: os.stat_result | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFacts:
    """What asking has brought. `error` says what went wrong; `stopped`: the process stands still by a signal."""

    state: State
    error: str = ""
    peer: Peer | None = None
    stopped: bool = False
    status: Mapping[str, Any] = field(default_factory=dict)


def gather_socket(path: Path) -> SocketFacts:
    """Look, and follow no link."""
    return SocketFacts(path=path, folder=_lstat(path.parent), socket=_lstat(path))


def gather_gateway(path: Path, answer_s_max: float = ANSWER_S_MAX) -> GatewayFacts:
    """Ask whoever listens for a status, within the bound."""
    try:
        with closing(Tool(path, answer_s_max)) as tool:
            return GatewayFacts(state=State.ANSWERS, peer=tool.peer, status=json.loads(tool.status()))
    except NobodyAnswersError as error:
        return GatewayFacts(state=State.NOBODY, error=str(error))
    except SilentGatewayError as error:
        return GatewayFacts(state=State.SILENT, error=str(error), peer=error.peer, stopped=_is_stopped(error.peer))
    except ForeignGatewayError as error:
        return GatewayFacts(state=State.FOREIGN, error=str(error))
    except GatewayRefusesError as error:
        is_version = error.code in (RefusedCode.VERSION, RefusedCode.PROTOCOL)
        return GatewayFacts(state=State.OTHER_VERSION if is_version else State.REFUSES, error=str(error))
    except UserError as error:
        return GatewayFacts(state=State.UNREACHABLE, error=str(error))


def examine_socket(facts: SocketFacts, *, uid: int, trusted_uids: frozenset[int]) -> list[Finding]:
    """Who may put a socket there, and who may connect."""
    folder, place = facts.folder, facts.path.parent
    others = "another user may put a socket of his own there, and get what engines store"
    if folder is None:
        return []
    found = []
    if stat.S_ISLNK(folder.st_mode) or not stat.S_ISDIR(folder.st_mode):
        kind = "a link" if stat.S_ISLNK(folder.st_mode) else "no folder"
        remedy = "name the folder itself with xkv.socket_dir and --socket-dir"
        found.append(fault("socket", f"the socket folder {place} is {kind}", "a gateway refuses it", remedy))
    elif folder.st_uid not in {uid, 0} | trusted_uids:
        remedy = "name a folder of your own with xkv.socket_dir and --socket-dir"
        found.append(fault("socket", f"the socket folder {place} belongs to uid {folder.st_uid}", others, remedy))
    elif folder.st_mode & OTHERS_WRITE:
        mode = f"{stat.S_IMODE(folder.st_mode):04o}"
        what = f"others may write to the socket folder {place} (mode {mode})"
        found.append(fault("socket", what, others, f"chmod 700 {place}"))
    socket = facts.socket
    if socket is not None and stat.S_ISLNK(socket.st_mode):
        found.append(
            warning("socket", f"{facts.path} is a link", "whoever made it says which gateway it is", f"rm {facts.path}")
        )
    elif socket is not None and socket.st_uid not in {uid, 0} | trusted_uids:
        what = f"the socket {facts.path} belongs to uid {socket.st_uid}, whom this user does not trust"
        found.append(fault("socket", what, MISSES, f"set xkv.gateway_uid to {socket.st_uid}, or take another port"))
    return found or [ok("socket", f"{place} is this user's (or a trusted one's) alone to write")]


def examine_gateway(
    facts: GatewayFacts, *, path: Path, embedded: bool, fragment_bytes: int | None, trusted_uids: frozenset[int]
) -> list[Finding]:
    """Whether an engine would get what it needs of it. `embedded`: an engine starts it where there is none.

    `fragment_bytes`: the engine's; None where it is not known.
    """
    if facts.state is not State.ANSWERS:
        return [_away(facts, path=path, embedded=embedded)]
    peer = facts.peer
    assert peer is not None
    if not is_trusted(peer, trusted_uids):
        what = f"the gateway on {path} runs as uid {peer.uid}"
        return [fault("gateway", what, "engines of this user do not trust it", f"set xkv.gateway_uid to {peer.uid}")]
    return _examine_status(facts.status, pid=peer.pid, fragment_bytes=fragment_bytes)


def _away(facts: GatewayFacts, *, path: Path, embedded: bool) -> Finding:
    peer = facts.peer
    match facts.state:
        case State.NOBODY if embedded:
            return note("gateway", f"no gateway listens on {path}: an engine starts one when it starts")
        case State.NOBODY:
            port = f" --port {path.stem}" if path.stem.isdigit() else ""
            remedy = f"xkv gateway run{port} --socket-dir {path.parent} --card FOLDER"
            return fault("gateway", f"no gateway listens on {path}", MISSES, remedy)
        case State.SILENT:
            assert peer is not None
            what = f"the gateway on {path} (pid {peer.pid}) does not answer"
            if facts.stopped:
                what += ": it was stopped by a signal"
            remedy = f"kill -CONT {peer.pid}" if facts.stopped else f"kill -9 {peer.pid}, and start it again"
            return fault("gateway", what, f"an engine does not start with it, and of one that runs {MISSES}", remedy)
        case State.OTHER_VERSION:
            remedy = "install one release of xkv for gateway and engines: stop the gateway, install, start it"
            follows = f"engines do not start with it (theirs is version {PROTOCOL_VERSION})"
            return fault("gateway", facts.error, follows, remedy)
        case State.FOREIGN:
            remedy = "take another port, or install one release of xkv for gateway and engines"
        case State.REFUSES:
            remedy = "look at the gateway's log; run this as the engine's user"
        case _:
            remedy = ""  # the error says it
    return of_error("gateway", UserError(facts.error), "engines do not start with it", remedy)


def _examine_status(status: Mapping[str, Any], *, pid: int, fragment_bytes: int | None) -> list[Finding]:
    found = []
    slot_bytes = int(status["slot_bytes"])
    if fragment_bytes is not None and fragment_bytes + HEADER_BYTES != slot_bytes:
        fits = slot_bytes - HEADER_BYTES
        what = f"xkv.fragment_bytes is {fragment_bytes}, and the card's fragments have {fits} bytes"
        found.append(fault("fragment_bytes", what, "the engine does not start", f"set xkv.fragment_bytes to {fits}"))
    if status["draining"]:
        found.append(
            warning("gateway", f"the gateway (pid {pid}) is ending", MISSES, "start it again when it has ended")
        )
    if status["version"] != __version__:
        what = f"the gateway is of release {status['version']}, this is {__version__}; they speak the same protocol"
        found.append(note("gateway", what))
    counters = status["counters"]
    damaged = sum(counters.get(name, 0) for name in ("dropped_corrupt", "dropped_unreadable"))
    if damaged:
        what = f"{damaged} objects were damaged or unreadable in this life of the gateway"
        remedy = f"xkv verify {status['card']}; and look at the kernel's log (dmesg)"
        found.append(warning("damage", what, "each was a miss; more will be, if the device is failing", remedy))
    if counters.get("commits_failed", 0):
        what = f"{counters['commits_failed']} commits of the index failed in this life of the gateway"
        remedy = f"look at its log; make room on the file system of {status['card']}"
        found.append(warning("damage", what, "what they would have confirmed was not stored", remedy))
    if "remote" in status:
        found += _examine_remote(status["remote"], counters)
    slots = status["slots"]
    free = format_size(int(slots["free"]) * slot_bytes)
    capacity = format_size(int(status["capacity_bytes"]))
    text = f"answers (pid {pid}): {status['objects']} objects, {free} of {capacity} free"
    return [ok("gateway", text), *found]


def _examine_remote(remote: Mapping[str, Any], counters: Mapping[str, int]) -> list[Finding]:
    """Whether the gateway reaches the remote behind its card, and how it goes."""
    found = []
    master = remote["master"]
    misses = "what the card lacks is a miss, and nothing goes to other machines; the card itself serves as ever"
    remedy = f"see that the master at {master} runs and is reached from here; the gateway finds it by itself"
    if remote["state"] != "up":
        found.append(warning("remote", f"the remote at {master} is not there: {remote['reason']}", misses, remedy))
    if remote["segment_state"] not in {"up", "none"}:
        what = f"this machine's {format_size(remote['segment_bytes'])} are not in the pool: {remote['segment_reason']}"
        found.append(warning("remote", what, "other machines have that much less room", remedy))
    late = sum(counters.get(f"remote_late_{lane}", 0) for lane in ("look", "load", "store"))
    if late:
        what = f"{late} calls to the remote took too long in this life of the gateway"
        follows = "each was a miss, or an object that did not go there"
        found.append(warning("remote", what, follows, f"look at the network between this machine and {master}"))
    if counters.get("remote_fetches_corrupt", 0):
        what = f"{counters['remote_fetches_corrupt']} objects came from the remote other than they went there"
        found.append(warning("remote", what, "each was a miss", "look for a machine whose memory or network fails"))
    came, went = counters.get("remote_fetches", 0), counters.get("remote_stores", 0)
    return found or [ok("remote", f"{master} answers ({remote['host']}): {came} objects came, {went} went")]


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


def _is_stopped(peer: Peer | None) -> bool:
    """Whether a signal has stopped the process; False where it cannot be seen."""
    if peer is not None:
        with suppress(OSError):
            text = Path(f"/proc/{peer.pid}/stat").read_text("utf-8", "replace")
            return text.rpartition(")")[2].split()[:1] == ["T"]
    return False
