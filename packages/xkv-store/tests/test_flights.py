"""Outstanding puts and gets: indexes of the caller's batch, slots given back once, nothing forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_store.client_session import Lost
from xkv_store.flights import Flights, deliver
from xkv_store.ring import SlotRegion
from xkv_store.wire import LoadedObject, LoadStatus, StoredObject, StoreStatus

if TYPE_CHECKING:
    import pytest


def test_answers_are_those_of_the_callers_batch() -> None:
    region = SlotRegion(0, 8)
    region.take(3)
    stored: list[StoredObject] = []
    flights = Flights()
    flights.add_put(7, base=10, slots=[(0, 1), (2,)], on_answer=stored.append)
    deliver(flights.stored(7, [StoredObject(1, StoreStatus.CONFIRMED)]), region)
    assert stored == [StoredObject(11, StoreStatus.CONFIRMED)]
    assert region.free == 6
    deliver(flights.lost(Lost(((7, 0),), ())), region)
    assert stored[1] == StoredObject(10, StoreStatus.SHED)
    assert region.free == 8


def test_a_gets_messages_are_known_until_answered() -> None:
    loaded: list[LoadedObject] = []
    flights = Flights()
    for number, base in ((3, 0), (4, 2)):
        flights.add_get(number, get=3, base=base, count=2, on_answer=loaded.append)
    assert flights.messages_of(3) == (3, 4)
    both = [LoadedObject(index, LoadStatus.OK, 9, 5) for index in range(2)]
    region = SlotRegion(0, 0)
    deliver(flights.loaded(3, both), region)
    assert flights.messages_of(3) == (4,)
    deliver(flights.lost(Lost((), ((4, 0), (4, 1)))), region)
    assert flights.messages_of(3) == ()
    assert [answer.index for answer in loaded] == [0, 1, 2, 3]
    assert loaded[2] == LoadedObject(2, LoadStatus.FAILED, 0, 0)


def test_one_failing_callback_keeps_no_other_from_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that raised in a callback would else leave its other jobs waiting for ever."""
    region = SlotRegion(0, 2)
    region.take(2)
    answered: list[int] = []

    def on_answer(answer: StoredObject) -> None:
        answered.append(answer.index)
        raise RuntimeError("ours")

    flights = Flights()
    flights.add_put(1, base=0, slots=[(0,), (1,)], on_answer=on_answer)
    deliver(flights.lost(Lost(((1, 0), (1, 1)), ())), region)
    assert answered == [0, 1]
    assert region.free == 2
    assert caplog.text.count("RuntimeError: ours") == 2
