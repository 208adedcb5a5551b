"""Where everything of development and CI lies, and the rows that sessions are made for.

Owns: the paths below the repository, and reading matrix/targets.toml (a malformed row ends nox with one line).
Must not know: sessions, environments or results.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from xkv_matrix.findings import EXIT_BAD_INPUT, MatrixError
from xkv_matrix.targets import COMMITTED, TARGETS_VARIABLE, Target, load_targets

__all__ = ["GATE", "PACKAGES", "RESULTS", "ROOT", "STATE", "refuse", "targets", "there", "title"]

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".xkv"
RESULTS = ROOT / "results"
GATE = ROOT / "gate.json"
ROWS = COMMITTED
PACKAGES = ("packages/xkv-store", "compat", "packages/xkv-offload")


def refuse(text: str) -> NoReturn:
    """End nox with one line and the exit code of bad input."""
    sys.stderr.write(f"error: {' '.join(text.split())}\n")
    sys.exit(EXIT_BAD_INPUT)


def targets() -> tuple[Target, ...]:
    """Every committed row, oldest release first; the variable that names others is for a candidate's tests."""
    if os.environ.get(TARGETS_VARIABLE):
        sys.stderr.write(f"{TARGETS_VARIABLE} is set; sessions go by the committed rows\n")
    try:
        return tuple(sorted(load_targets(ROWS), key=lambda target: target.order))
    except MatrixError as error:
        with suppress(OSError):
            GATE.unlink()  # of rows that cannot be read no older verdict stands
        refuse(str(error))


def there(*patterns: str) -> list[str]:
    """Give what of these paths exists, relative to the root; patterns are globs."""
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def title(name: str, target: str | None) -> str:
    """Give a session's name as nox and the gate have it."""
    return f"{name}({target})" if target else name
