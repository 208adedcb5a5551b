"""One soak: fill a card, stay at its capacity for so many puts, rest, and count all of it.

Owns: the order of the phases, and the processes and folders of a run. Must not know: how anything is judged.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from ranks.gateway import RunGateway
from soak import audit
from soak.flood import Flood
from soak.objects import SLOTS_MAX, Objects
from soak.outcome import Outcome
from soak.watch import KEPT_MAX, Watch
from xkv_store.client import Attachment, Client, Role
from xkv_store.database import aligned
from xkv_store.geometry import DATA_OFFSET, Geometry
from xkv_store.ring import RingUse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RING_SLOTS: Final = 2_048  # for puts: some 250 objects on their way
LEASED_SLOTS: Final = 2 * KEPT_MAX * SLOTS_MAX
WRITE_BYTES: Final = 8 << 20
WARM_UP: Final = 2  # windows that do not count: everything is run for the first time
FILLED_PART: Final = 0.75  # of the card, up to which it counts as one that fills: then it begins to evict ahead
HZ: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is made with. `fault`: planted in the gateway, see `soak.broken`."""

    puts: int
    capacity: int
    slot_bytes: int
    grace_ms: int
    seed: int
    fault: str = ""


class Run:
    """All phases of one run."""

    def __init__(self, folder: Path, options: Options, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._options = options
        self._say = say
        self._objects = Objects(Geometry(options.slot_bytes).fragment_bytes)
        self._grace_s = options.grace_ms / 1_000
        self._outcome = Outcome(options.fault)

    def run(self) -> Outcome:
        """The phases, one after the other."""
        options = self._options
        size = ("--capacity", str(options.capacity), "--slot-bytes", str(options.slot_bytes))
        RunGateway(self._folder, words=size).end()  # makes the card
        _write_once(self._folder / "card" / "db-0.xkv")
        serve = ("soak.gateway", *(("--fault", options.fault) if options.fault else ()))
        gateway = RunGateway(self._folder, serve=serve, words=("--grace-ms", str(options.grace_ms)))
        try:
            status = self._flood(gateway)
        finally:
            gateway.end()
        audit.compare_with_medium(status, self._folder / "card", self._outcome)
        self._say(f"audited {self._outcome.audited_objects} objects on the medium")
        return self._outcome

    def _flood(self, gateway: RunGateway) -> dict[str, object]:
        outcome = self._outcome
        with ExitStack() as clients:
            putter = clients.enter_context(closing(self._attach(gateway, "puts", RING_SLOTS, 1)))
            loader = clients.enter_context(closing(self._attach(gateway, "loads", 1, LEASED_SLOTS)))
            keeper = clients.enter_context(closing(self._attach(gateway, "leases", 1, LEASED_SLOTS)))
            flood = Flood(putter, self._objects)
            watch = Watch(gateway, flood, outcome, self._grace_s)
            watch.start(loader, keeper, self._objects, self._options.seed)
            try:
                self._fill_and_stay(gateway, flood, watch)
            finally:
                watch.close()
            status = audit.at_rest(gateway, self._grace_s)
            audit.compare_with_table(status, putter, self._objects, flood.next_number, outcome)
        counters = status["counters"]
        outcome.evicted = counters.get("evicted_objects", 0)
        outcome.from_limbo = counters.get("gets_from_limbo", 0)
        return status

    def _fill_and_stay(self, gateway: RunGateway, flood: Flood, watch: Watch) -> None:
        outcome, total = self._outcome, gateway.status()["slots_total"]
        flood.begin_windows()
        flood.run(lambda: flood.put_slots < FILLED_PART * total)
        filling = flood.rates[WARM_UP:]
        outcome.put_rate_filling = round(median(filling), 1)
        self._say(f"filled: {flood.confirmed} objects, {outcome.put_rate_filling} a second")
        flood.run(lambda: flood.put_slots < total)
        watch.full = True
        began = (flood.confirmed, flood.put_slots, flood.statuses.copy(), time.monotonic(), _cpu_s(gateway.pid))
        flood.begin_windows()
        flood.run(lambda: flood.confirmed - began[0] < self._options.puts)
        wall_s = time.monotonic() - began[3]
        full = flood.rates[WARM_UP:]
        outcome.puts = flood.confirmed - began[0]
        outcome.turns = round((flood.put_slots - began[1]) / total, 2)
        outcome.shed = sum((flood.statuses - began[2]).values()) - outcome.puts
        outcome.put_rate_full = round(median(full), 1)
        outcome.put_rate_ratio = round(median(full) / median(filling), 3)
        outcome.late_rate_ratio = round(median(full[-max(1, len(full) // 4) :]) / median(filling), 3)
        outcome.gateway_cpu = round((_cpu_s(gateway.pid) - began[4]) / wall_s, 2)
        self._say(f"stayed full: {outcome.puts} objects, {outcome.put_rate_full} a second, {outcome.shed} shed")

    def _attach(self, gateway: RunGateway, engine: str, store_slots: int, load_slots: int) -> Client:
        slot_bytes = self._options.slot_bytes
        return Client.attach(
            Attachment(
                socket=gateway.socket,
                engine_id=engine,
                role=Role.RANK,
                rank=0,
                world_size=1,
                ring_bytes=(store_slots + load_slots) * slot_bytes,
                load_reserve_bytes=load_slots * slot_bytes,
                staged_bytes=0,
                fragment_bytes=self._objects.fragment_bytes,
                connect_timeout_ms=20_000,
                heartbeat_timeout_ms=3_000,
                ring_use=RingUse.LEASED,
            )
        )


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process, all threads."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123  as short as it gets
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / HZ


def _write_once(path: Path) -> None:
    """Write every slot: space that was allocated and never written is slower, which would flatter a full card."""
    data = aligned(WRITE_BYTES)
    data[:] = np.random.default_rng(2).bytes(WRITE_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        offset, end = DATA_OFFSET, os.lseek(fd, 0, os.SEEK_END)
        while offset < end:
            offset += os.pwrite(fd, data[: end - offset], offset)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
