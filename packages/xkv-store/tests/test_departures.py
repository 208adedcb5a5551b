"""Why objects left a card: nothing recorded is lost or invented, and what is not known is said."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_store.departures import FILE_NAME, RECORDED_MIN, TOLD_MAX, Departure, Departures, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

CARD = b"c" * 16
KEYS = [number.to_bytes(56, "big") for number in range(4)]


class Clock:
    """Milliseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.ms = 1_000

    def __call__(self) -> int:
        return self.ms * 1_000_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(clock: Clock) -> Departures:
    return Departures(1, clock_ns=clock)


def loaded(folder: Path, clock: Clock, *, boots: int, is_new: bool = False, card: bytes = CARD) -> Departures:
    return Departures.load(folder, card_uuid=card, boots=boots, slots=1, is_new=is_new, clock_ns=clock)


def test_the_newest_comes_first_and_keys_are_told_apart(clock: Clock) -> None:
    one = made(clock)
    for generation, reason in enumerate((Reason.EVICTED, Reason.REPLACED, Reason.CORRUPT), 1):
        clock.ms += 10
        one.left(KEYS[0], reason, generation)
    one.left(KEYS[1], Reason.PURGED, 9)
    one.refused(KEYS[0], Reason.SHED)
    left, refused = one.of(KEYS[0])
    assert left == [
        Departure(Reason.CORRUPT, 3, 1_030),
        Departure(Reason.REPLACED, 2, 1_020),
        Departure(Reason.EVICTED, 1, 1_010),
    ]
    assert refused == [Departure(Reason.SHED, 0, 1_030)]
    assert one.of(KEYS[2]) == ([], [])
    assert one.since_ms == (0, 0)


def test_counters_are_the_cards_former_ones(clock: Clock) -> None:
    one = made(clock)
    one.left(KEYS[0], Reason.EVICTED, 1)
    one.refused(KEYS[0], Reason.OVER_QUOTA)
    one.refused(KEYS[0], Reason.SHED)
    assert one.counters == {"evicted_objects": 1, "puts_shed": 2, "puts_over_quota": 1}
    counts = one.refusals_of(KEYS[0][:16])
    assert (counts[Reason.SHED], counts[Reason.OVER_QUOTA], counts[Reason.FAILED]) == (1, 1, 0)


def test_a_full_record_forgets_the_oldest_and_says_from_when_on_it_is_whole(clock: Clock) -> None:
    one = made(clock)
    for number in range(RECORDED_MIN + 5):
        clock.ms += 1
        one.left(number.to_bytes(56, "big"), Reason.EVICTED, number + 1)
    assert one.since_ms == (1_005, 0)
    assert [one.of(number.to_bytes(56, "big"))[0] == [] for number in range(8)] == [True] * 5 + [False] * 3
    newest = RECORDED_MIN + 4
    assert one.of(newest.to_bytes(56, "big"))[0] == [Departure(Reason.EVICTED, newest + 1, clock.ms)]


def test_of_one_key_no_more_is_told_than_a_message_holds(clock: Clock) -> None:
    one = made(clock)
    for generation in range(1, 3 * TOLD_MAX):
        one.left(KEYS[0], Reason.REPLACED, generation)
    assert [departure.generation for departure in one.of(KEYS[0])[0]] == list(
        range(3 * TOLD_MAX - 1, 2 * TOLD_MAX - 1, -1)
    )


@pytest.mark.parametrize("times", [3, RECORDED_MIN + 7])
def test_a_clean_end_keeps_all_of_it(clock: Clock, tmp_path: Path, times: int) -> None:
    one = made(clock)
    for number in range(times):
        clock.ms += 1
        one.left(KEYS[number % 4], Reason.EVICTED, number + 1)
    one.refused(KEYS[2], Reason.FAILED)
    one.save(tmp_path, CARD, 4)
    clock.ms += 1_000
    again = loaded(tmp_path, clock, boots=5)
    assert again.since_ms == one.since_ms
    assert [again.of(key) for key in KEYS] == [one.of(key) for key in KEYS]
    again.left(KEYS[0], Reason.PURGED, 99_999)
    assert again.of(KEYS[0])[0][0].reason is Reason.PURGED


def test_after_a_life_that_kept_nothing_it_is_said_that_some_is_missing(clock: Clock, tmp_path: Path) -> None:
    one = made(clock)
    one.left(KEYS[0], Reason.EVICTED, 1)
    one.save(tmp_path, CARD, 4)
    clock.ms = 9_000
    killed_since = loaded(tmp_path, clock, boots=6)
    assert killed_since.of(KEYS[0]) == one.of(KEYS[0])
    assert killed_since.since_ms == (9_000, 9_000)
    assert loaded(tmp_path, clock, boots=5, card=b"d" * 16).of(KEYS[0]) == ([], [])


def test_a_new_card_has_lost_nothing(clock: Clock, tmp_path: Path) -> None:
    assert loaded(tmp_path, clock, boots=1, is_new=True).since_ms == (0, 0)
    assert loaded(tmp_path, clock, boots=1).since_ms == (1_000, 1_000)


def test_any_bytes_in_the_file_are_nothing_or_what_was_kept(clock: Clock, tmp_path: Path) -> None:
    one = made(clock)
    for number in range(20):
        one.left(KEYS[number % 4], Reason.EVICTED, number + 1)
    one.save(tmp_path, CARD, 4)
    whole = (tmp_path / FILE_NAME).read_bytes()
    random_ = random.Random(7)
    for _ in range(300):
        spoilt = bytearray(whole[: random_.randrange(len(whole) + 1)] if random_.random() < 0.5 else whole)
        for _ in range(random_.randrange(1, 4)):
            if spoilt:
                spoilt[random_.randrange(len(spoilt))] ^= 1 << random_.randrange(8)
        (tmp_path / FILE_NAME).write_bytes(spoilt)
        again = loaded(tmp_path, clock, boots=5)
        assert again.of(KEYS[0]) in (([], []), one.of(KEYS[0]))
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    assert loaded(tmp_path, clock, boots=5).of(KEYS[0]) == ([], [])
    (tmp_path / FILE_NAME).unlink()
    os.mkfifo(tmp_path / FILE_NAME)
    assert loaded(tmp_path, clock, boots=5).of(KEYS[0]) == ([], []), "and nobody is waited for"


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_nothing_and_is_not_waited_for(
    clock: Clock, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / FILE_NAME)
    held = len(list(Path("/proc/self/fd").iterdir()))
    assert loaded(tmp_path, clock, boots=5).since_ms == (1_000, 1_000)
    assert len(list(Path("/proc/self/fd").iterdir())) == held
    made(clock).save(tmp_path, CARD, 5)
    assert loaded(tmp_path, clock, boots=6).since_ms == ((0, 0) if make is os.mkfifo else (1_000, 1_000))


def test_where_it_cannot_be_kept_nothing_else_happens(clock: Clock, tmp_path: Path) -> None:
    one = made(clock)
    one.save(tmp_path / "missing", CARD, 1)
    assert not (tmp_path / "missing").exists()


def test_a_file_of_a_larger_record_is_taken_as_far_as_there_is_room(clock: Clock, tmp_path: Path) -> None:
    one = Departures(10**6, clock_ns=clock)
    keys = [number.to_bytes(56, "big") for number in range(RECORDED_MIN + 3)]
    for number, key in enumerate(keys):
        clock.ms += 1
        one.left(key, Reason.EVICTED, number + 1)
    one.save(tmp_path, CARD, 4)
    again = loaded(tmp_path, clock, boots=5)
    assert again.since_ms == (1_003, 0)
    assert [again.of(key) == one.of(key) for key in keys] == [False] * 3 + [True] * RECORDED_MIN
    again.left(keys[0], Reason.PURGED, 1)
    assert again.since_ms == (1_004, 0)
