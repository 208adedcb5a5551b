"""How much memory a process may have: its control groups' limits (versions 1 and 2), and what the machine has left.

Owns: finding the group's files and reading them. Must not know: what the memory is for.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

UNLIMITED_BYTES_MIN: Final = 1 << 60  # version 1 writes "no limit" as a number near 2^63
RING_SHARE_MAX: Final = 0.5  # of a memory limit; the rest is the engine's own
_HELD: Final = {"memory.limit_in_bytes": "memory.usage_in_bytes", "memory.max": "memory.current"}  # beside each limit


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel's files are."""

    proc: Path = Path("/proc")
    groups: Path = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimit:
    """A control group's memory limit."""

    limit_bytes: int
    file: Path


def group_limit(roots: Roots, *, process: str = "self") -> GroupLimit | None:
    """The limit that is met first, of the process's group and all above it; None where none is known."""
    return min(_limits(roots, process), key=lambda one: one.limit_bytes, default=None)


def groups_have_room(roots: Roots | None = None) -> bool:
    """Whether the process's group, and all above it, hold less than RING_SHARE_MAX of what each may have."""
    for one in _limits(roots or Roots(), "self"):
        held = read_if_there(one.file.with_name(_HELD[one.file.name])).strip()
        if held.isdigit() and int(held) >= one.limit_bytes * RING_SHARE_MAX:
            return False
    return True


def available_bytes(roots: Roots) -> int | None:
    """What the machine can still give without swapping; None where that is not known."""
    found = re.search(r"(?m)^MemAvailable:\s*(\d+) kB", read_if_there(roots.proc / "meminfo"))
    return int(found[1]) * 1024 if found else None


def has_room_for_ring(ring_bytes: int, roots: Roots | None = None, *, taken_bytes: int = 0) -> bool:
    """Whether a ring may be taken as a whole now, without this process or another being ended for it.

    `taken_bytes` of it are taken already, by other ranks: what the machine has left is without them.
    """
    roots = roots or Roots()
    group, available = group_limit(roots), available_bytes(roots)
    return (group is None or ring_bytes <= group.limit_bytes * RING_SHARE_MAX) and (
        available is None or ring_bytes - taken_bytes <= available
    )


def read_if_there(path: Path) -> str:
    """The text; empty where it is not there or not ours to read: then nothing is known of it."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _limits(roots: Roots, process: str) -> Iterator[GroupLimit]:
    for file in _files(read_if_there(roots.proc / process / "cgroup"), roots.groups):
        value = read_if_there(file).strip()
        if value.isdigit() and int(value) < UNLIMITED_BYTES_MIN:
            yield GroupLimit(limit_bytes=int(value), file=file)


def _files(text: str, groups: Path) -> Iterator[Path]:
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # In a container the path may be the host's, and only the root of what is mounted is there.
        folders = [folder for folder in (path, *map(str, Path(path).parents)) if folder.startswith("/")]
        if "memory" in controllers.split(","):
            yield from (Path(f"{groups}/memory{os.path.normpath(one)}", "memory.limit_in_bytes") for one in folders)
        elif number == "0" and not controllers:
            for mount in (groups, groups / "unified"):
                yield from (Path(f"{mount}{os.path.normpath(one)}", "memory.max") for one in folders)
