"""`xkv`: the command line.

Owns: the list of commands, the exit codes (0 done, 1 a failure, 2 the user's mistake), and that a mistake is one
line and no traceback, for a program one line of JSON.
Must not know: what a command does; each lives in a `commands_*` module with a `register(app)`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Final, cast

import typer

from . import (
    __version__,
    commands_bench,
    commands_contents,
    commands_doctor,
    commands_gateway,
    commands_verify,
    commands_why,
    contributed,
)
from .console import Output, UnwritableError
from .errors import MediumError, PeerError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_FAILURE: Final = 1
EXIT_MISTAKE: Final = 2
EXIT_INTERRUPTED: Final = 130

_OWN: Final = (commands_gateway, commands_contents, commands_verify, commands_bench, commands_doctor, commands_why)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"xkv {__version__}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and end."),
    ] = False,
) -> None:
    """KV objects on local NVMe cards: the gateway and what looks after it."""


def program(words: Sequence[str] = (), others: contributed.Commands | None = None) -> typer.Typer:
    """The program with our commands and those that `others` bring (None: the packages that are installed).

    Where names are equal, theirs is taken. With `words`, a command line, what it cannot be about is not loaded. Raises
    UserError for a package that is broken.
    """
    app = typer.Typer(name="xkv", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_options)
    theirs = contributed.found() if others is None else others
    wanted = next((word for word in words if not word.startswith("-")), None)
    for module in _OWN:
        module.register(app)
    for name, load in theirs.items():
        if wanted in (None, name):
            contributed.register(app, name, load)
    return app


_USAGE_ERROR: Final = cast("type[Exception]", typer.BadParameter.__base__)
"""Some releases of typer bring click under a name of their own: this is its class by any name."""


def main(arguments: Sequence[str] | None = None, others: contributed.Commands | None = None) -> int:
    """Run one command; returns its exit code. The console script hands it to `sys.exit`. `others`: as of `program`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words, others)
    except (BrokenPipeError, UnwritableError) as error:
        if isinstance(error, UnwritableError):
            Output(json=False).error(str(error))
        # Else whoever read us has enough; Python would complain again while it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _run(words: list[str], others: contributed.Commands | None) -> int:
    output = Output(json="--json" in words)
    try:
        code = program(words, others)(args=words, prog_name="xkv", standalone_mode=not output.json)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_FAILURE
    except (UserError, _USAGE_ERROR) as error:
        is_ours = isinstance(error, UserError)
        output.error(str(error) if is_ours else cast("typer.BadParameter", error).format_message())
        return EXIT_MISTAKE
    except (MediumError, PeerError) as error:
        output.error(str(error))
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
