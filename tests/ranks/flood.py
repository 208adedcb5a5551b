"""An engine that asks for as much as it may: `python -m ranks.flood SOCKET ENGINE`, until it is killed.

Owns: thousands of gets in flight. Must not know: who else is there.
"""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ranks.objects import FRAGMENT_BYTES, OBJECTS, SLOT_BYTES, SLOTS_EACH, object_key
from xkv_store.client import Attachment, Client, GetObject, LoadedObject, Role

if TYPE_CHECKING:
    from collections.abc import Callable

IN_FLIGHT: Final = 2_000
BATCHES: Final = 4
OWN: Final = 20  # objects of the working set that the flood leaves to the other engine: they share no read


def attach(socket: Path, engine: str, objects: int) -> Client:
    """An engine of one rank with load slots for so many objects."""
    slots = objects * SLOTS_EACH
    return Client.attach(
        Attachment(
            socket=socket,
            engine_id=engine,
            role=Role.RANK,
            rank=0,
            world_size=1,
            ring_bytes=(slots + SLOTS_EACH) * SLOT_BYTES,
            load_reserve_bytes=slots * SLOT_BYTES,
            staged_bytes=0,
            fragment_bytes=FRAGMENT_BYTES,
            connect_timeout_ms=20_000,
            heartbeat_timeout_ms=3_000,
        )
    )


def _counter(batch: list[list[int]], over: queue.Queue[list[list[int]]]) -> Callable[[LoadedObject], None]:
    left = [len(batch)]

    def on_answer(_answer: LoadedObject) -> None:
        left[0] -= 1
        if not left[0]:
            over.put(batch)

    return on_answer


def main(arguments: list[str]) -> None:
    """Send a batch again as soon as all of it is answered."""
    client = attach(Path(arguments[0]), arguments[1], IN_FLIGHT)
    over: queue.Queue[list[list[int]]] = queue.Queue()
    places = [client.load_region.take(SLOTS_EACH) or [] for _ in range(IN_FLIGHT)]
    each = IN_FLIGHT // BATCHES
    for at in range(0, IN_FLIGHT, each):
        over.put(places[at : at + each])
    first = 0
    while True:
        batch = over.get()
        first += 1
        wanted = [
            GetObject(object_key(OWN + (31 * first + number) % (OBJECTS - OWN)), slots, 0)
            for number, slots in enumerate(batch)
        ]
        client.get(wanted, _counter(batch, over))


if __name__ == "__main__":
    main(sys.argv[1:])
