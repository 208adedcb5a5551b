"""Commands of `xkv` that other packages bring (ADR 0012).

Owns: the group of entry points that is looked at, loading one, and what is said where that fails.
Must not know: which packages there are, what their commands do, versions.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from .errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import typer

GROUP: Final = "xkv.commands"


def found() -> Mapping[str, Callable[[], Callable[[typer.Typer], None]]]:
    """Command → what loads the function that adds it to the program. Nothing of those packages is imported."""
    return {entry.name: entry.load for entry in entry_points(group=GROUP)}


def register(app: typer.Typer, name: str, load: Callable[[], Callable[[typer.Typer], None]]) -> None:
    """Add one command. Raises UserError where its package cannot be imported."""
    try:
        add = load()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(
            f"the command {name!r} of another package cannot be loaded ({why}); install that package again, as this "
            "release, or remove it"
        ) from error
    add(app)
