"""Which objects a command means, from what was typed of their keys.

Owns: reading the beginnings of hex digits, and whether an object is meant. Must not know: cards, commands' names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .errors import PeerError, UserError
from .geometry import HASH_BYTES_MAX, KEY_BYTES_MAX, NAMESPACE_BYTES
from .key import ObjectKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .contents import HeldObject

_HEX: Final = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Selection:
    """`digits`: what a key's hex form begins with; `hash_digits`: the same of its block hash alone.

    `before`: only what was put before that generation was given.
    """

    digits: str = ""
    hash_digits: str = ""
    before: int | None = None

    @classmethod
    def parse(cls, *, namespace: str | None, key: str | None, block_hash: str | None, before: int | None) -> Selection:
        """From options; UserError that names the one that is wrong."""
        if namespace is not None and key is not None:
            raise UserError("--namespace and --key both say how keys begin: type one of them")
        digits = _digits("--namespace", namespace, NAMESPACE_BYTES) + _digits("--key", key, KEY_BYTES_MAX)
        return cls(digits, _digits("--block-hash", block_hash, HASH_BYTES_MAX), before)

    @property
    def is_everything(self) -> bool:
        """Whether nothing was said."""
        return self == Selection()

    @property
    def is_namespaces(self) -> bool:
        """Whether all objects of a namespace are meant where one is."""
        return len(self.digits) <= 2 * NAMESPACE_BYTES and not self.hash_digits and self.before is None

    @property
    def prefix(self) -> bytes:
        """What the encoded keys begin with."""
        return bytes.fromhex(self.digits[: len(self.digits) // 2 * 2])

    def of(self, objects: Iterable[HeldObject]) -> Iterator[HeldObject]:
        """Those that are meant."""
        if not (len(self.digits) % 2 or self.hash_digits or self.before is not None):
            return iter(objects)
        return (one for one in objects if self._means(one))

    def _means(self, one: HeldObject) -> bool:
        if self.before is not None and one.generation >= self.before:
            return False
        if not one.key.hex().startswith(self.digits):
            return False
        if not self.hash_digits:
            return True
        try:
            return ObjectKey.decode(one.key).block_hash.hex().startswith(self.hash_digits)
        except PeerError:
            return False  # an entry of the index that is damaged itself


def _digits(option: str, text: str | None, bytes_max: int) -> str:
    if text is None:
        return ""
    digits = text.strip().lower()
    if not digits or not _HEX.fullmatch(digits):
        raise UserError(f"{option} {text!r} is no beginning of hex digits: type some of those that `xkv ls` shows")
    if len(digits) > 2 * bytes_max:
        raise UserError(f"{option} has {len(digits)} hex digits, at most {2 * bytes_max} are possible: type fewer")
    return digits
