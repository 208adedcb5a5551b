"""Objects put and got through a gateway's client, so many bytes and so many at a time.

Owns: what a load is, and moving its objects; the seconds of it.
Must not know: vLLM; what it is compared with; anything of the gateway that its client does not show.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from gateways import MIB, object_key
from xkv_store.client import Client, GetObject, PutObject
from xkv_store.geometry import Geometry
from xkv_store.wire import LoadedObject, LoadStatus, StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from fio import Kind
    from xkv_store.key import ObjectKey

WAIT_S_MAX: Final = 120.0
RING_BYTES: Final = 1024 * MIB  # half for puts, half for gets: 16 objects of 32 MiB each
GEOMETRY: Final = Geometry()
BATCH: Final = 8
"""Small objects in a message: what a step of an engine's job has gathered goes in one, 16 MiB of 2 MiB objects here."""


@dataclass(frozen=True, slots=True)
class Load:
    """`total` bytes in objects of `size` bytes, `depth` of them outstanding, `batch` of them in a message.

    `block`: what an object is compared with, where its slots hold more than its bytes.
    """

    name: str
    size: int
    block: int
    depth: int
    total: int
    batch: int = 1
    is_figure: bool = True

    @property
    def count(self) -> int:
        """How many objects that makes."""
        return self.total // self.block

    def other(self, *, depth: int | None = None, total: int | None = None) -> Load:
        """The same at another depth or of another size, for the details alone."""
        return replace(self, depth=depth or self.depth, total=total or self.total, is_figure=False)

    def key(self, number: int, index: int) -> ObjectKey:
        """The key of an object of run `number`."""
        return object_key(b"bench-throughput", self.size, self.depth, number, index)


@dataclass(slots=True)
class Meter:
    """Counts answers; holds the sender back at the queue's depth."""

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
            if not self.changed.wait_for(lambda: len(self.statuses) >= count, WAIT_S_MAX):
                raise TimeoutError(f"{len(self.statuses)} of {count} objects were answered")

    def check(self, wanted: int) -> None:
        """RuntimeError unless all were answered so."""
        others = [status for status in self.statuses if status != wanted]
        if others:
            raise RuntimeError(f"{len(others)} of {len(self.statuses)} objects were answered {set(others)}")


@dataclass(frozen=True, slots=True)
class Side:
    """One direction: how ours is measured, and fio's word for it."""

    name: str
    kind: Kind
    measure: Callable[[Client, Load, int], float]


def fill(client: Client) -> None:
    """Bytes without a pattern in the whole ring."""
    client.ring.array[:] = np.random.default_rng(1).integers(0, 256, client.ring.array.shape[1], np.uint8)


def put(client: Client, load: Load, number: int) -> float:
    """Seconds until every object of run `number` is confirmed."""
    meter = Meter()
    slots_each = GEOMETRY.fragments(load.size)
    started = time.monotonic()
    for first in range(0, load.count, load.batch):
        numbers = range(first, min(first + load.batch, load.count))
        meter.wait(numbers.stop - load.depth)
        items = []
        for index in numbers:
            slots = client.store_region.take(slots_each)
            assert slots is not None, "the region holds the queue's depth"
            items.append(PutObject(load.key(number, index), load.size, slots, 1, index, False))

        def on_answer(answer: StoredObject) -> None:
            meter.answer(answer.status)

        client.put(items, on_answer)
    meter.wait(load.count)
    took_s = time.monotonic() - started
    meter.check(StoreStatus.CONFIRMED)
    return took_s


def get(client: Client, load: Load, number: int) -> float:
    """Seconds until every object of run `number` is in the ring, verified."""
    meter = Meter()
    slots_each = GEOMETRY.fragments(load.size)
    started = time.monotonic()
    for first in range(0, load.count, load.batch):
        numbers = range(first, min(first + load.batch, load.count))
        meter.wait(numbers.stop - load.depth)
        taken = [client.load_region.take(slots_each) for _ in numbers]
        items = []
        for index, slots in zip(numbers, taken, strict=True):
            assert slots is not None, "the region holds the queue's depth"
            items.append(GetObject(load.key(number, index), slots, 0))

        def on_answer(answer: LoadedObject, items: list[GetObject] = items) -> None:
            client.load_region.give(items[answer.index].slots)
            meter.answer(answer.status)

        client.get(items, on_answer)
    meter.wait(load.count)
    took_s = time.monotonic() - started
    meter.check(LoadStatus.OK)
    return took_s


SIDES: Final = (Side("put", "write", put), Side("get", "read", get))
