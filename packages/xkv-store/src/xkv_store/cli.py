"""`xkv`: the command line.

Owns: the list of commands, the exit codes (0 done, 1 the user's mistake or a failure, 2 wrong usage), and that
a mistake is one line and no traceback.
Must not know: what a command does; each lives in a `commands_*` module with a `register(app)`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import typer

from . import commands_gateway
from .console import Output
from .errors import MediumError, PeerError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_MISTAKE: Final = 1
EXIT_INTERRUPTED: Final = 130

app = typer.Typer(
    name="xkv",
    help="KV objects on local NVMe cards: the gateway and what looks after it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
commands_gateway.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. The console script hands it to `sys.exit`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=words, prog_name="xkv")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_MISTAKE
    except (UserError, MediumError, PeerError) as error:
        Output(json="--json" in words).error(str(error))
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has enough; Python would complain again while it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
