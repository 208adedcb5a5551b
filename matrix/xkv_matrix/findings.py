"""What a check has to say, and what is wrong with what it was given.

Owns: the finding, the error for bad input and the exit codes. Must not know: any check.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

EXIT_OK = 0
EXIT_FINDINGS = 1
EXIT_BAD_INPUT = 2


class MatrixError(Exception):
    """Bad input: a malformed row, a wheel that is none, a hash that does not match. One line for the user."""


@dataclass(frozen=True)
class Finding:
    """One thing that does not fit.

    ``check``: which check found it. ``where``: a place in vLLM's source, in our tree, or a table's key.
    ``text``: what is wrong.
    """

    check: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.text}"

    def as_json(self) -> dict[str, Any]:
        """The finding as json-able data."""
        return asdict(self)
