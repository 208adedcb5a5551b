"""A remote's address as it is typed: `mooncake://HOST:PORT?host=…&protocol=…&segment=…`.

Owns: the parts of the address, their bounds and defaults, and the wording of its errors. Must not know: the library,
processes, what is done with any part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from .errors import UserError
from .sizes import format_size, parse_size_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEME: Final = "mooncake"
PROTOCOLS: Final = ("tcp", "rdma")
HANDSHAKE: Final = "P2PHANDSHAKE"  # Mooncake's word for: no metadata server, nodes ask each other
MEMORY_BYTES_DEFAULT: Final = 256 << 20
MEMORY_BYTES_MIN: Final = 4 << 20
EXAMPLE: Final = "mooncake://10.0.0.1:50051?host=10.0.0.7&segment=64GiB"

_NAMES: Final = ("host", "protocol", "device", "metadata", "segment", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAddress:
    """Where the remote's master is, and how this machine takes part.

    `text`: all of it, as it was typed. `host`: under which others reach this machine ("": that of its way to the
    master). `metadata`: Mooncake's metadata server. `segment_bytes`: memory of this machine for the pool (0: none).
    `memory_bytes`: what objects on their way lie in.
    """

    text: str
    master: str
    host: str = ""
    protocol: str = "tcp"
    device: str = ""
    metadata: str = HANDSHAKE
    segment_bytes: int = 0
    memory_bytes: int = MEMORY_BYTES_DEFAULT

    @classmethod
    def parse(cls, text: str, option: str) -> RemoteAddress:
        """The address that `text` is; raises UserError that names `option` and says what to type."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise UserError(f"{option} {text!r} is no address ({error}): type for example {EXAMPLE}") from error
        if parts.scheme != SCHEME or not parts.hostname or port is None or parts.path.strip("/") or parts.fragment:
            raise UserError(f"{option} {text!r} is no address of a remote: type for example {EXAMPLE}")
        given = _parameters(parts.query, option)
        protocol = given.get("protocol", "tcp")
        if protocol not in PROTOCOLS:
            raise UserError(f"{option}: protocol is {protocol!r}, and may be {' or '.join(PROTOCOLS)}")
        memory_bytes = _size(given, "memory", option, MEMORY_BYTES_DEFAULT)
        if memory_bytes < MEMORY_BYTES_MIN:
            raise UserError(
                f"{option}: memory is {given['memory']}, at least {format_size(MEMORY_BYTES_MIN)} is needed"
            )
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return cls(
            text=text,
            master=f"{host}:{port}",
            host=given.get("host", ""),
            protocol=protocol,
            device=given.get("device", ""),
            metadata=given.get("metadata", HANDSHAKE),
            segment_bytes=_size(given, "segment", option, 0),
            memory_bytes=memory_bytes,
        )


def _parameters(query: str, option: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise UserError(f"{option}: what comes behind the ? is not NAME=VALUE&…: type for example {EXAMPLE}") from error
    given: dict[str, str] = {}
    for name, value in pairs:
        if name not in _NAMES:
            raise UserError(f"{option}: there is no {name!r}; what may come behind the ? is {', '.join(_NAMES)}")
        if name in given or not value:
            raise UserError(f"{option}: {name} is {'there twice' if name in given else 'empty'}: give one value")
        given[name] = value
    return given


def _size(given: Mapping[str, str], name: str, option: str, default: int) -> int:
    return parse_size_bytes(f"{option}: {name}", given[name]) if name in given else default
