"""Proving a whole card: damage is named, and leaves only if that was asked for."""

from pathlib import Path

import pytest

from xkv_store.card import CardOptions, PutPlan
from xkv_store.errors import UserError
from xkv_store.geometry import DATA_OFFSET
from xkv_store.key import ObjectKey
from xkv_store.testing.cards import CardDriver
from xkv_store.verify import Verified, rebuild, verify

SLOT = 4_096


def key_of(number: int) -> ObjectKey:
    return ObjectKey(bytes(16), 0, number.to_bytes(16, "big"), 0)


@pytest.fixture
def options(tmp_path: Path) -> CardOptions:
    """A card with a sound object of 100 fragments, and a damaged one."""
    options = CardOptions(folder=tmp_path / "card", capacity_bytes=DATA_OFFSET + 150 * SLOT, slot_bytes=SLOT)
    driver = CardDriver(options, ring_slots=100)
    assert isinstance(driver.put(key_of(1), b"a" * 100 * 3_072), PutPlan)
    plan = driver.put(key_of(2), b"b" * 3_000)
    assert isinstance(plan, PutPlan)
    driver.close()
    with (options.folder / "db-0.xkv").open("r+b") as file:
        file.seek(DATA_OFFSET + plan.extents[0].first * SLOT + 2_000)
        file.write(b"x")
    return options


def problems(options: CardOptions, *, drop: bool) -> dict[ObjectKey, str]:
    found = [one for one in verify(options, drop=drop) if isinstance(one, Verified)]
    return {ObjectKey.decode(one.key): one.problem for one in found}


def test_damage_is_named_and_leaves_when_asked(options: CardOptions) -> None:
    for drop in (False, True):
        found = problems(options, drop=drop)
        assert found[key_of(1)] == ""
        assert "checksum" in found[key_of(2)]
    assert problems(options, drop=False) == {key_of(1): ""}


def test_a_rebuild_finds_all_sound_headers(options: CardOptions) -> None:
    assert rebuild(options)["objects"] == 2
    assert set(problems(options, drop=False)) == {key_of(1), key_of(2)}


def test_a_card_in_use_is_left_alone(options: CardOptions) -> None:
    driver = CardDriver(options)
    with pytest.raises(UserError, match="in use"):
        problems(options, drop=True)
    driver.close()


def test_stopping_half_way_lets_go_of_the_card(options: CardOptions) -> None:
    run = verify(options, drop=False)
    next(run)
    run.close()
    CardDriver(options).close()
