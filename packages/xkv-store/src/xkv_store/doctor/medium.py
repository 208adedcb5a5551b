"""How fast the card's medium is: a throw-away card beside the real one, written and read for a bounded time.

Owns: the measurement's bounds, its card (made, filled, read, removed), and the two rates.
Must not know: gateways, rings, what the rates are for.

What is timed is what a gateway does with an object: slots are sealed and written, read and proved, by as many
threads as it has.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..card import Card  # noqa: TID252  the package may have another name
from ..card_options import CardOptions  # noqa: TID252
from ..database import aligned  # noqa: TID252
from ..errors import MediumError, UserError  # noqa: TID252
from ..geometry import DATA_OFFSET, NAMESPACE_BYTES, SLOT_BYTES, Geometry  # noqa: TID252
from ..io_pool import IO_THREADS_DEFAULT  # noqa: TID252
from ..key import ObjectKey  # noqa: TID252
from ..plans import GetPlan, PutPlan  # noqa: TID252
from ..progress import QUIET, Progress  # noqa: TID252
from ..sizes import format_size  # noqa: TID252
from .findings import note, ok

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .findings import Finding

BYTES_MAX: Final = 256 << 20  # written, and read: enough to be behind a device's own memory for a moment
FREE_SHARE_MAX: Final = 0.25  # of what is free there
SECONDS_MAX: Final = 3.0  # for each direction
OBJECT_SLOTS: Final = 16  # 4 MiB with usual slots: one call of the kernel for each object
SPARE_SLOTS: Final = 64  # so that no put meets a card that wants to evict
MANY: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Rates in bytes of payload per second; `moved_bytes` each way; `direct`: past the page cache."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    moved_bytes: int
    direct: bool

    def as_text(self) -> str:
        """For people."""
        write, read = (format_size(int(rate)) for rate in (self.write_bytes_per_s, self.read_bytes_per_s))
        by = "O_DIRECT" if self.direct else "through the page cache, so that the medium itself may be slower"
        return f"writes {write}/s, reads {read}/s ({format_size(self.moved_bytes)} each; {by})"

    def as_value(self) -> dict[str, object]:
        """For JSON."""
        return {
            "write_bytes_per_s": round(self.write_bytes_per_s),
            "read_bytes_per_s": round(self.read_bytes_per_s),
            "moved_bytes": self.moved_bytes,
            "direct": self.direct,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is written, and read, and how long that may take in each direction; and as what."""

    bytes_max: int = BYTES_MAX
    seconds_max: float = SECONDS_MAX
    slot_bytes: int = SLOT_BYTES
    threads: int = IO_THREADS_DEFAULT


def measure(folder: Path, effort: Effort, *, free_bytes: int, bar: Progress = QUIET) -> Bandwidth:
    """Write and read in a folder of our own within `folder`. `bar` counts objects, both ways.

    Raises UserError where there is no room, or nothing can be made there; MediumError where the medium fails.
    """
    slot_bytes = effort.slot_bytes
    geometry = Geometry(slot_bytes)
    object_slots = max(1, OBJECT_SLOTS * SLOT_BYTES // slot_bytes)
    if effort.bytes_max < object_slots * slot_bytes:
        raise UserError(f"an object alone takes {format_size(object_slots * slot_bytes)} here: measure with more")
    objects = min(effort.bytes_max, int(free_bytes * FREE_SHARE_MAX)) // (object_slots * slot_bytes)
    if objects < 1:
        raise UserError(f"{format_size(free_bytes)} are free in {folder}, too few to measure; make room there")
    capacity_bytes = DATA_OFFSET + (objects * object_slots + SPARE_SLOTS) * slot_bytes
    try:
        place = Path(tempfile.mkdtemp(prefix=".xkv-measure-", dir=folder))
    except OSError as error:
        raise UserError(f"nothing can be made in {folder} ({error.strerror}); name another folder") from error
    try:
        card = Card.open(
            CardOptions(folder=place, capacity_bytes=capacity_bytes, slot_bytes=slot_bytes, grace_ms=0, create=True)
        )
        try:
            return _timed(card, effort, bar, objects=objects, length=object_slots * geometry.fragment_bytes)
        finally:
            card.abandon()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def examine_bandwidth(bandwidth: Bandwidth) -> Finding:
    """Say it; whether it is enough depends on the model."""
    found = ok if bandwidth.direct else note
    return found("bandwidth", bandwidth.as_text())


def _timed(card: Card, effort: Effort, bar: Progress, *, objects: int, length: int) -> Bandwidth:
    bar.expect(2 * objects)
    plans = [card.begin_put(_key(number), length, 0, number, False, time.monotonic_ns()) for number in range(objects)]
    puts = [plan for plan in plans if isinstance(plan, PutPlan)]
    slots = _Buffers(fragments=puts[0].fragments, slot_bytes=card.geometry.slot_bytes)

    def write(plan: PutPlan) -> None:
        card.write(plan, slots.mine())

    def read(plan: GetPlan) -> None:
        card.read(plan, slots.mine(), 0)

    wrote, write_s = _spread([partial(write, plan) for plan in puts], effort, bar.advance)
    for place, plan in enumerate(puts):
        # What was not begun in time is given back: its slots hold nothing.
        card.finish_put(plan, None if place < wrote else MediumError(0, "not written in time"))
    gets = [got for plan in puts[:wrote] if (got := card.begin_get(plan.key, time.monotonic_ns())) is not None]
    got_back, read_s = _spread([partial(read, got) for got in gets], effort, lambda done: bar.advance(objects + done))
    for got in gets:
        card.end_get(got)
    return Bandwidth(
        write_bytes_per_s=wrote * length / write_s,
        read_bytes_per_s=got_back * length / read_s,
        moved_bytes=min(wrote, got_back) * length,
        direct=all(database["direct"] for database in card.status()["databases"]),
    )


class _Buffers:
    """A ring's slots for each thread, filled with what no device can squeeze."""

    def __init__(self, *, fragments: int, slot_bytes: int) -> None:
        self._fragments, self._slot_bytes = fragments, slot_bytes
        self._own = threading.local()

    def mine(self) -> Sequence[memoryview]:
        """This thread's."""
        if "slots" not in vars(self._own):
            memory = aligned(self._fragments * self._slot_bytes)
            memory[:] = os.urandom(len(memory))
            self._own.slots = [memory[at : at + self._slot_bytes] for at in range(0, len(memory), self._slot_bytes)]
        found: Sequence[memoryview] = self._own.slots
        return found


def _spread(work: Sequence[Callable[[], None]], effort: Effort, told: Callable[[int], None]) -> tuple[int, float]:
    """Do as much of it as is begun in time, in order; how much that was, and how long it took.

    The first is always done. Raises what one of them raised.
    """
    begun_s = time.monotonic()

    def one(place: int) -> bool:
        if place and time.monotonic() - begun_s > effort.seconds_max:
            return False
        work[place]()
        return True

    done: list[bool] = []
    with ThreadPoolExecutor(effort.threads) as pool:
        for was_begun in pool.map(one, range(len(work))):
            done.append(was_begun)
            told(len(done))
    took_s = max(time.monotonic() - begun_s, 1 / MANY)
    return done.index(False) if False in done else len(done), took_s


def _key(number: int) -> ObjectKey:
    return ObjectKey(bytes(NAMESPACE_BYTES), 0, number.to_bytes(32, "little"), 0)
