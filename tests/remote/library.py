"""Where a remote's library lies: in a folder of its own, which a gateway's process gets behind all that it has.

Owns: that folder. Must not know: what is run there.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from xkv_store.remote_child import LIBRARY

SITE_VARIABLE = "XKV_REMOTE_SITE"  # nox sets it


def folder() -> Path | None:
    """The library's own folder; None where it is not installed."""
    site = os.environ.get(SITE_VARIABLE)
    if site is not None:
        own = Path(site) / LIBRARY
        return own if own.is_dir() else None
    spec = importlib.util.find_spec(LIBRARY)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def environment() -> dict[str, str]:
    """What a gateway needs beside our environment; engines do not get it, and keep their own versions of all else."""
    site = os.environ.get(SITE_VARIABLE)
    if site is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(part for part in (os.environ.get("PYTHONPATH", ""), site) if part)}
