"""A soak's gateway: `python -m soak.gateway [--fault NAME] WORDS`.

Owns: the command, sound or broken. Must not know: what is done with it.
"""

from __future__ import annotations

import sys

from soak import broken
from xkv_store import cli


def main(arguments: list[str]) -> int:
    """Serve."""
    if arguments[:1] == ["--fault"]:
        broken.FAULTS[arguments[1]]()
        arguments = arguments[2:]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
