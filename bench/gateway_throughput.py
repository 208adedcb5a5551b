"""Puts and gets through a real gateway against fio on the same file system: same bytes, block size, O_DIRECT.

Owns: one figure each for put and get, as a ratio to fio in the same run.
Must not know: vLLM. Not a test: it is run by hand and by the bench session, and prints one JSON line for each size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from xkv_store.client import Attachment, Client, GetObject, PutObject, Role
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.wire import LoadedObject, LoadStatus, StoredObject, StoreStatus

MIB = 1 << 20
WAIT_S_MAX = 300.0
GEOMETRY = Geometry()


@dataclass
class Meter:
    """Counts answers; wakes the sender as slots come free."""

    wanted: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    statuses: list[int] = field(default_factory=list)

    def answer(self, status: int) -> None:
        """One object is done."""
        with self.changed:
            self.statuses.append(status)
            self.changed.notify()

    def wait(self, count: int) -> None:
        """Until so many objects are done."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.statuses) >= count, WAIT_S_MAX), "no answer"


def key_of(size: int, repeat: int, number: int) -> ObjectKey:
    return ObjectKey(b"bench-throughput", 0, f"{size}-{repeat}-{number}".encode().ljust(32, b"."), 0)


def put_all(client: Client, size: int, count: int, repeat: int) -> float:
    """Seconds until every object is confirmed."""
    meter = Meter(count)
    slots_each = GEOMETRY.fragments(size)
    started = time.monotonic()
    for number in range(count):
        while (slots := client.store_region.take(slots_each)) is None:
            meter.wait(len(meter.statuses) + 1)
        item = PutObject(key_of(size, repeat, number), size, slots, 1, number, False)

        def on_answer(answer: StoredObject) -> None:
            meter.answer(answer.status)

        client.put([item], on_answer)
    meter.wait(count)
    took_s = time.monotonic() - started
    assert set(meter.statuses) == {StoreStatus.CONFIRMED}, meter.statuses
    return took_s


def get_all(client: Client, size: int, count: int, repeat: int) -> float:
    """Seconds until every object is in the ring, verified."""
    meter = Meter(count)
    slots_each = GEOMETRY.fragments(size)
    started = time.monotonic()
    for number in range(count):
        while (slots := client.load_region.take(slots_each)) is None:
            meter.wait(len(meter.statuses) + 1)

        def on_answer(answer: LoadedObject, slots: list[int] = slots) -> None:
            client.load_region.give(slots)
            meter.answer(answer.status)

        client.get([GetObject(key_of(size, repeat, number), slots, 0)], on_answer)
    meter.wait(count)
    took_s = time.monotonic() - started
    assert set(meter.statuses) == {LoadStatus.OK}, meter.statuses
    return took_s


def fio_s(folder: Path, kind: str, block: int, total: int, jobs: int) -> float:
    """Seconds that fio takes for the same bytes, split over so many threads."""
    if kind == "write":
        (folder / "fio.dat").unlink(missing_ok=True)  # the card's slots are written for the first time too
    command = ["fio", "--name=x", f"--directory={folder}", "--filename=fio.dat", "--direct=1", "--thread"]
    command += [f"--rw={kind}", f"--bs={block}", f"--size={total // jobs}", f"--numjobs={jobs}"]
    command += [f"--offset_increment={total // jobs}", f"--filesize={total}", "--group_reporting"]
    command += ["--ioengine=psync", "--fallocate=native", "--output-format=json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    side = json.loads(done.stdout)["jobs"][0][kind]
    assert side["io_bytes"] == total, side
    return float(total / side["bw_bytes"])


def run_size(client: Client, folder: Path, size: int, *, total: int, jobs: int, repeats: int) -> dict[str, object]:
    """Put and get of one object size, turn and turn about with fio; medians, since a disk is seldom alone."""
    count = total // size
    total = count * size
    figures: dict[str, object] = {"object_mib": size // MIB, "total_mib": total // MIB, "repeats": repeats}
    for name, kind, measure in (("put", "write", put_all), ("get", "read", get_all)):
        pairs: list[tuple[float, float]] = []
        for repeat in range(repeats):
            ours = measure(client, size, count, repeat)
            theirs = min(fio_s(folder, kind, size, total, n) for n in sorted({1, jobs}))
            pairs.append((ours, theirs))
        figures[f"{name}_mib_s"] = round(total / MIB / median(ours for ours, _ in pairs))
        figures[f"{name}_fio_mib_s"] = round(total / MIB / median(theirs for _, theirs in pairs))
        figures[f"{name}_ratio"] = round(median(theirs / ours for ours, theirs in pairs), 3)
        figures[f"{name}_ratios"] = [round(theirs / ours, 2) for ours, theirs in pairs]
    (folder / "fio.dat").unlink(missing_ok=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="on the file system to measure")
    parser.add_argument("--total-mib", type=int, default=1024)
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--ring-mib", type=int, default=1024)
    parser.add_argument("--io-threads", type=int, default=4)
    parser.add_argument("--fio-jobs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause-s", type=float, default=0.0, help="before the first put, to attach a profiler")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "xkv_store.cli", "gateway", "run", "--json"]
        command += ["--card", str(folder / "card"), "--socket-dir", str(folder / "s")]
        command += ["--capacity", f"{int(options.total_mib * options.repeats * len(options.sizes_mib) * 1.15) + 64}MiB"]
        command += ["--io-threads", str(options.io_threads)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as gateway:
            try:
                assert gateway.stdout is not None
                ready = json.loads(gateway.stdout.readline())
                client = Client.attach(attachment(Path(ready["socket"]), options.ring_mib * MIB))
                client.ring.array[:] = 0x5A  # every page is there before the clock runs
                print(f"gateway pid {gateway.pid}", file=sys.stderr)
                time.sleep(options.pause_s)
                for size in options.sizes_mib:
                    figures = run_size(
                        client,
                        folder,
                        size * MIB,
                        total=options.total_mib * MIB,
                        jobs=options.fio_jobs,
                        repeats=options.repeats,
                    )
                    print(json.dumps({"direct": ready["direct"], **figures}))
                client.close()
            finally:
                gateway.terminate()


def attachment(path: Path, ring_bytes: int) -> Attachment:
    return Attachment(
        socket=path,
        engine_id="bench",
        role=Role.RANK,
        rank=0,
        world_size=1,
        ring_bytes=ring_bytes,
        load_reserve_bytes=ring_bytes // 2,
        fragment_bytes=GEOMETRY.fragment_bytes,
        connect_timeout_ms=10_000,
        heartbeat_timeout_ms=3_000,
        embedded=None,
    )


if __name__ == "__main__":
    main()
