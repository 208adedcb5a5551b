"""What a gateway and the process that calls a remote's library say to each other: one packet, one message.

Owns: these messages, their bounds, and what the library's codes mean. Must not know: the library, sockets, objects.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

import msgspec

CALL_OBJECTS_MAX: Final = 512
"""Of one call: its packet stays below the default socket buffer."""
PACKET_BYTES_MAX: Final = 65_536

TRANSFER: Final = 0
"""The gateway's transfer memory, among the memories of a call; engines' rings have other numbers."""

NOT_FOUND: Final = -704
"""The library's word for a key that the pool does not have."""
TOO_LARGE: Final = -600
"""The library's word for an object that is larger than what it was to come into."""
_CODES: Final = {
    -200: "the pool has no room",
    TOO_LARGE: "the object is larger than was expected",
    NOT_FOUND: "not found",
    -706: "in use",
    -800: "the transfer failed",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}


class Lane(str, Enum):
    """Calls of one lane come one after the other, those of different lanes at once."""

    LOOK = "look"  # existence, and removals
    LOAD = "load"
    STORE = "store"
    MAP = "map"  # an engine's ring, to be reached from now on, or no more


class Call(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Call the library for these keys. `offsets`, `sizes`: of each one's bytes in the shared memory; none to look.

    `memories`: which memory that is for each, TRANSFER or a ring's number; all TRANSFER where it is empty. To map
    there is one of each, no key that the library sees, and the ring's descriptor beside the packet; with `remove` none.
    To store with `remove` is to replace what is there.
    """

    number: int
    lane: Lane
    keys: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=CALL_OBJECTS_MAX)]
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    remove: bool = False
    memories: tuple[int, ...] = ()


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """The library is set up; `host`: as others know this machine."""

    host: str


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """It is not; the process ends."""

    reason: str


class Codes(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """What the library says of each key: negative is an error; else 1 or 0 (there or not), bytes, or 0."""

    number: int
    codes: tuple[int, ...]


FromChild = Ready | Failed | Codes
_encoder: Final = msgspec.msgpack.Encoder()
_to_child: Final = msgspec.msgpack.Decoder(Call)
_from_child: Final[msgspec.msgpack.Decoder[FromChild]] = msgspec.msgpack.Decoder(FromChild)


def pack(message: Call | FromChild) -> bytes:
    """One packet."""
    return _encoder.encode(message)


def unpack_call(packet: bytes) -> Call:
    """What the gateway said; msgspec.MsgspecError where it is nothing of the kind."""
    return _to_child.decode(packet)


def unpack_answer(packet: bytes) -> FromChild:
    """What the process said; msgspec.MsgspecError where it is nothing of the kind."""
    return _from_child.decode(packet)


def code_text(code: int) -> str:
    """The library's code in words."""
    return f"{_CODES[code]} ({code})" if code in _CODES else f"code {code}"
