"""`python bench/eviction [--traces DIR] [--json]`.

Owns: that it can be started as a folder. Must not know: anything else.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eviction.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
