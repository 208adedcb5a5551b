"""``python -m`` entry.

Owns: handing the exit code on, and keeping the current folder out of what is imported: it may be the very tree
that is looked at. Must not know: anything else.
"""

# Only what every start of Python has loaded already, until the current folder is out of the search path.
import os
import sys

if sys.path and sys.path[0] in {"", os.getcwd()}:  # noqa: PTH109 - pathlib would be looked for there
    del sys.path[0]

from .report import main

sys.exit(main())
