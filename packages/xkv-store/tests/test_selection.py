"""What was typed of keys means exactly the objects whose hex forms begin so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xkv_store.contents import HeldObject
from xkv_store.errors import UserError
from xkv_store.key import ObjectKey
from xkv_store.selection import Selection

KEYS = st.builds(
    ObjectKey,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 9),
    st.binary(min_size=1, max_size=32),
    st.integers(0, 9),
)


@given(st.lists(KEYS, min_size=1, max_size=20), st.data())
def test_beginnings_of_any_length(keys: list[ObjectKey], data: st.DataObject) -> None:
    """Half a byte is a beginning, too; what an index is asked for must not leave out what is meant."""
    held = [HeldObject(key.encode(), number, 1, 0) for number, key in enumerate(keys)]
    one = data.draw(st.sampled_from(keys))
    digits = one.encode().hex()[: data.draw(st.integers(1, 110))]
    hash_digits = one.block_hash.hex()[: data.draw(st.integers(1, 64))]
    before = data.draw(st.none() | st.integers(0, 20))
    selection = Selection.parse(
        namespace=None, key=digits, block_hash=data.draw(st.sampled_from([None, hash_digits])), before=before
    )
    asked = [each for each in held if each.key.startswith(selection.prefix)]
    wanted = [
        each
        for each in held
        if each.key.hex().startswith(digits)
        and ObjectKey.decode(each.key).block_hash.hex().startswith(selection.hash_digits)
        and (before is None or each.generation < before)
    ]
    assert list(selection.of(asked)) == wanted


def test_a_namespace_is_meant_whole_only_where_nothing_else_was_said() -> None:
    def parse(namespace: str | None = None, block_hash: str | None = None, before: int | None = None) -> Selection:
        return Selection.parse(namespace=namespace, key=None, block_hash=block_hash, before=before)

    assert parse().is_everything
    assert parse().is_namespaces
    assert parse("3FA9").is_namespaces
    assert parse("3FA9").digits == "3fa9"
    assert not parse("3fa9", block_hash="0").is_namespaces
    assert not parse("3fa9", before=7).is_namespaces
    assert not Selection.parse(namespace=None, key="0" * 33, block_hash=None, before=None).is_namespaces


def test_an_entry_that_is_no_key_is_meant_by_its_digits_alone() -> None:
    held = [HeldObject(b"\xabc", 1, 1, 0)]
    assert list(Selection("ab").of(held)) == held
    assert list(Selection("ab", "0").of(held)) == []


@pytest.mark.parametrize("text", ["", " ", "g", "0x3f", "3f-", "٣"])
def test_what_is_no_hex_form_says_so(text: str) -> None:
    with pytest.raises(UserError, match="--key"):
        Selection.parse(namespace=None, key=text, block_hash=None, before=None)
