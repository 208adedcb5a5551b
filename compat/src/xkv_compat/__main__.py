"""``python -m`` entry. Owns: handing the exit code on. Must not know: anything else."""

from __future__ import annotations

import sys

from .report import main

sys.exit(main())
