"""Identity: whatever makes bytes valid changes the namespace; what does not, does not."""

from typing import Any

import pytest

from xkv_offload.identity import Descriptor, adopt, after_reset
from xkv_store.errors import UserError


def descriptor(
    rank: int = 0, *, weights: str | None = "w", undetermined: tuple[str, ...] = (), **facts: object
) -> Descriptor:
    return Descriptor(rank, {"model": "m", "pages": [1, 2]} | facts, weights if rank == 0 else None, undetermined, {})


def namespace(*descriptors: Descriptor, salt: str = "", engine: str = "e", own: tuple[str, ...] = ()) -> bytes:
    return adopt(
        descriptors=descriptors, world_size=len(descriptors), engine_id=engine, salt=salt, own_because=own
    ).namespace


def test_equal_engines_share_a_namespace_whatever_their_id() -> None:
    assert namespace(descriptor(), engine="a") == namespace(descriptor(), engine="b")


@pytest.mark.parametrize("other", [{"model": "n"}, {"pages": [2, 1]}, {"new": 1}])
def test_any_other_fact_is_another_namespace(other: dict[str, Any]) -> None:
    assert namespace(descriptor(**other)) != namespace(descriptor())


def test_other_weights_or_salt_are_another_namespace() -> None:
    assert namespace(descriptor(weights="v")) != namespace(descriptor())
    assert namespace(descriptor(), salt="x") != namespace(descriptor())


@pytest.mark.parametrize("doubt", [{"own": ("hash",)}, {}])
def test_doubt_makes_the_namespace_this_launchs_own(doubt: dict[str, tuple[str, ...]]) -> None:
    unsure = descriptor() if doubt else descriptor(undetermined=("rope",))
    assert namespace(unsure, engine="a", **doubt) != namespace(unsure, engine="b", **doubt)  # type: ignore[arg-type]
    blind = descriptor(weights=None)
    assert namespace(blind, engine="a") != namespace(blind, engine="b")


def test_a_rank_that_disagrees_is_named_with_the_fact() -> None:
    with pytest.raises(UserError, match=r"rank 1 disagrees with rank 0 about pages"):
        namespace(descriptor(), descriptor(1, pages=[9]))


def test_missing_ranks_are_named() -> None:
    with pytest.raises(UserError, match="from rank 1, 2 of 3"):
        adopt(descriptors=[descriptor()], world_size=3, engine_id="e", salt="", own_because=())


def test_a_descriptor_survives_its_text_and_a_foreign_text_is_an_error() -> None:
    one = descriptor(undetermined=("a",))
    assert Descriptor.from_text(one.text()) == one
    for text in ("", "[]", '{"rank": 0}', '{"rank": "x", "facts": 1}'):
        with pytest.raises(UserError):
            Descriptor.from_text(text)


def test_a_reset_moves_on_and_never_back() -> None:
    first = namespace(descriptor())
    assert len({first, after_reset(first, b"1"), after_reset(first, b"2")}) == 3
