"""Small objects put as fast as the gateway takes them: the load beside which other things are measured.

Owns: the puts of one rank, and a process of its own that makes them until it is told to stop.
Must not know: what is measured meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from gateways import MIB, attach, object_key
from xkv_store.client import Client, PutObject, Role
from xkv_store.geometry import HEADER_BYTES, IO_STEP_BYTES
from xkv_store.wire import StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

LENGTH: Final = IO_STEP_BYTES - HEADER_BYTES  # one I/O step on the medium: index and table are what is worked
BATCH: Final = 32  # objects of one message
ROUND: Final = 512  # objects between two looks at whether to stop
RING_BYTES: Final = 128 * MIB  # 256 slots for puts: eight batches on their way
WAIT_S_MAX: Final = 60.0
NAMESPACE: Final = os.urandom(16)  # of each process its own: nothing of another one's is in its way
ENGINE: Final = "bench-small-puts"  # of the process that puts while something else is measured
OBJECTS_MAX: Final = 150_000  # of one card: less than what is free on the card of a million, so nothing leaves

_PROCESSES: Final = multiprocessing.get_context("spawn")


def put_many(client: Client, first: int, count: int) -> None:
    """Put the objects numbered from `first` on, as many at a time as the ring holds; wait until all are confirmed."""
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
        while (slots := client.store_region.take(1)) is None:
            one_more()
            answered += 1
        batch.append(PutObject(object_key(NAMESPACE, number), LENGTH, slots, 1, number, False))
        if len(batch) == BATCH or number == first + count - 1:
            client.put(batch, on_answer)
            batch = []
    for _ in range(count - answered):
        one_more()
    if set(statuses) != {StoreStatus.CONFIRMED}:
        raise RuntimeError(f"small puts were answered {set(statuses)}")


@contextmanager
def putting(socket: Path, first: int) -> Iterator[None]:
    """While the block runs, another process puts at full rate, beginning with object `first`."""
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_put_until_told, args=(socket, first, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(WAIT_S_MAX):
            raise TimeoutError("the process that puts has not begun")
        ours.recv()  # it has put the first round
        yield
        ours.send(None)
        if not ours.poll(WAIT_S_MAX) or ours.recv() != "done":
            raise RuntimeError("the process that puts has failed")
    finally:
        process.kill()
        process.join()
        ours.close()


def _put_until_told(socket: Path, first: int, pipe: Connection) -> None:
    client = attach(socket, Role.RANK, ring_bytes=RING_BYTES, engine_id=ENGINE)
    number = first
    while not pipe.poll() and number < first + OBJECTS_MAX:
        put_many(client, number, ROUND)
        if number == first:
            pipe.send("begun")
        number += ROUND
    ended_early = not pipe.poll()
    pipe.recv()
    client.close()
    pipe.send("ended early" if ended_early else "done")
