"""How much a call carries: on every link calls come to an end in time, and on a fast one they are large."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.remote_fetches import LOAD_NS, RemoteFetches
from xkv_store.remote_link import CALL_NS_MAX, CALLS_MAX
from xkv_store.remote_memory import RemoteMemory
from xkv_store.remote_pace import BYTES_BEGIN, BYTES_MAX, BYTES_MIN, Pace
from xkv_store.remote_stores import PUT_NS
from xkv_store.remote_words import Lane
from xkv_store.wire_remote import SoughtStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NS = 1_000_000_000
CALL_NS = 3_000_000  # that each call takes beside its bytes


def took_ns(sent_bytes: int, mbit_s: float) -> int:
    return CALL_NS + int(sent_bytes * 8 * 1_000 / mbit_s)


@pytest.mark.parametrize("mbit_s", [4, 20, 90, 180, 1_000, 20_000])
@pytest.mark.parametrize(("lane", "call_ns"), [(Lane.LOAD, LOAD_NS), (Lane.STORE, PUT_NS)])
def test_calls_are_soon_such_as_the_link_takes_in_time(mbit_s: float, lane: Lane, call_ns: int) -> None:
    """64 MiB by 90 Mbit/s are 6 s: each call was ended after 3 s, the next was no smaller, and nothing ever came."""
    pace, now_ns, failed, carried = Pace(call_ns=call_ns), 0, 0, []
    for _ in range(40):
        begun_ns, carries = now_ns, pace.bytes
        now_ns += min(took_ns(carries, mbit_s), CALL_NS_MAX[lane])
        if now_ns - begun_ns == CALL_NS_MAX[lane]:
            pace.failed(now_ns)
            failed += 1
        else:
            pace.ended(carries, begun_ns, now_ns)
            carried.append(carries)
    assert failed <= (BYTES_BEGIN // BYTES_MIN).bit_length() - 1
    assert carried
    last = carried[-1]
    assert last == BYTES_MIN or took_ns(last, mbit_s) <= 1.1 * call_ns
    assert last == BYTES_MAX or took_ns(4 * last, mbit_s) > call_ns, "not smaller than need be"


def test_a_call_that_waited_for_another_has_not_taken_as_long() -> None:
    pace = Pace(call_ns=NS)
    for begun_ns, now_ns in ((0, 900_000_000), (1, 1_800_000_000), (900_000_001, 2_700_000_000)):
        pace.ended(BYTES_BEGIN, begun_ns, now_ns)
    assert pace.bytes == BYTES_BEGIN


def test_small_calls_and_calls_for_nothing_say_nothing_of_large_ones() -> None:
    pace = Pace(call_ns=NS)
    for number in range(10):
        pace.ended(0 if number % 2 else BYTES_MIN, number, number + 1)
    assert pace.bytes == BYTES_BEGIN


class SlowLink:
    """It carries what is asked for when the test says so."""

    is_up = True

    def __init__(self) -> None:
        self.calls: list[tuple[int, Callable[[Sequence[int] | None], None]]] = []

    def has_room(self, lane: Lane) -> bool:
        return lane is Lane.LOAD and len(self.calls) < CALLS_MAX[lane]

    def call(
        self,
        _lane: Lane,
        keys: Sequence[str],
        on_codes: Callable[[Sequence[int] | None], None],
        *,
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        assert len(keys) == len(offsets) == len(sizes)
        self.calls.append((sum(sizes), on_codes))


GEOMETRY = Geometry(1 << 20)


@pytest.fixture
def memory() -> Iterator[RemoteMemory]:
    made = RemoteMemory(64 << 20, GEOMETRY)
    yield made
    made.close()


@pytest.fixture
def link() -> SlowLink:
    return SlowLink()


@pytest.fixture
def fetches(memory: RemoteMemory, link: SlowLink) -> RemoteFetches:
    card = SimpleNamespace(geometry=GEOMETRY, table=SimpleNamespace(holds=lambda *_: False))
    of_any: Any = link
    return RemoteFetches(card, of_any, memory, of_any, lambda *_: None)  # type: ignore[arg-type]


def ask(fetches: RemoteFetches, *fragments: int, first: int = 0) -> list[SoughtStatus]:
    """Objects of so many fragments, numbered from `first` on; what is heard of them."""
    heard: list[SoughtStatus] = []
    for number, size in enumerate(fragments, first):
        fetches.add(ObjectKey(b"n" * 16, 0, number.to_bytes(8, "little"), 0), size, 0, heard.append, 0)
    return heard


def test_what_is_fetched_after_a_call_that_was_ended_is_less(fetches: RemoteFetches, link: SlowLink) -> None:
    heard = ask(fetches, *[1] * 64)
    fetches.step(1)
    before = [asked for asked, _ in link.calls]
    assert before == [BYTES_BEGIN] * CALLS_MAX[Lane.LOAD]
    calls, link.calls = link.calls, []
    for _, on_codes in calls:
        on_codes(None)
    assert set(heard) == {SoughtStatus.FAILED}
    fetches.step(2)
    assert [asked for asked, _ in link.calls] == [BYTES_BEGIN >> len(before)] * CALLS_MAX[Lane.LOAD]


def test_an_object_that_is_larger_than_a_call_goes_alone(fetches: RemoteFetches, link: SlowLink) -> None:
    """By 90 Mbit/s 32 MiB take 3 s: with others before it in its call it would come to nothing, again and again."""
    ask(fetches, 1, 32, 1, 1)
    fetches.step(1)
    assert [asked >> 20 for asked, _ in link.calls] == [1, 32]
    link.calls.clear()
    fetches.step(2)
    assert [asked >> 20 for asked, _ in link.calls] == [2]


def test_calls_for_objects_that_fill_little_of_their_slots_grow_again(fetches: RemoteFetches, link: SlowLink) -> None:
    """How much comes is known when it has come: reckoned as whole slots, calls stayed as small as they once were."""
    ask(fetches, *[1] * 16)
    for now_ns in range(1, 9):
        fetches.step(now_ns)
        for _, on_codes in [link.calls.pop(0) for _ in list(link.calls)]:
            on_codes(None)
        ask(fetches, *[1] * 16, first=100 * now_ns)
    asked_for: list[int] = []
    for number in range(1, 41):  # some may take long on a machine that does other things
        ask(fetches, *[1] * 128, first=10_000 * number)
        fetches.step(1_000 + number)
        asked, on_codes = link.calls.pop(0)
        asked_for.append(asked >> 20)
        on_codes([65_536] * (asked >> 20))
    assert asked_for[0] == 1
    assert max(asked_for) >= 32


def test_after_a_failure_objects_are_reckoned_as_whole_slots(fetches: RemoteFetches, link: SlowLink) -> None:
    ask(fetches, *[1] * 300)
    fetches.step(1)
    first, second = (on_codes for _, on_codes in link.calls)
    link.calls.clear()
    first([4_096] * 16)
    fetches.step(2)
    assert link.calls[0][0] >> 20 > 16, "a call has room for many that are as small"
    (_, third) = link.calls.pop()
    second(None)
    third(None)
    fetches.step(3)
    assert {asked >> 20 for asked, _ in link.calls} == {BYTES_BEGIN >> 22}
