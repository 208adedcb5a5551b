"""What messages are made of: the two kinds of struct, and the fields that are checked when they are decoded.

Owns: how a message is laid out (an array, tagged), the bound of a message, the types of its fields.
Must not know: any message.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from .geometry import KEY_BYTES_MAX, NAMESPACE_BYTES

MESSAGE_BYTES_MAX: Final = 65_536
"""Below the default socket buffer, so that the kernel keeps a message whole and takes several at once."""

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=KEY_BYTES_MAX)]
KeyPart = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES_MAX)]
Namespace = Annotated[bytes, msgspec.Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]


class Part(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """A piece of a message."""


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """One packet's content."""
