"""What a card holds, page by page, and what leaves it: nothing is passed over or told twice, and a hit is kept."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from xkv_store.attendant import Attendant
from xkv_store.card import CardOptions, PutPlan
from xkv_store.errors import MediumError
from xkv_store.geometry import DATA_OFFSET
from xkv_store.key import ObjectKey
from xkv_store.quotas import Quotas
from xkv_store.testing.cards import CardDriver
from xkv_store.wire_tools import (
    OBJECTS_LISTED_MAX,
    OBJECTS_PURGED_MAX,
    ListedNamespaces,
    ListedObject,
    ListedObjects,
    ListNamespaces,
    ListObjects,
    Purge,
    Purged,
    PurgeObject,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOT = 4_096
SLOTS = 600
NAMESPACES = [bytes([number]) * 16 for number in (1, 5, 9)]
GRACE_MS = 1_000


def key_of(number: int, namespace: bytes = NAMESPACES[0], rank: int = 0) -> ObjectKey:
    return ObjectKey(namespace, 0, number.to_bytes(8, "big"), rank)


def content_of(number: int, slots: int = 1) -> bytes:
    return random.Random(number).randbytes(slots * 3_072 - 100)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[CardDriver]:
    options = CardOptions(
        folder=tmp_path / "card",
        capacity_bytes=DATA_OFFSET + SLOTS * SLOT,
        slot_bytes=SLOT,
        grace_ms=GRACE_MS,
        quotas=Quotas.parse(["0505=400KiB"]),
    )
    driver = CardDriver(options)
    yield driver
    driver.close()


def listed(driver: CardDriver, prefix: bytes = b"") -> list[ListedObject]:
    """All pages, as a tool asks for them."""
    attendant, start = Attendant(driver.card), prefix
    found: list[ListedObject] = []
    while True:
        answer = attendant.answer(ListObjects(7, prefix, start), driver.now_ns)
        assert isinstance(answer, ListedObjects)
        assert (answer.ask, answer.reason) == (7, "")
        found += answer.objects
        if not answer.next:
            return found
        assert answer.next > start
        start = answer.next


def purge(driver: CardDriver, *objects: PurgeObject, namespaces: tuple[bytes, ...] = ()) -> Purged:
    answer = Attendant(driver.card).answer(Purge(8, objects, namespaces), driver.now_ns)
    assert isinstance(answer, Purged)
    return answer


def test_pages_have_every_object_once_and_in_order(driver: CardDriver) -> None:
    put = {}
    for number in range(OBJECTS_LISTED_MAX + 30):
        plan = driver.put(key_of(number, NAMESPACES[number % 3 // 2]), content_of(number), position=number)
        if isinstance(plan, PutPlan):  # the second namespace has a quota
            put[plan.encoded_key] = plan
    found = listed(driver)
    assert len(found) > OBJECTS_LISTED_MAX, "more than a page"
    assert [one.key for one in found] == sorted({one.key for one in found})
    for one in found:
        plan = put[one.key]
        assert (one.generation, one.length, one.position) == (plan.generation, plan.length, plan.position)
    gone = [key for key in put if key not in {one.key for one in found}]
    assert all(driver.card.begin_proof(ObjectKey.decode(key)) is None for key in gone), "evicted for the quota"
    for prefix in (NAMESPACES[0], NAMESPACES[1], NAMESPACES[2], found[4].key, found[4].key[:-3], b"\xff"):
        assert listed(driver, prefix) == [one for one in found if one.key.startswith(prefix)]


def test_a_page_shows_what_is_not_committed_yet_as_it_will_be(driver: CardDriver) -> None:
    """An object that has left must not be shown any more; one that nobody can get yet not yet."""
    first, second = (driver.put(key_of(number), content_of(number)) for number in (1, 2))
    assert isinstance(first, PutPlan)
    assert isinstance(second, PutPlan)
    driver.card.drop(first.key, first.generation, "corrupt")
    coming = driver.begin(key_of(3), 2_000)
    assert isinstance(coming, PutPlan)
    driver.write(coming, content_of(3)[:2_000])
    driver.card.finish_put(coming, None)
    assert [one.key for one in listed(driver)] == [second.encoded_key]
    driver.commit()
    assert [one.key for one in listed(driver)] == [second.encoded_key, coming.encoded_key]


def test_a_purge_leaves_a_hit_that_was_just_given_and_no_lookup_hits(driver: CardDriver) -> None:
    plan = driver.put(key_of(1), content_of(1, 2))
    kept = driver.put(key_of(2), content_of(2))
    assert isinstance(plan, PutPlan)
    assert isinstance(kept, PutPlan)
    other = purge(driver, PurgeObject(plan.encoded_key, plan.generation + 1), PurgeObject(b"\0", 1))
    assert (other.objects, other.later) == (0, ()), "of another generation, or no object at all"
    used = driver.card.slots()["used"]
    answer = purge(driver, PurgeObject(plan.encoded_key, plan.generation))
    assert (answer.objects, answer.object_bytes) == (1, plan.length)
    assert driver.card.slots()["used"] == used - 2
    assert driver.card.table.get(plan.key.tag) is None
    assert driver.get(plan.key) == content_of(1, 2), "whoever was told of it just now"
    assert driver.card.counters()["gets_from_limbo"] == 1
    driver.settle(GRACE_MS + 1)
    assert driver.get(plan.key) is None
    assert driver.card.slots() == {"free": SLOTS - 1, "in_flight": 0, "used": 1, "limbo": 0}
    driver.crash()
    assert [one.key for one in listed(driver)] == [kept.encoded_key], "it is gone from the index, too"


def test_what_is_read_or_put_while_it_is_purged(driver: CardDriver) -> None:
    plan = driver.put(key_of(1), content_of(1))
    assert isinstance(plan, PutPlan)
    pinned = driver.card.begin_get(plan.key, driver.now_ns)
    assert pinned is not None
    coming = driver.begin(plan.key, plan.length, replacing=True)
    assert isinstance(coming, PutPlan)
    assert purge(driver, PurgeObject(plan.encoded_key, plan.generation)).objects == 1
    driver.settle(GRACE_MS + 1)
    assert driver.read(pinned) == content_of(1), "its slots are not used again while somebody reads them"
    driver.card.end_get(pinned)
    driver.write(coming, content_of(1))
    driver.card.finish_put(coming, None)
    driver.settle()
    assert [one.generation for one in listed(driver)] == [coming.generation], "a put that was under way is kept"


def test_a_purge_leaves_room_in_limbo_and_says_what_must_wait(driver: CardDriver) -> None:
    """Replacements and evictions need limbo, too: a purge of a whole card takes a share of it at a time."""
    for number in range(200):
        assert isinstance(driver.put(key_of(number), content_of(number)), PutPlan)
    wanted = [PurgeObject(one.key, one.generation) for one in listed(driver)][:120]
    waits = 0
    while wanted:
        some = wanted[:OBJECTS_PURGED_MAX]
        answer = purge(driver, *some)
        assert answer.objects == len(some) - len(answer.later)
        assert driver.card.slots()["limbo"] <= SLOTS // 8
        wanted = [some[index] for index in answer.later] + wanted[OBJECTS_PURGED_MAX:]
        if answer.later:
            driver.settle(GRACE_MS + 1)
            waits += 1
    assert waits == 1
    assert len(listed(driver)) == 80
    assert driver.card.counters()["purged_objects"] == 120


def namespaces_of(driver: CardDriver) -> list[tuple[bytes, int, int, int, int | None, str]]:
    answer = Attendant(driver.card).answer(ListNamespaces(3, b""), driver.now_ns)
    assert isinstance(answer, ListedNamespaces)
    assert (answer.more, answer.reason) == (False, "")
    return [
        (one.namespace, one.objects, one.held_bytes, one.limbo_bytes, one.quota_bytes, one.descriptor)
        for one in answer.namespaces
    ]


def test_namespaces_that_hold_something_or_were_published(driver: CardDriver) -> None:
    first, second, third = NAMESPACES
    assert namespaces_of(driver) == []
    driver.put(key_of(1, first), content_of(1, 3))
    plan = driver.put(key_of(2, second), content_of(2))
    driver.card.contents.put_namespace(second, '{"a": 1}')
    driver.card.contents.put_namespace(third, '{"b": 2}')
    driver.commit()
    assert isinstance(plan, PutPlan)
    assert namespaces_of(driver) == [
        (first, 1, 3 * SLOT, 0, None, ""),
        (second, 1, SLOT, 0, 100 * SLOT, '{"a": 1}'),
        (third, 0, 0, 0, None, '{"b": 2}'),
    ]
    held = purge(driver, namespaces=(second, third, b"x" * 16))
    assert held.namespaces == 2, "the one that holds something is kept"
    assert purge(driver, PurgeObject(plan.encoded_key, plan.generation), namespaces=(second,)).namespaces == 1
    driver.commit()
    assert namespaces_of(driver) == [(first, 1, 3 * SLOT, 0, None, ""), (second, 0, SLOT, SLOT, 100 * SLOT, "")]
    driver.settle(GRACE_MS + 1)
    driver.crash()
    assert [name for name, *_ in namespaces_of(driver)] == [first]


def test_a_namespace_that_is_published_again_before_it_is_forgotten_stays(driver: CardDriver) -> None:
    name = NAMESPACES[2]
    driver.card.contents.put_namespace(name, "{}")
    driver.commit()
    driver.card.contents.forget_namespace(name)
    driver.card.contents.put_namespace(name, "{}")
    driver.commit()
    assert driver.card.contents.descriptors() == {name: "{}"}
    driver.card.contents.forget_namespace(name)
    driver.fail_commit(MediumError(28, "full"))
    driver.tick(2_000)
    driver.commit()
    assert driver.card.contents.descriptors() == {name: "{}"}, "what could not be forgotten is as it was"
    driver.card.contents.put_namespace(name, '{"new": 1}')
    driver.commit()
    assert driver.card.contents.descriptors() == {name: '{"new": 1}'}


def test_pages_of_namespaces_go_on_behind_the_last(driver: CardDriver) -> None:
    """However many there are, and however long what was published of them."""
    rng = random.Random(1)
    names = sorted(rng.randbytes(16) for _ in range(150))
    for number, name in enumerate(names):
        if number % 3:
            driver.card.contents.put_namespace(name, '{"x": "' + "x" * (9_000 if number % 7 else 59_900) + '"}')
            driver.commit()
        if number % 3 != 1:
            assert isinstance(driver.put(key_of(number, name), content_of(number)), PutPlan)
    attendant, after, found, pages = Attendant(driver.card), b"", list[bytes](), 0
    while True:
        answer = attendant.answer(ListNamespaces(3, after), driver.now_ns)
        assert isinstance(answer, ListedNamespaces)
        found += [one.namespace for one in answer.namespaces]
        pages += 1
        if not answer.more:
            break
        after = found[-1]
    assert found == names
    assert pages > 20


def test_an_index_that_cannot_be_read_is_said(driver: CardDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MediumError(5, "reading the index")

    monkeypatch.setattr("xkv_store.index.Index.objects_from", fail)
    monkeypatch.setattr("xkv_store.index.Index.namespaces", fail)
    for question in (ListObjects(1, b"", b""), ListNamespaces(1, b"")):
        answer = Attendant(driver.card).answer(question, driver.now_ns)
        assert isinstance(answer, ListedObjects | ListedNamespaces)
        assert "reading the index" in answer.reason
