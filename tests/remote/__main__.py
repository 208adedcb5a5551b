"""`python -m remote --seconds N --seed S [--canary] [--json]`, with XKV_TARGET naming the release that is installed.

Owns: the line of a machine that lacks the library. Must not know: what a run does, or how it is told of.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from remote.library import folder as folder_of_library
from remote.run import Run
from stand.runs import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from remote.outcome import Outcome
    from stand.cases import Stand
    from stand.runs import Options


def run(stand: Stand, folder: Path, options: Options, say: Callable[[str], None]) -> Outcome:
    """One run."""
    return Run(stand, folder, options, say).run()


if __name__ == "__main__":
    if folder_of_library() is None:
        sys.exit("nothing was run: the remote's library is not installed here (requirements/remote.txt; Python 3.11)")
    sys.exit(main(sys.argv[1:], name="remote", run=run))
