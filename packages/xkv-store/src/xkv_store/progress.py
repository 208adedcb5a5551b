"""How far a long command is: a bar on a terminal's standard error, nothing for a program or a file.

Owns: the bar and when there is one. Must not know: what is being done.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .console import Output


class Progress(Protocol):
    """What a command tells while it works."""

    def expect(self, total: int) -> None:
        """So many in all."""

    def advance(self, done: int) -> None:
        """So many by now."""


class _Quiet:
    def expect(self, total: int) -> None:
        """Nobody looks."""

    def advance(self, done: int) -> None:
        """Nobody looks."""


QUIET: Final[Progress] = _Quiet()


@contextmanager
def progress(output: Output, doing: str) -> Iterator[Progress]:
    """A bar with the word `doing`, gone when the block ends."""
    if output.json or not sys.stderr.isatty():
        yield QUIET
        return
    # Rich costs a fifth of a second at import; see `console`.
    from rich import progress as of_rich  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    columns = (
        of_rich.TextColumn(doing),
        of_rich.BarColumn(),
        of_rich.MofNCompleteColumn(),
        of_rich.TimeRemainingColumn(),
    )
    terminal = Console(stderr=True)
    with of_rich.Progress(*columns, console=terminal, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(doing, total=None)

        class Bar:
            def expect(self, total: int) -> None:
                bar.update(task, total=total)

            def advance(self, done: int) -> None:
                bar.update(task, completed=done)

        yield Bar()
