"""What waits for its way to a remote: who goes first where the memory is short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.plans import PutPlan
from xkv_store.remote_memory import RemoteMemory
from xkv_store.remote_pace import BYTES_MIN
from xkv_store.remote_stores import TOGETHER_MAX, RemoteStores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_store.remote_words import Lane

GEOMETRY = Geometry(4_096)


class Remote:
    """A remote that has nothing and takes everything, and threads that do each job in the next round."""

    is_up = True

    def __init__(self) -> None:
        self.calls: list[tuple[Lane, int, Callable[[Sequence[int]], None]]] = []
        self.reads: list[Callable[[None], None]] = []

    def has_room(self, lane: Lane) -> bool:
        return sum(one[0] is lane for one in self.calls) < 2

    def call(self, lane: Lane, keys: Sequence[str], on_codes: Callable[[Sequence[int]], None], **_: object) -> None:
        self.calls.append((lane, len(keys), on_codes))

    def submit(self, _run: object, then: Callable[[None], None], **_: object) -> bool:
        self.reads.append(then)
        return True

    def round(self) -> None:
        reads, self.reads = self.reads, []
        for then in reads:
            then(None)
        calls, self.calls = self.calls, []
        for _, keys, on_codes in calls:
            on_codes([0] * keys)


def plan_of(number: int) -> PutPlan:
    key = ObjectKey(b"n" * 16, 0, number.to_bytes(8, "little"), 0)
    return PutPlan(key, key.encode(), number, 100, 0, 0, 1, ())


def test_copies_of_what_came_later_do_not_keep_the_memory_from_what_waits_for_it() -> None:
    """What was confirmed while the remote was away has no copy; all that stores may have then fills with copies."""
    memory, remote = RemoteMemory(16 * 4_096, GEOMETRY), Remote()
    plans = {plan.key: plan for plan in map(plan_of, range(1, 600))}
    card = SimpleNamespace(geometry=GEOMETRY, begin_proof=plans.get, end_get=lambda _: None, read=print)
    of_any: Any = remote
    stores = RemoteStores(card, of_any, memory, of_any, lambda *_: None)  # type: ignore[arg-type]
    waiting = list(plans.values())
    for plan in waiting[: -memory.stores_max]:
        stores.add(plan)
    for plan in waiting[-memory.stores_max :]:
        stores.add(plan, memory.take(1, is_store=True))
    for now_ns in range(len(waiting)):
        stores.step(now_ns)
        remote.round()
    assert stores.counters["remote_stores"] == len(waiting)
    assert not len(stores)
    assert memory.free == memory.slots
    memory.close()


def test_puts_of_small_objects_grow_as_those_of_large_ones_do() -> None:
    """A slot of 4 KiB is sent for 100 bytes: counted as 100, no number of them ever filled half a call."""
    memory, remote = RemoteMemory(4_096 * 4_096, GEOMETRY), Remote()
    card = SimpleNamespace(geometry=GEOMETRY)
    of_any: Any = remote
    stores = RemoteStores(card, of_any, memory, of_any, lambda *_: None)  # type: ignore[arg-type]
    stores._pace.bytes = BYTES_MIN
    for round_number in range(40):  # some may take long on a machine that does other things
        for number in range(2 * TOGETHER_MAX):
            stores.add(plan_of(round_number << 16 | number), memory.take(1, is_store=True))
        while len(stores):
            stores.step(round_number)
            remote.round()
        if stores._pace.bytes > BYTES_MIN:
            break
    assert stores._pace.bytes > BYTES_MIN
    assert memory.free == memory.slots
    memory.close()
