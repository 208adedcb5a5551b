"""Commands of `xkv` that other packages bring (ADR 0012).

Owns: the group of entry points that is looked at, loading one, and what is said where that fails.
Must not know: which packages there are, what their commands do, versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Final

import typer

from .errors import UserError

Register = Callable[[typer.Typer], None]
Load = Callable[[], Register]
Commands = Mapping[str, Load]
"""Command → what loads the function that adds it to the program."""

GROUP: Final = "xkv_commands"


def found() -> Commands:
    """What the installed packages say. Nothing of them is imported."""
    return {entry.name: entry.load for entry in entry_points(group=GROUP)}


def register(app: typer.Typer, name: str, load: Load) -> None:
    """Add one command, in the place of ours where there is one of that name.

    Raises UserError where its package cannot be imported.
    """
    try:
        add = load()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(
            f"the command {name!r} of another package cannot be loaded ({why}); install that package again, as this "
            "release, or remove it"
        ) from error
    app.registered_commands = [one for one in app.registered_commands if one.name != name]
    add(app)
