"""What listeners are told: what is confirmed, once; what has left, in time; nothing that nobody has heard of."""

import pytest

from xkv_offload import announcements
from xkv_offload.announcements import EVENT_KEYS_MAX, LOOKED_AT_MAX, Announcements


def key(number: int) -> bytes:
    return number.to_bytes(36, "big")


class Card:
    def __init__(self) -> None:
        self.holds: set[bytes] = set()
        self.told = Announcements(self.holds.__contains__)

    def poll(self) -> list[tuple[bool, list[int]]]:
        return [(news.removed, [int.from_bytes(one, "big") for one in news.keys]) for news in self.told.poll()]


def test_stored_when_confirmed_and_removed_when_it_has_left() -> None:
    card = Card()
    card.told.stored([key(1), key(2)])
    assert card.poll() == []
    card.holds |= {key(1)}
    assert card.poll() == [(False, [1])]
    card.holds |= {key(2)}
    assert card.poll() == [(False, [2])]
    assert card.poll() == []
    card.holds -= {key(2)}
    assert card.poll() == [(True, [2])]
    card.holds |= {key(2)}
    assert card.poll() == [], "nobody has stored or found it since"
    card.told.found(key(2))
    card.told.found(key(2))
    assert card.poll() == [(False, [2])]


def test_a_prefix_before_what_follows_it_whatever_the_card_confirms_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    card = Card()
    card.told.stored([key(1), key(2)])
    card.told.stored([key(3)])
    card.holds |= {key(2), key(3)}
    assert card.poll() == []
    card.holds |= {key(1)}
    assert card.poll() == [(False, [1, 2, 3])]

    card.told.stored([key(4), key(5)])
    card.holds |= {key(5)}
    assert card.poll() == []
    now[0] += announcements.ORDERED_SECONDS
    assert card.poll() == [(False, [5])], "one that may have failed is not waited for any longer"
    card.holds |= {key(4)}
    assert card.poll() == [(False, [4])]


def test_what_is_never_confirmed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    card = Card()
    card.told.stored([key(1)])
    now[0] += announcements.WAITING_SECONDS + 1
    assert card.poll() == []
    card.holds |= {key(1)}
    assert card.poll() == []


def test_all_are_looked_at_in_turn_a_few_at_each_step() -> None:
    card = Card()
    card.holds |= {key(number) for number in range(5 * LOOKED_AT_MAX)}
    for one in sorted(card.holds):
        card.told.found(one)
    assert sum(len(numbers) for _, numbers in card.poll()) == 5 * LOOKED_AT_MAX
    card.holds.clear()
    removed: list[int] = []
    for _ in range(5):
        ((is_removal, numbers),) = card.poll()
        assert is_removal
        assert len(numbers) == LOOKED_AT_MAX
        removed += numbers
    assert sorted(removed) == list(range(5 * LOOKED_AT_MAX))
    assert card.poll() == []


def test_those_that_wait_do_not_keep_others_waiting_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    card = Card()
    card.told.stored([key(number) for number in range(2 * LOOKED_AT_MAX)])
    card.holds |= {key(2 * LOOKED_AT_MAX - 1)}
    assert card.poll() == []
    now[0] += announcements.ORDERED_SECONDS
    assert card.poll() == []
    assert card.poll() == [(False, [2 * LOOKED_AT_MAX - 1])]


def test_removed_and_there_again_is_there() -> None:
    card = Card()
    card.holds |= {key(1)}
    card.told.found(key(1))
    card.poll()
    card.told.reset()
    card.told.found(key(1))
    assert card.poll() == [(True, [1]), (False, [1])]


def test_what_nobody_heard_of_is_not_taken_back() -> None:
    card = Card()
    card.told.found(key(1))
    card.told.stored([key(2)])
    card.told.reset()
    card.holds |= {key(1), key(2)}
    assert card.poll() == []


def test_no_more_is_remembered_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "ANNOUNCED_MAX", 3)
    monkeypatch.setattr(announcements, "WAITING_MAX", 2)
    card = Card()
    card.holds |= {key(number) for number in range(10)}
    card.told.stored([key(number) for number in range(5)])
    assert card.poll() == [(False, [3, 4])]
    card.told.found(key(5))
    card.told.found(key(6))
    assert card.poll() == [(True, [3]), (False, [5, 6])], "its removal would not be seen"


def test_an_event_has_its_bound() -> None:
    card = Card()
    card.holds |= {key(number) for number in range(EVENT_KEYS_MAX + 1)}
    for one in card.holds:
        card.told.found(one)
    assert [len(numbers) for _, numbers in card.poll()] == [EVENT_KEYS_MAX, 1]
