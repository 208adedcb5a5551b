"""A purge by a gateway goes on as long as something leaves, and not for ever where nothing does."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from xkv_store import card_view
from xkv_store.contents import HeldObject
from xkv_store.errors import UserError
from xkv_store.wire_tools import OBJECTS_PURGED_MAX, Purged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_store.tool import Tool

OBJECTS = [HeldObject(number.to_bytes(30, "big"), number + 1, 100, 0) for number in range(OBJECTS_PURGED_MAX + 10)]


class Gateway:
    """Lets so many leave with each message, and says of the rest that it must wait."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.asked: list[list[bytes]] = []
        self.left: list[bytes] = []

    def purge(self, objects: Sequence[HeldObject], namespaces: Sequence[bytes] = ()) -> Purged:
        self.asked.append([one.key for one in objects])
        self.left += [one.key for one in objects[: self.at_once]]
        later = tuple(range(min(self.at_once, len(objects)), len(objects)))
        return Purged(1, len(objects) - len(later), 100 * (len(objects) - len(later)), later, len(namespaces))


def view_of(gateway: Gateway) -> card_view.CardView:
    return card_view._Served(cast("Tool", gateway))


def test_what_must_wait_is_said_again_until_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_view, "PURGE_RETRY_S", 0.001)
    gateway = Gateway(at_once=7)
    steps = list(view_of(gateway).purge(OBJECTS))
    assert gateway.left == [one.key for one in OBJECTS]
    assert (sum(left for left, _ in steps), sum(size for _, size in steps)) == (len(OBJECTS), 100 * len(OBJECTS))
    assert max(map(len, gateway.asked)) == OBJECTS_PURGED_MAX


def test_where_nothing_leaves_any_more_it_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_view, "PURGE_RETRY_S", 0.001)
    monkeypatch.setattr(card_view, "PURGE_STUCK_S_MAX", 0.05)
    with pytest.raises(UserError, match="no object leave any more"):
        list(view_of(Gateway(at_once=0)).purge(OBJECTS[:3]))


def test_namespaces_are_forgotten_a_message_at_a_time() -> None:
    gateway = Gateway(at_once=0)
    assert view_of(gateway).forget([bytes([number]) * 16 for number in range(150)]) == 150
    assert len(gateway.asked) == 3
