"""Options that mean nothing for what was asked: whoever typed them expects something of them.

Owns: the words in which they are refused. Must not know: any command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping


def refuse_unused(options: Mapping[str, object], because: str) -> None:
    """UserError for those that were given (not None); `because` says what they are of, or what is in their place."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        names = given[0] if len(given) == 1 else f"{', '.join(given[:-1])} and {given[-1]}"
        raise UserError(f"{names}: {because}; leave {'it' if len(given) == 1 else 'them'} out")
