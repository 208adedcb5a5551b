"""`python -m <package>.why`: `xkv why` where no metadata leads to it, as in a fork's copy.

Owns: nothing but that way in. Must not know: anything else.
"""

import sys

from xkv_store import cli

from .command import register

if __name__ == "__main__":
    sys.exit(cli.main(["why", *sys.argv[1:]], {"why": lambda: register}))
