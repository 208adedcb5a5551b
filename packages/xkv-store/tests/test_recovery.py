"""Recovery's columns: what numpy makes of an index is what a step per object would make."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xkv_store import recovery
from xkv_store.geometry import Geometry
from xkv_store.index import Index, Meta, SetObject
from xkv_store.key import ObjectKey
from xkv_store.layout import Extent, Record, SlotHeader, pack_record

GEOMETRY = Geometry(4_096)
SLOTS = (300, 200)

keys = st.builds(
    ObjectKey,
    st.sampled_from([b"a" * 16, b"b" * 16]),
    st.integers(0, 2),
    st.binary(min_size=1, max_size=32),
    st.sampled_from([0, 1, 63, 64, 65, 65_535]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(keys, max_size=40), st.data())
def test_columns_are_what_single_steps_would_give(
    tmp_path_factory: pytest.TempPathFactory, chosen: set[ObjectKey], data: st.DataObject
) -> None:
    index = Index.create(tmp_path_factory.mktemp("i") / "index", Meta(bytes(16), 4_096, 2, 0, 0), slots=500)
    free = [(0, 0), (1, 0)]
    records = {}
    for generation, key in enumerate(sorted(chosen), 1):
        sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
        extents = []
        for database, slots in enumerate(sizes):
            extents.append(Extent(database, free[database][1], slots))
            free[database] = (database, free[database][1] + slots)
        length = (sum(sizes) - 1) * GEOMETRY.fragment_bytes + data.draw(st.integers(1, GEOMETRY.fragment_bytes))
        records[key] = Record(generation, length, 0, 0, tuple(extents))
    index.apply([SetObject(key.encode(), pack_record(record)) for key, record in records.items()])
    index.refresh()
    loaded = recovery.load(index, SLOTS, GEOMETRY)
    rows = zip(loaded.tags, loaded.generations, loaded.rank_bits, loaded.fragments, loaded.lengths, strict=True)
    assert [tuple(map(int, row)) for row in rows] == [
        (key.tag, r.generation, key.bit, GEOMETRY.fragments(r.length), r.length)
        for key, r in sorted(records.items(), key=lambda item: item[0].encode())
    ]
    for database, used in enumerate(loaded.used):
        assert used.tolist() == [slot < free[database][1] for slot in range(SLOTS[database])]
    index.close()


def test_a_chunks_batches_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of later batches must not land on earlier ones."""
    monkeypatch.setattr(recovery, "SCAN_BATCH", 3)
    index = Index.create(tmp_path / "index", Meta(bytes(16), 4_096, 1, 0, 0), slots=500)
    rows = [
        SetObject(
            ObjectKey(bytes(16), 0, bytes([n]) * (1 + n % 3), 0).encode(),
            pack_record(Record(n + 1, 1, 0, 0, (Extent(0, n, 1),))),
        )
        for n in range(10)
    ]
    index.apply(rows)
    index.refresh()
    loaded = recovery.load(index, (20,), GEOMETRY)
    assert sorted(loaded.generations.tolist()) == list(range(1, 11))
    assert loaded.used[0].tolist() == [True] * 10 + [False] * 10
    assert [run.first for run in loaded.allocators()[0].free_runs()] == [10]
    index.close()


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_an_object_is_assembled_only_whole(missing: int) -> None:
    encoded = ObjectKey(bytes(16), 0, b"h", 0).encode()
    from_headers = [
        (SlotHeader(encoded, fragment, 3, size, 9, 6_200, fragment, bytes(16), 1, 2), 0, 5 + fragment)
        for fragment, size in enumerate((3_072, 3_072, 56))
    ]
    whole = recovery._assemble(from_headers[::-1], GEOMETRY)
    assert whole is not None
    assert whole[1] == Record(9, 6_200, 1, 2, (Extent(0, 5, 3),))
    del from_headers[missing]
    assert recovery._assemble(from_headers, GEOMETRY) is None
    assert recovery._assemble([*from_headers, from_headers[0]], GEOMETRY) is None
