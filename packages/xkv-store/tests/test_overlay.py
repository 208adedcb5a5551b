"""The overlay: one batch at a time, in order and bounded, and answers for what is not yet committed."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_store.index import Index, Meta, RemoveObject, SetNamespace, SetObject
from xkv_store.key import ObjectKey
from xkv_store.layout import Extent, Record, order_key_of, pack_record
from xkv_store.limbo import Ghost
from xkv_store.overlay import NAMESPACES_QUEUED_MAX, Overlay


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index.create(tmp_path / "index", Meta(bytes(16), 4_096, 1, 0, 0), slots=10)
    yield index
    index.close()


def key_of(number: int, rank: int = 0) -> bytes:
    return ObjectKey(bytes(16), 0, bytes([number]) * 8, rank).encode()


def record(generation: int) -> Record:
    return Record(generation, 1, 0, 0, (Extent(0, generation, 1),))


def ghost(number: int, generation: int) -> Ghost:
    return Ghost(key_of(number), record(generation), 1, 0, readable=False)


def commit(overlay: Overlay, index: Index) -> list[int]:
    batch = overlay.take()
    assert batch is not None
    index.apply(batch.changes, batch.generation_ceiling)
    return [generation for _, generation, _ in overlay.settle(batch)]


def test_it_answers_before_and_after_the_commit(index: Index) -> None:
    overlay = Overlay(index)
    overlay.set(key_of(1), record(1), None)
    assert overlay.record(key_of(1)) == record(1)
    assert overlay.chunk(key_of(1)[:-2], 9) == []
    assert commit(overlay, index) == [1]
    assert overlay.record(key_of(1)) == record(1)
    assert overlay.chunk(key_of(1)[:-2], 9) == [(key_of(1), record(1))]
    gone = ghost(1, 1)
    overlay.remove(key_of(1), gone)
    assert overlay.record(key_of(1)) is None
    assert overlay.chunk(key_of(1)[:-2], 9) == []
    states = [gone.settled]
    commit(overlay, index)
    assert [*states, gone.settled] == [False, True]
    assert overlay.record(key_of(1)) is None
    assert len(overlay) == 0


def test_one_batch_at_a_time_in_order_and_bounded(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xkv_store.overlay.CHANGES_PER_BATCH_MAX", 3)
    overlay = Overlay(index)
    for number in range(5):
        overlay.set(key_of(number), record(number + 1), None)
    batch = overlay.take()
    assert batch is not None
    assert [step.generation for step in batch.steps] == [1, 2, 3]
    assert overlay.take() is None
    assert len(overlay) == 5
    index.apply(batch.changes)
    overlay.settle(batch)
    assert commit(overlay, index) == [4, 5]
    assert overlay.take() is None


def test_what_is_undone_is_removed_in_its_place(index: Index) -> None:
    overlay = Overlay(index)
    overlay.set(key_of(1), record(1), None)
    overlay.remove(key_of(2), ghost(2, 9))
    batch = overlay.take()
    assert batch is not None
    overlay.set(key_of(2), record(2), None)
    (undone,) = overlay.undo(batch)
    assert isinstance(undone[0], SetObject)
    assert undone[2] == record(1)
    assert overlay.record(key_of(1)) is None
    assert overlay.record(key_of(2)) == record(2)
    again = overlay.take()
    assert again is not None
    assert list(again.changes)[:2] == [RemoveObject(key_of(1)), RemoveObject(key_of(2))]
    assert isinstance(list(again.changes)[2], SetObject)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["set", "move", "remove"]), st.integers(0, 3), st.integers(0, 9)),
            st.tuples(st.sampled_from(["take", "apply", "fail", "lose the answer"]), st.just(0), st.just(0)),
        ),
        max_size=40,
    )
)
@settings(max_examples=150)
def test_the_order_is_that_of_the_objects_whatever_fails(steps: list[tuple[str, int, int]]) -> None:
    """Changes say where an object stood, as far as is known: after a failure that is another place."""
    with TemporaryDirectory() as folder:
        index = Index.create(Path(folder) / "index", Meta(bytes(16), 4_096, 1, 0, 0), slots=10)
        overlay, batch, generation = Overlay(index), None, 0
        for name, number, family in [*steps, ("apply", 0, 0), ("take", 0, 0), ("apply", 0, 0)]:
            key = key_of(number)
            present = overlay.record(key)
            if name == "set":
                generation += 1
                old = Ghost(key, present, 1, 0, readable=False) if present is not None else None
                is_new = present is None and family % 2 == 0
                overlay.set(key, record(generation)._replace(family=family), old, is_new=is_new)
            elif name == "move" and present is not None:
                overlay.move(key, present._replace(family=family), present)
            elif name == "remove" and present is not None:
                overlay.remove(key, Ghost(key, present, 1, 0, readable=False))
            elif name == "take" and batch is None:
                batch = overlay.take()
            elif batch is not None and name in {"apply", "fail", "lose the answer"}:
                if name != "fail":
                    index.apply(batch.changes)
                if name == "apply":
                    overlay.settle(batch)
                else:
                    overlay.undo(batch)
                batch = None
        objects = index.objects_from(b"", 10)
        assert index.order_from(b"", 10) == sorted((order_key_of(packed), key) for key, packed in objects)
        assert objects == [(key, pack_record(found)) for key in map(key_of, range(4)) if (found := overlay.record(key))]
        index.close()


def test_a_lost_ceiling_is_asked_for_again(index: Index) -> None:
    overlay = Overlay(index)
    overlay.raise_ceiling(77)
    batch = overlay.take()
    assert batch is not None
    overlay.undo(batch)
    again = overlay.take()
    assert again is not None
    assert again.generation_ceiling == 77


def test_a_known_namespace_is_not_written_again(index: Index) -> None:
    overlay = Overlay(index)
    overlay.set_namespace(b"n" * 16, b"{}")
    overlay.set_namespace(b"n" * 16, b"{}")
    assert len(overlay) == 1


def test_a_damaged_record_is_a_miss(index: Index) -> None:
    with index._env.begin(write=True) as transaction:
        transaction.put(key_of(1), b"junk", db=index._objects)
    assert Overlay(index).record(key_of(1)) is None


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_namespaces_are_bounded_and_the_oldest_leaves(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound they fill the index, and then every put fails."""
    monkeypatch.setattr("xkv_store.overlay.NAMESPACES_MAX", 3)
    overlay = Overlay(index)
    for number in range(3):
        overlay.set_namespace(name_of(number), b"{}")
        commit(overlay, index)
    overlay.set_namespace(name_of(0), b"{}")
    assert len(overlay) == 0, "an unchanged one is not written again, but it is used"
    overlay.set_namespace(name_of(3), b"{}")
    commit(overlay, index)
    assert set(index.namespaces()) == {name_of(0), name_of(2), name_of(3)}
    again = Overlay(index)
    again.set_namespace(name_of(2), b"{}")
    assert again.take() is None, "what a former life has written is not written again"


def test_a_card_with_too_many_namespaces_heals(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.apply([SetNamespace(name_of(number), b"{}") for number in range(9)])
    index.refresh()
    monkeypatch.setattr("xkv_store.overlay.NAMESPACES_MAX", 3)
    commit(Overlay(index), index)
    assert len(index.namespaces()) == 3


def test_namespaces_that_wait_are_bounded_also_while_commits_fail(index: Index) -> None:
    overlay = Overlay(index)
    for number in range(100):
        overlay.set_namespace(name_of(number), b"{}")
        if number % 10 == 0:
            batch = overlay.take()
            assert batch is not None
            overlay.undo(batch)
        assert len(overlay) <= NAMESPACES_QUEUED_MAX
    commit(overlay, index)
    assert set(index.namespaces()) == {name_of(number) for number in range(84, 100)}
    overlay.set_namespace(name_of(1), b"{}")
    commit(overlay, index)
    assert name_of(1) in index.namespaces(), "one that was passed over is written when it is published again"


def test_a_removal_of_a_namespace_that_failed_is_tried_again(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xkv_store.overlay.NAMESPACES_MAX", 1)
    overlay = Overlay(index)
    overlay.set_namespace(name_of(1), b"{}")
    commit(overlay, index)
    overlay.set_namespace(name_of(2), b"{}")
    batch = overlay.take()
    assert batch is not None
    overlay.undo(batch)
    commit(overlay, index)
    assert set(index.namespaces()) == {name_of(2)}
