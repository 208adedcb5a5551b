"""Whether a ring may be taken as a whole: by a control group's limit and by what the machine has left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from xkv_store import ring as rings
from xkv_store.memory_limit import Roots, group_limit, groups_have_room, has_room_for_ring
from xkv_store.ring import Ring

MIB = 1 << 20
LIMIT = 256 * MIB
RING_SLOTS = 2_048  # of 256 KiB: 512 MiB
GROUPS = Path("/sys/fs/cgroup")


def roots(folder: Path, *, limit: str, available_kib: int = 1 << 30) -> Roots:
    """A machine of version 2 whose group `a` may have `limit`."""
    made = Roots(folder / "proc", folder / "groups")
    (made.proc / "self").mkdir(parents=True)
    (made.groups / "a").mkdir(parents=True)
    (made.proc / "self" / "cgroup").write_text("0::/a\n", encoding="utf-8")
    (made.groups / "a" / "memory.max").write_text(limit, encoding="utf-8")
    (made.proc / "meminfo").write_text(f"MemAvailable:   {available_kib} kB\n", encoding="utf-8")
    return made


@pytest.mark.parametrize(
    ("limit", "available_kib", "ring", "has_room"),
    [
        ("max\n", 1 << 30, 1 << 40, True),
        (f"{2 * LIMIT}\n", 1 << 30, LIMIT, True),
        (f"{2 * LIMIT}\n", 1 << 30, LIMIT + 1, False),  # the other half is the engine's own
        ("max\n", 1024, MIB, True),
        ("max\n", 1024, MIB + 1, False),
    ],
)
def test_room(tmp_path: Path, limit: str, available_kib: int, ring: int, has_room: bool) -> None:
    assert has_room_for_ring(ring, roots(tmp_path, limit=limit, available_kib=available_kib)) is has_room


def test_what_other_ranks_have_taken_of_a_ring_counts_once(tmp_path: Path) -> None:
    little = roots(tmp_path, limit="max\n", available_kib=1024)
    assert has_room_for_ring(4 * MIB, little, taken_bytes=3 * MIB)
    assert not has_room_for_ring(4 * MIB + 1, little, taken_bytes=3 * MIB)


def test_nothing_is_known_and_nothing_hinders(tmp_path: Path) -> None:
    nowhere = Roots(tmp_path / "proc", tmp_path / "groups")
    assert group_limit(nowhere) is None
    assert has_room_for_ring(1 << 40, nowhere)


@pytest.mark.parametrize(
    ("limit", "held", "have_room"),
    [("max\n", "9\n", True), ("100\n", "49\n", True), ("100\n", "50\n", False), ("100\n", "", True)],
)
def test_a_group_has_room_until_half_of_what_it_may_have_is_held(
    tmp_path: Path, limit: str, held: str, have_room: bool
) -> None:
    found = roots(tmp_path, limit=limit)
    (found.groups / "a" / "memory.current").write_text(held, encoding="utf-8")
    assert groups_have_room(found) is have_room
    (found.groups / "memory.max").write_text("1000\n", encoding="utf-8")
    (found.groups / "memory.current").write_text("501\n", encoding="utf-8")
    assert not groups_have_room(found), "the one above it has none"


def test_groups_of_version_1_are_known_as_well(tmp_path: Path) -> None:
    found = roots(tmp_path, limit="max\n")
    (found.proc / "self" / "cgroup").write_text("7:memory:/b\n", encoding="utf-8")
    group = found.groups / "memory" / "b"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("100\n", encoding="utf-8")
    (group / "memory.usage_in_bytes").write_text("51\n", encoding="utf-8")
    assert not groups_have_room(found)
    (group / "memory.usage_in_bytes").write_text("49\n", encoding="utf-8")
    assert groups_have_room(found)


def test_a_ring_that_might_be_too_large_is_not_taken_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "has_room_for_ring", lambda _, **__: False)
    ring = Ring.create(16, 1 << 18)
    assert ring.use_huge_pages([range(16)]) == 0
    assert os.fstat(ring.fd).st_blocks == 0, "nothing was touched"
    ring.close()


CHILD = f"""
import os, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
from xkv_store.ring import Ring
ring = Ring.create({RING_SLOTS}, 1 << 18)
print(ring.use_huge_pages([range({RING_SLOTS})]), flush=True)
"""


def test_an_engine_in_a_small_group_lives() -> None:
    """In a real group with half of what its ring has: taking all of it would end the process."""
    version_1 = (GROUPS / "memory").is_dir()
    folder = (GROUPS / "memory" if version_1 else GROUPS) / f"xkv-test-{os.getpid()}"
    if not os.access(folder.parent, os.W_OK):  # not root, or a container that has its groups read-only
        assert group_limit(Roots()) is None or has_room_for_ring(1)
        return
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(LIMIT), encoding="utf-8")
        words = [sys.executable, "-c", CHILD, str(folder / "cgroup.procs")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != -signal.SIGKILL, "the kernel ended it"
        assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    finally:
        folder.rmdir()
