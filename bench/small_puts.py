"""Small objects put as fast as the gateway takes them: the load beside which other things are measured.

Owns: the puts of one rank, and a process of its own that makes them until it is told to stop.
Must not know: what is measured meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateways import MIB, attach, object_key
from xkv_store.client import Client, PutObject, Role
from xkv_store.geometry import HEADER_BYTES, IO_STEP_BYTES, Geometry
from xkv_store.wire import StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

GEOMETRY: Final = Geometry()
LENGTH: Final = IO_STEP_BYTES - HEADER_BYTES  # one I/O step on the medium: index and table are what is worked
BATCH: Final = 32  # objects of one message
ROUND: Final = 512  # objects between two looks at whether to stop
RING_BYTES: Final = 128 * MIB  # 256 slots for puts: eight batches on their way
WAIT_S_MAX: Final = 60.0
NAMESPACE: Final = os.urandom(16)  # of each process its own: nothing of another one's is in its way
ENGINE: Final = "bench-small-puts"  # of the process that puts while something else is measured
OBJECTS_MAX: Final = 150_000  # of one card: less than what is free on the card of a million, so nothing leaves

_PROCESSES: Final = multiprocessing.get_context("spawn")


def put_many(client: Client, first: int, count: int, *, length: int = LENGTH, may_shed: bool = False) -> int:
    """Put the objects numbered from `first` on, as many at a time as the ring holds; wait for their answers.

    Returns how many are confirmed: all, unless the card `may_shed`.
    """
    slots_each = GEOMETRY.fragments(length)
    answers = threading.Semaphore(0)
    statuses: list[int] = []

    def on_answer(answer: StoredObject) -> None:
        statuses.append(answer.status)
        answers.release()

    def one_more() -> None:
        if not answers.acquire(timeout=WAIT_S_MAX):
            raise TimeoutError(f"{len(statuses)} of {count} objects were answered")

    answered = 0
    batch: list[PutObject] = []
    for number in range(first, first + count):
        while (slots := client.store_region.take(slots_each)) is None:
            if batch:
                client.put(batch, on_answer)
                batch = []
            one_more()
            answered += 1
        batch.append(PutObject(object_key(NAMESPACE, number), length, slots, 1, number, False))
        if len(batch) == BATCH or number == first + count - 1:
            client.put(batch, on_answer)
            batch = []
    for _ in range(count - answered):
        one_more()
    if not set(statuses) <= {StoreStatus.CONFIRMED, *((StoreStatus.SHED,) if may_shed else ())}:
        raise RuntimeError(f"puts were answered {set(statuses)}")
    return statuses.count(StoreStatus.CONFIRMED)


@dataclass(frozen=True, slots=True)
class Flood:
    """What another process puts, and how many objects at most."""

    length: int = LENGTH
    round: int = ROUND
    objects_max: int = OBJECTS_MAX
    may_shed: bool = False


@contextmanager
def putting(socket: Path, flood: Flood = Flood()) -> Iterator[list[float]]:
    """While the block runs, another process puts at full rate; afterwards the list has its bytes a second."""
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_put_until_told, args=(socket, flood, theirs))
    process.start()
    theirs.close()
    rates: list[float] = []
    try:
        if not ours.poll(WAIT_S_MAX):
            raise TimeoutError("the process that puts has not begun")
        ours.recv()  # it has put the first round
        yield rates
        ours.send(None)
        if not ours.poll(WAIT_S_MAX):
            raise TimeoutError("the process that puts does not end")
        rate = ours.recv()
        if rate is None:
            raise RuntimeError(f"the process that puts has put all of {flood.objects_max} objects before it was told")
        rates.append(rate)
    finally:
        process.kill()
        process.join()
        ours.close()


def _put_until_told(socket: Path, flood: Flood, pipe: Connection) -> None:
    client = attach(socket, Role.RANK, ring_bytes=RING_BYTES, engine_id=ENGINE)
    number = confirmed = 0
    began = time.monotonic()
    while not pipe.poll() and number < flood.objects_max:
        confirmed += put_many(client, number, flood.round, length=flood.length, may_shed=flood.may_shed)
        if number == 0:
            pipe.send("begun")
        number += flood.round
    took_s = time.monotonic() - began
    ended_early = not pipe.poll()
    pipe.recv()
    client.close()
    pipe.send(None if ended_early else confirmed * flood.length / took_s)
