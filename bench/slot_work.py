"""What a slot costs beside its bytes: objects written and read by many threads of one interpreter, on a card in memory.

Owns: `python bench/slot_work.py [--slot-bytes N] [--threads N]`: for each kind of object the time, the CPU time and the
waits, as one JSON object. Must not know: the gateway, its loop, engines.

Slots of 4 KiB (the least) have next to no bytes: what they cost is the work for a slot. Usual ones are 262144.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from xkv_store import native
from xkv_store.database import Database, new_superblock
from xkv_store.geometry import SLOT_BYTES_MIN, Geometry
from xkv_store.key import ObjectKey
from xkv_store.layout import Extent
from xkv_store.medium import Medium
from xkv_store.plans import GetPlan, PutPlan
from xkv_store.ring import Ring

if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY: Final = Path("/dev/shm")
CARD: Final = b"benchmark's card"
DATABASES: Final = 8
DATABASE_SLOTS: Final = 160
SLOTS_MAX: Final = 129  # an object of 32 MiB in usual slots
BYTES: Final = 1_500_000_000  # moved for each figure
SLOTS_MOVED_MAX: Final = 60_000


class Kind(NamedTuple):
    """Objects of so many slots, in one extent or in parts in every database."""

    name: str
    slots: int
    is_spread: bool


KINDS: Final = (Kind("129 in 8 parts", SLOTS_MAX, True), Kind("129", SLOTS_MAX, False), Kind("9", 9, False))


def main() -> None:
    """All kinds, written and read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slot-bytes", type=int, default=SLOT_BYTES_MIN)
    parser.add_argument("--threads", type=int, default=16)
    options = parser.parse_args()
    geometry, threads = Geometry(options.slot_bytes), options.threads
    figures: dict[str, object] = {"way": native.path_word(), "slot_bytes": options.slot_bytes, "threads": threads}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY, prefix="xkv-bench-")))
        databases = [_database(folder / f"db-{number}.xkv", number, geometry) for number in range(DATABASES)]
        medium = Medium(databases, geometry, CARD)
        ring = Ring.create(threads * SLOTS_MAX, geometry.slot_bytes)
        ring.array[:] = 7
        for kind in KINDS:
            plans = [_plan(kind, thread, geometry) for thread in range(threads)]
            numbers = [tuple(range(thread * kind.slots, (thread + 1) * kind.slots)) for thread in range(threads)]

            def write(thread: int, plans: list[GetPlan] = plans, numbers: list[tuple[int, ...]] = numbers) -> None:
                medium.write(PutPlan(*plans[thread]), ring.views(numbers[thread]))

            def read(thread: int, plans: list[GetPlan] = plans, numbers: list[tuple[int, ...]] = numbers) -> None:
                medium.read(plans[thread], ring.views(numbers[thread]), 0)

            moved = min(SLOTS_MOVED_MAX, BYTES // geometry.slot_bytes)
            each = max(1, moved // kind.slots // threads)
            figures[f"write {kind.name}"] = _measured(write, threads, each, kind.slots)
            figures[f"read {kind.name}"] = _measured(read, threads, each, kind.slots)
        for database in databases:
            database.close()
        ring.close()
    print(json.dumps(figures, indent=1))


def _database(path: Path, number: int, geometry: Geometry) -> Database:
    numbers = {"number": number, "databases": DATABASES, "slot_bytes": geometry.slot_bytes, "slots": DATABASE_SLOTS}
    Database.make(path, new_superblock(**numbers, card_uuid=CARD, database_uuid=bytes([number]) * 16))
    return Database.open(path)


def _plan(kind: Kind, thread: int, geometry: Geometry) -> GetPlan:
    """Several threads' objects lie in the same slots: their bytes are alike."""
    if kind.is_spread:
        first = kind.slots - (DATABASES - 1) * (kind.slots // DATABASES)
        sizes = [first, *[kind.slots // DATABASES] * (DATABASES - 1)]
        extents = tuple(Extent(number, first * (thread % DATABASES), size) for number, size in enumerate(sizes))
    else:
        extents = (Extent(thread % DATABASES, 0, kind.slots),)
    length = (kind.slots - 1) * geometry.fragment_bytes + 1_000
    return GetPlan(ObjectKey(CARD, 0, b"h" * 32, 0), b"k" * 55, 7, length, 3, 4, kind.slots, extents)


def _measured(act: Callable[[int], None], threads: int, each: int, slots: int) -> dict[str, float]:
    def work(thread: int) -> None:
        for _ in range(each):
            act(thread)

    for thread in range(threads):
        act(thread)  # memory is touched
    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took_s, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    moved = threads * each * slots
    return {
        "us_a_slot": round(took_s / moved * 1e6, 2),
        "cpu_us_a_slot": round(cpu_s / moved * 1e6, 2),
        "waits_an_object": round((after.ru_nvcsw - before.ru_nvcsw) / (threads * each), 2),
    }


if __name__ == "__main__":
    main()
