"""Counts of what was asked for: never too low for long, rarely too high, in memory that does not grow."""

import pytest

from xkv_offload import asked
from xkv_offload.asked import ASKS_PER_HALVING, CELLS_BITS, COUNT_MAX, AskCounts


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4 + bytes(4)


def test_each_key_by_itself() -> None:
    counts = AskCounts()
    assert [counts.ask(key(1)) for _ in range(3)] == [1, 2, 3]
    assert counts.ask(key(2)) == 1
    assert [counts.ask(key(1)) for _ in range(COUNT_MAX)][-1] == COUNT_MAX


def test_counts_are_too_high_for_few_at_the_bound() -> None:
    counts = AskCounts()
    wrong = sum(counts.ask(key(number)) != 1 for number in range(ASKS_PER_HALVING - 1))
    assert wrong < ASKS_PER_HALVING / 50


def test_counts_fade_and_memory_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "ASKS_PER_HALVING", 4)
    counts = AskCounts()
    assert [counts.ask(key(1)) for _ in range(4)] == [1, 2, 3, 4]
    assert counts.ask(key(1)) == 3
    assert len(counts._cells) == 1 << CELLS_BITS
