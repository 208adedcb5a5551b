"""Where everything of development and CI lies, and the rows that sessions are made for.

Owns: the paths below the repository, and reading matrix/targets.toml (a malformed row ends nox with one line).
Must not know: sessions, environments or results.
"""

from __future__ import annotations

import sys
from pathlib import Path

from xkv_matrix.findings import EXIT_BAD_INPUT, MatrixError
from xkv_matrix.targets import Target, load_targets

__all__ = ["PACKAGES", "RESULTS", "ROOT", "STATE", "targets", "there", "title"]

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".xkv"
RESULTS = ROOT / "results"
PACKAGES = ("packages/xkv-store", "compat", "packages/xkv-offload")


def targets() -> tuple[Target, ...]:
    """Every row, oldest release first."""
    try:
        return tuple(sorted(load_targets(), key=lambda target: target.order))
    except MatrixError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(EXIT_BAD_INPUT)


def there(*patterns: str) -> list[str]:
    """Give what of these paths exists, relative to the root; patterns are globs."""
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def title(name: str, target: str | None) -> str:
    """Give a session's name as nox and the gate have it."""
    return f"{name}({target})" if target else name
