"""The release whose engine and whose own functions are measured.

Owns: where its python is, and what a process of it is given.
Must not know: what is measured.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Release:
    """An environment in which vLLM is installed."""

    python: str

    @property
    def home(self) -> Path:
        """Where this release keeps what it has found out about models: whoever set up its environment says so."""
        return Path(os.environ.get("VLLM_CACHE_ROOT") or Path(self.python).parents[1] / "vllm-root")

    @property
    def env(self) -> dict[str, str]:
        """Our own, with our sources before what is installed there."""
        paths = [entry for entry in sys.path if entry and "site-packages" not in entry and "/lib/python" not in entry]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
