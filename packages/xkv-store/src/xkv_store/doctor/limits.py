"""What the kernel lets a process have: memory that may be locked, memory at all, and huge pages.

Owns: reading limits of a process, and what they and those of its control groups mean for a ring.
Must not know: what is in a ring, GPUs, the engine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..errors import UserError  # noqa: TID252  the package may have another name
from ..huge_pages import HUGE_PAGE_BYTES, Mapping  # noqa: TID252
from ..memory_limit import (  # noqa: TID252
    RING_SHARE_MAX,
    GroupLimit,
    Roots,
    available_bytes,
    group_limit,
    read_if_there,
)
from ..ring import make_sealed_memory  # noqa: TID252
from ..sizes import format_size  # noqa: TID252
from .findings import fault, note, ok, warning

if TYPE_CHECKING:
    from .findings import Finding

CAP_IPC_LOCK: Final = 14  # its bit in CapEff: memory is locked without a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """One process's. None is "no limit", or, for what is available, "not known"."""

    memlock_bytes: int | None
    memlock_hard_bytes: int | None
    locks_freely: bool
    group: GroupLimit | None
    available_bytes: int | None


def gather_limits(pid: int | None = None, roots: Roots | None = None) -> Limits:
    """The limits of a process (None: this one). Raises UserError where it is not there."""
    roots = roots or Roots()
    own = roots.proc / (str(pid) if pid else "self")
    if not own.is_dir():
        raise UserError(f"--pid {pid}: there is no such process; type the engine's (pgrep -f vllm)")
    soft, hard = _memlock(read_if_there(own / "limits"))
    return Limits(
        memlock_bytes=soft,
        memlock_hard_bytes=hard,
        locks_freely=_locks_freely(read_if_there(own / "status")),
        group=group_limit(roots, process=own.name),
        available_bytes=available_bytes(roots),
    )


def examine_memlock(limits: Limits, *, ring_bytes: int) -> Finding:
    """Whether a GPU's ring can be pinned."""
    if limits.locks_freely or limits.memlock_bytes is None:
        return ok("memlock", "memory may be locked without a limit")
    if limits.memlock_bytes >= ring_bytes:
        return ok("memlock", f"{format_size(limits.memlock_bytes)} may be locked: the ring fits")
    kib = -(-ring_bytes // 1024)
    raised = f"ulimit -l {kib}"
    if limits.memlock_hard_bytes is not None and limits.memlock_hard_bytes < ring_bytes:
        raised = "as root, LimitMEMLOCK=infinity in the engine's unit, or --ulimit memlock=-1 for its container"
    return warning(
        "memlock",
        f"{format_size(limits.memlock_bytes)} of memory may be locked, and the ring has {format_size(ring_bytes)}",
        "where a driver keeps to the limit, a GPU's ring is not pinned, and every copy is slower by several times",
        f"{raised}; or give a smaller xkv.ring_bytes",
    )


def examine_memory(limits: Limits, *, ring_bytes: int) -> Finding:
    """Whether the ring's memory is there."""
    ring = f"the ring has {format_size(ring_bytes)} (xkv.ring_bytes)"
    group = limits.group
    if group is not None and ring_bytes > group.limit_bytes * RING_SHARE_MAX:
        found = fault if ring_bytes >= group.limit_bytes else warning
        return found(
            "memory",
            f"the control group's limit is {format_size(group.limit_bytes)} ({group.file}), and {ring}",
            "the kernel kills the engine (or its gateway) while the ring fills, in the midst of its work",
            f"raise the limit (MemoryMax= of the unit, --memory of the container), or give xkv.ring_bytes of at most "
            f"{int(group.limit_bytes * RING_SHARE_MAX)}",
        )
    if limits.available_bytes is not None and ring_bytes > limits.available_bytes:
        return warning(
            "memory",
            f"{format_size(limits.available_bytes)} of memory are available, and {ring}",
            "the machine swaps, or the kernel ends a process, while the ring fills",
            "end something else, or give a smaller xkv.ring_bytes",
        )
    limit = "no control group limits memory" if group is None else f"the limit is {format_size(group.limit_bytes)}"
    return ok("memory", f"{limit}: the ring fits")


def gather_huge_pages() -> bool:
    """Whether this kernel puts a ring into huge pages: by doing it. False where it does not even give the memory."""
    try:
        fd = make_sealed_memory("xkv-doctor", HUGE_PAGE_BYTES)
        try:
            return Mapping(fd, HUGE_PAGE_BYTES).use_huge_pages([range(HUGE_PAGE_BYTES)]) == HUGE_PAGE_BYTES
        finally:
            os.close(fd)
    except OSError:
        return False


def examine_huge_pages(*, given: bool) -> Finding:
    """What a ring lies in."""
    if given:
        return ok("huge pages", "the kernel puts rings into them")
    return note(
        "huge pages",
        "the kernel gave none: it is older than Linux 6.1, or its free memory is in small pieces",
        "a ring lies in small pages, and direct I/O of large objects is slower by a third and more",
        "Linux 6.1 or later; there, as root: echo 1 > /proc/sys/vm/compact_memory",
    )


# --- the kernel's files ------------------------------------------------------------------------------------------


def _memlock(limits: str) -> tuple[int | None, int | None]:
    """The soft and the hard limit; None is "unlimited", and not known."""
    found = re.search(r"(?m)^Max locked memory +(\S+) +(\S+)", limits)
    soft, hard = found.groups() if found is not None else ("", "")
    return int(soft) if soft.isdigit() else None, int(hard) if hard.isdigit() else None


def _locks_freely(status: str) -> bool:
    found = re.search(r"(?m)^CapEff:\s*([0-9a-f]+)", status)
    return found is not None and bool(int(found[1], 16) >> CAP_IPC_LOCK & 1)
