"""Put and get through gateways with a remote, against the remote's own library on as many bytes: one JSON line.

Owns: the rounds, in which both are measured in turn, and what their ratios are of.
Must not know: how a gateway uses the library.

    python bench/through_remote.py [--json] [--folder DIR]

The library's package has to be importable (requirements/remote.txt); a master is started here. Each round has keys
of its own; the library reads what the gateway has put, and the other way round.

A gateway with a card and the remote, and one whose card is the remote alone ("alone"), which puts from the engine's
ring and loads into it, are measured in the same rounds; a get of the latter also for what its gateway lists already
("listed"), of which nothing is asked. The library gets what that one has put, too ("same"), in turn with it.

As a measure of what this machine can do: the library's call once more, while a gateway without a remote puts as many
bytes to a card of its own, each for itself ("beside"). Who fetches has to do both, too, and then to load it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from gateways import MIB, BenchGateway, object_key
from remote.master import Master
from xkv_store.client import Client, GetObject, PutObject, Role
from xkv_store.geometry import HEADER_BYTES, Geometry
from xkv_store.remote_child import LIBRARY
from xkv_store.remote_format import remote_bytes, remote_key
from xkv_store.remote_memory import RemoteMemory
from xkv_store.tool import Tool
from xkv_store.wire import LoadStatus, StoreStatus
from xkv_store.wire_remote import SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Callable

GEOMETRY: Final = Geometry()
LENGTH: Final = 16 * GEOMETRY.fragment_bytes
FRAGMENTS: Final = GEOMETRY.fragments(LENGTH)
SENT: Final = remote_bytes(LENGTH, GEOMETRY)
OBJECTS: Final = 64
ROUNDS: Final = 9
BATCH: Final = OBJECTS  # of one call of the library: with fewer in one it is slower
MEMORY_BYTES: Final = 2 * OBJECTS * FRAGMENTS * GEOMETRY.slot_bytes  # half is for what goes: all of it fits
RING_BYTES: Final = 2 * OBJECTS * FRAGMENTS * GEOMETRY.slot_bytes
WAIT_S_MAX: Final = 60.0
POLL_S: Final = 0.002
REST_S: Final = 0.3  # before each work: what the one before it has left to do is not timed with it
SAME: Final = {"put": "library put", "get": "library same get"}  # what the remote alone is compared with
SEGMENT_BYTES: Final = 1 << 30
POOL_BYTES: Final = 2 * SEGMENT_BYTES
NAMESPACE: Final = os.urandom(16)
ALONE_NAMESPACE: Final = os.urandom(16)
HOST: Final = "127.0.0.1"
NAMES: Final = (
    *("library put", "put", "alone put", "beside put"),
    *("library get", "get", "library same get", "alone get", "listed get", "beside get"),
)


def main() -> int:
    """Measure; 0 where everything was answered as it had to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    parser.add_argument("--folder", type=Path, help="on the file system of the cards")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-")))
        master = stack.enter_context(Master(folder, HOST, ()))
        bench = stack.enter_context(closing(_Bench(folder, master.address)))
        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        for number in range(ROUNDS + 1):
            found = bench.round(number)
            for name, took in found.items():
                if number:  # the first touches every page of every memory
                    seconds[name].append(took)
    rates = {name: OBJECTS * SENT / statistics.median(took) / 1e9 for name, took in seconds.items()}
    if not options.json:
        for name, rate in rates.items():
            print(f"{name:16} {rate:6.2f} GB/s")
    value = {f"{name.replace(' ', '_')}_gb_s": round(rate, 3) for name, rate in rates.items()}
    for way in ("put", "get"):
        value[f"{way}_vs_library"] = round(rates[way] / rates[f"library {way}"], 3)
        value[f"alone_{way}_vs_library"] = round(rates[f"alone {way}"] / rates[SAME[way]], 3)
        value[f"{way}_vs_beside"] = round(rates[way] / rates[f"beside {way}"], 3)
    value["listed_get_vs_library"] = round(rates["listed get"] / rates[SAME["get"]], 3)
    print(json.dumps(value), flush=True)
    return 0


class _Bench:
    """Two gateways, two whose card is the remote alone, one without a remote, and the library in this process."""

    def __init__(self, folder: Path, master: str) -> None:
        self._gateways = []
        for name in ("a", "b"):
            own = folder / name
            own.mkdir()
            url = f"mooncake://{master}?host={HOST}&segment={SEGMENT_BYTES}&memory={MEMORY_BYTES}"
            self._gateways.append(BenchGateway(own, ["--capacity", "8GiB", "--grace-ms", "200", "--remote", url]))
        self._put_client, self._get_client = (one.attach(ring_bytes=RING_BYTES) for one in self._gateways)
        self._scheduler = self._gateways[1].attach(Role.SCHEDULER, ring_bytes=RING_BYTES)
        self._alone: list[BenchGateway] = []
        self._alone_clients: list[Client] = []
        for name in ("alone-a", "alone-b"):
            own = folder / name
            own.mkdir()
            words = ["--grace-ms", "200", "--remote", f"mooncake://{master}?host={HOST}&memory=16MiB"]
            self._alone.append(BenchGateway(own, words, has_card=False))
            self._alone_clients.append(self._alone[-1].attach(ring_bytes=2 * RING_BYTES, staged_bytes=RING_BYTES // 2))
        self._alone_schedulers = [
            gateway.attach(Role.SCHEDULER, ring_bytes=2 * RING_BYTES, staged_bytes=None) for gateway in self._alone
        ]
        own = folder / "apart"
        own.mkdir()
        self._apart = BenchGateway(own, ["--capacity", "8GiB", "--grace-ms", "200"])
        self._apart_client = self._apart.attach(ring_bytes=RING_BYTES)
        self._memory = RemoteMemory(2 * OBJECTS * FRAGMENTS * GEOMETRY.slot_bytes, GEOMETRY)
        self._library: Any = importlib.import_module(f"{LIBRARY}.store").MooncakeDistributedStore()
        self._check(self._library.setup(HOST, "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master) == 0)
        place = self._memory.take(OBJECTS * FRAGMENTS, is_store=False)
        assert place is not None
        self._slots = self._memory.views(place, OBJECTS * FRAGMENTS)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._slots[0]))
        self._check(self._library.register_buffer(self._base, len(self._slots) * GEOMETRY.slot_bytes) == 0)
        for gateway in self._gateways:
            self._until(lambda gateway=gateway: self._remote(gateway)["segment_state"] == "up")  # type: ignore[misc]
        for gateway in (*self._gateways, *self._alone):
            self._until(lambda gateway=gateway: self._remote(gateway)["state"] == "up")  # type: ignore[misc]
        self._touch_pool()

    def close(self) -> None:
        for client in (self._put_client, self._get_client, self._scheduler, self._apart_client):
            client.close()
        for client in (*self._alone_clients, *self._alone_schedulers):
            client.close()
        self._library.close()
        for gateway in (*self._gateways, *self._alone, self._apart):
            gateway.kill()

    def round(self, number: int) -> dict[str, float]:
        """Each in turn, on keys of this round; who was first is second the next time. What was put is dropped."""
        keys = [object_key(NAMESPACE, number * OBJECTS + index) for index in range(OBJECTS)]
        names = [remote_key(key.encode(), GEOMETRY) for key in keys]
        of_alone = [object_key(ALONE_NAMESPACE, number * OBJECTS + index) for index in range(OBJECTS)]
        names_alone = [remote_key(key.encode(), GEOMETRY) for key in of_alone]
        other, third = ([f"{which}-{name}" for name in names] for which in ("bench", "beside"))
        works: dict[str, Callable[[], None]] = {
            "library put": lambda: self._library_put(other),
            "put": lambda: self._put(self._put_client, keys, names),
            "alone put": lambda: self._put(self._alone_clients[0], of_alone, names_alone),
            "beside put": lambda: self._beside(lambda: self._library_put(third), keys),
            "library get": lambda: self._library_get(names),
            "get": lambda: self._get(self._scheduler, self._get_client, keys),
            "library same get": lambda: self._library_get(names_alone),
            "alone get": lambda: self._get(self._alone_schedulers[1], self._alone_schedulers[1], of_alone),
            "listed get": lambda: self._load(self._alone_schedulers[0], of_alone),
            "beside get": lambda: self._beside(lambda: self._library_get(third), keys),
        }
        found = {}
        for way in ("put", "get"):
            own = [name for name in NAMES if name.split()[-1] == way]
            for index in range(len(own)):
                name = own[(index + number) % len(own)]
                found[name] = self._timed(works[name])
            self._purge(self._apart)
        for gateway in (*self._gateways, *self._alone):
            self._purge(gateway)
        self._forget([*names, *names_alone, *other, *third])
        return found

    @staticmethod
    def _purge(gateway: BenchGateway) -> None:
        with closing(Tool(gateway.socket)) as tool:
            tool.purge(list(tool.objects(b"")))

    def _beside(self, work: Callable[[], None], keys: list[Any]) -> None:
        """That, and at the same time a put of as many bytes to a card without a remote."""
        thread = threading.Thread(target=work)
        thread.start()
        self._put_to(self._apart_client, keys)
        thread.join()

    def _touch_pool(self) -> None:
        """Have the pool's memory touched: first writes to pages would be timed, of either in some round."""
        names = [f"touch-{number}" for number in range(POOL_BYTES * 3 // 4 // SENT // OBJECTS * OBJECTS)]
        for at in range(0, len(names), OBJECTS):
            self._library_put(names[at : at + OBJECTS])
        self._forget(names)

    def _forget(self, names: list[str]) -> None:
        time.sleep(1.2)  # until the master's leases have ended
        self._library.batch_remove(names)

    def _timed(self, work: Callable[[], None]) -> float:
        time.sleep(REST_S)
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    def _library_put(self, names: list[str]) -> None:
        for at in range(0, OBJECTS, BATCH):
            codes = self._library.batch_put_from(names[at : at + BATCH], self._addresses(at), [SENT] * BATCH)
            self._check(set(codes) == {0})

    def _library_get(self, names: list[str]) -> None:
        for at in range(0, OBJECTS, BATCH):
            codes = self._library.batch_get_into(names[at : at + BATCH], self._addresses(at), [SENT] * BATCH)
            self._check(set(codes) == {SENT})

    def _addresses(self, at: int) -> list[int]:
        return [self._base + index * FRAGMENTS * GEOMETRY.slot_bytes for index in range(at, at + BATCH)]

    def _put(self, client: Client, keys: list[Any], names: list[str]) -> None:
        """Until the remote has everything: it is asked that itself, which costs the gateway nothing."""
        self._put_to(client, keys)
        self._until(lambda: set(self._library.batch_is_exist(names)) == {1})

    def _put_to(self, client: Client, keys: list[Any]) -> None:
        objects = []
        for position, key in enumerate(keys):
            slots = client.store_region.take(FRAGMENTS)
            assert slots is not None
            for slot in slots:  # other bytes in each round: what is not touched costs nothing
                client.ring.slot(slot)[HEADER_BYTES : HEADER_BYTES + 8] = os.urandom(8)
            objects.append(PutObject(key, LENGTH, slots, 1, position, replace=False))
        statuses = _answers(lambda on_answer: client.put(objects, on_answer), len(keys))
        self._check(statuses == {StoreStatus.CONFIRMED})

    def _get(self, scheduler: Client, client: Client, keys: list[Any]) -> None:
        """From the first question until the bytes are in the engine's ring."""
        wanted = [(key, FRAGMENTS) for key in keys]
        ask = scheduler.seeks.ask
        for fetch in (False, True):
            self._check(
                _answers(lambda on: ask(wanted, fetch=fetch, on_answer=on), len(keys)) == {SoughtStatus.FOUND}  # noqa: B023
            )
        self._load(client, keys)

    def _load(self, client: Client, keys: list[Any]) -> None:
        """Of what the card has, or lists."""
        objects = []
        for key in keys:
            slots = client.load_region.take(FRAGMENTS)
            assert slots is not None
            objects.append(GetObject(key, slots, 0))
        statuses = _answers(lambda on_answer: client.get(objects, on_answer), len(keys))
        self._check(statuses == {LoadStatus.OK})
        for one in objects:
            client.load_region.give(one.slots)

    def _remote(self, gateway: BenchGateway) -> dict[str, Any]:
        return dict(self._status(gateway)["remote"])

    def _status(self, gateway: BenchGateway) -> dict[str, Any]:
        with closing(Tool(gateway.socket)) as tool:
            value: dict[str, Any] = json.loads(tool.status())
        return value

    def _until(self, check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S_MAX
        while not check():
            if time.monotonic() > deadline:
                raise TimeoutError("the remote does not come, or does not take everything")
            time.sleep(POLL_S)

    @staticmethod
    def _check(is_right: bool) -> None:
        if not is_right:
            raise RuntimeError("something was not answered as it had to be")


def _answers(begin: Callable[[Callable[[Any], None]], object], count: int) -> set[int]:
    """Begin something, and the statuses of its answers when all have come."""
    answered = threading.Semaphore(0)
    statuses: list[int] = []

    def on_answer(answer: Any) -> None:
        statuses.append(answer.status)
        answered.release()

    begin(on_answer)
    for _ in range(count):
        if not answered.acquire(timeout=WAIT_S_MAX):
            raise TimeoutError(f"{len(statuses)} of {count} objects were answered")
    return set(statuses)


if __name__ == "__main__":
    sys.exit(main())
