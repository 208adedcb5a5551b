"""What a card is made with, and what its databases and index are made of.

Owns the options with their checks, and the place where a test puts media that fail. Must not know what is in a folder.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .database import Database
from .errors import UserError
from .geometry import DATABASES_MAX, Geometry
from .index import Index
from .quotas import Quotas

GRACE_MS_DEFAULT = 5_000
GRACE_MS_MAX = 600_000
NO_FOLDER = Path(os.devnull)
"""Of a card without databases that has no folder either."""


@dataclass(slots=True)
class Media:
    """What a card's databases and index are; a test puts some that fail in their place."""

    database: type[Database] = Database
    index: type[Index] = Index


MEDIA = Media()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardOptions:
    """Which card, and what it is made with where it is not there yet.

    `capacity_bytes`, `databases` (a number of files in the folder, or paths of files and block devices) and
    `slot_bytes` are the card's own once it is made; None takes what the card has, or the default. 0 databases: it is
    the remote alone (`card_alone`).
    """

    folder: Path
    capacity_bytes: int | None = None
    databases: int | tuple[Path, ...] | None = None
    slot_bytes: int | None = None
    grace_ms: int = GRACE_MS_DEFAULT
    create: bool = True
    quotas: Quotas = field(default_factory=Quotas)

    @property
    def is_alone(self) -> bool:
        """Whether the card is the remote alone."""
        return self.databases == 0

    def __post_init__(self) -> None:
        if not 0 <= self.grace_ms <= GRACE_MS_MAX:
            raise UserError(f"the grace must be 0 to {GRACE_MS_MAX} ms, not {self.grace_ms}")
        _check_names([self.folder, *(self.databases if isinstance(self.databases, tuple) else ())])
        count = self.databases if isinstance(self.databases, int) else len(self.databases or (0,))
        if self.databases != 0 and not 1 <= count <= DATABASES_MAX:
            raise UserError(f"a card has 1 to {DATABASES_MAX} databases, not {count}")
        if self.capacity_bytes is not None and self.capacity_bytes <= 0:
            raise UserError(f"the capacity must be a number of bytes, not {self.capacity_bytes}")
        if self.slot_bytes is not None:
            Geometry(self.slot_bytes)


def _check_names(paths: Sequence[Path]) -> None:
    """UserError for a path that could not be logged or told to anybody."""
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{os.fsencode(path)!r} is no path in UTF-8: give another one") from error
        if "\0" in str(path):
            raise UserError(f"{str(path)!r} is no path: give another one")
