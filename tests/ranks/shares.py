"""Two engines on one gateway, of which one floods: `python -m ranks.shares [--json]`.

Owns: what the other one still gets, in ratios within the run, and the verdict. Must not know: how shares are made.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ranks.flood import IN_FLIGHT, OWN, attach
from ranks.gateway import RunGateway
from ranks.objects import BLOCKS_PER_CHUNK, FRAGMENT_BYTES, PAGE_BYTES, SLOTS_EACH, content, object_key
from ranks.run import Options, Run
from xkv_store.client import Client, GetObject, LoadedObject, LoadStatus
from xkv_store.geometry import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS: Final = 3.0
AT_ONCE: Final = 32  # loads of the one who is measured; the flood has IN_FLIGHT
LOOKUPS: Final = 500
SHARE_MIN: Final = 0.15  # of all reads while the other floods; by order of arrival it would be 32 of 2,032: 0.016
LOOKUP_RATIO_MAX: Final = 3.0
STOPPED_RATIO_MIN: Final = 0.4  # of the pace alone, beside an engine that is stopped in mid-flood
READY_S: Final = 20.0
FREED_S_MAX: Final = 1.0


@dataclass(slots=True)
class Found:
    """`share`: of the reads that the gateway made under the flood. The rest are ratios to what was so without it."""

    share: float = 0.0
    lookup_ratio: float = 0.0
    stopped_ratio: float = 0.0
    wrong: int = 0
    freed_s: float = 0.0

    def problems(self) -> list[str]:
        """What is not as it has to be."""
        found = []
        if self.share < SHARE_MIN:
            found.append(f"a share of {self.share}, less than {SHARE_MIN}")
        if self.lookup_ratio > LOOKUP_RATIO_MAX:
            found.append(f"lookups take {self.lookup_ratio} times as long")
        if self.stopped_ratio < STOPPED_RATIO_MIN:
            found.append(f"{self.stopped_ratio} of the pace beside an engine that stands still")
        if self.wrong:
            found.append(f"{self.wrong} wrong")
        if self.freed_s > FREED_S_MAX:
            found.append(f"a killed engine was there for {self.freed_s} s")
        return found


class Measured:
    """The engine that does not flood."""

    def __init__(self, socket: Path) -> None:
        self.client: Client = attach(socket, "measured", AT_ONCE)
        self.wrong = 0

    def loads(self) -> float:
        """Loads in a second, each compared with what was stored."""
        over: queue.Queue[tuple[int, list[int], LoadedObject]] = queue.Queue()
        client, done, number = self.client, 0, 0
        end = time.monotonic() + SECONDS
        places = [slots for _ in range(AT_ONCE) if (slots := client.load_region.take(SLOTS_EACH)) is not None]
        waiting = 0
        while waiting or time.monotonic() < end:
            while places and time.monotonic() < end:
                slots = places.pop()
                wanted = number % OWN
                client.get([GetObject(object_key(wanted), slots, 0)], partial(_note, over, wanted, slots))
                number += 1
                waiting += 1
            wanted, slots, answer = over.get(timeout=READY_S)
            waiting -= 1
            done += time.monotonic() < end
            self._compare(wanted, slots, answer)
            places.append(slots)
        for slots in places:
            client.load_region.give(slots)
        return done / SECONDS

    def _compare(self, number: int, slots: list[int], answer: LoadedObject) -> None:
        rows = [self.client.ring.array[slot, HEADER_BYTES : HEADER_BYTES + FRAGMENT_BYTES] for slot in slots]
        data = np.concatenate(rows)[: BLOCKS_PER_CHUNK * PAGE_BYTES]
        self.wrong += answer.status is not LoadStatus.OK or not np.array_equal(data, content(number).reshape(-1))

    def lookup_s(self) -> float:
        """One lookup's time, the median of many."""
        tags = [object_key(number).tag for number in range(OWN)]
        times = []
        for _ in range(LOOKUPS):
            began = time.perf_counter()
            for tag in tags:
                assert self.client.table.lookup(tag) is not None
            times.append((time.perf_counter() - began) / len(tags))
        return statistics.median(times)


def _note(
    over: queue.Queue[tuple[int, list[int], LoadedObject]], number: int, slots: list[int], answer: LoadedObject
) -> None:
    over.put((number, slots, answer))


@contextmanager
def flooding(gateway: RunGateway, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The other engine, in a process of its own, once it floods."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "ranks.flood", str(gateway.socket), "flood"]
    with log.open("ab") as errors:
        process = subprocess.Popen(command, stderr=errors, env=environment)
    try:
        end = time.monotonic() + READY_S
        while not any(one["engine"] == "flood" and one["in_flight"] > 0 for one in gateway.status()["sessions"]):
            if time.monotonic() > end:
                raise TimeoutError(f"nothing floods: {log.read_text()[-2_000:]}")
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def measure(folder: Path) -> Found:
    """Alone, beside a flood, beside one that is stopped, and after its end."""
    found = Found()
    gateway = RunGateway(folder, canary=False)
    try:
        Run(folder, Options(1, 0, 0, canary=False), print).fill(gateway)
        one = Measured(gateway.socket)
        alone, lookup_s = one.loads(), one.lookup_s()
        with flooding(gateway, folder / "flood.log") as process:
            reads = gateway.counters()["reads"]
            began = time.monotonic()
            under = one.loads()
            reads_each_s = (gateway.counters()["reads"] - reads) / (time.monotonic() - began)
            found.share = round(under / max(reads_each_s, 1.0), 3)
            found.lookup_ratio = round(one.lookup_s() / lookup_s, 2)
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            found.stopped_ratio = round(one.loads() / alone, 2)
        began = time.monotonic()
        while gateway.status()["engines"] > 1 and time.monotonic() - began < READY_S:
            time.sleep(0.01)
        found.freed_s = round(time.monotonic() - began, 2)
        one.loads()
        found.wrong = one.wrong
        one.client.close()
    finally:
        gateway.end()
    return found


def main(arguments: list[str]) -> int:
    """Measure; 0 if each has his share."""
    parser = argparse.ArgumentParser(prog="ranks.shares", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the closing line of JSON alone")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="xkv-shares-"))
    try:
        found = measure(folder)
    finally:
        shutil.rmtree(folder)
    for line in found.problems():
        sys.stderr.write(f"{line}\n")
    if not options.json:
        sys.stderr.write(f"one of two engines has {IN_FLIGHT} loads in flight, the other {AT_ONCE}\n")
    print(json.dumps(asdict(found)), flush=True)
    return 1 if found.problems() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
