"""Named points that running code has reached, so that a test can stop a process exactly there.

Owns: the table of points, the marker files, the bounded wait. Switched on by the environment variable
XKV_POINTS=<folder> at process start and by nothing else; otherwise a point costs one comparison.
Must not know: what the code does at a point, or who watches.

Reaching P appends a line to <folder>/P.reached; while <folder>/P.hold exists, the thread waits there. Where
<folder>/P.kill exists and holds N, the process kills itself (SIGKILL) there, the Nth time that P is reached.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

ENVIRONMENT_NAME: Final = "XKV_POINTS"
HOLD_S_MAX: Final = 60.0  # a test that died must not leave a process standing for ever
HOLD_POLL_S: Final = 0.005  # short against any I/O that a test waits for, long against a busy loop

POINTS: Final[frozenset[str]] = frozenset(
    {
        "put.received",  # decoded and admitted by the card, not yet queued
        "put.before_write",  # on an I/O thread, nothing of it is on the medium
        "put.mid_write",  # its first run is on the medium, more may follow
        "put.written",  # all of it is on the medium, the index does not know it
        "put.before_commit",  # its entry is in a batch that is about to be committed
        "put.committed",  # the index holds it, the lookup table does not
        "put.queued",  # on the main thread, its entry waits for a batch; a former object is in limbo
        "put.confirmed",  # the lookup table holds it, its answer is not sent
        "put.answered",  # its answer is in the session's outbox
        "get.received",  # decoded and found, not yet queued
        "get.before_read",  # on an I/O thread, nothing is read
        "get.read",  # read and verified, in the ring
        "get.answered",  # its answer is in the session's outbox
        "evict.begin",  # an object is about to leave the index for limbo
        "evict.removed",  # it has left the table, and its removal waits for a batch
        "evict.committed",  # a batch that removes entries is committed
        "limbo.released",  # its slots are free again
        "commit.begin",  # a transaction of the index is open, nothing of the batch is in it
        "commit.applied",  # all of the batch is in the transaction, which is not committed
        "commit.ended",  # the index's transaction is committed, no ceiling is synced
        "open.before_lock",  # a card's folder is about to be locked
        "open.locked",  # it is, and nothing is read
        "open.taken",  # the index is read, and says that this life has it open
        "close.committed",  # at a clean end everything is committed, nothing is synced
        "close.synced",  # the databases are synced, the index is not marked as closed
    }
)

_folder: Path | None = None


def look_at_environment() -> None:
    """Switch the points on or off as the environment says; done at import, and in a forked process of a test."""
    global _folder  # noqa: PLW0603  the one switch of the process
    named = os.environ.get(ENVIRONMENT_NAME)
    _folder = Path(named) if named else None


def reached(name: str) -> None:
    """Say that this thread has reached the point `name`, and wait there while a test holds it."""
    if _folder is not None:
        _mark(_folder, name)


def _mark(folder: Path, name: str) -> None:
    assert name in POINTS, f"{name!r} is not in the table of points"
    line = f"{time.monotonic_ns()} {os.getpid()}\n"
    with (folder / f"{name}.reached").open("a", encoding="ascii") as file:
        file.write(line)
    kill = folder / f"{name}.kill"
    if kill.exists() and len((folder / f"{name}.reached").read_bytes().splitlines()) >= int(kill.read_text("ascii")):
        os.kill(os.getpid(), signal.SIGKILL)
    hold = folder / f"{name}.hold"
    deadline = time.monotonic() + HOLD_S_MAX
    while hold.exists() and time.monotonic() < deadline:
        time.sleep(HOLD_POLL_S)


look_at_environment()
