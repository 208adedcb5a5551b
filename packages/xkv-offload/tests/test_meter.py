"""The meter: bytes add up, time counts once however much is under way, and what stands still costs time, too."""

from collections.abc import Callable

import pytest

from xkv_offload.meter import Meter


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the clock, in ns."""
    now = [0]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])

    def set_to(ns: int) -> None:
        now[0] = ns

    return set_to


def test_side_by_side_is_one_time(at: Callable[[int], None]) -> None:
    meter = Meter()
    at(100)
    meter.begin("a")
    at(150)
    meter.begin("b")
    at(200)
    meter.moved(10)
    meter.end("a")
    at(300)
    meter.moved(20)
    meter.end("b")
    at(1_000)
    assert meter.totals() == (30, 200)
    meter.begin("c")
    at(1_001)
    meter.end("c")
    assert meter.totals() == (30, 201)


def test_what_stands_still_is_published_with_its_time(at: Callable[[int], None]) -> None:
    said: list[tuple[int, int]] = []
    meter = Meter(lambda moved, busy_ns: said.append((moved, busy_ns)))
    meter.mark()
    assert not said
    meter.begin("a")
    at(70)
    meter.mark()
    assert said[-1] == (0, 70)
    at(90)
    meter.end("nothing that began")
    meter.end("a")
    at(200)
    meter.mark()
    assert said[-1] == (0, 90)
