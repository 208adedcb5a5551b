"""One soak: fill a card, stay at its capacity for so many puts, rest, and count all of it.

Owns: the order of the phases, and the processes and folders of a run. Must not know: how anything is judged.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ranks.gateway import RunGateway
from soak import audit
from soak.flood import Flood
from soak.objects import MEAN_SLOTS, SLOTS_MAX, Objects
from soak.outcome import Outcome
from soak.watch import Watch
from xkv_store.client import Attachment, Client, Role
from xkv_store.database import aligned
from xkv_store.geometry import DATA_OFFSET, Geometry
from xkv_store.ring import RingUse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RING_SLOTS: Final = 2_048  # for puts: some 250 objects on their way
LEASED_SLOTS: Final = 4 * SLOTS_MAX  # leases that are kept fill them: what is let go too early is soon used again
WRITE_BYTES: Final = 8 << 20
WINDOWS: Final = 9  # on the full card and on one that fills, turn and turn about
FILLED_PART: Final = 0.75  # of a card, up to which it counts as one that fills: then it begins to evict ahead
SETTLE_GRACES: Final = 2  # put before a window of the full card, which has rested during the other's
WATCH_S_MIN: Final = 1.5  # of each round, however few puts are wanted: leases take their time to be broken
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
        with ExitStack() as stack:
            twin = self._gateway(stack, self._folder / "twin", "")
            flooded = self._folder / "flooded"
            with ExitStack() as until_audit:
                gateway = self._gateway(until_audit, flooded, self._options.fault)
                status = self._flood(gateway, twin)
        audit.compare_with_medium(status, flooded / "card", self._outcome)
        self._say(f"audited {self._outcome.audited_objects} objects on the medium")
        return self._outcome

    def _gateway(self, stack: ExitStack, folder: Path, fault: str) -> RunGateway:
        """A gateway on a new card of which every byte has been written."""
        options = self._options
        folder.mkdir()
        size = ("--capacity", str(options.capacity), "--slot-bytes", str(options.slot_bytes))
        RunGateway(folder, words=size).end()  # makes the card
        _write_once(folder / "card" / "db-0.xkv")
        serve = ("soak.gateway", *(("--fault", fault) if fault else ()))
        gateway = RunGateway(folder, serve=serve, words=("--grace-ms", str(options.grace_ms)))
        stack.callback(gateway.end)
        return gateway

    def _flood(self, gateway: RunGateway, twin: RunGateway) -> dict[str, Any]:
        outcome = self._outcome
        with ExitStack() as clients:

            def attach(to: RunGateway, engine: str, store_slots: int, load_slots: int) -> Client:
                return clients.enter_context(closing(self._attach(to, engine, store_slots, load_slots)))

            putter = attach(gateway, "puts", RING_SLOTS, 1)
            filler = Flood(attach(twin, "puts", RING_SLOTS, 1), self._objects)
            flood = Flood(putter, self._objects)
            watch = Watch(gateway, flood, outcome, self._grace_s)
            loader, keeper = (attach(gateway, name, 1, LEASED_SLOTS) for name in ("loads", "leases"))
            with closing(watch):
                watch.start(loader, keeper, self._objects, self._options.seed)
                self._fill_and_stay((gateway, flood), (twin, filler), watch)
            status = audit.at_rest(gateway, self._grace_s)
            audit.compare_with_table(status, putter, self._objects, flood.next_number, outcome)
        counters = status["counters"]
        outcome.evicted = counters.get("evicted_objects", 0)
        outcome.from_limbo = counters.get("gets_from_limbo", 0)
        return status

    def _fill_and_stay(self, full: tuple[RunGateway, Flood], filling: tuple[RunGateway, Flood], watch: Watch) -> None:
        """Fill one card; then windows on it and on the other one, turn and turn about, and all other puts between."""
        outcome, (gateway, flood), (twin, filler) = self._outcome, full, filling
        total = gateway.status()["slots_total"]
        window = int(FILLED_PART * total / MEAN_SLOTS / (WINDOWS + 1))
        rate = filler.put(window)  # the first is the warm-up
        flood.run(lambda: flood.put_slots < total)
        self._say(f"filled: {flood.confirmed} objects")
        between = max(self._options.puts // WINDOWS - window, int(SETTLE_GRACES * self._grace_s * rate))
        confirmed, slots, statuses = flood.confirmed, flood.put_slots, flood.statuses.copy()
        cpu_s = [0.0, 0.0]
        for number in range(WINDOWS):
            watch.active, until = True, time.monotonic() + WATCH_S_MIN
            flood.put(between)
            flood.run(partial(_before, until))
            watch.active = False
            at = (_cpu_s(gateway.pid), _cpu_s(twin.pid))
            rates = (flood.put(window), filler.put(window))
            cpu_s[0] += _cpu_s(gateway.pid) - at[0]
            cpu_s[1] += _cpu_s(twin.pid) - at[1]
            outcome.rates.append(rates)
            self._say(f"window {number + 1}: {rates[0]:.0f} objects a second, {rates[1]:.0f} on a card that fills")
        outcome.puts = flood.confirmed - confirmed
        outcome.turns = round((flood.put_slots - slots) / total, 2)
        outcome.shed = sum((flood.statuses - statuses).values()) - outcome.puts
        outcome.cpu_us_full, outcome.cpu_us_filling = (round(one / WINDOWS / window * 1e6, 1) for one in cpu_s)

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


def _before(until: float) -> bool:
    return time.monotonic() < until


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
