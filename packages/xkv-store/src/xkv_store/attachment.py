"""What a client attaches as, and what a person is told when it cannot.

Owns: the attachment's values, the Hello made of them, the wording of every reason why a client is not
attached, and which of those reasons waiting can mend. Must not know: sockets, threads, memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .embedded import EmbeddedCard, last_log_line
from .errors import UserError
from .wire import ENGINE_ID_BYTES_MAX, PROTOCOL_VERSION, Hello, RefusedCode, Role

if TYPE_CHECKING:
    from pathlib import Path

    from .sockets import Peer

RETRY_MS_MAX: Final = 1_000
"""A gateway that comes back is found within a second."""
RETRY_MS_MIN: Final = 50
"""A gateway that is just starting is found soon."""
_DOUBLINGS_MAX: Final = 16  # far beyond the bound above; keeps the power small
RANK_TAKEN_MS_MAX: Final = 2_000
"""A dead engine's place is free within a second; longer means a second engine of the same id."""
WAITING_HELPS: Final = frozenset({RefusedCode.RANK_TAKEN, RefusedCode.SESSIONS, RefusedCode.DRAINING})
"""Refusals that may be different at the next attempt; at the start all others are final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What to attach to, and as what."""

    socket: Path
    engine_id: str
    role: Role
    rank: int
    world_size: int
    ring_bytes: int
    load_reserve_bytes: int
    staged_bytes: int | None
    """The scheduler's part of the ring; None: a scheduler that takes what its ranks have said."""
    fragment_bytes: int
    connect_timeout_ms: int
    heartbeat_timeout_ms: int
    embedded: EmbeddedCard | None = None
    gateway_uids: frozenset[int] = frozenset()
    """Users besides our own and root whose gateway is trusted."""

    def __post_init__(self) -> None:
        assert self.role is not Role.TOOL, "a tool needs no ring: tool.Tool"
        assert 0 <= self.rank < self.world_size
        assert self.staged_bytes is not None or self.role is Role.SCHEDULER
        if not 0 < len(self.engine_id.encode()) <= ENGINE_ID_BYTES_MAX:
            raise UserError(
                f"the engine id {self.engine_id[:40]!r} has to have 1 to {ENGINE_ID_BYTES_MAX} bytes; set engine_id in "
                "--kv-transfer-config"
            )

    def hello(self) -> Hello:
        """The first message of each connection."""
        return Hello(
            version=PROTOCOL_VERSION,
            engine_id=self.engine_id,
            role=self.role,
            rank=self.rank,
            world_size=self.world_size,
            ring_bytes=self.ring_bytes,
            load_reserve_bytes=self.load_reserve_bytes,
            staged_bytes=self.staged_bytes,
            fragment_bytes=self.fragment_bytes,
            pid=os.getpid(),
        )


def retry_ms(attempt: int, jitter: float) -> float:
    """How long to wait before attempt number `attempt` (from 0) is repeated; `jitter` from 0 to 1.

    Doubles up to the bound; the jitter takes up to half of it away, so that ranks do not come all at once.
    """
    full = min(RETRY_MS_MAX, RETRY_MS_MIN << min(attempt, _DOUBLINGS_MAX))
    return full * (1 - jitter / 2)


# --- what a person is told --------------------------------------------------------------------------------


def nobody_answers(attachment: Attachment) -> UserError:
    """No process listens on the socket."""
    card = attachment.embedded
    if card is not None:
        line = last_log_line(card.folder)
        ends = f"; its log ends with: {line}" if line else ""
        return UserError(
            f"the gateway of the card in {card.folder} did not come up within xkv.connect_timeout_ms="
            f"{attachment.connect_timeout_ms}; see {card.folder}/gateway.log, or raise xkv.connect_timeout_ms{ends}"
        )
    name = attachment.socket.stem
    run = f"xkv gateway run --port {name}" if name.isdigit() else "xkv gateway run"
    return UserError(
        f"no gateway answers on {attachment.socket}; start one with `{run}`, or set xkv.port or xkv.socket_dir to "
        "the one that runs"
    )


def nothing_said(attachment: Attachment, peer: Peer) -> UserError:
    """A process listens and says nothing."""
    card = attachment.embedded
    if card is not None:
        return UserError(
            f"the gateway of the card in {card.folder} (pid {peer.pid}) does not answer; see "
            f"{card.folder}/gateway.log, or end it (kill -9 {peer.pid}: the card stays whole) and start again"
        )
    return UserError(
        f"what listens on {attachment.socket} (pid {peer.pid}) does not answer; if it is a gateway, see its log or "
        "restart it, otherwise take another port"
    )


def not_trusted(attachment: Attachment, peer: Peer) -> UserError:
    """Another user's process listens."""
    return UserError(
        f"the gateway on {attachment.socket} runs as uid {peer.uid}, not as uid {os.geteuid()}; use one of your own: "
        "set xkv.port or xkv.socket_dir; or trust that user: xkv.gateway_uid"
    )


def refused(attachment: Attachment, code: RefusedCode, reason: str) -> UserError:
    """The gateway said no."""
    where = f"the gateway on {attachment.socket}"
    match code:
        case RefusedCode.VERSION:
            text = f"{where} is of another version: {reason}; install the same xkv on both sides"
        case RefusedCode.FRAGMENT_BYTES:
            text = f"xkv.fragment_bytes={attachment.fragment_bytes} does not fit {where}: {reason}"
        case RefusedCode.RANK_TAKEN:
            text = (
                f"{attachment.role.value} {attachment.rank} of engine {attachment.engine_id!r} is attached to {where} "
                f"already: {reason}"
            )
        case RefusedCode.PEER:
            text = (
                f"{where} does not let uid {os.geteuid()} in: {reason}; start it with --allow-uid {os.geteuid()}, or "
                "use one of your own"
            )
        case RefusedCode.RING:
            text = f"{where} cannot give this engine its ring: {reason}; see xkv.ring_bytes"
        case RefusedCode.SESSIONS:
            text = f"{where} has too many sessions: {reason}; stop an engine, or take another gateway"
        case RefusedCode.DRAINING:
            text = f"{where} is ending: {reason}; start it again"
        case RefusedCode.PROTOCOL:
            text = f"{where} does not understand this client: {reason}; install the same xkv on both sides"
    return UserError(text)
